"""Bytes from probabilities: the same byte whoever chooses, given the same probabilities.

Byte number n of a text is the argmax of log p_n / temperature + g(seed, n), where g is Gumbel noise
and a pure function of the seed and the byte's number. Each byte is distributed exactly as the model
says, and a draft made with the same g is right whenever both models choose the same byte.

Letters: R rows, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.errors import BadConfig
from blocktrain.learning.model import VOCABULARY
from blocktrain.terms import Array
from blocktrain.wire.serving import Choice

COUNTS_PER_BYTE = VOCABULARY // 4  # Philox gives four numbers for each count


@dataclass(frozen=True)
class Sampling:
    """How the next byte is chosen."""

    temperature: float = 0.8
    """0 always takes the likeliest byte; 1 draws from the model as it is."""
    top_p: float = 0.95
    """Draw only from the likeliest bytes that together have this probability."""
    seed: int = 0
    """The same seed gives the same text."""
    length: int = 512
    """Bytes to generate."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise BadConfig(f"temperature is {self.temperature}; it must be from 0 to 100.")
        if not 0 < self.top_p <= 1:
            raise BadConfig(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if not 0 <= self.seed < 2**63:
            raise BadConfig(f"seed is {self.seed}; it must be from 0 to 2^63 - 1.")
        if self.length < 0:
            raise BadConfig(f"length is {self.length}; it must be 0 or more.")

    def choice(self, at: int) -> Choice:
        """The same, for the wire: the first wanted row chooses byte number `at` of the text."""
        return Choice(self.temperature, self.top_p, self.seed, at)


def chosen(logs_RV: Tensor | Array, choice: Choice) -> list[int]:
    """One byte for each row of log-probabilities; row i is byte number choice.at + i."""
    scores_RV = np.asarray(logs_RV, np.float64)
    if choice.temperature > 0 and len(scores_RV):
        scores_RV = scores_RV - scores_RV.max(-1, keepdims=True)  # so that 0 / tiny stays 0
        scores_RV = likely(scores_RV / choice.temperature, choice.top_p)
        scores_RV = scores_RV + gumbel(choice.seed, choice.at, len(scores_RV))
    return [int(byte) for byte in scores_RV.argmax(-1)]


def logs_of(logs_RV: Tensor, made: list[int]) -> list[float]:
    """The model's own log-probability of each of these bytes."""
    index_R1 = torch.tensor(made, dtype=torch.long)[:, None]
    return [float(log) for log in logs_RV.gather(1, index_R1)]


def likely(scores_RV: NDArray[np.float64], top_p: float) -> NDArray[np.float64]:
    """The scores, with -inf for all but the likeliest bytes that together have probability top_p.

    A byte stays if those before it have less than top_p, so at least one does.
    """
    if top_p == 1:
        return scores_RV
    order_RV = np.argsort(-scores_RV, axis=-1, kind="stable")
    sorted_RV = np.take_along_axis(scores_RV, order_RV, -1)
    shares_RV = np.exp(sorted_RV) / np.exp(sorted_RV).sum(-1, keepdims=True)
    sorted_RV[shares_RV.cumsum(-1) - shares_RV >= top_p] = -np.inf
    np.put_along_axis(scores_RV, order_RV, sorted_RV, -1)
    return scores_RV


def gumbel(seed: int, first: int, count: int) -> NDArray[np.float64]:
    """(count, 256) of standard Gumbel noise, for bytes `first`, `first` + 1, ...

    Philox's raw numbers are the same in every numpy; how its Generator makes floats may change.
    """
    source = np.random.Philox(key=seed, counter=first * COUNTS_PER_BYTE)
    raw = np.asarray(source.random_raw(count * VOCABULARY))
    uniform = ((raw >> np.uint64(12)) + 0.5) * 2.0**-52  # 52 bits: exact, and never 0 or 1
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise.reshape(count, VOCABULARY)
