"""The worker: fetch a block, train it, submit the update, go on. Outbound HTTP only.

FOLDER/key.pem        who this worker is
FOLDER/traffic.json   bytes moved where nobody let it in
FOLDER/RUN/blocks/    versions of blocks (services/holdings.py)
FOLDER/RUN/           what it remembers of a run (services/memory.py)
"""

import hashlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from blocktrain.aggregation.receipts import read_receipt
from blocktrain.aggregation.versions import signed_by
from blocktrain.errors import BlockTrainError, NoBlob, NotAllowed
from blocktrain.learning import device
from blocktrain.learning.data import Cursor, Rows, batches
from blocktrain.learning.local import Start, Update, parameters_of, train_locally
from blocktrain.learning.model import new_block
from blocktrain.learning.objective import Loader, objective_for, watched
from blocktrain.services import cores, membership
from blocktrain.services.assigned import loaders_of, refuse_other_blocks, run_of, work_of
from blocktrain.services.holdings import Holdings
from blocktrain.services.memory import Memory, Notebook, spent
from blocktrain.services.room import Room, state_size
from blocktrain.services.text import text_of
from blocktrain.services.wishes import Wishes, fitting
from blocktrain.terms import Digest, Progress, silent
from blocktrain.wire import messages, tensors
from blocktrain.wire.link import Link
from blocktrain.wire.messages import Assignment, Finished, Traffic, Wait
from blocktrain.wire.signing import Key, load_or_make_key
from blocktrain.wire.throttle import Moved

TELLING = 2**20  # bytes: the time that fewer take tells the delay of a link, not its rate


@dataclass
class Gave:
    """What a worker contributed."""

    updates: int = 0
    refused: int = 0
    bytes_trained: int = 0
    seconds: float = 0.0


class Worker:
    """One volunteer in one run."""

    def __init__(
        self,
        link: Link,
        token: str,
        folder: Path,
        wishes: Wishes,
        say: Callable[[str], None] = lambda text: None,
        progress: Progress = silent,
    ) -> None:
        self.link, self.token, self.wishes, self.say, self.progress = (
            link, token, wishes, say, progress,
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.key: Key = load_or_make_key(folder / "key.pem")
        self.root = folder
        self.leaving = threading.Event()
        self.gave = Gave()
        self.pace: float | None = None
        self.rate: float | None = None
        self.where = device.choose(wishes.device)
        self.moved_before: Traffic | None = None
        link.meter.before = spent(folder)
        if wishes.threads is not None:
            torch.set_num_threads(wishes.threads)

    # --- coming in --------------------------------------------------------------------------------

    def join(self) -> None:
        """Shows the token, and learns what everyone agrees on."""
        who = membership.Visitor(self.key, self.token, self.wishes.name, str(self.where))
        admitted = membership.join(self.link, who)
        self.coordinator, self.run_id = admitted.coordinator, admitted.run
        self.charter = admitted.charter
        self.run = run_of(self.charter)
        refuse_other_blocks(self.charter, self.run.shape)
        self.folder = admitted.folder(self.root)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.notebook = Notebook(self.folder)
        if self.moved_before is None:  # else let in again: the file has this life's bytes too
            self.moved_before = self.notebook.traffic()
        self.room = Room(self.folder, self.wishes.max_disk)
        self.free = who.memory
        self.choose_blocks()  # before anything large is fetched: perhaps none fits
        with self.clocked():
            self.corpus = text_of(
                self.charter, self.wishes.data, self.link, self.room, self.progress
            )
        self.holdings = Holdings(
            self.folder / "blocks",
            self.link,
            self.charter,
            lambda block: parameters_of(new_block(self.run.shape, block, self.run.pace.seed)),
            self.room,
        )

    @property
    def was_let_in(self) -> bool:
        """Whether the coordinator ever took the token, and so the folder knows the run."""
        return self.moved_before is not None

    def choose_blocks(self) -> None:
        """Which ones to ask for, by what is known of this machine and its link."""
        self.blocks = fitting(self.wishes, self.charter, self.run.recipe, self.free, self.rate)

    @contextmanager
    def clocked(self) -> Iterator[None]:
        """Learns from the first large download how fast the link is."""
        before, began = self.link.moved.received, time.monotonic()
        yield
        received = self.link.moved.received - before
        if self.rate is None and received >= TELLING:
            self.rate = received / (time.monotonic() - began)
            self.choose_blocks()

    # --- working ----------------------------------------------------------------------------------

    def work(self) -> Gave:
        """Rounds until the run is over or somebody says stop."""
        try:
            self.join()
            threading.Thread(target=self.beat, name="heartbeat", daemon=True).start()
            while not self.leaving.is_set() and self.turn():
                pass
            self.leaving.set()
            self.leave()
        finally:
            self.leaving.set()
            self.keep_traffic()
        return self.gave

    def turn(self) -> bool:
        """One question and what follows from it; False when the run is over."""
        try:
            self.submit_pending()
            if self.leaving.is_set():
                return False
            ask = messages.Ask(self.key.id, self.blocks, self.pace, self.traffic())
            match self.link.say("v1/ask", ask, Assignment, Wait, Finished):
                case Assignment() as assignment:
                    self.train(assignment)
                case Wait(seconds=seconds):
                    self.leaving.wait(seconds)
                case Finished(why=why):
                    self.say(why)
                    return False
        except NoBlob:
            self.leaving.wait(1.0)  # the round went on without us: ask again
        except NotAllowed:
            self.join()  # the coordinator may be a restored one
        return True

    def train(self, assignment: Assignment) -> None:
        """Local steps on the assigned block; the update is on the disk when this returns."""
        block = assignment.block
        with self.clocked():
            snapshot = self.holdings.snapshot(assignment.base)
            loaders = self.neighbours(assignment)
        self.room.claim(state_size(block, self.charter), f"Training of block {block + 1}")
        memory = self.notebook.recall(block)
        with cores.turn(self.wishes.turns, self.leaving.is_set):
            began = time.monotonic()
            update, optimiser = train_locally(
                Start(snapshot, memory.optimiser),
                (rows for rows, _ in itertools.islice(self.batches(assignment), assignment.steps)),
                objective_for(block, self.run.recipe, loaders),
                work_of(self.run, assignment),
                self.where,
                self.leaving.is_set,
            )
            seconds = max(1e-3, time.monotonic() - began)
        if not update.steps:
            return
        self.pace = seconds / update.steps
        if is_finite(update):
            self.keep(assignment, update, seconds, Memory(optimiser, memory.residual))
            self.submit_pending()
        else:
            self.notebook.forget(block)  # whatever went wrong may have begun there
            self.say(
                f"block {block + 1}, round {assignment.round}: the numbers are not finite any "
                "more; the optimiser begins anew."
            )

    def neighbours(self, assignment: Assignment) -> list[Loader]:
        """Opens the steady copies that the assignment pins."""
        pinned = {version.block: version for version in assignment.neighbours}
        paths = {
            block: self.holdings.steady(pinned[block])
            for block in watched(assignment.block, self.run.recipe)
        }
        return loaders_of(paths, self.run, self.where)

    def batches(self, assignment: Assignment) -> Iterator[tuple[Rows, Cursor]]:
        """The data of the assigned slot and round."""
        cursor = Cursor(assignment.slot, assignment.round, 0)
        return batches(self.corpus.train, self.run.plan, cursor)

    # --- submitting -------------------------------------------------------------------------------

    def keep(self, assignment: Assignment, trained: Update, seconds: float, memory: Memory) -> None:
        """The update is on the disk, and what the replica will remember, before anybody hears."""
        body, lost = tensors.encode_with_residual(
            trained.change, memory.residual, self.charter.codec
        )
        said = messages.Update(
            worker=self.key.id,
            run=self.run_id,
            block=assignment.block,
            round=assignment.round,
            slot=assignment.slot,
            base=assignment.base.snapshot,
            blob=Digest(hashlib.sha256(body).hexdigest()),
            steps=trained.steps,
            bytes_trained=trained.bytes_trained,
            seconds=seconds,
            loss=trained.loss,
            optimiser_before=trained.optimiser_before,
            optimiser_after=trained.optimiser_after,
        )
        signed = signed_by(self.key, said, "update")
        self.notebook.keep(signed, body, Memory(memory.optimiser, lost))

    def submit_pending(self) -> None:
        """Sends what was trained, if anything was, and remembers what its receipt says."""
        if (signed := self.notebook.waiting()) is None:
            return
        update = messages.decode(signed.body, messages.Update)
        self.link.send(f"v1/blobs/{update.blob}", self.notebook.blob)
        answer = self.link.say("v1/updates", signed, messages.Signed)
        receipt = read_receipt(answer, signed, self.coordinator)
        if receipt.verdict == "refused":
            self.gave.refused += 1
            if receipt.reason == "numbers":
                self.notebook.forget(update.block)  # whatever went wrong began there
            self.notebook.refused()
        else:
            self.gave.updates += 1
            self.gave.bytes_trained += update.bytes_trained
            self.gave.seconds += update.seconds
            self.notebook.taken(update.block)
        self.keep_traffic()
        self.say(
            f"block {update.block + 1}, round {update.round}: {update.steps} steps in "
            f"{update.seconds:.1f} s, loss {update.loss:.4f}: {receipt.verdict} {receipt.why}"
        )

    # --- staying and going ------------------------------------------------------------------------

    def beat(self) -> None:
        """Says now and then that this worker is at it."""
        while not self.leaving.wait(self.charter.rules.lease / 3):
            try:
                self.link.say(
                    "v1/alive", messages.Alive(self.key.id, self.traffic()), messages.Done
                )
            except BlockTrainError:
                continue  # whoever works will find out

    def leave(self) -> None:
        """Says good-bye, if anybody listens."""
        try:
            self.link.patience = 5.0
            self.link.stop.clear()
            self.link.say("v1/leave", messages.Leave(self.key.id, self.traffic()), messages.Done)
        except BlockTrainError:
            return

    def keep_traffic(self) -> None:
        """For the next life. Before anybody let us in, the bytes are of no run."""
        if self.was_let_in:
            return self.notebook.keep_traffic(self.traffic())
        nowhere = Notebook(self.root)
        nowhere.keep_traffic(plus(nowhere.traffic(), self.link.moved))

    def traffic(self) -> Traffic:
        """Bytes moved in this run, in this life and those before."""
        return plus(self.moved_before or Traffic(), self.link.moved)


def plus(before: Traffic, moved: Moved) -> Traffic:
    """Bytes of former lives and of this one."""
    return Traffic(before.sent + moved.sent, before.received + moved.received)


def is_finite(update: Update) -> bool:
    """Whether anybody could average it; JSON could not even tell its loss."""
    return math.isfinite(update.loss) and all(
        np.isfinite(change).all() for change in update.change.values()
    )
