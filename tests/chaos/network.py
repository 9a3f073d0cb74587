"""A training network that is quick to start: a real coordinator and workers without torch.

    begin_light(run, Rules(...))
    with network(run, lives, workers=2) as net:
        net.finish()
    settled(net.run, net.receipts)

The coordinator is a process that may be killed (kill_points.py); its run has tiny blocks of random
numbers. Light workers speak every word that real ones speak, over real HTTP, signed with real keys;
what they send was not trained.
"""

import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from blocktrain.aggregation import charter as charters
from blocktrain.aggregation import state as states
from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.combine import Averaging
from blocktrain.aggregation.deadlines import Rules
from blocktrain.aggregation.folder import BLOBS, KEY, LEDGER, TOKEN, owners_token
from blocktrain.aggregation.ledger import new_token
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.aggregation.state import State
from blocktrain.aggregation.store import FolderStore
from blocktrain.config import environment
from blocktrain.services.begin import write_first
from blocktrain.terms import Digest
from blocktrain.wire import messages, signing, tensors
from blocktrain.wire.link import Link
from blocktrain.wire.messages import Assignment, Finished, Receipt, Signed, Update, Wait
from blocktrain.wire.signing import Key, load_or_make_key, new_key

from tests.chaos.faults import Stage
from tests.chaos.proxy import Line

SHAPES = {"matrix": (6, 10), "vector": (7,)}
NOTHING = Digest(hashlib.sha256(b"").hexdigest())
SOON = 0.05  # seconds after which an idle light worker asks again, however long it was told


# --- a run ----------------------------------------------------------------------------------------


def quick(**others: Any) -> Rules:
    """Rules of a run that takes a second or two."""
    usual = {
        "rounds": 3,
        "blocks": 1,
        "replicas": 2,
        "quorum": 2,
        "local_steps": 5,
        "bytes_per_step": 8,
        "grace": 0.2,
        "floor": 0.5,
        "first_allowance": 3.0,
        "lease": 1.0,
    }
    return Rules(**{**usual, **others})


def begin_light(folder: Path, rules: Rules, averaging: Averaging | None = None) -> None:
    """A run of tiny blocks, as `blocktrain init` would make it."""
    folder.mkdir(parents=True)
    load_or_make_key(folder / KEY)
    store, luck = FolderStore(folder / BLOBS), np.random.default_rng(0)
    first = []
    for _ in range(rules.blocks):
        values = {name: luck.normal(size=shape) for name, shape in SHAPES.items()}
        floats = {name: value.astype(np.float32) for name, value in values.items()}
        body = tensors.encode(floats, "fp32")
        first.append(store.put([body], limit=len(body)))
    charter = Charter(
        name="light",
        data="none",
        corpus=NOTHING,
        splits=((0, NOTHING),) * 3,
        corpus_served=False,
        codec="fp32",
        rules=rules,
        averaging=averaging or Averaging(),
        blocks=(SHAPES,) * rules.blocks,
        first=tuple(first),
        learning="{}",
    )
    token = new_token()
    (folder / TOKEN).write_text(token)
    write_first(folder, charter, token)


def state_of(run: Path) -> State:
    """Where the rounds of a run are, as its ledger has it at this moment."""
    with SqliteLedger(run / LEDGER) as ledger, ledger.reading() as r:
        kept = r.state()
    assert kept is not None
    return states.decode(kept)


# --- a coordinator --------------------------------------------------------------------------------


class Lives:
    """Starts coordinators: a process that forks one for every life."""

    def __init__(self) -> None:
        program = Path(__file__).with_name("kill_points.py")
        self.turn = threading.Lock()
        self.parent = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def start(self, folder: Path, port: int, log: Path, kill_at: int = 0) -> "Life":
        """A coordinator that keeps the run in this folder; it dies at boundary `kill_at`."""
        told = {"folder": str(folder), "port": port, "log": str(log), "kill_at": kill_at}
        assert self.parent.stdin and self.parent.stdout
        with self.turn:
            self.parent.stdin.write(json.dumps(told) + "\n")
            self.parent.stdin.flush()
            return Life(int(self.parent.stdout.readline()))

    def close(self) -> None:
        """No life goes on."""
        assert self.parent.stdin and self.parent.stdout
        self.parent.stdin.close()
        self.parent.wait()
        self.parent.stdout.close()


class Life:
    """One process of a coordinator."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self.handle: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self.handle = None  # it is dead already

    def over(self, within: float = 0.0) -> bool:
        """Whether it has ended, or does within so many seconds."""
        if self.handle is not None and select.select([self.handle], [], [], within)[0]:
            os.close(self.handle)
            self.handle = None
        return self.handle is None

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends it; kill -9 if nothing else is said."""
        if self.handle is not None:
            with suppress(ProcessLookupError):  # it was faster
                signal.pidfd_send_signal(self.handle, how)
        assert self.over(within=20), f"process {self.pid} does not end by {how.name}"


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# --- workers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """An update and its tensors, ready to be sent."""

    signed: Signed
    body: bytes

    @property
    def update(self) -> Update:
        """What was signed."""
        return messages.decode(self.signed.body, Update)

    @property
    def name(self) -> Digest:
        """What receipts call it."""
        return Digest(hashlib.sha256(self.signed.body).hexdigest())


@dataclass
class Light:
    """A worker without torch: honest words, made-up tensors."""

    url: str
    token: str
    seconds_per_step: float = 0.0
    key: Key = field(default_factory=new_key)
    receipts: list[Signed] = field(default_factory=list)
    """Every answer it got to an update, as it came."""
    notes: list[str] = field(default_factory=list)
    """What its link told: that the coordinator is gone, and why, and that it is back."""
    leaving: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.link = Link(self.url, patience=40.0)
        self.link.read_timeout = 5.0
        self.link.note = self.notes.append

    def join(self) -> None:
        """Comes in."""
        hello = self.link.ask("v1/hello", messages.Hello)
        self.coordinator = hello.coordinator
        join = messages.Join(messages.PROTOCOL, hello.run, self.key.id, "light", 2**30, "cpu")
        self.link.bearer = self.token
        joined = self.link.say("v1/join", signed(self.key, join, "join"), messages.Joined)
        self.link.bearer = joined.session
        self.run_id, self.charter = hello.run, charters.decode(joined.charter)

    def ask(self) -> Assignment | Wait | Finished:
        """What is to be done."""
        ask = messages.Ask(self.key.id, None, self.seconds_per_step or None)
        return self.link.say("v1/ask", ask, Assignment, Wait, Finished)

    def assigned(self) -> Assignment:
        """Asks until there is something to be done."""
        while not isinstance(answer := self.ask(), Assignment):
            assert not isinstance(answer, Finished), "the run is over already"
            time.sleep(SOON)
        return answer

    def make(self, task: Assignment, luck: int = 0, **lies: Any) -> Made:
        """An update for an assignment. Another luck makes other tensors; lies replace fields."""
        shapes = self.charter.shapes(task.block)
        numbers = np.random.default_rng([task.block, task.round, task.slot, luck])
        change = {
            name: numbers.normal(size=shape, scale=0.05).astype(np.float32)
            for name, shape in shapes.items()
        }
        body = tensors.encode(change, self.charter.codec)
        told: dict[str, Any] = {
            "worker": self.key.id,
            "run": self.run_id,
            "block": task.block,
            "round": task.round,
            "slot": task.slot,
            "base": task.base.snapshot,
            "blob": hashlib.sha256(body).hexdigest(),
            "steps": task.steps,
            "bytes_trained": task.steps * self.charter.rules.bytes_per_step,
            "seconds": max(1e-3, task.steps * self.seconds_per_step),
            "loss": 1.0,
            "optimiser_before": NOTHING,
            "optimiser_after": NOTHING,
        }
        return Made(signed(self.key, Update(**{**told, **lies}), "update"), body)

    def put(self, made: Made) -> None:
        """Sends the tensors."""
        self.link.send(f"v1/blobs/{made.update.blob}", made.body)

    def submit(self, made: Made) -> Receipt:
        """Sends the words; returns the receipt, which must be the coordinator's."""
        answer = self.link.say("v1/updates", made.signed, Signed)
        receipt = messages.decode(answer.body, Receipt)
        assert receipt.update == made.name
        assert is_signed_by(self.coordinator, answer, "receipt")
        self.receipts.append(answer)
        return receipt

    def send(self, made: Made) -> Receipt:
        """Both."""
        self.put(made)
        return self.submit(made)

    def work(self) -> int:
        """Rounds until the run is over or it is told to leave; returns how many updates it sent."""
        self.join()
        count = 0
        while not self.leaving.is_set():
            match self.ask():
                case Assignment() as task:
                    time.sleep(task.steps * self.seconds_per_step)
                    self.send(self.make(task))
                    count += 1
                case Wait(seconds=seconds):
                    time.sleep(min(seconds, SOON))
                case Finished():
                    break
        return count


def signed(key: Key, message: messages.Message, purpose: str) -> Signed:
    """A message by which the holder of a key stands."""
    body = messages.encode(message)
    return Signed(body, key.id, signing.sign(key, body, purpose).hex())


def is_signed_by(who: str, what: Signed, purpose: str) -> bool:
    """Whether they stand by it."""
    return signing.verify(who, what.body, purpose, bytes.fromhex(what.signature))


# --- all of it ------------------------------------------------------------------------------------


@dataclass
class Network(Stage):
    """A run, its coordinator, and light workers in threads."""

    run: Path
    lives: Lives
    port: int = field(default_factory=free_port)
    workers: list[Light] = field(default_factory=list)
    working: "list[Future[int]]" = field(default_factory=list)
    kill_at: Iterator[int] = field(default_factory=lambda: iter(()))
    """At which boundary each life dies; those for which nothing is told live on."""
    lines: dict[int, Line] = field(default_factory=dict)
    life: Life | None = None
    starts: int = 0

    def __post_init__(self) -> None:
        self.token, self.log = owners_token(self.run), self.run.with_suffix(".log")
        self.url = f"http://127.0.0.1:{self.port}"
        self.threads = ThreadPoolExecutor(32, "light")

    @property
    def receipts(self) -> list[Signed]:
        """All that workers hold."""
        return [receipt for worker in self.workers for receipt in worker.receipts]

    def worker(self, seconds_per_step: float = 0.0) -> Light:
        """One more worker, who does nothing by itself."""
        self.workers.append(Light(self.url, self.token, seconds_per_step))
        return self.workers[-1]

    def distant_worker(self, seconds_per_step: float = 0.0) -> Light:
        """One more, at the end of a line that can be cut."""
        line = Line(self.port)
        self.workers.append(Light(line.url, self.token, seconds_per_step))
        self.lines[len(self.workers)] = line
        return self.workers[-1]

    def set_to_work(self, *workers: Light) -> None:
        """Lets workers work on their own."""
        self.working += [self.threads.submit(worker.work) for worker in workers]

    def look_after(self) -> None:
        """Starts the coordinator if it is dead."""
        if self.life is not None and not self.life.over():
            return
        self.life = self.lives.start(self.run, self.port, self.log, next(self.kill_at, 0))
        self.starts += 1

    def kill_coordinator(self) -> None:
        """kill -9; it stays dead until somebody looks after it."""
        assert self.life is not None
        self.life.end()

    def state(self) -> State:
        """Where the rounds are."""
        return state_of(self.run)

    def line(self, worker: int) -> Line:
        """How a worker reaches the coordinator."""
        return self.lines[worker]

    def finish(self, within: float = 40.0) -> int:
        """Looks after the run until all workers are told that it is over; returns their updates."""
        deadline = time.monotonic() + within
        while not all(each.done() for each in self.working):
            assert time.monotonic() < deadline, f"not over after {within} s: {self.state()}"
            self.look_after()
            time.sleep(0.01)
        return sum(each.result() for each in self.working)

    def close(self) -> None:
        """Everybody goes home."""
        for worker in self.workers:
            worker.leaving.set()
            worker.link.stop.set()
        if self.life is not None:
            self.life.end(signal.SIGTERM)
            self.life = None
        self.threads.shutdown()
        for worker in self.workers:
            worker.link.close()
        for line in self.lines.values():
            line.close()


@contextmanager
def network(
    run: Path,
    lives: Lives,
    workers: int = 0,
    kill_at: Iterable[int] = (),
    kind: type[Network] = Network,
) -> Iterator[Network]:
    """The network of a run, at work; in the end all of it has ended in good order."""
    net = kind(run, lives, kill_at=iter(kill_at))
    try:
        net.look_after()
        net.set_to_work(*[net.worker() for _ in range(workers)])
        yield net
    finally:
        net.close()
