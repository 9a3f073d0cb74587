"""The worker's and the owner's side of HTTP: say, ask, fetch, send, and do not give up easily.

Whatever fails on the way is tried again for as long as the link's patience lasts; whatever the
coordinator refuses is raised at once, with its own words. A link may be used by several threads;
one file is fetched by one of them at a time. Proxies are those of the environment
(wire/transport.py).
"""

import hashlib
import os
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import BinaryIO, TypeVar

import httpx

from blocktrain.disk import errors_are_clear, sync, write_all
from blocktrain.errors import (
    BadInput,
    BlobTooLarge,
    BlockTrainError,
    NoBlob,
    NotAllowed,
    OtherProtocol,
    RefusedBlob,
    Unreachable,
)
from blocktrain.terms import Digest, Progress, silent
from blocktrain.wire.messages import MAX_MESSAGE, M, Message, Refused, decode, encode
from blocktrain.wire.throttle import NO_LIMITS, PIECE, Backend, Limits, Meter, Moved
from blocktrain.wire.transport import Transport, checked, proxy_for

PATIENCE = 6 * 3600.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0  # seconds; the mean wait is half of it
CONNECT_TIMEOUT, READ_TIMEOUT = 10.0, 60.0
RANGE = re.compile(r"bytes (\d{1,15})-\d{1,15}/(\d{1,15}|\*)")
SECONDS = re.compile(r"\d{1,9}")
NO_PASSAGE = "The proxy wants a name and a password; write it as http://NAME:PASSWORD@HOST:PORT."

T = TypeVar("T")


class Trouble(Exception):
    """An attempt failed, and another one may not."""

    def __init__(self, why: str, pause: float = 0.0, progress: bool = False) -> None:
        super().__init__(why)
        self.pause = pause  # seconds that the coordinator asks for
        self.progress = progress  # part of it arrived and need not come again


class Link:
    """A way to one coordinator."""

    def __init__(
        self,
        url: str,
        limits: Limits = NO_LIMITS,
        verify: ssl.SSLContext | None = None,
        patience: float = PATIENCE,
    ) -> None:
        address = checked(url)
        self.url = str(address).rstrip("/")
        self.patience = patience
        self.connect_timeout, self.read_timeout = CONNECT_TIMEOUT, READ_TIMEOUT
        self.bearer: str | None = None
        self.stop = threading.Event()
        """Ends all waiting for another attempt; attempts under way are not touched."""
        self.note: Callable[[str], None] = lambda words: None
        """Told once when the coordinator is gone, once when it is back."""
        self.gone = False
        self.changing = threading.Lock()
        self.meter = Meter(limits)
        if address.scheme == "https" and verify is None:
            verify = httpx.create_ssl_context(trust_env=False)
        proxy = proxy_for(self.url)
        self.through = f" through {proxy.url.netloc.decode()}" if proxy else ""
        self.client = httpx.Client(
            transport=Transport(verify, Backend(self.meter), proxy),
            headers={"User-Agent": "blocktrain", "Accept-Encoding": "identity"},
            trust_env=False,  # only config.py reads the environment
        )
        self.client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))

    @property
    def moved(self) -> Moved:
        """Bytes at the socket so far, with headers and encryption."""
        return self.meter.moved

    def say(self, path: str, message: Message, *kinds: type[M]) -> M:
        """Posts a message, returns the answer. May be heard twice if an answer is lost."""
        return self._patiently(lambda: self._hear("POST", path, encode(message), kinds))

    def ask(self, path: str, *kinds: type[M]) -> M:
        """Gets a message."""
        return self._patiently(lambda: self._hear("GET", path, None, kinds))

    def fetch(
        self, path: str, digest: Digest, into: Path, limit: int, progress: Progress = silent
    ) -> None:
        """Gets a blob; a part that an earlier attempt or process left is not fetched again."""
        part = into.with_name(into.name + ".part")
        for _ in range(2):  # a wrong part may be our own old one, so it is fetched anew once
            self._patiently(lambda: self._download(path, part, limit, progress))
            with errors_are_clear(into):
                with part.open("rb") as file:
                    actual = hashlib.file_digest(file, "sha256").hexdigest()
                if actual == digest:
                    sync(part)
                    part.replace(into)
                    sync(into.absolute().parent)
                    return
                part.unlink()
        raise RefusedBlob(
            f"What {self._at(path)} gives has digest {actual}, not {digest}; "
            "tell the run's owner if it happens again."
        )

    def send(self, path: str, body: bytes | memoryview | Path) -> None:
        """Puts a blob."""
        if not isinstance(body, Path):
            view = memoryview(body).cast("B")
            return self._patiently(lambda: self._put(path, in_pieces(view), len(view)))
        try:
            with body.open("rb") as file:
                length = os.fstat(file.fileno()).st_size
                self._patiently(lambda: self._put(path, read_in_pieces(file, length), length))
        except OSError as error:
            raise BadInput(
                f"{body} cannot be read ({error.strerror}); check the path and who may read it."
            ) from None

    def close(self) -> None:
        """Hangs up."""
        self.client.close()

    def _hear(self, method: str, path: str, body: bytes | None, kinds: tuple[type[M], ...]) -> M:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        with self._answer(method, path, headers, body) as response:
            message = self._message(response, *kinds, Refused)
        if isinstance(message, kinds):
            return message
        assert isinstance(message, Refused)
        raise BadInput(printable(message.why))

    def _put(self, path: str, pieces: Iterator[bytes], length: int) -> None:
        self.meter.refuse_beyond_limit(length)  # before it is sent in part
        headers = {"Content-Length": str(length)}
        with self._answer("PUT", path, headers, pieces) as response:
            self._body(response)

    def _download(self, path: str, part: Path, limit: int, progress: Progress) -> None:
        """Goes on where the part ends, until it is all there is."""
        start = part.stat().st_size if part.exists() else 0
        if start > limit:
            start = 0
        headers = {"Range": f"bytes={start}-"} if start else {}
        with self._answer("GET", path, headers, also=416 if start else 200) as response:
            if response.status_code == 416:
                return  # nothing begins there: it is all there, or of another blob
            start, total = self._extent(response, start)
            self._refuse_beyond(limit, total, part)
            with open_at(part, start) as file:
                done = start
                try:
                    for chunk in response.iter_raw():
                        self._refuse_beyond(limit, done + len(chunk), part)
                        with errors_are_clear(part):
                            write_all(file, chunk)
                        done += len(chunk)
                        self._is_back()
                        progress(done, max(done, total))
                except httpx.TransportError as error:
                    raise Trouble(words_of(error), progress=done > start) from None
        if done < total:  # a range may be answered by less of it
            raise Trouble("it gave less than it has", progress=done > start)

    def _extent(self, response: httpx.Response, start: int) -> tuple[int, int]:
        """Where an answer's body begins in the blob, and where the blob ends (0: unknown)."""
        length = int(response.headers.get("Content-Length", 0))  # h11 saw to it being a number
        if response.status_code != 206:  # it may ignore the range and give all of it
            return 0, length
        extent = RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if extent is None or int(extent[1]) != start:
            raise BadInput(
                f"{self.url} answered with another range than the one from {start}; "
                "tell the run's owner."
            )
        return start, start + length if extent[2] == "*" else int(extent[2])

    def _refuse_beyond(self, limit: int, length: int, part: Path) -> None:
        if length > limit:
            part.unlink(missing_ok=True)
            raise BlobTooLarge(
                f"{self.url} gives a blob of {length} bytes or more where at most {limit} are "
                "taken; tell the run's owner."
            )

    @contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes | Iterator[bytes] | None = None,
        also: int = 200,
    ) -> Iterator[httpx.Response]:
        """A good answer whose body is still on its way; raises what any other one means."""
        if self.bearer is not None:
            headers = {**headers, "Authorization": f"Bearer {self.bearer}"}
        timeout = httpx.Timeout(self.read_timeout, connect=self.connect_timeout)
        try:
            with self.client.stream(
                method, self._at(path), headers=headers, content=body, timeout=timeout
            ) as response:
                if not response.is_success and response.status_code != also:
                    raise self._meaning(response)
                yield response
        except (httpx.LocalProtocolError, UnicodeEncodeError):
            raise BadInput(
                f"The token for {self.url} has characters that cannot be sent; copy it again."
            ) from None
        except httpx.ProxyError as error:
            if str(error).startswith("407"):
                raise NotAllowed(NO_PASSAGE) from None
            raise Trouble(f"the proxy answers {words_of(error)}") from None
        except httpx.TransportError as error:
            raise Trouble(words_of(error)) from None

    def _meaning(self, response: httpx.Response) -> Exception:
        """What an answer means that is not a good one."""
        status = response.status_code
        if status == 429 or status >= 500:
            after = response.headers.get("Retry-After", "")
            pause = float(after) if SECONDS.fullmatch(after) else 0.0
            return Trouble(f"it answers {status}", min(pause, LONGEST_PAUSE))
        if status < 400:
            place = printable(response.headers.get("Location", "nowhere"))[:200]
            return BadInput(
                f"{self.url} sends us on to {place}, which is not followed; "
                "if you trust that place, give its URL."
            )
        if status == 407:
            return NotAllowed(NO_PASSAGE)
        kind: type[BlockTrainError] = BadInput
        if status in (401, 403):
            kind = NotAllowed
        elif status == 404:
            kind = NoBlob
        elif status == 426:
            kind = OtherProtocol
        return kind(printable(self._message(response, Refused).why))

    def _message(self, response: httpx.Response, *kinds: type[M]) -> M:
        body = self._body(response)
        try:
            return decode(body, *kinds)
        except BadInput as error:
            raise BadInput(
                f"{response.url} answered {response.status_code} with something else than what a "
                f"coordinator says ({printable(str(error))}); check the URL and both versions."
            ) from None

    def _body(self, response: httpx.Response) -> bytes:
        """All of an answer's body, or a sentence before it is too much."""
        body = bytearray()
        self._refuse_long(response, int(response.headers.get("Content-Length", 0)))
        for chunk in response.iter_raw():
            body += chunk
            self._refuse_long(response, len(body))
        return bytes(body)

    def _refuse_long(self, response: httpx.Response, length: int) -> None:
        if length > MAX_MESSAGE:
            raise BadInput(
                f"{response.url} answered with more than the {MAX_MESSAGE} bytes that are read; "
                "check that it is a coordinator."
            )

    def _patiently(self, attempt: Callable[[], T]) -> T:
        """Tries until it succeeds, is refused, or patience has passed without any progress."""
        failures, since = 0, time.monotonic()
        while True:
            try:
                result = attempt()
            except Trouble as trouble:
                if trouble.progress:
                    failures, since = 0, time.monotonic()
                else:
                    self._is_gone(str(trouble))
                left = since + self.patience - time.monotonic()
                if left <= 0:
                    raise self._unreachable(trouble, f"for {self.patience:.0f} s") from None
                longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(failures, 10))
                pause = trouble.pause + random.uniform(0, longest)
                failures += 1
                if self.stop.wait(min(pause, left)) or self.client.is_closed:
                    raise self._unreachable(trouble, "and waiting was stopped") from None
            else:
                self._is_back()
                return result

    def _unreachable(self, trouble: Trouble, how: str) -> Unreachable:
        return Unreachable(
            f"{self.url} does not answer{self.through}, {how} ({trouble}); check the URL and the "
            "network, then run the same command again."
        )

    def _is_gone(self, why: str) -> None:
        with self.changing:
            news, self.gone = not self.gone, True
        if news:
            self.note(f"{self.url} is gone{self.through} ({why}); trying again until it is back.")

    def _is_back(self) -> None:
        with self.changing:
            news, self.gone = self.gone, False
        if news:
            self.note(f"{self.url} is back.")

    def _at(self, path: str) -> str:
        return f"{self.url}/{path.lstrip('/')}"


@contextmanager
def open_at(part: Path, start: int) -> Iterator[int]:
    """A file to write from `start` on; what it has beyond is cut off."""
    with errors_are_clear(part):
        file = os.open(part, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        with errors_are_clear(part):
            os.ftruncate(file, start)
            os.lseek(file, start, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


def in_pieces(body: memoryview) -> Iterator[bytes]:
    """A body as the chunks in which it is sent."""
    for start in range(0, len(body), PIECE):
        yield bytes(body[start : start + PIECE])


def read_in_pieces(file: BinaryIO, length: int) -> Iterator[bytes]:
    """A file from its beginning, as the chunks in which it is sent, and as long as announced."""
    file.seek(0)
    while length:
        if not (chunk := file.read(min(PIECE, length))):
            raise BadInput(f"{file.name} got shorter while it was sent; leave it alone until then.")
        length -= len(chunk)
        yield chunk


def words_of(error: httpx.TransportError) -> str:
    """Why a request failed."""
    return printable(str(error))[:200] or type(error).__name__


def printable(text: str) -> str:
    """A stranger's words without what could move a terminal's cursor."""
    return "".join(char if char.isprintable() else " " for char in text)
