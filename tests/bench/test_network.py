"""What the network costs, measured on a tiny run."""

from pathlib import Path

import pytest

from blocktrain.aggregation.folder import LEDGER
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.bench import network
from blocktrain.errors import BadRun
from blocktrain.learning.data import Corpus, open_corpus
from blocktrain.learning.model import Shape
from blocktrain.services.children import Child
from blocktrain.services.embedded import Embedded
from blocktrain.services.run import Pace, Run
from blocktrain.wire import messages

TINY = Run(
    shape=Shape(blocks=2, layers=1, width=32, heads=2, window=32),
    pace=Pace(rounds=9, local_steps=2, batch=4),
)
pytestmark = pytest.mark.alone


@pytest.fixture
def data(tmp_path: Path) -> tuple[str, Corpus]:
    path = tmp_path / "words.txt"
    path.write_text("one two three four, five. six\n" * 1000)
    return str(path), open_corpus(str(path))


def test_the_clock_stops_when_a_joiner_has_made_a_step(
    data: tuple[str, Corpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long runs of the network's side are the proofs' matter."""
    monkeypatch.setattr(network, "network_seconds", lambda *_: 3.0)
    said: list[str] = []
    found = network.measure(network.shorter(TINY, 4), data, tmp_path, 1, said.append)
    assert found["ratio"] == 3.0 / found["lab_cpu_seconds"] > 0
    assert (found["rounds"], found["repeats"]) == (2, 1)
    assert f"a first step after {found['join_seconds']:.1f} s" in said[0]
    with SqliteLedger(tmp_path / "join-0" / "run" / LEDGER) as ledger, ledger.reading() as r:
        receipts, record = r.receipts(), r.run()
    assert record is not None
    assert {each.verdict for each in receipts} == {"taken"}
    for each in receipts:
        signed = messages.decode(each.signed, messages.Signed)
        assert messages.decode(signed.body, messages.Update).steps == 1
    assert 0.5 < found["join_seconds"] < 60  # no process has torch sooner


def test_a_dead_worker_is_told(tmp_path: Path) -> None:
    crew = Embedded(tmp_path, 0, "")
    crew.children.append(Child("worker-1", ["status"], tmp_path / "log"))
    crew.children[0].start()
    network.refuse_dead(crew)
    assert crew.children[0].process is not None
    crew.children[0].process.wait(20)
    with pytest.raises(BadRun, match=r"worker-1 died \(.+\); measure again"):
        network.refuse_dead(crew)
