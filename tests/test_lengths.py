"""Lengths of rounds: sums that fit, growth that is slow enough, an end."""

from hypothesis import given
from hypothesis import strategies as st

from blocktrain.lengths import GROWTH, Lengths

lengths = st.builds(Lengths, full=st.integers(1, 200), first=st.integers(0, 200))


@given(lengths, st.integers(1, 300))
def test_rounds_begin_where_the_ones_before_ended(steps: Lengths, round_: int) -> None:
    assert steps.before(round_) == sum(steps.of(each) for each in range(1, round_))


@given(lengths, st.integers(1, 300))
def test_rounds_grow_to_their_full_length_and_never_fast(steps: Lengths, round_: int) -> None:
    shortest = min(steps.first or steps.full, steps.full)
    assert 1 <= steps.of(round_) <= steps.full
    assert steps.of(round_) >= shortest or round_ == 1  # the first one takes what is left over
    assert steps.of(round_) <= max(shortest, steps.before(round_) // GROWTH)
    assert steps.of(round_) <= steps.of(round_ + 1)


@given(lengths)
def test_growth_ends_where_rounds_of_the_full_length_would_be(steps: Lengths) -> None:
    assert steps.of(10**6) == steps.full
    assert steps.before(10**6) % steps.full == 0


@given(lengths, st.integers(1, 20_000))
def test_the_fewest_rounds_that_have_so_many_steps(steps: Lengths, wanted: int) -> None:
    rounds = steps.rounds(wanted)
    assert steps.before(rounds + 1) >= wanted
    assert rounds == 1 or steps.before(rounds) < wanted
