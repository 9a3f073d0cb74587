"""What serving over stages costs: three on loopback against the same model in one process.

Both sides compute the same traversal of many positions by turns, with as many threads; only the
stages' side passes rows from process to process, over TCP and TLS. The medians count.
"""

import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from blocktrain.bench.staged import HERE, staged
from blocktrain.errors import BadInput, Different
from blocktrain.inference.local import LocalSession
from blocktrain.inference.pipeline import Pipeline
from blocktrain.inference.session import Asked, Said, Session
from blocktrain.inference.span import Span
from blocktrain.learning.files import Manifest, save_model
from blocktrain.learning.model import Model, Shape, new_block
from blocktrain.learning.noise import Noise
from blocktrain.services.papers import admit, authority_in
from blocktrain.terms import Progress, silent
from blocktrain.wire.serving import USUAL, Choice, Codec

STAGES = 3
UNCOUNTED = 2  # traversals at the beginning: links open, memory is touched for the first time
GREEDY = Choice(temperature=0, top_p=1, seed=0, at=0)


@dataclass(frozen=True)
class Trial:
    """What is tried."""

    width: int = 512
    """Width of the residual stream."""
    layers: int = 8
    """Layers, each a block of its own."""
    positions: int = 256
    """Positions of one traversal."""
    threads: int = 1
    """CPU threads of each stage, and of the one process."""
    repeats: int = 15
    """Traversals of each side."""
    codec: Codec = USUAL
    """How rows travel."""

    def __post_init__(self) -> None:
        if self.layers < STAGES or min(self.positions, self.threads, self.repeats) < 1:
            raise BadInput(
                f"There must be at least {STAGES} layers, and 1 of everything else; choose more."
            )


def measure(trial: Trial, folder: Path, progress: Progress = silent) -> dict[str, Any]:
    """Both sides by turns."""
    shape = Shape(
        blocks=trial.layers,
        layers=1,
        width=trial.width,
        heads=max(1, trial.width // 64),
        window=trial.positions,
    )
    blocks = [
        new_block(shape, index, seed=0).requires_grad_(False) for index in range(trial.layers)
    ]
    manifest = save_model(Model(shape, Noise(), blocks), folder / "model")
    torch.set_num_threads(trial.threads)
    posts = [HERE] * STAGES
    with staged(folder / "model", trial.layers, folder, posts, trial.threads) as places:
        pairs = asyncio.run(by_turns(trial, manifest, folder, places, progress))
    apart, together = (median(side) for side in zip(*pairs, strict=True))
    return {
        **asdict(trial),
        "stages": STAGES,
        "stages_ms": 1000 * apart,
        "one_process_ms": 1000 * together,
        "ratio": median(mine / theirs for mine, theirs in pairs),
    }


async def by_turns(
    trial: Trial, manifest: Manifest, folder: Path, places: list[str], progress: Progress
) -> list[tuple[float, float]]:
    """Seconds of each traversal: over stages, and in this process."""
    member = admit(authority_in(folder / "authority"), folder / "gateway")
    asked = Asked(0, [65] * trial.positions, 1, choice=GREEDY)
    pairs = []
    here = LocalSession(Span.open(folder / "model", 0, trial.layers - 1))
    async with Pipeline(manifest.shape, manifest.digest, *member, places) as pipeline:
        there = await pipeline.session(trial.codec)
        for number in range(UNCOUNTED + trial.repeats):
            progress(number, UNCOUNTED + trial.repeats)
            apart, said = await timed(there, asked)
            together, also = await timed(here, asked)
            if trial.codec == "fp32" and said.logs != also.logs:
                raise Different("Stages gave another text than one process; do not use them.")
            pairs.append((apart, together))
        await there.close()
    return pairs[UNCOUNTED:]


async def timed(session: Session, asked: Asked) -> tuple[float, Said]:
    """One traversal, and what it took."""
    begun = time.perf_counter()
    said = await session.step(asked)
    return time.perf_counter() - begun, said
