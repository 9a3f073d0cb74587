"""Who may ask, and how often strangers may speak."""

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from blocktrain.errors import NotAllowed
from blocktrain.services.gateway.answers import Elsewhere, TooOften
from blocktrain.services.gateway.keys import Keys

# A stage speaks once a second or two; one address may have 64 of them (wire/registry.py).
WORDS_PER_SECOND = 50.0
BURST = 100.0
MOST_BUCKETS = 10_000  # strangers remembered at once


@dataclass
class Bucket:
    """What one stranger has left."""

    words: float = BURST
    filled: float = field(default_factory=time.monotonic)

    def take(self) -> bool:
        """Whether one more word is all right."""
        now = time.monotonic()
        self.words = min(BURST, self.words + (now - self.filled) * WORDS_PER_SECOND)
        self.filled = now
        if self.words < 1:
            return False
        self.words -= 1
        return True


class Door:
    """Lets in whoever shows a key, or, where there are none, anybody."""

    def __init__(self, keys: Keys | None) -> None:
        self.keys = keys
        self.buckets: dict[str, Bucket] = {}

    def who(self, request: Request) -> str:
        """Whose request this is: a key's name, or an address where no keys are asked for."""
        if request.headers.get("sec-fetch-site") == "cross-site":  # which only browsers say
            raise Elsewhere("A page of another site asks here; open the gateway's own page.")
        if self.keys is None:
            return address(request)
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        name = self.keys.whose(shown.strip()) if scheme.lower() == "bearer" else None
        if name is None:
            raise NotAllowed("Show an API key of this gateway: Authorization: Bearer KEY.")
        return name

    def slow_down(self, request: Request) -> None:
        """Refuses whoever speaks too often without a key."""
        if len(self.buckets) > MOST_BUCKETS:
            self.buckets.clear()
        if not self.buckets.setdefault(address(request), Bucket()).take():
            raise TooOften(f"More than {WORDS_PER_SECOND:.0f} words a second; wait a little.")


def address(request: Request) -> str:
    """Where a stranger comes from."""
    return request.client.host if request.client else "nowhere"
