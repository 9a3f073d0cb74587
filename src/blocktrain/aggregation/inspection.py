"""Looks at what an update brings, before the rounds hear of it.

Whether it counts, and in which round, is decided by aggregation/updates.py.
"""

from dataclasses import dataclass, field

from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.combine import norm, refusal
from blocktrain.aggregation.ledger import Ledger
from blocktrain.aggregation.store import Store
from blocktrain.errors import BadTensors, NoBlob
from blocktrain.terms import Digest
from blocktrain.wire.messages import Reason, Update
from blocktrain.wire.tensors import Body


class Objection(str):
    """Why an update cannot be taken: a sentence, with the reason by which programs know it."""

    reason: Reason

    def __new__(cls, reason: Reason, sentence: str) -> "Objection":
        """The sentence, with its reason."""
        made = super().__new__(cls, sentence)
        made.reason = reason
        return made


@dataclass
class Inspector:
    """Looks at the updates of one run, in any thread."""

    ledger: Ledger
    store: Store
    charter: Charter
    norms: dict[Digest, float] = field(default_factory=dict)
    """Of the last snapshots that updates built on."""

    def objection(self, update: Update) -> Objection | None:
        """Why this update cannot be taken, whenever it came; None if it can."""
        if not 0 <= update.block < len(self.charter.blocks):
            return Objection(
                "round", f"There is no block {update.block} in this run; ask for an assignment."
            )
        with self.ledger.reading() as r:
            base = r.version(update.block, update.round - 1)
        if base is None or base.snapshot != update.base:
            return Objection(
                "base", "It does not build on the snapshot of its round; ask for an assignment."
            )
        if self.store.size(base.snapshot) is None:  # not kept any more
            return Objection(
                "base",
                f"Round {update.round} is too long ago to build on; ask for a new assignment.",
            )
        shapes = self.charter.shapes(update.block)
        # A pruning that is under way does not know yet that an update names the blob.
        if self.store.size(update.blob) is None or not self.store.renew(update.blob):
            raise NoBlob("The update's tensors are not here; send the blob first.")
        try:
            body = Body(self.store.view(update.blob), self.charter.codec, shapes)
            why = refusal(body, self._norm(base.snapshot, update.block))
        except BadTensors as error:
            return Objection("tensors", str(error))
        return Objection("numbers", why) if why else None

    def _norm(self, snapshot: Digest, block: int) -> float:
        """Of a snapshot; remembered, since every update of a round is compared with it."""
        found = self.norms.get(snapshot)
        if found is None:
            shapes = self.charter.shapes(block)
            found = norm(Body(self.store.view(snapshot), "fp32", shapes).read, shapes)
            # A new one, since other threads look at the old one.
            last = [*self.norms.items()][-4 * len(self.charter.blocks) :]
            self.norms = {**dict(last), snapshot: found}
        return found
