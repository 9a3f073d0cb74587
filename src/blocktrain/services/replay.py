"""Does a network's recorded work again, in one process, and compares every digest.

The ledger tells who was asked to do what, on which versions, and what was made of it. Training is a
pure function of that, so that on the same kind of machine, with the same threads per replica, every
update and every snapshot must come out with the digest that the ledger has.
"""

import hashlib
import itertools
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from blocktrain.aggregation import charter as charters
from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.combine import Kept, Part, combine
from blocktrain.aggregation.ledger import Ledger, Reading, Receipt, Version
from blocktrain.aggregation.state import order
from blocktrain.errors import BadRun
from blocktrain.learning.data import Corpus, Cursor, batches
from blocktrain.learning.local import Start, parameters_of, train_locally
from blocktrain.learning.model import new_block
from blocktrain.learning.objective import objective_for, watched
from blocktrain.services.assigned import loaders_of, refuse_other_blocks, run_of, work_of
from blocktrain.services.memory import Memory
from blocktrain.services.run import Run
from blocktrain.terms import Digest, Parameters, Progress, silent
from blocktrain.wire import messages, tensors

NOTHING = Memory()


@dataclass(frozen=True)
class Replayed:
    """What came of it."""

    rounds: int
    updates: int
    snapshots: int
    different: list[str]
    """What did not come out as it was recorded, in words; the rest follows from the first."""


@dataclass
class Replay:
    """One run, done again."""

    charter: Charter
    run: Run
    corpus: Corpus
    folder: Path
    """Where steady copies lie, to be mapped as workers map them."""
    kept: dict[int, Kept] = field(default_factory=dict)
    snapshots: dict[Digest, Parameters] = field(default_factory=dict)
    memories: dict[Digest, Memory] = field(default_factory=dict)
    different: list[str] = field(default_factory=list)
    updates: int = 0

    def begin(self) -> None:
        """Every block as the run's seed makes it."""
        refuse_other_blocks(self.charter, self.run.shape)
        self.folder.mkdir(parents=True, exist_ok=True)
        for block in range(self.run.shape.blocks):
            first = parameters_of(new_block(self.run.shape, block, self.run.pace.seed))
            self.kept[block] = Kept(first, first)
            self.keep(self.kept[block], f"block {block + 1}, round 0", self.charter.first[block])

    def keep(self, kept: Kept, name: str, expected: Digest) -> Digest:
        """Remembers a snapshot and its steady copy by their digests; returns the steady's."""
        body = tensors.encode(kept.snapshot, "fp32")
        self.compare(f"the snapshot of {name}", body, expected)
        self.snapshots[expected] = kept.snapshot
        while len(self.snapshots) > len(self.charter.first) * (self.charter.rules.memory + 1):
            self.snapshots.pop(next(iter(self.snapshots)))  # too old for any update to build on
        body = tensors.encode(kept.steady, "fp32")
        steady = Digest(hashlib.sha256(body).hexdigest())
        (self.folder / steady).write_bytes(body)
        return steady

    def compare(self, what: str, body: bytes, expected: Digest) -> None:
        """Notes what is not as it was."""
        if hashlib.sha256(body).hexdigest() != expected:
            self.different.append(what)

    def close(self, r: Reading, version: Version) -> None:
        """One round of one block: its updates, in the order they were added, and its snapshot."""
        combined = r.combined(version.block, version.round)
        receipts = sorted(combined, key=partial(order, version.round))
        parts = [self.update(r, receipt, version.round) for receipt in receipts]
        averaging, codec = self.charter.averaging, self.charter.codec
        self.kept[version.block] = combine(self.kept[version.block], parts, averaging, codec)
        name = f"block {version.block + 1}, round {version.round}"
        if self.keep(self.kept[version.block], name, version.snapshot) != version.steady:
            self.different.append(f"the steady copy of {name}")

    def update(self, r: Reading, receipt: Receipt, into: int) -> Part:
        """Trains once more what a worker trained."""
        signed = messages.decode(receipt.signed, messages.Signed)
        told = messages.decode(signed.body, messages.Update)
        made = r.assignments(told.block, told.round)
        task = next(a for a in made if (a.slot, a.worker) == (told.slot, told.worker))
        memory = self.memories.get(told.optimiser_before, NOTHING)
        paths = {
            block: self.folder / task.neighbours[block]
            for block in watched(told.block, self.run.recipe)
        }
        where = torch.device("cpu")
        rows = batches(self.corpus.train, self.run.plan, Cursor(told.slot, told.round, 0))
        start = Start(
            self.snapshots[task.base],
            {name: value.clone() for name, value in memory.optimiser.items()},
        )
        update, optimiser = train_locally(
            start,
            (batch for batch, _ in itertools.islice(rows, told.steps)),
            objective_for(told.block, self.run.recipe, loaders_of(paths, self.run, where)),
            work_of(self.run, task),
            where,
        )
        codec = self.charter.codec
        body, lost = tensors.encode_with_residual(update.change, memory.residual, codec)
        name = f"the update of slot {told.slot} for block {told.block + 1}, round {told.round}"
        self.compare(name, body, told.blob)
        self.memories[told.optimiser_after] = Memory(optimiser, lost)
        self.updates += 1
        change = tensors.decode(body, codec, self.charter.shapes(told.block))
        factor = self.charter.rules.discount ** (into - told.round)
        return Part(change.__getitem__, told.bytes_trained, factor)


def replay(ledger: Ledger, corpus: Corpus, folder: Path, progress: Progress = silent) -> Replayed:
    """Does again whatever a ledger tells, round by round."""
    with ledger.reading() as r:
        record = r.run()
        if record is None:
            raise BadRun("This ledger holds no run; give that of a finished one.")
        charter = charters.decode(record.config)
        if charter.corpus != corpus.digest:
            raise BadRun(f"The run was trained on '{charter.data}'; give it with --data.")
        again = Replay(charter, run_of(charter), corpus, folder)
        again.begin()
        versions = [version for version in r.versions() if version.round > 0]
        for done, version in enumerate(versions):
            progress(done, len(versions))
            again.close(r, version)
        progress(len(versions), len(versions))
    rounds = max((version.round for version in versions), default=0)
    return Replayed(rounds, again.updates, len(versions), again.different)
