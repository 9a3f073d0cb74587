"""Local steps on one block: replayed bit for bit, resumed, stopped, and learning something."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.errors import BadModel
from blocktrain.learning.data import Cursor, Plan, batches
from blocktrain.learning.files import load_tensors, save_tensors
from blocktrain.learning.local import (
    Start,
    Update,
    Work,
    accumulate,
    open_block,
    parameters_of,
    train_locally,
)
from blocktrain.learning.model import Model, Shape, new_block
from blocktrain.learning.objective import Loader, Objective, Recipe, Task, objective_for
from blocktrain.learning.optimiser import Rates, digest_of
from blocktrain.lengths import Lengths
from blocktrain.terms import Parameters

STEPS, BATCH = 3, 4
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 40, np.uint8)

State = dict[str, Tensor]


def work_of(shape: Shape, round: int = 1, **changes: object) -> Work:
    recipe = Recipe(shape, Task(masked_share=0.5, span=4), micro=2 * shape.window)
    per_step = BATCH * shape.window
    plain = Work(
        recipe=recipe,
        block=1,
        slot=0,
        round=round,
        seed=5,
        bytes_before=(round - 1) * STEPS * per_step,
        bytes_per_step=per_step,
        bytes_planned=10 * STEPS * per_step,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def goal_of(model: Model, work: Work) -> Objective:
    loaders: list[Loader] = [lambda block=block: block for block in model.blocks]  # type: ignore[misc]
    return objective_for(work.block, work.recipe, loaders)


def data(work: Work, steps: int = STEPS) -> Iterator[NDArray[np.int64]]:
    plan = Plan(work.seed, 1, Lengths(steps), BATCH, work.recipe.shape.window)
    return (rows for rows, _ in batches(TEXT, plan, Cursor(work.slot, work.round)))


def trained(model: Model, work: Work, state: State, snapshot: Parameters) -> tuple[Update, State]:
    return train_locally(Start(snapshot, state), data(work), goal_of(model, work), work)


def snapshot_of(model: Model, index: int = 1) -> Parameters:
    return {name: value.copy() for name, value in parameters_of(model.blocks[index]).items()}


def digest(values: Parameters) -> str:
    return digest_of({name: torch.from_numpy(value) for name, value in values.items()})


def copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def applied(snapshot: Parameters, update: Update) -> Parameters:
    return {name: value + update.change[name] for name, value in snapshot.items()}


# --- replay -------------------------------------------------------------------------------------


def test_the_same_inputs_give_the_same_update_bit_for_bit(model: Model) -> None:
    work = work_of(model.shape)
    one, one_state = trained(model, work, {}, snapshot_of(model))
    torch.manual_seed(99)  # others' randomness has no part in it
    again, again_state = trained(model, work, {}, snapshot_of(model))
    assert digest(one.change) == digest(again.change)
    assert one.optimiser_after == again.optimiser_after == digest_of(again_state)
    assert digest_of(one_state) == digest_of(again_state)
    assert one.loss == again.loss
    assert (one.steps, one.bytes_trained) == (STEPS, STEPS * BATCH * model.shape.window)


@pytest.mark.parametrize("changed", ["seed", "slot", "round"])
def test_what_is_drawn_follows_from_the_work(changed: str, alive: Callable[[Shape], Model]) -> None:
    """On the same data: only the noise of `denoise` is drawn."""
    model = alive(Shape("denoise", blocks=3, width=16, heads=2, window=12))
    work = work_of(model.shape)
    other = replace(work, **{changed: getattr(work, changed) + 1})
    snapshot = snapshot_of(model)
    updates = [
        train_locally(Start(snapshot), data(work), goal_of(model, each), each)[0]
        for each in (work, other)
    ]
    assert digest(updates[0].change) != digest(updates[1].change)


def test_the_snapshot_is_not_modified(model: Model) -> None:
    snapshot = snapshot_of(model)
    before = digest(snapshot)
    update, _ = trained(model, work_of(model.shape), {}, snapshot)
    assert digest(snapshot) == before
    assert all(np.abs(change).max() > 0 for change in update.change.values())
    assert all(change.dtype == np.float32 for change in update.change.values())


def test_the_neighbours_are_not_modified(model: Model) -> None:
    before = [digest(parameters_of(block)) for block in model.blocks]
    trained(model, work_of(model.shape), {}, snapshot_of(model))
    assert [digest(parameters_of(block)) for block in model.blocks] == before


# --- rounds -------------------------------------------------------------------------------------


def two_rounds(model: Model, between: Callable[[State], State]) -> tuple[list[Update], Parameters]:
    snapshot = snapshot_of(model)
    first, state = trained(model, work_of(model.shape, 1), {}, snapshot)
    snapshot = applied(snapshot, first)
    second, _ = trained(model, work_of(model.shape, 2), between(state), snapshot)
    return [first, second], applied(snapshot, second)


def test_a_restart_between_rounds_changes_nothing(model: Model, tmp_path: Path) -> None:
    def restart(state: State) -> State:
        save_tensors(tmp_path / "state.safetensors", state)
        return load_tensors(tmp_path / "state.safetensors")

    updates, end = two_rounds(model, lambda state: state)
    resumed, resumed_end = two_rounds(model, restart)
    assert digest(end) == digest(resumed_end)
    assert [u.optimiser_after for u in updates] == [u.optimiser_after for u in resumed]
    _, forgetful_end = two_rounds(model, lambda state: {})
    assert digest(forgetful_end) != digest(end)


def test_a_round_begins_with_the_state_the_last_one_ended_with(model: Model) -> None:
    updates, _ = two_rounds(model, lambda state: state)
    assert updates[0].optimiser_before == digest_of({})
    assert updates[1].optimiser_before == updates[0].optimiser_after
    assert updates[1].optimiser_after != updates[1].optimiser_before


@pytest.mark.parametrize("steps", [1, 2])
def test_a_stop_gives_an_update_of_the_steps_made(model: Model, steps: int) -> None:
    work = work_of(model.shape)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == steps

    stopped, state = train_locally(
        Start(snapshot_of(model)), data(work), goal_of(model, work), work, stop=stop
    )
    assert stopped.steps == steps
    assert stopped.bytes_trained == steps * BATCH * model.shape.window
    short = (rows for rows, _ in zip(data(work), range(steps), strict=False))
    whole, _ = train_locally(Start(snapshot_of(model)), short, goal_of(model, work), work)
    assert digest(stopped.change) == digest(whole.change)
    assert digest_of(state) == whole.optimiser_after
    assert torch.is_grad_enabled()


def test_no_data_is_an_update_of_nothing(model: Model) -> None:
    work = work_of(model.shape)
    update, _ = train_locally(Start(snapshot_of(model)), iter([]), goal_of(model, work), work)
    assert (update.steps, update.bytes_trained, update.loss) == (0, 0, 0.0)
    assert all(not change.any() for change in update.change.values())


def test_the_rate_follows_the_bytes_the_block_was_trained_on(model: Model) -> None:
    """Late in a run the same data moves the block less."""
    work = work_of(model.shape)
    late = replace(work, bytes_before=work.bytes_planned - STEPS * work.bytes_per_step)
    sizes = [
        max(
            float(np.abs(change).max())
            for change in train_locally(
                Start(snapshot_of(model)), data(work), goal_of(model, each), each
            )[0].change.values()
        )
        for each in (replace(work, bytes_before=work.bytes_planned // 4), late)
    ]
    assert sizes[1] < 0.5 * sizes[0]
    assert work.done(0) == 0.0
    assert late.done(STEPS) == 1.0


# --- batches in parts ---------------------------------------------------------------------------


def gradients(model: Model, micro: int) -> tuple[float, State]:
    work = work_of(model.shape)
    goal = goal_of(model, work)
    block = open_block(model.shape, 1, snapshot_of(model))
    ((batch, features),) = goal.prepare(iter([torch.from_numpy(next(data(work)))]), micro)
    loss = accumulate(block, goal, (batch, features), work, (0, micro))
    return loss, {name: p.grad for name, p in block.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro", [1, 2, 3])  # 3: the last part is smaller
def test_parts_of_a_batch_give_the_gradient_of_the_whole(
    alive: Callable[[Shape], Model], micro: int
) -> None:
    model = alive(Shape(blocks=3, width=16, heads=2, window=12))
    whole_loss, whole = gradients(model, BATCH)
    loss, parts = gradients(model, micro)
    assert loss == pytest.approx(whole_loss, abs=1e-5)
    assert whole.keys() == parts.keys() == snapshot_of(model).keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-6, rtol=1e-4)


def test_micro_counts_positions(alive: Callable[[Shape], Model]) -> None:
    """The setting is turned: parts of one row, of two, and one row at least."""
    model = alive(Shape(blocks=3, width=16, heads=2, window=12))
    seen: list[int] = []

    class Counting:
        def __init__(self, goal: Objective) -> None:
            self.prepare = goal.prepare
            self.inner = goal

        def loss(self, block: object, rows: Tensor, features: Tensor | None, key: int) -> Tensor:
            seen.append(len(rows))
            return self.inner.loss(block, rows, features, key)  # type: ignore[arg-type]

    for micro, parts in ((1, [1, 1, 1, 1]), (12, [1, 1, 1, 1]), (24, [2, 2]), (999, [4])):
        seen.clear()
        work = work_of(model.shape)
        work = replace(work, recipe=replace(work.recipe, micro=micro))
        goal = Counting(goal_of(model, work))
        train_locally(Start(snapshot_of(model)), data(work, steps=1), goal, work)
        assert seen == parts


# --- learning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, 1])
def test_the_loss_goes_down_on_a_text_that_can_be_learned(shape: Shape, block: int) -> None:
    shape = replace(shape, blocks=2)
    rates = Rates(warmup=0.0, cooldown=0.0)
    task = Task(masked_share=0.0)
    work = work_of(shape, block=block, recipe=Recipe(shape, task, rates=rates))
    fresh = [new_block(shape, index, seed=0).requires_grad_(False) for index in range(2)]
    loaders: list[Loader] = [lambda copy=copy: copy for copy in fresh]  # type: ignore[misc]
    snapshot, losses = parameters_of(fresh[block]), []
    state: State = {}
    if block == 0:  # what a zero head downstream says cannot be improved from upstream
        task = replace(task, own_share=1.0)
    recipe = replace(work.recipe, task=task)
    for number in range(1, 4):
        now = replace(work, round=number, recipe=recipe)
        goal = objective_for(block, recipe, loaders)
        update, state = train_locally(Start(snapshot, state), data(now, 20), goal, now)
        snapshot = applied(snapshot, update)
        losses.append(update.loss)
    assert losses[0] < log(256)
    assert losses[2] < losses[1] < losses[0]
    assert losses[2] < 0.6 * log(256)


# --- blocks and parameters ----------------------------------------------------------------------


def test_a_block_is_opened_from_a_copy(model: Model) -> None:
    snapshot = snapshot_of(model)
    block = open_block(model.shape, 1, snapshot)
    assert digest(parameters_of(block)) == digest(snapshot)
    assert all(p.requires_grad for p in block.parameters())
    with torch.no_grad():
        next(block.parameters()).zero_()
    assert digest(snapshot) == digest(snapshot_of(model))


@pytest.mark.parametrize("damage", ["missing", "extra", "shape"])
def test_parameters_of_another_shape_are_refused(
    model: Model, damage: str, sentence: Callable[[BaseException], str]
) -> None:
    snapshot = snapshot_of(model)
    name = "layers.0.mlp.up.weight"
    if damage == "missing":
        del snapshot[name]
    elif damage == "extra":
        snapshot[name := "layers.9.mlp.up.weight"] = np.zeros(3, np.float32)
    else:
        snapshot[name] = snapshot[name].T.copy()
    with pytest.raises(BadModel) as caught:
        open_block(model.shape, 1, snapshot)
    text = sentence(caught.value)
    assert name in text
    assert "Block 2" in text
