"""blocktrain stage|admit|publish: hold some blocks of a model for others to read through."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import psutil
import torch
from cyclopts import Parameter

from blocktrain.commands.owner import NOBODY, Asking
from blocktrain.console import PLAIN, Out, Output, bar, print_json
from blocktrain.inference import coverage
from blocktrain.inference.span import Span
from blocktrain.inference.stage import Stage
from blocktrain.learning.files import Manifest
from blocktrain.services.announcing import announced, beside
from blocktrain.services.belonging import Belonging, Pass, belong, watch_banned, watch_served
from blocktrain.services.papers import admit as make_member
from blocktrain.services.papers import authority_in, keep_papers
from blocktrain.terms import Digest
from blocktrain.wire.owner import Checkpoint
from blocktrain.wire.serving import Announce, Holding, Place, Publish, Weights
from blocktrain.wire.signing import load_key

KEPT_FREE = 2**29  # bytes for texts and for what a step needs
OF_FILE = {"fp32": 1.0, "bf16": 0.5, "int8": 0.27}  # bytes of a matrix, of those in the file


@dataclass(frozen=True)
class Where:
    """Where a stage listens and whom it tells."""

    host: str = "127.0.0.1"
    """Address to listen at, which others must be able to reach."""
    port: int = 0
    """0 is any free one."""
    public: str | None = None
    """The name or address that others reach it by, if that is another one."""
    announce: str | None = None
    """The URL of a gateway to tell, for a model directory; without, give the gateway --stages."""


@dataclass(frozen=True)
class Held:
    """What a stage holds and computes with."""

    blocks: str = "auto"
    """Which, counted from 1: 1-2, 3, or auto, the least-covered ones that fit in memory."""
    weights: Weights = "fp32"
    """How weights are held: fp32, bf16 or int8."""
    threads: int | None = None
    """CPU threads; all if not given. Replicas need the same number to give the same text."""


BY, WHERE, HELD = Pass(), Where(), Held()


def stage(
    model: str,
    *,
    by: Annotated[Pass, Parameter(name="*")] = BY,
    held: Annotated[Held, Parameter(name="*")] = HELD,
    where: Annotated[Where, Parameter(name="*")] = WHERE,
    output: Out = PLAIN,
) -> None:
    """Serve some blocks of a model over direct TCP. Ctrl+C lets the present texts end first.

    Parameters
    ----------
    model: str
        A model directory, or a run's URL; only the blocks held are opened or fetched.
    """
    if held.threads is not None:
        torch.set_num_threads(held.threads)
    with bar("blocks") as progress:
        mine = belong(model, by, where.announce, progress)
        manifest = mine.fetch([])[1]
        others = [each.holding for each in mine.present()] if mine.present else []
        first, last = span_for(held, manifest, others)
        folder, _ = mine.fetch(range(first, last + 1))
    while True:
        span = Span.open(folder, first, last, held.weights)
        port = asyncio.run(keep(span, mine, where, output))
        if port is None:
            return
        where = replace(where, port=port)


def admit(authority: Path, member: Path, *, output: Out = PLAIN) -> None:
    """Make papers for a host of a serving network; the authority is made with the first.

    Parameters
    ----------
    authority: Path
        Folder of the authority: keep it to yourself.
    member: Path
        Folder to write: copy it to the host, and give it to stage or gateway as --papers.
    """
    made = make_member(authority_in(authority), member)
    output.result({"member": load_key(made.papers.key).id, "papers": str(member)}, "Admitted")


def publish(url: str, *, asking: Asking = NOBODY, output: Out = PLAIN) -> None:
    """Let all stages of a run serve its newest checkpoint, which they fetch by themselves.

    Parameters
    ----------
    url: str
        The run's coordinator.
    """
    with closing(asking.link(url)) as link:
        found = link.say("v1/served", Publish("newest"), Checkpoint)
    output.result({"rounds": [version.round for version in found.versions]}, "Served")


async def keep(span: Span, mine: Belonging, where: Where, out: Output) -> int | None:
    """Serves until a signal comes; the second one ends it at once.

    Or until all stages serve another checkpoint, and its blocks are here: then it returns the port.
    """
    async with Stage(span, *mine.member, where.host, where.port) as server:
        place, holding = Place(server.id, where.public or where.host, server.port), span.holding
        told = {"stage": place.stage, "host": place.host, "port": place.port}
        blocks = [holding.first + 1, holding.last + 1]
        if out.json:
            print_json({**told, "blocks": blocks, "model": holding.model})
        out.say(f"blocks {blocks[0]}-{blocks[1]} at {place.host}:{place.port}")

        leaving, over = asyncio.Event(), asyncio.Event()

        def leave() -> None:
            leaving.set()
            over.set()

        def now() -> Announce:
            return Announce(place, holding, server.sessions, server.room, leaving.is_set())

        async def move(model: Digest) -> None:
            if model != holding.model:
                out.say("All stages are to serve another checkpoint; fetching its blocks.")
                await asyncio.to_thread(mine.fetch, range(holding.first, holding.last + 1))
                over.set()

        handle_signals(leave)
        work = [keep_papers(mine.renew, server.renew, out.say)]
        if mine.served:
            work.append(watch_served(mine.served, move))
        if mine.banned:
            work.append(watch_banned(mine.banned, server.ban))
        async with beside(*work), announced(mine.announce, now, out.say):
            await over.wait()
        if leaving.is_set():
            out.say("Leaving when the present texts have ended; once more to leave at once.")
            handle_signals(os._exit, 130)
        await server.leave()
        return None if leaving.is_set() else server.port


def handle_signals(handler: Callable[..., object], *given: object) -> None:
    """What happens when somebody wants this process to end."""
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, handler, *given)


def span_for(held: Held, manifest: Manifest, others: list[Holding]) -> tuple[int, int]:
    """Which blocks to hold, where others hold those of the same model."""
    if held.blocks != "auto":
        return coverage.parse(held.blocks, manifest.shape.blocks)
    sizes = [bytes_held(manifest, index, held.weights) for index in range(manifest.shape.blocks)]
    others = [each for each in others if each.model == manifest.digest]
    return coverage.least_covered(others, sizes, psutil.virtual_memory().available - KEPT_FREE)


def bytes_held(manifest: Manifest, index: int, weights: Weights) -> int:
    """What a block takes in memory: its vectors of bytes, and runs of them, stay as they are."""
    shape, whole = manifest.shape, manifest.blocks[index].bytes
    kept = min(whole, 4 * shape.vectors(index) * shape.width)
    return kept + int((whole - kept) * OF_FILE[weights])
