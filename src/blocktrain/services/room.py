"""How much of the disk a run may take of a volunteer (--max-disk).

Whoever is about to write into the run's folder claims the bytes first. Files are counted by their
length; what else lies there, a few kilobytes of notes, is in NOTES.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from blocktrain.aggregation.charter import Charter
from blocktrain.errors import CannotSave
from blocktrain.learning.objective import Recipe, watched
from blocktrain.learning.optimiser import state_shapes
from blocktrain.wire.codecs import CODECS
from blocktrain.wire.tensors import largest

NOTES = 8192  # bytes for traffic.json and the signed message of an update, of about 1 kB
KEPT = 2  # versions of each block: rounds of different blocks may build on two


@dataclass(frozen=True)
class Room:
    """The folder of one run, and the bytes that may lie in it."""

    folder: Path
    most: int | None = None

    def claim(self, needed: int, what: str) -> None:
        """Refuses what would take more of the disk than was allowed, before it is begun."""
        if self.most is None:
            return
        used = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        if used + needed > self.most:
            raise CannotSave(
                f"{what} needs {needed:,} bytes more, and {used:,} of the {self.most:,} "
                "you allow are used; allow more with --max-disk or choose another --block."
            )


def state_size(block: int, charter: Charter) -> int:
    """Bytes of an update of this block, with what its replica remembers."""
    shapes = charter.shapes(block)
    residual = 0 if CODECS[charter.codec].exact else charter.snapshot_size(block)
    optimiser = largest("fp32", state_shapes(shapes))
    return charter.update_size(block) + optimiser + residual + NOTES


def takes(blocks: Collection[int], charter: Charter, recipe: Recipe) -> int:
    """Bytes of the disk, at the most, for who trains these blocks by turns; without the text."""
    seen = {*blocks, *(each for block in blocks for each in watched(block, recipe))}
    versions = sum(2 * KEPT * charter.snapshot_size(block) for block in seen)
    one_more = max(2 * charter.snapshot_size(b) + charter.update_size(b) for b in seen)
    states = [state_size(block, charter) for block in blocks]
    return versions + one_more + sum(states) + max(states)
