"""All that a coordinator must remember of a run's rounds, as plain data that fits into JSON."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from blocktrain.aggregation.deadlines import Rules
from blocktrain.aggregation.events import Combine, Part, Salvaged, Taken
from blocktrain.aggregation.ledger import Receipt
from blocktrain.terms import Digest


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the state. Instants are on the coordinator's own clock and never leave it."""


# --- a block's phases ----------------------------------------------------------------------------


class Open(Record, frozen=True, tag=True):
    """Updates are welcome until the deadline."""

    allowance: float
    """Seconds that the round was given, for people to see."""
    deadline: float
    pins: tuple[Digest, ...]
    """The steady copy of each block that this round builds on, fixed when it opened."""
    quorum_since: float | None = None
    """When the quorum was met: its grace runs from then."""


class Combining(Record, frozen=True, tag=True):
    """The round is closed, and its snapshot is being made."""


class Waiting(Record, frozen=True, tag=True):
    """The snapshot is made; the next round opens when the slowest block is near enough."""


class Finished(Record, frozen=True, tag=True):
    """This block has no further round."""


Phase = Open | Combining | Waiting | Finished

# --- what is remembered --------------------------------------------------------------------------


class Version(Record, frozen=True):
    """What a block was after a round."""

    round: int
    snapshot: Digest
    steady: Digest


class Seat(Record, frozen=True, array_like=True):
    """This worker was given this slot of this round. (A list in JSON: there are hundreds.)"""

    round: int
    slot: int
    worker: str
    since: float
    steps: int
    held: bool = True
    """It is expected to submit; false once it has, or was silent or left, or the round closed."""


class Counted(Record, frozen=True, array_like=True):
    """An update with a receipt that says it counts, and the round it counts for."""

    update: Digest
    worker: str
    slot: int
    round: int
    into: int
    bytes_trained: int
    factor: float

    @property
    def verdict(self) -> Taken | Salvaged:
        if self.into == self.round:
            return Taken(self.round, self.factor)
        return Salvaged(self.into, self.factor)


class Worker(Record, frozen=True):
    """Someone who has been heard of within the lease."""

    heard: float
    paces: tuple[float, ...] = ()
    """Its last few reports of seconds a step."""


class Block(Record, frozen=True):
    """Where one block is."""

    versions: tuple[Version, ...]
    """The last `ahead + 2`, oldest first."""
    round: int = 0
    """The newest round it has begun."""
    phase: Phase = Waiting()
    seats: tuple[Seat, ...] = ()
    counted: tuple[Counted, ...] = ()
    durations: tuple[float, ...] = ()
    """Of the last updates, as if each had been of all local steps; they set the deadline."""

    @property
    def welcoming(self) -> int:
        """The round that an update which comes now would count for."""
        return self.round if isinstance(self.phase, Open) else self.round + 1

    @property
    def progress(self) -> int:
        """The round it is in, or will be in as soon as it may."""
        return self.round + isinstance(self.phase, Waiting)

    @property
    def taken_slots(self) -> set[int]:
        """Slots of the present round that someone holds or has filled."""
        held = {seat.slot for seat in self.seats if seat.held}
        return held | {each.slot for each in self.counted if each.round == self.round}

    def entering(self, round: int) -> list[Counted]:
        """The updates that count for a round, in the order in which they are added."""
        counted = (each for each in self.counted if each.into == round)
        return sorted(counted, key=partial(order, round))


def order(into: int, each: Counted | Receipt) -> tuple[bool, int, str, str]:
    """How a round adds updates: its own in slot order, then the late ones by worker and digest."""
    late = each.round != into
    return late, 0 if late else each.slot, each.worker, each.update


class State(Record, frozen=True):
    """A whole run's rounds."""

    rules: Rules
    clock: float
    """The latest instant it was told."""
    blocks: tuple[Block, ...]
    workers: Mapping[str, Worker] = {}
    banned: tuple[str, ...] = ()
    paused_since: float | None = None
    stopping: bool = False

    @property
    def ended(self) -> bool:
        return all(isinstance(block.phase, Finished) for block in self.blocks)

    def round_time(self, now: float) -> float:
        """What the rounds' own clock shows: it stands still during a pause."""
        return now if self.paused_since is None else self.paused_since

    def held_by(self, worker: str) -> tuple[int, Seat] | None:
        """The block and the seat that a worker is expected to submit for."""
        for index, block in enumerate(self.blocks):
            for seat in block.seats:
                if seat.held and seat.worker == worker:
                    return index, seat
        return None


# --- small changes that several rooms make -------------------------------------------------------


def with_block(state: State, index: int, **changes: Any) -> State:
    """The state with something of one block changed."""
    block = replace(state.blocks[index], **changes)
    return replace(state, blocks=(*state.blocks[:index], block, *state.blocks[index + 1 :]))


def combine_of(state: State, index: int, round: int) -> Combine:
    """What must be combined to close this round."""
    entering = state.blocks[index].entering(round)
    parts = (Part(each.update, each.bytes_trained, each.factor) for each in entering)
    return Combine(index, round, tuple(parts))


# --- to disk and back ----------------------------------------------------------------------------


def encode(state: State) -> bytes:
    """The state as canonical JSON: the same events always give the same bytes."""
    return msgspec.json.encode(state, order="deterministic")


def decode(data: bytes) -> State:
    """The state that `encode` wrote."""
    return msgspec.json.decode(data, type=State)


def rebase(state: State, now: float) -> State:
    """The state as a restarted coordinator sees it: the time it was away does not count.

    Monotonic clocks start anywhere after a reboot, so every instant moves along.
    """
    away = float(now) - state.clock

    def moved(instant: float | None) -> float | None:
        return None if instant is None else instant + away

    def moved_block(block: Block) -> Block:
        phase = block.phase
        if isinstance(phase, Open):
            since = moved(phase.quorum_since)
            phase = replace(phase, deadline=phase.deadline + away, quorum_since=since)
        seats = tuple(replace(seat, since=seat.since + away) for seat in block.seats)
        return replace(block, phase=phase, seats=seats)

    return replace(
        state,
        clock=float(now),
        blocks=tuple(moved_block(block) for block in state.blocks),
        workers={
            name: replace(worker, heard=worker.heard + away)
            for name, worker in state.workers.items()
        },
        paused_since=moved(state.paused_since),
    )
