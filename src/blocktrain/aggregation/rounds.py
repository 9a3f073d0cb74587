"""The rounds of a run as a pure state machine: (state, event, now) -> (state, effects).

    Waiting ──may open──> Open ──closed──> Combining ──Combined──> Waiting ... Finished

No clock, no chance, no I/O: `now` is the coordinator's monotonic seconds, and the same events give
the same state. docs/rounds.md draws the whole of it. Who gets which slot is in assignments.py,
which updates count in updates.py.
"""

from collections.abc import Sequence
from typing import assert_never

from msgspec.structs import replace

from blocktrain.aggregation.assignments import (
    assign,
    forget,
    forget_silent,
    free_where,
    heard,
    reclaim,
)
from blocktrain.aggregation.deadlines import Rules, allowance
from blocktrain.aggregation.events import (
    Asked,
    Banned,
    Combined,
    Effect,
    Effects,
    Ended,
    Event,
    Extended,
    Heard,
    Left,
    Opened,
    Pause,
    Resume,
    Spoiled,
    Stop,
    Submitted,
    Tick,
)
from blocktrain.aggregation.state import (
    Block,
    Combining,
    Finished,
    Open,
    State,
    Version,
    Waiting,
    combine_of,
    with_block,
)
from blocktrain.aggregation.updates import Turn, ban, spoil, submit
from blocktrain.errors import BadConfig
from blocktrain.terms import Digest


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


def _apply(state: State, event: Event, now: float) -> Turn:
    match event:
        case Asked():
            return assign(state, event, now)
        case Submitted():
            return submit(state, event, now)
        case Spoiled():
            return spoil(state, event, now)
        case Heard(worker=worker):
            if worker in state.banned:
                return state, ()
            back = worker not in state.workers  # it was silent: its slot is its own if still free
            state = heard(state, worker, now)
            return (reclaim(state, worker, range(len(state.blocks))) if back else state), ()
        case Left(worker=worker):
            return forget(state, worker)
        case Banned(worker=worker):
            return ban(state, worker, now)
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
    """Gives the round a new deadline, and others the slots of those who have had twice their time.

    Who is a little late is not made late by a rival, and who speaks for ever but never submits
    does not hold up the run for ever.
    """
    round, durations = state.blocks[index].round, state.blocks[index].durations
    state, freed = free_where(state, index, lambda seat: now >= seat.since + 2 * phase.allowance)
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
