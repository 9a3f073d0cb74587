"""Muon with even rows for matrices, AdamW for the rest, both local to one block.

Even rows: an orthogonal step still moves some neurons further than others, step after step, so
each row is divided by how far it usually goes (NorMuon, Li et al., 2025).

torch has a Muon too, but it orthogonalises in bfloat16 even where CPUs have no units for it and are
30 to 90 times slower, and its state has no names to take a digest of. Here autocast decides.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from blocktrain.errors import BadConfig, BadModel
from blocktrain.terms import Digest

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic whose slope at 0 is steep (Jordan, 2024)
NEWTON_SCHULZ_STEPS = 5
TINY = 1e-7  # instead of dividing by 0: while heads are 0, so is every other gradient
MUON_PARTS = ("attention.", "mlp.", "z_in.")


@dataclass(frozen=True)
class Rates:
    """How far a step of a block goes that has one replica, over the whole run."""

    matrix: float = 0.01
    """Muon's learning rate; R replicas take sqrt(R) times it."""
    other: float = 0.005
    """AdamW's learning rate (embeddings, heads, norms); R replicas take sqrt(R) times it."""
    momentum: float = 0.95
    """Muon's momentum, and how slowly it forgets how far each row goes."""
    warmup: float = 0.02
    """Share of the run in which rates rise from 0."""
    cooldown: float = 0.5
    """Share of the run, at its end, in which rates fall."""
    final: float = 0.05
    """What rates fall to, as a share of their height."""
    decay: float = 0.0
    """Weight decay of matrices."""

    def __post_init__(self) -> None:
        if not (0 < self.matrix < 10 and 0 < self.other < 10):
            raise BadConfig("Learning rates (matrix, other) must be above 0 and below 10.")
        if not (0 <= self.momentum < 1 and 0 <= self.final <= 1 and 0 <= self.decay < 1):
            raise BadConfig("momentum and decay must be from 0 to below 1, final from 0 to 1.")
        if min(self.warmup, self.cooldown) < 0 or self.warmup + self.cooldown > 1:
            raise BadConfig("warmup and cooldown are shares of the run; together at most 1.")

    def shared_by(self, replicas: int) -> "Rates":
        """What each of so many takes whose updates are averaged.

        Both optimisers make steps of one length whatever the gradient's. Steps along gradients of
        smaller batches point apart, so their mean is shorter: by 1 / sqrt(R) where noise rules.
        """
        longer = replicas**0.5
        return replace(self, matrix=self.matrix * longer, other=self.other * longer)

    def at(self, done: float) -> float:
        """The factor on both rates when this share of the run's bytes has been trained."""
        rising = done / self.warmup if done < self.warmup else 1.0
        left = max(0.0, 1.0 - done)
        if left >= self.cooldown or self.cooldown == 0:
            return max(rising, 1e-3)
        return self.final + (1 - self.final) * left / self.cooldown


class Optimiser:
    """The state and the step of one block's optimiser. Takes over the tensors of `state`."""

    def __init__(self, block: nn.Module, rates: Rates, state: dict[str, Tensor]) -> None:
        self.rates = rates
        self.matrices: dict[str, nn.Parameter] = {}
        self.others: dict[str, nn.Parameter] = {}
        for name, parameter in block.named_parameters():
            (self.matrices if is_matrix(name, parameter.shape) else self.others)[name] = parameter
        self.momenta = {
            name: take(state, f"momentum.{name}", p.data) for name, p in self.matrices.items()
        }
        self.energies = {
            name: take(state, f"energy.{name}", p.data[:, :1]) for name, p in self.matrices.items()
        }
        self.adamw = torch.optim.AdamW(
            self.others.values(),
            lr=rates.other,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.0,
            fused=True,  # one trip through memory instead of seven: 9 ms, not 59, for 7.3 M values
        )
        for name, parameter in self.others.items():
            self.adamw.state[parameter] = {
                "step": take(state, f"step.{name}", parameter.new_zeros(()).detach()),
                "exp_avg": take(state, f"exp_avg.{name}", parameter.data),
                "exp_avg_sq": take(state, f"exp_avg_sq.{name}", parameter.data),
            }

    def step(self, factor: float) -> None:
        """One step along the gradients, at `factor` times the rates; clears the gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = self.rates.other * factor
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.step_matrices(factor)

    @torch.no_grad()
    def step_matrices(self, factor: float) -> None:
        """Momentum, then the nearest matrix whose singular values are all about 1, rows evened."""
        rate = self.rates.matrix * factor
        for name, matrix in self.matrices.items():
            if matrix.grad is None:
                continue
            momentum = self.momenta[name]
            momentum.lerp_(matrix.grad, 1 - self.rates.momentum)
            look_ahead = matrix.grad.lerp_(momentum, self.rates.momentum)
            direction = orthogonal(look_ahead)
            direction = evened(direction, self.energies[name], self.rates.momentum)
            tall = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
            if self.rates.decay:
                matrix.mul_(1 - rate * self.rates.decay)
            matrix.add_(direction, alpha=-rate * tall)
            matrix.grad = None

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on, by name, on the CPU."""
        state = {f"momentum.{name}": tensor.cpu() for name, tensor in self.momenta.items()}
        state |= {f"energy.{name}": tensor.cpu() for name, tensor in self.energies.items()}
        for name, parameter in self.others.items():
            for key, value in self.adamw.state[parameter].items():
                state[f"{key}.{name}"] = value.cpu()
        return state


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon steps this parameter, not AdamW."""
    return len(shape) == 2 and any(part in name for part in MUON_PARTS)


def state_shapes(parameters: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the state that belongs to such parameters."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parameters.items():
        if is_matrix(name, shape):
            shapes |= {f"momentum.{name}": shape, f"energy.{name}": (shape[0], 1)}
        else:
            shapes |= {f"step.{name}": (), f"exp_avg.{name}": shape, f"exp_avg_sq.{name}": shape}
    return shapes


def take(state: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """One tensor of a stored state, checked; zeros when nothing was stored at all."""
    if not state:
        return torch.zeros_like(like)
    if name not in state or state[name].shape != like.shape:
        raise BadModel(f"The optimiser state lacks a fitting '{name}'; it is of another model.")
    return state[name].to(like.device)


def orthogonal(matrix: Tensor) -> Tensor:
    """Newton-Schulz iteration towards U V^T of matrix = U S V^T."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + TINY)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


def evened(direction: Tensor, energy: Tensor, kept: float) -> Tensor:
    """The direction, as long as before, with every row divided by its usual length.

    `energy` is the running mean of each row's square, and is brought up to date. That it begins at
    0 makes all rows too long by one factor, which the length takes back.
    """
    energy.lerp_(direction.square().mean(1, keepdim=True), 1 - kept)
    even = direction / (energy.sqrt() + TINY)
    return even.mul_(direction.norm() / (even.norm() + TINY))


def digest_of(tensors: dict[str, Tensor]) -> Digest:
    """sha256 over names, shapes and float32 values, in the order of names."""
    return digest_parts((name, tensors[name]) for name in sorted(tensors))


def digest_parts(parts: Iterable[tuple[str, Tensor]]) -> Digest:
    """sha256 over named tensors in the given order."""
    total = hashlib.sha256()
    for name, tensor in parts:
        total.update(f"{name}{tuple(tensor.shape)}".encode())
        total.update(tensor.detach().float().cpu().contiguous().numpy().data)
    return Digest(total.hexdigest())
