"""Lossless compression with the model's own probabilities, and back.

An archive is, in this order (numbers are little-endian):

    6 bytes    magic
    1 byte     format
    32 bytes   seal: sha256 of all that follows, so that damage is told from what differs here
    4 bytes    length of the header, at most 4 KiB
               header: JSON, what the archive needs to be opened
               payload: 32-bit words of a range code

A decoder follows an encoder only if both compute the same probabilities to the last bit, so both
take the same `walk`: the text is cut into S streams that advance together, one byte a step, with
the same shapes. What else moves last bits (model, processor, build) is in the header, and
an archive refuses to open where that differs.

Letters: S streams, T steps, V vocabulary.
"""

import hashlib
import platform
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch
from constriction import stream
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.errors import BadArchive, BadInput, BadModel
from blocktrain.learning.device import threads
from blocktrain.learning.model import START, VOCABULARY, Cache, Model, Shape
from blocktrain.terms import Digest, Progress, silent

MAGIC = b"\x89BTA\r\n"  # not text, and spoilt by a transfer that changes line ends, as PNG's
FORMAT = 1
PRELUDE = struct.Struct("<6sB32sI")
SEALED_FROM = PRELUDE.size - 4  # the seal covers the header's length too

MAX_HEADER = 4096
MAX_TEXT = 2**32  # bytes; one text is held in memory
MAX_STREAMS = 64
STREAM_BYTES = 512  # shorter streams would lose too much: each starts without context
CACHE_BYTES = 2**28  # keys and values of all streams; fewer streams where a model is large

FLOOR = 2.0**-20  # least probability of a byte: any can be coded, for 0.0004 bits a byte
LEAST_BITS = 3e-4
"""Fewest bits of a byte: the 255 others keep the floor, and 255 * 2**-20 / ln 2 = 3.5e-4."""
SLACK_BITS = 64  # what a range coder may still hold back at the end: its 64-bit state

Bytes = NDArray[np.uint8]
Probabilities = NDArray[np.float64]
Code = Callable[[int, Probabilities], Bytes]
"""(step, probabilities (S, V)) -> that step's byte of each stream, (S,)."""

Sha256 = Annotated[Digest, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
FAMILY = stream.model.Categorical(perfect=False)

NOT_THE_SAME = (
    "The archive is whole but does not open to the text that was put in, so this machine computes "
    "otherwise than the one that made it; open it there."
)


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must agree before an archive can be opened."""

    model: Sha256
    machine: Annotated[str, msgspec.Meta(pattern="^[ -~]*$", max_length=1024)]
    bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_TEXT)]
    digest: Sha256
    """Of the text."""
    streams: Annotated[int, msgspec.Meta(ge=1, le=MAX_STREAMS)]
    window: Annotated[int, msgspec.Meta(ge=1)]
    payload: Annotated[int, msgspec.Meta(ge=0, multiple_of=4)]
    """Bytes of code that follow."""


@dataclass(frozen=True)
class Cut:
    """How a text lies in its streams: in order, equally long, but the last may be one shorter."""

    bytes: int
    streams: int

    @property
    def steps(self) -> int:
        """Bytes of the longest stream."""
        return -(-self.bytes // self.streams)

    @property
    def long(self) -> int:
        """How many streams, the first ones, have a byte at the last step."""
        return self.bytes - self.streams * max(0, self.steps - 1)

    def coded(self, step: int) -> int:
        """How many streams have a byte at this step."""
        return self.long if step == self.steps - 1 else self.streams

    def apart(self, text: Bytes) -> Bytes:
        """The text as (S, T), zeros where a stream is shorter."""
        apart_ST = np.zeros((self.streams, self.steps), np.uint8)
        end = self.long * self.steps
        apart_ST[: self.long] = text[:end].reshape(self.long, self.steps)
        apart_ST[self.long :, :-1] = text[end:].reshape(
            self.streams - self.long, max(0, self.steps - 1)
        )
        return apart_ST

    def together(self, apart_ST: Bytes) -> Bytes:
        """The text again."""
        return np.concatenate((apart_ST[: self.long].ravel(), apart_ST[self.long :, :-1].ravel()))


def cut_for(length: int, shape: Shape) -> Cut:
    """More streams are faster, but each starts without context and needs keys and values."""
    return Cut(length, max(1, min(most_streams(shape), length // STREAM_BYTES)))


def most_streams(shape: Shape) -> int:
    """How many streams this model may have at once."""
    keys_and_values = 2 * 4 * shape.window * shape.width * shape.blocks * shape.layers
    return max(1, min(MAX_STREAMS, CACHE_BYTES // keys_and_values))


def refed(window: int) -> int:
    """Bytes fed again when the window is full, so that the next ones have context."""
    return max(1, window // 2)


def compress(model: Model, model_digest: Digest, text: bytes, progress: Progress = silent) -> bytes:
    """The text as an archive that only this model on this machine opens."""
    if len(text) > MAX_TEXT:
        raise BadInput(f"The text has {len(text)} bytes; compress at most {MAX_TEXT} at once.")
    cut = cut_for(len(text), model.shape)
    apart_ST = cut.apart(np.frombuffer(text, np.uint8))
    encoder = stream.queue.RangeEncoder()

    def encode(step: int, probabilities_SV: Probabilities) -> Bytes:
        column_S = apart_ST[: len(probabilities_SV), step]
        encoder.encode(column_S.astype(np.int32), FAMILY, probabilities_SV)
        return column_S

    walk(model, cut, encode, progress)
    payload = encoder.get_compressed().astype("<u4").tobytes()
    header = Header(
        model=model_digest,
        machine=machine(model.device),
        bytes=len(text),
        digest=Digest(hashlib.sha256(text).hexdigest()),
        streams=cut.streams,
        window=model.shape.window,
        payload=len(payload),
    )
    return pack(header, payload)


def decompress(
    model: Model, model_digest: Digest, archive: bytes, progress: Progress = silent
) -> bytes:
    """The text of an archive; never other bytes than were put in."""
    header, payload = unpack(archive)
    refuse_elsewhere(header, model, model_digest)
    refuse_impossible(header, model.shape)
    cut = Cut(header.bytes, header.streams)
    apart_ST = np.zeros((cut.streams, cut.steps), np.uint8)
    decoder = stream.queue.RangeDecoder(np.frombuffer(payload, "<u4").astype(np.uint32))

    def decode(step: int, probabilities_SV: Probabilities) -> Bytes:
        try:
            column_S: Bytes = decoder.decode(FAMILY, probabilities_SV).astype(np.uint8)
        except AssertionError:  # how the coder says that no text has this code
            raise BadArchive(NOT_THE_SAME) from None
        apart_ST[: len(column_S), step] = column_S
        return column_S

    walk(model, cut, decode, progress)
    text = cut.together(apart_ST).tobytes()
    if hashlib.sha256(text).hexdigest() != header.digest:
        raise BadArchive(NOT_THE_SAME)
    return text


def code_length_bits(archive: bytes) -> int:
    """Bits of the payload alone: what the model's probabilities cost."""
    header, _ = unpack(archive)
    return 8 * header.payload


@torch.no_grad()
@threads(1)  # whatever the caller's number: archives must not depend on it
def walk(model: Model, cut: Cut, code: Code, progress: Progress = silent) -> None:
    """Advances all streams together, one byte a step; both directions do exactly this.

    Each stream begins after START. `code` is given what the model expects next and says what the
    bytes are: an encoder knows them, a decoder reads them. When the window is full, its second half
    is fed again in one pass.
    """
    window = model.shape.window
    known_ST = torch.full((cut.streams, 1), START, device=model.device)
    cache, new = Cache(cut.streams, window), 1
    for step in range(cut.steps):
        if cache.filled + new > window:
            cache, new = Cache(cut.streams, window), known_ST.shape[1]
        log_SV = model.log_probabilities(known_ST[:, -new:], cache)[:, -1]
        column_S = code(step, floored(log_SV)[: cut.coded(step)])
        progress(min((step + 1) * cut.streams, cut.bytes), cut.bytes)
        if step + 1 < cut.steps:  # so that every stream had a byte
            newest_S = torch.from_numpy(column_S.astype(np.int64)).to(model.device)
            known_ST = torch.cat((known_ST, newest_S[:, None]), 1)[:, -refed(window) :]
            new = 1


def floored(log_SV: Tensor) -> Probabilities:
    """Probabilities of which none is too small to be coded."""
    probabilities_SV = log_SV.cpu().double().exp()
    if not bool(torch.isfinite(probabilities_SV).all()):
        raise BadModel("The model's probabilities are not finite; go back to an older checkpoint.")
    floored_SV: Probabilities = (probabilities_SV * (1 - VOCABULARY * FLOOR) + FLOOR).numpy()
    return floored_SV


def pack(header: Header, payload: bytes) -> bytes:
    """Header and payload under one seal."""
    told = msgspec.json.encode(header)
    seal = hashlib.sha256(struct.pack("<I", len(told)) + told + payload).digest()
    return PRELUDE.pack(MAGIC, FORMAT, seal, len(told)) + told + payload


def unpack(archive: bytes) -> tuple[Header, memoryview]:
    """What `pack` joined, whole and undamaged; or a sentence that says what is wrong with it."""
    if not archive or archive[: len(MAGIC)] != MAGIC[: len(archive)]:
        raise BadArchive("This is not an archive; give a file that 'blocktrain compress' wrote.")
    form = int.from_bytes(archive[len(MAGIC) : len(MAGIC) + 1])
    if form > FORMAT:
        raise BadArchive(
            f"The archive was made by a newer version (format {form}, this one reads {FORMAT}); "
            "upgrade blocktrain."
        )
    if len(archive) < PRELUDE.size:
        raise BadArchive("The archive is cut short; copy it again.")
    *_, seal, length = PRELUDE.unpack_from(archive)
    if form != FORMAT or length > MAX_HEADER:
        raise BadArchive("The archive is damaged in its first bytes; copy it again.")
    body = memoryview(archive)[PRELUDE.size :]
    if len(body) < length:
        raise BadArchive("The archive is cut short; copy it again.")
    try:
        header = msgspec.json.decode(body[:length], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadArchive("The archive is damaged in its header; copy it again.") from None
    payload = body[length:]
    if len(payload) < header.payload:
        raise BadArchive(
            f"The archive is cut short ({len(payload)} of {header.payload} bytes of code); "
            "copy it again."
        )
    whole = hashlib.sha256(memoryview(archive)[SEALED_FROM:]).digest() == seal
    if not whole or len(payload) > header.payload:
        raise BadArchive("The archive is damaged; copy it again.")
    return header, payload


def refuse_elsewhere(header: Header, model: Model, model_digest: Digest) -> None:
    """Raises where the probabilities would not be the encoder's."""
    if header.model != model_digest:
        raise BadArchive(
            f"The archive was made with another model ({header.model[:16]}, this one is "
            f"{model_digest[:16]}); open it with that one."
        )
    here = machine(model.device)
    if header.machine != here:
        there, this = (text.split("; ") for text in (header.machine, here))
        raise BadArchive(
            "The archive was made on another machine or build "
            f"({', '.join(part for part in there if part not in this) or 'of fewer parts'}; here: "
            f"{', '.join(part for part in this if part not in there) or 'the same and more'}), "
            "which computes other last digits; open it there."
        )


def refuse_impossible(header: Header, shape: Shape) -> None:
    """Raises for sizes that no honest archive has, before anything is allocated for them."""
    most = int((8 * header.payload + SLACK_BITS) / LEAST_BITS)
    if header.bytes > most:
        raise BadArchive(
            f"The archive claims {header.bytes} bytes of text, but its {header.payload} bytes of "
            f"code hold {most} at most; do not trust where it came from."
        )
    if header.streams != cut_for(header.bytes, shape).streams or header.window != shape.window:
        raise BadArchive(
            f"The archive claims {header.streams} streams and a window of {header.window}, which "
            "do not fit its text and model; do not trust where it came from."
        )


def machine(where: torch.device) -> str:
    """All that may change the last bits of a computation, for people to read and to compare."""
    build = hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:8]
    device = torch.cuda.get_device_name(where) if where.type == "cuda" else where.type
    parts = [
        f"torch {torch.__version__} build {build}",
        f"constriction {version('constriction')}",
        f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        processor(),
        device,
    ]
    clean = (part.replace(";", ",").encode("ascii", "replace").decode() for part in parts)
    return "; ".join("".join(c if c.isprintable() else "?" for c in part) for part in clean)


def processor() -> str:
    """The processor's model; Python knows it everywhere but on Linux."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "processor unknown"
