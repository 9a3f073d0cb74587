"""Real workers, as processes, that are killed; what they had trained is not lost."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.chaos.faults import Faults
from tests.chaos.light import begin_light, quick
from tests.chaos.real import Crew, begun, same_again
from tests.chaos.settled import settled

from blocktrain.aggregation.folder import BLOBS, LOCK
from blocktrain.aggregation.store import FolderStore
from blocktrain.config import environment
from blocktrain.disk import lock
from blocktrain.errors import BadRun
from blocktrain.learning.model import Shape
from blocktrain.services.embedded import Embedded, status
from blocktrain.services.run import Exchange, Pace, Run
from blocktrain.wire import messages

RUN = Run(
    shape=Shape(blocks=2, layers=1, width=32, heads=2, window=32),
    pace=Pace(rounds=6, local_steps=3, batch=4),
    exchange=Exchange("fp32"),
)


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


KEPT = """
import sys, time
from pathlib import Path
from blocktrain.services.embedded import Embedded, status
with Embedded(Path(sys.argv[1]), 0, "").up():
    print("up", flush=True)
    time.sleep(60)
"""


def test_children_end_with_a_killed_parent(tmp_path: Path) -> None:
    """Else nobody could go on with the run: its coordinator would still keep it."""
    begin_light(tmp_path / "run", quick())
    command = [sys.executable, "-c", KEPT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        with pytest.raises(BadRun, match="still kept"):
            lock(tmp_path / "run" / LOCK, "still kept")
        parent.kill()
    for _ in range(100):
        with suppress(BadRun):
            os.close(lock(tmp_path / "run" / LOCK, "still kept"))
            break
        time.sleep(0.05)
    with Embedded(tmp_path, 0, "").up() as link:
        assert status(link).state == "running"
