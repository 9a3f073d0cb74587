"""Named float32 arrays <-> safetensors bytes, by a codec.

For one codec and one block there is exactly one header: its names, dtypes, shapes and offsets all
follow from the names and shapes of the block, which a receiver always knows. So a receiver makes
the header itself and compares it byte for byte with the one that came; nothing that a stranger
wrote decides how much memory is taken. A header that differs is read only to say why it is refused.

    fp32   4      bytes per value    every bit as it was
    fp16   2                         round to nearest, beyond 65504 becomes 65504
    int8   1.02                      steps of 1/127 of the largest of 128 values
    int4   0.52                      16 levels in 128 values
    int2   0.27                      4 levels in 128 values

Sending lossy updates round after round, add what the last one lost (`encode_with_residual`): the
sum of what arrives then stays near the sum of what was meant. Bytes and values are the same on
every machine: elementwise float32 and maxima only, nothing summed, and no denormal decides, since
some machines flush them to 0.
"""

import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from blocktrain.errors import BlockTrainError
from blocktrain.terms import Array, Parameters

Dimensions = tuple[int, ...]
Shapes = Mapping[str, Dimensions]
"""Names and shapes of a block's parameters: what a receiver expects."""

Raw = NDArray[Any]

DTYPES = {"F32": "<f4", "BF16": "<u2", "F16": "<f2", "I8": "i1", "U8": "u1"}
"""safetensors' names (in its order in a file) and how numpy holds them; BF16 as its bits."""

BLOCK = 128  # values per scale: 64 cost 1.5 % more bytes in int8 for 8 % less of 0.7 % error
AT_ONCE = 2**16  # values worked on at a time: they and their copies stay in the cache
OTHER_HEADER = 4096  # bytes by which a header may exceed twice the expected one and be explained
LARGEST_HALF = np.float32(65504)

# Scales are the upper half of a float32 (bf16) and so have its range: in fp16, 1/127 of an ordinary
# update (1e-5) would be a denormal. Positive ones are ordered as their bits are.
CEILING = np.float32(2.0**120)  # larger values become this: no code times its scale overflows
SMALLEST_SCALE = (127 - 100) << 7  # bits of 2^-100: below it a block is 0, so nothing is denormal
LARGEST_SCALE = (127 + 119) << 7  # bits of 2^119, above every step of CEILING


class BadTensors(BlockTrainError):
    """A body that is not what its codec makes of the expected tensors."""


# --- codecs: one array at a time ----------------------------------------------------------------


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
            out[:] = levels.take(packed[self.at_bytes(at)], axis=0).reshape(-1)[: out.size]
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


# --- bodies -------------------------------------------------------------------------------------


def shapes_of(values: Parameters) -> Shapes:
    """What the receiver of these values expects."""
    return {name: value.shape for name, value in values.items()}


def largest(codec: str, like: Shapes) -> int:
    """Bytes of every body that carries such tensors: no more and no less."""
    return plan_for(codec, like).size


def encode(values: Parameters, codec: str) -> bytes:
    """The body that carries these values."""
    writer = Writer(codec, shapes_of(values))
    for name, value in values.items():
        writer.put(name, value)
    return writer.body()


def encode_with_residual(
    values: Parameters, residual: Parameters | None, codec: str
) -> tuple[bytes, Parameters | None]:
    """The body for values + residual, and what it loses of them: the sender's next residual."""
    like = shapes_of(values)
    if residual is not None and shapes_of(residual) != like:
        raise BadTensors("The residual is of another block; begin without one.")
    writer, lost = Writer(codec, like), {}
    for name, value in values.items():
        with np.errstate(over="ignore", invalid="ignore"):  # the writer looks
            wanted = value if residual is None else np.asarray(value + residual[name])
        parts = writer.put(name, wanted)
        if not writer.codec.exact:
            lost[name] = np.asarray(wanted - writer.codec.decode(parts, value.shape))
    return writer.body(), lost or None


def decode(body: bytes | bytearray | memoryview, codec: str, like: Shapes) -> Parameters:
    """The values in a body from anyone, or a sentence that says why it is refused."""
    plan, view = plan_for(codec, like), memoryview(body).cast("B")
    if len(view) > plan.size:
        raise BadTensors(
            f"The body has {len(view)} bytes; {codec} makes {plan.size} of these tensors."
        )
    if view[: len(plan.header)] != plan.header:
        try:
            raise BadTensors(why_refused(view, plan))
        except RecursionError:
            raise BadTensors("The header is nested too deeply.") from None
    if len(view) < plan.size:
        raise BadTensors(f"The body is cut short: it has {len(view)} of {plan.size} bytes.")
    values: Parameters = {}
    for name, shape in like.items():
        parts = [place.read(view) for place in plan.places[name]]
        for place, part in zip(plan.places[name], parts, strict=True):
            if place.part.dtype == "BF16" and bad_scales(part):
                raise BadTensors(f"'{name}' has a scale that is not a number from 2^-100 to 2^119.")
        values[name] = CODECS[codec].decode(parts, shape)
    return values


def bad_scales(bits: Raw) -> bool:
    """Whether any is negative, not finite, or of a size that no encoder writes."""
    return bool(((bits > LARGEST_SCALE) | ((bits < SMALLEST_SCALE) & (bits != 0))).any())


class Writer:
    """Fills a body, tensor by tensor."""

    def __init__(self, codec: str, like: Shapes) -> None:
        self.plan, self.name, self.codec = plan_for(codec, like), codec, CODECS[codec]
        self.file = io.BytesIO()  # it hands over its memory, where bytes(bytearray) copies
        self.file.seek(self.plan.size - 1)
        self.file.write(b"\0")  # so that it takes its memory once
        self.file.seek(0)
        self.file.write(self.plan.header)

    def put(self, name: str, value: Array) -> tuple[Raw, ...]:
        """Writes one tensor; returns its parts."""
        if not self.codec.exact and not np.isfinite(value).all():
            raise BadTensors(
                f"'{name}' holds a number that is not finite, which {self.name} cannot carry; "
                "train again from an older snapshot or with a lower rate."
            )
        parts = self.codec.encode(value)
        for place, part in zip(self.plan.places[name], parts, strict=True):
            self.file.seek(place.begin)
            self.file.write(part.reshape(-1).data)
        return parts

    def body(self) -> bytes:
        """What was written."""
        return self.file.getvalue()


@dataclass(frozen=True)
class Place:
    """Where a part lies in a body."""

    part: Part
    begin: int

    def read(self, body: memoryview) -> Raw:
        """The part, still in the body's memory."""
        return np.frombuffer(
            body[self.begin : self.begin + self.part.size], DTYPES[self.part.dtype]
        )


@dataclass(frozen=True)
class Plan:
    """All of a body but its values."""

    header: bytes
    size: int
    places: dict[str, list[Place]]
    entries: dict[str, Any]
    """The header, before it was written as JSON."""


def plan_for(codec: str, like: Shapes) -> Plan:
    """The one way in which this codec lays out these tensors: as the safetensors library does."""
    if codec not in CODECS:
        raise BadTensors(f"There is no codec {short(codec)}; choose one of {', '.join(CODECS)}.")
    made = {name: CODECS[codec].parts(shape) for name, shape in like.items()}
    named = [(name + part.suffix, part) for name, parts in made.items() for part in parts]
    # a packed matrix of 2 x 130 looks like one of 130 x 2, so the shapes are named besides
    shapes = json.dumps({name: like[name] for name in sorted(like)}).encode()
    digest = hashlib.sha256(shapes).hexdigest()[:16]
    entries: dict[str, Any] = {"__metadata__": {"codec": codec, "shapes": digest}}
    end = 0
    for name, part in sorted(named, key=lambda one: (list(DTYPES).index(one[1].dtype), one[0])):
        if name in entries:
            raise BadTensors(f"Two tensors would be called '{name}'; rename one of them.")
        begin, end = end, end + part.size
        offsets = [begin, end]
        entries[name] = {"dtype": part.dtype, "shape": [*part.shape], "data_offsets": offsets}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places = {
        name: [
            Place(part, len(header) + entries[name + part.suffix]["data_offsets"][0])
            for part in parts
        ]
        for name, parts in made.items()
    }
    return Plan(header, len(header) + end, places, entries)


# --- refusals -----------------------------------------------------------------------------------


def why_refused(body: memoryview, plan: Plan) -> str:
    """What is wrong with a header that is not the expected one. Reads it, and trusts nothing."""
    size = int.from_bytes(body[:8], "little")
    if len(body) < 8 or size > len(body) - 8:
        return f"The body is cut short: its {len(body)} bytes end before its header does."
    if size > 2 * len(plan.header) + OTHER_HEADER:
        return f"The header has {size} bytes; {len(plan.header) - 8} were expected."
    try:
        found = json.loads(bytes(body[8 : 8 + size]), object_pairs_hook=without_doubles)
    except ValueError:
        return "The header is not JSON."
    if not isinstance(found, dict):
        return "The header is not a JSON object."
    metadata, expected = found.get("__metadata__"), plan.entries["__metadata__"]
    codec = metadata.get("codec") if isinstance(metadata, dict) else None
    if codec != expected["codec"]:
        return f"The body is by codec {short(codec)}, not by {expected['codec']}."
    for name in sorted(plan.entries.keys() - found.keys()):
        return f"The body lacks '{name}'."
    for name in sorted(found.keys() - plan.entries.keys()):
        return f"The body holds {short(name)}, which is not of this block."
    for name, entry in plan.entries.items():
        if found[name] != entry and entry is not expected:
            return f"'{name}' is {short(found[name])}, not {entry}."
    if metadata != expected:
        return f"The body is of tensors with other shapes: {short(metadata)}, not {expected}."
    return "The header is not written in the one way it can be: no other spaces, order or escapes."


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, or a refusal if it has a key twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise BadTensors("The header has a key twice.")
    return table


def short(thing: object) -> str:
    """A stranger's words, cut and with control characters escaped, fit for a log."""
    text = ascii(thing)
    return text if len(text) <= 80 else text[:80] + "..."
