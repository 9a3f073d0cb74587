"""Three hosts train a tiny model: what is told is true, and whoever dies is noticed."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from blocktrain.aggregation import charter as charters
from blocktrain.aggregation.folder import BLOBS, LEDGER, owners_token
from blocktrain.aggregation.folder_store import FolderStore
from blocktrain.aggregation.ledger import Evaluation, WorkerId, hash_of_token
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.bench import three_hosts as bench
from blocktrain.bench.hosts import Host
from blocktrain.commands.hosts import Between
from blocktrain.commands.hosts import three_hosts as command
from blocktrain.commands.lab import RunFlags
from blocktrain.console import Output
from blocktrain.errors import BadRun
from blocktrain.learning.data import open_corpus
from blocktrain.learning.evaluate import evaluate
from blocktrain.learning.files import from_parameters, load_model
from blocktrain.learning.model import Shape
from blocktrain.services import children
from blocktrain.services.begin import Settings, Timing, begin
from blocktrain.services.children import Child
from blocktrain.services.follow import from_folder
from blocktrain.services.run import Pace, Run
from blocktrain.wire import tensors

SHAPE, PACE = Shape(blocks=2, layers=1, width=32, heads=2, window=32), Pace(4, 2, batch=4)
QUICK = Timing(grace=0.2, floor=1.0, first_allowance=20.0, lease=5.0)
Sentence = Callable[[BaseException], str]

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need Linux and root"
)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("one two three four, five. six\n" * 1000)
    return path


@needs_root
def test_a_tiny_run_across_a_wan_tells_what_it_came_to(
    tmp_path: Path,
    words: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A worker is killed as soon as it is there, and the run ends all the same."""
    start = Host.start
    killed: list[int] = []

    def strike(host: Host, arguments: list[str], **popen: object) -> object:
        process = start(host, arguments, **popen)
        if "join" in arguments and not killed:
            process.kill()
            killed.append(process.pid)
        return process

    monkeypatch.setattr(Host, "start", strike)
    monkeypatch.setattr(bench, "LOOK", 0.1)
    monkeypatch.setattr(children, "AGAIN", 0.0)
    command(
        out=tmp_path / "out",
        between=Between(rtt_ms=20, mbit=50, data=str(words), every=0.2),
        run=RunFlags(shape=SHAPE, pace=PACE),
        timing=QUICK,
        output=Output(json=True),
    )
    told = capfd.readouterr()
    found = msgspec.json.decode(told.out.splitlines()[-1])
    assert "worker-1 died, and was started again" in told.err
    assert "round 4: CE" in told.err
    assert (found["restarts"], len(killed)) == (1, 1)

    run, text = tmp_path / "out" / "run", open_corpus(str(words)).test
    settings, model = from_folder(run)
    with SqliteLedger(run / LEDGER) as ledger, ledger.reading() as r:
        record, workers, receipts = r.run(), r.workers(), r.receipts()
    assert record is not None
    charter, store = charters.decode(record.config), FolderStore(run / BLOBS)
    first = [
        tensors.decode(store.get(digest), "fp32", charter.shapes(block))
        for block, digest in enumerate(charter.first)
    ]
    untrained = from_parameters(settings.shape, settings.noise, first)
    assert found["ce_start"] == evaluate(untrained, text).ce
    assert found["ce"] == evaluate(model, text).ce < found["ce_start"]
    assert evaluate(load_model(tmp_path / "out"), text).ce == found["ce"]
    assert found["parameters"] == model.parameters
    assert found["rounds"] == 4
    assert len({(each.block, each.round) for each in receipts if each.verdict == "taken"}) == 8
    moved = sum(worker.bytes_sent + worker.bytes_received for worker in workers)
    assert found["bytes_moved"] == moved
    # Each update goes up, and its delta comes down, at half a byte a value and more.
    assert moved > 8 * charter.update_size(0)
    assert found["bytes_per_parameter_and_round"] == moved / model.parameters / 4
    assert found["bytes_seen"] == 4 * 2 * 4 * 32
    assert found["bytes_moved_to_1.811"] is None
    assert (found["rtt_ms"], found["mbit"], found["codec"]) == (20, 50, "int4")
    lines = (tmp_path / "out" / "history.jsonl").read_bytes().splitlines()
    history = [msgspec.json.decode(line) for line in lines]
    assert history[-1]["round"] == 4
    assert 0 < history[-1]["bytes_moved"] <= moved


@pytest.fixture
def ledger(tmp_path: Path, words: Path) -> Iterator[SqliteLedger]:
    """Of a run of which nothing is trained."""
    begin(tmp_path / "run", Settings("test", Run(shape=SHAPE)), open_corpus(str(words)))
    with SqliteLedger(tmp_path / "run" / LEDGER) as opened:
        yield opened


def over(child: Child) -> Child:
    """Waits for its end."""
    assert child.process is not None
    child.process.wait(20)
    return child


def test_who_dies_again_and_again_is_told(
    ledger: SqliteLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    monkeypatch.setattr(children, "AGAIN", 0.0)
    monkeypatch.setattr(bench, "LIVES", 2)
    child = Child("worker-1", ["status"], tmp_path / "log")
    child.start()
    said: list[str] = []
    bench.look_after([over(child)], ledger, said.append)
    assert said == ["worker-1 died, and was started again"]
    with pytest.raises(BadRun, match="worker-1 died 2 times") as caught:
        bench.look_after([over(child)], ledger, said.append)
    over(child)
    assert str(tmp_path / "log") in sentence(caught.value)
    assert len(said) == 1


def test_who_leaves_early_is_told(ledger: SqliteLedger, tmp_path: Path, sentence: Sentence) -> None:
    child = Child("worker-1", ["--version"], tmp_path / "log")
    child.start()
    with pytest.raises(BadRun, match="worker-1 left before the last round") as caught:
        bench.look_after([over(child)], ledger, print)
    assert "again" in sentence(caught.value)


def test_who_does_not_say_good_bye_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    monkeypatch.setattr(bench, "GOOD_BYE", 0.0)
    child = Child("worker-1", ["coordinator", str(tmp_path), "--no-such-flag"], tmp_path / "log")
    child.start()
    began = time.monotonic()
    with pytest.raises(BadRun, match="not all counted") as caught:
        bench.let_go([child])
    assert time.monotonic() - began < 10
    assert "again" in sentence(caught.value)


def test_the_history_goes_on_in_the_next_sitting(ledger: SqliteLedger, tmp_path: Path) -> None:
    def measured(round: int, ce: float) -> None:
        """The owner measures, and by then so many times ten bytes have been moved."""
        owner = hash_of_token(owners_token(tmp_path / "run"))
        who = WorkerId("00" * 32)
        with ledger.transaction() as t:
            t.join(who, "anna", owner, 0.0)
            t.add_traffic(who, 10, 0)
            t.evaluated(Evaluation(1.0, (round, round + 1), ce, 100, owner))

    assert bench.noted(ledger, tmp_path) == []
    measured(1, 3.0)
    assert len(bench.noted(ledger, tmp_path)) == 1
    measured(2, 1.8)
    measured(3, 1.7)
    rows = bench.noted(ledger, tmp_path)
    assert [(row["round"], row["ce_sample"]) for row in rows] == [(1, 3.0), (2, 1.8), (3, 1.7)]
    assert [row["bytes_moved"] for row in rows] == [10, 30, 30]
    measured(4, 1.6)  # nobody was there to note it
    rows = bench.noted(ledger, tmp_path, late=True)
    assert rows == bench.noted(ledger, tmp_path)
    assert bench.first_below(rows, 1.811) == 30
    assert bench.first_below(rows, 1.65) is None
    assert bench.first_below(rows, 1.5) is None
