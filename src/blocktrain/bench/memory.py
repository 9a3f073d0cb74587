"""A worker's peak memory against the end-to-end trainer's: separate processes, same batch.

What counts is anonymous memory above what the imports need. Neighbours and snapshots are
memory-mapped files: the kernel may drop and read them again, so they are counted apart.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from blocktrain.errors import BlockTrainError
from blocktrain.learning.files import map_block, save_tensors
from blocktrain.learning.local import Start, Work, parameters_of, train_locally
from blocktrain.learning.model import VOCABULARY, Shape, new_block
from blocktrain.learning.objective import Loader, Recipe, objective_for
from blocktrain.terms import Progress, silent

POLL = 0.005  # seconds between two looks at the process's memory
BLOCK = 1  # the second of four: it has neighbours on both sides


@dataclass(frozen=True)
class Case:
    """One trainer to measure."""

    objective: str
    blocks: int
    layers: int
    width: int
    window: int
    batch: int
    micro: int

    @property
    def shape(self) -> Shape:
        """The shape of the whole model, without vectors for runs of bytes: they are as many however
        deep a model is, and only the first block, which is not measured here, would have them."""
        heads = max(1, self.width // 64)
        return Shape(
            "denoise" if self.objective == "denoise" else "neighbours",
            self.blocks, self.layers, self.width, heads, self.window, grams=1,
        )  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """What was measured, in MiB above the import baseline."""

    neighbours_ratio: float
    denoise_ratio: float
    end_to_end_mib: float
    neighbours_mib: float
    denoise_mib: float
    neighbours_mapped_mib: float
    neighbours_resident_ratio: float
    """With mapped files, on both sides."""
    parameters_per_block: int
    batch: int
    micro: int
    window: int


def measure(
    width: int, layers: int, batch: int, window: int = 256, progress: Progress = silent
) -> Memory:
    """Trains two steps in three processes, one after the other."""
    micro = 2 * window  # positions at once, the same for all three
    sizes = (width, window, batch, micro)
    cases = {
        "end_to_end": Case("neighbours", 1, 4 * layers, *sizes),
        "neighbours": Case("neighbours", 4, layers, *sizes),
        "denoise": Case("denoise", 4, layers, *sizes),
    }
    peaks: dict[str, dict[str, float]] = {}
    for name, case in cases.items():
        progress(len(peaks), len(cases))
        with tempfile.TemporaryDirectory() as folder:
            run_child("prepare", case, folder)
            peaks[name] = run_child("train", case, folder)
    progress(len(peaks), len(cases))
    whole, resident = (peaks["end_to_end"][kind] for kind in ("anonymous", "resident"))
    return Memory(
        neighbours_ratio=peaks["neighbours"]["anonymous"] / whole,
        denoise_ratio=peaks["denoise"]["anonymous"] / whole,
        end_to_end_mib=whole / 2**20,
        neighbours_mib=peaks["neighbours"]["anonymous"] / 2**20,
        denoise_mib=peaks["denoise"]["anonymous"] / 2**20,
        neighbours_mapped_mib=peaks["neighbours"]["mapped"] / 2**20,
        neighbours_resident_ratio=peaks["neighbours"]["resident"] / resident,
        parameters_per_block=int(peaks["neighbours"]["parameters"]),
        batch=batch,
        micro=micro,
        window=window,
    )


def run_child(action: str, case: Case, folder: str) -> dict[str, float]:
    """One process of this module; its last line is JSON."""
    command = [sys.executable, "-m", __name__, action, json.dumps(asdict(case)), folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no word").splitlines()[-1]
        raise BlockTrainError(f"The {action} process failed ({last}); try a smaller --width.")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def prepare(case: Case, folder: Path) -> dict[str, float]:
    """Writes every block to a file, as a worker would have downloaded it."""
    for index in range(case.shape.blocks):
        parameters = parameters_of(new_block(case.shape, index, 0))
        tensors = {name: torch.from_numpy(value) for name, value in parameters.items()}
        save_tensors(folder / f"{index}.safetensors", tensors)
    return {}


def train(case: Case, folder: Path) -> dict[str, float]:
    """Two local steps of one block from files, while a thread watches the memory."""
    shape = case.shape
    start = memory_now()
    peak = dict(start)
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for kind, used in memory_now().items():
                peak[kind] = max(peak[kind], used)
            time.sleep(POLL)

    watcher = threading.Thread(target=watch)
    watcher.start()
    index = min(BLOCK, shape.blocks - 1)
    recipe = Recipe(shape, micro=case.micro)
    loaders: list[Loader] = [
        lambda i=i: map_block(folder / f"{i}.safetensors", shape, i)  # type: ignore[misc]
        for i in range(shape.blocks)
    ]
    snapshot = parameters_of(loaders[index]())
    random = np.random.default_rng(0)
    rows = [random.integers(0, VOCABULARY, (case.batch, case.window + 1)) for _ in range(2)]
    size = case.batch * case.window
    work = Work(recipe, index, 0, 1, 0, 0, bytes_per_step=size, bytes_planned=100 * size)
    train_locally(Start(snapshot), iter(rows), objective_for(index, recipe, loaders), work)
    over.set()
    watcher.join()
    count = sum(value.size for value in snapshot.values())
    return {kind: peak[kind] - start[kind] for kind in start} | {"parameters": float(count)}


def memory_now() -> dict[str, float]:
    """Bytes of this process in memory, by kind."""
    resident, own = float(psutil.Process().memory_info().rss), anonymous()
    return {"anonymous": own, "mapped": resident - own, "resident": resident}


def anonymous() -> float:
    """Bytes of anonymous memory of this process; where the system does not tell, all of it."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024.0
    return float(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    act = {"prepare": prepare, "train": train}[sys.argv[1]]
    print(json.dumps(act(Case(**json.loads(sys.argv[2])), Path(sys.argv[3]))))
