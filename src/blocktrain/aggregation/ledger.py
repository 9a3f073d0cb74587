"""What must survive kill -9: the run, its workers, tokens, assignments, receipts and versions.

One row, one truth: a block's snapshot, steady, momentum and residual change together, in the one
transaction that also gives the receipts their shares and keeps the state of the rounds.

    with ledger.transaction() as t:     one writer at a time
        t.close_round(version, shares, state)
    with ledger.reading() as r:         never waits, never blocks a writer
        r.newest(block)

No method reads a clock: times come from the caller, in seconds since 1970.
"""

import hashlib
import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NewType, Protocol

from blocktrain.terms import Digest

WorkerId = NewType("WorkerId", str)
"""A worker's public key, as hex."""
TokenHash = NewType("TokenHash", str)
"""sha256 of a token, as hex. The token itself is known only to whom it was given."""
Role = Literal["owner", "worker"]
Verdict = Literal["taken", "refused"]


@dataclass(frozen=True)
class RunRecord:
    """What the run is. Written once."""

    config: bytes
    corpus: Digest
    created: float


@dataclass(frozen=True)
class Token:
    """Who may come in, and as what."""

    hash: TokenHash
    role: Role
    label: str
    issued: float
    revoked: float | None = None


@dataclass(frozen=True)
class Worker:
    """Who trains, and what they gave."""

    id: WorkerId
    name: str
    token: TokenHash
    joined: float
    banned: float | None = None
    updates: int = 0
    """How many of its updates were taken."""
    bytes_trained: int = 0
    """In the updates that were taken."""
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True)
class Version:
    """A block after a round: what changes together."""

    block: int
    round: int
    snapshot: Digest
    steady: Digest
    momentum: Digest | None
    residual: Digest | None
    delta: Digest | None
    """What leads here from the snapshot before, in the run's codec. Round 0 has none."""
    manifest: Digest | None
    """The closed round's signed list of shares. Only round 0, which the owner made, has none."""
    closed: float


@dataclass(frozen=True)
class Assignment:
    """What one worker was asked to do: all that is needed to do it again."""

    worker: WorkerId
    block: int
    round: int
    slot: int
    base: Digest
    """The snapshot to start from."""
    neighbours: dict[int, Digest]
    """The steady copy to use of each neighbour, by block."""
    steps: int
    bytes_before: int
    """Bytes the block was trained on before: the learning rate follows from it."""
    issued: float


@dataclass(frozen=True)
class Receipt:
    """The coordinator's word on an update, and what became of it."""

    update: Digest
    """Of the update as signed, which names its worker, block, round and slot."""
    blob: Digest
    """Its tensors."""
    worker: WorkerId
    block: int
    round: int
    slot: int
    bytes_trained: int
    verdict: Verdict
    reason: str
    signed: bytes
    """The update as its worker signed and sent it."""
    receipt: bytes
    """As it was signed and sent."""
    given: float
    into_round: int | None = None
    """The round whose snapshot holds the update."""
    share: float | None = None
    dropped: float | None = None
    """When it was dropped, since its worker was banned before it was combined."""


@dataclass(frozen=True)
class Event:
    """Something that people may want to know. Nothing is decided by it."""

    number: int
    time: float
    kind: str
    detail: dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """What the owner measured."""

    time: float
    rounds: tuple[int, ...]
    """Which round of each block was assembled."""
    ce: float
    bytes_seen: int
    by: TokenHash


class Reading(Protocol):
    """One moment of the ledger."""

    def run(self) -> RunRecord | None: ...

    def token(self, token: str) -> Token | None:
        """What is known of a token somebody shows; it may be revoked."""
        ...

    def tokens(self) -> list[Token]: ...

    def worker(self, id: WorkerId) -> Worker | None: ...

    def workers(self) -> list[Worker]:
        """In the order they joined."""
        ...

    def newest(self, block: int) -> Version | None: ...

    def version(self, block: int, round: int) -> Version | None: ...

    def versions(self, block: int | None = None) -> list[Version]:
        """Of one block or of all, by round and block."""
        ...

    def assignments(self, block: int | None = None, round: int | None = None) -> list[Assignment]:
        """By round, block and slot."""
        ...

    def receipt(self, update: Digest) -> Receipt | None: ...

    def receipts(self, block: int | None = None, round: int | None = None) -> list[Receipt]:
        """Of the updates made for a round, taken or refused, by round, block and slot."""
        ...

    def outstanding(self, block: int) -> list[Receipt]:
        """Taken, not dropped, and not yet in any snapshot; by round and slot."""
        ...

    def combined(self, block: int, into_round: int) -> list[Receipt]:
        """What a snapshot was made of, by round and slot; state.order says how it was added."""
        ...

    def tally(self) -> dict[int, tuple[int, int, int]]:
        """Of each block: updates taken in time, taken late, and refused, so far."""
        ...

    def state(self) -> bytes | None:
        """The state of the rounds, as it was last kept."""
        ...

    def events(self, after: int = 0, limit: int = 100) -> list[Event]:
        """The oldest of those that came after event number `after`."""
        ...

    def latest_events(self, limit: int = 100) -> list[Event]:
        """The newest, oldest first."""
        ...

    def evaluations(self) -> list[Evaluation]: ...

    def blobs_in_use(self, rounds: int) -> set[Digest]:
        """What a store must keep so that the run can go on, be replayed and be checked.

        The snapshots, steady copies and deltas of each block's last `rounds` versions and of round
        0, the newest momentum and residual, what open assignments build on, updates that are not in
        any snapshot yet, all manifests, and the corpus.
        """
        ...


class Transaction(Reading, Protocol):
    """Changes that become true together, or not at all."""

    def whole(self) -> AbstractContextManager[None]:
        """All of what follows, or none of it, even if the caller goes on after an error."""
        ...

    def begin_run(self, run: RunRecord) -> None:
        """Once in the life of a ledger."""
        ...

    def issue_token(self, token: str, role: Role, label: str, now: float) -> Token:
        """Keeps the hash of a token, never the token."""
        ...

    def revoke_token(self, hash: TokenHash, now: float) -> None: ...

    def join(self, id: WorkerId, name: str, token: TokenHash, now: float) -> Worker:
        """A worker comes, or comes back, perhaps under another name. Bans and merits stay."""
        ...

    def ban(self, id: WorkerId, now: float) -> None: ...

    def add_traffic(self, id: WorkerId, sent: int, received: int) -> None: ...

    def begin_block(self, version: Version) -> None:
        """The owner's first snapshot: round 0 of a block."""
        ...

    def assign(self, assignment: Assignment) -> None:
        """Written before it is handed out; again with other steps, but never on another base."""
        ...

    def give_receipt(self, receipt: Receipt) -> Receipt:
        """The receipt that stands: this one, or the one which the same update got before."""
        ...

    def drop(self, update: Digest, now: float) -> None:
        """An update that was taken will not be in any snapshot after all."""
        ...

    def close_round(self, version: Version, shares: Mapping[Digest, float], state: bytes) -> None:
        """The block's next version, which updates are in it by what share, and what is next.

        Each update must have been taken, for this block, and not be in a snapshot yet.
        """
        ...

    def keep_state(self, state: bytes) -> None:
        """Keeps the state of the rounds."""
        ...

    def note(self, kind: str, detail: Mapping[str, Any], now: float) -> int:
        """Tells people something; returns the event's number."""
        ...

    def evaluated(self, evaluation: Evaluation) -> None: ...


class Ledger(Protocol):
    """The run's memory."""

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Durable when the block has ended; undone if it raises."""
        ...

    def reading(self) -> AbstractContextManager[Reading]:
        """Everything read within the block is of one moment."""
        ...

    def backup(self, path: Path) -> None:
        """A copy of this moment, in one file that can be opened like the original."""
        ...

    def close(self) -> None:
        """Whoever writes comes to an end; nobody begins any more."""
        ...


def new_token() -> str:
    """A token nobody can guess: 256 bits, so that a plain hash of it is safe to keep."""
    return secrets.token_urlsafe(32)


def hash_of_token(token: str) -> TokenHash:
    """All that is kept of a token."""
    return TokenHash(hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest())
