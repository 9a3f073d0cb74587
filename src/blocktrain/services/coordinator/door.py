"""Who may come in, and how often: tokens, sessions, limits. Everybody is a stranger until here."""

import asyncio
import hashlib
import hmac
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from blocktrain.aggregation.keeper import Keeper
from blocktrain.aggregation.ledger import Token, WorkerId
from blocktrain.errors import NotAllowed

# A worker makes a handful of requests a round; a round of a second is the fastest we know.
REQUESTS_PER_SECOND = 20.0
BURST = 100.0
MOST_BUCKETS = 10_000  # strangers remembered at once
HEAD_AT_MOST = 16 * 1024  # bytes of a request before its body; those of a worker have 400
HEAD_SECONDS = 20.0  # that they may take
TOO_LONG = b"HTTP/1.1 431 Head Too Long\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@dataclass
class Bucket:
    """What one visitor has left."""

    tokens: float = BURST
    filled: float = field(default_factory=time.monotonic)

    def take(self) -> bool:
        """Whether one more request is all right."""
        now = time.monotonic()
        self.tokens = min(BURST, self.tokens + (now - self.filled) * REQUESTS_PER_SECOND)
        self.filled = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


class Door:
    """Decides by the Authorization header alone; what is allowed is in the ledger."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        secret = keeper.key.private.private_bytes_raw()
        self.secret = hmac.digest(secret, b"blocktrain sessions 1", "sha256")
        self.members: dict[WorkerId, str | None] = {}
        """Why each one may not come in any more; None: it may."""
        self.tokens: dict[WorkerId, str] = {}
        """By which each one came, as a hash."""
        self.buckets: dict[str, Bucket] = {}
        self.refresh()

    def refresh(self) -> None:
        """Learns again who is banned and which tokens are revoked."""
        with self.keeper.ledger.reading() as r:
            revoked = {token.hash for token in r.tokens() if token.revoked is not None}
            members: dict[WorkerId, str | None] = {}
            workers = r.workers()
            for worker in workers:
                if worker.banned is not None:
                    members[worker.id] = "The owner takes nothing more from you."
                elif worker.token in revoked:
                    members[worker.id] = "Your token was revoked; ask the owner for another one."
                else:
                    members[worker.id] = None
        self.members, self.tokens = members, {worker.id: worker.token for worker in workers}

    def session(self, worker: str) -> str:
        """The secret of a worker's further requests: made, not kept, so restarts do not matter."""
        return f"{worker}.{hmac.new(self.secret, worker.encode(), hashlib.sha256).hexdigest()}"

    def worker(self, request: Request) -> WorkerId:
        """Whose request this is, if it is a member's."""
        shown = bearer(request)
        id = WorkerId(shown.partition(".")[0])
        if not hmac.compare_digest(shown.encode(), self.session(id).encode()):
            raise NotAllowed("This needs a worker's session; join first.")
        why = self.members.get(id, "You are not known here; join first.")
        if why is not None:
            raise NotAllowed(why)
        self.slow_down(id)
        return id

    def token(self, request: Request, role: str) -> Token:
        """The token that was shown, if it opens this door. An owner may do all that workers may."""
        self.slow_down(address(request))
        with self.keeper.ledger.reading() as r:
            token = r.token(bearer(request))
        if token is None or token.revoked is not None:
            raise NotAllowed("The token is unknown or revoked; ask the owner for another one.")
        if role not in (token.role, "worker"):
            raise NotAllowed("This needs the owner's token.")
        return token

    def slow_down(self, who: str) -> None:
        """Refuses whoever asks too often."""
        if len(self.buckets) > MOST_BUCKETS:
            self.buckets.clear()
        if not self.buckets.setdefault(who, Bucket()).take():
            raise TooOften


class TooOften(NotAllowed):
    """Too many requests; the answer says when to come again."""

    def __init__(self) -> None:
        super().__init__(f"More than {REQUESTS_PER_SECOND:.0f} requests a second; wait a little.")


def bearer(request: Request) -> str:
    """What the Authorization header holds."""
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not 8 <= len(shown) <= 256:
        raise NotAllowed("Show a token: Authorization: Bearer TOKEN.")
    return shown


def address(request: Request) -> str:
    """Where a stranger comes from."""
    return request.client.host if request.client else "nowhere"


class Head(HttpToolsProtocol):
    """uvicorn's HTTP for strangers: the head of a request is bounded, in bytes and in time.

    uvicorn bounds neither where httptools parses: whoever sends a header without an end fills the
    memory, and whoever sends nothing holds a connection for ever.
    """

    def __init__(self, *told: Any, **named: Any) -> None:
        super().__init__(*told, **named)
        self.head, self.in_head = 0, True
        self.clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.in_head
        super().data_received(data)
        if before and self.in_head:
            self.head += len(data)
            if self.head > HEAD_AT_MOST:
                self.refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self.in_head:
            self.await_head()

    def on_headers_complete(self) -> None:
        self.end_head()
        if len(self.url) + sum(len(n) + len(v) for n, v in self.headers) > HEAD_AT_MOST:
            self.refuse()
            raise ValueError("the head is too long")  # so that the parser stops here
        super().on_headers_complete()

    def await_head(self) -> None:
        """A head begins."""
        self.head, self.in_head = 0, True
        self.clock = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def end_head(self) -> None:
        """A head has ended."""
        self.in_head = False
        if self.clock is not None:
            self.clock.cancel()
            self.clock = None

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def refuse(self) -> None:
        """Says why, and hangs up."""
        if not self.transport.is_closing():
            self.transport.write(TOO_LONG)
            self.transport.close()
