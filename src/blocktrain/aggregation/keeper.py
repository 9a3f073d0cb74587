"""Keeps a run: the rounds, the ledger and the store as one thing that may be killed at any time.

    event ──> rounds.step ──> one ledger transaction ──> answers
                 │                                        │
                 └── Combine ──> blobs ──> Combined ──────┘

One thread takes whatever waits, steps the rounds through it and writes what follows in one
transaction, together with the state of the rounds; only then are answers given. So the state in
memory is always the state on the disk, and a burst of updates costs one sync. Snapshots are made by
another thread: first blobs, then the transaction that names them.
"""

import hashlib
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
from blocktrain.aggregation.combine import norm, refusal
from blocktrain.aggregation.events import (
    Asked,
    Assigned,
    Banned,
    Combine,
    Combined,
    Dropped,
    Effect,
    Effects,
    Ended,
    Event,
    Extended,
    Freed,
    Heard,
    Idle,
    Left,
    Opened,
    Refused,
    Salvaged,
    Spoiled,
    Submitted,
    Tick,
    Verdict,
)
from blocktrain.aggregation.events import Receipt as Decided
from blocktrain.aggregation.ledger import (
    Ledger,
    Receipt,
    Transaction,
    WorkerId,
)
from blocktrain.aggregation.state import State
from blocktrain.aggregation.store import Store
from blocktrain.aggregation.versions import Maker, signed_by
from blocktrain.aggregation.words import spoken
from blocktrain.errors import BadRun, BadTensors, BlockTrainError, NoBlob
from blocktrain.terms import Digest
from blocktrain.wire import messages
from blocktrain.wire.messages import Signed, Traffic, Update
from blocktrain.wire.signing import Key
from blocktrain.wire.tensors import Body

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
        self.charter_bytes, self.created = run.config, run.created
        self.maker = Maker(ledger, store, self.charter, self.run, key)
        self.state = state.rebase(state.decode(kept), time.monotonic())
        self.changed: Callable[[bool], None] = lambda work: None
        """Told after every turn; `work` says that those who wait for work should ask again."""
        self.norms: dict[Digest, float] = {}
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
        name = Digest(hashlib.sha256(signed.body).hexdigest())
        with self.ledger.reading() as r:
            known = r.receipt(name) is not None  # what it built on may be forgotten by now
        why = None if known else self._objection(update)

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
            return after, effects, self._receipt(t, signed, update, verdict)

        return self._tell(work)

    def _objection(self, update: Update) -> str | None:
        """What is wrong with the content, if something is."""
        if not 0 <= update.block < len(self.charter.blocks):
            return f"There is no block {update.block} in this run; ask for an assignment."
        with self.ledger.reading() as r:
            base = r.version(update.block, update.round - 1)
        if base is None or base.snapshot != update.base:
            return "It does not build on the snapshot of its round; ask for an assignment."
        if self.store.size(base.snapshot) is None:  # not kept any more
            return f"Round {update.round} is too long ago to build on; ask for a new assignment."
        shapes = self.charter.shapes(update.block)
        # A pruning that is under way does not know yet that an update names the blob.
        if self.store.size(update.blob) is None or not self.store.renew(update.blob):
            raise NoBlob("The update's tensors are not here; send the blob first.")
        try:
            body = Body(self.store.view(update.blob), self.charter.codec, shapes)
            return refusal(body, self._norm(base.snapshot, update.block))
        except BadTensors as error:
            return str(error)

    def _norm(self, snapshot: Digest, block: int) -> float:
        """Of a snapshot; remembered, since every update of a round is compared with it."""
        found = self.norms.get(snapshot)
        if found is None:
            shapes = self.charter.shapes(block)
            found = norm(Body(self.store.view(snapshot), "fp32", shapes).read, shapes)
            # A new one, since other threads look at the old one.
            last = [*self.norms.items()][-4 * len(self.charter.blocks) :]
            self.norms = {**dict(last), snapshot: found}
        return found

    def _receipt(
        self, t: Transaction, signed: Signed, update: Update, verdict: Verdict | str
    ) -> bytes:
        """Writes down what became of the update; returns it as signed."""
        name = Digest(hashlib.sha256(signed.body).hexdigest())
        match verdict:
            case str() as why:
                word, round, factor = "refused", 0, 0.0
            case Refused(sentence=why):
                word, round, factor = "refused", 0, 0.0
            case Salvaged(round=round, factor=factor):
                word, why = "salvaged", f"It came late and counts for round {round} by {factor}."
            case _:
                word, round, factor, why = "taken", verdict.round, verdict.factor, ""
        receipt = messages.Receipt(name, update.worker, word, round, factor, why[:400])
        body = messages.encode(signed_by(self.key, receipt, "receipt"))
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
        t.note(word, {**detail, "worker": update.worker, "why": why}, time.time())
        return body

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
            # Whoever does not wait any more (the server stops) gets nothing, and nothing is done.
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
                            self._note(t, effects)
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
        return True

    def _note(self, t: Transaction, effects: Effects) -> None:
        """What people may want to know."""
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
                keep = r.blobs_in_use(self.charter.rules.memory + 2)
            self.store.prune(keep, UNNAMED)


def _tick(t: Transaction, now: State, clock: float) -> Turn[None]:
    return (*rounds.step(now, Tick(), clock), None)


def note_traffic(t: Transaction, worker: str, traffic: Traffic) -> None:
    """Workers tell what they have moved in all; it never shrinks."""
    known = t.worker(WorkerId(worker))
    if known is not None:
        sent = max(0, traffic.sent - known.bytes_sent)
        received = max(0, traffic.received - known.bytes_received)
        if sent or received:
            t.add_traffic(known.id, sent, received)
