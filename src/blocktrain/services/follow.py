"""The owner's eye on a run: fetches the newest checkpoint, assembles it, measures it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.aggregation import charter as charters
from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.folder import BLOBS, LEDGER
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.aggregation.store import FolderStore
from blocktrain.errors import BadRun
from blocktrain.learning.data import Corpus
from blocktrain.learning.evaluate import SAMPLE, evaluate
from blocktrain.learning.files import from_parameters
from blocktrain.learning.model import Model
from blocktrain.services.run import Run
from blocktrain.services.worker import run_of
from blocktrain.terms import Parameters
from blocktrain.wire import messages, tensors
from blocktrain.wire.link import Link
from blocktrain.wire.messages import Version
from blocktrain.wire.owner import Checkpoint, Evaluated, Status


def from_folder(folder: Path) -> tuple[Run, Model]:
    """The model in a coordinator's folder, without its coordinator."""
    store = FolderStore(folder / BLOBS)
    with SqliteLedger(folder / LEDGER) as ledger, ledger.reading() as r:
        record = r.run()
        if record is None:
            raise BadRun(f"The run in {folder} was never finished; make it again.")
        charter = charters.decode(record.config)
        newest = [r.newest(block) for block in range(charter.rules.blocks)]
    run = run_of(charter)
    values = [
        tensors.decode(store.get(version.steady), "fp32", charter.shapes(version.block))
        for version in newest
        if version is not None
    ]
    return run, from_parameters(run.shape, run.noise, values)


@dataclass
class Follower:
    """Follows one run with the owner's token."""

    link: Link
    folder: Path
    """Where blobs lie for a moment."""

    def checkpoint(self) -> tuple[Charter, Checkpoint]:
        """The newest versions of all blocks."""
        found = self.link.ask("v1/checkpoint", Checkpoint)
        return charters.decode(found.charter), found

    def assemble(self, charter: Charter, found: Checkpoint) -> tuple[Run, Model]:
        """The model of the blocks' steady copies."""
        run = run_of(charter)
        values = [self.steady(charter, version) for version in found.versions]
        return run, from_parameters(run.shape, run.noise, values)

    def steady(self, charter: Charter, version: Version) -> Parameters:
        """One block's steady copy."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / version.steady
        size = charter.snapshot_size(version.block)
        self.link.fetch(f"v1/blobs/{version.steady}", version.steady, path, size)
        try:
            return tensors.decode(path.read_bytes(), "fp32", charter.shapes(version.block))
        finally:
            path.unlink()

    def measure(self, corpus: Corpus) -> dict[str, Any]:
        """CE of the newest checkpoint on a sample of the valid split; the coordinator is told."""
        charter, found = self.checkpoint()
        _, model = self.assemble(charter, found)
        score = evaluate(model, corpus.valid[:SAMPLE])
        rounds = [version.round for version in found.versions]
        seen = charter.bytes_before(min(rounds) + 1)
        self.link.say("v1/evaluations", Evaluated(rounds, score.ce, seen), messages.Done)
        moved = self.link.ask("v1/status", Status).bytes_moved
        return {
            "round": min(rounds),
            "bytes_seen": seen,
            "bytes_moved": moved,
            "ce_sample": round(score.ce, 4),
            "per_block_sample": [round(ce, 4) for ce in score.per_block],
        }
