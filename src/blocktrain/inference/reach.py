"""A gateway's links to all stages of its models: kept open, measured, and given up when they die.

A link that closes is gone at once; one that leaves UNANSWERED pings without an answer is closed.
Whoever is gone is tried again for as long as the source names it.
"""

import asyncio
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from blocktrain.errors import BadInput, BlockTrainError, NotAllowed, Unreachable
from blocktrain.inference.links import (
    BROKEN,
    HANDSHAKE,
    Link,
    Trust,
    dial,
    refuse_other_protocol,
)
from blocktrain.inference.measures import Speed
from blocktrain.terms import Digest
from blocktrain.wire.frame import Head
from blocktrain.wire.serving import Announce, Holding, Ping, Place, Pong, Refusal, Welcome

PING_EVERY = 0.5  # seconds
UNANSWERED = 3  # pings: 1.5 s of silence, while an honest stage answers even when it computes
RECENT = 8  # round trips: 4 s of them
LOOK_EVERY = 1.0  # seconds between two questions to the source
SOONEST, LATEST = 0.1, 1.0  # seconds until a place that did not answer is tried again
REFUSED = 3.0  # seconds until one is tried again that answered but cannot be used

Source = Callable[[], Awaitable[Sequence[Announce]]] | Sequence[str]
"""Who gives the present stages: something that can be asked, or a fixed list of "host:port"."""


class Target(NamedTuple):
    """Where a stage may be, and who it must be; None: whoever has papers."""

    host: str
    port: int
    stage: str | None = None


@dataclass(eq=False)
class Reached:
    """A stage that there is a link to."""

    link: Link
    place: Place
    holding: Holding
    sessions: int
    room: int
    heard: float
    """When it last said anything."""
    queued: int = 0
    speed: Speed = field(default_factory=Speed)
    carries: int = 0
    """Texts of this gateway that go through it."""
    others: int = 0
    """Texts of other gateways."""
    avoided: float = 0.0
    """Until when others are better."""
    up: bool = True
    pings: dict[int, float] = field(default_factory=dict)
    """Those that wait for an answer, and since when."""
    round_trips: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def id(self) -> str:
        """Who it is."""
        return self.place.stage

    @property
    def rtt(self) -> float:
        """Seconds to it and back: the best of the last few, as a busy host only adds to it."""
        return min(self.round_trips)


class Listener(Protocol):
    """Who wants to know what stages say."""

    async def heard(self, stage: Reached, head: Head) -> None:
        """A stage says something; its body is still to be read."""

    def lost(self, stage: Reached) -> None:
        """The link to a stage has ended."""


class Reach:
    """All stages of some models that can be reached now."""

    def __init__(self, trust: Trust, name: str, model: Digest, source: Source) -> None:
        self._trust, self._name, self._source = trust, name, source
        self.models = [model]
        """Whoever serves another one is left out."""
        self.stages: dict[str, Reached] = {}
        """By id."""
        self.troubles: dict[Target, str] = {}
        """Why those that are named but not reached are not."""
        self.changed = asyncio.Event()
        """Set, and replaced, whenever a stage comes or goes."""
        self._keeping: dict[Target, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._listener: Listener

    def begin(self, listener: Listener) -> None:
        """Starts reaching out."""
        self._listener = listener
        if callable(self._source):
            self._looking = asyncio.create_task(self._look(self._source))
        else:
            self._want({target_of(address) for address in self._source})

    def ban(self, members: Collection[str]) -> None:
        """None of these is reached any more; `dial` refuses them."""
        self._trust.banned = frozenset(members)
        for stage in self.stages.values():
            if stage.id in self._trust.banned:
                stage.link.abort()

    async def close(self) -> None:
        """Ends all links."""
        tasks = [*self._keeping.values(), *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, source: Callable[[], Awaitable[Sequence[Announce]]]) -> None:
        """Asks who is there, again and again; while nobody answers, those known stay."""
        while True:
            with suppress(OSError, BlockTrainError, TimeoutError):
                places = [said.place for said in await source()]
                self._want({Target(p.host, p.port, p.stage) for p in places})
            await asyncio.sleep(LOOK_EVERY)

    def _want(self, targets: set[Target]) -> None:
        """Begins with new places; ends with those that are named no more and do not answer."""
        here = {Target(s.place.host, s.place.port, s.place.stage) for s in self.stages.values()}
        for target in self._keeping.keys() - targets - here:
            self._keeping.pop(target).cancel()
            self.troubles.pop(target, None)
        for target in targets - self._keeping.keys():
            self._keeping[target] = asyncio.create_task(self._keep(target))

    async def _keep(self, target: Target) -> None:
        """Reaches one stage, again and again."""
        pause = SOONEST
        while True:
            try:
                stage = await self._reach(target)
            except Unreachable as error:
                self.troubles[target] = str(error)
            except BROKEN as error:  # it is there but cannot be used: that will not change soon
                self.troubles[target] = str(error)
                pause = REFUSED
            else:
                self.troubles.pop(target, None)
                pause = SOONEST
                await self._live(stage)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LATEST)

    async def _reach(self, target: Target) -> Reached:
        """Opens a link and hears what the stage holds."""
        link = await dial(self._trust, self._name, *target)
        begun = time.monotonic()
        try:
            async with asyncio.timeout(HANDSHAKE):
                head = await link.hear()
            if head is None:
                raise Unreachable(
                    f"{target.host}:{target.port} hung up without a word; it is leaving, or our "
                    "papers are not of its run: check them."
                )
            await link.skip(head, 0)
            match head.said:
                case Welcome(protocol, holding, sessions, room):
                    refuse_other_protocol(protocol, "stage")
                case Refusal(words):
                    raise NotAllowed(words)
                case _:
                    raise BadInput(f"{target.host}:{target.port} is no stage; check the address.")
            assert link.peer is not None
            if holding.model not in self.models or holding.first > holding.last:
                raise BadInput(f"{target.host}:{target.port} serves another model; leave it out.")
            if link.peer in self.stages:
                raise BadInput(f"{target.host}:{target.port} is reached already; name it once.")
        except BaseException:
            link.abort()
            raise
        now = time.monotonic()
        place = Place(link.peer, target.host, target.port)
        stage = Reached(link, place, holding, sessions, room, now)
        stage.round_trips.append(now - begun)
        self.stages[link.peer] = stage
        self._notify()
        return stage

    async def _live(self, stage: Reached) -> None:
        """Hears a stage until its link ends."""
        pinging = asyncio.create_task(self._ping(stage))
        try:
            with suppress(*BROKEN):
                while head := await stage.link.hear():
                    stage.heard = time.monotonic()
                    if isinstance(head.said, Pong):
                        await stage.link.skip(head, 0)
                        self._pong(stage, head.said)
                    else:
                        await self._listener.heard(stage, head)
        finally:
            stage.up = False
            del self.stages[stage.id]
            stage.link.abort()
            pinging.cancel()
            self._listener.lost(stage)
            self._notify()
            await asyncio.gather(pinging, return_exceptions=True)
            await stage.link.closed()

    async def _ping(self, stage: Reached) -> None:
        """Asks whether it is there. Counting pings, not seconds, forgives a pause of our own."""
        number = 0
        while len(stage.pings) < UNANSWERED:
            number += 1
            stage.pings[number] = time.monotonic()
            stage.link.say(Ping(number))
            await asyncio.sleep(PING_EVERY)
        stage.link.abort()

    def _pong(self, stage: Reached, said: Pong) -> None:
        """Learns from an answer."""
        asked = stage.pings.pop(said.number, None)
        if asked is not None:
            stage.round_trips.append(stage.heard - asked)
        stage.sessions, stage.room, stage.queued = said.sessions, said.room, said.queued
        stage.others = max(0, said.sessions - stage.carries)

    def _notify(self) -> None:
        """Wakes whoever waits for a change."""
        self.changed.set()
        self.changed = asyncio.Event()


def target_of(address: str) -> Target:
    """A "host:port" as people write it; IPv6 in brackets."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+)):(\d{1,5})", address)
    if not found or not 0 < int(found[3]) < 65536:
        raise BadInput(f"{address!r} is no stage's address; write host:port.")
    return Target(found[1] or found[2], int(found[3]))
