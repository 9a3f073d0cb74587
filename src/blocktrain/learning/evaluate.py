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
from blocktrain.learning.model import START, VOCABULARY, Model, causal_sight, denoise
from blocktrain.learning.noise import target_code
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


@dataclass(frozen=True)
class DenoiseReadout:
    """Another way to read a `denoise` model. LEAKY ones have seen the targets' noisy codes."""

    name: str
    ce: float
    leaky: bool


def denoise_readouts(
    model: Model, text: NDArray[np.uint8], seed: int, progress: Progress = silent
) -> list[DenoiseReadout]:
    """Every honest readout beside the headline, and CE(sigma) with the true target, LEAKY."""
    names = ["chain from 0, last block", "chain from noise, 1 draw", "chain from noise, 16 draws"]
    names += ["first block at sigma_max"]
    sigmas = model.noise.chain(model.shape.blocks)
    leaky_names = [f"true target at sigma {sigma:.2f}" for sigma in sigmas]
    values = cross_entropies(
        lambda tokens: other_honest(model, tokens, seed),
        text,
        model.shape.window,
        model.device,
        lambda done, total: progress(done, 2 * total),
    )
    whole = torch.from_numpy(np.concatenate(([START], text)).astype(np.int64))
    leaky = torch.zeros(len(sigmas), dtype=torch.float64)
    done = len(text)
    for tokens_BT, targets_BT, counted_BT in windows(whole, model.shape.window):
        logs = leaky_logs(model, tokens_BT.to(model.device), targets_BT.to(model.device), seed)
        leaky += torch.stack([nats_of(log_BTV, targets_BT, counted_BT) for log_BTV in logs])
        done += int(counted_BT.sum())
        progress(done, 2 * len(text))
    return [
        *(DenoiseReadout(name, ce, False) for name, ce in zip(names, values, strict=True)),
        *(
            DenoiseReadout(name, float(total) / len(text), True)
            for name, total in zip(leaky_names, leaky, strict=True)
        ),
    ]


def other_honest(model: Model, tokens_BT: Tensor, seed: int) -> list[Tensor]:
    """Readouts whose z starts at nothing or at pure noise; nothing but context enters."""
    random = torch.Generator().manual_seed(seed)
    sight = causal_sight(model.shape, tokens_BT.shape[1], tokens_BT.device)
    nothing = torch.zeros(*tokens_BT.shape, VOCABULARY, device=tokens_BT.device)
    first, *_, last = [*model.denoise_chain(tokens_BT, nothing, sight)] * 2
    draws = []
    for _ in range(16):
        noise = torch.randn(nothing.shape, generator=random).to(tokens_BT.device)
        *_, final = model.denoise_chain(tokens_BT, model.noise.sigma_max * noise, sight)
        draws.append(final.log_softmax(-1))
    mixture = torch.logsumexp(torch.stack(draws), 0) - log(len(draws))
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
