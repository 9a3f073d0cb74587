"""How many workers a coordinator bears: a process of its own, real HTTPS, signed updates, no torch.

The workers (bench/light.py) are threads of this process, so the driver takes its part of the same
cores: both sides' CPU seconds are told. In a run of random numbers

load      updates are offered at a rate, at random instants, each to the worker who has had its
          assignment for longest, whether earlier ones have their receipts or not; meanwhile every
          worker says now and then that it is alive, as real ones do;
burst     then all workers have an assignment, and submit at the same instant.

A receipt's latency begins with the offer: the upload of the tensors is in it, the signing, the
post, and whatever the driver itself is late. `post` is the last request alone. Refused is an update
that was not taken at its first request, whatever the reason.
"""

import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import psutil

from blocktrain import config
from blocktrain.aggregation.beginning import write_first
from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.combine import Averaging
from blocktrain.aggregation.deadlines import Rules
from blocktrain.aggregation.folder import KEY, TOKEN, open_store, owners_token
from blocktrain.aggregation.ledger import new_token
from blocktrain.bench.light import (
    BYTES_PER_STEP,
    NOTHING,
    PATIENCE,
    LightWorker,
    Place,
    Sent,
    Template,
    random_values,
)
from blocktrain.disk import write_atomically
from blocktrain.errors import BadInput, BadRun
from blocktrain.terms import Progress, silent
from blocktrain.wire import tensors
from blocktrain.wire.certificates import make_authority
from blocktrain.wire.codecs import CODECS
from blocktrain.wire.signing import load_or_make_key
from blocktrain.wire.tls import trust_by_fingerprint

TENSORS, COLUMNS = 14, 128  # as many as a block of the default model has, and as wide
BEAT = 20.0  # seconds between two words of a real worker while it trains, at the default lease
SHORTEST = 10.0  # seconds that a round has at least: nobody shall be late


@dataclass(frozen=True)
class Load:
    """What a coordinator is to bear."""

    workers: int = 200
    """Light workers, each with its own identity and connections."""
    rate: float = 20.0
    """Updates a second that are offered."""
    turns: int = 3
    """Updates that each worker sends at that rate, before the burst."""
    update_bytes: int = 1_000_000
    """Bytes of an update, or little more."""
    codec: str = "fp32"
    """Of updates: fp32, fp16, int8, int4 or int2. Fewer bits are more values to look at."""
    blocks: int = 4
    """Blocks of the run."""

    def __post_init__(self) -> None:
        if min(self.blocks, self.workers) < 1 or self.workers % self.blocks:
            raise BadInput(
                f"{self.workers} workers cannot share {self.blocks} blocks evenly; "
                "choose a multiple."
            )
        if self.turns < 1 or not 0 < self.rate < math.inf:
            raise BadInput("Nothing would be offered; give a rate above 0 and a turn or more.")
        if self.codec not in CODECS:
            raise BadInput(f"There is no codec '{self.codec}'; choose one of {', '.join(CODECS)}.")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors whose update has at least the wanted size."""

        def of(rows: int) -> dict[str, tuple[int, ...]]:
            return {f"layer.{n}.weight": (rows, COLUMNS) for n in range(TENSORS)}

        one, many = (tensors.largest(self.codec, of(rows)) for rows in (1, 1001))
        return of(1 + max(0, math.ceil((self.update_bytes - one) * 1000 / (many - one))))

    @property
    def rules(self) -> Rules:
        """Each worker has a slot, and rounds close when all have come."""
        each = self.workers // self.blocks
        longest = max(SHORTEST, 2 * self.workers / self.rate)
        return Rules(
            rounds=self.turns + 2,  # one for the burst, and one that stays open
            blocks=self.blocks,
            replicas=each,
            quorum=each,
            local_steps=1,
            bytes_per_step=BYTES_PER_STEP,
            ahead=1,  # blocks take turns: one is combined while the others' updates come
            first_allowance=longest,
            floor=longest,
        )


# --- a run and its coordinator --------------------------------------------------------------------


def begin(folder: Path, load: Load) -> None:
    """A run of random numbers, as `blocktrain init` would make it."""
    folder.mkdir(parents=True)
    load_or_make_key(folder / KEY)
    make_authority(folder, "bench")
    token = new_token()
    write_atomically(folder / TOKEN, token.encode(), mode=0o600)
    body = tensors.encode(random_values(load.shapes, 1.0), "fp32")
    first = open_store(folder).put([body], limit=len(body))
    charter = Charter(
        name="bench",
        data="none",
        corpus=NOTHING,
        splits=((0, NOTHING),) * 3,
        corpus_served=False,
        codec=load.codec,
        rules=load.rules,
        averaging=Averaging(),
        blocks=(load.shapes,) * load.blocks,
        first=(first,) * load.blocks,
        learning="{}",
    )
    write_first(folder, charter, token)


@contextmanager
def coordinator(folder: Path, log: Path) -> Iterator[Place]:
    """Keeps the run in a process of its own, as anybody would."""
    command = [sys.executable, "-m", "blocktrain", "coordinator", str(folder)]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, "--tls", "auto", "--port", "0", "--json"],
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            env=config.environment(),
        )
    assert process.stdout is not None
    with process.stdout:
        try:
            told = json.loads(process.stdout.readline() or "{}")
            if "url" not in told:
                raise BadRun(f"The coordinator did not start: {told.get('error', 'no word')}")
            trust = trust_by_fingerprint(told["url"], told["fingerprint"], PATIENCE)
            yield Place(told["url"], owners_token(folder), trust, process.pid)
        finally:
            process.terminate()
            process.wait(PATIENCE)


# --- the driver -----------------------------------------------------------------------------------


class Crew:
    """All workers, and whoever tells them when to submit."""

    def __init__(self, load: Load, place: Place, threads: ThreadPoolExecutor) -> None:
        self.load, self.threads = load, threads
        template = Template(load.shapes, load.codec)
        self.workers = [
            LightWorker(number, number * load.blocks // load.workers, place, template)
            for number in range(load.workers)
        ]
        self.ready: SimpleQueue[LightWorker] = SimpleQueue()
        """Those with an assignment; who has had it for longest comes first."""
        self.over = threading.Event()
        self.working: list[Future[None]] = []

    def join(self) -> float:
        """All come in; the seconds that took."""
        began = time.monotonic()
        list(self.threads.map(LightWorker.join, self.workers))
        return time.monotonic() - began

    def start(self) -> None:
        """All work, and say now and then that they are alive."""
        self.working = [self.threads.submit(each.work, self.ready) for each in self.workers]
        self.working.append(self.threads.submit(self.beat))

    def beat(self) -> None:
        """One worker after the other says it, each once in a while."""
        while True:
            for worker in self.workers:
                if self.over.wait(BEAT / len(self.workers)):
                    return
                worker.alive()

    def next(self) -> LightWorker:
        """Who has had an assignment for longest."""
        try:
            return self.ready.get(timeout=PATIENCE)
        except Empty:
            for each in self.working:
                if each.done():
                    each.result()  # raises what went wrong
            raise BadRun(f"Nobody got an assignment within {PATIENCE:.0f} s.") from None

    def gather(self) -> list[LightWorker]:
        """All workers, block by block, as soon as each has its receipt and its next assignment."""
        return sorted((self.next() for _ in self.workers), key=lambda each: each.number)

    def offer(self, progress: Progress) -> tuple[list[Sent], float]:
        """Offers updates at random instants; what was sent, and how many a second it was."""
        for worker in self.gather():
            self.ready.put(worker)
        count = self.load.turns * self.load.workers
        instants = np.random.default_rng(1).uniform(0, count / self.load.rate, count)
        began = time.monotonic()
        for number, instant in enumerate(sorted(instants), start=1):
            time.sleep(max(0.0, began + instant - time.monotonic()))
            self.next().offered.put(time.monotonic())
            progress(number, count)
        rate = count / (time.monotonic() - began)
        crew = self.gather()
        for worker in crew:
            self.ready.put(worker)
        return [sent for worker in crew for sent in worker.sent], rate

    def burst(self) -> tuple[list[Sent], float]:
        """All submit at once; what was sent, and the seconds until the last receipt."""
        crew, began = self.gather(), time.monotonic()
        for worker in crew:
            worker.offered.put(began)
        sent = [worker.sent[-1] for worker in self.gather()]
        return sent, max(each.ended for each in sent) - began

    def close(self) -> None:
        """All go home."""
        self.over.set()
        for worker in self.workers:
            worker.offered.put(None)
        wait(self.working, SHORTEST)
        for worker in self.workers:
            worker.link.close()  # who still waits for an assignment waits no more


def measure(load: Load, progress: Progress = silent) -> dict[str, Any]:
    """Load and burst, on a run in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        return measure_in(Path(folder), load, progress)


def measure_in(folder: Path, load: Load, progress: Progress = silent) -> dict[str, Any]:
    """Load and burst; FOLDER/run and FOLDER/log are left for whoever wants to look."""
    begin(folder / "run", load)
    with (
        coordinator(folder / "run", folder / "log") as place,
        ThreadPoolExecutor(load.workers + 1, "light") as threads,
        closing(Crew(load, place, threads)) as crew,
    ):
        processes = psutil.Process(place.pid), psutil.Process()
        joining = crew.join()
        crew.start()
        before = [cpu_seconds(each) for each in processes]
        steady, rate = crew.offer(progress)
        burst, seconds = crew.burst()
        after = [cpu_seconds(each) for each in processes]
    return {
        "workers": load.workers,
        "update_bytes": tensors.largest(load.codec, load.shapes),
        "codec": load.codec,
        "offered_per_second": rate,
        "updates": len(steady),
        "refused": sum(bool(sent.refused) for sent in steady),
        **percentiles([sent.receipt for sent in steady], ""),
        **percentiles([sent.post for sent in steady], "post_"),
        "burst_updates": len(burst),
        "burst_seconds": seconds,
        "burst_refused": sum(bool(sent.refused) for sent in burst),
        "refusals": sorted({sent.refused for sent in [*steady, *burst] if sent.refused})[:5],
        "join_seconds": joining,
        "coordinator_cpu_seconds": after[0] - before[0],
        "driver_cpu_seconds": after[1] - before[1],
        "cores": psutil.cpu_count() or 1,
    }


def cpu_seconds(process: psutil.Process) -> float:
    """That a process has taken so far, the kernel's for it included."""
    times = process.cpu_times()
    return float(times.user + times.system)


def percentiles(seconds: list[float], of: str) -> dict[str, float]:
    """The middle one, the slow ones and the slowest, in milliseconds."""
    found = np.percentile(seconds, [50, 95, 99, 100]) * 1000
    names = (f"{of}{name}_ms" for name in ("p50", "p95", "p99", "max"))
    return dict(zip(names, map(float, found), strict=True))
