"""Links between gateways and stages: TLS 1.3 both ways, frames in order, nothing unbounded.

Whoever opens a link greets with a *name*. A name is made for one peer, and everybody can see for
whom: its second half is a digest of the first half and of the peer's id. So a step that asks for
its answer under somebody else's name is refused by the first stage that sees it, and nobody can
wait for another's answers, even one who has seen the name.

Socket buffers are left to the system: it lets them grow to 32 MB here, a fixed size only to 4 MB,
and 100 Mbit/s at 100 ms need 1.25 MB.
"""

import asyncio
import hashlib
import secrets
import socket
import ssl
from contextlib import suppress
from typing import Literal

from blocktrain.errors import BadKey, BlockTrainError, NotAllowed, OtherProtocol, Unreachable
from blocktrain.wire import frame
from blocktrain.wire.frame import Head
from blocktrain.wire.messages import Message
from blocktrain.wire.serving import SERVING_PROTOCOL, Greeting, Refusal
from blocktrain.wire.signing import load_key
from blocktrain.wire.tls import Papers, client_context, member_host, peer_id, server_context

HANDSHAKE = 5.0  # seconds for TLS, and again for the greeting
CONNECT = 5.0  # seconds until a place must have answered
SHUTDOWN = 1.0  # seconds for parting politely
READ_AHEAD = 128 * 1024  # bytes; the system holds back the rest while nobody reads
MAX_UNSENT = 4 * 2**20  # bytes of small frames that the other side may leave unread
KEEPALIVE = {  # a host that vanished without a word is noticed within 25 s
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 25_000,
}
NO_MEMBER = "You are banned from this run, or your token is revoked; ask its owner."
BROKEN = (OSError, BlockTrainError)  # what ends a link; ssl.SSLError and TimeoutError are OSErrors


class Trust:
    """Who we are and whom we believe: papers and the run's authority, ready for TLS."""

    def __init__(self, papers: Papers, authority_pem: bytes) -> None:
        self._papers, self._authority_pem = papers, authority_pem
        self.id = load_key(papers.key).id
        self.banned: frozenset[str] = frozenset()
        """Who gets no link, whatever papers he has."""
        self.renew()

    def renew(self) -> None:
        """Reads the papers again. New links show them; those that are open go on as they are."""
        papers, pem = self._papers, self._authority_pem
        if load_key(papers.key).id != self.id:
            raise BadKey(f"{papers.key} is another one than at the start; start again with it.")
        asking_anybody = client_context(pem, papers)
        asking_anybody.check_hostname = False  # the id is not known before, but learned
        self.serving = server_context(*papers, pem, require_clients=True)
        self.asking, self.asking_anybody = client_context(pem, papers), asking_anybody


class Link:
    """An open link to a peer that has proved who it is."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()
        self.name = ""
        """Under which the peer greeted, if it was the one to open the link."""
        proved: ssl.SSLObject = writer.get_extra_info("ssl_object")
        self.peer = peer_id(proved)
        tune(writer.get_extra_info("socket"))

    @property
    def open(self) -> bool:
        """Whether anything can still be said."""
        return not self._writer.transport.is_closing()

    async def hear(self) -> Head | None:
        """The next frame's message; None when the other side has hung up."""
        return await frame.hear(self._reader)

    async def body(self, head: Head, expected: int) -> bytes:
        """The body of that frame."""
        return await frame.body(self._reader, head, expected)

    async def skip(self, head: Head, expected: int) -> None:
        """The same, and nothing is kept."""
        await frame.skip(self._reader, head, expected)

    def say(self, said: Message, body: bytes = b"") -> int:
        """Says something short, at once. Whoever leaves too much unread is cut off."""
        if not self.open:
            return 0
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            self.abort()
            return 0
        return frame.write(self._writer, said, body)

    async def carry(self, said: Message, body: bytes) -> None:
        """Says something that may be long: one after another, as fast as the other side reads."""
        try:
            async with asyncio.timeout(frame.PATIENCE + len(body) / frame.SLOWEST):
                async with self._turn:
                    if not self.open:
                        raise Unreachable("The link is closed; try another stage.")
                    frame.write(self._writer, said, body)
                    await self._writer.drain()
        except TimeoutError:
            self.abort()
            raise Unreachable("The other side does not read; try another stage.") from None

    def refuse(self, why: str) -> None:
        """Says why, and closes."""
        self.say(Refusal(why[:400]))
        self.close()

    def close(self) -> None:
        """Parts politely: what was said still goes out."""
        self._writer.close()

    def abort(self) -> None:
        """Ends the link now."""
        self._writer.transport.abort()

    async def closed(self) -> None:
        """Until nothing is left of the link."""
        with suppress(OSError):
            await self._writer.wait_closed()


def tune(sock: socket.socket) -> None:
    """Sends every frame at once, and lets the system ask whether the other host is still there.

    asyncio does the first for sockets that it opened itself, not for accepted ones: every third
    answer of a last stage waited 40 ms or more, until the one before had been acknowledged.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        if hasattr(socket, option):  # each system has some of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


async def dial(trust: Trust, name: str, host: str, port: int, stage: str | None) -> Link:
    """Opens a link and greets. Whoever answers is `stage`, or any member if that is None."""
    try:
        async with asyncio.timeout(CONNECT):
            reader, writer = await asyncio.open_connection(
                host,
                port,
                ssl=trust.asking if stage else trust.asking_anybody,
                server_hostname=member_host(stage) if stage else None,
                ssl_shutdown_timeout=SHUTDOWN,
                limit=READ_AHEAD,
            )
    except (OSError, ValueError) as error:  # ValueError: a host's name that cannot be
        why = getattr(error, "strerror", None) or type(error).__name__
        raise Unreachable(f"{host}:{port} does not answer ({why}); is its stage up?") from None
    link = Link(reader, writer)
    if link.peer is None:
        link.abort()
        raise NotAllowed(f"Whoever answers at {host}:{port} is no stage; check the address.")
    if link.peer in trust.banned:
        link.abort()
        raise NotAllowed(f"The stage at {host}:{port} is banned from the run; try another one.")
    link.say(Greeting(SERVING_PROTOCOL, name))
    return link


def new_name(peer: str) -> str:
    """A name under which this peer may greet."""
    half = secrets.token_hex(8)
    return half + seal(half, peer)


def is_name_of(name: str, peer: str | None) -> bool:
    """Whether a name was made for this peer."""
    return peer is not None and name[16:] == seal(name[:16], peer)


def seal(half: str, peer: str) -> str:
    """What binds a name to a peer: 64 bits, to be found for one given key and no other."""
    return hashlib.sha256(f"blocktrain name\n{half}\n{peer}".encode()).hexdigest()[:16]


def refuse_other_protocol(theirs: int, who: Literal["gateway", "stage"]) -> None:
    """Raises, naming the side to upgrade, unless both speak the same version."""
    if theirs != SERVING_PROTOCOL:
        older = f"the {who}'s side" if theirs < SERVING_PROTOCOL else "this side"
        raise OtherProtocol(
            f"Serving protocol {theirs} there, {SERVING_PROTOCOL} here; "
            f"upgrade blocktrain on {older}."
        )
