"""blocktrain stage|admit: hold some blocks of a model for others to read through."""

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import torch
from cyclopts import Parameter

from blocktrain.console import PLAIN, Out, Output, bar, print_json
from blocktrain.inference import coverage
from blocktrain.inference.span import Span
from blocktrain.inference.stage import Stage
from blocktrain.learning.files import Manifest
from blocktrain.services.announcing import announced
from blocktrain.services.belonging import Belonging, Pass, belong
from blocktrain.services.papers import admit as make_member
from blocktrain.services.papers import authority_in
from blocktrain.wire.serving import Announce, Holding, Place, Weights
from blocktrain.wire.signing import load_key

KEPT_FREE = 2**29  # bytes for texts and for what a step needs
OF_FILE = {"fp32": 1.0, "bf16": 0.5, "int8": 0.27}  # bytes in memory, of those in the file


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
        others = [each.holding for each in mine.present()] if mine.present else []
        first, last = span_for(held, mine.fetch([])[1], others)
        folder, _ = mine.fetch(range(first, last + 1))
    span = Span.open(folder, first, last, held.weights)
    asyncio.run(keep(span, mine, where, output))


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


async def keep(span: Span, mine: Belonging, where: Where, out: Output) -> None:
    """Serves until a signal comes; the second one ends it at once."""
    async with Stage(span, *mine.member, where.host, where.port) as server:
        place = Place(server.id, where.public or where.host, server.port)
        told = {"stage": place.stage, "host": place.host, "port": place.port}
        blocks = [span.holding.first + 1, span.holding.last + 1]
        if out.json:
            print_json({**told, "blocks": blocks})
        out.say(f"blocks {blocks[0]}-{blocks[1]} at {place.host}:{place.port}")

        leaving = asyncio.Event()

        def now() -> Announce:
            return Announce(place, span.holding, server.sessions, server.room, leaving.is_set())

        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, leaving.set)
        async with announced(mine.announce, now, out.say):
            await leaving.wait()
        out.say("Leaving when the present texts have ended; once more to leave at once.")
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(each, os._exit, 130)
        await server.leave()


def span_for(held: Held, manifest: Manifest, others: list[Holding]) -> tuple[int, int]:
    """Which blocks to hold, where others hold those."""
    if held.blocks != "auto":
        return coverage.parse(held.blocks, manifest.shape.blocks)
    sizes = [int(entry.bytes * OF_FILE[held.weights]) for entry in manifest.blocks]
    return coverage.least_covered(others, sizes, psutil.virtual_memory().available - KEPT_FREE)
