"""Every message between a worker and the coordinator, written as a spoken sentence.

What an owner says is in wire/owner.py.

JSON on the wire, tagged by `say`. Unknown fields are refused, strings are bounded, and a body is
refused by its length before it is read (MAX_MESSAGE). Tensors never travel in messages: they are
blobs, named here by their digest.
"""

import threading
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union

import msgspec
from msgspec import Meta

from blocktrain.errors import BadInput, OtherProtocol
from blocktrain.terms import Digest

PROTOCOL = 3
"""Changes when an old worker and a new coordinator would misunderstand each other."""
MAX_MESSAGE = 256 * 1024  # bytes; the largest is a joined worker's config and block shapes

Sha256 = Annotated[Digest, Meta(pattern=r"^[0-9a-f]{64}\Z")]
WorkerId = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Signature = Annotated[str, Meta(pattern=r"^[0-9a-f]{128}\Z")]
Name = Annotated[str, Meta(max_length=64, pattern=r"^[\w .@:+-]*\Z")]
Sentence = Annotated[str, Meta(max_length=400)]
Pem = Annotated[str, Meta(max_length=16 * 1024)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Reason = Literal["", "round", "base", "tensors", "numbers"]
"""Why an update was refused, for programs; sentences are for people, and may change."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="say"):
    """Anything said over the wire."""


class Hello(Message, frozen=True, tag="hello"):
    """This is the run I keep, and this is how I speak."""

    protocol: int
    run: Sha256
    coordinator: WorkerId
    software: Name


class Join(Message, frozen=True, tag="join"):
    """I would like to work; this is who I am and what I have."""

    protocol: int
    run: Sha256
    worker: WorkerId
    name: Name
    memory: Count
    device: Name
    token: Sha256
    """Sha256 of the token that is shown with it: with another one, these words mean nothing."""


class Joined(Message, frozen=True, tag="joined"):
    """Welcome; this is what everyone in this run agrees on."""

    charter: str
    """As JSON; its sha256 is the run's name."""
    session: Annotated[str, Meta(max_length=256)]
    """Bearer secret of every further request; it dies with the worker's membership."""


class Certified(Message, frozen=True, tag="certified"):
    """This proves to all other members that you are one; come again before it ends."""

    certificate: Pem
    """Of the member's own key."""
    authority: Pem
    """Whose certificates all members of the run have."""


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes that a worker has moved in this run, counted at its sockets, headers included."""

    sent: Count = 0
    received: Count = 0


class Ask(Message, frozen=True, tag="ask"):
    """What shall I do next?"""

    worker: WorkerId
    blocks: Annotated[list[Count], Meta(max_length=4096)] | None = None
    """Only these; None is any."""
    seconds_per_step: Seconds | None = None
    traffic: Traffic = Traffic()


class Version(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one block was after a round, by digest."""

    block: Count
    round: Count
    snapshot: Sha256
    steady: Sha256
    delta: Sha256 | None
    """Leads here from the snapshot of the round before; round 0 has none."""


class Versions(Message, frozen=True, tag="versions"):
    """These are the versions you asked for, oldest first."""

    versions: list[Version]


class Assignment(Message, frozen=True, tag="assignment"):
    """Train this block from this snapshot beside these neighbours, and be back in time."""

    block: Count
    round: Count
    slot: Count
    steps: Count
    base: Version
    """Of the worker's own block: its snapshot is where training begins."""
    neighbours: list[Version]
    """Of all other blocks: their steady copies are what is trained beside."""
    bytes_before: Count
    seconds_left: Seconds


class Wait(Message, frozen=True, tag="wait"):
    """There is nothing for you now; ask again after this."""

    seconds: Seconds
    why: Sentence


class Finished(Message, frozen=True, tag="finished"):
    """The run is over; thank you."""

    why: Sentence


class Update(Message, frozen=True, tag="update"):
    """I trained this, from exactly that; the tensors are in the blob I sent before."""

    worker: WorkerId
    run: Sha256
    block: Count
    round: Count
    slot: Count
    base: Sha256
    blob: Sha256
    steps: Count
    bytes_trained: Count
    seconds: Seconds
    loss: float
    optimiser_before: Sha256
    optimiser_after: Sha256


class Receipt(Message, frozen=True, tag="receipt"):
    """This is what became of your update, and I sign it."""

    update: Sha256
    worker: WorkerId
    verdict: Annotated[str, Meta(pattern=r"^(taken|salvaged|refused)\Z")]
    round: Count
    """The round it counts in; 0 if refused."""
    factor: float
    """On its share: 1 if in time, less if late."""
    why: Sentence
    reason: Reason = ""
    """Empty if it was not refused."""


class Alive(Message, frozen=True, tag="alive"):
    """I am still at it."""

    worker: WorkerId
    traffic: Traffic = Traffic()


class Leave(Message, frozen=True, tag="leave"):
    """I am going; give my place to somebody else."""

    worker: WorkerId
    traffic: Traffic = Traffic()


class Refused(Message, frozen=True, tag="refused"):
    """I will not do that, and this is why."""

    why: Sentence


class Signed(Message, frozen=True, tag="signed"):
    """A message as its exact bytes, and its author's signature over them."""

    body: bytes
    by: WorkerId
    signature: Signature


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One update's part in a snapshot."""

    update: Sha256
    worker: WorkerId
    bytes_trained: Count
    factor: float


class Closed(Message, frozen=True, tag="closed"):
    """This round is closed: its snapshot is made of these updates, added in this order."""

    run: Sha256
    block: Count
    round: Count
    snapshot: Sha256
    steady: Sha256
    delta: Sha256
    shares: list[Share]


class Done(Message, frozen=True, tag="done"):
    """I have done that."""


M = TypeVar("M", bound=Message)


def encode(message: msgspec.Struct) -> bytes:
    """A message as it travels."""
    return msgspec.json.encode(message)


# msgspec 0.22 can crash when threads decode a type for the first time at the same moment.
MAKING = threading.Lock()


@cache
def decoder_for(kinds: tuple[type[Message], ...]) -> "msgspec.json.Decoder[Any]":
    """Made once for each set of kinds, by one thread at a time."""
    return msgspec.json.Decoder(Union[kinds])  # noqa: UP007


def decode(body: bytes, *kinds: type[M]) -> M:
    """Bytes from a stranger -> a message of one of these kinds, or a sentence."""
    if len(body) > MAX_MESSAGE:
        raise BadInput(f"The message has {len(body)} bytes; at most {MAX_MESSAGE} are read.")
    with MAKING:
        decoder = decoder_for(kinds)
    try:
        message: M = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"The message is not understood: {error}.") from None
    return message


def refuse_other_protocol(theirs: int, who: str) -> None:
    """Raises, naming the side to upgrade, unless both speak the same version."""
    if theirs != PROTOCOL:
        older = who if theirs < PROTOCOL else "this side"
        raise OtherProtocol(
            f"Protocol {theirs} there, {PROTOCOL} here: upgrade blocktrain on {older}."
        )
