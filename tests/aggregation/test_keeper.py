"""A run that is kept for longer than its blobs are: what is pruned, backed up, and logged."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.light import NOTHING, begin_light, quick, signed, untrained

from blocktrain.aggregation import backup, keeper
from blocktrain.aggregation.combine import Averaging
from blocktrain.aggregation.events import Asked
from blocktrain.aggregation.folder import RunFolder, owners_token
from blocktrain.aggregation.keeper import Keeper
from blocktrain.aggregation.ledger import WorkerId, hash_of_token
from blocktrain.aggregation.retention import BEYOND
from blocktrain.errors import NoBlob
from blocktrain.wire import messages
from blocktrain.wire.messages import Assignment, Receipt, Signed, Traffic, Update
from blocktrain.wire.signing import Key, new_key

LONG = {"lease": 60.0, "floor": 60.0, "first_allowance": 60.0, "grace": 0.0}
KINDS = ["snapshot", "steady", "delta"]
NERVOUS = 0.5  # seconds that an unnamed blob may lie, in place of 120


@dataclass
class Hand:
    """A worker that speaks to the keeper itself, and needs what a real one needs."""

    keeper: Keeper
    folder: Path
    key: Key = field(default_factory=new_key)

    def __post_init__(self) -> None:
        id, token = WorkerId(self.key.id), hash_of_token(owners_token(self.folder))
        self.keeper.write(lambda t: t.join(id, "hand", token, time.time())).result(10)

    def assigned(self, *blocks: int) -> Assignment:
        """The next assignment, as soon as there is one; all that it names is there."""
        asked, told = Asked(self.key.id, blocks or None), list[messages.Message]()

        def found() -> bool:
            told.append(self.keeper.ask(asked, Traffic()).result(10))
            return isinstance(told[-1], Assignment)

        wait_until(found)
        task = told[-1]
        assert isinstance(task, Assignment)
        for digest in (task.base.snapshot, *(each.steady for each in task.neighbours)):
            assert self.keeper.store.get(digest)
        return task

    def train(self, task: Assignment, **lies: Any) -> Receipt:
        """Sends something for the assignment, again if its tensors were pruned meanwhile."""
        told, body = untrained(task, self.keeper.charter)
        facts = {"worker": self.key.id, "run": self.keeper.run, "seconds": 0.001}
        update = Update(**{**told, **facts, **lies})
        while True:
            self.keeper.store.put([body], limit=len(body))
            try:
                answer = self.keeper.submit(signed(self.key, update, "update"), update).result(10)
            except NoBlob:
                continue
            return messages.decode(messages.decode(answer, Signed).body, Receipt)

    def close_rounds(self, up_to: int, *blocks: int) -> None:
        """Trains alone until these blocks (or all) have closed so many rounds."""
        wanted = blocks or range(self.keeper.charter.rules.blocks)
        while behind := [block for block in wanted if closed(self.keeper, block) < up_to]:
            self.close_round(self.assigned(*behind))

    def close_round(self, task: Assignment) -> None:
        """Trains what is its round's only slot."""
        assert self.train(task).verdict == "taken"
        wait_until(lambda: closed(self.keeper, task.block) >= task.round)


def wait_until(so: Callable[[], bool]) -> None:
    """Within ten seconds."""
    until = time.monotonic() + 10
    while not so():
        assert time.monotonic() < until
        time.sleep(0.002)


def closed(keeper: Keeper, block: int) -> int:
    """The newest round of a block that has a snapshot."""
    return keeper.state.blocks[block].versions[-1].round


@contextmanager
def kept(folder: Path) -> Iterator[Keeper]:
    """A keeper at work."""
    with RunFolder(folder) as run:
        made = run.keeper()
        made.start()
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(autouse=True)
def prunes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "PRUNE_EVERY", 0.0)
    monkeypatch.setattr(keeper, "UNNAMED", NERVOUS)


def here(keeper: Keeper, block: int, round: int) -> list[str]:
    """Which blobs of a version are in the store."""
    with keeper.ledger.reading() as r:
        version = r.version(block, round)
    digests = {kind: getattr(version, kind) for kind in KINDS}
    return [kind for kind, digest in digests.items() if digest and keeper.store.size(digest)]


def wait_until_forgotten(keeper: Keeper, block: int, round: int) -> None:
    """Pruning follows soon after a round is closed."""
    wait_until(lambda: here(keeper, block, round) == [])


def test_a_backup_of_a_run_whose_old_blobs_are_gone(tmp_path: Path) -> None:
    """Taken while rounds close and blobs are pruned; newcomers go on with what is restored."""
    rules = quick(rounds=30, blocks=2, replicas=1, quorum=1, **LONG)
    begin_light(tmp_path / "run", rules, Averaging(outer_momentum=0.5), "int4")
    files = [tmp_path / f"{number}.tar" for number in range(3)]
    with kept(tmp_path / "run") as running:
        hand = Hand(running, tmp_path / "run")
        hand.close_rounds(9)
        time.sleep(1.2 * NERVOUS)  # until all of it is old enough
        hand.close_rounds(10)
        forgotten = 10 - rules.memory - BEYOND
        for block, round in itertools.product(range(2), range(1, forgotten + 1)):
            wait_until_forgotten(running, block, round)
        for block, round in itertools.product(range(2), range(forgotten + 1, 11)):
            assert here(running, block, round) == KINDS
        assert [here(running, block, 0) for block in range(2)] == [["snapshot", "steady"]] * 2
        beside = threading.Thread(target=hand.close_rounds, args=(30,))
        beside.start()
        for file in files:
            backup.back_up(tmp_path / "run", file)
        beside.join(60)
        assert running.state.ended
    for number, file in enumerate(files):
        folder = tmp_path / f"restored {number}"
        backup.restore(file, folder)
        with kept(folder) as restored:
            begun = min(closed(restored, block) for block in range(2))
            assert begun >= 10
            restored.leave(hand.key.id, Traffic()).result(10)  # else its slot is its for a lease
            Hand(restored, folder).close_rounds(min(30, begun + 3))


def test_a_late_joiner_builds_on_a_steady_copy_that_its_block_left_behind(tmp_path: Path) -> None:
    """Nobody trains block 0 while block 1, which was behind, goes ahead as far as it may."""
    rules = quick(rounds=40, blocks=2, replicas=1, quorum=1, ahead=4, **LONG)
    begin_light(tmp_path / "run", rules)
    with kept(tmp_path / "run") as running:
        hand = Hand(running, tmp_path / "run")
        hand.close_rounds(1)
        hand.close_rounds(5, 0)  # its round 6 opens, and pins round 1 of block 1
        hand.close_rounds(9, 1)
        time.sleep(1.2 * NERVOUS)
        hand.close_rounds(10, 1)
        wait_until_forgotten(running, 1, 2)
        wait_until(lambda: here(running, 1, 1) == ["steady"])
        late = Hand(running, tmp_path / "run")
        task = late.assigned(0)
        assert (task.round, task.neighbours[0].round) == (6, 1)
        assert late.train(task).verdict == "taken"


def test_what_is_noted_is_logged_once_with_its_fields(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "blocktrain.events")
    begin_light(tmp_path / "run", quick(blocks=1, replicas=1, quorum=1, **LONG))
    with kept(tmp_path / "run") as running:
        hand = Hand(running, tmp_path / "run")
        hand.train(hand.assigned(), base=NOTHING)
        hand.train(hand.assigned(), steps=10**6)
        hand.close_rounds(1)
        running.write(lambda t: t.note("joined", {"name": "a\nb"}, 1.0)).result(10)
    with kept(tmp_path / "run") as running:  # what an earlier life has told is not told again
        running.ban(WorkerId(hand.key.id)).result(10)
    found = [record for record in caplog.records if record.name == "blocktrain.events"]
    fields = [record.fields for record in found]  # type: ignore[attr-defined]
    assert [each["number"] for each in fields] == [*range(1, len(fields) + 1)]
    refused, taken, closed = (
        [(record.levelname, each) for record, each in zip(found, fields, strict=True)
         if each["event"] == kind]
        for kind in ("refused", "taken", "closed")
    )  # fmt: skip
    assert [each["reason"] for _, each in refused] == ["base", "implausible"]
    assert {level for level, _ in refused} == {"WARNING"}
    ((level, last),) = taken
    place = {"block": 0, "round": 1, "slot": 0, "worker": hand.key.id}
    assert (level, last | place) == ("DEBUG", last)
    ((level, last),) = closed
    assert (level, last | {"block": 0, "round": 1, "updates": 1}) == ("INFO", last)
    assert "joined, name a?b" in caplog.messages
    assert caplog.messages[-1] == f"banned, worker {hand.key.id[:12]}"
