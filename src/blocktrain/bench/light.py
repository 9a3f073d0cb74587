"""A light worker: it speaks every word that a real one speaks, but trains nothing. No torch.

It has its own key and its own connections, by the link that real workers use (wire/link.py), and
checks every receipt.
"""

import hashlib
import time
from dataclasses import dataclass, field
from queue import SimpleQueue
from ssl import SSLContext

import numpy as np

from blocktrain.aggregation.receipts import read_receipt
from blocktrain.aggregation.versions import signed_by
from blocktrain.errors import BadRun
from blocktrain.services.membership import Visitor, join
from blocktrain.terms import Digest, Parameters
from blocktrain.wire import messages, signing, tensors
from blocktrain.wire.link import Link
from blocktrain.wire.messages import Assignment, Finished, Wait

PATIENCE = 60.0  # seconds that anything may take before a benchmark gives up
NOTHING = Digest(hashlib.sha256(b"").hexdigest())
BYTES_PER_STEP = 1024


@dataclass(frozen=True)
class Place:
    """A coordinator that is up."""

    url: str
    token: str
    trust: SSLContext
    pid: int


def random_values(shapes: tensors.Shapes, scale: float) -> Parameters:
    """Tensors of normal random numbers, always the same ones."""
    luck = np.random.default_rng(0)
    return {
        name: luck.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        for name, shape in shapes.items()
    }


class Template:
    """One update's tensors; every update is another variant of them."""

    def __init__(self, shapes: tensors.Shapes, codec: str) -> None:
        self.start = tensors.encode(random_values(shapes, 1e-3), codec)[:-4]
        self.hasher = hashlib.sha256(self.start)

    def variant(self, number: int) -> tuple[bytes, Digest]:
        """A body of its own for each number, and its digest, without hashing all of it again.

        Its last four bytes are each below 64: by every codec these are small numbers.
        """
        mark = bytes(number >> shift & 63 for shift in (0, 6, 12, 18))
        hasher = self.hasher.copy()
        hasher.update(mark)
        return self.start + mark, Digest(hasher.hexdigest())


@dataclass(frozen=True)
class Sent:
    """One update, and how long its receipt took."""

    receipt: float
    """Seconds from the offer to the receipt."""
    post: float
    """Seconds from the post to the receipt."""
    ended: float
    refused: str
    """Why it was not taken, or not at once; empty if it was."""


@dataclass
class LightWorker:
    """Takes assignments of one block, and submits when it is told to."""

    number: int
    block: int
    place: Place
    template: Template
    key: signing.Key = field(default_factory=signing.new_key)
    offered: "SimpleQueue[float | None]" = field(default_factory=SimpleQueue)
    """The instants at which it is told to; None ends its work."""
    sent: list[Sent] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.link = Link(self.place.url, verify=self.place.trust, patience=PATIENCE)
        self.link.note = lambda words: self.troubles.append(words) if self.link.gone else None

    def join(self) -> None:
        """Comes in. Many from one address are slowed down; the link waits as it is told."""
        who = Visitor(self.key, self.place.token, f"light {self.number}")
        admitted = join(self.link, who)
        self.run, self.coordinator = admitted.run, admitted.coordinator

    def work(self, ready: "SimpleQueue[LightWorker]") -> None:
        """Assignment, offer, update, until there are no more offers."""
        while True:
            assignment = self.assigned()
            ready.put(self)
            offered = self.offered.get()
            if offered is None:
                return
            self.sent.append(self.submit(assignment, offered))

    def assigned(self) -> Assignment:
        """Asks until there is something to do."""
        while True:
            ask = messages.Ask(self.key.id, [self.block], None, self.traffic())
            match self.link.say("v1/ask", ask, Assignment, Wait, Finished):
                case Assignment() as assignment:
                    return assignment
                case Wait(seconds=seconds):
                    time.sleep(seconds)
                case Finished(why=why):
                    raise BadRun(f"The run ended too early: {why}")

    def submit(self, assignment: Assignment, offered: float) -> Sent:
        """Sends an update and checks its receipt."""
        self.troubles.clear()
        body, digest = self.template.variant(self.number << 8 | len(self.sent))
        self.link.send(f"v1/blobs/{digest}", body)
        signed = signed_by(self.key, self.update(assignment, digest), "update")
        posted = time.monotonic()
        answer = self.link.say("v1/updates", signed, messages.Signed)
        ended = time.monotonic()
        receipt = read_receipt(answer, signed, self.coordinator)
        refused = receipt.why if receipt.verdict == "refused" else " ".join(self.troubles)
        return Sent(ended - offered, ended - posted, ended, refused)

    def update(self, assignment: Assignment, blob: Digest) -> messages.Update:
        """What a real worker would say after all its steps."""
        return messages.Update(
            worker=self.key.id,
            run=self.run,
            block=assignment.block,
            round=assignment.round,
            slot=assignment.slot,
            base=assignment.base.snapshot,
            blob=blob,
            steps=assignment.steps,
            bytes_trained=BYTES_PER_STEP * assignment.steps,
            seconds=1.0,
            loss=1.0,
            optimiser_before=NOTHING,
            optimiser_after=NOTHING,
        )

    def alive(self) -> None:
        """Says so."""
        self.link.say("v1/alive", messages.Alive(self.key.id, self.traffic()), messages.Done)

    def traffic(self) -> messages.Traffic:
        """Bytes moved so far."""
        return messages.Traffic(self.link.moved.sent, self.link.moved.received)
