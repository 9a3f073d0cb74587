"""What people may want to know of what happens, for the ledger."""

import time

from blocktrain.aggregation.events import Dropped, Effects, Ended, Extended, Freed, Opened
from blocktrain.aggregation.ledger import Transaction, WorkerId
from blocktrain.wire.messages import Traffic


def note_effects(t: Transaction, effects: Effects) -> None:
    """What the rounds did; an update that was dropped is marked as such."""
    now = time.time()
    for effect in effects:
        match effect:
            case Opened(block, round, seconds):
                t.note("opened", {"block": block, "round": round, "seconds": seconds}, now)
            case Extended(block, round, seconds):
                t.note("extended", {"block": block, "round": round, "seconds": seconds}, now)
            case Freed(worker, block, round, slot):
                detail = {"worker": worker, "block": block, "round": round, "slot": slot}
                t.note("freed", detail, now)
            case Dropped(update, block, round):
                t.drop(update, now)
                t.note("dropped", {"update": update, "block": block, "round": round}, now)
            case Ended():
                t.note("ended", {}, now)
            case _:
                pass


def note_traffic(t: Transaction, worker: str, traffic: Traffic) -> None:
    """Workers tell what they have moved in all; it never shrinks."""
    known = t.worker(WorkerId(worker))
    if known is not None:
        sent = max(0, traffic.sent - known.bytes_sent)
        received = max(0, traffic.received - known.bytes_received)
        if sent or received:
            t.add_traffic(known.id, sent, received)
