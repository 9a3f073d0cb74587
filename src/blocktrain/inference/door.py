"""A stage's door: members of the run come in, strangers cost little and hold nobody up.

A stranger can do no more than knock: open a connection and begin, or not even begin, a handshake.
At most MAX_KNOCKING do so at once. When one more comes, the oldest of the address with the most of
them has to go: whoever floods the door is in nobody's way but his own. Who says nothing costs a
socket only; the memory of TLS, of which asyncio takes 256 KiB for a link, waits for the first byte.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable

from blocktrain.errors import Unreachable
from blocktrain.inference.links import HANDSHAKE, READ_AHEAD, SHUTDOWN, Link, Trust

MAX_KNOCKING = 64
BACKLOG = 128
NO_FILES = 0.1  # seconds until the next try where the system has no descriptor left

Welcome = Callable[[Link], Awaitable[None]]


class Door:
    """Listens, and gives every member's link to `welcome`, whose end is the link's end."""

    def __init__(self, trust: Trust, host: str, port: int, welcome: Welcome) -> None:
        self._trust, self._welcome = trust, welcome
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        """Where it listens, or did."""
        self._knocking: dict[asyncio.Task[None], str] = {}
        """Whose handshakes go on, and from where; the oldest first."""
        self._inside: set[asyncio.Task[None]] = set()
        self.refused: Counter[str] = Counter()
        """How many did not come in, by reason. They themselves learn nothing."""
        self._accepting = asyncio.create_task(self._accept())

    def shut(self) -> None:
        """Nobody comes in any more; those inside stay."""
        self._accepting.cancel()
        self._listener.close()

    async def close(self) -> None:
        """Sends everybody away."""
        self.shut()
        tasks = [self._accepting, *self._knocking, *self._inside]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._listener)
            except OSError:  # whoever knocked is gone again, or there are too many open files
                await asyncio.sleep(NO_FILES)
                continue
            self._make_room()
            task = asyncio.create_task(self._admit(sock))
            self._knocking[task] = address[0]
            task.add_done_callback(self._gone)

    def _gone(self, task: asyncio.Task[None]) -> None:
        self._knocking.pop(task, None)
        self._inside.discard(task)

    def _make_room(self) -> None:
        """Lets one of those who knock go, where there are too many."""
        if len(self._knocking) >= MAX_KNOCKING:
            [(crowd, _)] = Counter(self._knocking.values()).most_common(1)
            oldest = next(task for task, address in self._knocking.items() if address == crowd)
            del self._knocking[oldest]
            oldest.cancel()
            self.refused["stranger: a crowd at the door"] += 1

    async def _admit(self, sock: socket.socket) -> None:
        """The handshake; and then whatever goes on inside."""
        task = asyncio.current_task()
        assert task
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(READ_AHEAD, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            async with asyncio.timeout(HANDSHAKE):
                await first_byte(sock)
                transport, _ = await loop.connect_accepted_socket(
                    lambda: protocol,
                    sock,
                    ssl=self._trust.serving,
                    ssl_shutdown_timeout=SHUTDOWN,
                )
        except OSError as error:  # no papers, other papers, too slow, or no TLS at all
            reason = getattr(error, "reason", None) or type(error).__name__
            self.refused[f"stranger: {reason}".lower().replace("_", " ")] += 1
            return
        link = Link(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        if self._knocking.pop(task, None) is None:  # there was no room just now
            link.abort()
            return
        self._inside.add(task)
        try:
            await self._welcome(link)
        finally:
            if task.cancelling():
                link.abort()
            link.close()  # politely: the last words are still to go out
            await link.closed()


async def first_byte(sock: socket.socket) -> None:
    """Until somebody says something, or hangs up. The socket is closed if we cannot wait for it."""
    loop, said = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, said.set)
    try:
        await said.wait()
    except BaseException:
        loop.remove_reader(sock)
        sock.close()
        raise
    loop.remove_reader(sock)


def listen(host: str, port: int) -> socket.socket:
    """A socket that waits; port 0 is any free one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise Unreachable(
            f"Nobody can be waited for at {host}:{port} ({error.strerror}); choose another port."
        ) from None
    listener.setblocking(False)
    return listener
