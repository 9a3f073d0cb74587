"""Combining the updates of one block: its memory in updates, its speed against plain numpy.

A store in a temporary folder gets a snapshot, a steady block and the updates of R replicas, all of
random numbers; they stay in the page cache. A process of its own then does as a coordinator does:

memory    It combines them once, durably, into new blobs of that store: snapshot, steady, delta and,
          if the codec is lossy, residual. Counted is anonymous memory above what the imports need;
          the mapped blobs are the kernel's to drop. `seconds_with_writing` is this one's.
speed     In turn, TURNS times, and medians compared; nothing is written, files are mapped anew.
          Each side is one thread. Its CPU seconds count, since others may be busy on the machine;
          `speed_ratio_by_clock` is of the same calls.
          numpy     total += change, tensor by tensor, of every update as an fp32 blob
          combine   all that `combined` does: mean by shares, codec, next snapshot and steady
          If the codec is lossy, combine reads the encoded updates, and decodes them; numpy's
          side stays the same.

fp32 is measured, and a codec beside it, each in a process of its own, on the same numbers.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from blocktrain.aggregation.combine import Averaging, Next, Part, Standing, combined
from blocktrain.aggregation.folder import open_store
from blocktrain.aggregation.pour import pour
from blocktrain.aggregation.store import Store
from blocktrain.bench.memory import POLL, anonymous
from blocktrain.errors import BadInput, BlockTrainError
from blocktrain.terms import Array, Digest
from blocktrain.wire.codecs import CODECS
from blocktrain.wire.tensors import Body, Shapes, Writer, largest, order, stream

LAYERS = 8
TURNS = 3


@dataclass(frozen=True)
class Case:
    """What is combined."""

    width: int
    codec: str
    snapshot: Digest
    steady: Digest
    updates: list[Digest]
    plain: list[Digest]
    """The updates in fp32."""


def measure(
    parameters: int = 100_000_000, replicas: int = 6, beside: str = "int4"
) -> dict[str, Any]:
    """What fp32 takes, and in `rows` that and what the codec beside it takes.

    `memory_in_updates` is in fp32 updates; `speed_ratio` is numpy's seconds over combine's.
    """
    if beside not in CODECS:
        raise BadInput(f"There is no codec '{beside}'; choose one of {', '.join(CODECS)}.")
    width = round((parameters / (12 * LAYERS)) ** 0.5)  # a layer has 12 squares of its width
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder))
        cases = [prepare(store, width, replicas)]
        if beside != cases[0].codec:
            cases.append(encoded(store, cases[0], beside))
        rows = [by_child(case, folder) for case in cases]
    return {**rows[0], "rows": rows}


def by_child(case: Case, folder: str) -> dict[str, Any]:
    """Has a process of its own combine what lies in the folder."""
    command = [sys.executable, "-m", __name__, json.dumps(asdict(case)), folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no word").splitlines()[-1]
        raise BlockTrainError(f"The combining process failed ({last}); try fewer parameters.")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def block_of(width: int) -> Shapes:
    """The tensors of an ordinary block: the largest is 1/36 of it."""
    columns = dict.fromkeys("qkvo", width) | dict.fromkeys(("gate", "up", "down"), 8 * width // 3)
    layer = {f"{name}.weight": (width, wide) for name, wide in columns.items()}
    layer_and_norm: dict[str, tuple[int, ...]] = {**layer, "norm.weight": (width,)}
    return {
        f"{number}.{name}": shape
        for number in range(LAYERS)
        for name, shape in layer_and_norm.items()
    }


# --- before: blobs ------------------------------------------------------------------------------


def prepare(store: Store, width: int, replicas: int) -> Case:
    """Writes what is to be combined, in fp32."""
    like = block_of(width)
    snapshot, steady, *plain = (put_plain(store, like, seed) for seed in range(2 + replicas))
    return Case(width, "fp32", snapshot, steady, plain, plain)


def encoded(store: Store, plain: Case, codec: str) -> Case:
    """The same case with its updates by a codec."""
    like, seeds = block_of(plain.width), range(2, 2 + len(plain.plain))
    updates = [put_encoded(store, like, seed, codec) for seed in seeds]
    return replace(plain, codec=codec, updates=updates)


def put_plain(store: Store, like: Shapes, seed: int) -> Digest:
    """An fp32 blob of random numbers."""
    chunks = (bytes(chunk) for chunk in stream(random_values(like, seed), like))
    return store.put(chunks, limit=largest("fp32", like))


def put_encoded(store: Store, like: Shapes, seed: int, codec: str) -> Digest:
    """The same numbers by a codec."""
    writer = Writer(codec, like)
    for name, value in random_values(like, seed):
        writer.put(name, value)
    return store.put([writer.body()], limit=largest(codec, like))


def random_values(like: Shapes, seed: int) -> Iterator[tuple[str, Array]]:
    """Tensors in file order, the same for the same seed."""
    random = np.random.default_rng(seed)
    for name in order(like):
        yield name, random.standard_normal(like[name], dtype=np.float32)


# --- in the child -------------------------------------------------------------------------------


def in_child(case: Case, folder: Path) -> dict[str, Any]:
    """Everything that is measured."""
    store, like = open_store(folder), block_of(case.width)
    update = 4 * sum(int(np.prod(shape)) for shape in like.values())

    def opened(digest: Digest, codec: str = "fp32") -> Body:
        return Body(store.view(digest), codec, like)

    def pieces() -> Iterator[tuple[str, Next]]:
        standing = Standing(opened(case.snapshot).read, opened(case.steady).read)
        parts = [Part(opened(digest, case.codec).read, 1000) for digest in case.updates]
        return combined(like, standing, parts, Averaging(), case.codec)

    def by_numpy() -> None:
        bodies = [opened(digest) for digest in case.plain]
        for name, shape in like.items():
            total = np.zeros(shape, np.float32)
            for body in bodies:
                total += body.read(name)

    began = time.perf_counter()
    peak = peak_while(lambda: pour(store, like, pieces(), case.codec))
    with_writing = time.perf_counter() - began
    sides = {"numpy": by_numpy, "combine": lambda: deque(pieces(), maxlen=0)}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(TURNS):
        for name, side in sides.items():
            taken[name].append(timed(side))
    seconds, by_clock = (
        {name: median(turn[kind] for turn in turns) for name, turns in taken.items()}
        for kind in range(2)
    )
    return {
        "memory_in_updates": peak / update,
        "speed_ratio": seconds["numpy"] / seconds["combine"],
        "speed_ratio_by_clock": by_clock["numpy"] / by_clock["combine"],
        "numpy_seconds": seconds["numpy"],
        "combine_seconds": seconds["combine"],
        "seconds_with_writing": with_writing,
        "update_mib": update / 2**20,
        "parameters": update // 4,
        "replicas": len(case.updates),
        "codec": case.codec,
    }


def peak_while(action: Callable[[], object]) -> float:
    """The most anonymous memory that an action adds, in bytes."""
    baseline = most = anonymous()
    over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(POLL):
            most = max(most, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        action()
    finally:
        over.set()
        watcher.join()
    return max(most, anonymous()) - baseline


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds that one call takes: of its thread's CPU, kernel included, and by the clock."""
    began, by_clock = time.thread_time(), time.perf_counter()
    action()
    return time.thread_time() - began, time.perf_counter() - by_clock


if __name__ == "__main__":
    print(json.dumps(in_child(Case(**json.loads(sys.argv[1])), Path(sys.argv[2]))))
