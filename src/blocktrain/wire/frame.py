"""One length-prefixed frame: a message of wire/serving.py and, behind it, a body of bytes.

    u32 bytes of the message | u32 bytes of the body | message as JSON | body

Numbers are little-endian. A reader first hears the message (`hear`), which is bounded by MAX_HEADER
before anything is read, then says how long the body must be (`body`): nothing is kept of a body
that nobody expects. The first byte of a frame may take for ever; the rest must come in time.
"""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from blocktrain.errors import BadInput, Unreachable
from blocktrain.wire.messages import Message
from blocktrain.wire.serving import MAX_HEADER, SAID

PREFIX = struct.Struct("<II")
PATIENCE = 5.0  # seconds that a frame may take from its first byte on, and besides
SLOWEST = 100_000  # as long as its bytes need at so many a second: a tenth of a poor upload
TOGETHER = 16 * 1024  # bytes: a body up to this goes out with its message, as one TLS record
PIECE = 64 * 1024  # bytes thrown away at a time

DECODER = msgspec.json.Decoder(SAID)  # made once, by the thread that imports this (messages.MAKING)


class Head(NamedTuple):
    """What is known of a frame before its body is read."""

    said: SAID
    body: int
    """Bytes of the body, as the other side claims."""
    size: int
    """Bytes of the whole frame."""
    deadline: float
    """When the whole frame must have come, by the event loop's clock."""


def write(writer: asyncio.StreamWriter, said: Message, body: bytes = b"") -> int:
    """Hands one frame to the system; returns how many bytes it has."""
    message = msgspec.json.encode(said)
    if len(message) > MAX_HEADER:
        raise BadInput(f"The message has {len(message)} bytes; it must have at most {MAX_HEADER}.")
    head = PREFIX.pack(len(message), len(body)) + message
    if len(body) <= TOGETHER:
        writer.write(head + body)
    else:
        writer.write(head)
        writer.write(body)
    return len(head) + len(body)


async def hear(reader: asyncio.StreamReader) -> Head | None:
    """The next frame's message, or None if the other side has hung up."""
    try:
        begun = await reader.readexactly(1)
    except asyncio.IncompleteReadError:
        return None
    begin = asyncio.get_running_loop().time()
    async with in_time(begin + PATIENCE):
        prefix = begun + await reader.readexactly(PREFIX.size - 1)
        length, body = PREFIX.unpack(prefix)
        if not 0 < length <= MAX_HEADER:
            raise BadInput(f"A message of {length} bytes was told; 1 to {MAX_HEADER} must come.")
        said = decode(await reader.readexactly(length))
    size = PREFIX.size + length + body
    return Head(said, body, size, begin + PATIENCE + size / SLOWEST)


def decode(message: bytes) -> SAID:
    """Bytes from a stranger -> a message, or a sentence."""
    try:
        said: SAID = DECODER.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        words = str(error)[:200]  # it may quote the stranger at length
        raise BadInput(f"The message is not understood ({words}); upgrade one side.") from None
    return said


async def body(reader: asyncio.StreamReader, head: Head, expected: int) -> bytes:
    """The frame's body, if it is as long as expected. What is kept grows as it comes."""
    refuse_other_length(head, expected)
    async with in_time(head.deadline):
        return await reader.readexactly(head.body)


async def skip(reader: asyncio.StreamReader, head: Head, expected: int) -> None:
    """Reads the body and keeps nothing of it."""
    refuse_other_length(head, expected)
    left = head.body
    async with in_time(head.deadline):
        while left:
            left -= len(await reader.readexactly(min(PIECE, left)))


def refuse_other_length(head: Head, expected: int) -> None:
    """Raises, before anything is read."""
    if head.body != expected:
        raise BadInput(
            f"A body of {head.body} bytes came with '{head.said.__struct_config__.tag}'; "
            f"it must have {expected}."
        )


@asynccontextmanager
async def in_time(deadline: float) -> AsyncIterator[None]:
    """What is read in here must come before the deadline, and to its end."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise BadInput("A frame took too long to come; it must come without a pause.") from None
    except asyncio.IncompleteReadError:
        raise Unreachable("The other side hung up within a frame; try again.") from None
