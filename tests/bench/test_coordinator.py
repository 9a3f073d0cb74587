"""`blocktrain bench coordinator` at a tenth of its size: what it counts, what it promises."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec.structs
import pytest

from blocktrain.aggregation.folder import LEDGER
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.bench.coordinator import Crew, Load, begin, coordinator, measure_in
from blocktrain.bench.light import Template
from blocktrain.errors import BadInput, BadRun, NotAllowed
from blocktrain.wire import tensors
from blocktrain.wire.codecs import CODECS
from blocktrain.wire.tensors import decode

pytestmark = pytest.mark.alone
SMALL = Load(workers=20, rate=10.0, turns=2, update_bytes=100_000)
FEW = Load(workers=2, rate=10.0, turns=1, update_bytes=1, blocks=1)


def test_twenty_workers_get_their_receipts_in_time(tmp_path: Path) -> None:
    """The bounds of 200 workers and 1 MB; they hold with room to spare, also beside other tests."""
    found = measure_in(tmp_path, SMALL)
    assert (found["updates"], found["burst_updates"]) == (40, 20)
    assert (found["refused"], found["burst_refused"], found["refusals"]) == (0, 0, [])
    assert 7.0 < found["offered_per_second"] < 12.0
    assert 0 < found["p50_ms"] <= found["p95_ms"] <= found["p99_ms"] <= found["max_ms"]
    assert found["post_p50_ms"] < found["p50_ms"]
    assert found["p99_ms"] <= 1000
    assert found["burst_seconds"] <= 5
    assert 0 < found["coordinator_cpu_seconds"] < 20
    assert 0 < found["driver_cpu_seconds"] < 20
    with SqliteLedger(tmp_path / "run" / LEDGER) as ledger, ledger.reading() as r:
        receipts = r.receipts()
        closed = [version.round for version in r.versions() if version.round]
    assert len(receipts) == 60  # every receipt that was counted was given, and to an own blob
    assert len({receipt.blob for receipt in receipts}) == 60
    assert len({receipt.worker for receipt in receipts}) == 20
    assert {receipt.verdict for receipt in receipts} == {"taken"}
    assert sorted(closed) == [1] * 4 + [2] * 4 + [3] * 4  # a round for each turn, one for the burst
    assert {receipt.into_round for receipt in receipts} == {1, 2, 3}


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    """Two workers who have joined and wait to be told."""
    begin(tmp_path / "run", FEW)
    with (
        coordinator(tmp_path / "run", tmp_path / "log") as place,
        ThreadPoolExecutor(3) as threads,
        closing(Crew(FEW, place, threads)) as made,
    ):
        made.join()
        yield made


def test_refusals_are_counted(crew: Crew) -> None:
    worker = crew.workers[0]
    assignment = worker.assigned()
    wrong = worker.submit(msgspec.structs.replace(assignment, slot=7), 0.0)
    assert "never yours" in wrong.refused
    answers: list[int] = []

    def flood() -> None:
        """Asks in the worker's name, far too often, until the worker itself is slowed down."""
        bearer = {"Authorization": f"Bearer {worker.link.bearer}"}
        url = f"{worker.place.url}/v1/versions/0/0"
        with httpx.Client(verify=worker.place.trust, headers=bearer, trust_env=False) as client:
            while not worker.troubles:
                answers.append(client.get(url).status_code)

    flooding = crew.threads.submit(flood)
    while 429 not in answers:
        time.sleep(0.01)
    slowed = worker.submit(assignment, 0.0)
    while not slowed.refused:  # it was lucky: one request in some dozens gets through
        slowed = worker.submit(assignment, 0.0)
    flooding.result()
    assert "429" in slowed.refused


def test_a_receipt_of_somebody_else_is_noticed(crew: Crew) -> None:
    worker, other = crew.workers
    worker.coordinator = other.key.id
    with pytest.raises(BadInput, match="not the coordinator's"):
        worker.submit(worker.assigned(), 0.0)


def test_what_goes_wrong_in_a_worker_is_told(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktrain.bench.coordinator.PATIENCE", 2.0)
    for worker in crew.workers:
        worker.link.bearer = "nobody's session"
    crew.start()
    with pytest.raises(NotAllowed):
        crew.next()


def test_a_coordinator_that_does_not_start_says_why(tmp_path: Path) -> None:
    starting = coordinator(tmp_path / "nothing", tmp_path / "log")
    with pytest.raises(BadRun, match="There is no run in"):
        starting.__enter__()


@pytest.mark.parametrize("codec", CODECS)
def test_every_update_is_another_one_and_can_be_read(codec: str) -> None:
    load = replace(SMALL, codec=codec)
    assert 100_000 <= tensors.largest(codec, load.shapes) < 110_000
    template = Template(load.shapes, codec)
    bodies = {template.variant(number) for number in (0, 1, 63, 64, 2**24 - 1)}
    assert len({body for body, _ in bodies}) == len({digest for _, digest in bodies}) == 5
    for body, _ in bodies:
        values = decode(body, codec, load.shapes)
        assert max(abs(value).max() for value in values.values()) < 8


@pytest.mark.parametrize(
    "wrong",
    [{"workers": 21}, {"workers": 0}, {"codec": "zip"}, {"turns": 0}, {"rate": 0.0}],
)
def test_a_load_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        replace(SMALL, **wrong)


def test_the_command_needs_no_torch_and_answers_in_json() -> None:
    command = [sys.executable, "-m", "blocktrain", "bench", "coordinator", "--json"]
    few = ["--workers", "2", "--blocks", "1", "--rate", "10", "--turns", "1"]
    done = subprocess.run(
        [*command, *few, "--update-bytes", "1000"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["workers"], found["updates"], found["burst_updates"]) == (2, 2, 2)
    look = "import sys, blocktrain.commands.load as c; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], env=os.environ).returncode == 0
