"""One array <-> what carries it: one contract for every codec."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from blocktrain.terms import Array
from blocktrain.wire.codecs import (
    AT_ONCE,
    BLOCK,
    CODECS,
    DTYPES,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    bad_scales,
    cached,
)

BLOCKWISE = {"int8": 0.004, "int4": 0.067, "int2": 0.44}
"""The largest error in a matrix, as a share of the largest of its block of values: 1/254, 1/16 and
7/16, and a little for scales that are rounded."""

every_codec = pytest.mark.parametrize("codec", CODECS)


def normal(*shape: int, seed: int = 0, size: float = 0.01) -> Array:
    return (size * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def promised(value: Array, codec: str) -> tuple[Array, np.ndarray]:
    """What should arrive of a value, and how far from it what arrives may be."""
    if codec == "fp32":
        return value, np.zeros(value.shape)
    if codec == "fp16":
        target = value.clip(-65504, 65504)
        return target, np.abs(target) * 2.0**-11 + 2.0**-25
    share = BLOCKWISE["int8" if value.ndim < 2 else codec]
    target = value.clip(-(2.0**120), 2.0**120)
    flat = np.abs(target).reshape(-1).astype(np.float64)
    rows = np.append(flat, np.zeros(-flat.size % BLOCK)).reshape(-1, BLOCK)
    bounds = np.repeat(rows.max(axis=1) * share + 1e-28, BLOCK)[: flat.size]
    return target, bounds.reshape(value.shape)


def assert_kept(value: Array, codec: str) -> None:
    """What the codec promises of an array."""
    by, before = CODECS[codec], value.tobytes()
    parts = by.encode(value)
    found = by.decode(parts, value.shape)
    assert found.dtype == np.float32
    assert found.shape == value.shape
    target, allowed = promised(value, codec)
    error = np.abs(found.astype(np.float64) - target.astype(np.float64))
    assert (error <= allowed).all()
    assert value.tobytes() == before
    for part, planned in zip(parts, by.parts(value.shape), strict=True):
        assert part.dtype == np.dtype(DTYPES[planned.dtype])
        assert part.nbytes == planned.size


SAMPLES: dict[str, Array] = {
    "ordinary": normal(48, 64),
    "vector": normal(300),
    "whole blocks": normal(4, BLOCK),
    "one more": normal(BLOCK + 1, 1),
    "one less": normal(1, BLOCK - 1),
    "odd": normal(7, 11, 13),
    "more than one cache-full": normal(AT_ONCE // 128 + 1, 129),
    "empty": normal(0),
    "empty matrix": normal(3, 0, 2),
    "scalar": np.float32(0.3) * np.ones((), np.float32),
    "one": normal(1, 1),
    "zeros": np.zeros((20, 20), np.float32),
    "negative zero": np.full((3, 3), -0.0, np.float32),
    "huge": normal(9, 40, size=5e37),
    "largest": np.full((2, 70), np.finfo(np.float32).max) * np.where(np.arange(70) % 2, 1, -1),
    "denormal": np.full((2, 70), 1e-44, np.float32),
    "tiny": normal(9, 40, size=1e-30),
    "far apart": np.geomspace(1e-38, 1e38, 400, dtype=np.float32).reshape(20, 20),
    "one large": np.where(np.arange(256) == 99, 1000, normal(256)).reshape(2, 128),
    "half is zero": np.where(np.arange(256) % 2, 0, normal(256)).reshape(2, 128),
}
SAMPLES = {name: value.astype(np.float32) for name, value in SAMPLES.items()}


@every_codec
@pytest.mark.parametrize("sample", SAMPLES)
def test_values_arrive_within_the_promised_error(codec: str, sample: str) -> None:
    assert_kept(SAMPLES[sample], codec)


@every_codec
@given(
    arrays.arrays(
        np.float32,
        arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=20),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_any_finite_values_arrive_within_the_promised_error(codec: str, value: Array) -> None:
    assert_kept(value, codec)


@every_codec
@pytest.mark.parametrize("sample", SAMPLES)
def test_codes_are_a_function_of_values(codec: str, sample: str) -> None:
    by, value = CODECS[codec], SAMPLES[sample]
    strided = value.T.copy().T
    for one, other in zip(by.encode(value), by.encode(strided), strict=True):
        assert one.tobytes() == other.tobytes()


@every_codec
def test_what_is_decoded_has_memory_of_its_own(codec: str) -> None:
    by, value = CODECS[codec], normal(20, 20)
    parts = [part.copy() for part in by.encode(value)]
    for part in parts:
        part.flags.writeable = False
    found = by.decode(parts, value.shape)
    assert not any(np.shares_memory(found, part) for part in parts)
    found += 1
    assert found.flags.c_contiguous


def test_codecs_are_listed_from_large_to_small() -> None:
    sizes = [sum(part.size for part in codec.parts((512, 512))) for codec in CODECS.values()]
    per_value = [round(size / 512**2, 2) for size in sizes]
    assert dict(zip(CODECS, per_value, strict=True)) == {
        "fp32": 4.0,
        "fp16": 2.0,
        "int8": 1.02,
        "int4": 0.52,
        "int2": 0.27,
    }


@every_codec
def test_ten_million_values_are_quick(codec: str) -> None:
    """50 MB/s is asked here, of a machine busy with other things; 400 to 3,000 were measured."""
    value = np.tile(normal(1000, 100), (10, 10))
    began = time.thread_time()
    parts = CODECS[codec].encode(value)
    halfway = time.thread_time()
    CODECS[codec].decode(parts, value.shape)
    assert max(halfway - began, time.thread_time() - halfway) < 40e6 / 50e6


@pytest.mark.parametrize("codec", BLOCKWISE)
def test_any_codes_under_the_largest_scale_are_finite(codec: str) -> None:
    by = CODECS[codec]
    codes, scales = by.encode(np.full((16, 16), 3e38, np.float32))
    for code in range(256):
        codes.view(np.uint8)[:] = code
        assert np.isfinite(by.decode((codes, scales), (16, 16))).all()


def test_scales_that_no_encoder_writes_are_bad() -> None:
    good = np.array([0, SMALLEST_SCALE, 0x3F80, LARGEST_SCALE], "<u2")
    assert not bad_scales(good)
    for bits in (1, SMALLEST_SCALE - 1, LARGEST_SCALE + 1, 0x7F80, 0x7FC0, 0x8000, 0xBF80, 0xFFFF):
        assert bad_scales(np.append(good, np.array([bits], "<u2")))


@pytest.mark.parametrize("size", [0, 1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE])
def test_a_cache_full_at_a_time_is_everything_once_and_in_place(size: int) -> None:
    value = np.arange(size, dtype=np.float32)
    for at, piece in cached(value):
        assert piece.size <= AT_ONCE
        assert piece.tolist() == list(range(at.start, at.stop))
        piece += 1
    assert value.tolist() == list(range(1, size + 1))
