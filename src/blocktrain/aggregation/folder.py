"""A run's folder on the coordinator's disk.

DIR/ledger.sqlite     what must survive kill -9
DIR/blobs/            snapshots, steady copies, deltas, updates, manifests
DIR/coordinator.key   signs receipts
DIR/owner.token       for the owner's eyes only
DIR/corpus/           the text, if the coordinator serves it
DIR/lock              held by the one coordinator that keeps the run

Only here is it known that a ledger is a SQLite file and a store a folder.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blocktrain.aggregation import charter as charters
from blocktrain.aggregation.folder_store import FolderStore
from blocktrain.aggregation.keeper import Keeper
from blocktrain.aggregation.ledger import Ledger
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.aggregation.store import Store
from blocktrain.disk import lock
from blocktrain.errors import BadRun
from blocktrain.wire.signing import load_key

LEDGER, BLOBS, KEY, TOKEN, CORPUS, LOCK = (
    "ledger.sqlite", "blobs", "coordinator.key", "owner.token", "corpus", "lock",
)  # fmt: skip


@contextmanager
def open_ledger(path: Path, create: bool = False) -> Iterator[Ledger]:
    """The ledger of a run's folder, or one that lies elsewhere: a copy, or a new one."""
    with SqliteLedger(path / LEDGER if path.is_dir() else path, create) as ledger:
        yield ledger


def open_store(folder: Path) -> Store:
    """The blobs of a run's folder."""
    return FolderStore(folder / BLOBS)


class RunFolder:
    """Opened for keeping the run: nobody else does so at the same time."""

    def __init__(self, folder: Path) -> None:
        if not (folder / LEDGER).is_file():
            raise BadRun(f"There is no run in {folder}; make one with: blocktrain init {folder}.")
        self.folder, self.corpus = folder, folder / CORPUS
        why = f"Another coordinator keeps the run in {folder}; stop it first."
        self.lock = lock(folder / LOCK, why)
        self.ledger: Ledger = SqliteLedger(folder / LEDGER)
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
        return Keeper(self.ledger, open_store(self.folder), load_key(self.folder / KEY))


def owners_token(folder: Path) -> str:
    """The owner's token, as `blocktrain init` kept it."""
    try:
        return (folder / TOKEN).read_text().strip()
    except OSError as error:
        raise BadRun(f"{folder / TOKEN} cannot be read ({error.strerror}).") from None
