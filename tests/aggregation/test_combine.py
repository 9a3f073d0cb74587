"""Updates -> one new snapshot: means, momentum, steady blends, and refusals."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from blocktrain.aggregation.combine import (
    LARGEST_CHANGE,
    TOGETHER,
    Averaging,
    Kept,
    Next,
    Part,
    Standing,
    combine,
    combined,
    follow,
    norm,
    refusal,
)
from blocktrain.errors import BadConfig, BadTensors
from blocktrain.terms import Array, Parameters
from blocktrain.wire.codecs import AT_ONCE, CODECS
from blocktrain.wire.tensors import Body, Writer, encode, order, shapes_of

PLAIN = Averaging(steady=0.0)
BLOCKWISE = ("int8", "int4", "int2")

numbers = st.floats(-100, 100, width=32)
arrays_23 = arrays.arrays(np.float32, (2, 3), elements=numbers)
tensors = st.fixed_dictionaries(
    {"a": arrays_23, "b": arrays.arrays(np.float32, 4, elements=numbers)}
)
Updates = list[tuple[Parameters, int]]
updates_of = st.lists(st.tuples(tensors, st.integers(1, 10**9)), min_size=1, max_size=5)


def array(*values: float) -> Array:
    return np.array(values, dtype=np.float32)


def parts_of(updates: Updates, factor: float = 1.0) -> list[Part]:
    return [Part(change.__getitem__, trained, factor) for change, trained in updates]


def mean_by_hand(name: str, updates: Updates) -> np.ndarray:
    total = sum(trained for _, trained in updates)
    shares = [change[name].astype(np.float64) * trained / total for change, trained in updates]
    result: np.ndarray = np.sum(shares, axis=0)
    return result


def close(found: Array, expected: np.ndarray) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-3)


# --- the mean -----------------------------------------------------------------------------------


def test_updates_count_by_the_bytes_they_were_trained_on() -> None:
    before = Kept({"w": array(1, 1)}, {"w": array(1, 1)})
    after = combine(before, parts_of([({"w": array(4, 0)}, 300), ({"w": array(0, 8)}, 100)]), PLAIN)
    assert after.snapshot["w"].tolist() == [4, 3]


@given(tensors, updates_of)
def test_the_new_snapshot_is_the_old_one_and_the_mean_change(
    snapshot: Parameters, updates: Updates
) -> None:
    after = combine(Kept(snapshot, snapshot), parts_of(updates), PLAIN)
    assert after.snapshot.keys() == snapshot.keys()
    assert after.momentum is None
    for name, base in snapshot.items():
        close(after.snapshot[name], base + mean_by_hand(name, updates))


@given(tensors, tensors, st.integers(1, 10**9))
def test_one_update_is_applied_as_it_is(base: Parameters, change: Parameters, trained: int) -> None:
    after = combine(Kept(base, base), parts_of([(change, trained)]), PLAIN)
    for name in base:
        assert np.array_equal(after.snapshot[name], base[name] + change[name])


@given(tensors, updates_of)
def test_nothing_given_is_modified_and_the_same_order_gives_the_same_bits(
    snapshot: Parameters, updates: Updates
) -> None:
    everything = [snapshot, *(change for change, _ in updates)]
    before = [{name: value.copy() for name, value in each.items()} for each in everything]
    averaging = Averaging(steady=0.5, outer_momentum=0.9)
    momentum = {name: np.ones_like(value) for name, value in snapshot.items()}
    standing = Kept(snapshot, snapshot, momentum)
    one, again = (
        combine(standing, parts_of(updates), averaging),
        combine(standing, parts_of(updates), averaging),
    )
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
    found = combine(Kept(base, base), parts_of(updates), PLAIN).snapshot["w"][0]
    assert found == expected
    swapped = [updates[0], updates[2], updates[1]]
    assert combine(Kept(base, base), parts_of(swapped), PLAIN).snapshot["w"][0] != expected


@pytest.mark.parametrize("updates", [[], [({"w": array(5)}, 0)]], ids=["none", "of no bytes"])
def test_when_nobody_trained_nothing_changes(updates: Updates) -> None:
    base = {"w": array(2)}
    after = combine(Kept(base, base), parts_of(updates), Averaging())
    assert after.snapshot["w"].tolist() == after.steady["w"].tolist() == [2]


# --- settings -----------------------------------------------------------------------------------


@given(tensors, st.lists(updates_of, min_size=1, max_size=4), st.sampled_from([0.5, 0.7, 1.3]))
def test_outer_nesterov_against_its_formula(
    snapshot: Parameters, rounds: list[Updates], rate: float
) -> None:
    """v <- mu v + g;  x <- x + rate (g + mu v), as in DiLoCo."""
    averaging = Averaging(steady=0.0, outer_rate=rate, outer_momentum=0.9)
    standing = Kept(snapshot, snapshot)
    x = {name: value.astype(np.float64) for name, value in snapshot.items()}
    v = {name: np.zeros_like(value) for name, value in x.items()}
    for updates in rounds:
        standing = combine(standing, parts_of(updates), averaging)
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
        after = combine(Kept(base, base), parts_of(change), Averaging(steady=0.0, outer_rate=rate))
        assert after.snapshot["w"].tolist() == [expected]


@given(tensors, tensors, tensors, st.sampled_from([0.0, 0.3, 0.7, 0.99]))
def test_steady_keeps_its_part(
    snapshot: Parameters, steady: Parameters, change: Parameters, keep: float
) -> None:
    after = combine(Kept(snapshot, steady), parts_of([(change, 1)]), Averaging(steady=keep))
    for name in snapshot:
        new = snapshot[name].astype(np.float64) + change[name]
        close(after.snapshot[name], new)
        close(after.steady[name], keep * steady[name].astype(np.float64) + (1 - keep) * new)


def test_steady_comes_to_rest_where_snapshots_do() -> None:
    standing = Kept({"w": array(8)}, {"w": array(0)})
    for _ in range(60):
        standing = combine(standing, parts_of([({"w": array(0)}, 1)]), Averaging(steady=0.7))
    np.testing.assert_allclose(standing.steady["w"], [8], rtol=1e-5)


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


# --- factors ------------------------------------------------------------------------------------


def test_a_lone_salvaged_update_does_not_count_in_full() -> None:
    before = Kept({"w": array(1, 1)}, {"w": array(1, 1)})
    after = combine(before, parts_of([({"w": array(8, -4)}, 77)], factor=0.25), PLAIN)
    assert after.snapshot["w"].tolist() == [3, 0]


@given(tensors, st.lists(st.tuples(tensors, st.integers(1, 10**9), st.floats(0, 1)), max_size=20))
def test_factors_discount_changes_and_not_bytes(
    snapshot: Parameters, updates: list[tuple[Parameters, int, float]]
) -> None:
    parts = [Part(change.__getitem__, trained, factor) for change, trained, factor in updates]
    after = combine(Kept(snapshot, snapshot), parts, PLAIN)
    total = sum(trained for _, trained, _ in updates)
    for name, base in snapshot.items():
        expected = base.astype(np.float64)
        for change, trained, factor in updates:
            expected = expected + change[name].astype(np.float64) * factor * trained / total
        close(after.snapshot[name], expected)


# --- the same bits, however it is cut -----------------------------------------------------------


def in_whole_arrays(kept: Kept, updates: Updates, averaging: Averaging) -> Kept:
    """The law in its plainest form, without codec: what this module did when it was written."""
    total = max(1, sum(trained for _, trained in updates))
    snapshot: Parameters = {}
    steady: Parameters = {}
    momentum: Parameters = {}
    for name, base in kept.snapshot.items():
        change = np.zeros_like(base)
        for update, trained in updates:
            change += update[name] * np.float32(trained / total)
        if averaging.outer_momentum:
            before = kept.momentum[name] if kept.momentum else np.zeros_like(base)
            momentum[name] = np.float32(averaging.outer_momentum) * before + change
            change = change + np.float32(averaging.outer_momentum) * momentum[name]
        snapshot[name] = base + np.float32(averaging.outer_rate) * change
        keep = averaging.steady
        steady[name] = np.float32(keep) * kept.steady[name] + np.float32(1 - keep) * snapshot[name]
    return Kept(snapshot, steady, momentum or None)


def same_bits(one: Parameters | None, other: Parameters | None) -> bool:
    if one is None or other is None:
        return one is other
    return list(one) == list(other) and all(
        np.asarray(one[name]).tobytes() == other[name].tobytes() for name in one
    )


SETTINGS = [
    Averaging(),
    Averaging(steady=0.5, outer_rate=0.7, outer_momentum=0.9),
    Averaging(steady=0.0, outer_rate=1.3),
]

LARGE = {"w": (AT_ONCE // 100 + 1, 101), "b": (7,), "scalar": (), "none": (3, 0)}


def normal(seed: int, size: float = 1.0) -> Parameters:
    random = np.random.default_rng(seed)
    return {
        name: (size * np.asarray(random.standard_normal(shape))).astype(np.float32)
        for name, shape in LARGE.items()
    }


@pytest.mark.parametrize("averaging", SETTINGS, ids=str)
@pytest.mark.parametrize("replicas", [1, 2, TOGETHER, TOGETHER + 1, 3 * TOGETHER])
def test_pieces_give_the_bits_of_whole_arrays(averaging: Averaging, replicas: int) -> None:
    ours = plain = Kept(normal(0), normal(1))
    for turn in range(3):
        updates = [(normal(100 * turn + i, 0.01), 1000 + 17 * i) for i in range(replicas)]
        ours = combine(ours, parts_of(updates), averaging)
        plain = in_whole_arrays(plain, updates, averaging)
        for field in ("snapshot", "steady", "momentum"):
            assert same_bits(getattr(plain, field), getattr(ours, field)), field
        assert ours.residual is None


@given(tensors, tensors, updates_of, st.sampled_from(SETTINGS))
def test_any_values_give_the_bits_of_whole_arrays(
    snapshot: Parameters, steady: Parameters, updates: Updates, averaging: Averaging
) -> None:
    ours = combine(Kept(snapshot, steady), parts_of(updates), averaging)
    plain = in_whole_arrays(Kept(snapshot, steady), updates, averaging)
    for field in ("snapshot", "steady", "momentum"):
        assert same_bits(getattr(plain, field), getattr(ours, field)), field


def test_from_files_or_from_memory_tensors_come_in_file_order() -> None:
    kept, updates = Kept(normal(0), normal(1)), [(normal(2), 5), (normal(3), 7)]
    like = shapes_of(kept.snapshot)

    def reader(values: Parameters) -> Callable[[str], Array]:
        return Body(encode(values, "fp32"), "fp32", like).read

    standing = Standing(reader(kept.snapshot), reader(kept.steady))
    parts = [Part(reader(change), trained) for change, trained in updates]
    made = list(combined(like, standing, parts, Averaging()))
    assert [name for name, _ in made] == order(like) != list(like)
    after = combine(kept, parts_of(updates), Averaging())
    for name, one in made:
        assert one.snapshot.tobytes() == after.snapshot[name].tobytes()
        assert one.steady.tobytes() == after.steady[name].tobytes()
        assert one.snapshot.flags.writeable


@pytest.mark.parametrize("codec", CODECS)
def test_memory_is_that_of_few_tensors_however_many_updates(codec: str) -> None:
    names = [f"{number}" for number in range(30)]
    tensor = np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32)
    like = dict.fromkeys(names, tensor.shape)
    body = Body(encode(dict.fromkeys(names, tensor), codec), codec, like)
    plain = Body(encode(dict.fromkeys(names, tensor), "fp32"), "fp32", like)
    parts = [Part(body.read, 1)] * 40
    tracemalloc.start()
    for _ in combined(like, Standing(plain.read, plain.read), parts, Averaging(), codec):
        pass
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < (TOGETHER + 10) * tensor.nbytes + 4 * 4 * AT_ONCE


@pytest.mark.parametrize("wrong", ["snapshot", "steady", "momentum", "residual", "change"])
def test_a_tensor_of_another_shape_is_not_averaged(
    wrong: str, sentence: Callable[[BaseException], str]
) -> None:
    values = {key: {"w": array(1, 1)} for key in ("snapshot", "steady", "momentum", "residual")}
    change, longer = {"w": array(1, 1)}, {"w": array(1, 1, 1)}
    kept = Kept(**values | ({wrong: longer} if wrong in values else {}))
    updates = [(longer if wrong == "change" else change, 1)]
    with pytest.raises(BadTensors) as error:
        list(
            combined(
                {"w": (2,)},
                Standing(*(getattr(kept, field).__getitem__ for field in values)),
                parts_of(updates),
                Averaging(outer_momentum=0.5),
            )
        )
    assert "(3,)" in sentence(error.value)


# --- codecs: what everyone has is what was decoded ----------------------------------------------


def next_kept(made: dict[str, Next]) -> Kept:
    return Kept(
        {name: one.snapshot for name, one in made.items()},
        {name: one.steady for name, one in made.items()},
        {name: one.momentum for name, one in made.items() if one.momentum is not None} or None,
        {name: one.residual for name, one in made.items() if one.residual is not None} or None,
    )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("averaging", SETTINGS, ids=str)
def test_a_follower_has_the_same_bits_from_deltas_alone(codec: str, averaging: Averaging) -> None:
    kept = Kept(normal(0), normal(1))
    theirs = (kept.snapshot, kept.steady)
    like = shapes_of(kept.snapshot)
    for turn in range(4):
        updates = [(normal(10 * turn + i, 0.01), 1000 + i) for i in range(3)]
        standing = Standing(
            kept.snapshot.__getitem__,
            kept.steady.__getitem__,
            kept.momentum.__getitem__ if kept.momentum else None,
            kept.residual.__getitem__ if kept.residual else None,
        )
        made = dict(combined(like, standing, parts_of(updates), averaging, codec))
        writer = Writer(codec, like)
        for name, one in made.items():
            writer.place(name, one.delta)
        again = combine(kept, parts_of(updates), averaging, codec)
        kept = next_kept(made)
        for field in ("snapshot", "steady", "momentum", "residual"):
            one, other = getattr(kept, field), getattr(again, field)
            assert same_bits(one, other and {name: other[name] for name in one})
        theirs = follow(*theirs, Body(writer.body(), codec, like).read, averaging)
        assert same_bits(theirs[0], {name: kept.snapshot[name] for name in like})
        assert same_bits(theirs[1], {name: kept.steady[name] for name in like})


@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if not codec.exact])
def test_what_a_lossy_delta_loses_is_made_up_for(codec: str) -> None:
    """Snapshot and residual together are where the exact codec is."""
    kept = exact = Kept(normal(0), normal(0))
    for turn in range(30):
        updates = parts_of([(normal(turn, 0.01), 1), (normal(1000 + turn, 0.01), 3)])
        kept, exact = combine(kept, updates, PLAIN, codec), combine(exact, updates, PLAIN)
        assert kept.residual is not None
        for name in LARGE:
            together = kept.snapshot[name] + kept.residual[name]
            np.testing.assert_allclose(together, exact.snapshot[name], atol=1e-5)
    assert not np.array_equal(kept.snapshot["w"], exact.snapshot["w"])
    owed = np.abs(kept.snapshot["w"] - exact.snapshot["w"]).max()
    forgetful = Kept(normal(0), normal(0))
    for turn in range(30):
        updates = parts_of([(normal(turn, 0.01), 1), (normal(1000 + turn, 0.01), 3)])
        forgetful = replace(combine(forgetful, updates, PLAIN, codec), residual=None)
    assert owed < 0.7 * np.abs(forgetful.snapshot["w"] - exact.snapshot["w"]).max()


def test_the_exact_codec_pays_an_old_residual_and_owes_nothing() -> None:
    kept = Kept({"w": array(1)}, {"w": array(1)}, residual={"w": array(4)})
    after = combine(kept, parts_of([({"w": array(2)}, 1)]), PLAIN)
    assert after.snapshot["w"].tolist() == [7]
    assert after.residual is None


@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if not codec.exact])
def test_what_a_codec_cannot_carry_is_refused(codec: str) -> None:
    kept = Kept({"w": array(1)}, {"w": array(1)})
    with pytest.raises(BadTensors, match="'w' holds a number that is not finite"):
        combine(kept, parts_of([({"w": array(float("inf"))}, 1)]), PLAIN, codec)


# --- refusals -----------------------------------------------------------------------------------


def body_of(change: Parameters, codec: str = "fp32") -> Body:
    return Body(encode(change, codec), codec, shapes_of(change))


def change_with(**parts: Array) -> Parameters:
    return {"a": np.ones((2, 3), np.float32), "b": array(1, 1), **parts}


@pytest.mark.parametrize("codec", CODECS)
def test_a_good_change_is_not_refused(codec: str) -> None:
    assert refusal(body_of(change_with(), codec), base_norm=3.0 / LARGEST_CHANGE) is None
    assert refusal(body_of({"a": array(0)}, codec), base_norm=0.0) is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (change_with(b=array(1, float("nan"))), "'b' holds a number that is not finite"),
        (change_with(b=array(float("-inf"), 1)), "'b' holds a number that is not finite"),
        (change_with(a=array(9), b=array(1, float("nan"))), "'b' holds a number"),
        (change_with(b=array(3, 0)), "is 3.87, beyond 3, which is 4 times"),
        (change_with(b=array(3e38, 3e38)), "4.24e+38, beyond 3"),  # its square is beyond float32
    ],
)
def test_a_change_is_refused_for_a_reason(change: Parameters, told: str) -> None:
    reason = refusal(body_of(change), base_norm=3.0 / LARGEST_CHANGE)
    assert reason is not None
    assert told in reason
    assert reason.endswith(".")
    assert ";" in reason


def test_half_precision_that_is_not_finite_is_refused() -> None:
    good = encode({"w": array(1, 1)}, "fp16")
    body = Body(good[:-2] + b"\x00\x7c", "fp16", {"w": (2,)})
    assert "not finite" in (refusal(body, 100.0) or "")


def test_a_bad_scale_is_no_change_at_all() -> None:
    good = encode({"w": array(1, 1)}, "int8")
    position = good.index(CODECS["int8"].encode(array(1, 1))[1].tobytes(), len(good) - 8)
    bad = good[:position] + b"\xff\xff" + good[position + 2 :]
    with pytest.raises(BadTensors, match="scale"):
        refusal(Body(bad, "int8", {"w": (2,)}), 100.0)


class Unread(Body):
    """A body whose values nobody may look at."""

    def read(self, name: str, own: bool = False) -> Array:
        raise AssertionError(f"'{name}' was decoded")


@pytest.mark.parametrize("codec", BLOCKWISE)
def test_what_the_scales_vouch_for_is_not_decoded(codec: str) -> None:
    change = change_with(a=np.ones((4, 64), np.float32))
    body = Unread(encode(change, codec), codec, shapes_of(change))
    assert refusal(body, base_norm=100.0) is None
    with pytest.raises(AssertionError, match="was decoded"):  # where they do not, it is
        refusal(body, base_norm=4.0)


@pytest.mark.parametrize("codec", BLOCKWISE)
@given(tensors, st.floats(0.1, 1000))
def test_the_verdict_is_that_of_the_values(
    codec: str, change: Parameters, base_norm: float
) -> None:
    body = body_of(change, codec)
    found, limit = norm(body.read, body.like), LARGEST_CHANGE * base_norm
    if abs(found - limit) > 1e-3 * limit:
        assert (refusal(body, base_norm) is not None) == (found > limit)


@pytest.mark.parametrize("codec", BLOCKWISE)
def test_an_absurd_norm_is_refused_by_every_codec(codec: str) -> None:
    reason = refusal(body_of(change_with(a=np.full((4, 64), 3e30, np.float32)), codec), 1.0)
    assert "The norm of the change is" in (reason or "")


@pytest.mark.parametrize("base_norm", [0.0, float("nan"), -1.0])
def test_a_change_of_a_base_without_a_norm_is_refused(base_norm: float) -> None:
    assert refusal(body_of(change_with()), base_norm) is not None


@given(tensors, st.floats(0.1, 1000))
def test_the_norm_is_of_all_tensors_together(change: Parameters, base_norm: float) -> None:
    squares = sum(float((value.astype(np.float64) ** 2).sum()) for value in change.values())
    expected, limit = squares**0.5, LARGEST_CHANGE * base_norm
    assert norm(change.__getitem__, shapes_of(change)) == pytest.approx(expected, rel=1e-5)
    if abs(expected - limit) > 1e-3 * limit:
        assert (refusal(body_of(change), base_norm) is not None) == (expected > limit)


def test_a_norm_beyond_float32_is_a_norm() -> None:
    large = {"w": np.full(2 * AT_ONCE + 5, 3e38, np.float32)}
    expected = 3e38 * (2 * AT_ONCE + 5) ** 0.5
    assert norm(large.__getitem__, shapes_of(large)) == pytest.approx(expected, rel=1e-5)
