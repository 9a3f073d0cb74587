"""Rows of activations <-> bytes on a link, by a codec.

    fp32   4 bytes per value          every bit as it was
    fp16   2                          round to nearest, beyond 65504 becomes 65504
    int8   1, and 4 for each row      steps of 1/127 of the row's largest value

A row stands alone: what becomes of it does not depend on which rows travel with it, so that a text
gives the same bytes however it is cut into steps. Rows that are not finite are refused by both
sides: the one would spread them, the other must not believe them.
"""

import numpy as np

from blocktrain.errors import BadTensors
from blocktrain.terms import Array
from blocktrain.wire.serving import Codec

LARGEST_HALF = np.float32(65504)
LEVELS = np.float32(127)
CEILING = np.float32(2.0**120)  # larger values become this: no code times its scale overflows
SMALLEST = np.float32(2.0**-100)  # a row below it is 0: no scale is denormal, some machines flush


def size(rows: int, width: int, codec: Codec) -> int:
    """Bytes that so many rows take."""
    if codec == "int8":
        return rows * (4 + width)
    return rows * width * (4 if codec == "fp32" else 2)


def encode(rows: Array, codec: Codec) -> bytes:
    """Rows (n, width) as they travel."""
    refuse_not_finite(rows)
    if codec == "fp32":
        return rows.astype("<f4", copy=False).tobytes()
    if codec == "fp16":
        return rows.clip(-LARGEST_HALF, LARGEST_HALF).astype("<f2").tobytes()
    clipped = rows.clip(-CEILING, CEILING)
    largest = np.abs(clipped).max(axis=1, initial=0)
    scales = np.where(largest < SMALLEST, np.float32(0), largest / LEVELS)
    divisors = np.where(scales > 0, scales, np.float32(1))
    codes = np.where(scales[:, None] > 0, np.rint(clipped / divisors[:, None]), 0)
    return scales.astype("<f4").tobytes() + codes.astype(np.int8).tobytes()


def decode(body: bytes, rows: int, width: int, codec: Codec) -> Array:
    """What `encode` made, in memory of its own; or a sentence."""
    if len(body) != size(rows, width, codec):
        raise BadTensors(
            f"{rows} rows of {width} in {codec} must have {size(rows, width, codec)} bytes, "
            f"not {len(body)}."
        )
    if codec == "int8":
        scales = np.frombuffer(body, "<f4", rows).astype(np.float32)
        codes = np.frombuffer(body, np.int8, offset=4 * rows).reshape(rows, width)
        with np.errstate(over="ignore", invalid="ignore"):  # of a stranger; refused below
            found = codes.astype(np.float32) * scales[:, None]
    else:
        values = np.frombuffer(body, "<f4" if codec == "fp32" else "<f2")
        found = values.reshape(rows, width).astype(np.float32)
    refuse_not_finite(found)
    return found


def refuse_not_finite(rows: Array) -> None:
    """Raises for a NaN or an infinity."""
    if not np.isfinite(rows).all():
        raise BadTensors("Activations must be finite; check the model of the stage before.")
