"""Which updates count, and in which round: the part of the state machine that judges them.

Pure, as all of it: rounds.py calls these with what came, and with the instant at which it came.
"""

import math

from msgspec.structs import replace

from blocktrain.aggregation.assignments import (
    forget,
    heard,
    learn_pace,
)
from blocktrain.aggregation.deadlines import full_duration
from blocktrain.aggregation.events import (
    Dropped,
    Effect,
    Effects,
    Freed,
    Reason,
    Receipt,
    Refused,
    Spoiled,
    Submitted,
)
from blocktrain.aggregation.state import (
    Block,
    Counted,
    Finished,
    Open,
    Seat,
    State,
    with_block,
)
from blocktrain.terms import Digest

Turn = tuple[State, Effects]


def submit(state: State, update: Submitted, now: float) -> Turn:
    """Decides about an update. A repeated one gets the receipt it had, and counts once."""
    if known := _known(state, update.update):
        index, it = known
        same = (index, it.round, it.slot, it.worker)
        if same != (update.block, update.round, update.slot, update.worker):
            return state, (_refuse(update, Reason.OTHER_UPDATE),)
        return state, (Receipt(it.update, it.verdict),)
    if update.worker in state.banned:
        return state, (_refuse(update, Reason.BANNED),)
    state = heard(state, update.worker, now)
    reason = _objection(state, update)
    if reason in (None, Reason.TOO_OLD):  # who is always too old must get fewer steps, too
        state = learn_pace(state, update.worker, update.seconds / update.steps)
    if reason is not None:
        return state, (_refuse(update, reason),)
    return _count(state, update, now)


def _known(state: State, update: Digest) -> tuple[int, Counted] | None:
    """The block and the entry of an update that counts already."""
    entries = ((index, it) for index, block in enumerate(state.blocks) for it in block.counted)
    return next((entry for entry in entries if entry[1].update == update), None)


def _objection(state: State, update: Submitted) -> Reason | None:
    """Why this update cannot count, if so."""
    if not 0 <= update.block < len(state.blocks):
        return Reason.UNKNOWN_BLOCK
    block, rules = state.blocks[update.block], state.rules
    into = block.welcoming
    most = update.steps * rules.bytes_per_step
    if not 1 <= update.round <= block.round:
        return Reason.NOT_OPEN
    possible = 1 <= update.steps <= rules.steps.of(update.round)
    if not (possible and 0 < update.bytes_trained <= most and 0 < update.seconds < math.inf):
        return Reason.IMPLAUSIBLE
    if into > rules.rounds or isinstance(block.phase, Finished):
        return Reason.ENDED
    if state.stopping and not isinstance(block.phase, Open):
        return Reason.ENDED
    if into - update.round >= rules.memory:
        return Reason.TOO_OLD
    if _seat(block, update) is None:
        return Reason.NOT_ASSIGNED
    if any((each.round, each.slot) == (update.round, update.slot) for each in block.counted):
        return Reason.DUPLICATE_SLOT
    return None


def _seat(block: Block, update: Submitted) -> Seat | None:
    """The seat that the update was made on."""
    wanted = (update.round, update.slot, update.worker)
    return next((it for it in block.seats if (it.round, it.slot, it.worker) == wanted), None)


def _count(state: State, update: Submitted, now: float) -> Turn:
    """Enters an update into the round that takes it, and learns from how long it took."""
    block, rules = state.blocks[update.block], state.rules
    seat = _seat(block, update)
    assert seat is not None
    counted = Counted(
        update=update.update,
        worker=update.worker,
        slot=update.slot,
        round=update.round,
        into=block.welcoming,
        bytes_trained=update.bytes_trained,
        factor=rules.discount ** (block.welcoming - update.round),
    )
    place = (update.round, update.slot)
    duration = full_duration(now - seat.since, update.seconds, update.steps, rules)
    state = with_block(
        state,
        update.block,
        counted=(*block.counted, counted),
        # Whoever holds the slot is free: the first in wins.
        seats=tuple(
            replace(it, held=it.held and (it.round, it.slot) != place) for it in block.seats
        ),
        durations=(*block.durations, duration)[-rules.history :],
    )
    state = _note_quorum(state, update.block, now)
    return state, (Receipt(update.update, counted.verdict),)


def _note_quorum(state: State, index: int, now: float) -> State:
    """Starts the grace when the quorum is met, and takes it back when an update is dropped."""
    block = state.blocks[index]
    phase = block.phase
    if not isinstance(phase, Open):
        return state
    own = sum(each.round == block.round for each in block.counted)
    since = state.round_time(now) if phase.quorum_since is None else phase.quorum_since
    noted = since if own >= state.rules.quorum else None
    return with_block(state, index, phase=replace(phase, quorum_since=noted))


def spoil(state: State, spoiled: Spoiled, now: float) -> Turn:
    """Frees the slot for good: whoever spoiled it does not get it back by asking again first."""
    if not 0 <= spoiled.block < len(state.blocks) or spoiled.worker in state.banned:
        return state, ()
    state = heard(state, spoiled.worker, now)
    seats = state.blocks[spoiled.block].seats
    wanted = (spoiled.round, spoiled.slot, spoiled.worker)
    gone = [it for it in seats if (it.round, it.slot, it.worker) == wanted]
    freed = tuple(Freed(it.worker, spoiled.block, it.round, it.slot) for it in gone if it.held)
    kept = tuple(it for it in seats if it not in gone)
    return with_block(state, spoiled.block, seats=kept), freed


def ban(state: State, worker: str, now: float) -> Turn:
    """Frees the worker's slot and drops its updates from all rounds that are not closed."""
    state, freed = forget(state, worker)
    state = replace(state, banned=tuple(sorted({*state.banned, worker})))
    effects: list[Effect] = [*freed]
    for index, block in enumerate(state.blocks):
        gone = [each for each in block.entering(block.welcoming) if each.worker == worker]
        effects += [Dropped(each.update, index, each.into) for each in gone]
        kept = tuple(each for each in block.counted if each not in gone)
        state = _note_quorum(with_block(state, index, counted=kept), index, now)
    return state, tuple(effects)


def _refuse(update: Submitted, reason: Reason) -> Receipt:
    sentence = _SENTENCES[reason].format(it=update)
    return Receipt(update.update, Refused(reason, sentence))


_SENTENCES = {
    Reason.UNKNOWN_BLOCK: "There is no block {it.block} in this run; ask for an assignment.",
    Reason.NOT_OPEN: "Round {it.round} of block {it.block} is not open; ask for an assignment.",
    Reason.NOT_ASSIGNED: "Slot {it.slot} of round {it.round} was never yours; ask for a slot.",
    Reason.DUPLICATE_SLOT: "Another update for slot {it.slot} came first; ask for a new slot.",
    Reason.OTHER_UPDATE: "This very update came before, but as another; make one of your own.",
    Reason.TOO_OLD: "Round {it.round} is too long ago to build on; ask for a new assignment.",
    Reason.IMPLAUSIBLE: "{it.bytes_trained} bytes in {it.steps} steps and {it.seconds} s cannot "
    "be right for an update of this run; send what was really trained.",
    Reason.BANNED: "The owner takes nothing more from you; write to them if that is a mistake.",
    Reason.ENDED: "No further round could take this update; thank you, and good bye.",
}
