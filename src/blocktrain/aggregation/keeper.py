"""Keeps a run: the rounds, the ledger and the store as one thing that may be killed at any time.

    event ──> rounds.step ──> one ledger transaction ──> answers
                 │                                        │
                 └── Combine ──> blobs ──> Combined ──────┘

One thread takes whatever waits, steps the rounds through it and writes what follows in one
transaction, together with the state of the rounds; only then are answers given. So the state in
memory is always the state on the disk, and a burst of updates costs one sync. Snapshots are made by
another thread: first blobs, then the transaction that names them.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from blocktrain.aggregation import charter as charters
from blocktrain.aggregation import rounds, state
from blocktrain.aggregation.events import (
    Asked,
    Assigned,
    Banned,
    Combine,
    Combined,
    Effect,
    Effects,
    Ended,
    Event,
    Freed,
    Heard,
    Idle,
    Left,
    Opened,
    Spoiled,
    Submitted,
    Tick,
    Verdict,
)
from blocktrain.aggregation.events import Receipt as Decided
from blocktrain.aggregation.inspection import Inspector
from blocktrain.aggregation.ledger import Ledger, Transaction, WorkerId
from blocktrain.aggregation.notes import note_effects, note_traffic
from blocktrain.aggregation.receipts import give_receipt, name_of
from blocktrain.aggregation.retention import blobs_kept
from blocktrain.aggregation.state import State
from blocktrain.aggregation.store import Store
from blocktrain.aggregation.telling import Teller
from blocktrain.aggregation.versions import Maker
from blocktrain.aggregation.words import spoken
from blocktrain.errors import BadRun, BlockTrainError
from blocktrain.wire import messages
from blocktrain.wire.messages import Signed, Traffic, Update
from blocktrain.wire.signing import Key

RETRY = 2.0  # seconds between attempts at what a full disk held up
PRUNE_EVERY = 30.0  # seconds
UNNAMED = 120.0  # seconds that a blob may lie here before an update or a version names it

T = TypeVar("T")
Turn = tuple[State, Effects, T]
Work = Callable[[Transaction, State, float], Turn[T]]

log = logging.getLogger("blocktrain.keeper")


@dataclass(frozen=True)
class Piece(Generic[T]):
    """Something that waits for its turn."""

    work: Work[T]
    done: "Future[T]"


class Keeper:
    """One run. Threads may call its methods; those that change something return futures."""

    def __init__(self, ledger: Ledger, store: Store, key: Key) -> None:
        self.ledger, self.store, self.key = ledger, store, key
        with ledger.reading() as r:
            run, kept = r.run(), r.state()
        if run is None or kept is None:
            raise BadRun("There is no run in this folder yet; make one with blocktrain init.")
        self.charter, self.run = charters.decode(run.config), charters.run_id(run.config)
        self.charter_bytes = run.config
        self.inspector = Inspector(ledger, store, self.charter)
        self.maker = Maker(ledger, store, self.charter, self.run, key)
        self.teller = Teller(ledger)
        self.state = state.rebase(state.decode(kept), time.monotonic())
        self.changed: Callable[[bool], None] = lambda work: None
        """Told after every turn; `work` says that those who wait for work should ask again."""
        self.door = threading.Condition()
        self.waiting: deque[Piece[Any]] = deque()
        self.closing = False
        self.pruned = time.monotonic()
        self.combiner = ThreadPoolExecutor(1, "combine")
        self.thread = threading.Thread(target=self._serve, name="keeper", daemon=True)

    def start(self) -> None:
        """Takes up what was under way."""
        for effect in rounds.pending(self.state):
            self._act(effect)
        self.thread.start()

    def close(self) -> None:
        """Finishes what waits; a snapshot that is being made is made again by the next start."""
        with self.door:
            self.closing = True
            self.door.notify()
        self.combiner.shutdown(cancel_futures=True)
        if self.thread.ident is not None:
            self.thread.join()

    # --- what workers want ------------------------------------------------------------------------

    def ask(self, asked: Asked, traffic: Traffic) -> "Future[messages.Message]":
        """The worker's next assignment, if there is one."""

        def work(t: Transaction, now: State, clock: float) -> Turn[Any]:
            after, effects = rounds.step(now, asked, clock)
            note_traffic(t, asked.worker, traffic)
            answer = next(e for e in effects if isinstance(e, Assigned | Idle))
            return after, effects, spoken(t, self.charter, after, answer)

        return self._tell(work)

    def hear(self, worker: str, traffic: Traffic) -> "Future[None]":
        """The worker is still at it."""
        return self._tell(partial(self._simply, Heard(worker), worker, traffic))

    def leave(self, worker: str, traffic: Traffic) -> "Future[None]":
        """The worker goes; its slot is free."""
        return self._tell(partial(self._simply, Left(worker), worker, traffic))

    def submit(self, signed: Signed, update: Update) -> "Future[bytes]":
        """The signed receipt for an update whose signature has been checked.

        Looks at the content first, in the caller's thread.
        """
        name = name_of(signed)
        with self.ledger.reading() as r:
            known = r.receipt(name) is not None  # what it built on may be forgotten by now
        why = None if known else self.inspector.objection(update)

        def work(t: Transaction, now: State, clock: float) -> Turn[bytes]:
            if standing := t.receipt(name):
                return now, (), standing.receipt
            event: Event = Submitted(
                update.worker,
                update.block,
                update.round,
                update.slot,
                name,
                update.bytes_trained,
                update.seconds,
                update.steps,
            )
            spoiled = Spoiled(update.worker, update.block, update.round, update.slot)
            after, effects = rounds.step(now, event if why is None else spoiled, clock)
            verdict: Verdict | str = why or ""
            for effect in effects:
                if isinstance(effect, Decided) and effect.update == name:
                    verdict = effect.verdict
            return after, effects, give_receipt(t, self.key, signed, update, verdict)

        return self._tell(work)

    # --- what the owner wants ---------------------------------------------------------------------

    def tell(self, event: Event, kind: str) -> "Future[None]":
        """Pause, Resume or Stop."""

        def work(t: Transaction, now: State, clock: float) -> Turn[None]:
            after, effects = rounds.step(now, event, clock)
            t.note(kind, {}, time.time())
            return after, effects, None

        return self._tell(work)

    def ban(self, worker: WorkerId) -> "Future[None]":
        """Nothing more is taken from this worker."""

        def work(t: Transaction, now: State, clock: float) -> Turn[None]:
            after, effects = rounds.step(now, Banned(worker), clock)
            t.ban(worker, time.time())
            t.note("banned", {"worker": worker}, time.time())
            return after, effects, None

        return self._tell(work)

    def write(self, work: Callable[[Transaction], T]) -> "Future[T]":
        """Something that the rounds need not know."""
        return self._tell(lambda t, now, clock: (now, (), work(t)))

    # --- one turn after another -------------------------------------------------------------------

    def _tell(self, work: Work[T]) -> "Future[T]":
        done: Future[T] = Future()
        with self.door:
            if self.closing:
                raise BadRun("The coordinator is stopping; ask again when it is back.")
            self.waiting.append(Piece(work, done))
            self.door.notify()
        return done

    def _simply(
        self, event: Event, worker: str, traffic: Traffic, t: Transaction, now: State, clock: float
    ) -> Turn[None]:
        after, effects = rounds.step(now, event, clock)
        note_traffic(t, worker, traffic)
        if isinstance(event, Left):
            t.note("left", {"worker": worker}, time.time())
        return after, effects, None

    def _serve(self) -> None:
        while True:
            wake = rounds.next_wake(self.state, time.monotonic())
            with self.door:
                self.door.wait_for(
                    lambda: self.waiting or self.closing,
                    None if wake is None else max(0.0, wake - time.monotonic()),
                )
                pieces = [self.waiting.popleft() for _ in range(len(self.waiting))]
                if self.closing and not pieces:
                    return
            # Who does not wait any more (the coordinator stops) gets nothing, and nothing is done.
            pieces = [piece for piece in pieces if piece.done.set_running_or_notify_cancel()]
            if not self._turn(pieces or [Piece(_tick, Future())]):
                time.sleep(RETRY)  # the disk is full: neither spin nor give up

    def _turn(self, pieces: list[Piece[Any]]) -> bool:
        """One transaction for all; whether it could be written."""
        now, clock = self.state, time.monotonic()
        said: list[Effect] = []
        outcomes: list[Callable[[], None]] = []
        try:
            with self.ledger.transaction() as t:
                for piece in pieces:
                    try:
                        with t.whole():
                            after, effects, value = piece.work(t, now, clock)
                            note_effects(t, effects)
                    except Exception as error:  # this piece alone is undone, whatever it was
                        if not isinstance(error, BlockTrainError):
                            log.exception("a bug: nothing of this request has happened")
                        outcomes.append(partial(piece.done.set_exception, error))
                        continue
                    now = after
                    said += effects
                    outcomes.append(partial(piece.done.set_result, value))
                if replace(now, clock=0.0) != replace(self.state, clock=0.0):
                    t.keep_state(state.encode(now))
        except Exception as error:  # nothing of it has happened
            log.error("cannot write: %s", error)
            for piece in pieces:
                piece.done.set_exception(error)
            return False
        self.state = now
        for tell in outcomes:
            tell()
        for effect in said:
            self._act(effect)
        self.changed(any(isinstance(effect, Opened | Freed | Ended) for effect in said))
        try:
            self.teller.tell()
        except Exception as error:  # a log is not worth a run
            log.error("cannot tell what happened: %s", error)
        return True

    def _act(self, effect: Effect) -> None:
        with self.door:
            if isinstance(effect, Combine) and not self.closing:  # else the next start takes it up
                self.combiner.submit(self._combine, effect)

    # --- snapshots --------------------------------------------------------------------------------

    def _combine(self, effect: Combine) -> None:
        """Makes the snapshot of a closed round, however often it takes."""
        while not self.closing:
            try:
                self._make_version(effect)
                self._prune()
                return
            except Exception:
                log.exception("block %d, round %d: not combined", effect.block, effect.round)
                time.sleep(RETRY)

    def _make_version(self, effect: Combine) -> None:
        version, shares = self.maker.make(effect)
        event = Combined(effect.block, effect.round, version.snapshot, version.steady)

        def work(t: Transaction, now: State, clock: float) -> Turn[None]:
            after, effects = rounds.step(now, event, clock)
            t.close_round(version, shares, state.encode(after))
            detail = {"block": effect.block, "round": effect.round, "updates": len(shares)}
            t.note("closed", detail, version.closed)
            return after, effects, None

        self._tell(work).result()

    def _prune(self) -> None:
        """Forgets blobs that nobody can ask for any more."""
        if time.monotonic() - self.pruned > PRUNE_EVERY:
            self.pruned = time.monotonic()
            with self.ledger.reading() as r:
                keep = blobs_kept(r)
            self.store.prune(keep, UNNAMED)


def _tick(t: Transaction, now: State, clock: float) -> Turn[None]:
    return (*rounds.step(now, Tick(), clock), None)
