"""Reading and answering: what comes is bounded before it is read, who leaves is let go."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from blocktrain import metrics
from blocktrain.errors import BadInput, BlockTrainError, NotAllowed, Unreachable
from blocktrain.services.gateway import openai
from blocktrain.services.gateway.fair import Full
from blocktrain.services.gateway.openai import Wrong
from blocktrain.wire import messages

log = logging.getLogger(__name__)

STANDSTILL = 30.0  # seconds that a request's body may take, and that a reader may read nothing
HEARTBEAT = 10.0  # seconds of silence in a stream; proxies give up after 30 or 60
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
STREAM = "text/event-stream"


class TooLong(BadInput):
    """A body beyond the limit."""


class Elsewhere(NotAllowed):
    """A page of another site asks, which is not its visitor's wish."""


class TooOften(NotAllowed):
    """Said more often than is any use."""


class Left(Exception):
    """The reader is gone, or has stood still for so long that it may as well be."""


class Nothing(BadInput):
    """A path where nothing is."""


STATUS_OF: list[tuple[type[BlockTrainError], int]] = [
    (Full, 429),
    (TooOften, 429),
    (Elsewhere, 403),
    (NotAllowed, 401),
    (TooLong, 413),
    (Nothing, 404),
    (BadInput, 400),
    (Unreachable, 503),
]


def status_of(error: BlockTrainError) -> int:
    """The code of an error's answer."""
    if isinstance(error, Wrong) and error.code == "model_not_found":
        return 404
    return next((code for kind, code in STATUS_OF if isinstance(error, kind)), 500)


def say(told: Any, status: int = 200) -> Response:
    """Anything as JSON."""
    return Response(msgspec.json.encode(told), status, media_type="application/json")


def refused(error: BlockTrainError) -> Response:
    """An error as an answer."""
    status = status_of(error)
    response = say(openai.error(status, error), status)
    if status in (429, 503):
        response.headers["Retry-After"] = "2"
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def broken() -> BlockTrainError:
    """What a bug sounds like from outside; the log has the rest."""
    return BlockTrainError("Something broke inside the gateway; its owner finds more in the log.")


async def read(request: Request, limit: int) -> bytes:
    """A body from a stranger: its length is checked before and while it is read."""
    body, long = bytearray(), TooLong(f"A request here has at most {limit} bytes; send less.")
    if int(request.headers.get("content-length") or 0) > limit:
        raise long
    try:
        async with asyncio.timeout(STANDSTILL):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise long
    except TimeoutError:
        raise Unreachable("The request did not come in time; send it again.") from None
    return bytes(body)


class Live(Response):
    """An answer in the making: it begins with its first chunk, and ends when its reader goes away.

    Until the first chunk, or heartbeat, an error is an answer of its own; later it is an event.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], media_type: str, route: str) -> None:
        streamed = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(None, 200, {**HEADERS, **streamed}, media_type)
        del self.headers["Content-Length"]
        self.chunks, self.route = chunks, route
        self.began, self.spoken = False, asyncio.get_running_loop().time()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        async def patient(message: Message) -> None:
            try:
                async with asyncio.timeout(STANDSTILL):
                    await send(message)
            except OSError:  # TimeoutError is one too
                raise Left from None

        work = (self.talk(scope, receive, patient), gone(), self.beat(patient))
        tasks = [asyncio.create_task(each) for each in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception) and not isinstance(end, Left):
                raise end

    async def talk(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Says whatever there is to say."""
        try:
            async with aclosing(self.chunks) as chunks:
                async for chunk in chunks:
                    await self.speak(chunk, send)
        except BlockTrainError as error:
            await self.fail(error, scope, receive, send)
        except Left:
            raise
        except Exception:
            log.exception("a bug: this answer ends here")
            await self.fail(broken(), scope, receive, send)
        else:
            await send({"type": "http.response.body", "body": b""})
        metrics.ANSWERS.labels(self.route, self.status_code).inc()

    async def speak(self, chunk: bytes, send: Send) -> None:
        """One chunk; before the first one, the head."""
        self.spoken = asyncio.get_running_loop().time()
        if not self.began:
            self.began = True
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
        await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def fail(
        self, error: BlockTrainError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """An error as the whole answer, or as its last event."""
        response = refused(error)
        if self.began:
            await self.speak(event(openai.error(response.status_code, error)), send)
            await send({"type": "http.response.body", "body": b""})
            return
        self.status_code = response.status_code
        response.headers.update(HEADERS)
        await response(scope, receive, send)

    async def beat(self, send: Send) -> None:
        """Keeps a silent stream from looking dead. Other answers have no room for that."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(HEARTBEAT / 4)
            if self.media_type == STREAM and clock() > self.spoken + HEARTBEAT:
                await self.speak(b": still here\n\n", send)


def event(told: Any) -> bytes:
    """A server-sent event. JSON has no line ends of its own."""
    return b"data: " + msgspec.json.encode(told) + b"\n\n"


def refused_in_our_words(error: BlockTrainError) -> Response:
    """An error as stages read it, who speak as workers do (wire/messages.py)."""
    response = refused(error)
    told = Response(messages.encode(messages.Refused(str(error)[:400])), response.status_code)
    told.headers.update({k: v for k, v in response.headers.items() if k != "content-length"})
    return told


Handler = Callable[[Request], Awaitable[Response]]
Refusal = Callable[[BlockTrainError], Response]


def guarded(handler: Handler, refusal: Refusal = refused) -> Handler:
    """A handler whose errors are answers."""

    async def answer(request: Request) -> Response:
        try:
            response = await handler(request)
        except ClientDisconnect:
            response = Response(status_code=400)
        except BlockTrainError as error:
            response = refusal(error)
        if not isinstance(response, Live):
            response.headers.update(HEADERS)
            route = request.scope["route"].path if "route" in request.scope else "?"
            metrics.ANSWERS.labels(route, response.status_code).inc()
        return response

    return answer


async def nothing_here(request: Request, error: Exception) -> Response:
    """For paths and methods that mean nothing."""
    response = refused(Nothing("There is nothing here; the playground is at the root."))
    response.headers.update(HEADERS)
    return response
