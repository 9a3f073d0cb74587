"""A run of tiny blocks, and workers without torch.

They speak every word that real ones speak, over real HTTP, signed with real keys; what they send
was not trained.
"""

import hashlib
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blocktrain.aggregation import state as states
from blocktrain.aggregation.beginning import write_first
from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.combine import Averaging
from blocktrain.aggregation.deadlines import Rules
from blocktrain.aggregation.folder import BLOBS, KEY, LEDGER, TOKEN
from blocktrain.aggregation.folder_store import FolderStore
from blocktrain.aggregation.ledger import new_token
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.aggregation.state import State
from blocktrain.errors import NoBlob
from blocktrain.services import membership
from blocktrain.services.membership import Visitor
from blocktrain.terms import Digest
from blocktrain.wire import messages, signing, tensors
from blocktrain.wire.link import Link
from blocktrain.wire.messages import Assignment, Finished, Receipt, Signed, Update, Wait
from blocktrain.wire.signing import Key, load_or_make_key, new_key

SHAPES = {"matrix": (6, 10), "vector": (7,)}
NOTHING = Digest(hashlib.sha256(b"").hexdigest())
SOON = 0.05  # seconds after which an idle light worker asks again, however long it was told


# --- a run ----------------------------------------------------------------------------------------


def quick(**others: Any) -> Rules:
    """Rules of a run that takes a second or two."""
    usual = {
        "rounds": 3,
        "blocks": 1,
        "replicas": 2,
        "quorum": 2,
        "local_steps": 5,
        "bytes_per_step": 8,
        "grace": 0.2,
        "floor": 0.5,
        "first_allowance": 3.0,
        "lease": 1.0,
    }
    return Rules(**{**usual, **others})


def begin_light(
    folder: Path, rules: Rules, averaging: Averaging | None = None, codec: str = "fp32"
) -> None:
    """A run of tiny blocks, as `blocktrain init` would make it."""
    folder.mkdir(parents=True)
    load_or_make_key(folder / KEY)
    store, luck = FolderStore(folder / BLOBS), np.random.default_rng(0)
    first = []
    for _ in range(rules.blocks):
        values = {name: luck.normal(size=shape) for name, shape in SHAPES.items()}
        floats = {name: value.astype(np.float32) for name, value in values.items()}
        body = tensors.encode(floats, "fp32")
        first.append(store.put([body], limit=len(body)))
    charter = Charter(
        name="light",
        data="none",
        corpus=NOTHING,
        splits=((0, NOTHING),) * 3,
        corpus_served=False,
        codec=codec,
        rules=rules,
        averaging=averaging or Averaging(),
        blocks=(SHAPES,) * rules.blocks,
        first=tuple(first),
        learning="{}",
    )
    token = new_token()
    (folder / TOKEN).write_text(token)
    write_first(folder, charter, token)


def state_of(run: Path) -> State:
    """Where the rounds of a run are, as its ledger has it at this moment."""
    with SqliteLedger(run / LEDGER) as ledger, ledger.reading() as r:
        kept = r.state()
    assert kept is not None
    return states.decode(kept)


# --- workers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """An update and its tensors, ready to be sent."""

    signed: Signed
    body: bytes

    @property
    def update(self) -> Update:
        """What was signed."""
        return messages.decode(self.signed.body, Update)

    @property
    def name(self) -> Digest:
        """What receipts call it."""
        return Digest(hashlib.sha256(self.signed.body).hexdigest())


@dataclass
class Light:
    """A worker without torch: honest words, made-up tensors."""

    url: str
    token: str
    seconds_per_step: float = 0.0
    key: Key = field(default_factory=new_key)
    receipts: list[Signed] = field(default_factory=list)
    """Every answer it got to an update, as it came."""
    notes: list[str] = field(default_factory=list)
    """What its link told: that the coordinator is gone, and why, and that it is back."""
    leaving: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.link = Link(self.url, patience=40.0)
        self.link.read_timeout = 5.0
        self.link.note = self.notes.append

    def join(self) -> None:
        """Comes in."""
        admitted = membership.join(self.link, Visitor(self.key, self.token, "light"))
        self.coordinator, self.run_id = admitted.coordinator, admitted.run
        self.charter = admitted.charter

    def ask(self) -> Assignment | Wait | Finished:
        """What is to be done."""
        ask = messages.Ask(self.key.id, None, self.seconds_per_step or None)
        answer = self.link.say("v1/ask", ask, Assignment, Wait, Finished)
        assert isinstance(answer, Assignment | Wait | Finished)
        return answer

    def assigned(self) -> Assignment:
        """Asks until there is something to be done."""
        while not isinstance(answer := self.ask(), Assignment):
            assert not isinstance(answer, Finished), "the run is over already"
            time.sleep(SOON)
        return answer

    def make(self, task: Assignment, luck: int = 0, **lies: Any) -> Made:
        """An update for an assignment. Another luck makes other tensors; lies replace fields."""
        seconds = max(1e-3, task.steps * self.seconds_per_step)
        told, body = untrained(task, self.charter, luck)
        facts = {"worker": self.key.id, "run": self.run_id, "seconds": seconds}
        return Made(signed(self.key, Update(**{**told, **facts, **lies}), "update"), body)

    def put(self, made: Made) -> None:
        """Sends the tensors."""
        self.link.send(f"v1/blobs/{made.update.blob}", made.body)

    def submit(self, made: Made) -> Receipt:
        """Sends the words; returns the receipt, which must be the coordinator's."""
        answer = self.link.say("v1/updates", made.signed, Signed)
        receipt = messages.decode(answer.body, Receipt)
        assert receipt.update == made.name
        assert is_signed_by(self.coordinator, answer, "receipt")
        self.receipts.append(answer)
        return receipt

    def send(self, made: Made) -> Receipt:
        """Both, and again if the tensors are not there, as a real worker does."""
        while True:
            self.put(made)
            try:
                return self.submit(made)
            except NoBlob:
                time.sleep(SOON)

    def work(self) -> int:
        """Rounds until the run is over or it is told to leave; returns how many updates it sent."""
        self.join()
        count = 0
        while not self.leaving.is_set():
            match self.ask():
                case Assignment() as task:
                    time.sleep(task.steps * self.seconds_per_step)
                    self.send(self.make(task))
                    count += 1
                case Wait(seconds=seconds):
                    time.sleep(min(seconds, SOON))
                case Finished():
                    break
        return count


def untrained(task: Assignment, charter: Charter, luck: int = 0) -> tuple[dict[str, Any], bytes]:
    """The facts of an update for an assignment, all but whose it is and how long it took; and its
    tensors, which follow from the assignment and the luck."""
    numbers = np.random.default_rng([task.block, task.round, task.slot, luck])
    change = {
        name: numbers.normal(size=shape, scale=0.05).astype(np.float32)
        for name, shape in charter.shapes(task.block).items()
    }
    body = tensors.encode(change, charter.codec)
    told = {
        "block": task.block,
        "round": task.round,
        "slot": task.slot,
        "base": task.base.snapshot,
        "blob": hashlib.sha256(body).hexdigest(),
        "steps": task.steps,
        "bytes_trained": task.steps * charter.rules.bytes_per_step,
        "loss": 1.0,
        "optimiser_before": NOTHING,
        "optimiser_after": NOTHING,
    }
    return told, body


def signed(key: Key, message: messages.Message, purpose: str) -> Signed:
    """A message by which the holder of a key stands."""
    body = messages.encode(message)
    return Signed(body, key.id, signing.sign(key, body, purpose).hex())


def is_signed_by(who: str, what: Signed, purpose: str) -> bool:
    """Whether they stand by it."""
    return signing.verify(who, what.body, purpose, bytes.fromhex(what.signature))
