"""What is believed of stages and ways follows what was seen."""

import pytest

from blocktrain.inference.measures import SMALL_BODY, Speed, Ways, trips_ms
from blocktrain.wire.serving import Hop

A, B, C = "a" * 64, "b" * 64, "c" * 64


def hop(stage: str, received: int = 500, onward: float | None = None) -> Hop:
    return Hop(stage, 1.0, 0.0, received, onward)


def test_small_steps_have_one_time_and_large_ones_a_time_per_row() -> None:
    assert not Speed().seen
    speed = Speed()
    for _ in range(40):
        speed.see(1, 0.010)
        speed.see(200, 0.400)
    assert speed.seen
    assert speed.seconds(1) == speed.seconds(8) == pytest.approx(0.010, rel=0.01)
    assert speed.seconds(300) == pytest.approx(0.600, rel=0.01)
    assert speed.seconds(17) == pytest.approx(0.034, rel=0.01)


def test_a_change_is_followed_within_some_steps() -> None:
    speed = Speed()
    speed.see(1, 0.010)
    for _ in range(8):
        speed.see(1, 0.050)
    assert speed.seconds(1) == 0.050


def test_a_first_step_that_takes_long_is_soon_forgotten() -> None:
    speed = Speed()
    speed.see(1, 0.500)
    speed.see(1, 0.010)
    assert speed.seconds(1) == 0.010


def test_of_an_unseen_trip_the_best_is_hoped_and_the_likely_forecast() -> None:
    assert Ways().hope(A, B, (0.02, 0.1)) == 0.04
    assert Ways().forecast(A, B, (0.02, 0.1), 0) == 0.05
    assert Ways().forecast(A, B, (0.02, 0.1), 500_000) == 0.55


def test_trips_and_rates_are_learned_from_what_is_left_of_traversals() -> None:
    ways = Ways()
    for _ in range(40):
        ways.see([hop(A), hop(B), hop(C)], between=0.080)
    assert ways.hope(A, B, (0.0, 0.0)) == pytest.approx(0.040, rel=0.01)
    assert ways.hope(B, C, (0.0, 0.0)) == pytest.approx(0.040, rel=0.01)
    assert ways.way(A, B).rate is None
    large = 10 * SMALL_BODY
    for _ in range(40):
        ways.see([hop(A), hop(B, large), hop(C, large)], between=0.080 + 2 * large / 5e6)
    assert ways.way(A, B).rate == pytest.approx(5e6, rel=0.05)
    assert ways.hope(A, B, (0.0, 0.0)) == pytest.approx(0.040, rel=0.01)
    assert ways.forecast(A, B, (0.0, 0.0), 5_000_000) == pytest.approx(1.04, rel=0.05)


@pytest.mark.parametrize(
    ("onward", "between", "expected"),
    [
        ((10, 200), 105, [5, 100]),
        ((10, 200), 112, [6, 106]),  # what is left goes by bytes, of which C got six times as many
        ((10, 200), 52.5, [2.5, 50]),  # quicker than any ping
        ((10, 200), -1, [0, 0]),
        ((None, 200), 140, [40, 100]),  # the one that was not measured gets the rest
        ((None, None), 140, [70, 70]),
        ((0, 0), 0, [0, 0]),
    ],
)
def test_what_is_left_of_a_traversal_is_shared_out_by_measured_lines(
    onward: tuple[float | None, float | None], between: float, expected: list[float]
) -> None:
    hops = [hop(A, 300, onward[0]), hop(B, 100, onward[1]), hop(C, 600)]
    assert trips_ms(hops, between) == pytest.approx(expected)
    ways = Ways()
    for _ in range(2):  # of which the first opens a link
        ways.see(hops, between / 1000)
    latencies = [ways.way(A, B).latency, ways.way(B, C).latency]
    assert latencies == pytest.approx([each / 1000 for each in expected])
    assert ways.onward(A) == ({} if onward[0] is None else {B: onward[0]})


def test_a_single_stage_has_no_trips_and_a_gone_stage_no_past() -> None:
    ways = Ways()
    ways.see([hop(A)], between=0.5)
    ways.see([hop(A), hop(B)], between=0.5)  # this one opens a link
    assert ways.hope(A, B, (1.0, 3.0)) == 1.0
    ways.see([hop(A), hop(B)], between=-0.001)  # clocks are not perfect
    assert ways.hope(A, B, (1.0, 3.0)) == 0.0
    ways.forget(B)
    assert ways.hope(A, B, (1.0, 3.0)) == 1.0
