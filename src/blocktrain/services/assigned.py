"""What an assignment means to learning: the same for a worker and for a replay."""

from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from blocktrain import config
from blocktrain.aggregation import ledger
from blocktrain.aggregation.charter import Charter
from blocktrain.errors import BadInput
from blocktrain.learning.files import empty_block_without_memory, is_bounded, map_block
from blocktrain.learning.local import Work
from blocktrain.learning.model import Block, Shape
from blocktrain.learning.objective import Loader
from blocktrain.services.run import Run
from blocktrain.wire.messages import Assignment


def run_of(charter: Charter) -> Run:
    """The settings for learning that a charter carries."""
    try:
        table = msgspec.json.decode(charter.learning, type=dict)
    except msgspec.DecodeError as error:
        raise BadInput(f"The run's settings are not understood ({error}); upgrade.") from None
    if isinstance(shape := table.get("shape", {}), dict):  # a charter without grams is older
        table["shape"] = {"grams": 1} | shape
    run = config.fill(Run, table, where="the run's charter")
    # The rules decide how long rounds are, also in charters from before rounds could grow.
    return replace(run, pace=replace(run.pace, first_steps=charter.rules.first_steps))


def refuse_other_blocks(charter: Charter, shape: Shape) -> None:
    """Refuses settings that make other blocks than the charter tells of, before they are made."""
    told = len(charter.blocks)
    too_many = shape.blocks != told or shape.layers > max(map(len, charter.blocks), default=0)
    if (
        too_many
        or not is_bounded(shape)
        or any(
            {name: tuple(p.shape) for name, p in structure(shape, index).items()}
            != {name: tuple(sizes) for name, sizes in charter.shapes(index).items()}
            for index in range(told)
        )
    ):
        raise BadInput("The run's settings do not make the blocks it tells of; ask its owner.")


def structure(shape: Shape, index: int) -> dict[str, Tensor]:
    """A block's parameters without their memory."""
    return dict(empty_block_without_memory(shape, index).named_parameters())


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
