"""Local steps on one block -> an update.

A pure function: (snapshot, optimiser state, neighbours, data, rates) -> (update, optimiser state).
Anyone who holds the same inputs can replay it bit for bit on the same kind of machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.errors import BadModel
from blocktrain.learning import device
from blocktrain.learning.model import Block, Shape, empty_block
from blocktrain.learning.noise import seed_of
from blocktrain.learning.objective import Objective, Recipe
from blocktrain.learning.optimiser import Optimiser, digest_of
from blocktrain.terms import Digest, Parameters

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Work:
    """Which work this is and how it is done. What is drawn at random follows from it."""

    recipe: Recipe
    block: int
    slot: int
    round: int
    seed: int
    bytes_before: int
    """Bytes that this block had been trained on, by all its replicas, when the round opened."""
    bytes_per_step: int
    """Bytes that all replicas of the block train on in one step."""
    bytes_planned: int
    """Bytes of the whole run; rates are a function of bytes_before / bytes_planned."""

    def done(self, step: int) -> float:
        """Share of the run that is over at this step of the round."""
        return (self.bytes_before + step * self.bytes_per_step) / self.bytes_planned


@dataclass
class Start:
    """What local training goes on from."""

    snapshot: Parameters
    optimiser: dict[str, Tensor] = field(default_factory=dict)
    """Of the replica's last round; empty at the beginning. Training takes these tensors over."""


@dataclass(frozen=True)
class Update:
    """The change of one block's parameters that one replica made in one round."""

    change: Parameters
    bytes_trained: int
    steps: int
    loss: float
    optimiser_before: Digest
    optimiser_after: Digest


def train_locally(
    start: Start,
    batches: Iterator[NDArray[np.int64]],
    objective: Objective,
    work: Work,
    where: torch.device = CPU,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Update, dict[str, Tensor]]:
    """Trains the block on the batches, until they end or `stop` says so between two steps.

    Returns the update and the optimiser's state for the replica's next round.
    """
    device.keep_freed_memory()
    shape, rates = work.recipe.shape, work.recipe.rates
    block = open_block(shape, work.block, start.snapshot).to(where)
    before = digest_of(start.optimiser)
    optimiser = Optimiser(block, rates, start.optimiser)
    micro = work.recipe.rows_at_once

    rows = (torch.from_numpy(batch).to(where) for batch in batches)
    steps, trained, losses = 0, 0, 0.0
    for batch_BT1, features in objective.prepare(rows, micro):
        with device.precision(where):
            losses += accumulate(block, objective, (batch_BT1, features), work, (steps, micro))
            optimiser.step(rates.at(work.done(steps)))
        steps += 1
        trained += batch_BT1[:, 1:].numel()
        if stop():
            break

    change = {
        name: np.subtract(value, start.snapshot[name], dtype=np.float32)
        for name, value in parameters_of(block).items()
    }
    after = optimiser.state()
    update = Update(change, trained, steps, losses / max(1, steps), before, digest_of(after))
    return update, after


def accumulate(
    block: Block,
    objective: Objective,
    batch: tuple[Tensor, Tensor | None],
    work: Work,
    at: tuple[int, int],
) -> float:
    """Gradients of the batch's mean loss, `micro` rows at a time. Returns the loss."""
    rows_BT1, features = batch
    step, micro = at
    total = 0.0
    for first in range(0, len(rows_BT1), micro):
        rows = rows_BT1[first : first + micro]
        part = None if features is None else features[first : first + micro]
        key = seed_of(work.seed, work.slot, work.round, step, first)
        loss = objective.loss(block, rows, part, key) * (len(rows) / len(rows_BT1))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def parameters_of(block: Block) -> Parameters:
    """A block's parameters as numpy arrays. On a CPU they share the block's memory."""
    return {name: p.detach().float().cpu().numpy() for name, p in block.named_parameters()}


def open_block(shape: Shape, index: int, parameters: Parameters) -> Block:
    """A trainable block that starts from these values (copied)."""
    with torch.device("meta"):  # structure only; nothing is drawn at random
        block = empty_block(shape, index)
    expected = {name: tuple(p.shape) for name, p in block.named_parameters()}
    given = {name: value.shape for name, value in parameters.items()}
    if expected != given:
        wrong = sorted(set(expected.items()) ^ set(given.items()))[0][0]
        raise BadModel(f"Block {index + 1} does not fit its shape at '{wrong}'; fetch it again.")
    values = {name: torch.tensor(value) for name, value in parameters.items()}
    block.load_state_dict(values, assign=True)
    return block
