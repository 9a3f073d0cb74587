"""A stage: a TCP server that holds a span of blocks and takes texts through them.

The event loop hears, answers pings and passes on; torch computes in one thread (inference/desk.py).
Whoever opens a link is a guest, be it a gateway or the stage before; what guests may use is bounded
by `Limits`.
"""

import asyncio
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from blocktrain.errors import BadInput, NotAllowed, OtherProtocol, Unreachable
from blocktrain.inference.desk import NO_MORE_THAN, Desk, Guest, Limits
from blocktrain.inference.door import Door
from blocktrain.inference.links import (
    BROKEN,
    HANDSHAKE,
    NO_MEMBER,
    Link,
    Trust,
    is_name_of,
    refuse_other_protocol,
)
from blocktrain.inference.work import Blocks
from blocktrain.wire.frame import Head
from blocktrain.wire.serving import (
    SERVING_PROTOCOL,
    Emit,
    Forget,
    Greeting,
    Ping,
    Pong,
    Step,
    Welcome,
)
from blocktrain.wire.tls import Papers

__all__ = ["Limits", "Report", "Stage"]


@dataclass(frozen=True)
class Report:
    """What is going on in a stage."""

    links: int
    sessions: int
    room: int
    queued: int
    steps: int
    """Computed since it is up."""
    computed: float
    """Seconds."""
    refused: dict[str, int]
    """How often anybody was refused something, by reason."""


class Stage:
    """Use it as `async with Stage(...) as stage`, and then `await stage.closed()`."""

    def __init__(
        self,
        blocks: Blocks,
        papers: Papers,
        authority_pem: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits = NO_MORE_THAN,
    ) -> None:
        self._trust = Trust(papers, authority_pem)
        self._blocks, self._address, self._limits = blocks, (host, port), limits
        self._links: Counter[str] = Counter()
        """By peer."""
        self._guests: set[Guest] = set()
        self._number = 0
        self._ended = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._door = Door(self._trust, *self._address, self._receive)
        self._desk = Desk(self.id, self._blocks, self._limits)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def id(self) -> str:
        """Who this stage is."""
        return self._trust.id

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._door.port

    @property
    def sessions(self) -> int:
        """Texts that are remembered now."""
        return len(self._desk.rooms)

    @property
    def room(self) -> int:
        """Texts that still fit."""
        return 0 if self._desk.leaving else self._desk.rooms.free

    def report(self) -> Report:
        """What is going on here, for pages and metrics."""
        return Report(
            links=self._links.total(),
            sessions=self.sessions,
            room=self.room,
            queued=self._desk.queued,
            steps=self._desk.steps,
            computed=self._desk.computed,
            refused=dict(self._desk.refused + self._door.refused),
        )

    def renew(self) -> None:
        """Reads its papers again, for all links that are opened from now on."""
        self._trust.renew()

    def ban(self, members: Collection[str]) -> None:
        """None of these gets a link any more, nor keeps one, to here or from here."""
        self._trust.banned = banned = frozenset(members)
        for guest in self._guests:
            if guest.link.peer in banned and guest.link.open:
                self._desk.refused["banned"] += 1
                guest.link.refuse(NO_MEMBER)
            guest.onward.leave(banned)

    async def closed(self) -> None:
        """Until somebody closes this stage."""
        await self._ended.wait()

    async def leave(self, within: float = 5.0) -> None:
        """Takes no new texts, lets the present ones end for so long, finishes steps, and closes."""
        self._desk.leaving = True
        self._door.shut()
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self._desk.rooms:
                    await asyncio.sleep(0.02)
        self._desk.shut = True
        while not self._desk.idle:
            await asyncio.sleep(0.02)
        await self.close()

    async def close(self) -> None:
        """Ends everything now."""
        if not self._ended.is_set():
            self._ended.set()
            await self._door.close()
            await self._desk.close()

    async def _receive(self, link: Link) -> None:
        """A link from its greeting to its end."""
        try:
            guest = await self._greet(link)
            try:
                while link.open and (head := await link.hear()):
                    await self._hear(guest, head)
                    await asyncio.sleep(0)  # one message each: who says much holds nobody up
            finally:
                await self._part(guest)
        except (BadInput, NotAllowed, OtherProtocol) as error:
            self._desk.refused[type(error).__name__] += 1
            link.refuse(str(error))
        except BROKEN:
            pass  # there is nobody to tell

    async def _greet(self, link: Link) -> Guest:
        """Lets somebody in, or raises."""
        async with asyncio.timeout(HANDSHAKE):
            head = await link.hear()
        if head is None:
            raise Unreachable("Whoever came has gone again; nothing is to be done.")
        if link.peer is None:
            raise NotAllowed("These papers are no member's; show those that the run gave you.")
        if not isinstance(head.said, Greeting):
            raise BadInput("A greeting must come first.")
        await link.skip(head, 0)
        if link.peer in self._trust.banned:
            raise NotAllowed(NO_MEMBER)
        refuse_other_protocol(head.said.protocol, "gateway")
        if not is_name_of(head.said.name, link.peer):
            raise NotAllowed("This name is somebody else's; greet under your own.")
        if self._links[link.peer] >= self._limits.links_per_peer:
            raise NotAllowed(f"You have {self._links[link.peer]} links here; close some first.")
        if self._links.total() >= self._limits.links:
            raise NotAllowed("There is no room for one more link; try another stage.")
        self._number += 1
        self._links[link.peer] += 1
        link.name = head.said.name
        guest = Guest(link, (link.peer, str(self._number)), self._trust, self._desk)
        self._guests.add(guest)
        self._desk.guests[link.name] = guest  # the newest, if a gateway comes back under its name
        link.say(Welcome(SERVING_PROTOCOL, self._blocks.holding, self.sessions, self.room))
        return guest

    async def _part(self, guest: Guest) -> None:
        """The link of a guest has ended."""
        peer = guest.path[0]
        self._guests.discard(guest)
        self._links[peer] -= 1
        last = not self._links[peer]
        if last:
            del self._links[peer]
        await self._desk.part(guest, last)

    async def _hear(self, guest: Guest, head: Head) -> None:
        """One message of a guest."""
        match head.said:
            case Ping(number):
                await guest.link.skip(head, 0)
                guest.link.say(Pong(number, self.sessions, self.room, self._desk.queued))
            case Forget(secret):
                await guest.link.skip(head, 0)
                self._desk.forget(guest, secret)
            case Step() | Emit():
                await self._desk.take(guest, head, head.said)
            case _:
                raise BadInput("A stage must be asked, not told.")
