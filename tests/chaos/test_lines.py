"""Lines that are cut without a word, and heal."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.chaos.faults import Faults
from tests.chaos.light import begin_light, quick
from tests.chaos.lives import Lives
from tests.chaos.network import network
from tests.chaos.settled import settled

LASTING = 1.6  # seconds; the lease is 1, so that whoever is cut off loses its slot meanwhile


def one_worker(faults: Faults) -> None:
    faults.partition(worker=2, round=3, seconds=LASTING)


def all_workers(faults: Faults) -> None:
    faults.partition(worker=1, round=3, seconds=LASTING)
    faults.partition(worker=2, round=3, seconds=LASTING)


def within_an_upload(faults: Faults) -> None:
    faults.partition_within(b"PUT /v1/blobs", worker=2, round=3, seconds=LASTING)


def within_an_update(faults: Faults) -> None:
    faults.partition_within(b"POST /v1/updates", worker=2, round=3, seconds=LASTING)


def answers_only(faults: Faults) -> None:
    faults.lose_answers(worker=2, round=3, seconds=LASTING)


def again_and_again(faults: Faults) -> None:
    for round in (2, 4, 6):
        faults.partition(worker=2, round=round, seconds=0.7)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "script",
    [one_worker, all_workers, within_an_upload, within_an_update, answers_only, again_and_again],
)
def test_a_partition_heals(tmp_path: Path, lives: Lives, script: Callable[[Faults], None]) -> None:
    begin_light(tmp_path / "run", quick(rounds=12))
    with network(tmp_path / "run", lives) as net:
        for worker in (net.distant_worker(0.02), net.distant_worker(0.02)):
            worker.link.read_timeout = 0.6
            net.set_to_work(worker)
        faults = Faults(net)
        script(faults)
        faults.play()
        net.finish()
    found = settled(net.run, net.receipts)
    last = max(it.round for it in found.taken if it.worker == str(net.workers[1].key.id))
    assert last > 8, "who was cut off did not come back"
