"""The worker: fetch a block, train it, submit the update, go on. Outbound HTTP only.

FOLDER/key.pem        who this worker is
FOLDER/RUN/blocks/    versions of blocks (services/holdings.py)
FOLDER/RUN/memory-B/  optimiser and codec residual of block B, after its last taken update
FOLDER/RUN/pending/   an update that has no receipt yet: kill -9 does not lose it
"""

import hashlib
import itertools
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from blocktrain import config
from blocktrain.aggregation import ledger
from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.versions import signed_by
from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadCorpus, BadInput, BlockTrainError, NoBlob, NotAllowed
from blocktrain.learning import device
from blocktrain.learning.data import SPLITS, Corpus, Cursor, batches, open_corpus, open_splits
from blocktrain.learning.files import load_tensors, map_block, save_tensors
from blocktrain.learning.local import Start, Update, Work, parameters_of, train_locally
from blocktrain.learning.model import Block, new_block
from blocktrain.learning.objective import Loader, objective_for, watched
from blocktrain.services import cores, membership
from blocktrain.services.holdings import Holdings, refuse_unknown
from blocktrain.services.run import Run
from blocktrain.terms import Digest, Parameters, Progress, silent
from blocktrain.wire import messages, signing, tensors
from blocktrain.wire.link import Link
from blocktrain.wire.messages import Assignment, Finished, Receipt, Traffic, Wait
from blocktrain.wire.signing import Key, load_or_make_key
from blocktrain.wire.throttle import Limits

COPIES = 6  # of a block in memory while it trains: values, gradients, two of the optimiser, change
SPARE = 300 * 2**20  # bytes for activations and the rest
PATIENT = 60.0  # seconds that a round's downloads may take before a block is too much for a link


@dataclass(frozen=True)
class Wishes:
    """What a volunteer allows and wants."""

    name: str = ""
    """What to call this worker on the dashboard."""
    block: int | None = None
    """Only this block, counted from 1; the least-served one that fits if not given."""
    data: str | None = None
    """A file or folder with the run's text, if it has no name that can be fetched."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    threads: int | None = None
    """CPU threads; all if not given."""
    max_upload: float | None = None
    """Bytes a second."""
    max_download: float | None = None
    """Bytes a second."""
    max_traffic: int | None = None
    """Bytes in all, both directions; then the worker leaves."""
    max_disk: int | None = None
    """Bytes that this run may take of the disk."""
    turns: Path | None = None
    """A folder shared by workers of one machine: as many compute at once as it has files."""

    @property
    def limits(self) -> Limits:
        """What the link must keep to."""
        return Limits(self.max_upload, self.max_download, self.max_traffic)


@dataclass
class Gave:
    """What a worker contributed."""

    updates: int = 0
    refused: int = 0
    bytes_trained: int = 0
    seconds: float = 0.0


@dataclass
class Memory:
    """What a replica remembers between rounds."""

    optimiser: dict[str, Tensor] = field(default_factory=dict)
    residual: Parameters | None = None


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
        self.where = device.choose(wishes.device)
        self.moved_before = Traffic()
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
        self.folder = admitted.folder(self.root)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.moved_before = self.remembered_traffic()
        self.corpus = self.text()
        self.holdings = Holdings(
            self.folder / "blocks",
            self.link,
            self.charter,
            lambda block: parameters_of(new_block(self.run.shape, block, self.run.pace.seed)),
            self.wishes.max_disk,
        )
        self.blocks = self.fitting(who.memory)

    def text(self) -> Corpus:
        """The run's text: by its name, from a file of the volunteer's, or from the coordinator."""
        name = self.wishes.data or self.charter.data
        if self.wishes.data is None and self.charter.corpus_served:
            corpus = self.served_text()
        else:
            corpus = open_corpus(name)
        if corpus.digest != self.charter.corpus:
            raise BadCorpus(
                f"'{name}' is not the text of this run (digest {corpus.digest[:16]}, not "
                f"{self.charter.corpus[:16]}); give the right one with --data."
            )
        return corpus

    def served_text(self) -> Corpus:
        """Fetches what is not here yet of a private text."""
        folder = self.folder / "corpus"
        folder.mkdir(exist_ok=True)
        for name, (length, digest) in zip(SPLITS, self.charter.splits, strict=True):
            if not (folder / name).is_file():
                self.link.fetch(f"v1/corpus/{name}", digest, folder / name, length, self.progress)
        return open_splits(self.charter.data, folder)

    def fitting(self, memory: int) -> list[int] | None:
        """The blocks that this machine and this link can train; None is any."""
        if self.wishes.block is not None:
            wanted = [self.wishes.block - 1]
            refuse_unknown(wanted, self.charter)
            return wanted
        every = range(self.charter.rules.blocks)
        fits = [block for block in every if self.needs(block) < memory]
        if not fits:
            raise BadInput(
                f"A block of this run needs {self.needs(0) >> 20} MiB of memory, and "
                f"{memory >> 20} are free; close something, or join another run."
            )
        if (rate := self.wishes.max_download) is not None:
            fits = [block for block in fits if self.downloads(block) < rate * PATIENT]
            if not fits:
                raise BadInput("--max-download is too little for any block; allow more.")
        return None if len(fits) == len(every) else fits

    def needs(self, block: int) -> int:
        """Bytes of memory that training this block takes, about."""
        return COPIES * self.charter.snapshot_size(block) + SPARE

    def downloads(self, block: int) -> int:
        """Bytes that a round of this block fetches, once it is under way."""
        return sum(map(self.charter.update_size, [block, *watched(block, self.run.recipe)]))

    # --- working ----------------------------------------------------------------------------------

    def work(self) -> Gave:
        """Rounds until the run is over or somebody says stop."""
        self.join()
        beat = threading.Thread(target=self.beat, name="heartbeat", daemon=True)
        beat.start()
        try:
            while not self.leaving.is_set() and self.turn():
                pass
        finally:
            self.leaving.set()
            self.remember_traffic()
        self.leave()
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
        snapshot = self.holdings.snapshot(assignment.base)
        loaders = self.neighbours(assignment)
        memory = self.recall(block)
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
        if update.steps:
            self.pace = seconds / update.steps
            self.keep_pending(assignment, (update, seconds), optimiser, memory.residual)
            self.submit_pending()

    def neighbours(self, assignment: Assignment) -> list[Loader]:
        """Opens the steady copies that the assignment pins."""
        pinned = {version.block: version for version in assignment.neighbours}
        paths = {
            block: self.holdings.steady(pinned[block])
            for block in watched(assignment.block, self.run.recipe)
        }
        return loaders_of(paths, self.run, self.where)

    def batches(self, assignment: Assignment):  # type: ignore[no-untyped-def]
        """The data of the assigned slot and round."""
        cursor = Cursor(assignment.slot, assignment.round, 0)
        return batches(self.corpus.train, self.run.plan, cursor)

    # --- submitting -------------------------------------------------------------------------------

    def keep_pending(
        self,
        assignment: Assignment,
        trained: tuple[Update, float],
        optimiser: dict[str, Tensor],
        residual: Parameters | None,
    ) -> None:
        """Writes the update and what the replica will remember, before anybody hears of it."""
        update, seconds = trained
        body, lost = tensors.encode_with_residual(update.change, residual, self.charter.codec)
        said = messages.Update(
            worker=self.key.id,
            run=self.run_id,
            block=assignment.block,
            round=assignment.round,
            slot=assignment.slot,
            base=assignment.base.snapshot,
            blob=Digest(hashlib.sha256(body).hexdigest()),
            steps=update.steps,
            bytes_trained=update.bytes_trained,
            seconds=seconds,
            loss=update.loss,
            optimiser_before=update.optimiser_before,
            optimiser_after=update.optimiser_after,
        )
        folder = self.folder / "pending.part"
        shutil.rmtree(folder, ignore_errors=True)
        with errors_are_clear(folder):
            folder.mkdir()
            write_atomically(folder / "blob", body)  # before update.json, which names it
            save_memory(folder, Memory(optimiser, lost))
            signed = messages.encode(self.signed(said, "update"))
            write_atomically(folder / "update.json", signed)
            shutil.rmtree(self.pending, ignore_errors=True)
            folder.rename(self.pending)

    @property
    def pending(self) -> Path:
        """Where an update waits for its receipt."""
        return self.folder / "pending"

    def submit_pending(self) -> None:
        """Sends what was trained, if anything was, and remembers what its receipt says."""
        if not (self.pending / "update.json").is_file():
            return
        signed = messages.decode((self.pending / "update.json").read_bytes(), messages.Signed)
        update = messages.decode(signed.body, messages.Update)
        blob = self.pending / "blob"
        self.link.send(f"v1/blobs/{update.blob}", blob)
        answer = self.link.say("v1/updates", signed, messages.Signed)
        receipt = self.checked(answer, signed)
        memory = self.folder / f"memory-{update.block}"
        if receipt.verdict == "refused":
            self.gave.refused += 1
            if "finite" in receipt.why or "norm" in receipt.why:
                shutil.rmtree(memory, ignore_errors=True)  # whatever went wrong began there
            (self.pending / "update.json").unlink()  # first: what has none is sent no more
            shutil.rmtree(self.pending)
        else:
            self.gave.updates += 1
            self.gave.bytes_trained += update.bytes_trained
            self.gave.seconds += update.seconds
            # Until the last of these, a kill means to send it again and get the same receipt.
            shutil.rmtree(memory, ignore_errors=True)
            self.pending.rename(memory)
        self.remember_traffic()
        self.say(
            f"block {update.block + 1}, round {update.round}: {update.steps} steps in "
            f"{update.seconds:.1f} s, loss {update.loss:.4f}: {receipt.verdict} {receipt.why}"
        )

    def checked(self, answer: messages.Signed, signed: messages.Signed) -> Receipt:
        """The receipt, if it is the coordinator's and of this update."""
        right = signing.verify(
            self.coordinator, answer.body, "receipt", bytes.fromhex(answer.signature)
        )
        receipt = messages.decode(answer.body, Receipt)
        if not right or receipt.update != hashlib.sha256(signed.body).hexdigest():
            raise BadInput("The receipt is not the coordinator's; do not trust this coordinator.")
        return receipt

    def recall(self, block: int) -> Memory:
        """What the replica remembers of its last taken update of this block."""
        return load_memory(self.folder / f"memory-{block}")

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

    def traffic(self) -> Traffic:
        """Bytes moved in this run, in this life and those before."""
        moved, before = self.link.moved, self.moved_before
        return Traffic(before.sent + moved.sent, before.received + moved.received)

    def remembered_traffic(self) -> Traffic:
        """Bytes moved in former lives."""
        try:
            return msgspec.json.decode((self.folder / "traffic.json").read_bytes(), type=Traffic)
        except (OSError, msgspec.DecodeError):
            return Traffic()

    def remember_traffic(self) -> None:
        """For the next life."""
        (self.folder / "traffic.json").write_bytes(msgspec.json.encode(self.traffic()))

    def signed(self, message: messages.Message, purpose: str) -> messages.Signed:
        """A message by which this worker stands."""
        return signed_by(self.key, message, purpose)


def run_of(charter: Charter) -> Run:
    """The settings for learning that a charter carries."""
    try:
        table = msgspec.json.decode(charter.learning, type=dict)
    except msgspec.DecodeError as error:
        raise BadInput(f"The run's settings are not understood ({error}); upgrade.") from None
    return config.fill(Run, table, where="the run's charter")


def work_of(run: Run, assignment: Assignment | ledger.Assignment) -> Work:
    """Names one replica's work in one round, as it was told or as it was written down."""
    return Work(
        recipe=run.recipe,
        block=assignment.block,
        slot=assignment.slot,
        round=assignment.round,
        seed=run.pace.seed,
        bytes_before=assignment.bytes_before,
        bytes_per_step=run.bytes_per_step,
        bytes_planned=run.bytes_after(run.pace.rounds),
    )


def loaders_of(paths: dict[int, Path], run: Run, where: torch.device) -> list[Loader]:
    """Opens neighbours from their files; those that nobody looks at are not there."""

    def loader(block: int) -> Loader:
        def load() -> Block:
            return map_block(paths[block], run.shape, block).to(where)

        return load

    return [loader(block) for block in range(run.shape.blocks)]


def save_memory(folder: Path, memory: Memory) -> None:
    """What a replica remembers, as files."""
    save_tensors(folder / "optimiser", memory.optimiser)
    if memory.residual is not None:
        residual = {name: torch.from_numpy(value) for name, value in memory.residual.items()}
        save_tensors(folder / "residual", residual)


def load_memory(folder: Path) -> Memory:
    """What `save_memory` wrote, or nothing."""
    if not (folder / "optimiser").is_file():
        return Memory()
    optimiser = load_tensors(folder / "optimiser")
    if not (folder / "residual").is_file():
        return Memory(optimiser)
    residual = load_tensors(folder / "residual")
    return Memory(optimiser, {name: value.numpy() for name, value in residual.items()})
