"""How good `whole` texts are beside `ar` ones of the same prompts, by an end-to-end judge.

What a text says does not depend on the network, so this is generated in one process, over more
prompts than are worth the time on a WAN. `ar` is what the other modes' model says.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.bench import judge
from blocktrain.bench.judge import Quality, Sample
from blocktrain.bench.wan_driver import Job, generate
from blocktrain.inference.local import LocalSession
from blocktrain.inference.plan import Mode
from blocktrain.inference.span import Span
from blocktrain.learning.files import load_model, read_manifest
from blocktrain.terms import Digest, Progress, silent

Row = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """Who is compared, and who judges."""

    model: Path
    whole: Path
    judge: Path
    prompts: Sequence[bytes]
    length: int
    temperature: float


def compare(panel: Panel, traversals: Sequence[int], progress: Progress = silent) -> list[Row]:
    """`ar` first, then `whole` by the traversals it takes."""
    kinds: list[tuple[Path, Mode, int]] = [(panel.model, "ar", 0)]
    kinds += [(panel.whole, "whole", count) for count in sorted(set(traversals))]
    referee = load_model(panel.judge)
    found: list[Quality] = []
    for number, (folder, mode, count) in enumerate(kinds):
        progress(number, len(kinds))
        found.append(judge.quality(referee, samples(panel, folder, mode, count)))
    return [
        {
            "mode": mode,
            "traversals": count or panel.length,
            "judge_ce": quality.judge_ce,
            **{f"distinct_{n}": d for n, d in zip(judge.LENGTHS, quality.distinct, strict=True)},
            "entropy": quality.entropy,
            "beside_ar": quality.stands_beside(found[0]) if count else None,
            "bytes": quality.bytes,
        }
        for (_, mode, count), quality in zip(kinds, found, strict=True)
    ]


def samples(panel: Panel, folder: Path, mode: Mode, traversals: int) -> list[Sample]:
    """One text after each prompt."""
    last = read_manifest(folder).shape.blocks - 1
    session = LocalSession(Span.open(folder, 0, last))
    made = []
    for number, prompt in enumerate(panel.prompts):
        job = Job(mode, panel.temperature, number, traversals, panel.length, Digest(""))
        made.append(Sample(prompt, asyncio.run(generate(session, job, prompt)).text))
    return made


def verdict(quality: Sequence[Row], rows: Sequence[Row]) -> str:
    """The rate at the fewest traversals that stand beside `ar`, or that none did."""
    fewest = next((row["traversals"] for row in quality if row["beside_ar"]), None)
    within = (
        f"judge CE within {judge.CLOSE} of ar's and distinct-2, -3, -4 at least "
        f"{judge.MATCHED} of ar's"
    )
    if fewest is None:
        tried = [row["traversals"] for row in quality if row["beside_ar"] is not None]
        return f"With {min(tried)} to {max(tried)} traversals, whole never had {within}."
    rates = "; ".join(
        f"{row['bytes_per_s']:.1f} bytes/s at {row['rtt_ms']:g} ms and {row['mbit']:g} Mbit/s "
        f"({row['times_ar']:.1f} x ar)"
        for row in rows
        if (row["mode"], row["traversals"]) == ("whole", fewest)
    )
    return f"whole in {fewest} traversals is the fewest with {within}: {rates}."
