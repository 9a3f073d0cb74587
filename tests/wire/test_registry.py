"""Who is there: announcements end, and there is a bound."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from blocktrain.errors import BadInput
from blocktrain.terms import Digest
from blocktrain.wire.registry import LEASE, Registry
from blocktrain.wire.serving import Announce, Heard, Holding, Place

MODEL = Digest("0f" * 32)


def announce(stage: int, first: int = 0, port: int = 4000, leaving: bool = False) -> Announce:
    place = Place(f"{stage:064x}", "stage.example", port)
    return Announce(place, Holding(MODEL, first, first, "fp32", "cpu"), 0, 8, leaving)


class Spoken(Registry):
    """To which everybody says the right word."""

    def hear(self, said: Announce, now: float, of: str = "") -> Heard:
        heard = super().hear(said, now, of)
        assert not heard.taken
        heard = super().hear(replace(said, word=heard.word), now, of)
        assert heard.taken
        return heard


def test_a_stage_is_there_for_its_lease() -> None:
    registry = Spoken()
    registry.hear(announce(1), now=100.0)
    assert registry.present(100.0 + LEASE - 0.1) == [announce(1)]
    assert registry.present(100.0 + LEASE) == []


def test_saying_it_again_prolongs_and_replaces() -> None:
    registry = Spoken()
    registry.hear(announce(1, port=4000), now=100.0)
    registry.hear(announce(1, port=5000), now=104.0)
    assert registry.present(108.0) == [announce(1, port=5000)]


def test_a_leaving_stage_is_gone_at_once_and_others_are_not() -> None:
    registry = Spoken()
    registry.hear(announce(1), now=100.0)
    registry.hear(announce(2), now=100.0)
    registry.hear(announce(1, leaving=True), now=100.5)
    registry.hear(announce(3, leaving=True), now=100.5)  # never was there
    assert registry.present(101.0) == [announce(2)]


def test_there_is_a_bound_that_ghosts_do_not_fill(
    sentence: Callable[[BaseException], str],
) -> None:
    registry = Spoken(most=2)
    registry.hear(announce(1), now=100.0)
    registry.hear(announce(2), now=103.0)
    with pytest.raises(BadInput) as refused:
        registry.hear(announce(3), now=104.0)
    assert "2 stages" in sentence(refused.value)
    registry.hear(announce(2, port=5000), now=104.0)  # known already
    registry.hear(announce(2, port=5000), now=109.0)
    registry.hear(announce(3), now=100.0 + 2 * LEASE)  # the first one is gone and forgotten
    assert registry.present(111.0) == [announce(2, port=5000), announce(3)]


def test_nobody_has_more_than_a_share_of_the_list(sentence: Callable[[BaseException], str]) -> None:
    registry = Spoken(most=10, most_of_one=2)
    for stage in (1, 2):
        registry.hear(announce(stage), 100.0, of="ann")
    for leaving in (False, True):
        with pytest.raises(BadInput) as refused:
            registry.hear(announce(3, leaving=leaving), 100.0, of="ann")
        assert "2 stages of this token" in sentence(refused.value)
    registry.hear(announce(2, port=5000), 101.0, of="ann")  # known already
    registry.hear(announce(3), 101.0, of="bob")
    registry.hear(announce(1, leaving=True), 101.0, of="ann")
    with pytest.raises(BadInput):  # coming and going makes no room at once
        registry.hear(announce(4), 102.0, of="ann")
    registry.hear(announce(4), 100.0 + 2 * LEASE, of="ann")


# Announcements that were overheard, and are said again.


def test_a_word_is_good_once() -> None:
    registry = Registry()
    without = registry.hear(announce(1), 100.0)
    assert not without.taken
    assert registry.present(100.0) == []
    first = replace(announce(1), word=without.word)
    heard = registry.hear(first, 100.0)
    assert heard.taken
    again = registry.hear(first, 100.1)
    assert (again.taken, again.word) == (False, heard.word)
    moved = replace(announce(1, port=5000), word=heard.word)
    assert registry.hear(moved, 101.0).taken
    for old in (first, moved):
        assert not registry.hear(old, 102.0).taken
    assert registry.present(102.0) == [announce(1, port=5000)]
    assert registry.present(101.0 + LEASE) == []  # nor do they keep a ghost alive


@pytest.mark.parametrize("leaves", [False, True])
def test_a_ghost_is_not_revived(leaves: bool) -> None:
    """Whatever a stage has said, and whatever it would have said next, at any later time."""
    registry, heard = Registry(), list[Announce]()
    word = None
    for tenth in range(40):
        leaving = leaves and tenth == 39
        said = replace(announce(1, leaving=leaving), word=word)
        heard.append(said)
        word = registry.hear(said, 100.0 + tenth / 10).word
    last = 100.0 + 3.9
    for tenth in range(300):
        now = last + tenth / 10
        assert not any(registry.hear(said, now).taken for said in heard), now
    assert registry.present(last + LEASE) == []


def test_words_are_of_one_stage_and_one_registry() -> None:
    registry, other = Registry(), Registry()
    word = registry.hear(announce(1), 100.0).word
    assert not other.hear(replace(announce(1), word=word), 100.0).taken
    assert not registry.hear(replace(announce(2), word=word), 100.0).taken
    assert registry.hear(replace(announce(1), word=word), 100.0 + LEASE - 0.1).taken


def test_a_word_is_old_after_two_leases() -> None:
    registry = Registry()
    word = registry.hear(announce(1), 100.0).word
    assert not registry.hear(replace(announce(1), word=word), 100.0 + 2 * LEASE).taken


def test_stages_come_in_the_order_of_their_blocks() -> None:
    registry = Spoken()
    for stage, first in ((4, 2), (3, 0), (2, 1), (1, 2)):
        registry.hear(announce(stage, first), now=100.0)
    found = [(said.holding.first, said.place.stage[-1]) for said in registry.present(100.0)]
    assert found == [(0, "3"), (1, "2"), (2, "1"), (2, "4")]


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.floats(0, 3), st.booleans(), st.booleans()), max_size=40
    )
)
def test_whatever_is_said_only_the_fresh_are_there(
    said: list[tuple[int, float, bool, bool]],
) -> None:
    registry, now, last, refused = Spoken(most=4), 0.0, dict[int, float](), 0
    for stage, pause, leaving, look in said:
        now += pause
        last = {known: at for known, at in last.items() if now - at < LEASE}
        try:
            registry.hear(announce(stage, leaving=leaving), now)
            last[stage] = now
            if leaving:
                del last[stage]
        except BadInput:
            assert stage not in last
            refused += 1
        if look:
            assert {int(s.place.stage, 16) for s in registry.present(now)} == set(last)
        assert len(last) <= 4
    assert not refused or len({stage for stage, *_ in said}) > 4
