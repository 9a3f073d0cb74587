"""Named float32 arrays <-> safetensors bytes, by a codec (wire/codecs.py).

For one codec and one block there is exactly one header: its names, dtypes, shapes and offsets all
follow from the names and shapes of the block, which a receiver always knows. So a receiver makes
the header itself and compares it byte for byte with the one that came; nothing that a stranger
wrote decides how much memory is taken. A header that differs is read only to say why it is refused.

A whole body: `encode` and `decode`. Tensor by tensor, so that nobody needs memory for all of them:
`Body` reads, `stream` (fp32) and `Writer` (any codec) write.

Sending lossy updates round after round, add what the last one lost (`encode_with_residual`): the
sum of what arrives then stays near the sum of what was meant.
"""

import hashlib
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from blocktrain.errors import BadTensors
from blocktrain.terms import Array, Parameters
from blocktrain.wire.codecs import (
    BLOCK,
    CODECS,
    DTYPES,
    Dimensions,
    Part,
    Raw,
    as_float,
    bad_scales,
)

Shapes = Mapping[str, Dimensions]
"""Names and shapes of a block's parameters: what a receiver expects."""

OTHER_HEADER = 4096  # bytes by which a header may exceed twice the expected one and be explained
MOST_STEPS = {"I8": 128.0, "U8": 7.5}  # that a code stands for, by whichever codec: int4 has 7.5


# --- whole bodies -------------------------------------------------------------------------------


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
    whole = Body(body, codec, like)
    return {name: whole.read(name, own=True) for name in like}


# --- tensor by tensor ---------------------------------------------------------------------------


class Body:
    """A body from anyone, read tensor by tensor; it may be a mapped file."""

    def __init__(self, body: bytes | bytearray | memoryview, codec: str, like: Shapes) -> None:
        """Checks all but the values, or says in a sentence why the body is refused."""
        self.plan, self.codec, self.like = plan_for(codec, like), CODECS[codec], like
        self.bytes = memoryview(body).cast("B").toreadonly()
        refuse_unless_planned(self.bytes, self.plan)

    def read(self, name: str, own: bool = False) -> Array:
        """One tensor, to look at; with `own`, in memory of its own.

        Where nothing is encoded, it stays in the body's memory: read only, and only when used.
        """
        parts, shape = self.parts(name), self.like[name]
        if self.codec.exact and not own:
            return parts[0].reshape(shape)
        return self.codec.decode(parts, shape)

    def ceiling(self, name: str) -> float:
        """The sum of the squares of one tensor is no larger, whatever its codes are.

        Its scales tell: 1 for 128 values. Without scales only the values do, and this is infinite.
        """
        codes, *scales = self.plan.places[name]
        if not scales:
            return math.inf
        largest = as_float(self.parts(name)[1]).astype(np.float64) * MOST_STEPS[codes.part.dtype]
        return BLOCK * float(np.vdot(largest, largest))

    def parts(self, name: str) -> list[Raw]:
        """What carries one tensor, still in the body's memory; scales are checked."""
        parts = [place.read(self.bytes) for place in self.plan.places[name]]
        for place, part in zip(self.plan.places[name], parts, strict=True):
            if place.part.dtype == "BF16" and bad_scales(part):
                raise BadTensors(f"'{name}' has a scale that is not a number from 2^-100 to 2^119.")
        return parts


def order(like: Shapes) -> list[str]:
    """The names as their values follow each other in an fp32 body."""
    return sorted(like)


def stream(values: Iterable[tuple[str, Array]], like: Shapes) -> Iterator[memoryview]:
    """The fp32 body of values that come in `order`, its header first, each as it comes."""
    yield memoryview(plan_for("fp32", like).header)
    left = iter(order(like))
    for name, value in values:
        if name != next(left, None) or value.shape != like[name]:
            raise BadTensors(f"{short(name)} is not what comes next; give every tensor in order.")
        yield bytes_of(CODECS["fp32"].encode(value)[0])
    for name in left:
        raise BadTensors(f"The values end before '{name}'; give every tensor in order.")


def encoded(name: str, value: Array, codec: str) -> tuple[Raw, ...]:
    """The parts of one tensor, unless it holds what its codec cannot carry."""
    if not CODECS[codec].exact and not np.isfinite(value).all():
        raise BadTensors(
            f"'{name}' holds a number that is not finite, which {codec} cannot carry; "
            "train again from an older snapshot or with a lower rate."
        )
    return CODECS[codec].encode(value)


class Writer:
    """Fills a body in memory, tensor by tensor, in any order."""

    def __init__(self, codec: str, like: Shapes) -> None:
        self.plan, self.name, self.codec = plan_for(codec, like), codec, CODECS[codec]
        self.file = io.BytesIO()  # it hands over its memory, where bytes(bytearray) copies
        self.file.seek(self.plan.size - 1)
        self.file.write(b"\0")  # so that it takes its memory once
        self.file.seek(0)
        self.file.write(self.plan.header)

    def put(self, name: str, value: Array) -> tuple[Raw, ...]:
        """Writes one tensor; returns its parts."""
        parts = encoded(name, value, self.name)
        self.place(name, parts)
        return parts

    def place(self, name: str, parts: tuple[Raw, ...]) -> None:
        """Writes one tensor that is encoded already."""
        for place, part in zip(self.plan.places[name], parts, strict=True):
            self.file.seek(place.begin)
            self.file.write(bytes_of(part))

    def body(self) -> bytes:
        """What was written."""
        return self.file.getvalue()


def bytes_of(part: Raw) -> memoryview:
    """Its bytes, in order, without a copy if they lie in order."""
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data


# --- layout -------------------------------------------------------------------------------------


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


def refuse_unless_planned(body: memoryview, plan: Plan) -> None:
    """Its length and its header must be those of the plan."""
    codec = plan.entries["__metadata__"]["codec"]
    if len(body) > plan.size:
        raise BadTensors(
            f"The body has {len(body)} bytes; {codec} makes {plan.size} of these tensors."
        )
    if body[: len(plan.header)] != plan.header:
        try:
            raise BadTensors(why_refused(body, plan))
        except RecursionError:
            raise BadTensors("The header is nested too deeply.") from None
    if len(body) < plan.size:
        raise BadTensors(f"The body is cut short: it has {len(body)} of {plan.size} bytes.")


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
