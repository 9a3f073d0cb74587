"""Which stages a text goes through: a pure choice."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import Unreachable
from blocktrain.inference.routes import Candidate, best
from blocktrain.terms import Digest
from blocktrain.wire.serving import Holding, Place

MODEL = Digest("0f" * 32)


def stage(number: int, first: int, last: int, rtt: float = 0.01, **told: object) -> Candidate:
    place = Place(f"{number:064x}", "stage.example", 4000)
    made = Candidate(place, Holding(MODEL, first, last, "fp32", "cpu"), rtt, seconds=0.01)
    return replace(made, **told)  # type: ignore[arg-type]


def trip(source: Candidate, target: Candidate) -> float:
    """As if every stage were as far from the others as from the gateway."""
    return max(source.rtt, target.rtt) / 2


def numbers(route: list[Candidate]) -> list[int]:
    return [int(candidate.id, 16) for candidate in route]


def seconds(route: tuple[Candidate, ...]) -> float:
    """The forecast, spelled out."""
    ways = sum(trip(a, b) for a, b in itertools.pairwise(route))
    return route[0].rtt / 2 + sum(c.cost for c in route) + ways + route[-1].rtt / 2


def test_a_route_covers_every_block_once_and_in_order() -> None:
    stages = [stage(1, 2, 3), stage(2, 0, 0), stage(3, 1, 1), stage(4, 1, 2)]
    assert numbers(best(stages, 4, trip)) == [2, 3, 1]


def test_checkpoints_never_mix() -> None:
    """Though every block is served, by stages that would fit together."""
    other = Holding(Digest("e0" * 32), 1, 1, "fp32", "cpu")
    stages = [stage(1, 0, 0), replace(stage(2, 1, 1), holding=other)]
    with pytest.raises(Unreachable, match="No stage serves block 2"):
        best(stages, 2, trip)
    assert numbers(best([*stages, stage(3, 1, 1, rtt=0.9)], 2, trip)) == [1, 3]


def test_fewer_stages_are_quicker() -> None:
    stages = [stage(1, 0, 0), stage(2, 1, 1), stage(3, 2, 2), stage(4, 0, 2)]
    assert numbers(best(stages, 3, trip)) == [4]


def test_the_near_replica_is_taken_until_it_has_much_to_do() -> None:
    near, far = stage(1, 0, 0, rtt=0.01), stage(2, 0, 0, rtt=0.1)
    assert numbers(best([far, near], 1, trip)) == [1]
    assert numbers(best([far, replace(near, load=8)], 1, trip)) == [1]
    assert numbers(best([far, replace(near, load=10)], 1, trip)) == [2]


def test_a_little_nearer_or_quicker_is_no_reason_to_crowd() -> None:
    one, other = stage(1, 0, 0, rtt=0.001, seconds=1e-4), stage(2, 0, 0, rtt=0.004, seconds=2e-4)
    assert numbers(best([one, other], 1, trip)) == [1]
    assert numbers(best([replace(one, load=1), other], 1, trip)) == [2]


def test_equal_replicas_share_texts_evenly() -> None:
    stages = {n: stage(n, n // 3, n // 3) for n in range(6)}
    for _ in range(12):
        for candidate in best(stages.values(), 2, trip):
            number = int(candidate.id, 16)
            stages[number] = replace(candidate, load=candidate.load + 1)
    assert [stages[n].load for n in range(6)] == [4] * 6


def test_who_is_avoided_is_used_only_when_nobody_else_can() -> None:
    good, bad = stage(1, 0, 0, rtt=0.5), stage(2, 0, 0, avoided=True)
    assert numbers(best([good, bad], 1, trip)) == [1]
    assert numbers(best([bad], 1, trip)) == [2]


def test_what_lies_between_stages_counts() -> None:
    """Two stages near to the gateway may be far from each other."""
    stages = [stage(1, 0, 0), stage(2, 1, 1, rtt=0.01), stage(3, 1, 1, rtt=0.02)]

    def known(source: Candidate, target: Candidate) -> float:
        return 0.2 if int(target.id, 16) == 2 else 0.01

    assert numbers(best(stages, 2, known)) == [1, 3]


def test_a_text_that_began_stays_with_equal_holdings() -> None:
    first, second = stage(1, 0, 0), stage(2, 1, 1)
    pinned = [first.holding, second.holding]
    whole = stage(3, 0, 1, rtt=0.001)
    rounded = stage(4, 1, 1, rtt=0.001, holding=Holding(MODEL, 1, 1, "int8", "cpu"))
    elsewhere = stage(5, 1, 1, rtt=0.001, holding=Holding(MODEL, 1, 1, "fp32", "cuda"))
    replica = stage(6, 1, 1, rtt=0.5)
    everybody = [first, whole, rounded, elsewhere, replica]
    assert numbers(best(everybody, 2, trip)) == [3]
    assert numbers(best(everybody, 2, trip, pinned)) == [1, 6]


@pytest.mark.parametrize(
    ("spans", "missing"),
    [
        ([], "blocks 1 to 4"),
        ([(0, 1)], "blocks 3 to 4"),
        ([(2, 3)], "blocks 1 to 2"),
        ([(0, 0), (2, 3)], "block 2"),
        ([(0, 0), (3, 3)], "blocks 2 to 3"),
        ([(0, 2), (2, 3)], "block 4"),  # they overlap: a stage computes all that it holds
        ([(0, 0), (1, 2)], "block 4"),
    ],
)
def test_what_is_missing_is_named_with_what_to_start(
    spans: list[tuple[int, int]], missing: str, sentence: Callable[[BaseException], str]
) -> None:
    with pytest.raises(Unreachable) as error:
        best([stage(n, *span) for n, span in enumerate(spans)], 4, trip)
    told = sentence(error.value)
    assert f"No stage serves {missing};" in told
    assert "blocktrain stage MODEL --blocks" in told


def test_what_is_missing_for_a_text_that_began_is_named(
    sentence: Callable[[BaseException], str],
) -> None:
    first, second = stage(1, 0, 0), stage(2, 1, 2)
    with pytest.raises(Unreachable) as error:
        best([first, stage(3, 0, 2)], 3, trip, [first.holding, second.holding])
    told = sentence(error.value)
    assert "No replica serves blocks 2 to 3" in told
    assert "fp32 on cpu" in told
    assert "--blocks 2-3" in told


spans = st.tuples(st.integers(0, 3), st.integers(0, 2)).map(lambda s: (s[0], min(3, s[0] + s[1])))


@given(
    st.lists(
        st.tuples(spans, st.sampled_from([0.01, 0.03, 0.2]), st.integers(0, 5), st.booleans()),
        max_size=7,
    )
)
def test_no_other_route_is_quicker(told: list[tuple[tuple[int, int], float, int, bool]]) -> None:
    """Against all routes that there are."""
    stages = [
        stage(number, *span, rtt=rtt, load=load, avoided=avoided)
        for number, (span, rtt, load, avoided) in enumerate(told)
    ]
    every = [
        route
        for count in range(1, 5)
        for route in itertools.permutations(stages, count)
        if route[0].holding.first == 0
        and route[-1].holding.last == 3
        and all(a.holding.last + 1 == b.holding.first for a, b in itertools.pairwise(route))
    ]
    if not every:
        with pytest.raises(Unreachable):
            best(stages, 4, trip)
        return
    found = tuple(best(stages, 4, trip))
    assert found in every
    assert seconds(found) <= min(seconds(route) for route in every) + 1e-9
