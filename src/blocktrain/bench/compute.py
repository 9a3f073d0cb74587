"""A block's training step against this machine's own GEMM peak, in the precision of training.

All matrix products of the step count: own forward and backward, the neighbours' forwards and the
gradients through them, attention (its causal half, backward counted twice), heads and Muon.
Steps and GEMMs alternate, because the machine's speed drifts; medians are compared.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from statistics import median

import numpy as np
import torch

from blocktrain.learning import device
from blocktrain.learning.local import CPU, Start, Work, parameters_of, train_locally
from blocktrain.learning.model import VOCABULARY, Block, Shape, new_block
from blocktrain.learning.objective import Loader, Recipe, Task, objective_for
from blocktrain.learning.optimiser import NEWTON_SCHULZ_STEPS, is_matrix
from blocktrain.terms import Progress, silent

GEMM_SIDE = 2048
LOCAL_STEPS = 4  # in one round: a worker opens a block and digests its optimiser once a round


@dataclass(frozen=True)
class Compute:
    """What was measured."""

    share_of_peak: float
    """All matrix products of a step per second, over the GEMM peak."""
    share_without_muon: float
    """The same without Muon's products (and without the time they would take at the peak)."""
    gemm_gflops: float
    step_gflops: float
    step_seconds: float
    steps: int
    width: int
    positions: int
    threads: int
    precision: str


def measure(
    width: int, positions: int, repeats: int, layers: int = 1, progress: Progress = silent
) -> Compute:
    """Alternates GEMMs and short rounds of the second of four blocks."""
    device.keep_freed_memory()
    shape = Shape(blocks=4, layers=layers, width=width, heads=max(1, width // 64), window=256)
    task = Task()
    round_ = one_round(shape, task, positions, LOCAL_STEPS)
    left, right = (torch.randn(GEMM_SIDE, GEMM_SIDE) for _ in range(2))
    round_()
    gemms, steps = [], []
    for number in range(repeats):
        with device.precision(CPU):
            gemms += [timed(lambda: left @ right) for _ in range(5)]
        steps.append(timed(round_) / LOCAL_STEPS)
        progress(number + 1, repeats)
    peak = 2 * GEMM_SIDE**3 / median(gemms)
    seconds = median(steps)
    muon = muon_products(new_block(shape, 1, 0))
    products = step_products(shape, task, positions)
    return Compute(
        share_of_peak=(products + muon) / seconds / peak,
        share_without_muon=products / (seconds - muon / peak) / peak,
        gemm_gflops=peak / 1e9,
        step_gflops=(products + muon) / seconds / 1e9,
        step_seconds=seconds,
        steps=repeats * LOCAL_STEPS,
        width=width,
        positions=positions,
        threads=torch.get_num_threads(),
        precision=device.trains_in(CPU),
    )


def one_round(shape: Shape, task: Task, positions: int, steps: int) -> Callable[[], None]:
    """A round's steps as a worker makes them: the same code, fewer of them."""
    blocks = [new_block(shape, index, 0).requires_grad_(False) for index in range(shape.blocks)]
    loaders: list[Loader] = [lambda block=block: block for block in blocks]  # type: ignore[misc]
    recipe = Recipe(shape, task)
    random = np.random.default_rng(0)
    rows = random.integers(0, VOCABULARY, (positions // shape.window, shape.window + 1))
    start = Start(parameters_of(blocks[1]))
    objective = objective_for(1, recipe, loaders)
    total = positions * 10**6
    work = Work(recipe, 1, 0, 1, 0, bytes_before=0, bytes_per_step=positions, bytes_planned=total)

    def local_steps() -> None:
        _, start.optimiser = train_locally(start, repeat(rows, steps), objective, work)

    return local_steps


def timed(action: Callable[[], object]) -> float:
    """Seconds one call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def step_products(shape: Shape, task: Task, positions: int, index: int = 1) -> float:
    """FLOPs of the matrix products of one step of a block, without the optimiser's."""
    width, hidden = shape.width, shape.hidden
    matrices = 2 * positions * (4 * width**2 + 3 * width * hidden)
    attention = 2 * positions * shape.window * width  # q.k and p.v, causal half of each
    block = shape.layers * (matrices + attention)
    head = 2 * positions * width * VOCABULARY
    downstream = min(task.lookahead, shape.blocks - 1 - index)
    own = 3 * block + 3 * head
    upstream = index * block
    through = 2 * downstream * block + (2 * head if downstream else 0)
    return float(own + upstream + through)


def muon_products(block: Block) -> float:
    """FLOPs of Newton-Schulz over every matrix that Muon moves."""
    total = 0
    for name, parameter in block.named_parameters():
        if is_matrix(name, parameter.shape):
            short, long = sorted(parameter.shape)
            total += NEWTON_SCHULZ_STEPS * (4 * short**2 * long + 2 * short**3)
    return float(total)
