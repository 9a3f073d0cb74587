"""What the network costs: CPU-seconds of a whole run's processes against the lab's, same work.

Both sides train the same rounds of the same run, one thread per replica. Rounds are counted from
the second to the last but one, so that starting up (imports, the text, first fetches) is on neither
side, and nothing is evaluated. The network's side is every process: workers and coordinator.
Also told: seconds from starting `join` to its first local step.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from blocktrain.learning.data import Corpus
from blocktrain.services.begin import Settings, Timing, begin
from blocktrain.services.embedded import Embedded, status
from blocktrain.services.lab import Lab
from blocktrain.services.run import Run

LOOK = 0.2  # seconds
# Nobody is late here, and nobody is waited for.
TIMING = Timing(grace=0.1, lease=60.0)


def measure(
    run: Run, data: tuple[str, Corpus], folder: Path, repeats: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Network and lab by turns; the medians count."""
    network, lab, joined = [], [], []
    for turn in range(repeats):
        spent, first = network_seconds(run, data, folder / f"network-{turn}")
        network.append(spent)
        joined.append(first)
        lab.append(lab_seconds(run, data[1], folder / f"lab-{turn}"))
        say(f"network {network[-1]:.1f} s, lab {lab[-1]:.1f} s of CPU, joined in {first:.1f} s")
    return {
        "network_cpu_seconds": median(network),
        "lab_cpu_seconds": median(lab),
        "ratio": median(n / one for n, one in zip(network, lab, strict=True)),
        "join_seconds": median(joined),
        "rounds": run.pace.rounds - 2,
        "repeats": repeats,
        "cores": psutil.cpu_count() or 1,
    }


def network_seconds(run: Run, data: tuple[str, Corpus], folder: Path) -> tuple[float, float]:
    """CPU-seconds of all children for the rounds that count, and how long joining took."""
    name, corpus = data
    crew = Embedded(folder, run.shape.blocks * run.pace.replicas, name)
    begin(crew.run, Settings("bench", run, TIMING), corpus)
    with crew.up() as link:
        began, first, start = time.monotonic(), 0.0, 0.0
        while True:
            blocks = status(link).blocks
            opened = min(block.round for block in blocks)
            if not first and all(block.workers or block.taken for block in blocks):
                first = time.monotonic() - began
            if not start and opened >= 2:
                start = spent(crew)
            if opened >= run.pace.rounds:
                return spent(crew) - start, first
            time.sleep(LOOK)


def spent(crew: Embedded) -> float:
    """CPU-seconds of all children so far."""
    total = 0.0
    for child in crew.children:
        assert child.process is not None
        times = psutil.Process(child.process.pid).cpu_times()
        total += times.user + times.system
    return total


def lab_seconds(run: Run, corpus: Corpus, folder: Path) -> float:
    """CPU-seconds of the lab for the rounds that count."""
    studio = Lab(run, corpus, folder, torch.device("cpu"))
    now = studio.beginning()
    marks = []
    for _ in range(run.pace.rounds - 1):
        now = studio.advance(now)
        marks.append(time.process_time())
    return marks[-1] - marks[0]


def shorter(run: Run, rounds: int) -> Run:
    """The same run with fewer rounds."""
    return replace(run, pace=replace(run.pace, rounds=rounds))
