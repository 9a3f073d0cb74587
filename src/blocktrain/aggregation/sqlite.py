"""The ledger in one SQLite file, in WAL mode: durable, readable while it is written.

Nothing but this file, sqlite_file.py and sqlite_queries.py knows SQL. aggregation/ledger.py says
what a ledger promises.
"""

import secrets
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from blocktrain import disk
from blocktrain.aggregation.ledger import Reading, Transaction
from blocktrain.aggregation.sqlite_file import connect, errors_are_clear, prepare
from blocktrain.aggregation.sqlite_queries import SqliteReading, SqliteTransaction
from blocktrain.errors import BadLedger, CannotSave


class SqliteLedger:
    """A Ledger in one SQLite file (with its -wal and -shm beside it while it is open)."""

    def __init__(self, path: Path, create: bool = False) -> None:
        if not create and not path.is_file():
            raise BadLedger(f"There is no ledger at {path}; make a run there, or restore a backup.")
        self.path = path
        self.closed = False
        self.turn = threading.RLock()  # whose turn it is to write; held while the disk syncs
        self.readers: deque[sqlite3.Connection] = deque()
        with errors_are_clear(path):
            self.writer = connect(path)
            try:
                prepare(self.writer, path, create)
            except BaseException:
                self.writer.close()
                raise

    def __enter__(self) -> "SqliteLedger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        with self.turn:
            self._refuse_if_closed()
            with errors_are_clear(self.path):
                self.writer.execute("BEGIN IMMEDIATE")
            t = SqliteTransaction(self.writer, self.path)
            try:
                yield t
                t._change("COMMIT")
            finally:
                if self.writer.in_transaction:
                    self.writer.execute("ROLLBACK")

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        with self._reader() as connection:
            connection.execute("BEGIN")
            try:
                yield SqliteReading(connection, self.path)
            finally:
                connection.execute("ROLLBACK")

    def backup(self, path: Path) -> None:
        part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        try:
            with errors_are_clear(part), disk.errors_are_clear(part), self._reader() as source:
                with closing(sqlite3.connect(part)) as target:
                    source.backup(target)  # in one step: of one moment, and writers do not wait
                    target.execute("PRAGMA journal_mode = DELETE")  # one file, nothing beside it
                disk.sync(part)
                part.replace(path)
                disk.sync(path.absolute().parent)
        finally:
            part.unlink(missing_ok=True)

    def close(self) -> None:
        self.closed = True
        with self.turn:
            while self.readers:
                self.readers.pop().close()
            self.writer.close()

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise CannotSave(f"The ledger at {self.path} is closed; start the coordinator again.")

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        self._refuse_if_closed()
        try:
            connection = self.readers.pop()
        except IndexError:
            with errors_are_clear(self.path):
                connection = connect(self.path)
                connection.execute("PRAGMA query_only = ON")
        try:
            yield connection
        finally:
            if self.closed:
                connection.close()
            else:
                self.readers.append(connection)
