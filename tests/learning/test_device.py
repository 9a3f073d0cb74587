"""Precision: bf16 only where a CPU has units for it, and learning as good as in float32."""

from math import log

import numpy as np
import pytest
import torch

from blocktrain.learning import device
from blocktrain.learning.data import Cursor, Plan, batches
from blocktrain.learning.local import Start, Update, Work, parameters_of, train_locally
from blocktrain.learning.model import Shape, new_block
from blocktrain.learning.objective import Loader, Recipe, objective_for
from blocktrain.lengths import Lengths

CPU = torch.device("cpu")
SHAPE = Shape(blocks=3, width=32, heads=2, window=16)
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 40, np.uint8)
STEPS = 30


@pytest.mark.parametrize("units", [False, True])
def test_a_cpu_computes_in_bf16_if_it_has_units_for_it(
    monkeypatch: pytest.MonkeyPatch, units: bool
) -> None:
    monkeypatch.setattr(device, "cpu_has_bf16", lambda: units)
    x = torch.ones(2, 2)
    with device.precision(CPU):
        assert (x @ x).dtype == (torch.bfloat16 if units else torch.float32)
    assert (x @ x).dtype == torch.float32


@pytest.mark.parametrize("units", [False, True])
def test_a_wish_counts_more_than_units(monkeypatch: pytest.MonkeyPatch, units: bool) -> None:
    monkeypatch.setattr(device, "cpu_has_bf16", lambda: units)
    x = torch.ones(2, 2)
    for name, kind in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        with device.training_in(name), device.precision(CPU):  # type: ignore[arg-type]
            assert device.trains_in(CPU) == name
            assert (x @ x).dtype == kind
    assert device.trains_in(CPU) == ("bf16" if units else "float32")


@pytest.mark.parametrize("block", [0, 1, 2])
def test_bf16_learns_what_float32_learns(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    def trained(units: bool) -> Update:
        monkeypatch.setattr(device, "cpu_has_bf16", lambda: units)
        return one_round(block)

    exact, rough = trained(False), trained(True)
    assert exact.loss < log(256) - 0.1  # it has learned, though the heads after it have not
    assert rough.loss == pytest.approx(exact.loss, rel=0.01)
    assert rough.optimiser_after != exact.optimiser_after  # it did compute otherwise
    for name, change in rough.change.items():
        assert change.dtype == np.float32
        assert np.isfinite(change).all(), name


def one_round(index: int) -> Update:
    stack = [new_block(SHAPE, each, 3) for each in range(SHAPE.blocks)]
    loaders: list[Loader] = [lambda each=each: each for each in stack]  # type: ignore[misc]
    recipe, per_step = Recipe(SHAPE), 4 * SHAPE.window
    work = Work(recipe, index, 0, 1, 3, 0, per_step, STEPS * per_step)
    snapshot = {name: value.copy() for name, value in parameters_of(stack[index]).items()}
    plan = Plan(3, 1, Lengths(STEPS), 4, SHAPE.window)
    rows = (batch for batch, _ in batches(TEXT, plan, Cursor(0, 1)))
    update, state = train_locally(
        Start(snapshot), rows, objective_for(index, recipe, loaders), work
    )
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    return update
