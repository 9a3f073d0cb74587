"""Every message between the owner, or anybody who watches, and the coordinator."""

from typing import Annotated

from msgspec import Meta, Struct

from blocktrain.wire.messages import (
    Count,
    Message,
    Name,
    Seconds,
    Sha256,
    Traffic,
    Version,
    WorkerId,
)


class Command(Message, frozen=True, tag="command"):
    """Do this: I am the owner."""

    do: Annotated[str, Meta(pattern=r"^(pause|resume|stop)\Z")]


class Ban(Message, frozen=True, tag="ban"):
    """Take nothing more from this worker: I am the owner."""

    worker: Annotated[str, Meta(min_length=8, max_length=64, pattern=r"^[0-9a-f]+\Z")]
    """Its id, or enough of its beginning."""


class Issue(Message, frozen=True, tag="issue"):
    """Make a token for somebody who wants to work: I am the owner."""

    label: Name
    role: Annotated[str, Meta(pattern=r"^(owner|worker)\Z")] = "worker"


class Revoke(Message, frozen=True, tag="revoke"):
    """Whoever comes with this token is to be sent away: I am the owner."""

    token: Annotated[str, Meta(min_length=8, max_length=64, pattern=r"^[0-9a-f]+\Z")]
    """The token's hash, or enough of its beginning."""


class Issued(Message, frozen=True, tag="issued"):
    """This is the token; I keep only its hash."""

    token: Annotated[str, Meta(max_length=128)]
    hash: Sha256


class Token(Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of a token."""

    hash: Sha256
    role: Name
    label: Name
    issued: float
    revoked: float | None


class Tokens(Message, frozen=True, tag="tokens"):
    """These are all tokens there are."""

    tokens: list[Token]


class Evaluated(Message, frozen=True, tag="evaluated"):
    """I measured the model of these rounds, and this is its CE: I am the owner."""

    rounds: list[Count]
    """Of each block: which one was assembled."""
    ce: float
    bytes_seen: Count


class Checkpoint(Message, frozen=True, tag="checkpoint"):
    """These are the newest versions of all blocks; their steady copies are the model."""

    run: Sha256
    charter: str
    versions: list[Version]
    ended: bool


# --- how a run is doing, for anybody who watches --------------------------------------------------


class BlockStatus(Struct, frozen=True, forbid_unknown_fields=True):
    """Where one block is."""

    block: Count
    round: Count
    phase: Name
    """open, combining, waiting or finished."""
    allowance: Seconds
    """Seconds that a round of this block may take, as things are."""
    seconds_left: Seconds | None
    updates: Count
    """Updates that the open round has."""
    workers: Count
    """Workers who are at it now."""
    taken: Count
    late: Count
    refused: Count
    """Updates so far: in time, salvaged late, refused."""


class WorkerStatus(Struct, frozen=True, forbid_unknown_fields=True):
    """Who works, on what, and what they gave."""

    worker: WorkerId
    name: Name
    here: bool
    """Whether it was heard of within its lease."""
    silent: Seconds | None
    """Since when it was not heard of; None if it is gone."""
    block: Count | None
    round: Count | None
    seconds_per_step: Seconds | None
    updates: Count
    bytes_trained: Count
    traffic: Traffic
    banned: bool


class Point(Struct, frozen=True, forbid_unknown_fields=True):
    """A CE that was measured."""

    time: float
    """Seconds since the run was made."""
    bytes_seen: Count
    ce: float


class Happened(Struct, frozen=True, forbid_unknown_fields=True):
    """Something that people may want to know."""

    number: Count
    time: float
    """Seconds since 1970."""
    kind: Name
    detail: dict[str, str | int | float | None]


class Status(Message, frozen=True, tag="status"):
    """This is how the run is doing."""

    run: Sha256
    name: Name
    data: Name
    codec: Name
    parameters: Count
    rounds: Count
    replicas: Count
    state: Name
    """running, paused, stopping or ended."""
    age: Seconds
    """Since the run was made."""
    bytes_seen: Count
    """By the slowest block, in its closed rounds, as planned."""
    bytes_moved: Count
    """By all workers, both directions."""
    blocks: list[BlockStatus]
    workers: list[WorkerStatus]
    curve: list[Point]
    reference: list[Point]
    events: list[Happened]
    """The last ones, oldest first."""
