"""Who may come in, and how often: tokens, sessions, limits. Everybody is a stranger until here."""

import hashlib
import hmac
import time
from dataclasses import dataclass, field

from starlette.requests import Request

from blocktrain.aggregation.keeper import Keeper
from blocktrain.aggregation.ledger import Token, WorkerId
from blocktrain.errors import NotAllowed

# A worker makes a handful of requests a round; a round of a second is the fastest we know.
REQUESTS_PER_SECOND = 20.0
BURST = 100.0
MOST_BUCKETS = 10_000  # strangers remembered at once


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
        self.buckets: dict[str, Bucket] = {}
        self.refresh()

    def refresh(self) -> None:
        """Learns again who is banned and which tokens are revoked."""
        with self.keeper.ledger.reading() as r:
            revoked = {token.hash for token in r.tokens() if token.revoked is not None}
            members: dict[WorkerId, str | None] = {}
            for worker in r.workers():
                if worker.banned is not None:
                    members[worker.id] = "The owner takes nothing more from you."
                elif worker.token in revoked:
                    members[worker.id] = "Your token was revoked; ask the owner for another one."
                else:
                    members[worker.id] = None
        self.members = members

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
