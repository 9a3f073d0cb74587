"""Updates -> one new snapshot. Pure, numpy only, always in slot order, tensor by tensor.

    mean      = sum(factor * bytes * change) / sum(bytes)
    momentum' = mu * momentum + mean                       (if mu, the outer momentum, is not 0)
    wanted    = rate * (mean + mu * momentum') + residual
    delta     = what the run's codec makes of wanted; got = what it decodes to
    residual' = wanted - got                               (if the codec loses something)
    snapshot' = snapshot + got
    steady'   = keep * steady + (1 - keep) * snapshot'

Whoever has snapshot and steady has the next ones from the delta alone (`follow`), bit for bit: all
of it is elementwise float32, in the order in which it is written here.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from blocktrain.errors import BadConfig, BadTensors
from blocktrain.terms import Array, Parameters
from blocktrain.wire.codecs import AT_ONCE, CODECS, Dimensions, Raw, cached
from blocktrain.wire.tensors import Body, Shapes, encoded, order, shapes_of

TOGETHER = 8  # mapped updates read side by side: their sum stays in the cache
# Decoded ones come one by one, so that the next may have the memory of the last: int4 (tensors of
# 138,240 values) took 2.9 to 4.0 ns of CPU a value so, and 6.3 to 6.9 by eights.
ONE = np.float32(1)

LARGEST_CHANGE = 4.0
"""The largest norm of a change that is averaged, in norms of the snapshot it builds on."""

Reader = Callable[[str], Array]
"""One tensor by its name. It is only looked at, so it may be a mapped file's memory."""


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
class Part:
    """One update's part in the average."""

    change: Reader
    bytes_trained: int
    factor: float = 1.0
    """Below 1 for a salvaged update. Its bytes count in full, so that alone it is small, too."""


@dataclass(frozen=True)
class Standing:
    """Readers of what is kept of a block between rounds. The four change together."""

    snapshot: Reader
    steady: Reader
    momentum: Reader | None = None
    residual: Reader | None = None


@dataclass(frozen=True)
class Next:
    """One tensor of what comes next."""

    snapshot: Array
    steady: Array
    momentum: Array | None
    residual: Array | None
    delta: tuple[Raw, ...]
    """As the codec encodes it."""


@dataclass(frozen=True)
class Kept:
    """A Standing in memory."""

    snapshot: Parameters
    steady: Parameters
    momentum: Parameters | None = None
    residual: Parameters | None = None


def combined(
    like: Shapes,
    standing: Standing,
    parts: Sequence[Part],
    averaging: Averaging,
    codec: str = "fp32",
) -> Iterator[tuple[str, Next]]:
    """What comes next, from updates in slot order: each tensor once, as an fp32 body orders them.

    Needs memory for some copies of one tensor, however many updates there are.
    """
    for name in order(like):
        yield name, next_tensor(name, like[name], standing, parts, averaging, codec)


def combine(kept: Kept, parts: Sequence[Part], averaging: Averaging, codec: str = "fp32") -> Kept:
    """What is kept next, from updates in slot order: `combined`, in memory."""
    standing = Standing(
        kept.snapshot.__getitem__,
        kept.steady.__getitem__,
        kept.momentum.__getitem__ if kept.momentum else None,
        kept.residual.__getitem__ if kept.residual else None,
    )
    made = dict(combined(shapes_of(kept.snapshot), standing, parts, averaging, codec))
    made = {name: made[name] for name in kept.snapshot}
    return Kept(
        {name: one.snapshot for name, one in made.items()},
        {name: one.steady for name, one in made.items()},
        {name: one.momentum for name, one in made.items() if one.momentum is not None} or None,
        {name: one.residual for name, one in made.items() if one.residual is not None} or None,
    )


def follow(
    snapshot: Parameters, steady: Parameters, delta: Reader, averaging: Averaging
) -> tuple[Parameters, Parameters]:
    """The next snapshot and steady from a delta: the same bits as where it was made."""
    after = {
        name: moved(value, steady[name], delta(name), averaging) for name, value in snapshot.items()
    }
    return (
        {name: new for name, (new, _) in after.items()},
        {name: new for name, (_, new) in after.items()},
    )


# --- one tensor ---------------------------------------------------------------------------------


def next_tensor(
    name: str,
    shape: Dimensions,
    standing: Standing,
    parts: Sequence[Part],
    averaging: Averaging,
    codec: str,
) -> Next:
    """One tensor of what comes next: the law at the top of this file."""
    together = TOGETHER if CODECS[codec].exact else 1
    wanted, momentum, residual = mean(name, shape, parts, together), None, None
    rate, push = np.float32(averaging.outer_rate), np.float32(averaging.outer_momentum)
    if push:
        momentum = np.zeros(shape, np.float32)
        if standing.momentum:
            add(momentum, [standing.momentum(name)], [push])
        add(momentum, [wanted], [ONE])
        add(wanted, [momentum], [push])
    if rate != ONE:
        wanted *= rate
    if standing.residual:
        add(wanted, [standing.residual(name)], [ONE])
    delta, got = encoded(name, wanted, codec), wanted
    if not CODECS[codec].exact:
        got = CODECS[codec].decode(delta, shape)
        residual = np.subtract(wanted, got, out=wanted)
    snapshot, steady = moved(standing.snapshot(name), standing.steady(name), got, averaging)
    return Next(snapshot, steady, momentum, residual, delta)


def mean(name: str, shape: Dimensions, parts: Sequence[Part], together: int) -> Array:
    """The mean of what the updates change, by bytes trained and by factor; so many at a time."""
    total = max(1, sum(part.bytes_trained for part in parts))  # nobody trained: nothing changes
    shares = [np.float32(part.factor * (part.bytes_trained / total)) for part in parts]
    change = np.zeros(shape, np.float32)
    for first in range(0, len(parts), together):
        some = slice(first, first + together)
        add(change, [part.change(name) for part in parts[some]], shares[some])
    return change


def add(total: Array, values: Sequence[Array], shares: Sequence[np.float32]) -> None:
    """total += share * value, of one after the other, a cache-full at a time."""
    rows, product = [flat(value, total) for value in values], np.empty(AT_ONCE, np.float32)
    for at, sums in cached(total):
        for row, share in zip(rows, shares, strict=True):
            sums += np.multiply(row[at], share, out=product[: sums.size])


def moved(snapshot: Array, steady: Array, got: Array, averaging: Averaging) -> tuple[Array, Array]:
    """Snapshot and steady after a change, a cache-full at a time."""
    keep, rest = np.float32(averaging.steady), np.float32(1 - averaging.steady)
    before, kept = flat(snapshot, got), flat(steady, got)
    after, blended = np.empty((2, got.size), np.float32)
    product = np.empty(AT_ONCE, np.float32)
    for at, change in cached(got):
        new, mixed = after[at], blended[at]
        np.add(before[at], change, out=new)
        np.multiply(kept[at], keep, out=mixed)
        mixed += np.multiply(new, rest, out=product[: change.size])
    return after.reshape(got.shape), blended.reshape(got.shape)


def flat(value: Array, like: Array) -> Array:
    """Its values in a row, if it has the shape of the other."""
    if value.shape != like.shape:
        raise BadTensors(f"A tensor is {value.shape}, not {like.shape}; take that of this block.")
    return value.reshape(-1)


# --- refusals -----------------------------------------------------------------------------------


def refusal(change: Body, base_norm: float) -> str | None:
    """Why this change cannot be averaged, or None if it can; tensor by tensor.

    `base_norm` is the norm of the snapshot that the change builds on. Names and shapes were looked
    at when the body was opened; a bad scale inside it is BadTensors here. What the scales alone
    vouch for is not decoded: 1 MB of int4 takes 0.2 ms then, and 3.2 ms decoded.
    """
    limit = LARGEST_CHANGE * base_norm
    if math.sqrt(sum(change.ceiling(name) for name in change.like)) <= limit:
        return None
    squares = 0.0
    for name in change.like:
        square = squared(change.read(name))
        if not math.isfinite(square):
            return f"'{name}' holds a number that is not finite; train again from the snapshot."
        squares += square
    if not (found := math.sqrt(squares)) <= limit:
        return (
            f"The norm of the change is {found:.3g}, beyond {limit:.3g}, which is "
            f"{LARGEST_CHANGE:g} times that of its snapshot; train again with a lower rate."
        )
    return None


def norm(read: Reader, like: Shapes) -> float:
    """The norm of all tensors together."""
    return math.sqrt(sum(squared(read(name)) for name in like))


def squared(value: Array) -> float:
    """The sum of its squares: finite if and only if all of its values are."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = float(np.vdot(value, value))
        if not math.isfinite(found):  # perhaps only beyond float32
            pieces = (piece.astype(np.float64) for _, piece in cached(value))
            found = sum(float(np.vdot(piece, piece)) for piece in pieces)
    return found
