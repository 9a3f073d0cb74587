"""What goes through a link's sockets: counted to the byte, kept within what a volunteer allows.

    httpx -> httpcore -> Encrypted (TLS, if any) -> Counted -> socket

TLS is done in memory above the counted stream, not by the socket, so what is counted and throttled
is what travels: handshakes, headers and encryption included. Not seen: what the network adds below
TCP, and what the system has read ahead when we hang up (130 kB, measured at 50 kB/s).
"""

import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpcore

from blocktrain.errors import BadInput, NotAllowed, TrafficSpent

PIECE = 64 * 1024  # bytes read or written at once without a limit; httpcore reads as many
SMALLEST_PIECE = 1024
PIECES_PER_SECOND = 20  # with a limit: 2.5 kB each at 50 kB/s
BURST = 0.1  # seconds of rate that may be caught up on after a pause, or a sleep that took too long

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What a volunteer allows; None is no limit."""

    upload: float | None = None
    """Bytes per second."""
    download: float | None = None
    traffic: int | None = None
    """Bytes in all, both directions."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise BadInput(
                    f"The {name} limit must be above 0, not {value}; leave it out for none."
                )


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Moved:
    """Bytes at the socket so far."""

    sent: int = 0
    received: int = 0


class Pace:
    """A rate that several threads keep to together; each sleeps for what it moved itself."""

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self.piece = PIECE
        if rate is not None:
            self.piece = int(min(PIECE, max(SMALLEST_PIECE, rate / PIECES_PER_SECOND)))
        self.lock = threading.Lock()
        self.free = time.monotonic()  # when all that was moved so far is paid for

    def keep(self, amount: int) -> None:
        """Sleeps until `amount` more bytes are within the rate; nobody waits for the sleeper."""
        if self.rate is None:
            return
        with self.lock:
            now = time.monotonic()
            self.free = max(self.free, now - BURST) + amount / self.rate
            pause = self.free - now
        if pause > 0:
            time.sleep(pause)


class Meter:
    """What all streams of one link have moved, and what they still may."""

    def __init__(self, limits: Limits) -> None:
        self.traffic = limits.traffic
        self.upload, self.download = Pace(limits.upload), Pace(limits.download)
        self.lock = threading.Lock()
        self.moved = Moved()
        self.before = 0  # bytes of former links that count for the limit

    def count(self, sent: int = 0, received: int = 0) -> None:
        """Adds to what was moved. What is to be sent is counted before, so the limit holds."""
        with self.lock:
            if sent:
                self.refuse_beyond_limit(sent)
            self.moved = Moved(self.moved.sent + sent, self.moved.received + received)

    def refuse_beyond_limit(self, amount: int) -> None:
        """Raises if that many bytes more are too many."""
        left = self.left()
        if left is not None and amount > left:
            raise TrafficSpent(
                f"Only {max(0, left)} of {self.traffic} bytes of traffic are left, too few "
                "for what comes next; raise the limit, or come back another time."
            )

    def left(self) -> int | None:
        """Bytes that may still be moved; None is any number."""
        if self.traffic is None:
            return None
        return self.traffic - self.before - self.moved.sent - self.moved.received


class Backend(httpcore.NetworkBackend):
    """Opens connections that are counted."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.sockets = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        stream = self.sockets.connect_tcp(host, port, timeout, local_address, socket_options)
        return Counted(stream, self.meter)


class Counted(httpcore.NetworkStream):
    """A connection whose bytes are counted and kept to the pace."""

    def __init__(self, inner: httpcore.NetworkStream, meter: Meter) -> None:
        self.inner, self.meter = inner, meter

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        most = min(max_bytes, self.meter.download.piece)
        if (left := self.meter.left()) is not None:
            self.meter.refuse_beyond_limit(1)
            most = min(most, left)
        chunk = self.inner.read(most, timeout)
        self.meter.count(received=len(chunk))
        self.meter.download.keep(len(chunk))
        return chunk

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        pace = self.meter.upload
        for start in range(0, len(buffer), pace.piece):
            piece = buffer[start : start + pace.piece]
            self.meter.count(sent=len(piece))
            pace.keep(len(piece))
            self.inner.write(piece, timeout)

    def close(self) -> None:
        self.inner.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        return Encrypted(self, ssl_context, server_hostname, timeout)

    def get_extra_info(self, info: str) -> Any:
        return self.inner.get_extra_info(info)


class Encrypted(httpcore.NetworkStream):
    """TLS over a counted stream."""

    def __init__(
        self,
        inner: httpcore.NetworkStream,
        context: ssl.SSLContext,
        hostname: str | None,
        timeout: float | None,
    ) -> None:
        self.inner, self.hostname = inner, hostname
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        try:
            self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=hostname)
            self._pump(self.tls.do_handshake, timeout, httpcore.ConnectError)
        except BaseException:
            inner.close()
            raise

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._pump(lambda: self._decrypt(max_bytes), timeout, httpcore.ReadError)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if buffer:
            self._pump(lambda: self.tls.write(buffer), timeout, httpcore.WriteError)

    def close(self) -> None:
        self.inner.close()

    def get_extra_info(self, info: str) -> Any:
        if info == "ssl_object":
            return self.tls
        if info == "is_readable" and self.incoming.pending:
            return True  # such as a goodbye that came together with the last answer
        return self.inner.get_extra_info(info)

    def _decrypt(self, max_bytes: int) -> bytes:
        try:
            return self.tls.read(max_bytes)
        except ssl.SSLEOFError:  # no goodbye, as is common; HTTP and digests notice what is cut
            self.outgoing.read()  # TLS would complain, to nobody
            return b""

    def _pump(
        self, call: Callable[[], T], timeout: float | None, broken: type[httpcore.NetworkError]
    ) -> T:
        """Moves bytes between TLS and the inner stream until the call has what it needs."""
        while True:
            try:
                result = call()
            except ssl.SSLWantReadError:
                self._flush(timeout)
                self._fill(timeout)
            except ssl.SSLCertVerificationError as error:  # trying again would not help
                raise NotAllowed(
                    f"The certificate of {self.hostname} is not trusted here "
                    f"({error.verify_message}); check the URL, or give the fingerprint that the "
                    "run's owner sees."
                ) from None
            except ssl.SSLError as error:
                raise broken(str(error)) from error
            else:
                self._flush(timeout)
                return result

    def _flush(self, timeout: float | None) -> None:
        if self.outgoing.pending:
            self.inner.write(self.outgoing.read(), timeout)

    def _fill(self, timeout: float | None) -> None:
        if chunk := self.inner.read(PIECE, timeout):
            self.incoming.write(chunk)
        else:
            self.incoming.write_eof()
