"""Who is there: announcements end, and there is a bound."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import BadInput
from blocktrain.terms import Digest
from blocktrain.wire.registry import LEASE, Registry
from blocktrain.wire.serving import Announce, Holding, Place

MODEL = Digest("0f" * 32)


def announce(stage: int, first: int = 0, port: int = 4000, leaving: bool = False) -> Announce:
    place = Place(f"{stage:064x}", "stage.example", port)
    return Announce(place, Holding(MODEL, first, first, "fp32", "cpu"), 0, 8, leaving)


def test_a_stage_is_there_for_its_lease() -> None:
    registry = Registry()
    registry.hear(announce(1), now=100.0)
    assert registry.present(100.0 + LEASE - 0.1) == [announce(1)]
    assert registry.present(100.0 + LEASE) == []


def test_saying_it_again_prolongs_and_replaces() -> None:
    registry = Registry()
    registry.hear(announce(1, port=4000), now=100.0)
    registry.hear(announce(1, port=5000), now=104.0)
    assert registry.present(108.0) == [announce(1, port=5000)]


def test_a_leaving_stage_is_gone_at_once_and_others_are_not() -> None:
    registry = Registry()
    registry.hear(announce(1), now=100.0)
    registry.hear(announce(2), now=100.0)
    registry.hear(announce(1, leaving=True), now=100.5)
    registry.hear(announce(3, leaving=True), now=100.5)  # never was there
    assert registry.present(101.0) == [announce(2)]


def test_there_is_a_bound_that_ghosts_do_not_fill(
    sentence: Callable[[BaseException], str],
) -> None:
    registry = Registry(most=2)
    registry.hear(announce(1), now=100.0)
    registry.hear(announce(2), now=103.0)
    with pytest.raises(BadInput) as refused:
        registry.hear(announce(3), now=104.0)
    assert "2 stages" in sentence(refused.value)
    registry.hear(announce(2, port=5000), now=104.0)  # known already
    registry.hear(announce(3), now=100.0 + LEASE)  # the first one is gone
    assert registry.present(106.0) == [announce(2, port=5000), announce(3)]


def test_stages_come_in_the_order_of_their_blocks() -> None:
    registry = Registry()
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
    registry, now, last = Registry(most=4), 0.0, dict[int, float]()
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
            assert len(last) == 4
        if look:
            assert {int(s.place.stage, 16) for s in registry.present(now)} == set(last)
