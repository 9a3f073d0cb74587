"""Workers of one machine take turns, and a dead one holds nobody up."""

import subprocess
import sys
import time
from pathlib import Path

from blocktrain.services import cores

HOLDER = """
import sys, time
from pathlib import Path
from blocktrain.services import cores
with cores.turn(Path(sys.argv[1]), lambda: False):
    print("mine", flush=True)
    time.sleep(60)
"""


def test_a_place_is_free_again_when_its_holder_was_killed(tmp_path: Path) -> None:
    cores.make(tmp_path, 1)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "mine\n"
        assert cores.take(tmp_path) is None
        holder.kill()
    with cores.turn(tmp_path, lambda: False):
        assert cores.take(tmp_path) is None


def test_as_many_compute_as_there_are_places(tmp_path: Path) -> None:
    cores.make(tmp_path, 2)
    with cores.turn(tmp_path, lambda: False), cores.turn(tmp_path, lambda: False):
        assert cores.take(tmp_path) is None
    cores.make(tmp_path, 1)
    with cores.turn(tmp_path, lambda: False):
        assert cores.take(tmp_path) is None


def test_who_is_told_to_stop_does_not_wait(tmp_path: Path) -> None:
    cores.make(tmp_path, 1)
    deadline = time.monotonic() + 0.1
    with (
        cores.turn(tmp_path, lambda: False),
        cores.turn(tmp_path, lambda: time.monotonic() > deadline),
    ):
        assert deadline < time.monotonic() < deadline + 5


def test_without_a_folder_nobody_waits() -> None:
    began = time.monotonic()
    with cores.turn(None, lambda: False), cores.turn(None, lambda: False):
        assert time.monotonic() - began < 1
