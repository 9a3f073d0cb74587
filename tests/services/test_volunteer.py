"""What a volunteer allows holds to the byte, and what one gave is told however it ends."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from blocktrain.commands.join import join
from blocktrain.errors import CannotSave, TrafficSpent
from blocktrain.learning.objective import Task
from blocktrain.services import wishes, worker
from blocktrain.services.room import state_size, takes
from blocktrain.services.run import Pace
from blocktrain.services.wishes import Wishes
from blocktrain.services.worker import Worker
from blocktrain.wire.throttle import Limits

from .conftest import TINY, Coordinate, Place


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# --- traffic --------------------------------------------------------------------------------------


def test_spent_traffic_is_told_and_stays_spent_in_the_next_life(
    coordinate: Coordinate, tmp_path: Path
) -> None:
    place = coordinate()
    most = 3 * place.keeper.charter.update_size(0)  # two updates, and not what follows
    command = [sys.executable, "-m", "blocktrain", "join", place.url, "--token", place.token]
    command += ["--folder", str(tmp_path / "w"), "--data", str(place.words), "--threads", "1"]
    done = subprocess.run(
        [*command, "--max-traffic", str(most), "--log", "json", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 13, done.stderr
    (line,) = done.stdout.splitlines()
    told = msgspec.json.decode(line)
    assert told["exit_code"] == 13
    assert "raise the limit" in told["error"]
    assert told["updates"] == 2
    assert told["bytes_trained"] == 2 * 2 * 4 * 32
    moved = told["bytes_sent"] + told["bytes_received"]
    assert most / 2 < moved <= most
    *said, sentence = done.stderr.splitlines()
    assert any("block 1, round 1" in msgspec.json.decode(row)["message"] for row in said)
    assert sentence.startswith("blocktrain: Only ")

    again = life(place, tmp_path / "w", most)
    with pytest.raises(TrafficSpent):
        again.work()
    assert sum(vars(again.link.moved).values()) <= most - moved
    richer = life(place, tmp_path / "w", most + 1000)
    spent = sum(vars(again.link.moved).values())  # perhaps it could still say hello
    assert richer.link.meter.left() == most + 1000 - moved - spent
    assert life(place, tmp_path / "other", most).link.meter.left() == most


def life(place: Place, folder: Path, most: int) -> Worker:
    """One life in this process, with so many bytes for all lives of its folder."""
    link = place.link(limits=Limits(traffic=most))
    return Worker(link, place.token, folder, Wishes(data=str(place.words), device="cpu"))


# --- leaving --------------------------------------------------------------------------------------


@pytest.fixture
def signals() -> Iterator[None]:
    """The command listens to signals; afterwards they are pytest's again."""
    kept = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for each, handler in kept.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("signals")
def test_people_see_what_they_gave_before_the_trouble(
    coordinate: Coordinate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = coordinate()
    asked = Wishes(data=str(place.words), device="cpu", block=1, max_disk=1000)
    with pytest.raises(CannotSave) as stopped:
        join(place.url, token=place.token, folder=tmp_path / "w", wishes=asked)
    assert "What you gave; thank you" in capsys.readouterr().out
    assert stopped.value.told["updates"] == 0
    assert stopped.value.told["bytes_sent"] != 0


# --- disk -----------------------------------------------------------------------------------------


@contextmanager
def largest_size(folder: Path) -> Iterator[list[int]]:
    """Looks all the time how large the folder is; the list has the largest size that was seen."""
    seen, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.001):
            try:
                seen[0] = max(seen[0], size_of(folder))
            except FileNotFoundError:  # it was replaced while we looked
                continue

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_a_run_stays_within_the_disk_that_it_was_said_to_take(
    coordinate: Coordinate, tmp_path: Path, codec: str
) -> None:
    place = coordinate(replace(TINY, pace=replace(TINY.pace, rounds=5)), codec, serve_corpus=True)
    charter = place.keeper.charter
    text = sum(length for length, _ in charter.splits)
    most = takes([0, 1], charter, TINY.recipe) + text
    one = place.worker(tmp_path / "w", data=None, max_disk=most)
    one.join()
    assert one.blocks is None
    with largest_size(one.folder) as seen:
        while one.turn():
            pass
    assert 0.6 * most < seen[0] <= most
    less = place.worker(tmp_path / "less", data=None, max_disk=most - 1)
    less.join()
    assert less.blocks is not None
    assert len(less.blocks) == 1


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_the_size_of_an_update_and_its_memory_is_known_before(
    coordinate: Coordinate, tmp_path: Path, codec: str
) -> None:
    place = coordinate(codec=codec)
    one = place.worker(tmp_path / "w", block=1)
    one.join()
    one.submit_pending = lambda: None  # type: ignore[method-assign]
    one.turn()
    known = state_size(0, place.keeper.charter)
    assert known - 8192 < size_of(one.notebook.pending) <= known


def test_what_does_not_fit_on_the_disk_is_not_begun(coordinate: Coordinate, tmp_path: Path) -> None:
    place = coordinate(serve_corpus=True)
    charter = place.keeper.charter
    text = sum(length for length, _ in charter.splits)
    unread = place.worker(tmp_path / "unread", data=None, block=1, max_disk=text - 1)
    with pytest.raises(CannotSave, match="The text needs"):
        unread.join()
    assert not any((unread.folder / "corpus").iterdir())
    both = 2 * (charter.snapshot_size(0) + charter.snapshot_size(1))
    full = place.worker(tmp_path / "full", data=None, block=1, max_disk=text + both + 1000)
    full.join()
    with pytest.raises(CannotSave, match="Training of block 1 needs"):
        full.turn()
    assert full.notebook.waiting() is None
    none = place.worker(tmp_path / "none", data=None, block=2, max_disk=text + 1000)
    none.join()
    with pytest.raises(CannotSave, match="Block 2 needs"):
        none.turn()
    assert size_of(none.folder) <= text + 1000


# --- link -----------------------------------------------------------------------------------------


def test_a_link_that_is_found_to_be_slow_gets_what_fits_through_it(
    coordinate: Coordinate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "TELLING", 10_000)
    run = replace(
        TINY,
        shape=replace(TINY.shape, blocks=3),
        task=Task(lookahead=0),
        pace=Pace(rounds=1, local_steps=1, batch=1),
    )
    place = coordinate(run, serve_corpus=True)
    charter = place.keeper.charter
    slow = place.worker(tmp_path / "slow", data=None)
    slow.link = place.link(limits=Limits(download=100_000.0))
    one, two = (wishes.downloads(block, charter, run.recipe) for block in (0, 1))
    monkeypatch.setattr(wishes, "PATIENT", (one + two) / 2 / 100_000.0)  # seconds for more than one
    slow.join()
    assert slow.rate == pytest.approx(100_000.0, rel=0.3)
    assert slow.blocks == [0]
    fast = place.worker(tmp_path / "fast", data=None)
    fast.join()
    assert fast.rate is not None
    assert fast.rate > 400_000.0
    assert fast.blocks is None
