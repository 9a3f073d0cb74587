"""What an assignment means to learning: the same for a worker and for a replay."""

from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from blocktrain import config
from blocktrain.aggregation import ledger
from blocktrain.aggregation.charter import Charter
from blocktrain.errors import BadInput
from blocktrain.learning.files import map_block
from blocktrain.learning.local import Work
from blocktrain.learning.model import Block
from blocktrain.learning.objective import Loader
from blocktrain.services.run import Run
from blocktrain.wire.messages import Assignment


def run_of(charter: Charter) -> Run:
    """The settings for learning that a charter carries."""
    try:
        table = msgspec.json.decode(charter.learning, type=dict)
    except msgspec.DecodeError as error:
        raise BadInput(f"The run's settings are not understood ({error}); upgrade.") from None
    run = config.fill(Run, table, where="the run's charter")
    # The rules decide how long rounds are, also in charters from before rounds could grow.
    return replace(run, pace=replace(run.pace, first_steps=charter.rules.first_steps))


def work_of(run: Run, assignment: Assignment | ledger.Assignment) -> Work:
    """Names one replica's work in one round, as it was told or as it was written down."""
    return Work(
        recipe=run.recipe,
        block=assignment.block,
        slot=assignment.slot,
        round=assignment.round,
        seed=run.pace.seed,
        bytes_before=assignment.bytes_before,
        bytes_per_step=run.bytes_per_step,
        bytes_planned=run.bytes_after(run.pace.rounds),
    )


def loaders_of(paths: dict[int, Path], run: Run, where: torch.device) -> list[Loader]:
    """Opens neighbours from their files; those that nobody looks at are not there."""

    def loader(block: int) -> Loader:
        def load() -> Block:
            return map_block(paths[block], run.shape, block).to(where)

        return load

    return [loader(block) for block in range(run.shape.blocks)]
