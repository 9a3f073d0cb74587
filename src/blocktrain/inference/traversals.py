"""Traversals on their way through stages: asked at the first, answered by the last.

An answer is believed if it comes on the link to the route's last stage and tells of the route's
stages one by one: each stage puts itself on the list, and the next one checks whom it got it from.
Troubles are believed from the first stage only, by whom they come back.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

from blocktrain.errors import BadInput
from blocktrain.inference.measures import Ways
from blocktrain.inference.reach import Reached
from blocktrain.inference.session import Watch
from blocktrain.inference.work import LOG_BYTES
from blocktrain.learning.model import Shape
from blocktrain.wire.frame import Head
from blocktrain.wire.serving import Answer, Emit, Holding, Place, Sight, Step, Trouble

LOG = logging.getLogger(__name__)
SHORTEST = 1.0  # seconds: no traversal is given up sooner while its stages are there
GENEROUS = 5  # times the forecast, until a traversal is given up
LAST_SIGHT = 0.1  # seconds, and a round trip, for which an answer waits for sights before it
UNSEEN = 10.0  # seconds besides, where a stage has not been seen computing yet


class Lost(Exception):
    """A traversal will not be answered; another route may do better."""

    def __init__(
        self,
        why: str,
        stages: Sequence[Reached] = (),
        pause: float = 0.0,
        slow: bool = False,
        refused: BadInput | None = None,
    ) -> None:
        super().__init__(why)
        self.stages = stages
        """To be avoided for a while."""
        self.pause = pause
        """Seconds to wait before the next try."""
        self.slow = slow
        """Whether it might only have taken longer."""
        self.refused = refused
        """What to say if another stage refuses the step, too."""


@dataclass(eq=False)
class Route:
    """The stages that a text goes through, and the secret under which they remember it."""

    stages: list[Reached]
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    fresh: bool = True
    """Whether nothing has been given to it yet."""

    @property
    def up(self) -> bool:
        """Whether all of its stages are there."""
        return all(stage.up for stage in self.stages)

    @property
    def ids(self) -> list[str]:
        """Who its stages are."""
        return [stage.id for stage in self.stages]

    @property
    def holdings(self) -> list[Holding]:
        """What its stages hold."""
        return [stage.holding for stage in self.stages]

    @property
    def onward(self) -> list[Place]:
        """Where the stages after the first are."""
        return [stage.place for stage in self.stages[1:]]


@dataclass(frozen=True)
class Arrived:
    """The end of a traversal."""

    answer: Answer
    body: bytes
    moved: int = 0
    """Bytes on the wire, of all frames."""


@dataclass(eq=False)
class Waiting:
    """A traversal on its way."""

    route: Route
    said: Step | Emit
    end: asyncio.Future[Arrived]
    watch: Watch | None
    moved: int = 0
    """Bytes on the wire, as far as they are known."""
    sights: dict[str, list[int]] = field(default_factory=dict)
    """What stages said of how the unfinished text looks; they come in any order."""
    to_show: list[str] = field(default_factory=list)
    """Whose sights are still to be shown, in the order of the route."""
    all_shown: asyncio.Event = field(default_factory=asyncio.Event)

    def show(self, all: bool = False) -> None:
        """Shows what is there, in order; at the end also what comes after a missing one."""
        while self.to_show and (all or self.to_show[0] in self.sights):
            stage = self.to_show.pop(0)
            if self.watch and stage in self.sights:
                try:
                    self.watch(stage, self.sights[stage])
                except Exception:  # whoever watches must not cost the link
                    LOG.exception("a watcher failed")
        if not self.to_show:
            self.all_shown.set()


class Traversals:
    """All that are on their way now, and what past ones have taught."""

    def __init__(self, shape: Shape) -> None:
        self.ways = Ways()
        self._shape = shape
        self._waiting: dict[str, Waiting] = {}
        """By secret."""

    async def make(
        self, route: Route, said: Step | Emit, watch: Watch | None = None, longer: float = 1.0
    ) -> Arrived:
        """One traversal from its beginning to its end; or raises Lost, or BadInput.

        `longer` times as much patience is had with it as usual.
        """
        if not route.up:
            raise Lost("a stage of the route has gone")
        route.fresh = False
        end: asyncio.Future[Arrived] = asyncio.get_running_loop().create_future()
        waiting = Waiting(route, said, end, watch, to_show=route.ids[:-1])
        self._waiting[route.secret] = waiting
        begun = time.monotonic()
        try:
            route.stages[0].link.say(said)
            while not end.done():
                # The forecast is made anew each time: load may have grown meanwhile.
                left = begun + longer * self.patience(route, said) - time.monotonic()
                if left <= 0:
                    raise Lost("a traversal took too long", route.stages, slow=True)
                await asyncio.wait([end], timeout=left)
            if watch and waiting.to_show and not end.exception():
                # Sights come over other links than the answer, and so may come after it.
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_SIGHT + max(s.rtt for s in route.stages)):
                        await waiting.all_shown.wait()
                waiting.show(all=True)
        finally:
            del self._waiting[route.secret]
            end.cancel()
        arrived = replace(end.result(), moved=waiting.moved)
        self._learn(route, said, arrived.answer, time.monotonic() - begun)
        return arrived

    def forecast(self, route: Route, said: Step | Emit) -> float:
        """Seconds that a traversal should take, as far as anything is known."""
        first, last, rows = route.stages[0], route.stages[-1], len(said.tokens)
        seconds = (first.rtt + last.rtt) / 2
        for stage in route.stages:
            seconds += stage.speed.seconds(rows) + stage.queued * stage.speed.seconds(1)
        if isinstance(said, Step):
            seconds += said.draft * first.speed.seconds(1)
        for a, b in pairwise(route.stages):
            bytes_ = 4 * rows * self._shape.width
            seconds += self.ways.forecast(a.id, b.id, (a.rtt, b.rtt), bytes_)
        return seconds

    def seen(self, route: Route) -> bool:
        """Whether something has gone along all of its ways."""
        return all(self.ways.way(a, b).latency is not None for a, b in pairwise(route.ids))

    def patience(self, route: Route, said: Step | Emit) -> float:
        """Seconds after which a traversal is given up, though all its stages are there."""
        seen = all(stage.speed.seen for stage in route.stages)
        return SHORTEST + GENEROUS * self.forecast(route, said) + (0.0 if seen else UNSEEN)

    def _learn(self, route: Route, said: Step | Emit, answer: Answer, seconds: float) -> None:
        """Measures stages and ways by what a traversal took."""
        drafted, rows = len(answer.drafted), len(said.tokens)
        between = seconds - (route.stages[0].rtt + route.stages[-1].rtt) / 2
        for number, (stage, hop) in enumerate(zip(route.stages, answer.hops, strict=True)):
            between -= (hop.computed_ms + hop.waited_ms) / 1000
            if not rows:
                continue
            if number == 0:  # which drafts one byte after another
                stage.speed.see(rows, hop.computed_ms / 1000 / (1 + drafted))
            else:
                stage.speed.see(rows + drafted, hop.computed_ms / 1000)
        self.ways.see(answer.hops, between)

    async def heard(self, stage: Reached, head: Head) -> None:
        """What a stage says, other than that it is there."""
        said = head.said
        if not isinstance(said, Answer | Trouble | Sight):
            raise BadInput("A gateway must be answered, not asked.")
        waiting = self._waiting.get(said.session)
        if waiting is None or waiting.said.number != said.number:
            # It comes too late, and nobody waits for it any more.
            await stage.link.skip(head, min(head.body, self._shape.window * LOG_BYTES))
            return
        body = await stage.link.body(head, answer_size(waiting.said, said))
        done = waiting.end.done()
        match said:
            case Answer() if stage is waiting.route.stages[-1] and not done:
                waiting.moved += head.size
                take_answer(waiting, said, body)
            case Trouble() if stage is waiting.route.stages[0] and not done:
                take_trouble(waiting, said)
            case Sight() if said.stage == stage.id and said.stage in waiting.to_show:
                waiting.moved += head.size
                waiting.sights[said.stage] = said.bytes
                waiting.show()

    def lost(self, stage: Reached) -> None:
        """A stage has gone: whatever is on its way through it will not arrive."""
        self.ways.forget(stage.id)
        for waiting in self._waiting.values():
            if stage in waiting.route.stages and not waiting.end.done():
                waiting.end.set_exception(Lost("a stage of the route has gone"))


def answer_size(asked: Step | Emit, said: Answer | Trouble | Sight) -> int:
    """Bytes of the body that must come with what a stage says."""
    if isinstance(said, Answer) and isinstance(asked, Step) and asked.choice is None:
        return asked.wanted * LOG_BYTES
    return 0


def take_answer(waiting: Waiting, said: Answer, body: bytes) -> None:
    """Ends a traversal with its answer, if that is one."""
    asked, route = waiting.said, waiting.route
    if isinstance(asked, Emit):
        drafted, count = 0, asked.span[1] - asked.span[0]
    else:
        drafted = len(said.drafted)
        count = 0 if asked.choice is None else asked.wanted + drafted
    if (
        [hop.stage for hop in said.hops] == route.ids
        and drafted <= getattr(asked, "draft", 0)
        and len(said.bytes) == len(said.logs) == count
    ):
        waiting.moved += sum(hop.received for hop in said.hops)
        waiting.end.set_result(Arrived(said, body))
    elif [hop.stage for hop in said.hops] == route.ids:
        waiting.end.set_exception(Lost("a stage gave no proper answer", route.stages[-1:]))


def take_trouble(waiting: Waiting, said: Trouble) -> None:
    """Ends a traversal that a stage cannot take further."""
    blamed = [stage for stage in waiting.route.stages if stage.id == said.stage]
    if said.reason == "wrong":
        refused = BadInput(f"A stage refuses this step: {said.words}")
        waiting.end.set_exception(Lost("a stage refuses this step", blamed, refused=refused))
    elif said.reason == "forgotten":  # which is no fault: it had to make room for others
        waiting.end.set_exception(Lost("a stage has forgotten the text"))
    else:
        waiting.end.set_exception(Lost(f"a stage is {said.reason}", blamed, pause=0.02))
