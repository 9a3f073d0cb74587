"""Whoever asks for texts in `bench wan`: one process on the first stage's host, over a pipeline.

Reads an Order from standard input, prints each text as a line of JSON, and at last what it has seen
of the hosts, as a file that `blocktrain plan` reads. The first texts are not told: with them links
open, and every stage touches its memory for the first time.
"""

import asyncio
import sys
import time
from contextlib import AsyncExitStack, aclosing
from itertools import pairwise
from pathlib import Path

import msgspec

from blocktrain.console import print_json
from blocktrain.errors import Unreachable
from blocktrain.inference import decode
from blocktrain.inference.choice import Sampling
from blocktrain.inference.layout import GATEWAY, MBIT, Host, Layout, Link
from blocktrain.inference.measures import UNSEEN_RATE
from blocktrain.inference.pipeline import Pipeline
from blocktrain.inference.plan import Mode
from blocktrain.inference.session import Session
from blocktrain.learning.files import read_manifest
from blocktrain.services.papers import member_in
from blocktrain.terms import Digest

WARM_UP = 16  # bytes
READY = 30.0  # seconds until every block must be served


class Job(msgspec.Struct, frozen=True):
    """One text that is wanted."""

    mode: Mode
    temperature: float
    prompt: int
    """Its number, and the seed."""
    traversals: int
    """Of `whole`; else 0."""
    length: int
    model: Digest

    @property
    def sampling(self) -> Sampling:
        """Bytes are drawn from all there are: temperature alone says how."""
        return Sampling(self.temperature, top_p=1.0, seed=self.prompt, length=self.length)


class Made(msgspec.Struct, frozen=True, tag="made"):
    """One text that was made."""

    job: Job
    text: bytes
    seconds: float
    first_byte: float
    """Seconds until it was there."""
    traversals: int
    guessed: int
    right: int
    """Guesses that were."""
    sent: int
    """Bytes of all frames on all lines."""

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return len(self.text) / self.seconds

    @property
    def shown(self) -> str:
        """For people."""
        name = f"{self.job.mode} {self.job.traversals or ''}".strip()
        return (
            f"{name}, temperature {self.job.temperature:g}, prompt {self.job.prompt + 1}: "
            f"{self.rate:.1f} bytes/s, {self.traversals} traversals"
        )


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    """The stages of one model, and the lines between them, as they were measured."""

    model: Digest
    layout: Layout


class Served(msgspec.Struct, frozen=True):
    """A model and the addresses of its stages."""

    model: str
    places: list[str]


class Order(msgspec.Struct, frozen=True):
    """What to ask, and whom."""

    papers: str
    served: list[Served]
    prompts: list[bytes]
    jobs: list[Job]


async def generate(session: Session, job: Job, prompt: bytes) -> Made:
    """One text."""
    text, report, begun = b"", decode.Report(), time.perf_counter()
    async with aclosing(pieces(session, job, prompt)) as coming:
        async for piece in coming:
            report.add(piece)
            text += piece.bytes
    return Made(
        job=job,
        text=text,
        seconds=time.perf_counter() - begun,
        first_byte=report.first_byte_s or 0.0,
        traversals=report.traversals,
        guessed=report.guessed,
        right=report.right,
        sent=report.sent,
    )


def pieces(session: Session, job: Job, prompt: bytes) -> decode.Pieces:
    """The text as it comes."""
    if job.mode == "whole":
        return decode.whole(session, prompt, job.length, job.sampling, job.traversals)
    by = {"ar": decode.ar, "speculative": decode.speculative, "exact": decode.exact}
    return by[job.mode](session, prompt, job.sampling)


async def over(pipeline: Pipeline, job: Job, prompt: bytes) -> Made:
    """One text over stages."""
    session = await pipeline.session()
    try:
        return await generate(session, job, prompt)
    finally:
        await session.close()


async def obey(order: Order) -> None:
    """Every text, one after another."""
    member = member_in(Path(order.papers))
    async with AsyncExitStack() as stack:
        pipelines = {}
        for served in order.served:
            manifest = read_manifest(Path(served.model))
            pipeline = Pipeline(manifest.shape, manifest.digest, *member, served.places)
            pipelines[manifest.digest] = await stack.enter_async_context(pipeline)
        for digest, pipeline in pipelines.items():
            await ready(pipeline)
            first = next((job for job in order.jobs if job.model == digest), None)
            if first:
                short = msgspec.structs.replace(first, length=WARM_UP)
                await over(pipeline, short, order.prompts[0])
        for job in order.jobs:
            made = await over(pipelines[job.model], job, order.prompts[job.prompt])
            print_json(msgspec.to_builtins(made))
        for digest, pipeline in pipelines.items():
            print_json(msgspec.to_builtins(Seen(digest, seen(pipeline))))


def seen(pipeline: Pipeline) -> Layout:
    """What a pipeline has learned: its own round trips, and the ways between stages."""
    stages, ways = pipeline.report(), pipeline.traversals.ways
    hosts = [
        Host(stage.address, f"{stage.first + 1}-{stage.last + 1}", stage.step_ms)
        for stage in stages
    ]
    links = [Link((GATEWAY, stage.address), stage.rtt_ms) for stage in stages]
    for one, two in pairwise(stages):
        way = ways.way(one.stage, two.stage)
        rtt_ms = max(one.rtt_ms, two.rtt_ms) if way.latency is None else 2000 * way.latency
        mbit = way.rate / MBIT if way.rate else None
        links.append(Link((one.address, two.address), rtt_ms, mbit))
    return Layout(hosts, links, GATEWAY, mbit=UNSEEN_RATE / MBIT)


async def ready(pipeline: Pipeline) -> None:
    """Until there is a route."""
    end = time.monotonic() + READY
    while True:
        try:
            await pipeline.route()
        except Unreachable as error:
            if time.monotonic() > end:
                why = " ".join(pipeline.troubles)
                raise Unreachable(f"{error} {why}") from None
        else:
            return


if __name__ == "__main__":
    asyncio.run(obey(msgspec.json.decode(sys.stdin.buffer.read(), type=Order)))
