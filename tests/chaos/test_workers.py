"""Real workers, as processes, that are killed; what they had trained is not lost."""

import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blocktrain.aggregation.folder import BLOBS, LEDGER
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.aggregation.state import State
from blocktrain.aggregation.store import FolderStore
from blocktrain.config import environment
from blocktrain.learning.data import Corpus, open_corpus
from blocktrain.learning.model import Shape
from blocktrain.services.begin import Settings, Timing, begin
from blocktrain.services.embedded import Embedded
from blocktrain.services.replay import replay
from blocktrain.services.run import Pace, Run
from blocktrain.wire import messages

from tests.chaos.faults import Faults, Stage
from tests.chaos.network import state_of
from tests.chaos.settled import settled

RUN = Run(
    shape=Shape(blocks=2, layers=1, width=32, heads=2, window=32),
    pace=Pace(rounds=6, local_steps=3, batch=4),
)
TIMING = Timing(lease=10.0, grace=1.0, first_allowance=60.0)


class Crew(Stage):
    """A run on this machine, as `blocktrain train` keeps it."""

    def __init__(self, embedded: Embedded) -> None:
        self.embedded, self.run = embedded, embedded.run

    def state(self) -> State:
        """Where the rounds are."""
        return state_of(self.run)

    def look_after(self) -> None:
        """Starts again what died, a second later."""
        self.embedded.look_after()

    def kill(self, worker: int) -> None:
        """kill -9."""
        process = self.embedded.children[worker].process
        assert process is not None
        process.kill()

    def kill_coordinator(self) -> None:
        """kill -9."""
        self.kill(0)


def begun(folder: Path, run: Run) -> Corpus:
    """A run on a little text that the coordinator serves."""
    text = folder / "text"
    text.write_bytes(hashlib.shake_128(b"text").hexdigest(10_000).encode())
    corpus = open_corpus(str(text))
    begin(folder / "run", Settings("chaos", run, TIMING, serve_corpus=True), corpus)
    return corpus


def same_again(run: Path, corpus: Corpus, folder: Path) -> None:
    """Whatever was trained comes out the same when it is trained again, digest by digest."""
    with SqliteLedger(run / LEDGER) as ledger:
        again = replay(ledger, corpus, folder)
    assert again.different == []
    assert again.snapshots > 0


def test_all_workers_and_the_coordinator_are_killed(tmp_path: Path) -> None:
    """They are started again, and every digest is as if nothing had happened to them."""
    corpus = begun(tmp_path, RUN)
    crew = Crew(Embedded(tmp_path, 2, str(tmp_path / "text")))
    faults = Faults(crew)
    faults.kill(worker=1, round=3)
    faults.kill(worker=2, round=3)
    faults.kill_coordinator(round=5)
    with crew.embedded.up():
        faults.play()
        starts = [child.starts for child in crew.embedded.children]
    assert starts == [2, 2, 2]
    found = settled(crew.run)
    assert len(found.taken) == 12
    same_again(crew.run, corpus, tmp_path / "again")


@contextmanager
def joined(embedded: Embedded, folder: Path, *more: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A worker as its volunteer starts it."""
    command = [sys.executable, "-m", "blocktrain", "join", embedded.url, "--token", embedded.token]
    options = ["--folder", str(folder), "--threads", "1", *more]
    with (folder.parent / "worker.log").open("ab") as log:
        process = subprocess.Popen([*command, *options], env=environment(), stderr=log, stdout=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_killed_in_the_middle_of_an_upload(tmp_path: Path) -> None:
    """The next start sends the same update again, and it counts once."""
    corpus = begun(tmp_path, RUN)
    embedded, home = Embedded(tmp_path, 0, ""), tmp_path / "worker"
    with embedded.up():
        # 20 kB a second: the 115 kB of an update take about six.
        with joined(embedded, home, "--max-upload", "20000") as worker:
            pending = wait_for_pending(home)
            time.sleep(1.0)
            worker.send_signal(signal.SIGKILL)
            worker.wait()
        signed = messages.decode(pending.read_bytes(), messages.Signed)
        update = messages.decode(signed.body, messages.Update)
        assert FolderStore(embedded.run / BLOBS).size(update.blob) is None, "it was too fast"
        with joined(embedded, home) as worker:
            assert worker.wait(timeout=45) == 0
    found = settled(embedded.run)
    name = hashlib.sha256(signed.body).hexdigest()
    assert name in [receipt.update for receipt in found.taken]
    assert len(found.receipts) == 12
    same_again(embedded.run, corpus, tmp_path / "again")


def wait_for_pending(home: Path) -> Path:
    """The words of an update that waits for its receipt, as soon as there is one."""
    deadline = time.monotonic() + 40
    while not (found := [*home.glob("*/pending/update.json")]):
        assert time.monotonic() < deadline, "nothing was trained"
        time.sleep(0.02)
    return found[0]
