"""Rows on a link: one contract for every codec."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from blocktrain.errors import BadTensors
from blocktrain.terms import Array
from blocktrain.wire import activations
from blocktrain.wire.serving import Codec

CODECS: tuple[Codec, ...] = ("fp32", "fp16", "int8")
every_codec = pytest.mark.parametrize("codec", CODECS)

any_rows = arrays.arrays(
    np.float32,
    st.tuples(st.integers(0, 5), st.integers(1, 9)),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


def journey(rows: Array, codec: Codec) -> Array:
    """What arrives of rows."""
    return activations.decode(activations.encode(rows, codec), len(rows), rows.shape[1], codec)


def promised(rows: Array, codec: Codec) -> tuple[Any, Any]:
    """What should arrive, and how far from it what arrives may be."""
    exact = rows.astype(np.float64)
    if codec == "fp32":
        return exact, np.zeros_like(exact)
    if codec == "fp16":
        exact = exact.clip(-65504, 65504)
        return exact, np.abs(exact) * 2.0**-11 + 2.0**-25
    exact = exact.clip(-(2.0**120), 2.0**120)
    largest = np.abs(exact).max(axis=1, keepdims=True, initial=0)
    return exact, np.broadcast_to(largest * 0.004 + 2.0**-100, exact.shape)  # half of 1/127


@every_codec
@given(rows=any_rows)
def test_what_arrives_is_what_the_codec_promises(codec: Codec, rows: Array) -> None:
    before, (count, width) = rows.tobytes(), rows.shape
    body = activations.encode(rows, codec)
    assert len(body) == activations.size(count, width, codec)
    found = activations.decode(body, count, width, codec)
    assert found.dtype == np.float32
    assert found.shape == rows.shape
    target, allowed = promised(rows, codec)
    assert (np.abs(found.astype(np.float64) - target) <= allowed).all()
    found[:] = 1  # it may be computed in: it is nobody else's
    assert rows.tobytes() == before


@every_codec
@given(rows=any_rows)
def test_a_row_does_not_depend_on_the_rows_beside_it(codec: Codec, rows: Array) -> None:
    """Else a text cut into other steps would come out otherwise."""
    whole = journey(rows, codec)
    for number in range(len(rows)):
        found = journey(rows[number : number + 1], codec)
        assert found.tobytes() == whole[number : number + 1].tobytes()


@every_codec
@given(rows=any_rows)
def test_the_second_journey_changes_nothing(codec: Codec, rows: Array) -> None:
    once = journey(rows, codec)
    assert np.allclose(once, journey(once, codec), rtol=1e-6, atol=0)


@every_codec
@given(body=st.binary(max_size=80), rows=st.integers(0, 4), width=st.integers(1, 4))
def test_any_bytes_are_rows_or_refused(codec: Codec, body: bytes, rows: int, width: int) -> None:
    try:
        found = activations.decode(body, rows, width, codec)
    except BadTensors:
        return
    assert len(body) == activations.size(rows, width, codec)
    assert np.isfinite(found).all()


@every_codec
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_sent(
    codec: Codec, value: float, sentence: Callable[[BaseException], str]
) -> None:
    rows = np.zeros((2, 3), np.float32)
    rows[1, 2] = value
    with pytest.raises(BadTensors) as refused:
        activations.encode(rows, codec)
    assert "finite" in sentence(refused.value)


@pytest.mark.parametrize(
    ("codec", "lie"),
    [
        ("fp32", np.array([[1, np.nan]], "<f4").tobytes()),
        ("fp32", np.array([[1, -np.inf]], "<f4").tobytes()),
        ("fp16", np.array([[np.inf, 1]], "<f2").tobytes()),
        ("fp16", np.array([[np.nan, 1]], "<f2").tobytes()),
        ("int8", np.array([np.nan], "<f4").tobytes() + b"\1\1"),
        ("int8", np.array([np.inf], "<f4").tobytes() + b"\1\0"),
        ("int8", np.array([3e38], "<f4").tobytes() + b"\x7f\0"),
    ],
)
def test_what_is_not_finite_is_not_believed(codec: Codec, lie: bytes) -> None:
    with pytest.raises(BadTensors, match="finite"):
        activations.decode(lie, 1, 2, codec)


@every_codec
@pytest.mark.parametrize("more", [-1, 1])
def test_another_length_is_refused(codec: Codec, more: int) -> None:
    body = bytes(activations.size(3, 4, codec) + more)
    with pytest.raises(BadTensors, match="must have"):
        activations.decode(body, 3, 4, codec)


def test_fp32_keeps_every_bit() -> None:
    rows = np.array([[-0.0, 1e-45, 3.4e38, np.float32(0.1)]], np.float32)
    assert activations.decode(rows.tobytes(), 1, 4, "fp32").tobytes() == rows.tobytes()
    assert activations.encode(rows, "fp32") == rows.tobytes()
