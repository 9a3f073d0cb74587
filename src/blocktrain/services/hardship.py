"""What goes wrong with workers, played in the lab: what does it cost?"""

from dataclasses import dataclass

import numpy as np

from blocktrain.errors import BadConfig


@dataclass(frozen=True)
class Hardship:
    """Slow workers and late updates; nothing unless told."""

    missed: float = 0.0
    """Share of updates that come after their round has closed."""
    salvaged: float = 0.0
    """Factor by which a late update counts in the next round; 0: it is lost."""
    slowest: float = 1.0
    """How much slower a block's slowest worker is than its fastest; it makes fewer steps."""

    def __post_init__(self) -> None:
        if not 0 <= self.missed <= 1 or not 0 <= self.salvaged <= 1:
            raise BadConfig("missed and salvaged are shares; they must be from 0 to 1.")
        if not 1 <= self.slowest <= 1000:
            raise BadConfig(f"slowest is {self.slowest:g}; it must be from 1 to 1000.")

    def is_late(self, seed: int, round: int, block: int, slot: int) -> bool:
        """Whether this update comes too late: a matter of luck that follows from the seed."""
        return bool(np.random.default_rng((seed, round, block, slot)).random() < self.missed)

    def steps(self, usual: int, slot: int, slots: int) -> int:
        """Steps that this worker makes while the fastest makes the usual number."""
        slower = self.slowest ** (slot / (slots - 1)) if slots > 1 else 1.0
        return max(1, round(usual / slower))


NONE = Hardship()
