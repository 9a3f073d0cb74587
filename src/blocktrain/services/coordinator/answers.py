"""Reading and answering: what comes is bounded before it is read, what goes is a message."""

import asyncio
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from blocktrain.aggregation.ledger import (
    WorkerId,
)
from blocktrain.disk import errors_are_clear
from blocktrain.errors import (
    BadInput,
    BadRun,
    BlobTooLarge,
    BlockTrainError,
    CannotSave,
    NoBlob,
    NotAllowed,
    OtherProtocol,
    Unreachable,
)
from blocktrain.services.coordinator.door import TooOften
from blocktrain.wire import messages, signing
from blocktrain.wire.messages import MAX_MESSAGE, Message

CHUNK = 2**20
STANDSTILL = 30.0  # seconds without a byte (a message: in all) after which an upload is given up
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

NUMBER = re.compile("[0-9]{1,15}")
RANGE = re.compile("bytes=([0-9]{1,15})-")


class NoLength(BadInput):
    """A blob that does not say how long it is."""


class BeyondEnd(BadInput):
    """A range that begins where nothing is."""

    def __init__(self, size: int) -> None:
        super().__init__(f"There are only {size} bytes.")
        self.size = size


STATUS_OF: list[tuple[type[BlockTrainError], int]] = [
    (TooOften, 429),
    (NotAllowed, 403),
    (OtherProtocol, 426),
    (BlobTooLarge, 413),
    (NoBlob, 404),
    (NoLength, 411),
    (BeyondEnd, 416),
    (BadInput, 400),
    (CannotSave, 503),
    (Unreachable, 503),
    (BadRun, 503),
]


def say(message: Message) -> Response:
    """A message as an answer."""
    return Response(messages.encode(message), media_type="application/json")


def refused(error: BlockTrainError) -> Response:
    """An error as an answer."""
    code = next((code for kind, code in STATUS_OF if isinstance(error, kind)), 500)
    response = say(messages.Refused(str(error)[:400]))
    response.status_code = code
    if code in (429, 503):
        response.headers["Retry-After"] = "2"
    if isinstance(error, BeyondEnd):
        response.headers["Content-Range"] = f"bytes */{error.size}"
    return response


async def nothing_here(request: Request, error: Exception) -> Response:
    """For paths and methods that mean nothing."""
    return refused(NoBlob("There is nothing here; the dashboard is at the root."))


async def read(request: Request, kind: type[messages.M]) -> messages.M:
    """A message from a stranger: its length is checked before and while it is read."""
    body = bytearray()
    if int(request.headers.get("content-length") or 0) > MAX_MESSAGE:
        raise BlobTooLarge(f"A message has at most {MAX_MESSAGE} bytes.")
    try:
        async with asyncio.timeout(STANDSTILL):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_MESSAGE:
                    raise BlobTooLarge(f"A message has at most {MAX_MESSAGE} bytes.")
    except TimeoutError:
        raise Unreachable("The message did not come in time; send it again.") from None
    return messages.decode(bytes(body), kind)


async def spool(request: Request, file: Any, length: int, patience: asyncio.Timeout) -> None:
    """An upload into a file, no longer than it said, as long as it goes on."""
    got, clock = 0, asyncio.get_running_loop().time
    async for chunk in request.stream():
        patience.reschedule(clock() + STANDSTILL)
        got += len(chunk)
        if got > length:
            raise BlobTooLarge("The upload is longer than its Content-Length.")
        with errors_are_clear(Path(tempfile.gettempdir())):
            file.write(chunk)


def verify(signed: messages.Signed, who: str, purpose: str) -> None:
    """Raises unless `who` signed this."""
    right = signing.verify(who, signed.body, purpose, bytes.fromhex(signed.signature))
    if signed.by != who or not right:
        raise NotAllowed("The signature is not that of this worker.")


def same(session: WorkerId, told: str) -> None:
    """Raises unless a worker speaks for itself."""
    if session != told:
        raise NotAllowed("You speak for another worker than the one who joined.")


def only(found: list[Any], kind: str, told: str) -> str:
    """The one that was meant."""
    if len(found) != 1:
        raise BadInput(f"{len(found)} {kind}s begin with {told}; give more of it.")
    return str(found[0])


def number(text: str) -> int:
    """A number in a path; int() itself fails beyond 4,300 digits."""
    if not NUMBER.fullmatch(text):
        raise BadInput(f"{text[:80]!r} is no number of a block or a round; ask for an assignment.")
    return int(text)


def range_start(request: Request, size: int) -> int:
    """Where the answer begins: `Range: bytes=N-`, or 0."""
    header = request.headers.get("range", "bytes=0-")
    if not (wanted := RANGE.fullmatch(header)):
        raise BadInput("Only ranges like bytes=1000- are served.")
    start = int(wanted[1])
    if start and start >= size:
        raise BeyondEnd(size)
    return start


def partial_content(chunks: Iterator[bytes], start: int, size: int) -> Response:
    """A body from `start` on."""
    headers = {"Content-Length": str(size - start), "Accept-Ranges": "bytes"}
    if start:
        headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
    return StreamingResponse(
        chunks, 206 if start else 200, headers, media_type="application/octet-stream"
    )


def file_chunks(path: Path, start: int) -> Iterator[bytes]:
    """A file from `start` on."""
    with path.open("rb") as file:
        file.seek(start)
        while chunk := file.read(CHUNK):
            yield chunk
