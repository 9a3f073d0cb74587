"""Stages put together to the whole model: routes, and texts that outlive the hosts they run on.

    Pipeline          knows the stages and chooses routes
    PipelineSession   one text: when a stage is lost it gives the whole text to another, and goes on

A text keeps to its route, whose stages remember it. When one is lost, the text moves to a route of
replicas (equal `Holding`s) under a new secret: the whole context is given once more, in one
traversal that also is the one that was lost. By the numeric contract (method.md, section 5) the
text comes out the same, and drafts never change it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from blocktrain.errors import BadInput, Unreachable
from blocktrain.inference import routes
from blocktrain.inference.links import Trust, new_name
from blocktrain.inference.measures import UNSEEN_STEP
from blocktrain.inference.reach import Reach, Reached, Source
from blocktrain.inference.routes import Candidate
from blocktrain.inference.session import Asked, Said, Watch
from blocktrain.inference.traversals import Arrived, Lost, Route, Traversals
from blocktrain.learning.model import VOCABULARY, Shape
from blocktrain.terms import Digest
from blocktrain.wire.serving import MAX_TOKENS, USUAL, Choice, Codec, Emit, Forget, Holding, Step
from blocktrain.wire.tls import Papers

__all__ = ["Pipeline", "PipelineSession", "Source", "StageReport"]

PATIENCE = 2.0  # seconds for which a text waits for a missing stage before it is given up
ATTEMPTS = 6  # routes that are tried for one traversal
LONGER = 3.0  # times as patient, after a traversal that may only have been slow
AVOID = 5.0  # seconds for which a stage that failed is used only if nobody else is there
FEEL_EVERY = 15.0  # seconds between two looks along the best route
FEELERS = 16  # times that routes are felt along before the best one is believed


@dataclass(frozen=True)
class StageReport:
    """A stage as the gateway sees it."""

    stage: str
    address: str
    first: int
    last: int
    weights: str
    rtt_ms: float
    sessions: int
    room: int
    queued: int
    step_ms: float | None
    """For a small step; None if none was seen."""
    silent: float
    """Seconds since it last said anything."""
    model: str = ""
    """Its digest: stages of different models form no route."""
    onward_ms: dict[str, float] = field(default_factory=dict)
    """To other stages and back, as it has measured them itself, by their ids."""


class Pipeline:
    """Use it as `async with Pipeline(...) as pipeline`, and then `await pipeline.session()`."""

    def __init__(
        self, shape: Shape, model: Digest, papers: Papers, authority_pem: bytes, source: Source
    ) -> None:
        self.shape = shape
        self._trust = Trust(papers, authority_pem)
        self.name = new_name(self._trust.id)
        self.traversals = Traversals(shape)
        self._reach = Reach(self._trust, self.name, model, source)
        self._feeling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reach.begin(self.traversals)
        self._feeling = asyncio.create_task(self._feel())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._feeling:
            self._feeling.cancel()
            await asyncio.gather(self._feeling, return_exceptions=True)
        await self._reach.close()

    @property
    def model(self) -> Digest:
        """The one that texts are written with, once its stages cover every block."""
        return self._reach.models[0]

    def follow(self, model: Digest) -> None:
        """Another model of the same shape. Until it is covered, new texts go to the one before.

        Texts in the making stay with theirs for as long as its stages do.
        """
        if model != self.model:
            self._reach.models = [model, self.model]

    def renew(self) -> None:
        """Reads its papers again, for all links that are opened from now on."""
        self._trust.renew()

    def ban(self, members: Collection[str]) -> None:
        """Texts go through none of these any more; those that do are replayed by others."""
        self._reach.ban(members)

    async def session(self, codec: Codec = USUAL) -> "PipelineSession":
        """A new text, on the route that is best now; Unreachable if there is none."""
        return PipelineSession(self, codec, await self.route())

    def report(self) -> list[StageReport]:
        """Every stage that is there, in the order of blocks."""
        now = time.monotonic()
        stages = sorted(
            self._reach.stages.values(),
            key=lambda s: (s.holding.first, s.holding.last, s.id),
        )
        return [
            StageReport(
                stage=stage.id,
                address=f"{stage.place.host}:{stage.place.port}",
                first=stage.holding.first,
                last=stage.holding.last,
                weights=stage.holding.weights,
                rtt_ms=1000 * stage.rtt,
                sessions=stage.sessions,
                room=stage.room,
                queued=stage.queued,
                step_ms=None if stage.speed.small is None else 1000 * stage.speed.small,
                silent=now - stage.heard,
                model=stage.holding.model,
                onward_ms=self.traversals.ways.onward(stage.id),
            )
            for stage in stages
        ]

    @property
    def troubles(self) -> list[str]:
        """Why stages that were named cannot be used, one sentence each."""
        return sorted(self._reach.troubles.values())

    async def route(self, pinned: list[Holding] | None = None) -> Route:
        """The best route now; waits a little for a stage that is missing."""
        end = time.monotonic() + PATIENCE
        while True:
            changed = self._reach.changed
            try:
                return self._best(pinned)
            except Unreachable:
                left = end - time.monotonic()
                if left <= 0:
                    raise
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await changed.wait()

    def _best(self, pinned: list[Holding] | None = None) -> Route:
        now, stages, ways = time.monotonic(), self._reach.stages, self.traversals.ways

        def trip(source: Candidate, target: Candidate) -> float:
            return ways.hope(source.id, target.id, (source.rtt, target.rtt))

        seen = {s.holding: s.speed.seconds(1) for s in stages.values() if s.speed.seen}
        candidates = [
            Candidate(
                place=stage.place,
                holding=stage.holding,
                rtt=stage.rtt,
                # A newcomer is taken to be as quick as its replicas, else it would never be tried.
                seconds=stage.speed.seconds(1, seen.get(stage.holding, UNSEEN_STEP)),
                load=stage.carries + stage.others,
                avoided=stage.avoided > now or stage.room == 0,
            )
            for stage in stages.values()
        ]

        def best(model: Digest) -> Route:
            of_model = [c for c in candidates if c.holding.model == model]
            chosen = routes.best(of_model, self.shape.blocks, trip, pinned)
            return Route([stages[candidate.id] for candidate in chosen])

        newest, *before = [pinned[0].model] if pinned else self._reach.models
        try:
            return best(newest)
        except Unreachable:
            for model in before:
                with suppress(Unreachable):
                    return best(model)
            raise

    async def _feel(self) -> None:
        """Feels along routes: so their links are open and their times known before a text comes.

        The best route is the one that could be best; once its ways were seen, another may be it.
        """
        while True:
            changed = self._reach.changed
            with suppress(Unreachable, BadInput, Lost):
                for _ in range(FEELERS):
                    route = self._best()
                    known = self.traversals.seen(route)
                    step = new_step(self, route, 0, Asked(0, [], 0), "fp32")
                    await self.traversals.make(route, step)
                    if known:
                        break
            with suppress(TimeoutError):
                async with asyncio.timeout(FEEL_EVERY):
                    await changed.wait()


class PipelineSession:
    """One text over stages (a `Session`), on a route that is replaced when it breaks."""

    def __init__(self, pipeline: Pipeline, codec: Codec, route: Route) -> None:
        self._pipeline, self._codec = pipeline, codec
        self._context: list[int] = []
        """All tokens that the stages have been given, drafts included."""
        self._number = 0
        self._longer = 1.0
        """How much more patient it has become with stages that may only be slow."""
        self._route: Route | None = None
        self.holdings = route.holdings
        """What the text is computed by. Another text by equal ones comes out the same."""
        self._use(route)

    @property
    def shape(self) -> Shape:
        """Of the model."""
        return self._pipeline.shape

    async def step(self, asked: Asked) -> Said:
        """One traversal. `start` 0 begins a new context; a smaller start than before goes back."""
        if not asked.tokens or asked.start > len(self._context):
            raise BadInput(
                f"A step must bring tokens from position {len(self._context)} or before on."
            )
        whole = self._context[: asked.start] + asked.tokens
        said = await self._insist(lambda route: self._step(route, asked, whole))
        self._context = whole + said.drafted
        return said

    async def emit(
        self, tokens: list[int], span: tuple[int, int], choice: Choice, watch: Watch | None = None
    ) -> Said:
        """One traversal that finds every byte of a span (denoise models only)."""

        async def traversal(route: Route) -> Said:
            self._number += 1
            emit = Emit(
                session=route.secret,
                number=self._number,
                gateway=self._pipeline.name,
                route=route.onward,
                tokens=tokens,
                span=span,
                choice=choice,
                codec=self._codec,
                watch=watch is not None,
                hops=[],
            )
            make = self._pipeline.traversals.make
            said = said_by(await make(route, emit, watch, self._longer))
            if watch:
                watch(route.ids[-1], said.bytes)
            return said

        return await self._insist(traversal)

    async def close(self) -> None:
        """Lets every stage forget this text."""
        self._give_up()

    async def _step(self, route: Route, asked: Asked, whole: list[int]) -> Said:
        """What was asked, and on a new route all that came before."""
        start, moved = 0 if route.fresh else asked.start, 0
        while start < len(whole):
            count = (len(whole) - start - 1) % MAX_TOKENS + 1  # more than fits goes in pieces
            last = start + count == len(whole)
            part = replace(asked, start=start, tokens=whole[start : start + count])
            if not last:
                part = replace(part, wanted=0, draft=0, choice=None)
            self._number += 1
            step = new_step(self._pipeline, route, self._number, part, self._codec)
            arrived = await self._pipeline.traversals.make(route, step, longer=self._longer)
            moved += arrived.moved
            start += count
        return replace(said_by(arrived), sent=moved)

    async def _insist(self, traversal: Callable[[Route], Awaitable[Said]]) -> Said:
        """Makes a traversal; when it is lost, on another route, and again.

        Whoever was on two lost routes is avoided from then on, whomever anybody blamed: a stage
        that forgets a text which it was just given whole lies, and a liar blames others.
        """
        begun, replayed, why = time.monotonic(), 0, ""
        suspects: set[Reached] = set()
        refused: BadInput | None = None
        for attempt in range(ATTEMPTS):
            try:
                if self._route is None:
                    self._use(await self._pipeline.route(self.holdings))
                assert self._route
                said = await traversal(self._route)
                return replace(said, seconds=time.monotonic() - begun, replayed=replayed)
            except Lost as lost:
                why = str(lost)
                if refused and lost.refused:  # twice: so it is the step, not the stage
                    raise refused from None
                refused = lost.refused or refused
                self._longer *= LONGER if lost.slow else 1.0
                gone_through = set(self._route.stages if self._route else ())
                for stage in {*lost.stages, *(suspects & gone_through)}:
                    stage.avoided = time.monotonic() + AVOID
                suspects |= gone_through
                self._give_up()
                replayed += 1
                await asyncio.sleep(lost.pause * 2**attempt)
        raise Unreachable(f"{ATTEMPTS} routes failed, at last because {why}; try again later.")

    def _use(self, route: Route) -> None:
        self._route = route
        for stage in route.stages:
            stage.carries += 1

    def _give_up(self) -> None:
        """Leaves the route; its stages need not remember the text."""
        if self._route is None:
            return
        for stage in self._route.stages:
            stage.carries -= 1
        self._route.stages[0].link.say(Forget(self._route.secret))
        self._route = None


def new_step(pipeline: Pipeline, route: Route, number: int, asked: Asked, codec: Codec) -> Step:
    """What is asked, as the first stage gets it."""
    return Step(
        session=route.secret,
        number=number,
        gateway=pipeline.name,
        route=route.onward,
        start=asked.start,
        tokens=asked.tokens,
        wanted=asked.wanted,
        draft=asked.draft,
        codec=codec,
        choice=asked.choice,
        hops=[],
    )


def said_by(arrived: Arrived) -> Said:
    """An answer as decoding wants it."""
    answer, rows = arrived.answer, None
    if arrived.body:
        rows = np.frombuffer(arrived.body, "<f4").astype(np.float32).reshape(-1, VOCABULARY)
    return Said(
        drafted=answer.drafted,
        bytes=answer.bytes,
        logs=answer.logs,
        probabilities=rows,
        hops=answer.hops,
        sent=arrived.moved,
    )
