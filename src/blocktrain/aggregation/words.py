"""What the rounds decide, as it is said to a worker."""

import time

from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.events import Assigned, Idle, Why
from blocktrain.aggregation.ledger import Assignment, Transaction, Version, WorkerId
from blocktrain.aggregation.state import Open, State
from blocktrain.terms import Digest
from blocktrain.wire import messages

SPOKEN = {
    Why.NOTHING_FREE: "Every slot is taken.",
    Why.PAUSED: "The owner has paused the run.",
    Why.BANNED: "The owner takes nothing more from you.",
}


def spoken(
    t: Transaction, charter: Charter, now: State, answer: Assigned | Idle
) -> messages.Message:
    """The answer to a worker who asked; an assignment is written down first."""
    if isinstance(answer, Idle):
        if answer.why is Why.ENDED:
            return messages.Finished("All rounds of this run are closed; thank you.")
        return messages.Wait(answer.retry_in, SPOKEN[answer.why])
    block = now.blocks[answer.block]
    assert isinstance(block.phase, Open)
    pinned = [_version(t, now, index, digest) for index, digest in enumerate(block.phase.pins)]
    base = t.version(answer.block, answer.round - 1)
    assert base is not None
    before = charter.bytes_before(answer.round)
    others = [each for each in pinned if each.block != answer.block]
    t.assign(
        Assignment(
            WorkerId(answer.worker),
            answer.block,
            answer.round,
            answer.slot,
            base.snapshot,
            {each.block: each.steady for each in others},
            answer.steps,
            before,
            time.time(),
        )
    )
    return messages.Assignment(
        block=answer.block,
        round=answer.round,
        slot=answer.slot,
        steps=answer.steps,
        base=spoken_version(base),
        neighbours=[spoken_version(each) for each in others],
        bytes_before=before,
        seconds_left=answer.seconds_left,
    )


def _version(t: Transaction, now: State, block: int, steady: Digest) -> Version:
    """The version whose steady copy is pinned."""
    rounds_kept = [each.round for each in now.blocks[block].versions]
    for number in reversed(rounds_kept):
        if (found := t.version(block, number)) and found.steady == steady:
            return found
    return next(each for each in t.versions(block) if each.steady == steady)


def spoken_version(version: Version) -> messages.Version:
    """A version as workers are told of it."""
    return messages.Version(
        version.block, version.round, version.snapshot, version.steady, version.delta
    )
