"""What a worker does when its update is refused, or is no update at all."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from blocktrain.aggregation.receipts import read_receipt
from blocktrain.learning.local import Update
from blocktrain.services.memory import Memory, save_memory
from blocktrain.services.worker import Worker
from blocktrain.wire.messages import Assignment, Receipt, Signed

from .conftest import TINY, Coordinate

Lie = Callable[[Assignment, Update], tuple[Assignment, Update]]
ALONE = replace(
    TINY, shape=replace(TINY.shape, blocks=1), pace=replace(TINY.pace, rounds=20)
)  # nobody waits for another block


def too_large(task: Assignment, trained: Update) -> tuple[Assignment, Update]:
    much = {name: change * np.float32(1e6) + 1 for name, change in trained.change.items()}
    return task, replace(trained, change=much)


def of_another_shape(task: Assignment, trained: Update) -> tuple[Assignment, Update]:
    flat = {name: change.reshape(-1) for name, change in trained.change.items()}
    return task, replace(trained, change=flat)


def on_another_base(task: Assignment, trained: Update) -> tuple[Assignment, Update]:
    return msgspec.structs.replace(
        task, base=msgspec.structs.replace(task.base, snapshot="0" * 64)
    ), trained


def from_another_slot(task: Assignment, trained: Update) -> tuple[Assignment, Update]:
    return msgspec.structs.replace(task, slot=5), trained


class Liar(Worker):
    """An ordinary worker, but for what it says that it trained."""

    lie: Lie | None = None

    def keep(self, assignment: Assignment, trained: Update, seconds: float, memory: Memory) -> None:
        if self.lie:
            assignment, trained = self.lie(assignment, trained)
            memory = Memory(memory.optimiser)  # a residual would be of another shape
        super().keep(assignment, trained, seconds, memory)


def test_only_bad_numbers_make_a_worker_forget(
    coordinate: Coordinate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipts: list[Receipt] = []

    def read(answer: Signed, update: Signed, coordinator: str) -> Receipt:
        receipts.append(read_receipt(answer, update, coordinator))
        return receipts[-1]

    monkeypatch.setattr("blocktrain.services.worker.read_receipt", read)
    place = coordinate(ALONE)
    honest = place.worker(tmp_path / "w")
    liar = Liar(honest.link, place.token, tmp_path / "w", honest.wishes)
    liar.join()

    def told(lie: Lie | None) -> tuple[str, str]:
        liar.lie, before = lie, len(receipts)
        while len(receipts) == before:
            assert liar.turn()
        return receipts[-1].verdict, receipts[-1].reason

    assert told(None) == ("taken", "")
    for lie, reason in (
        (of_another_shape, "tensors"),
        (on_another_base, "base"),
        (from_another_slot, "round"),
    ):
        assert told(lie) == ("refused", reason)
        assert liar.notebook.recall(0).optimiser, reason
        assert liar.notebook.waiting() is None
    assert told(too_large) == ("refused", "numbers")
    assert liar.notebook.recall(0) == Memory()
    assert told(None) == ("taken", "")  # and it goes on
    assert liar.gave.refused == 4


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_a_worker_whose_numbers_are_not_finite_begins_anew(
    coordinate: Coordinate, tmp_path: Path, codec: str
) -> None:
    """JSON has no NaN and int4 cannot carry one: such an update could not even be sent."""
    place, said = coordinate(ALONE, codec), list[str]()
    worker = place.worker(tmp_path / "w")
    worker.say = said.append
    worker.join()
    worker.turn()
    bad = {n: torch.full_like(v, torch.nan) for n, v in worker.notebook.recall(0).optimiser.items()}
    save_memory(worker.notebook.of(0), Memory(bad))
    while not any("begins anew" in text for text in said):
        assert worker.turn()
    assert worker.notebook.recall(0) == Memory()
    assert worker.notebook.waiting() is None
    while worker.gave.updates < 2:
        assert worker.turn()
    assert worker.gave.refused == 0
