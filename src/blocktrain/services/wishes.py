"""What a volunteer allows and wants, and which blocks that leaves."""

from dataclasses import dataclass
from pathlib import Path

from blocktrain.aggregation.charter import Charter
from blocktrain.errors import BadInput, CannotSave
from blocktrain.learning.objective import Recipe, watched
from blocktrain.services.holdings import refuse_unknown
from blocktrain.services.room import takes
from blocktrain.wire.throttle import Limits

COPIES = 6  # of a block in memory while it trains: values, gradients, two of the optimiser, change
SPARE = 300 * 2**20  # bytes for activations and the rest
PATIENT = 60.0  # seconds of a round's downloads, or uploads, beyond which a link is too slow


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
    """Bytes in all, both directions, in every life of its --folder; then the worker leaves."""
    max_disk: int | None = None
    """Bytes that this run may take of the disk: blocks, optimiser, updates, a text it serves. A
    text with a public name lies in the cache, which all runs share, and does not count."""
    turns: Path | None = None
    """A folder shared by workers of one machine: as many compute at once as it has files."""

    @property
    def limits(self) -> Limits:
        """What the link must keep to."""
        return Limits(self.max_upload, self.max_download, self.max_traffic)


def fitting(
    wishes: Wishes, charter: Charter, recipe: Recipe, memory: int, rate: float | None = None
) -> list[int] | None:
    """The blocks that this machine and this link can train; None is any.

    `rate` is how fast the link was found to be, in bytes a second, for whoever set no limit.
    """
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
    fetched = {block: downloads(block, charter, recipe) for block in fits}
    if wishes.max_download is not None:
        fits = [block for block in fits if fetched[block] < wishes.max_download * PATIENT]
    elif rate is not None:  # a slow link is no reason to leave: the least is better than nothing
        most = max(rate * PATIENT, min(fetched.values()))
        fits = [block for block in fits if fetched[block] <= most]
    if not fits:
        raise BadInput("--max-download is too little for any block; allow more.")
    if (upload := wishes.max_upload) is not None:
        fits = [block for block in fits if charter.update_size(block) < upload * PATIENT]
    if not fits:
        raise BadInput("--max-upload is too little for any block; allow more.")
    if wishes.max_disk is not None:
        text = sum(length for length, _ in charter.splits)
        served = charter.corpus_served and wishes.data is None
        fits = within(wishes.max_disk - served * text, fits, charter, recipe)
    return None if len(fits) == len(every) else fits


def within(disk: int, blocks: list[int], charter: Charter, recipe: Recipe) -> list[int]:
    """Those of the blocks, the small ones first, that all fit on the disk together."""
    fits: list[int] = []
    for block in sorted(blocks, key=lambda each: takes([each], charter, recipe)):
        if takes([*fits, block], charter, recipe) <= disk:
            fits.append(block)
    if not fits:
        least = min(takes([block], charter, recipe) for block in blocks)
        raise CannotSave(
            f"A block of this run takes {least:,} bytes of the disk, and {max(0, disk):,} of those "
            "you allow are left for it; allow more with --max-disk."
        )
    return sorted(fits)


def needs(block: int, charter: Charter) -> int:
    """Bytes of memory that training this block takes, about."""
    return COPIES * charter.snapshot_size(block) + SPARE


def downloads(block: int, charter: Charter, recipe: Recipe) -> int:
    """Bytes that a round of this block fetches, once it is under way."""
    return sum(map(charter.update_size, [block, *watched(block, recipe)]))
