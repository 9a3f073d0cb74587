"""Other ways to read a model than the headline's, to stand beside it.

Honest ones see context and nothing else. LEAKY ones have seen the targets' noisy codes; they show
what a CE that is not honest would be.

Letters: B batch, T positions, V vocabulary, M code width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.learning.evaluate import Readout, cross_entropies, nats_of, windows
from blocktrain.learning.model import START, VOCABULARY, Model, causal_sight, denoise
from blocktrain.learning.noise import target_code
from blocktrain.terms import Progress, silent

HEADLINE_HEAD = "headline: last head"
HEADLINE_CHAIN = "headline: chain from 0, mean of the blocks"
DRAWS = 16  # chains from noise whose probabilities are averaged


@dataclass(frozen=True)
class Read:
    """A text's CE by one readout."""

    name: str
    ce: float
    leaky: bool = False


def readouts(
    model: Model, text: NDArray[np.uint8], seed: int, progress: Progress = silent
) -> list[Read]:
    """CE by the headline's readout and by the others, all on the same text."""
    if model.shape.objective == "neighbours":
        counts = sorted({1, min(2, model.shape.blocks), model.shape.blocks})
        names = [HEADLINE_HEAD, *(f"mean of the last {count} heads" for count in counts[1:])]
        return honest_ones(model, text, mean_of_heads(model, counts), names, progress)
    names = [HEADLINE_CHAIN, "chain from 0, last block"]
    names += ["chain from noise, 1 draw", f"chain from noise, {DRAWS} draws"]
    names += ["first block at sigma_max"]

    def first_half(done: int, total: int) -> None:
        progress(done, 2 * total)

    def second_half(done: int, total: int) -> None:
        progress(total + done, 2 * total)

    def read(tokens_BT: Tensor) -> list[Tensor]:
        return [model.log_probabilities(tokens_BT), *other_honest(model, tokens_BT, seed)]

    found = honest_ones(model, text, read, names, first_half)
    return found + leaky_ones(model, text, seed, second_half)


def honest_ones(
    model: Model, text: NDArray[np.uint8], readout: Readout, names: list[str], progress: Progress
) -> list[Read]:
    """CE by readouts that see nothing but context."""
    values = cross_entropies(readout, text, model.shape.window, model.device, progress)
    return [Read(name, ce) for name, ce in zip(names, values, strict=True)]


def mean_of_heads(model: Model, counts: Sequence[int]) -> Readout:
    """The mean of the last so many heads' log-probabilities, for each of the counts."""

    def read(tokens_BT: Tensor) -> list[Tensor]:
        logs = list(model.prefixes(tokens_BT))
        return [torch.stack(logs[-count:]).mean(0).log_softmax(-1) for count in counts]

    return read


def leaky_ones(model: Model, text: NDArray[np.uint8], seed: int, progress: Progress) -> list[Read]:
    """LEAKY: CE when z holds the true target, at every sigma of the chain."""
    sigmas = model.noise.chain(model.shape.blocks)
    whole = torch.from_numpy(np.concatenate(([START], text)).astype(np.int64))
    totals = torch.zeros(len(sigmas), dtype=torch.float64)
    done = 0
    for tokens_BT, targets_BT, counted_BT in windows(whole, model.shape.window):
        logs = leaky_logs(model, tokens_BT.to(model.device), targets_BT.to(model.device), seed)
        totals += torch.stack([nats_of(log_BTV, targets_BT, counted_BT) for log_BTV in logs])
        done += int(counted_BT.sum())
        progress(done, len(text))
    return [
        Read(f"true target at sigma {sigma:.2f}", float(total) / len(text), leaky=True)
        for sigma, total in zip(sigmas, totals, strict=True)
    ]


def other_honest(model: Model, tokens_BT: Tensor, seed: int) -> list[Tensor]:
    """Readouts whose z starts at nothing or at pure noise; nothing but context enters."""
    random = torch.Generator().manual_seed(seed)
    sight = causal_sight(model.shape, tokens_BT.shape[1], tokens_BT.device)
    nothing = torch.zeros(*tokens_BT.shape, VOCABULARY, device=tokens_BT.device)
    first, *_, last = [*model.denoise_chain(tokens_BT, nothing, sight)] * 2
    draws = []
    for _ in range(DRAWS):
        noise = torch.randn(nothing.shape, generator=random).to(tokens_BT.device)
        *_, final = model.denoise_chain(tokens_BT, model.noise.sigma_max * noise, sight)
        draws.append(final.log_softmax(-1))
    mixture = torch.logsumexp(torch.stack(draws), 0) - log(DRAWS)
    return [last.log_softmax(-1), draws[0], mixture, first.log_softmax(-1)]


@torch.no_grad()
def leaky_logs(model: Model, tokens_BT: Tensor, targets_BT: Tensor, seed: int) -> list[Tensor]:
    """LEAKY: log-probabilities when z holds the true target, at each sigma by its own block."""
    random = torch.Generator().manual_seed(seed)
    sight = causal_sight(model.shape, tokens_BT.shape[1], model.device)
    code_BTM = target_code(model.noise.code_seed).to(model.device)[targets_BT]
    found = []
    owners = [*model.blocks, model.blocks[-1]]  # the chain has one sigma more than blocks
    for block, sigma in zip(owners, model.noise.chain(model.shape.blocks), strict=True):
        noise_BTM = torch.randn(code_BTM.shape, generator=random).to(model.device)
        sigma_B = torch.full((len(tokens_BT),), sigma, device=model.device)
        z_BTM = code_BTM + sigma * noise_BTM
        logits = denoise(block, model.noise, tokens_BT, z_BTM, sigma_B, sight)
        found.append(logits.log_softmax(-1))
    return found
