"""What a volunteer allows and wants, and which blocks that leaves."""

from dataclasses import dataclass
from pathlib import Path

from blocktrain.aggregation.charter import Charter
from blocktrain.errors import BadInput
from blocktrain.learning.objective import Recipe, watched
from blocktrain.services.holdings import refuse_unknown
from blocktrain.wire.throttle import Limits

COPIES = 6  # of a block in memory while it trains: values, gradients, two of the optimiser, change
SPARE = 300 * 2**20  # bytes for activations and the rest
PATIENT = 60.0  # seconds that a round's downloads may take before a block is too much for a link


@dataclass(frozen=True)
class Wishes:
    """What a volunteer allows and wants."""

    name: str = ""
    """What to call this worker on the dashboard."""
    block: int | None = None
    """Only this block, counted from 1; the least-served one that fits if not given."""
    data: str | None = None
    """A file or folder with the run's text, if it has no name that can be fetched."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    threads: int | None = None
    """CPU threads; all if not given."""
    max_upload: float | None = None
    """Bytes a second."""
    max_download: float | None = None
    """Bytes a second."""
    max_traffic: int | None = None
    """Bytes in all, both directions; then the worker leaves."""
    max_disk: int | None = None
    """Bytes that this run may take of the disk."""
    turns: Path | None = None
    """A folder shared by workers of one machine: as many compute at once as it has files."""

    @property
    def limits(self) -> Limits:
        """What the link must keep to."""
        return Limits(self.max_upload, self.max_download, self.max_traffic)


def fitting(wishes: Wishes, charter: Charter, recipe: Recipe, memory: int) -> list[int] | None:
    """The blocks that this machine and this link can train; None is any."""
    if wishes.block is not None:
        wanted = [wishes.block - 1]
        refuse_unknown(wanted, charter)
        return wanted
    every = range(charter.rules.blocks)
    fits = [block for block in every if needs(block, charter) < memory]
    if not fits:
        raise BadInput(
            f"A block of this run needs {needs(0, charter) >> 20} MiB of memory, and "
            f"{memory >> 20} are free; close something, or join another run."
        )
    if (rate := wishes.max_download) is not None:
        fits = [block for block in fits if downloads(block, charter, recipe) < rate * PATIENT]
        if not fits:
            raise BadInput("--max-download is too little for any block; allow more.")
    return None if len(fits) == len(every) else fits


def needs(block: int, charter: Charter) -> int:
    """Bytes of memory that training this block takes, about."""
    return COPIES * charter.snapshot_size(block) + SPARE


def downloads(block: int, charter: Charter, recipe: Recipe) -> int:
    """Bytes that a round of this block fetches, once it is under way."""
    return sum(map(charter.update_size, [block, *watched(block, recipe)]))
