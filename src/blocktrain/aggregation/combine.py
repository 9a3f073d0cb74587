"""Updates -> one new snapshot. Pure, numpy only, always in slot order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blocktrain.errors import BadConfig
from blocktrain.terms import Array, Parameters


@dataclass(frozen=True)
class Averaging:
    """How updates become a snapshot, and snapshots a steady block."""

    steady: float = 0.7
    """Part of the steady block kept in each round; the rest is the new snapshot."""
    outer_rate: float = 1.0
    """Part of the mean update that is applied (DiLoCo's outer learning rate)."""
    outer_momentum: float = 0.0
    """Nesterov momentum across rounds (DiLoCo's; 0 is plain averaging)."""

    def __post_init__(self) -> None:
        for name in ("steady", "outer_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise BadConfig(f"{name} is {getattr(self, name)}; it must be from 0 to below 1.")
        if not 0 < self.outer_rate <= 2:
            raise BadConfig(f"outer_rate is {self.outer_rate}; it must be above 0 and at most 2.")


@dataclass(frozen=True)
class Standing:
    """What is kept of a block between rounds. The three change together."""

    snapshot: Parameters
    steady: Parameters
    momentum: Parameters | None = None


def combine(
    standing: Standing, updates: Sequence[tuple[Parameters, int]], averaging: Averaging
) -> Standing:
    """The next standing, from (change, bytes trained) pairs in slot order."""
    total = max(1, sum(trained for _, trained in updates))  # nobody trained: nothing changes
    snapshot: Parameters = {}
    steady: Parameters = {}
    momentum: Parameters = {}
    for name, base in standing.snapshot.items():  # tensor by tensor: little memory at a time
        change = np.zeros_like(base)
        for update, trained in updates:
            change += update[name] * np.float32(trained / total)
        if averaging.outer_momentum:
            before = standing.momentum[name] if standing.momentum else np.zeros_like(base)
            momentum[name] = np.float32(averaging.outer_momentum) * before + change
            change = change + np.float32(averaging.outer_momentum) * momentum[name]
        snapshot[name] = base + np.float32(averaging.outer_rate) * change
        steady[name] = blend(standing.steady[name], snapshot[name], averaging.steady)
    return Standing(snapshot, steady, momentum or None)


def blend(old: Array, new: Array, keep: float) -> Array:
    """keep * old + (1 - keep) * new, in float32."""
    return np.float32(keep) * old + np.float32(1 - keep) * new


def refusal(change: Parameters, like: Parameters, largest_norm: float) -> str | None:
    """Why this change cannot be averaged, or None if it can."""
    if change.keys() != like.keys():
        odd = sorted(change.keys() ^ like.keys())[0]
        return f"its tensors are not those of the block (see '{odd}')"
    for name, value in change.items():
        if value.shape != like[name].shape:
            return f"'{name}' has shape {value.shape}, not {like[name].shape}"
        if not np.isfinite(value).all():
            return f"'{name}' holds a number that is not finite"
    norm = float(np.sqrt(sum(float(np.vdot(v, v)) for v in change.values())))
    if norm > largest_norm:
        return f"its norm {norm:.3g} is beyond {largest_norm:.3g}"
    return None
