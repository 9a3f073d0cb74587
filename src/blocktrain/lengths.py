"""How long rounds are: they may start short and grow.

Blocks change most at first, and no neighbour should miss more than a small part of all that was
learnt. Once much is behind, long rounds cost little (docs/results.md, `staleness`).
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache

GROWTH = 10  # a growing round is at most one part in this many of all steps before it


@dataclass(frozen=True)
class Lengths:
    """Local steps of every round."""

    full: int
    first: int = 0
    """Of the first round; 0: all are alike."""

    def of(self, round: int) -> int:
        """Steps of this round; the first one is 1."""
        return self.before(round + 1) - self.before(round)

    def before(self, round: int) -> int:
        """Steps of all rounds before this one."""
        growing = growth(self.full, self.first)
        full = max(0, round - len(growing))
        return growing[round - 1 - full] + full * self.full

    def rounds(self, steps: int) -> int:
        """The fewest rounds, at least one, that have so many steps."""
        growing = growth(self.full, self.first)
        if steps <= growing[-1]:
            return max(1, bisect_left(growing, steps))
        return len(growing) - 1 - (growing[-1] - steps) // self.full


@cache
def growth(full: int, first: int) -> tuple[int, ...]:
    """Steps before each round that is shorter than a full one, and before the first full one.

    Made from its end, so that full rounds begin after a whole number of them: runs with rounds of
    several lengths can then have equal steps.
    """
    before = [GROWTH * full if 0 < first < full else 0]
    while before[-1] > 0:
        before.append(before[-1] - min(before[-1], max(first, before[-1] // (GROWTH + 1))))
    return tuple(before[::-1])
