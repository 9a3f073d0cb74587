"""Updates -> one new snapshot: means, momentum, steady blends, and refusals."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from blocktrain.aggregation.combine import Averaging, Standing, blend, combine, refusal
from blocktrain.errors import BadConfig
from blocktrain.terms import Array, Parameters

PLAIN = Averaging(steady=0.0)

numbers = st.floats(-100, 100, width=32)
arrays_23 = arrays.arrays(np.float32, (2, 3), elements=numbers)
tensors = st.fixed_dictionaries(
    {"a": arrays_23, "b": arrays.arrays(np.float32, 4, elements=numbers)}
)
updates_of = st.lists(st.tuples(tensors, st.integers(1, 10**9)), min_size=1, max_size=5)


def array(*values: float) -> Array:
    return np.array(values, dtype=np.float32)


def mean_by_hand(name: str, updates: list[tuple[Parameters, int]]) -> np.ndarray:
    total = sum(trained for _, trained in updates)
    shares = [change[name].astype(np.float64) * trained / total for change, trained in updates]
    result: np.ndarray = np.sum(shares, axis=0)
    return result


def close(found: Array, expected: np.ndarray) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-3)


# --- the mean -----------------------------------------------------------------------------------


def test_updates_count_by_the_bytes_they_were_trained_on() -> None:
    before = Standing({"w": array(1, 1)}, {"w": array(1, 1)})
    after = combine(before, [({"w": array(4, 0)}, 300), ({"w": array(0, 8)}, 100)], PLAIN)
    assert after.snapshot["w"].tolist() == [4, 3]


@given(tensors, updates_of)
def test_the_new_snapshot_is_the_old_one_and_the_mean_change(
    snapshot: Parameters, updates: list[tuple[Parameters, int]]
) -> None:
    after = combine(Standing(snapshot, snapshot), updates, PLAIN)
    assert after.snapshot.keys() == snapshot.keys()
    assert after.momentum is None
    for name, base in snapshot.items():
        close(after.snapshot[name], base + mean_by_hand(name, updates))


@given(tensors, tensors, st.integers(1, 10**9))
def test_one_update_is_applied_as_it_is(base: Parameters, change: Parameters, trained: int) -> None:
    after = combine(Standing(base, base), [(change, trained)], PLAIN)
    for name in base:
        assert np.array_equal(after.snapshot[name], base[name] + change[name])


@given(tensors, updates_of)
def test_nothing_given_is_modified_and_the_same_order_gives_the_same_bits(
    snapshot: Parameters, updates: list[tuple[Parameters, int]]
) -> None:
    everything = [snapshot, *(change for change, _ in updates)]
    before = [{name: value.copy() for name, value in each.items()} for each in everything]
    averaging = Averaging(steady=0.5, outer_momentum=0.9)
    momentum = {name: np.ones_like(value) for name, value in snapshot.items()}
    standing = Standing(snapshot, snapshot, momentum)
    one, again = combine(standing, updates, averaging), combine(standing, updates, averaging)
    for name in snapshot:
        assert np.array_equal(one.snapshot[name], again.snapshot[name])
        assert np.array_equal(one.steady[name], again.steady[name])
        assert np.array_equal(momentum[name], np.ones_like(momentum[name]))
    for each, copy in zip(everything, before, strict=True):
        assert all(np.array_equal(each[name], copy[name]) for name in copy)


def test_the_order_is_that_of_slots() -> None:
    """Float sums depend on order, so it must be the one given: here ((big + small) - big)."""
    base = {"w": array(0)}
    updates = [({"w": array(value)}, 1) for value in (3e8, 3, -3e8)]
    third = np.float32(1 / 3)
    expected = np.float32(0)
    for value in (3e8, 3, -3e8):
        expected = expected + np.float32(value) * third
    found = combine(Standing(base, base), updates, PLAIN).snapshot["w"][0]
    assert found == expected
    swapped = [updates[0], updates[2], updates[1]]
    assert combine(Standing(base, base), swapped, PLAIN).snapshot["w"][0] != expected


@pytest.mark.parametrize("updates", [[], [({"w": array(5)}, 0)]], ids=["none", "of no bytes"])
def test_when_nobody_trained_nothing_changes(updates: list[tuple[Parameters, int]]) -> None:
    base = {"w": array(2)}
    after = combine(Standing(base, base), updates, Averaging())
    assert after.snapshot["w"].tolist() == after.steady["w"].tolist() == [2]


# --- settings -----------------------------------------------------------------------------------


@given(tensors, st.lists(updates_of, min_size=1, max_size=4), st.sampled_from([0.5, 0.7, 1.3]))
def test_outer_nesterov_against_its_formula(
    snapshot: Parameters, rounds: list[list[tuple[Parameters, int]]], rate: float
) -> None:
    """v <- mu v + g;  x <- x + rate (g + mu v), as in DiLoCo."""
    averaging = Averaging(steady=0.0, outer_rate=rate, outer_momentum=0.9)
    standing = Standing(snapshot, snapshot)
    x = {name: value.astype(np.float64) for name, value in snapshot.items()}
    v = {name: np.zeros_like(value) for name, value in x.items()}
    for updates in rounds:
        standing = combine(standing, updates, averaging)
        for name in x:
            g = mean_by_hand(name, updates)
            v[name] = 0.9 * v[name] + g
            x[name] = x[name] + rate * (g + 0.9 * v[name])
    for name in x:
        close(standing.snapshot[name], x[name])
        assert standing.momentum is not None
        close(standing.momentum[name], v[name])


def test_the_outer_rate_is_turned() -> None:
    base, change = {"w": array(1)}, [({"w": array(4)}, 10)]
    for rate, expected in ((0.5, 3.0), (1.0, 5.0), (2.0, 9.0)):
        after = combine(Standing(base, base), change, Averaging(steady=0.0, outer_rate=rate))
        assert after.snapshot["w"].tolist() == [expected]


@given(tensors, tensors, tensors, st.sampled_from([0.0, 0.3, 0.7, 0.99]))
def test_steady_keeps_its_part(
    snapshot: Parameters, steady: Parameters, change: Parameters, keep: float
) -> None:
    after = combine(Standing(snapshot, steady), [(change, 1)], Averaging(steady=keep))
    for name in snapshot:
        new = snapshot[name].astype(np.float64) + change[name]
        close(after.snapshot[name], new)
        close(after.steady[name], keep * steady[name].astype(np.float64) + (1 - keep) * new)


def test_steady_comes_to_rest_where_snapshots_do() -> None:
    standing = Standing({"w": array(8)}, {"w": array(0)})
    for _ in range(60):
        standing = combine(standing, [({"w": array(0)}, 1)], Averaging(steady=0.7))
    np.testing.assert_allclose(standing.steady["w"], [8], rtol=1e-5)


def test_blend() -> None:
    found = blend(array(10, 0), array(0, 10), 0.7)
    np.testing.assert_allclose(found, [7, 3], rtol=1e-6)
    assert found.dtype == np.float32


@pytest.mark.parametrize(
    "wrong",
    [
        {"steady": 1.0},
        {"steady": -0.1},
        {"outer_momentum": 1.0},
        {"outer_rate": 0.0},
        {"outer_rate": 2.1},
        {"outer_rate": float("nan")},
        {"steady": float("nan")},
    ],
    ids=str,
)
def test_averaging_that_cannot_be(
    wrong: dict[str, float], sentence: Callable[[BaseException], str]
) -> None:
    with pytest.raises(BadConfig) as caught:
        Averaging(**wrong)
    assert next(iter(wrong)) in sentence(caught.value)


# --- refusals -----------------------------------------------------------------------------------

LIKE = {"a": np.zeros((2, 3), np.float32), "b": array(0, 0)}


def change_with(**parts: Array) -> Parameters:
    return {"a": np.ones((2, 3), np.float32), "b": array(1, 1), **parts}


def test_a_good_change_is_not_refused() -> None:
    assert refusal(change_with(), LIKE, largest_norm=3.0) is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"a": np.ones((2, 3), np.float32)}, "'b'"),
        (change_with(c=array(1)), "'c'"),
        ({}, "'a'"),
        (change_with(a=np.ones((3, 2), np.float32)), "'a' has shape (3, 2), not (2, 3)"),
        (change_with(b=array(1)), "'b' has shape"),
        (change_with(b=array(1, float("nan"))), "'b' holds a number that is not finite"),
        (change_with(b=array(float("-inf"), 1)), "'b' holds a number that is not finite"),
        (change_with(b=array(3, 0)), "its norm 3.87 is beyond 3"),
        (change_with(b=array(3e38, 3e38)), "beyond 3"),  # its square is beyond float32
    ],
)
def test_a_change_is_refused_for_a_reason(change: Parameters, told: str) -> None:
    reason = refusal(change, LIKE, largest_norm=3.0)
    assert reason is not None
    assert told in reason


@given(tensors, st.floats(0.1, 1000))
def test_the_norm_is_of_all_tensors_together(change: Parameters, limit: float) -> None:
    squares = sum(float((value.astype(np.float64) ** 2).sum()) for value in change.values())
    norm = squares**0.5
    refused = refusal(change, change, limit) is not None
    if abs(norm - limit) > 1e-3 * limit:
        assert refused == (norm > limit)
