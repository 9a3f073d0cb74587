"""What a run costs by arithmetic alone: FLOPs of all its workers, bytes that move between them.

FLOPs are matrix products, counted as `bench compute` counts them. Bytes are the bodies of updates
and deltas, without HTTP's headers: 2.50 a parameter and round with int4 and `--grams 1`, where
`bench three-hosts` measured 2.46 at the workers' sockets.
"""

from functools import cache

from blocktrain.bench.compute import muon_products, step_products
from blocktrain.errors import BadInput
from blocktrain.learning.local import parameters_of
from blocktrain.learning.model import Shape, new_block
from blocktrain.learning.objective import watched
from blocktrain.services.run import Run
from blocktrain.wire.tensors import largest, shapes_of


@cache
def flops_of(run: Run, muon: bool = True) -> float:
    """Matrix products of all workers over the whole run; nothing is shared between them."""
    if run.shape.objective != "neighbours":
        raise BadInput("FLOPs are counted for neighbours only; choose that objective.")
    positions = run.pace.batch * run.shape.window
    step = sum(
        step_products(run.shape, run.task, positions, index)
        + muon * muon_products(new_block(run.shape, index, 0))
        for index in range(run.shape.blocks)
    )
    return step * run.pace.replicas * run.pace.steps.before(run.pace.rounds + 1)


def moved_per_round(run: Run) -> int:
    """Bytes in one round: each replica sends its update, and fetches the delta of its own block
    and of every block that it watches."""
    sizes = [body(run.shape, index, run.exchange.codec) for index in range(run.shape.blocks)]
    total = sum(sizes[index] + fetched_per_round(run, index) for index in range(len(sizes)))
    return run.pace.replicas * total


def fetched_per_round(run: Run, index: int) -> int:
    """Bytes that a worker of this block fetches in one round."""
    seen = {index, *watched(index, run.recipe)}
    return sum(body(run.shape, each, run.exchange.codec) for each in seen)


@cache
def body(shape: Shape, index: int, codec: str) -> int:
    """Bytes of one update, or one delta, of a block."""
    return largest(codec, shapes_of(parameters_of(new_block(shape, index, 0))))
