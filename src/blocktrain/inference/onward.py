"""The links to next stages that a stage opens for one of its guests.

Every guest has its own: what two gateways say never meets on one link, so that neither can speak in
the other's sessions, each has its fair turn at every stage, and all that a gateway has caused along
a route ends with its link.

Each link is measured, since nobody else can see how long it takes: a ping goes ahead of what is
carried, now and then, so that it never waits behind a long body of its own.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from blocktrain.errors import Unreachable
from blocktrain.inference.links import (
    BROKEN,
    Link,
    Trust,
    dial,
    new_name,
    refuse_other_protocol,
)
from blocktrain.wire.messages import Message
from blocktrain.wire.serving import Ping, Place, Pong, Trouble, Welcome

MAX_ONWARD = 16  # next stages of one guest; the one unused for longest is let go
PING_EVERY = 0.5  # seconds, while anything is carried
RECENT = 8  # round trips, of which the shortest is believed: a busy host only adds to it


class Pulse:
    """How long a link takes there and back. One question is open at a time."""

    def __init__(self) -> None:
        self._number, self._asked, self._open = 0, time.monotonic(), True  # the greeting is one
        self._seen: deque[float] = deque(maxlen=RECENT)

    def ping(self) -> Ping | None:
        """What to ask now, if it is time to."""
        now = time.monotonic()
        if self._open or now - self._asked < PING_EVERY:
            return None
        self._number, self._asked, self._open = self._number + 1, now, True
        return Ping(self._number)

    def heard(self, number: int) -> None:
        """The answer, if that is what was asked last."""
        if self._open and number == self._number:
            self._open = False
            self._seen.append(time.monotonic() - self._asked)

    @property
    def milliseconds(self) -> float | None:
        """There and back; None if nothing was answered yet."""
        return round(1000 * min(self._seen), 3) if self._seen else None


class Opened(NamedTuple):
    """A link, and how long it takes."""

    link: Link
    pulse: Pulse


class Onward:
    """One guest's links, opened when first needed."""

    def __init__(
        self, trust: Trust, troubled: Callable[[Trouble], None], lost: Callable[[Place], None]
    ) -> None:
        self._trust, self._troubled, self._lost = trust, troubled, lost
        self._links: dict[Place, asyncio.Task[Opened]] = {}
        self._closed = False
        self._hearing: set[asyncio.Task[None]] = set()

    async def carry(self, place: Place, said: Message, body: bytes) -> None:
        """Passes something on, or raises Unreachable."""
        link, pulse = await self._link(place)
        try:
            if ping := pulse.ping():
                link.say(ping)
            await link.carry(said, body)
        except OSError as error:
            raise Unreachable(f"The next stage hung up ({error}); try another one.") from None

    def tell(self, place: Place, said: Message) -> None:
        """Says something short, if the link is open."""
        if opened := self._opened(place):
            opened.link.say(said)

    def round_trip_ms(self, place: Place) -> float | None:
        """To that place and back, as far as it was measured."""
        opened = self._opened(place)
        return opened.pulse.milliseconds if opened else None

    def leave(self, banned: frozenset[str]) -> None:
        """Ends the links to these stages; new ones are refused by `dial`."""
        for place in self._links:
            if place.stage in banned and (opened := self._opened(place)):
                opened.link.abort()

    async def close(self) -> None:
        """Ends all links; what comes over them is heard no more."""
        self._closed = True
        tasks = [*self._links.values(), *self._hearing]
        self._links.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _opened(self, place: Place) -> Opened | None:
        """The link to that place, if it is open."""
        task = self._links.get(place)
        if task and task.done() and not task.cancelled() and not task.exception():
            return task.result()
        return None

    async def _link(self, place: Place) -> Opened:
        """The open link to that place; a new one if there is none."""
        task = self._links.pop(place, None)
        if self._closed:
            raise Unreachable("Whoever asked has hung up; nothing goes on for him.")
        if task is None:
            task = asyncio.create_task(self._open(place))
            if len(self._links) >= MAX_ONWARD:
                self._let_go(next(iter(self._links)))
        self._links[place] = task  # the newest is at the end
        return await asyncio.shield(task)  # several may wait for it

    async def _open(self, place: Place) -> Opened:
        try:
            name = new_name(self._trust.id)
            link = await dial(self._trust, name, place.host, place.port, place.stage)
        except BROKEN:
            self._links.pop(place, None)
            raise
        opened = Opened(link, Pulse())
        hearing = asyncio.create_task(self._hear(place, opened))
        self._hearing.add(hearing)
        hearing.add_done_callback(self._hearing.discard)
        return opened

    def _let_go(self, place: Place) -> None:
        if opened := self._opened(place):
            opened.link.close()
        self._links.pop(place).cancel()

    async def _hear(self, place: Place, opened: Opened) -> None:
        """Until the link ends: nothing but a welcome, pongs and troubles should come."""
        link, pulse = opened
        try:
            with suppress(*BROKEN):
                while head := await link.hear():
                    await link.skip(head, 0)
                    match head.said:
                        case Welcome(protocol=protocol):
                            refuse_other_protocol(protocol, "stage")
                            pulse.heard(0)
                        case Pong(number=number):
                            pulse.heard(number)
                        case Trouble():
                            self._troubled(head.said)
                        case _:
                            break
        finally:
            link.abort()  # with all that it is for: nothing is left to be said
            if self._opened(place) is opened:
                del self._links[place]
            await link.closed()
        self._lost(place)
