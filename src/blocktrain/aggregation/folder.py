"""A run's folder on the coordinator's disk.

DIR/ledger.sqlite     what must survive kill -9
DIR/blobs/            snapshots, steady copies, deltas, updates, manifests
DIR/coordinator.key   signs receipts
DIR/owner.token       for the owner's eyes only
DIR/corpus/           the text, if the coordinator serves it
DIR/lock              held by the one coordinator that keeps the run
"""

import os
from pathlib import Path

from blocktrain.aggregation import charter as charters
from blocktrain.aggregation.keeper import Keeper
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.aggregation.store import FolderStore
from blocktrain.disk import lock
from blocktrain.errors import BadRun
from blocktrain.wire.signing import load_key

LEDGER, BLOBS, KEY, TOKEN, CORPUS, LOCK = (
    "ledger.sqlite", "blobs", "coordinator.key", "owner.token", "corpus", "lock",
)  # fmt: skip


class RunFolder:
    """Opened for keeping the run: nobody else does so at the same time."""

    def __init__(self, folder: Path) -> None:
        if not (folder / LEDGER).is_file():
            raise BadRun(f"There is no run in {folder}; make one with: blocktrain init {folder}.")
        self.folder, self.corpus = folder, folder / CORPUS
        why = f"Another coordinator keeps the run in {folder}; stop it first."
        self.lock = lock(folder / LOCK, why)
        self.ledger = SqliteLedger(folder / LEDGER)
        with self.ledger.reading() as r:
            record = r.run()
        if record is None:
            raise BadRun(f"The run in {folder} was never finished; make it again.")
        self.charter, self.id = charters.decode(record.config), charters.run_id(record.config)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.ledger.close()
        os.close(self.lock)

    def keeper(self) -> Keeper:
        """The one who keeps it."""
        return Keeper(self.ledger, FolderStore(self.folder / BLOBS), load_key(self.folder / KEY))


def owners_token(folder: Path) -> str:
    """The owner's token, as `blocktrain init` kept it."""
    try:
        return (folder / TOKEN).read_text().strip()
    except OSError as error:
        raise BadRun(f"{folder / TOKEN} cannot be read ({error.strerror}).") from None
