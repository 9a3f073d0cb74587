"""The rounds of a run as a pure state machine: (state, event, now) -> (state, effects).

    Waiting ──may open──> Open ──closed──> Combining ──Combined──> Waiting ... Finished

No clock, no chance, no I/O: `now` is the coordinator's monotonic seconds, and the same events give
the same state. docs/rounds.md draws the whole of it.
"""

import math
from collections.abc import Sequence
from typing import assert_never

from msgspec.structs import replace

from blocktrain.aggregation.assignments import (
    assign,
    forget,
    forget_silent,
    free_where,
    heard,
    learn_pace,
    reclaim,
)
from blocktrain.aggregation.deadlines import Rules, allowance, full_duration
from blocktrain.aggregation.events import (
    Asked,
    Banned,
    Combined,
    Dropped,
    Effect,
    Effects,
    Ended,
    Event,
    Extended,
    Freed,
    Heard,
    Left,
    Opened,
    Pause,
    Reason,
    Receipt,
    Refused,
    Resume,
    Spoiled,
    Stop,
    Submitted,
    Tick,
)
from blocktrain.aggregation.state import (
    Block,
    Combining,
    Counted,
    Finished,
    Open,
    Seat,
    State,
    Version,
    Waiting,
    combine_of,
    with_block,
)
from blocktrain.errors import BadConfig
from blocktrain.terms import Digest

Turn = tuple[State, Effects]


def begin(rules: Rules, first: Sequence[Version], now: float) -> Turn:
    """A new run on the owner's snapshots, one version of round 0 for each block."""
    if len(first) != rules.blocks or any(version.round for version in first):
        raise BadConfig(f"Give a first snapshot (round 0) for each of the {rules.blocks} blocks.")
    blocks = tuple(Block(versions=(version,)) for version in first)
    return step(State(rules, float(now), blocks), Tick(), now)


def step(state: State, event: Event, now: float) -> Turn:
    """What the run is after an event, and what its coordinator must now do or say, in order.

    What time alone has brought comes first, so that it does not matter how punctual the ticks are.
    """
    now = max(float(now), state.clock)  # time never runs back
    before = state.ended
    state, due = _settle(state, now)
    state, answer = _apply(state, event, now)
    state, moved = _settle(state, now)
    over = (Ended(),) if state.ended and not before else ()
    return replace(state, clock=now), (*due, *answer, *moved, *over)


def pending(state: State) -> Effects:
    """What a restarted coordinator must take up again: the rounds that were being combined."""
    return tuple(
        combine_of(state, index, block.round)
        for index, block in enumerate(state.blocks)
        if isinstance(block.phase, Combining)
    )


def next_wake(state: State, now: float) -> float | None:
    """The instant (never before `now`) at which a Tick is needed, or None while it is not."""
    wakes = [
        state.workers[seat.worker].heard + state.rules.lease
        for block in state.blocks
        for seat in block.seats
        if seat.held
    ]
    for block in state.blocks:
        if isinstance(block.phase, Open) and state.paused_since is None:
            wakes.append(block.phase.deadline)
            if block.phase.quorum_since is not None:
                wakes.append(block.phase.quorum_since + state.rules.grace)
    return max(now, min(wakes)) if wakes else None


def in_use(state: State) -> set[Digest]:
    """Every digest that must not be pruned: bases, pins, and updates not yet in a snapshot."""
    digests = {
        digest
        for block in state.blocks
        for version in block.versions
        for digest in (version.snapshot, version.steady)
    }
    for block in state.blocks:
        if isinstance(block.phase, Open):
            digests.update(block.phase.pins)
        newest = block.versions[-1].round
        digests.update(each.update for each in block.counted if each.into > newest)
    return digests


def _apply(state: State, event: Event, now: float) -> Turn:
    match event:
        case Asked():
            return assign(state, event, now)
        case Submitted():
            return _submit(state, event, now)
        case Spoiled():
            return _spoil(state, event, now)
        case Heard(worker=worker):
            if worker in state.banned:
                return state, ()
            back = worker not in state.workers  # it was silent: its slot is its own if still free
            state = heard(state, worker, now)
            return (reclaim(state, worker, range(len(state.blocks))) if back else state), ()
        case Left(worker=worker):
            return forget(state, worker)
        case Banned(worker=worker):
            return _ban(state, worker, now)
        case Combined():
            return _record(state, event), ()
        case Tick():
            return state, ()
        case Pause():
            idle = state.stopping or state.paused_since is not None
            return (state if idle else replace(state, paused_since=now)), ()
        case Resume():
            return _resume(state, now), ()
        case Stop():
            return replace(_resume(state, now), stopping=True), ()
        case _:
            assert_never(event)


# --- what time brings ----------------------------------------------------------------------------


def _settle(state: State, now: float) -> Turn:
    """Frees slots, closes rounds and opens rounds, as far as they are due."""
    state, freed = forget_silent(state, now)
    effects: list[Effect] = [*freed]
    if state.paused_since is None:
        for index in range(len(state.blocks)):
            state, closed = _close_if_due(state, index, now)
            effects += closed
        for index in range(len(state.blocks)):
            state, opened = _go_on(state, index, now)
            effects += opened
    return state, tuple(effects)


def _close_if_due(state: State, index: int, now: float) -> Turn:
    """Closes an open round, gives it a new deadline, or leaves it alone."""
    block, rules = state.blocks[index], state.rules
    phase = block.phase
    if not isinstance(phase, Open):
        return state, ()
    something = bool(block.entering(block.round))
    nobody = not any(seat.held and seat.slot < rules.replicas for seat in block.seats)
    over = now >= phase.deadline
    since = phase.quorum_since
    enough = since is not None and (nobody or now >= since + rules.grace)
    if enough or (something and over) or (state.stopping and (nobody or over)):
        return _close(state, index, block.round)
    if over:
        return _extend(state, index, phase, now)
    return state, ()


def _extend(state: State, index: int, phase: Open, now: float) -> Turn:
    """Gives the round a new deadline, and others the slots of those who have had all their time.

    Else a worker that speaks for ever but never submits would hold up the run for ever.
    """
    round, durations = state.blocks[index].round, state.blocks[index].durations
    state, freed = free_where(state, index, lambda seat: now >= seat.since + phase.allowance)
    seconds = allowance(durations, state.rules)
    longer = replace(phase, allowance=seconds, deadline=now + seconds)
    return with_block(state, index, phase=longer), (*freed, Extended(index, round, seconds))


def _close(state: State, index: int, round: int) -> Turn:
    """Ends a round with the updates it has, or with none; nobody is expected any more."""
    state, _ = free_where(state, index, lambda _: True)
    combine = combine_of(state, index, round)
    if not combine.parts:
        return with_block(state, index, phase=Finished()), ()
    return with_block(state, index, round=round, phase=Combining()), (combine,)


def _go_on(state: State, index: int, now: float) -> Turn:
    """Opens the next round of a waiting block if it may; a stopping run has none left to open."""
    block = state.blocks[index]
    number = block.round + 1
    if not isinstance(block.phase, Waiting):
        return state, ()
    if state.stopping:
        # Updates salvaged into a round that will not open have receipts: they are combined all
        # the same, as the block's last round.
        return _close(state, index, number)
    if number > min(each.progress for each in state.blocks) + state.rules.ahead:
        return state, ()
    seconds = allowance(block.durations, state.rules)
    pins = tuple(_pin(each.versions, number - 1) for each in state.blocks)
    phase = Open(seconds, now + seconds, pins)
    opened = Opened(index, number, seconds)
    return with_block(state, index, round=number, phase=phase), (opened,)


def _pin(versions: Sequence[Version], round: int) -> Digest:
    """The steady copy of that round where it exists, else the newest."""
    found = next((version for version in versions if version.round == round), versions[-1])
    return found.steady


def _resume(state: State, now: float) -> State:
    """Moves the deadlines by the time the run was paused."""
    if state.paused_since is None:
        return state
    paused = now - state.paused_since
    for index, block in enumerate(state.blocks):
        if isinstance(phase := block.phase, Open):
            since = None if phase.quorum_since is None else phase.quorum_since + paused
            moved = replace(phase, deadline=phase.deadline + paused, quorum_since=since)
            state = with_block(state, index, phase=moved)
    return replace(state, paused_since=None)


def _record(state: State, done: Combined) -> State:
    """Notes the new version, and forgets what is too old to be built on or to come again."""
    block = state.blocks[done.block] if 0 <= done.block < len(state.blocks) else None
    if block is None or not isinstance(block.phase, Combining) or block.round != done.round:
        raise ValueError(f"Round {done.round} of block {done.block} is not being combined.")
    version = Version(done.round, done.snapshot, done.steady)
    oldest = done.round + 2 - state.rules.memory
    return with_block(
        state,
        done.block,
        phase=Finished() if done.round >= state.rules.rounds else Waiting(),
        versions=(*block.versions, version)[-state.rules.memory :],
        seats=tuple(seat for seat in block.seats if seat.round >= oldest),
        counted=tuple(each for each in block.counted if each.round >= oldest),
    )


# --- updates -------------------------------------------------------------------------------------


def _submit(state: State, update: Submitted, now: float) -> Turn:
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
    plausible = 1 <= update.steps <= rules.local_steps and 0 < update.bytes_trained <= most
    if not plausible or not 0 < update.seconds < math.inf:
        return Reason.IMPLAUSIBLE
    if not 1 <= update.round <= block.round:
        return Reason.NOT_OPEN
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


def _spoil(state: State, spoiled: Spoiled, now: float) -> Turn:
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


def _ban(state: State, worker: str, now: float) -> Turn:
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
