"""The ledger in one SQLite file, in WAL mode: durable, readable while it is written.

Nothing but this file, sqlite_file.py and sqlite_queries.py knows SQL. aggregation/ledger.py says
what a ledger promises.
"""

import secrets
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from blocktrain import disk
from blocktrain.aggregation.ledger import Reading, Transaction
from blocktrain.aggregation.sqlite_file import connect, errors_are_clear, prepare
from blocktrain.aggregation.sqlite_queries import SqliteReading, SqliteTransaction
from blocktrain.errors import BadLedger, CannotSave

MOST_TOGETHER = 512  # pieces of work in one commit: a burst of 200 fits, and nobody waits for long

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """Work that waits for its commit."""

    work: Callable[[Transaction], Any]
    done: "Future[Any]"

    def attempt(self, t: SqliteTransaction) -> Callable[[], None]:
        """Does the work, alone undone if it fails; what it returns tells whoever waits."""
        try:
            with t.whole():
                value = self.work(t)
        except Exception as error:
            if not t.connection.in_transaction:  # the others' work is undone too
                raise
            return partial(self.done.set_exception, error)
        return partial(self.done.set_result, value)


class SqliteLedger:
    """A Ledger in one SQLite file (with its -wal and -shm beside it while it is open)."""

    def __init__(self, path: Path, create: bool = False) -> None:
        if not create and not path.is_file():
            raise BadLedger(f"There is no ledger at {path}; make a run there, or restore a backup.")
        self.path = path
        self.closed = False
        self.turn = threading.RLock()  # whose turn it is to write; held while the disk syncs
        self.door = threading.Condition()  # to the pieces; never held for long
        self.readers: deque[sqlite3.Connection] = deque()
        self.pieces: deque[Piece] = deque()
        self.committer = threading.Thread(target=self._commit_pieces, name="ledger", daemon=True)
        with errors_are_clear(path):
            self.writer = connect(path)
            try:
                prepare(self.writer, path, create)
            except BaseException:
                self.writer.close()
                raise
        self.committer.start()

    def __enter__(self) -> "SqliteLedger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        self._refuse_if_closed()
        with self._commit() as t:
            yield t

    @contextmanager
    def _commit(self) -> Iterator[SqliteTransaction]:
        with self.turn:
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

    def enqueue(self, work: Callable[[Transaction], T]) -> "Future[T]":
        done: Future[T] = Future()
        with self.door:
            self._refuse_if_closed()
            self.pieces.append(Piece(work, done))
            self.door.notify()
        return done

    def write(self, work: Callable[[Transaction], T]) -> T:
        return self.enqueue(work).result()

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
        with self.door:
            if self.closed:
                return
            self.closed = True
            self.door.notify()
        self.committer.join()
        while self.readers:
            self.readers.pop().close()
        with self.turn:
            self.writer.close()

    def _commit_pieces(self) -> None:
        """Whatever came while the last commit was on its way to the disk goes into the next."""
        while pieces := self._waiting():
            self._commit_together([p for p in pieces if p.done.set_running_or_notify_cancel()])

    def _waiting(self) -> list[Piece]:
        """All that wait for a commit, as soon as one does; none when the ledger is closed."""
        with self.door:
            self.door.wait_for(lambda: self.pieces or self.closed)
            return [self.pieces.popleft() for _ in range(min(len(self.pieces), MOST_TOGETHER))]

    def _commit_together(self, pieces: list[Piece]) -> None:
        try:
            with self._commit() as t:
                outcomes = [piece.attempt(t) for piece in pieces]
        except BaseException as error:  # whatever it was, those who wait must know
            outcomes = [partial(piece.done.set_exception, error) for piece in pieces]
        for tell in outcomes:
            tell()

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
