"""Who trains what: hands out the slots of open rounds, and frees those of silent workers."""

import math
from collections.abc import Callable, Container
from statistics import median

from msgspec.structs import replace

from blocktrain.aggregation.deadlines import PACES, allowance, steps_within
from blocktrain.aggregation.events import Asked, Assigned, Effect, Effects, Freed, Idle, Why
from blocktrain.aggregation.state import Block, Finished, Open, Seat, State, Worker, with_block

# An idle worker asks again after a twentieth of the shortest round, within these bounds:
# 0.2 s keeps a lab of one-second rounds busy, 10 s lets nobody sleep through a resume.
RETRY_PART = 0.05
RETRY_SOONEST = 0.2
RETRY_LATEST = 10.0


def assign(state: State, asked: Asked, now: float) -> tuple[State, Effects]:
    """The slot that the worker holds already, or the one it lost, or a new one, or none."""
    if asked.worker in state.banned:
        return state, (Idle(asked.worker, RETRY_LATEST, Why.BANNED),)
    wanted = range(len(state.blocks)) if asked.blocks is None else asked.blocks
    state = heard(state, asked.worker, now)
    effects: Effects = ()
    held = state.held_by(asked.worker)
    if held and held[0] not in wanted:  # it came back for another block
        state, effects = free(state, asked.worker)
    state = reclaim(state, asked.worker, wanted)
    if state.held_by(asked.worker) is None:
        state = _take(state, asked, wanted, now)
    return state, (*effects, _answer(state, asked.worker, now))


def heard(state: State, worker: str, now: float) -> State:
    """The state in which the worker has just been heard of."""
    known = state.workers.get(worker, Worker(now))
    return replace(state, workers={**state.workers, worker: replace(known, heard=now)})


def learn_pace(state: State, worker: str, pace: float) -> State:
    """The state that knows one more measurement of the worker's seconds a step."""
    known = state.workers[worker]
    known = replace(known, paces=(*known.paces, pace)[-PACES:])
    return replace(state, workers={**state.workers, worker: known})


def reclaim(state: State, worker: str, wanted: Container[int]) -> State:
    """A worker that was silent and speaks again gets its slot back, if nobody has it."""
    if state.held_by(worker):
        return state
    lost = [
        (seat.since, index, place)
        for index, block in enumerate(state.blocks)
        if index in wanted and isinstance(block.phase, Open)
        for place, seat in enumerate(block.seats)
        if seat.worker == worker
        if seat.round == block.round and seat.slot not in block.taken_slots
    ]
    if not lost:
        return state
    _, index, place = max(lost)
    seats = state.blocks[index].seats
    again = (*seats[:place], replace(seats[place], held=True), *seats[place + 1 :])
    return with_block(state, index, seats=again)


def free(state: State, worker: str) -> tuple[State, Effects]:
    """Takes back the slot that the worker holds, if any. Its update may still come first."""
    held = state.held_by(worker)
    return free_where(state, held[0], lambda seat: seat is held[1]) if held else (state, ())


def free_where(state: State, index: int, which: Callable[[Seat], bool]) -> tuple[State, Effects]:
    """Takes back those slots of a block that someone holds and that `which` says."""
    seats = state.blocks[index].seats
    gone = [seat for seat in seats if seat.held and which(seat)]
    kept = tuple(replace(seat, held=False) if seat in gone else seat for seat in seats)
    freed = tuple(Freed(seat.worker, index, seat.round, seat.slot) for seat in gone)
    return with_block(state, index, seats=kept), freed


def forget(state: State, worker: str) -> tuple[State, Effects]:
    """Frees the worker's slot and forgets what is known of it."""
    others = {name: known for name, known in state.workers.items() if name != worker}
    return free(replace(state, workers=others), worker)


def forget_silent(state: State, now: float) -> tuple[State, Effects]:
    """Forgets everyone who has been silent for as long as the lease."""
    effects: list[Effect] = []
    for name in sorted(state.workers):
        if now >= state.workers[name].heard + state.rules.lease:
            state, freed = forget(state, name)
            effects += freed
    return state, tuple(effects)


def _take(state: State, asked: Asked, wanted: Container[int], now: float) -> State:
    """Gives the worker the lowest free slot of the least-served block it can train, if any."""
    resting = state.stopping or state.paused_since is not None
    choice = None if resting else _choose(state, asked.worker, wanted)
    if choice is None:
        return state
    index, slot = choice
    block = state.blocks[index]
    phase = block.phase
    assert isinstance(phase, Open)
    if not block.taken_slots and not block.entering(block.round):
        # Nobody was here: the time in which nobody worked is not the worker's.
        seconds = allowance(block.durations, state.rules)
        phase = replace(phase, allowance=seconds, deadline=now + seconds)
    most = state.rules.steps.of(block.round)
    steps = steps_within(phase.deadline - now, _pace(state, asked), most)
    seat = Seat(block.round, slot, asked.worker, now, steps)
    return with_block(state, index, phase=phase, seats=(*block.seats, seat))


def _choose(state: State, worker: str, wanted: Container[int]) -> tuple[int, int] | None:
    """Block and slot: wanted slots first, then spare ones.

    Of each, the block that the worker trained last, whose optimiser it remembers; else the
    least-served one. It leaves its block to others if a block has nobody at all.
    """
    replicas = state.rules.replicas
    homes = _homes(state)
    home = homes.get(worker)
    shared = sum(each == home for each in homes.values()) > 1
    lonely = {index for index, block in enumerate(state.blocks) if not block.taken_slots}
    orphans = lonely - set(homes.values()) if shared else set()
    open_blocks = [
        (
            (index not in orphans, index != home, len(block.taken_slots), block.round, index),
            block.taken_slots,
        )
        for index, block in enumerate(state.blocks)
        if index in wanted and isinstance(block.phase, Open)
    ]
    for slots in (range(replicas), range(replicas, replicas + state.rules.spare_slots)):
        for (*_, index), taken in sorted(open_blocks, key=lambda it: it[0]):
            if (slot := next((it for it in slots if it not in taken), None)) is not None:
                return index, slot
    return None


def _homes(state: State) -> dict[str, int]:
    """The block that each worker trained last, in a round before the present one."""
    seats = sorted(
        (seat.since, index, seat.worker)
        for index, block in enumerate(state.blocks)
        for seat in block.seats
        if seat.round < block.round and seat.worker in state.workers
    )
    return {worker: index for _, index, worker in seats}


def _pace(state: State, asked: Asked) -> float | None:
    """Seconds a step: as measured, else as the worker guesses, else unknown."""
    if paces := state.workers[asked.worker].paces:
        return median(paces)
    guess = asked.seconds_per_step
    return guess if guess is not None and 0 < guess < math.inf else None


def _answer(state: State, worker: str, now: float) -> Assigned | Idle:
    if held := state.held_by(worker):
        index, seat = held
        left = seconds_left(state, state.blocks[index], now)
        return Assigned(worker, index, seat.round, seat.slot, left, seat.steps)
    if state.stopping or state.ended:
        return Idle(worker, RETRY_LATEST, Why.ENDED)
    if state.paused_since is not None:
        return Idle(worker, RETRY_LATEST, Why.PAUSED)
    rules = state.rules
    shortest = min(  # a part of what a full round may take, as the round is a part of a full one
        allowance(block.durations, rules) * rules.steps.of(block.round) / rules.local_steps
        for block in state.blocks
        if not isinstance(block.phase, Finished)
    )
    return Idle(
        worker, min(max(shortest * RETRY_PART, RETRY_SOONEST), RETRY_LATEST), Why.NOTHING_FREE
    )


def seconds_left(state: State, block: Block, now: float) -> float:
    """Until the deadline of an open round."""
    assert isinstance(block.phase, Open)
    return max(0.0, block.phase.deadline - state.round_time(now))
