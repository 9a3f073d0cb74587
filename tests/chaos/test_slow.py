"""A worker that is ten times slower than the others."""

import time
from pathlib import Path

from tests.chaos.light import begin_light, quick
from tests.chaos.lives import Lives
from tests.chaos.network import network
from tests.chaos.settled import Settled, settled

from blocktrain.aggregation.deadlines import Rules
from blocktrain.aggregation.ledger import Receipt

PACE = 0.01  # seconds a step of an ordinary worker, which makes five in a round
ALONE = 0.5  # seconds of a round that the slow one would train alone


def slowly(tmp_path: Path, lives: Lives, rules: Rules) -> tuple[Settled, list[Receipt], float]:
    """A run with one slow worker: what it came to, what of it is the slow one's, how long it took.

    Every other worker is an ordinary one, and there is one for every slot.
    """
    begin_light(tmp_path / "run", rules)
    with network(tmp_path / "run", lives) as net:
        slow = net.worker(10 * PACE)
        began = time.monotonic()
        net.set_to_work(slow, *[net.worker(PACE) for _ in range(rules.replicas - 1)])
        net.finish()
        took = time.monotonic() - began
    found = settled(net.run, net.receipts)
    return found, [each for each in found.taken if each.worker == str(slow.key.id)], took


def test_one_of_two_that_all_wait_for(tmp_path: Path, lives: Lives) -> None:
    """Nobody can tell which of two is the odd one: the run waits for both, and not for ever."""
    rules = quick(rounds=8, floor=0.25, lease=5.0)
    _, theirs, took = slowly(tmp_path, lives, rules)
    assert len(theirs) >= 3
    assert took < 3 * rules.rounds * ALONE


def test_one_of_two_where_one_is_enough(tmp_path: Path, lives: Lives) -> None:
    """Its updates come late, and count."""
    rules = quick(rounds=20, floor=0.25, lease=5.0, quorum=1, grace=0.0, ahead=4)
    found, theirs, took = slowly(tmp_path, lives, rules)
    late = [each for each in theirs if each in found.late]
    assert late, "nothing of it was salvaged"
    assert took < rules.rounds * ALONE


def test_one_of_three(tmp_path: Path, lives: Lives) -> None:
    """The deadline is that of the many; the slow one gets fewer steps and comes in time."""
    rules = quick(rounds=10, floor=0.25, lease=5.0, replicas=3, quorum=3)
    found, theirs, _ = slowly(tmp_path, lives, rules)
    whole = rules.local_steps * rules.bytes_per_step
    assert [each for each in theirs if each.bytes_trained < whole and each not in found.late]
