"""Any sequence of rounds: what followers have, what codecs owe, and what a mean is."""

import hypothesis
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blocktrain.aggregation.combine import (
    TOGETHER,
    Averaging,
    Kept,
    Part,
    Standing,
    combined,
    follow,
    mean,
)
from blocktrain.terms import Array, Parameters
from blocktrain.wire.codecs import CODECS
from blocktrain.wire.tensors import Body, Writer, decode, encode

SHAPES = {"matrix": (3, 50), "vector": (131,), "scalar": ()}  # over one scale's 128 values, or not
# What one coding may lose, as a part of the largest value. int4: half of a step of 1/8; int2: all
# beyond the outermost level, 1.5 steps of 3/8. A scale has 8 bits, so all but fp16 lose 2^-9 more.
LOST = {"fp32": 0.0, "fp16": 2**-11, "int8": 0.5 / 127, "int4": 0.0625, "int2": 0.4375}

codecs = st.sampled_from([*CODECS])
averagings = st.builds(
    Averaging,
    steady=st.sampled_from([0.0, 0.7, 0.95]),
    outer_rate=st.sampled_from([0.5, 1.0, 1.3]),
    outer_momentum=st.sampled_from([0.0, 0.5, 0.9]),
)
seeds = st.integers(0, 2**32 - 1)
sizes = st.sampled_from([1e-6, 1e-3, 1.0])
trained = st.integers(1, 10**9)
updates_of = st.lists(
    st.tuples(seeds, sizes, trained, st.sampled_from([0.25, 0.5, 1.0])), max_size=TOGETHER + 2
)


def values(seed: int, size: float) -> Parameters:
    """Any tensors, of about this size."""
    luck = np.random.default_rng(seed)
    return {
        name: (size * np.asarray(luck.standard_normal(shape))).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def largest(these: Parameters | None) -> float:
    """The largest value, without its sign."""
    return max(float(np.abs(value).max()) for value in these.values()) if these else 0.0


class AnyRounds(RuleBasedStateMachine):
    """A coordinator, a follower that gets nothing but deltas, and the same without any codec."""

    @initialize(codec=codecs, averaging=averagings, seed=seeds)
    def begin(self, codec: str, averaging: Averaging, seed: int) -> None:
        first = values(seed, 1.0)
        self.codec, self.averaging = codec, averaging
        self.kept = Kept(first, first)
        self.snapshot, self.steady = first, first
        self.exact = {name: value.astype(np.float64) for name, value in first.items()}
        self.pushes = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.rounds, self.most = 0, 0.0

    @rule(updates=updates_of)
    def close_round(self, updates: list[tuple[int, float, int, float]]) -> None:
        """With updates as they come over the wire, late ones among them, or with none."""
        bodies = [encode(values(seed, size), self.codec) for seed, size, _, _ in updates]
        self.combine(
            [
                Part(Body(body, self.codec, SHAPES).read, bytes_trained, factor)
                for body, (_, _, bytes_trained, factor) in zip(bodies, updates, strict=True)
            ]
        )

    @rule(seed=seeds, size=sizes, shares=st.lists(trained, min_size=1, max_size=TOGETHER + 2))
    def close_round_of_equals(self, seed: int, size: float, shares: list[int]) -> None:
        """The mean of equal updates is that update, whatever each was trained on."""
        change = decode(encode(values(seed, size), self.codec), self.codec, SHAPES)
        parts = [Part(change.__getitem__, bytes_trained) for bytes_trained in shares]
        for name, shape in SHAPES.items():
            found = mean(name, shape, parts, TOGETHER)
            np.testing.assert_allclose(found, change[name], rtol=len(shares) * 2**-23)
            assert np.array_equal(mean(name, shape, parts[:1], TOGETHER), change[name])
        self.combine(parts)

    def combine(self, parts: list[Part]) -> None:
        """One round, for all three."""
        before, writer = self.kept, Writer(self.codec, SHAPES)
        standing = Standing(
            before.snapshot.__getitem__,
            before.steady.__getitem__,
            before.momentum.__getitem__ if before.momentum else None,
            before.residual.__getitem__ if before.residual else None,
        )
        made = dict(combined(SHAPES, standing, parts, self.averaging, self.codec))
        for name, one in made.items():
            writer.place(name, one.delta)
        self.kept = Kept(
            {name: one.snapshot for name, one in made.items()},
            {name: one.steady for name, one in made.items()},
            {name: one.momentum for name, one in made.items() if one.momentum is not None} or None,
            {name: one.residual for name, one in made.items() if one.residual is not None} or None,
        )
        delta = Body(writer.body(), self.codec, SHAPES)
        self.snapshot, self.steady = follow(self.snapshot, self.steady, delta.read, self.averaging)
        self.without_codec(parts)
        self.rounds += 1

    def without_codec(self, parts: list[Part]) -> None:
        """DiLoCo's law in float64: v <- mu v + g;  x <- x + rate (g + mu v)."""
        total, push = sum(part.bytes_trained for part in parts), self.averaging.outer_momentum
        for name in SHAPES:
            shares = [part.factor * part.bytes_trained / total for part in parts]
            changes = [part.change(name).astype(np.float64) for part in parts]
            gained = sum((s * c for s, c in zip(shares, changes, strict=True)), np.zeros(()))
            self.most = max(self.most, *(float(np.abs(each).max()) for each in changes), 0.0)
            self.pushes[name] = push * self.pushes[name] + gained
            step = gained + push * self.pushes[name]
            self.exact[name] = self.exact[name] + self.averaging.outer_rate * step

    @invariant()
    def a_follower_has_every_bit(self) -> None:
        """Of snapshot and steady, from deltas alone."""
        for name in SHAPES:
            assert self.snapshot[name].tobytes() == self.kept.snapshot[name].tobytes()
            assert self.steady[name].tobytes() == self.kept.steady[name].tobytes()

    @invariant()
    def what_is_owed_is_bounded(self) -> None:
        """However many rounds: owed <= lost (pushed + owed), so owed <= lost / (1 - lost) pushed.

        A mean is at most as large as the largest change, and momentum at most 1 / (1 - mu) of that.
        """
        pushed = self.averaging.outer_rate * self.most / (1 - self.averaging.outer_momentum)
        lost = LOST[self.codec] + (2**-8 if self.codec.startswith("int") else 0.0)
        assert largest(self.kept.residual) <= 1.001 * lost / (1 - lost) * pushed + 1e-7
        if CODECS[self.codec].exact:
            assert self.kept.residual is None

    @invariant()
    def nothing_is_lost(self) -> None:
        """Snapshot and residual together are what they would be without any codec."""
        for name in SHAPES:
            owed: Array | float = self.kept.residual[name] if self.kept.residual else 0.0
            found = self.kept.snapshot[name].astype(np.float64) + owed
            # 2^-24 of each value is lost to rounding in each of a dozen steps of a round.
            reach = 1e-6 * (1 + self.rounds) * (10 + float(np.abs(self.exact[name]).max()))
            np.testing.assert_allclose(found, self.exact[name], rtol=0, atol=reach)


TestAnyRounds = AnyRounds.TestCase
TestAnyRounds.settings = hypothesis.settings(max_examples=40, stateful_step_count=15)
