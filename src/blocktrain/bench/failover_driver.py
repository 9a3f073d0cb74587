"""Whoever asks for texts in `bench failover`: one process on a host of its own, over a pipeline.

Reads an Order as the first line of standard input. Says in lines of JSON how long texts take that
nobody disturbs (Plain), when which stage is to be ended (Due), and what became of the text (Hurt);
then waits for a line that says that the stage was started again.
"""

import asyncio
import sys
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from blocktrain.bench.wan_driver import READY, Job, over, pieces
from blocktrain.console import print_json
from blocktrain.errors import Unreachable
from blocktrain.inference import decode
from blocktrain.inference.pipeline import Pipeline
from blocktrain.inference.session import Asked, Session
from blocktrain.learning.files import read_manifest
from blocktrain.learning.model import START
from blocktrain.services.papers import member_in
from blocktrain.wire.serving import Hop

How = Literal["killed", "silent"]
TIMES = 3  # that what nobody disturbs is timed; the median counts
WARM_UP = 8  # bytes before each text that counts: a stage that was started again has a cold start


class Case(msgspec.Struct, frozen=True):
    """A text in the middle of which a stage ends."""

    job: Job
    how: How
    stage: int
    """Which of the route, from 0."""


class Order(msgspec.Struct, frozen=True):
    """What to ask, and whom."""

    papers: str
    model: str
    places: list[str]
    prompt: bytes
    jobs: list[Job]
    hows: list[How]
    stages: list[int]

    def cases(self, job: Job) -> list[Case]:
        """All ways in which this text is disturbed."""
        return [Case(job, how, stage) for how in self.hows for stage in self.stages]


class Plain(msgspec.Struct, frozen=True, tag="plain"):
    """A text that nobody disturbed."""

    job: Job
    text: bytes
    seconds: float
    traversal: float
    """Seconds of one of its traversals."""
    again: float
    """Seconds by which a traversal with half of the text takes longer than one with a byte."""


class Due(msgspec.Struct, frozen=True, tag="due"):
    """Now is the middle of a text: this stage is to be ended."""

    stage: str


class Hurt(msgspec.Struct, frozen=True, tag="hurt"):
    """What became of a text in whose middle a stage ended."""

    case: Case
    text: bytes
    seconds: float
    replays: int
    wasted: float
    """Seconds that the traversal had been under way in vain when the stage was ended."""
    stalled: float
    """Seconds that it took after all, the replay included."""


async def obey(order: Order) -> None:
    """Every text, one after another."""
    manifest = read_manifest(Path(order.model))
    member = member_in(Path(order.papers))
    async with Pipeline(manifest.shape, manifest.digest, *member, order.places) as pipeline:
        for job in order.jobs:
            await warm(pipeline, order, job)
            undisturbed = await plain(pipeline, order, job)
            print_json(msgspec.to_builtins(undisturbed))
            for case in order.cases(job):
                await warm(pipeline, order, job)
                hurt = await disturbed(pipeline, case, order.prompt, undisturbed.seconds / 2)
                print_json(msgspec.to_builtins(hurt))
                await asyncio.to_thread(sys.stdin.readline)


async def warm(pipeline: Pipeline, order: Order, job: Job) -> None:
    """Until all stages are there; then a few bytes, so that links are open as in daily life."""
    end = time.monotonic() + READY
    while len(pipeline.report()) < len(order.places):
        if time.monotonic() > end:
            why = " ".join(pipeline.troubles)
            raise Unreachable(f"Not all stages came within {READY:.0f} s; {why or 'try again.'}")
        await asyncio.sleep(0.05)
    await over(pipeline, msgspec.structs.replace(job, length=WARM_UP), order.prompt)


async def plain(pipeline: Pipeline, order: Order, job: Job) -> Plain:
    """The text undisturbed, and what a stage that comes in its middle has to be told again."""
    made = [await over(pipeline, job, order.prompt) for _ in range(TIMES)]
    context = [START, *order.prompt, *made[0].text[: job.length // 2]]
    context = context[-pipeline.shape.window + 1 :]
    again = 0.0
    if job.mode != "whole":  # whose traversals carry all that they need
        again = median([await told_again(pipeline, job, context) for _ in range(TIMES)])
    seconds = median(each.seconds for each in made)
    traversal = median(each.seconds / each.traversals for each in made)
    return Plain(job, made[0].text, seconds, traversal, max(0.0, again))


async def told_again(pipeline: Pipeline, job: Job, context: list[int]) -> float:
    """Seconds for a whole context in one traversal, beyond those of one for a single byte."""
    session = await pipeline.session()
    try:
        choice = job.sampling.choice(0)
        history = await session.step(Asked(0, context, 1, 0, choice))
        byte = await session.step(Asked(len(context), history.bytes, 1, 0, choice))
        return history.seconds - byte.seconds
    finally:
        await session.close()


@dataclass
class Latest:
    """What is known of a text in the making."""

    hops: list[Hop] = field(default_factory=list)
    came: float = 0.0
    """When its last piece did, or when it was asked for."""
    any: asyncio.Event = field(default_factory=asyncio.Event)


async def disturbed(pipeline: Pipeline, case: Case, prompt: bytes, after: float) -> Hurt:
    """A text, and a stage of its route that ends after so many seconds."""
    latest = Latest()

    async def end_one() -> float:
        await asyncio.sleep(after)
        await latest.any.wait()  # only then is known which stages it goes through
        print_json(msgspec.to_builtins(Due(latest.hops[case.stage].stage)))
        return time.perf_counter()

    session = await pipeline.session()
    ending = asyncio.create_task(end_one())
    try:
        return await listen(session, case, prompt, latest, ending)
    finally:
        ending.cancel()
        with suppress(asyncio.CancelledError):
            await ending
        await session.close()


async def listen(
    session: Session, case: Case, prompt: bytes, latest: Latest, ending: "asyncio.Task[float]"
) -> Hurt:
    """The text to its end, and in which traversal the stage was missed."""
    text, report, begun = b"", decode.Report(), time.perf_counter()
    wasted = stalled = 0.0
    latest.came = begun
    async with aclosing(pieces(session, case.job, prompt)) as coming:
        async for piece in coming:
            now = time.perf_counter()
            if piece.said.replayed and not stalled:
                stalled = piece.said.seconds
                # Less than nothing where the stage ended before: then no work was under way.
                wasted = max(0.0, ending.result() - latest.came) if ending.done() else 0.0
            latest.hops, latest.came = piece.said.hops, now
            latest.any.set()
            report.add(piece)
            text += piece.bytes
    seconds = time.perf_counter() - begun
    return Hurt(case, text, seconds, report.replays, wasted, stalled)


if __name__ == "__main__":
    asyncio.run(obey(msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)))
