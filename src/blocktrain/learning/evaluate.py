"""Honest CE of an assembled model.

A readout sees context and nothing else; targets enter at the final cross entropy and nowhere else.
Every byte is predicted with at least half a window of context where the text has it.

Letters: B batch, T positions, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.errors import BadCorpus
from blocktrain.learning.model import START, Model
from blocktrain.terms import Progress, silent

Readout = Callable[[Tensor], Sequence[Tensor]]
"""Context (B, T) -> log-probabilities (B, T, V), one per thing that is read out."""

SAMPLE = 64 * 1024  # bytes: what progress is measured on, always called a sample
POSITIONS_AT_ONCE = 4096


@dataclass(frozen=True)
class Score:
    """How well a text was predicted."""

    ce: float
    """Nats per byte, by the whole stack."""
    bytes: int
    per_block: list[float]
    """CE of every prefix of the stack."""

    @property
    def bits_per_byte(self) -> float:
        """The same in bits."""
        return self.ce / log(2)


def evaluate(model: Model, text: NDArray[np.uint8], progress: Progress = silent) -> Score:
    """CE over every byte of the text, by the honest readout."""
    per_block = cross_entropies(honest(model), text, model.shape.window, model.device, progress)
    return Score(per_block[-1], len(text), per_block)


def honest(model: Model) -> Readout:
    """The headline readout: every prefix of the stack."""
    return lambda tokens_BT: list(model.prefixes(tokens_BT))


@torch.no_grad()
def cross_entropies(
    readout: Readout,
    text: NDArray[np.uint8],
    window: int,
    device: torch.device,
    progress: Progress = silent,
) -> list[float]:
    """Mean CE over every byte of the text, for each thing the readout gives."""
    if not len(text):
        raise BadCorpus("There is nothing to evaluate: the text is empty.")
    whole = torch.from_numpy(np.concatenate(([START], text)).astype(np.int64))
    totals: Tensor | None = None
    done = 0
    for tokens_BT, targets_BT, counted_BT in windows(whole, window):
        logs = readout(tokens_BT.to(device))
        sums = torch.stack([nats_of(log_BTV, targets_BT, counted_BT) for log_BTV in logs])
        totals = sums if totals is None else totals + sums
        done += int(counted_BT.sum())
        progress(done, len(text))
    assert totals is not None
    return [float(total) / len(text) for total in totals]


def nats_of(log_BTV: Tensor, targets_BT: Tensor, counted_BT: Tensor) -> Tensor:
    """What the targets that count cost, together."""
    log_BT = log_BTV.gather(-1, targets_BT.to(log_BTV.device)[..., None])[..., 0].cpu()
    return -log_BT[counted_BT].sum(dtype=torch.float64)


def windows(whole: Tensor, window: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(tokens, targets, which targets count): each target counts exactly once."""
    length = len(whole) - 1
    window = min(window, length)
    starts = [*range(0, length - window, max(1, window // 2)), length - window]
    scored = 0
    rows: list[tuple[int, int]] = []
    for start in starts:
        rows.append((start, scored - start))
        scored = start + window
    at = torch.arange(window)
    count = max(1, POSITIONS_AT_ONCE // window)
    for first in range(0, len(rows), count):
        some = torch.tensor(rows[first : first + count])
        index_BT = some[:, :1] + at
        yield whole[index_BT], whole[index_BT + 1], at >= some[:, 1:]
