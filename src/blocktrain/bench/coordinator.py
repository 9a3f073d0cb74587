"""How many workers a coordinator bears: a process of its own, real HTTPS, signed updates, no torch.

Light workers speak every word that real ones speak, by the same link (wire/link.py), each with its
own key and its own connections; what they send was not trained. They are threads of this process,
so the driver has its part of the cores, too: both sides' CPU seconds are told.

load      Updates are offered at a rate, at random instants (a Poisson process), to whoever has had
          an assignment for longest, whether the coordinator has answered the last ones or not.
          Meanwhile all workers say now and then that they are alive, as real ones do.
burst     All workers have an assignment, and submit at the same instant.

A receipt's latency begins when the update is offered: it has the upload of the tensors in it, the
signing, the post, and whatever the driver itself is late. `post` is the last request alone. Refused
is an update that was not taken by the first request for it, whatever the reason.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from ssl import SSLContext
from typing import Any

import numpy as np
import psutil

from blocktrain import config
from blocktrain.aggregation.beginning import write_first
from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.combine import Averaging
from blocktrain.aggregation.deadlines import Rules
from blocktrain.aggregation.folder import BLOBS, KEY, TOKEN, owners_token
from blocktrain.aggregation.ledger import new_token
from blocktrain.aggregation.store import FolderStore
from blocktrain.disk import write_atomically
from blocktrain.errors import BadInput, BadRun, BlockTrainError
from blocktrain.terms import Digest, Progress, silent
from blocktrain.wire import messages, signing, tensors
from blocktrain.wire.certificates import make_authority, trust_by_fingerprint
from blocktrain.wire.codecs import CODECS
from blocktrain.wire.link import Link
from blocktrain.wire.messages import Assignment, Finished, Receipt, Wait

TENSORS = 14  # as many as a block of the default model has
COLUMNS = 128
BEAT = 20.0  # seconds between two words of a real worker that trains, at the default lease
PATIENCE = 60.0  # seconds that anything may take before the benchmark gives up
NOTHING = Digest(hashlib.sha256(b"").hexdigest())


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
    """Bytes of an update, about."""
    codec: str = "fp32"
    """Of the updates: fp32, fp16, int8, int4 or int2; values are looked at one by one."""
    blocks: int = 4
    """Blocks of the run."""

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.workers < 1 or self.workers % self.blocks:
            raise BadInput(f"{self.workers} workers are not as many for each of {self.blocks} "
                           "blocks; choose a multiple.")  # fmt: skip
        if self.codec not in CODECS:
            raise BadInput(f"There is no codec '{self.codec}'; choose one of {', '.join(CODECS)}.")
        if self.turns < 1 or not self.rate > 0:
            raise BadInput("Nothing would be offered; give a rate above 0 and a turn or more.")

    @property
    def shapes(self) -> tensors.Shapes:
        """Tensors whose update has about the wanted size."""

        def of(rows: int) -> dict[str, tuple[int, ...]]:
            return {f"layer.{n}.weight": (rows, COLUMNS) for n in range(TENSORS)}

        one, two = (tensors.largest(self.codec, of(rows)) for rows in (1, 2))
        return of(max(1, 1 + round((self.update_bytes - one) / (two - one))))

    @property
    def rules(self) -> Rules:
        """Every worker has a slot. Rounds close when all have come, and need no deadline."""
        each = self.workers // self.blocks
        longest = max(10.0, 2 * self.workers / self.rate)
        return Rules(
            rounds=self.turns + 2,  # one for the burst, and one that never ends
            blocks=self.blocks,
            replicas=each,
            quorum=each,
            local_steps=1,
            bytes_per_step=1024,
            ahead=1,  # while the last block's updates come, the first one's workers have work
            first_allowance=longest,
            floor=longest,
        )


# --- a run and its coordinator --------------------------------------------------------------------


def begin(folder: Path, load: Load) -> None:
    """A run of random numbers, as `blocktrain init` would make it."""
    folder.mkdir(parents=True)
    signing.load_or_make_key(folder / KEY)
    make_authority(folder, "bench")
    token = new_token()
    write_atomically(folder / TOKEN, token.encode(), mode=0o600)
    body = tensors.encode(random_values(load.shapes, 1.0), "fp32")
    first = FolderStore(folder / BLOBS).put([body], limit=len(body))
    charter = Charter(
        name="bench",
        data="none",
        corpus=NOTHING,
        splits=((0, NOTHING),) * 3,
        corpus_served=False,
        codec=load.codec,
        rules=load.rules,
        averaging=Averaging(),
        blocks=({name: tuple(shape) for name, shape in load.shapes.items()},) * load.blocks,
        first=(first,) * load.blocks,
        learning="{}",
    )
    write_first(folder, charter, token)


def random_values(shapes: tensors.Shapes, scale: float) -> dict[str, Any]:
    """Tensors of normal random numbers."""
    luck = np.random.default_rng(0)
    return {
        name: luck.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        for name, shape in shapes.items()
    }


@dataclass(frozen=True)
class Place:
    """A coordinator that is up."""

    url: str
    token: str
    trust: SSLContext
    process: psutil.Process

    @property
    def cpu_seconds(self) -> float:
        """That the coordinator has taken so far."""
        return cpu_seconds(self.process)


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of a process, all threads."""
    times = process.cpu_times()
    return float(times.user + times.system)


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
            line = process.stdout.readline()  # none, if it dies before
            if not line:
                raise BadRun(f"The coordinator did not start: {last_line(log)}")
            told = json.loads(line)
            trust = trust_by_fingerprint(told["url"], told["fingerprint"], PATIENCE)
            yield Place(told["url"], owners_token(folder), trust, psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait(PATIENCE)


def last_line(log: Path) -> str:
    """The last thing that a process said."""
    return (log.read_text(errors="replace").strip().splitlines() or ["nothing was said"])[-1]


# --- workers --------------------------------------------------------------------------------------


class Template:
    """One update's tensors, of which every update is another variant."""

    def __init__(self, load: Load) -> None:
        self.start = tensors.encode(random_values(load.shapes, 1e-3), load.codec)[:-4]
        self.hasher = hashlib.sha256(self.start)

    def variant(self, number: int) -> tuple[bytes, Digest]:
        """A body of its own for each number, and its digest, without hashing all of it again.

        Every byte of the mark is below 64, so that by every codec it stands for small numbers.
        """
        mark = bytes(number >> shift & 63 for shift in (0, 6, 12, 18))
        hasher = self.hasher.copy()
        hasher.update(mark)
        return self.start + mark, Digest(hasher.hexdigest())


@dataclass(frozen=True)
class Sent:
    """One update, and how long its receipt took."""

    receipt: float
    """Seconds from the offer to the receipt."""
    post: float
    """Seconds from the post to the receipt."""
    ended: float
    refused: str
    """Why, if it was."""


@dataclass
class LightWorker:
    """A worker that trains nothing."""

    number: int
    load: Load
    place: Place
    template: Template
    key: signing.Key = field(default_factory=signing.new_key)
    offered: "SimpleQueue[float | None]" = field(default_factory=SimpleQueue)
    """Instants at which it shall submit; None ends its work."""
    sent: list[Sent] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.link = Link(self.place.url, verify=self.place.trust, patience=PATIENCE)
        self.link.note = lambda words: self.troubles.append(words) if self.link.gone else None

    def join(self) -> None:
        """Comes in. Many from one address are slowed down; the link waits as it is told."""
        hello = self.link.ask("v1/hello", messages.Hello)
        self.run, self.coordinator = hello.run, hello.coordinator
        join = messages.Join(
            messages.PROTOCOL, hello.run, self.key.id, f"light {self.number}", 2**30, "cpu"
        )
        self.link.bearer = self.place.token
        joined = self.link.say("v1/join", self.signed(join, "join"), messages.Joined)
        self.link.bearer = joined.session

    def work(self, ready: "SimpleQueue[LightWorker]") -> None:
        """Assignment, offer, update: until there are no more offers."""
        while True:
            assignment = self.assigned()
            ready.put(self)
            offered = self.offered.get()
            if offered is None:
                return
            self.sent.append(self.submit(assignment, offered))

    def assigned(self) -> Assignment:
        """Asks until there is something to do."""
        block = self.number * self.load.blocks // self.load.workers
        ask = messages.Ask(self.key.id, [block], None, self.traffic())
        while True:
            match self.link.say("v1/ask", ask, Assignment, Wait, Finished):
                case Assignment() as assignment:
                    return assignment
                case Wait(seconds=seconds):
                    time.sleep(seconds)
                case Finished(why=why):
                    raise BadRun(f"The run ended too early: {why}")

    def submit(self, assignment: Assignment, offered: float) -> Sent:
        """Sends an update and checks its receipt."""
        self.troubles.clear()
        body, digest = self.template.variant(self.number << 8 | len(self.sent))
        update = messages.Update(
            worker=self.key.id,
            run=self.run,
            block=assignment.block,
            round=assignment.round,
            slot=assignment.slot,
            base=assignment.base.snapshot,
            blob=digest,
            steps=assignment.steps,
            bytes_trained=1024 * assignment.steps,
            seconds=1.0,
            loss=1.0,
            optimiser_before=NOTHING,
            optimiser_after=NOTHING,
        )
        self.link.send(f"v1/blobs/{digest}", body)
        signed = self.signed(update, "update")
        posted = time.monotonic()
        answer = self.link.say("v1/updates", signed, messages.Signed)
        ended = time.monotonic()
        receipt = messages.decode(answer.body, Receipt)
        signature = bytes.fromhex(answer.signature)
        if (
            not signing.verify(self.coordinator, answer.body, "receipt", signature)
            or receipt.update != hashlib.sha256(signed.body).hexdigest()
        ):
            raise BlockTrainError("A receipt is not the coordinator's; look at its log.")
        refused = receipt.why if receipt.verdict == "refused" else " ".join(self.troubles)
        return Sent(ended - offered, ended - posted, ended, refused)

    def alive(self) -> None:
        """Says so."""
        self.link.say("v1/alive", messages.Alive(self.key.id, self.traffic()), messages.Done)

    def traffic(self) -> messages.Traffic:
        """Bytes moved so far."""
        return messages.Traffic(self.link.moved.sent, self.link.moved.received)

    def signed(self, message: messages.Message, purpose: str) -> messages.Signed:
        """A message by which this worker stands."""
        body = messages.encode(message)
        return messages.Signed(body, self.key.id, signing.sign(self.key, body, purpose).hex())


# --- the driver -----------------------------------------------------------------------------------


class Crew:
    """All workers, and who tells them when to submit."""

    def __init__(self, load: Load, place: Place, threads: ThreadPoolExecutor) -> None:
        self.load, self.threads = load, threads
        template = Template(load)
        self.workers = [LightWorker(n, load, place, template) for n in range(load.workers)]
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
        """One after another, each once in a while."""
        while True:
            for worker in self.workers:
                if self.over.wait(BEAT / len(self.workers)):
                    return
                worker.alive()

    def gather(self) -> list[LightWorker]:
        """All workers in order, as soon as each has an assignment."""
        return sorted((self.next() for _ in self.workers), key=lambda each: each.number)

    def next(self) -> LightWorker:
        """Who has had an assignment for longest."""
        try:
            return self.ready.get(timeout=PATIENCE)
        except Empty:
            for each in self.working:
                if each.done():
                    each.result()
            raise BadRun(f"No worker got an assignment within {PATIENCE:.0f} s.") from None

    def offer(self, progress: Progress) -> tuple[list[Sent], float]:
        """Offers updates at random instants; what was sent, and how many a second it was."""
        for worker in self.gather():
            self.ready.put(worker)
        count = self.load.turns * self.load.workers
        instants = np.random.default_rng(1).uniform(0, count / self.load.rate, count)
        began = time.monotonic()
        for number, instant in enumerate(sorted(instants)):
            time.sleep(max(0.0, began + instant - time.monotonic()))
            self.next().offered.put(time.monotonic())
            progress(number + 1, count)
        rate = count / (time.monotonic() - began)
        crew = self.gather()  # all receipts are here
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
        """All hang up."""
        self.over.set()
        for worker in self.workers:
            worker.offered.put(None)
        for worker in self.workers:
            worker.link.close()


def measure(load: Load, progress: Progress = silent) -> dict[str, Any]:
    """Bears the load, then the burst, on a run in a temporary folder."""
    driver = psutil.Process()
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name) / "run", Path(name) / "log"
        begin(folder, load)
        with (
            coordinator(folder, log) as place,
            ThreadPoolExecutor(load.workers + 1, "light") as threads,
            closing(Crew(load, place, threads)) as crew,
        ):
            joining = crew.join()
            crew.start()
            before = (place.cpu_seconds, cpu_seconds(driver))
            steady, rate = crew.offer(progress)
            between = (place.cpu_seconds, cpu_seconds(driver))
            burst, seconds = crew.burst()
            after = (place.cpu_seconds, cpu_seconds(driver))
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
        "burst_coordinator_cpu_seconds": after[0] - between[0],
        "burst_driver_cpu_seconds": after[1] - between[1],
        "cores": len(psutil.Process().cpu_affinity()),
    }


def percentiles(seconds: list[float], name: str) -> dict[str, float]:
    """The middle, the slow ones and the slowest, in milliseconds."""
    found = np.percentile(seconds, [50, 95, 99, 100]) * 1000
    return {
        f"{name}{key}_ms": float(it)
        for key, it in zip(("p50", "p95", "p99", "max"), found, strict=True)
    }
