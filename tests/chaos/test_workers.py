"""Real workers, as processes, that are killed; what they had trained is not lost."""

import hashlib
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.chaos.faults import Faults
from tests.chaos.light import begin_light, quick
from tests.chaos.lives import Lives
from tests.chaos.real import Crew, begun, same_again
from tests.chaos.settled import settled

from blocktrain.aggregation.folder import BLOBS, LOCK
from blocktrain.aggregation.folder_store import FolderStore
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


def test_killed_in_the_middle_of_an_upload(tmp_path: Path, worker_lives: Lives) -> None:
    """The next start sends the same update again, and it counts once."""
    corpus = begun(tmp_path, replace(RUN, pace=replace(RUN.pace, rounds=2)))
    embedded, home, log = Embedded(tmp_path, 0, ""), tmp_path / "worker", tmp_path / "log"
    with embedded.up():
        told = {"url": embedded.url, "token": embedded.token, "folder": str(home)}
        # 20 kB a second: the 115 kB of an update take about six.
        worker = worker_lives.start(log, 0, **told, max_upload=20_000.0)
        pending = wait_for_pending(home)
        time.sleep(1.0)
        worker.end()
        signed = messages.decode(pending.read_bytes(), messages.Signed)
        update = messages.decode(signed.body, messages.Update)
        assert FolderStore(embedded.run / BLOBS).size(update.blob) is None, "it was too fast"
        assert worker_lives.start(log, 0, **told).over(within=45), log.read_text()
        assert "Traceback" not in log.read_text()
    found = settled(embedded.run)
    name = hashlib.sha256(signed.body).hexdigest()
    assert name in [receipt.update for receipt in found.taken]
    assert len(found.receipts) == 4
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
