"""One float32 array <-> the arrays that carry it, by a codec.

    fp32   4      bytes per value    every bit as it was
    fp16   2                         round to nearest, beyond 65504 becomes 65504
    int8   1.02                      steps of 1/127 of the largest of 128 values
    int4   0.52                      16 levels in 128 values
    int2   0.27                      4 levels in 128 values

Codes and values are the same on every machine: elementwise float32 and maxima only, nothing summed,
and no denormal decides, since some machines flush them to 0.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from blocktrain.terms import Array

Dimensions = tuple[int, ...]

Raw = NDArray[Any]

DTYPES = {"F32": "<f4", "BF16": "<u2", "F16": "<f2", "I8": "i1", "U8": "u1"}
"""safetensors' names (in its order in a file) and how numpy holds them; BF16 as its bits."""

BLOCK = 128  # values per scale: 64 cost 1.5 % more bytes in int8 for 8 % less of 0.7 % error
AT_ONCE = 2**16  # values worked on at a time: they and their copies stay in the cache
LARGEST_HALF = np.float32(65504)

# Scales are the upper half of a float32 (bf16) and so have its range: in fp16, 1/127 of an ordinary
# update (1e-5) would be a denormal. Positive ones are ordered as their bits are.
CEILING = np.float32(2.0**120)  # larger values become this: no code times its scale overflows
SMALLEST_SCALE = (127 - 100) << 7  # bits of 2^-100: below it a block is 0, so nothing is denormal
LARGEST_SCALE = (127 + 119) << 7  # bits of 2^119, above every step of CEILING


@dataclass(frozen=True)
class Part:
    """One tensor of a body. An array becomes one part or more."""

    suffix: str
    dtype: str
    shape: Dimensions

    @property
    def size(self) -> int:
        """Bytes."""
        return count(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


class Codec(Protocol):
    """What an array becomes in a body, and back."""

    @property
    def exact(self) -> bool:
        """Whether nothing is lost. A codec that loses something takes finite numbers only."""

    def parts(self, shape: Dimensions) -> tuple[Part, ...]:
        """What an array of this shape becomes."""

    def encode(self, value: Array) -> tuple[Raw, ...]:
        """The parts of an array."""

    def decode(self, parts: Sequence[Raw], shape: Dimensions) -> Array:
        """The array, in memory of its own."""


class Exact:
    """Every bit as it was, not-a-number included."""

    exact = True

    def parts(self, shape: Dimensions) -> tuple[Part, ...]:
        return (Part("", "F32", shape),)

    def encode(self, value: Array) -> tuple[Raw, ...]:
        return (value.astype("<f4", copy=False),)

    def decode(self, parts: Sequence[Raw], shape: Dimensions) -> Array:
        return parts[0].astype(np.float32).reshape(shape)


class Half:
    """Half precision, to nearest; what is too large becomes the largest."""

    exact = False

    def parts(self, shape: Dimensions) -> tuple[Part, ...]:
        return (Part("", "F16", shape),)

    def encode(self, value: Array) -> tuple[Raw, ...]:
        half = np.empty(value.size, "<f2")
        for at, values in cached(value):
            half[at] = values.clip(-LARGEST_HALF, LARGEST_HALF)
        return (half,)

    def decode(self, parts: Sequence[Raw], shape: Dimensions) -> Array:
        return parts[0].astype(np.float32).reshape(shape)


class Int8:
    """Whole steps from -127 to 127, to nearest even; a step is 1/127 of the block's largest."""

    exact = False

    def parts(self, shape: Dimensions) -> tuple[Part, ...]:
        return (Part("", "I8", shape), scale_part(shape))

    def encode(self, value: Array) -> tuple[Raw, ...]:
        codes, scales = np.empty(value.size, "i1"), np.empty(blocks_in(value.size), "<u2")
        for at, values in cached(value):
            steps, scales[at_blocks(at)] = scaled(values, np.float32(1 / 127))
            np.rint(steps, out=steps)
            codes[at] = steps.clip(-127, 127, out=steps).reshape(-1)[: values.size]
        return codes, scales

    def decode(self, parts: Sequence[Raw], shape: Dimensions) -> Array:
        codes, scales = parts
        value = np.empty(shape, np.float32)
        for at, out in cached(value.reshape(-1)):
            out[:] = codes[at]
            multiply(out, scales[at_blocks(at)])
        return value


@dataclass(frozen=True)
class LowBit:
    """Few levels, none of them zero, for matrices; vectors are few and stay Int8.

    Code c of 0 .. 2^bits - 1 stands for (c + 1/2 - 2^bits / 2) steps. A step is a share of the
    block's largest value: below 4 bits the outermost level is then short of the largest, which
    serves the many small values better, and the residual carries on what is cut off.
    """

    bits: int
    step: float
    exact = False

    @property
    def per_byte(self) -> int:
        """Codes in a byte, the first in the lowest bits."""
        return 8 // self.bits

    def parts(self, shape: Dimensions) -> tuple[Part, ...]:
        if len(shape) < 2:
            return INT8.parts(shape)
        return (Part("", "U8", (-(-count(shape) // self.per_byte),)), scale_part(shape))

    def encode(self, value: Array) -> tuple[Raw, ...]:
        if value.ndim < 2:
            return INT8.encode(value)
        half = 2 ** (self.bits - 1)
        packed = np.empty(-(-value.size // self.per_byte), "u1")
        scales = np.empty(blocks_in(value.size), "<u2")
        for at, values in cached(value):
            steps, scales[at_blocks(at)] = scaled(values, np.float32(self.step))
            steps += half  # before the floor: so -1e-39 is 0 also where it is flushed to 0
            np.floor(steps, out=steps)
            codes = steps.clip(0, 2 * half - 1, out=steps).astype("u1").reshape(-1, self.per_byte)
            whole = codes[:, 0].copy()
            for place in range(1, self.per_byte):
                whole |= codes[:, place] << (self.bits * place)
            packed[self.at_bytes(at)] = whole[: -(-values.size // self.per_byte)]
        return packed, scales

    def decode(self, parts: Sequence[Raw], shape: Dimensions) -> Array:
        if len(shape) < 2:
            return INT8.decode(parts, shape)
        packed, scales = parts
        levels = self.levels()
        value = np.empty(shape, np.float32)
        for at, out in cached(value.reshape(-1)):
            codes, whole = packed[self.at_bytes(at)], out.size // self.per_byte
            full, rest = np.split(out, [whole * self.per_byte])
            # No byte is beyond the levels; "clip" only lets numpy write into `out` at once.
            levels.take(codes[:whole], 0, out=full.reshape(-1, self.per_byte), mode="clip")
            rest[:] = levels[codes[whole:]].reshape(-1)[: rest.size]
            multiply(out, scales[at_blocks(at)])
        return value

    def levels(self) -> Array:
        """What each of the 256 bytes stands for, in steps."""
        shifts = np.arange(self.per_byte) * self.bits
        codes = (np.arange(256)[:, None] >> shifts) & (2**self.bits - 1)
        levels: Array = codes.astype(np.float32) + np.float32(0.5 - 2 ** (self.bits - 1))
        return levels

    def at_bytes(self, at: slice) -> slice:
        """Where the codes of these values lie."""
        return slice(at.start // self.per_byte, -(-at.stop // self.per_byte))


INT8 = Int8()

CODECS: dict[str, Codec] = {
    "fp32": Exact(),
    "fp16": Half(),
    "int8": INT8,
    "int4": LowBit(bits=4, step=1 / 8),
    "int2": LowBit(bits=2, step=3 / 8),
}


def cached(value: Array) -> Iterator[tuple[slice, Array]]:
    """The values in order, flat, a cache-full at a time, and where they lie."""
    flat = value.reshape(-1)
    for first in range(0, flat.size, AT_ONCE):
        at = slice(first, min(first + AT_ONCE, flat.size))
        yield at, flat[at]


def scaled(values: Array, step: np.float32) -> tuple[Array, Raw]:
    """Rows of BLOCK values (the last filled up with 0), each over its scale; the scales' bits.

    A scale is a share `step` of the row's largest value: a maximum is the same in any order.
    """
    gap = -values.size % BLOCK
    rows = (np.append(values, np.zeros(gap, np.float32)) if gap else values).reshape(-1, BLOCK)
    largest = np.minimum(np.abs(rows).max(axis=1), CEILING)
    bits = (largest * step).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest even
    bits[bits < SMALLEST_SCALE] = 0
    divisors = as_float(bits)
    divisors[bits == 0] = np.inf  # so that every code is that of 0
    return rows / divisors[:, None], bits


def multiply(steps: Array, scales: Raw) -> None:
    """Steps times the scale of their block, in place."""
    factors, whole = as_float(scales), steps.size // BLOCK
    rows, rest = steps[: whole * BLOCK].reshape(-1, BLOCK), steps[whole * BLOCK :]
    rows *= factors[:whole, None]
    rest *= factors[whole:]


def as_float(bits: Raw) -> Array:
    """The numbers whose bf16 bits these are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def count(shape: Dimensions) -> int:
    """Values in an array of this shape."""
    return math.prod(shape)


def blocks_in(values: int) -> int:
    """Scales that so many values need."""
    return -(-values // BLOCK)


def at_blocks(at: slice) -> slice:
    """Which scales belong to these values."""
    return slice(at.start // BLOCK, blocks_in(at.stop))


def scale_part(shape: Dimensions) -> Part:
    """The scales of an array of this shape."""
    return Part(".scale", "BF16", (blocks_in(count(shape)),))


def bad_scales(bits: Raw) -> bool:
    """Whether any is negative, not finite, or of a size that no encoder writes."""
    return bool(((bits > LARGEST_SCALE) | ((bits < SMALLEST_SCALE) & (bits != 0))).any())
