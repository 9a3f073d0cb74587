"""A worker that is killed behind every effect of a round; the next start goes on from there."""

import itertools
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.chaos.lives import Lives
from tests.chaos.network import network
from tests.chaos.real import begun, same_again
from tests.chaos.settled import Settled, settled

from blocktrain.aggregation.folder import owners_token
from blocktrain.learning.model import Shape
from blocktrain.services.run import Pace, Run
from blocktrain.terms import Digest
from blocktrain.wire import messages

RUN = Run(
    shape=Shape(blocks=1, layers=1, width=16, heads=2, window=16),
    pace=Pace(rounds=3, local_steps=1, batch=2),
)
AT_ONCE = 2


@pytest.mark.usefixtures("impatient")
def test_killed_at_every_boundary(tmp_path: Path, lives: Lives, worker_lives: Lives) -> None:
    """One kill in each run, one boundary further each time, through two of its three rounds.

    Every update counts once, the optimiser goes on where it was, and every digest is that of the
    run in which nobody is killed (0), which is trained again.
    """
    corpus = begun(tmp_path, RUN)
    undisturbed: list[tuple[Digest, ...]] = []

    def killed(number: int) -> str:
        home = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", home / "run")
        logs = [home / "killed.log", home / "resumed.log"]
        with network(home / "run", lives) as net:
            told = {
                "url": net.url,
                "token": owners_token(net.run),
                "folder": str(home / "worker"),
                "data": str(tmp_path / "text"),
            }
            for log, kill_at in zip(logs, (number, 0), strict=True):
                life = worker_lives.start(log, kill_at, **told)
                assert life.over(within=30), log.read_text()
            net.kill_coordinator()
        found = settled(net.run)
        check_updates(found, logs[1].read_text())
        if number == 0:
            same_again(net.run, corpus, home / "again")
            undisturbed.extend(digests(found))
        assert digests(found) == undisturbed
        before = logs[0].read_text()
        shutil.rmtree(home)
        return before

    killed(0)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for first in itertools.count(1, AT_ONCE):
            before = [*pool.map(killed, range(first, first + AT_ONCE))]
            if "round 2: 1 steps" in before[0]:
                break
    assert first > 25, "there are fewer boundaries than there should be"
    assert "round 3: 1 steps" not in before[0]


def digests(found: Settled) -> list[tuple[Digest, ...]]:
    """Of all that was trained and made of it."""
    updates = [(it.blob,) for it in found.receipts]
    return [*updates, *((it.snapshot, it.steady) for it in found.versions)]


def check_updates(found: Settled, log: str) -> None:
    """One for each round, each of them from where the optimiser was after the one before."""
    signed = [messages.decode(it.signed, messages.Signed) for it in found.receipts]
    updates = [messages.decode(each.body, messages.Update) for each in signed]
    assert [update.round for update in updates] == [1, 2, 3], log
    for one, following in itertools.pairwise(updates):
        assert following.optimiser_before == one.optimiser_after, log
