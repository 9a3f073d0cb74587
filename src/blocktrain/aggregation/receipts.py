"""The coordinator's signed word on an update: what became of it, and why. Given and read here."""

import hashlib
import time

from blocktrain.aggregation.events import Refused, Salvaged, Verdict
from blocktrain.aggregation.inspection import Objection
from blocktrain.aggregation.ledger import Receipt, Transaction, WorkerId
from blocktrain.aggregation.versions import signed_by
from blocktrain.errors import BadInput
from blocktrain.terms import Digest
from blocktrain.wire import messages
from blocktrain.wire.messages import Reason, Signed, Update
from blocktrain.wire.signing import Key, verify


def name_of(signed: Signed) -> Digest:
    """An update is known by what was signed."""
    return Digest(hashlib.sha256(signed.body).hexdigest())


def give_receipt(
    t: Transaction, key: Key, signed: Signed, update: Update, verdict: Verdict | str
) -> bytes:
    """Writes down what became of the update; returns it as signed with the coordinator's key."""
    name = name_of(signed)
    reason: Reason = ""
    kind: dict[str, str] = {}
    match verdict:
        case str():
            word, round, factor, why = "refused", 0, 0.0, str(verdict)  # only that can be written
            reason = verdict.reason if isinstance(verdict, Objection) else "round"
            kind = {"reason": reason}
        case Refused(sentence=why):
            word, round, factor, reason = "refused", 0, 0.0, "round"
            kind = {"reason": str(verdict.reason)}  # in more detail than programs are told
        case Salvaged(round=round, factor=factor):
            word, why = "salvaged", f"It came late and counts for round {round} by {factor}."
        case _:
            word, round, factor, why = "taken", verdict.round, verdict.factor, ""
    receipt = messages.Receipt(name, update.worker, word, round, factor, why[:400], reason)
    body = messages.encode(signed_by(key, receipt, "receipt"))
    t.give_receipt(
        Receipt(
            update=name,
            blob=update.blob,
            worker=WorkerId(update.worker),
            block=update.block,
            round=update.round,
            slot=update.slot,
            bytes_trained=update.bytes_trained,
            verdict="refused" if word == "refused" else "taken",
            reason=why,
            signed=messages.encode(signed),
            receipt=body,
            given=time.time(),
        )
    )
    detail = {"block": update.block, "round": update.round, "slot": update.slot}
    t.note(word, {**detail, "worker": update.worker, **kind, "why": why}, time.time())
    return body


def read_receipt(answer: Signed, update: Signed, coordinator: str) -> messages.Receipt:
    """The receipt in an answer, if it is the coordinator's and of this update."""
    right = verify(coordinator, answer.body, "receipt", bytes.fromhex(answer.signature))
    receipt = messages.decode(answer.body, messages.Receipt)
    if not right or receipt.update != name_of(update):
        raise BadInput("The receipt is not the coordinator's; do not trust this coordinator.")
    return receipt
