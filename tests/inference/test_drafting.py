"""How far ahead to guess, and what to guess from the text so far."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.inference.drafting import Lookup, Pace, best_draft
from blocktrain.inference.session import Said
from blocktrain.wire.serving import Hop


@given(st.floats(0, 1), st.floats(1e-4, 1), st.floats(0, 0.1), st.integers(0, 64))
def test_no_other_length_brings_more(
    acceptance: float, traversal_s: float, draft_s: float, longest: int
) -> None:
    def rate(count: int) -> float:
        return sum(acceptance**n for n in range(count + 1)) / (traversal_s + count * draft_s)

    best = best_draft(acceptance, traversal_s, draft_s, longest)
    assert 0 <= best <= longest
    assert rate(best) >= max(rate(count) for count in range(longest + 1)) * (1 - 1e-9)


def test_lengths_follow_acceptance_and_link() -> None:
    assert best_draft(0, 0.1, 0.001, 64) == 0
    assert best_draft(1, 0.1, 0.001, 64) == 64
    assert best_draft(0.6, 0.1, 0.2, 64) == 0  # a draft as dear as two traversals
    short, long = best_draft(0.7, 0.01, 0.001, 64), best_draft(0.7, 0.2, 0.001, 64)
    assert 0 < short < long < 64
    assert best_draft(0.9, 0.1, 0.001, 64) > best_draft(0.6, 0.1, 0.001, 64)


def said(seconds: float, first_ms: float, replayed: int = 0, waited_ms: float = 0) -> Said:
    hops = [Hop("0" * 64, first_ms, waited_ms, 0), Hop("1" * 64, 5.0, 0, 0)]
    return Said([], [], [], hops=hops, seconds=seconds, replayed=replayed)


def test_the_pace_finds_what_guesses_cost_and_are_worth() -> None:
    pace = Pace()
    for _ in range(60):  # four guesses, three right; 2 ms each, and 50 ms around them
        pace.learn(said(0.060, 10.0), tokens=5, guessed=4, right=3)
    assert pace.right / pace.tried == pytest.approx(0.75, abs=0.01)
    assert pace.draft_s == pytest.approx(0.002, rel=0.01)
    assert pace.traversal_s == pytest.approx(0.052, rel=0.01)
    assert pace.length(64) == best_draft(0.75, 0.052, 0.002, 64)
    for _ in range(100):  # now nothing is right
        pace.learn(said(0.060, 10.0), tokens=5, guessed=4, right=0)
    assert pace.length(64) == 0


def test_busy_stages_are_not_given_longer_drafts() -> None:
    """Computing takes 15 ms and the way 45 ms, however long the queue makes it all."""
    alone, beside_one, in_a_crowd = Pace(), Pace(), Pace()
    for _ in range(60):
        alone.learn(said(0.060, 10.0), tokens=5, guessed=4, right=3)
        beside_one.learn(said(0.090, 10.0, waited_ms=30.0), tokens=5, guessed=4, right=3)
        in_a_crowd.learn(said(1.060, 10.0, waited_ms=1000.0), tokens=5, guessed=4, right=3)
    assert alone.length(64) > beside_one.length(64) > in_a_crowd.length(64) > 0
    assert in_a_crowd.traversal_s == pytest.approx(0.007, abs=0.001)


def test_long_contexts_and_replays_do_not_blur_times() -> None:
    pace = Pace()
    pace.learn(said(0.060, 10.0), 5, 4, 4)
    before = (pace.draft_s, pace.traversal_s)
    pace.learn(said(3.0, 900.0), tokens=200, guessed=4, right=4)
    pace.learn(said(3.0, 900.0, replayed=1), tokens=5, guessed=4, right=4)
    assert (pace.draft_s, pace.traversal_s) == before
    assert pace.right > 11


def test_guessing_nothing_teaches_nothing_about_guesses() -> None:
    pace = Pace()
    share = pace.right / pace.tried
    pace.learn(said(0.060, 10.0), tokens=1, guessed=0, right=0)
    assert pace.right / pace.tried == pytest.approx(share)
    assert pace.length(0) == 0


def test_it_goes_on_as_it_did_before() -> None:
    lookup = Lookup(b"the cat sat. the c")
    assert bytes(lookup.guess(8)) == b"at sat. "
    assert bytes(lookup.guess(0)) == b""
    lookup.add(b"ow ran. the c")
    assert bytes(lookup.guess(6)) == b"ow ran"  # the latest match of the same length


def test_the_longest_match_counts_before_the_latest() -> None:
    lookup = Lookup(b"xabcdP abcdQ xabcd")
    assert bytes(lookup.guess(1)) == b"P"


def test_nothing_known_gives_no_guess_and_one_byte_repeats() -> None:
    assert Lookup(b"").guess(5) == []
    assert Lookup(b"abc").guess(5) == []
    assert bytes(Lookup(b"aa").guess(5)) == b"aaaaa"
