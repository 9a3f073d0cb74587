"""How a run is doing, for the dashboard, the metrics and `blocktrain status`. Reads only."""

import math
import time
from statistics import median

from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.deadlines import allowance
from blocktrain.aggregation.ledger import Reading, Worker
from blocktrain.aggregation.state import Finished, Open, State
from blocktrain.terms import Digest
from blocktrain.wire.messages import Traffic
from blocktrain.wire.owner import BlockStatus, Happened, Point, Status, WorkerStatus

LAST_EVENTS = 200
MOST_WORKERS = 500  # shown: those who are here first
MOST_POINTS = 500


def status(run: Digest, charter: Charter, now: State, clock: float, r: Reading) -> Status:
    """What anybody may know of the run."""
    record = r.run()
    created = record.created if record else time.time()
    workers = [_worker(each, now, clock) for each in r.workers()]
    workers.sort(key=lambda each: (not each.here, -each.bytes_trained))
    tally = r.tally()
    rounds_closed = min(block.versions[-1].round for block in now.blocks)
    return Status(
        run=run,
        name=charter.name,
        data=charter.data,
        codec=charter.codec,
        parameters=sum(math.prod(s) for block in charter.blocks for s in block.values()),
        rounds=charter.rules.rounds,
        replicas=charter.rules.replicas,
        state=_state(now),
        age=max(0.0, time.time() - created),
        bytes_seen=charter.bytes_before(rounds_closed + 1),
        bytes_moved=sum(each.traffic.sent + each.traffic.received for each in workers),
        blocks=[_block(index, now, clock, tally) for index in range(len(now.blocks))],
        workers=workers[:MOST_WORKERS],
        curve=[
            Point(each.time - created, each.bytes_seen, each.ce)
            for each in thinned(r.evaluations(), MOST_POINTS)
        ],
        reference=[],
        events=[
            Happened(each.number, each.time, each.kind, each.detail)
            for each in r.latest_events(LAST_EVENTS)
        ],
    )


def _state(now: State) -> str:
    if now.ended:
        return "ended"
    if now.stopping:
        return "stopping"
    return "running" if now.paused_since is None else "paused"


def _block(
    index: int, now: State, clock: float, tally: dict[int, tuple[int, int, int]]
) -> BlockStatus:
    block, phase = now.blocks[index], now.blocks[index].phase
    taken, late, refused = tally.get(index, (0, 0, 0))
    left = max(0.0, phase.deadline - now.round_time(clock)) if isinstance(phase, Open) else None
    return BlockStatus(
        block=index,
        round=block.versions[-1].round if isinstance(phase, Finished) else block.round,
        phase=type(phase).__name__.lower(),
        allowance=phase.allowance
        if isinstance(phase, Open)
        else allowance(block.durations, now.rules),
        seconds_left=left,
        updates=len(block.entering(block.round)) if isinstance(phase, Open) else 0,
        workers=sum(seat.held for seat in block.seats),
        taken=taken,
        late=late,
        refused=refused,
    )


def _worker(known: Worker, now: State, clock: float) -> WorkerStatus:
    here = now.workers.get(known.id)
    held = now.held_by(known.id)
    return WorkerStatus(
        worker=known.id,
        name=known.name,
        here=here is not None,
        silent=None if here is None else max(0.0, clock - here.heard),
        block=held[0] if held else None,
        round=held[1].round if held else None,
        seconds_per_step=median(here.paces) if here and here.paces else None,
        updates=known.updates,
        bytes_trained=known.bytes_trained,
        traffic=Traffic(known.bytes_sent, known.bytes_received),
        banned=known.banned is not None,
    )


def thinned(items: list, most: int) -> list:  # type: ignore[type-arg]
    """At most so many of them, evenly, the last one always among them."""
    every = -(-len(items) // most) or 1
    return items[::-1][::every][::-1]
