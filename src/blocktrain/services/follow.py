"""Eyes on a run: the owner measures the newest checkpoint, and members fetch blocks of it."""

import hashlib
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from blocktrain.aggregation import charter as charters
from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.folder import open_ledger, open_store
from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadRun, NoBlob
from blocktrain.learning.data import Corpus
from blocktrain.learning.evaluate import SAMPLE, evaluate
from blocktrain.learning.files import FORMAT, MANIFEST, BlockFile, Manifest, from_parameters
from blocktrain.learning.model import Model
from blocktrain.services.assigned import run_of
from blocktrain.services.holdings import refuse_unknown
from blocktrain.services.membership import Membership
from blocktrain.services.run import Run
from blocktrain.terms import Parameters, Progress, silent
from blocktrain.wire import messages, tensors
from blocktrain.wire.link import Link
from blocktrain.wire.messages import Version
from blocktrain.wire.owner import Checkpoint, Evaluated, Status

ATTEMPTS = 5  # a block may be pruned while it is fetched, if rounds are quick and the link is slow


def from_folder(folder: Path) -> tuple[Run, Model]:
    """The model in a coordinator's folder, without its coordinator."""
    store = open_store(folder)
    with open_ledger(folder) as ledger, ledger.reading() as r:
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
        moved = self.link.ask("v1/status", Status).bytes_moved
        # Last: whoever fails before it can measure again without telling it twice.
        self.link.say("v1/evaluations", Evaluated(rounds, score.ce, seen), messages.Done)
        return {
            "round": min(rounds),
            "bytes_seen": seen,
            "bytes_moved": moved,
            "ce_sample": round(score.ce, 4),
            "per_block_sample": [round(ce, 4) for ce in score.per_block],
        }


def fetch_blocks(
    member: Membership, blocks: Collection[int], progress: Progress = silent
) -> tuple[Path, Manifest]:
    """A model directory of the newest checkpoint that holds these blocks (from 0) and no others.

    Its files are the steady copies themselves, so that the manifest, and the digest by which the
    model is known, follow from the checkpoint alone: whoever fetches the same checkpoint has the
    same ones, whichever blocks they hold.
    """
    refuse_unknown([*blocks], member.charter)

    def fetch() -> tuple[Path, Manifest]:
        manifest = manifest_of(member.charter, member.checkpoint())
        return fetch_files(member, manifest, blocks, progress), manifest

    for _ in range(ATTEMPTS - 1):
        with suppress(NoBlob):
            return fetch()
    return fetch()


def manifest_of(charter: Charter, found: Checkpoint) -> Manifest:
    """What a model directory of this checkpoint says about itself."""
    run = run_of(charter)
    files = [
        BlockFile(
            f"block-{version.block + 1}-{version.steady[:16]}.safetensors",
            charter.snapshot_size(version.block),
            version.steady,
        )
        for version in found.versions
    ]
    made = {"run": found.run, "rounds": [version.round for version in found.versions]}
    return Manifest(FORMAT, run.shape, run.noise, files, made)


def fetch_files(
    member: Membership, manifest: Manifest, blocks: Collection[int], progress: Progress
) -> Path:
    """Fetches what is not here of these blocks; then, and not before, the manifest names them."""
    folder = member.folder / "model"
    with errors_are_clear(folder):
        folder.mkdir(exist_ok=True)
    for block in sorted(blocks):
        entry = manifest.blocks[block]
        if not is_there(folder / entry.file, entry):
            path = f"v1/blobs/{entry.digest}"
            member.link.fetch(path, entry.digest, folder / entry.file, entry.bytes, progress)
    with errors_are_clear(folder):
        write_atomically(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        for old in folder.glob("block-*"):  # parts of older ones, too
            if old.name not in {entry.file for entry in manifest.blocks}:
                old.unlink()
    return folder


def is_there(path: Path, entry: BlockFile) -> bool:
    """Whether a block's file is here and undamaged."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.digest
