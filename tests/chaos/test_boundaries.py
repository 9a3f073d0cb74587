"""A coordinator that is killed at every effect boundary of a round, and started again."""

import itertools
import re
import shutil
from pathlib import Path

import pytest
from blocktrain.aggregation.combine import Averaging
from blocktrain.aggregation.deadlines import Rules

from tests.chaos.kill_points import MARK
from tests.chaos.network import Lives, network
from tests.chaos.settled import settled

EFFECTS = {
    "a blob is written",
    "contents or names are synced",
    "a blob has its name",
    "blobs can be seen",
    "the manifest is there",
    "effects are acted upon",
    "a transaction is committed",
    "POST join is answered",
    "POST ask is answered",
    "PUT blobs is answered",
    "POST updates is answered",
}


def crossed(log: Path) -> list[str]:
    """What the lives of a coordinator crossed, in order."""
    return re.findall(rf"^{MARK}\d+ (.*)$", log.read_text(), re.MULTILINE)


@pytest.mark.usefixtures("impatient")
def test_killed_at_every_boundary(tmp_path: Path, lives: Lives) -> None:
    """One kill in each run, one boundary further each time, until a run is over before it."""
    rules = Rules(
        rounds=2, blocks=1, replicas=2, quorum=2, local_steps=3, bytes_per_step=8, grace=0.0
    )
    died_behind = set()
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        averaging = Averaging(outer_momentum=0.5)
        with network(folder, lives, rules, 1, [number], averaging) as net:
            net.finish()
        found = settled(net.run, net.receipts)
        assert len(found.taken) == 4
        assert not found.refused
        behind = crossed(net.log)
        if net.starts == 1:
            break
        died_behind.add(behind[number - 1])
        shutil.rmtree(folder)
    assert died_behind >= EFFECTS
