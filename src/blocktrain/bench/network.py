"""What the network costs: CPU-seconds of a whole run's processes against the lab's, same work.

Both sides train the same rounds of the same run, one thread per replica. Rounds are counted from
the second to the last but one, so that starting up (imports, the text, first fetches) is on neither
side, and nothing is evaluated. The network's side is every process: workers and coordinator.

Also told: seconds from starting `join` to the first local step. For that one worker joins a run of
one step a round, and the clock stops when a block has an update: encoding, sending and the receipt
are in it, so it is never too little.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from blocktrain.errors import BadRun
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
        joined.append(join_seconds(run, data, folder / f"join-{turn}"))
        network.append(network_seconds(run, data, folder / f"network-{turn}"))
        lab.append(lab_seconds(run, data[1], folder / f"lab-{turn}"))
        say(
            f"network {network[-1]:.1f} s, lab {lab[-1]:.1f} s of CPU, "
            f"a first step after {joined[-1]:.1f} s"
        )
    return {
        "network_cpu_seconds": median(network),
        "lab_cpu_seconds": median(lab),
        "ratio": median(n / one for n, one in zip(network, lab, strict=True)),
        "join_seconds": median(joined),
        "rounds": run.pace.rounds - 2,
        "repeats": repeats,
        "cores": psutil.cpu_count() or 1,
    }


def join_seconds(run: Run, data: tuple[str, Corpus], folder: Path) -> float:
    """Seconds from `join` until the coordinator has an update of one step."""
    crew = Embedded(folder, 0, data[0])
    one_step = replace(run, pace=replace(run.pace, local_steps=1, rounds=1))
    begin(crew.run, Settings("bench", one_step, TIMING), data[1])
    with crew.up() as link:
        began = time.monotonic()
        crew.start_worker(1)
        while not any(block.taken for block in status(link).blocks):
            refuse_dead(crew)
            time.sleep(LOOK)
        return time.monotonic() - began


def network_seconds(run: Run, data: tuple[str, Corpus], folder: Path) -> float:
    """CPU-seconds of all children for the rounds that count."""
    crew = Embedded(folder, workers_of(run), data[0])
    begin(crew.run, Settings("bench", run, TIMING), data[1])
    with crew.up() as link:
        start = 0.0
        while True:
            opened = min(block.round for block in status(link).blocks)
            if not start and opened >= 2:
                start = spent(crew)
            if opened >= run.pace.rounds:
                return spent(crew) - start
            refuse_dead(crew)
            time.sleep(LOOK)


def workers_of(run: Run) -> int:
    """One for each slot."""
    return run.shape.blocks * run.pace.replicas


def refuse_dead(crew: Embedded) -> None:
    """What a dead child has spent is lost, so that nothing can be told."""
    for child in crew.children:
        if child.process is not None and child.process.poll():
            said = child.log.read_text(errors="replace").strip() or "no word"
            raise BadRun(f"The {child.name} died ({said.splitlines()[-1]}); measure again.")


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
    studio = Lab(run, corpus, folder, torch.device("cpu"), sharing=False)  # as workers must
    now = studio.beginning()
    marks = []
    for _ in range(run.pace.rounds - 1):
        now = studio.advance(now)
        marks.append(time.process_time())
    return marks[-1] - marks[0]


def shorter(run: Run, rounds: int) -> Run:
    """The same run with fewer rounds, all of the full length."""
    return replace(run, pace=replace(run.pace, rounds=rounds, first_steps=0))
