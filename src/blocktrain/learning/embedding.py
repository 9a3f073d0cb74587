"""Bytes -> vectors: one for each byte, and one for each run of 2 to N bytes that ends with it.

A few layers learn slowly which letters make a word; a table of runs says it at once, for no matrix
product (LOG.md, 2026-11-17: much in short runs; what many vectors do in long ones). Runs are
many, vectors few: a hash says which one a run has, others have it too, and runs of several lengths
tell them apart.

Letters: B batch, T positions, R how far back a run reaches, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOTHING = -1  # in place of a byte before the window's first
GAIN = 4.0  # a run comes up rarely, so each of AdamW's steps must take its vector further
MOST = 32  # bytes in a run
PRIME = 2**31 - 1
FACTORS = [pow(16807, power, PRIME) for power in range(2, MOST + 2)]


class Embedding(nn.Embedding):
    """Vectors of tokens and of the runs that end with them; those of runs start at zero.

    Without memory nothing is drawn: that would import a compiler.
    """

    def __init__(self, tokens: int, width: int, longest: int, vectors: int) -> None:
        super().__init__(tokens, width)
        self.reach = longest - 1
        self.vectors = vectors
        if self.reach:
            self.runs = nn.Parameter(torch.zeros(self.reach * vectors, width))

    def reset_parameters(self) -> None:
        """Draws the vectors of tokens."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, known_BT: Tensor) -> Tensor:
        """A vector for each token but the first R, which are there to be looked back at."""
        x_BTD = super().forward(known_BT[:, self.reach :])
        if self.reach:
            for run_BTD in F.embedding(places(known_BT, self.reach, self.vectors), self.runs):
                x_BTD = torch.add(x_BTD, run_BTD, alpha=GAIN)
        return x_BTD


def places(known_BT: Tensor, reach: int, vectors: int) -> Tensor:
    """(R, B, T): where the vector of each run is that ends with a token, shorter runs first."""
    length = known_BT.shape[1] - reach
    found = []
    sums_BT = (known_BT[:, reach:] + 1) * FACTORS[0]
    for back in range(1, reach + 1):
        first = reach - back
        sums_BT = sums_BT + (known_BT[:, first : first + length] + 1) * FACTORS[back]
        found.append(sums_BT % PRIME % vectors + (back - 1) * vectors)
    return torch.stack(found)
