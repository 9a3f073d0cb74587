"""The ledger in one SQLite file, in WAL mode: durable, readable while it is written.

Nothing outside this file knows SQL. aggregation/ledger.py says what a ledger promises.
"""

import math
import secrets
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from blocktrain import disk
from blocktrain.aggregation.ledger import (
    Assignment,
    Evaluation,
    Event,
    Reading,
    Receipt,
    Role,
    RunRecord,
    Token,
    TokenHash,
    Transaction,
    Version,
    Worker,
    WorkerId,
    hash_of_token,
)
from blocktrain.errors import BadInput, BadLedger, CannotSave, Contradiction
from blocktrain.terms import Digest

MOST_TOGETHER = 512  # pieces of work in one commit: a burst of 200 fits, and nobody waits for long
PATIENCE = 10.0  # seconds to wait for another process that writes to the same ledger

T = TypeVar("T")

APPLICATION = 0x424C5452  # "BLTR": tells a ledger from other SQLite files

# Each step takes a ledger to the next schema. A released step is never changed: add another one.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE run (
            one INTEGER PRIMARY KEY CHECK (one = 1) DEFAULT 1,
            config BLOB NOT NULL, corpus TEXT NOT NULL, created REAL NOT NULL)""",
        """CREATE TABLE tokens (
            hash TEXT PRIMARY KEY, role TEXT NOT NULL CHECK (role IN ('owner', 'worker')),
            label TEXT NOT NULL, issued REAL NOT NULL, revoked REAL)""",
        """CREATE TABLE workers (
            id TEXT PRIMARY KEY, name TEXT NOT NULL, token TEXT NOT NULL REFERENCES tokens (hash),
            joined REAL NOT NULL, banned REAL,
            updates INTEGER NOT NULL, bytes_trained INTEGER NOT NULL,
            bytes_sent INTEGER NOT NULL, bytes_received INTEGER NOT NULL)""",
        """CREATE TABLE versions (
            block INTEGER NOT NULL, round INTEGER NOT NULL,
            snapshot TEXT NOT NULL, steady TEXT NOT NULL, momentum TEXT, residual TEXT,
            delta TEXT CHECK (delta IS NOT NULL OR round = 0),
            manifest TEXT CHECK (manifest IS NOT NULL OR round = 0), closed REAL NOT NULL,
            PRIMARY KEY (block, round)) WITHOUT ROWID""",
        """CREATE TABLE assignments (
            worker TEXT NOT NULL REFERENCES workers (id),
            block INTEGER NOT NULL, round INTEGER NOT NULL, slot INTEGER NOT NULL,
            base TEXT NOT NULL, neighbours TEXT NOT NULL,
            steps INTEGER NOT NULL CHECK (steps >= 0),
            bytes_before INTEGER NOT NULL CHECK (bytes_before >= 0), issued REAL NOT NULL,
            PRIMARY KEY (block, round, slot, worker)) WITHOUT ROWID""",
        """CREATE TABLE receipts (
            "update" TEXT PRIMARY KEY, blob TEXT NOT NULL,
            worker TEXT NOT NULL REFERENCES workers (id),
            block INTEGER NOT NULL, round INTEGER NOT NULL, slot INTEGER NOT NULL,
            bytes_trained INTEGER NOT NULL CHECK (bytes_trained >= 0),
            verdict TEXT NOT NULL CHECK (verdict IN ('taken', 'refused')), reason TEXT NOT NULL,
            signed BLOB NOT NULL, receipt BLOB NOT NULL, given REAL NOT NULL,
            into_round INTEGER, share REAL, dropped REAL,
            CHECK ((into_round IS NULL) = (share IS NULL)),
            CHECK (dropped IS NULL OR into_round IS NULL),
            CHECK (verdict = 'taken' OR (into_round IS NULL AND dropped IS NULL)))""",
        "CREATE INDEX receipts_by_round ON receipts (block, round, slot)",
        "CREATE INDEX receipts_by_snapshot ON receipts (block, into_round) WHERE verdict = 'taken'",
        """CREATE TRIGGER receipts_stand BEFORE UPDATE OF "update", blob, worker, block, round,
            slot, bytes_trained, verdict, reason, signed, receipt, given ON receipts
            BEGIN SELECT RAISE (ABORT, 'a receipt stands as it was given'); END""",
        """CREATE TRIGGER receipts_combine_once BEFORE UPDATE ON receipts
            WHEN OLD.into_round IS NOT NULL
            BEGIN SELECT RAISE (ABORT, 'the update is in a snapshot already'); END""",
        """CREATE TRIGGER receipts_stay BEFORE DELETE ON receipts
            BEGIN SELECT RAISE (ABORT, 'a receipt cannot be taken back'); END""",
        """CREATE TRIGGER versions_stand BEFORE UPDATE ON versions
            BEGIN SELECT RAISE (ABORT, 'a version stands as it was closed'); END""",
        """CREATE TRIGGER versions_stay BEFORE DELETE ON versions
            BEGIN SELECT RAISE (ABORT, 'a version cannot be taken back'); END""",
        """CREATE TABLE rounds (
            one INTEGER PRIMARY KEY CHECK (one = 1) DEFAULT 1, state BLOB NOT NULL)""",
        """CREATE TABLE events (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            time REAL NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL)""",
        """CREATE TRIGGER events_stand BEFORE UPDATE ON events
            BEGIN SELECT RAISE (ABORT, 'what happened cannot be changed'); END""",
        """CREATE TRIGGER events_stay BEFORE DELETE ON events
            BEGIN SELECT RAISE (ABORT, 'what happened cannot be undone'); END""",
        """CREATE TABLE evaluations (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            time REAL NOT NULL, rounds TEXT NOT NULL, ce REAL NOT NULL,
            bytes_seen INTEGER NOT NULL, "by" TEXT NOT NULL REFERENCES tokens (hash))""",
    ),
)

TABLES = {
    RunRecord: "run",
    Token: "tokens",
    Worker: "workers",
    Version: "versions",
    Assignment: "assignments",
    Receipt: "receipts",
    Event: "events",
    Evaluation: "evaluations",
}
COLUMNS = {kind: [field.name for field in fields(kind)] for kind in TABLES}
IN_JSON: dict[tuple[type, str], Any] = {
    (kind, column): get_type_hints(kind)[column]
    for kind, column in ((Assignment, "neighbours"), (Event, "detail"), (Evaluation, "rounds"))
}
CANNOT_SAVE = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
)


class SqliteReading:
    """A Reading of a SQLite file."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection = connection
        self.path = path

    def run(self) -> RunRecord | None:
        return self._one(RunRecord)

    def token(self, token: str) -> Token | None:
        return self._one(Token, "WHERE hash = ?", hash_of_token(token))

    def tokens(self) -> list[Token]:
        return self._many(Token, "ORDER BY issued, hash")

    def worker(self, id: WorkerId) -> Worker | None:
        return self._one(Worker, "WHERE id = ?", id)

    def workers(self) -> list[Worker]:
        return self._many(Worker, "ORDER BY joined, id")

    def newest(self, block: int) -> Version | None:
        return self._one(Version, "WHERE block = ? ORDER BY round DESC LIMIT 1", block)

    def version(self, block: int, round: int) -> Version | None:
        return self._one(Version, "WHERE block = ? AND round = ?", block, round)

    def versions(self, block: int | None = None) -> list[Version]:
        return self._of_round(Version, block, None, "block")

    def assignments(self, block: int | None = None, round: int | None = None) -> list[Assignment]:
        return self._of_round(Assignment, block, round, "block, slot, worker")

    def receipt(self, update: Digest) -> Receipt | None:
        return self._one(Receipt, 'WHERE "update" = ?', update)

    def receipts(self, block: int | None = None, round: int | None = None) -> list[Receipt]:
        return self._of_round(Receipt, block, round, 'block, slot, given, "update"')

    def outstanding(self, block: int) -> list[Receipt]:
        return self._many(
            Receipt,
            "WHERE block = ? AND into_round IS NULL AND dropped IS NULL AND verdict = 'taken' "
            'ORDER BY round, slot, "update"',
            block,
        )

    def combined(self, block: int, into_round: int) -> list[Receipt]:
        return self._many(
            Receipt,
            "WHERE block = ? AND into_round = ? AND verdict = 'taken' "
            'ORDER BY round, slot, "update"',
            block,
            into_round,
        )

    def tally(self) -> dict[int, tuple[int, int, int]]:
        # A receipt for an update in time needs no reason.
        rows = self._ask(
            "SELECT block, SUM(verdict = 'taken' AND reason = ''), "
            "SUM(verdict = 'taken' AND reason <> ''), SUM(verdict = 'refused') "
            "FROM receipts GROUP BY block"
        )
        return {block: (taken, late, refused) for block, taken, late, refused in rows}

    def state(self) -> bytes | None:
        return next((bytes(row[0]) for row in self._ask("SELECT state FROM rounds")), None)

    def events(self, after: int = 0, limit: int = 100) -> list[Event]:
        return self._many(Event, "WHERE number > ? ORDER BY number LIMIT ?", after, limit)

    def latest_events(self, limit: int = 100) -> list[Event]:
        return self._many(Event, "ORDER BY number DESC LIMIT ?", limit)[::-1]

    def evaluations(self) -> list[Evaluation]:
        return self._many(Evaluation, "ORDER BY number")

    def blobs_in_use(self, rounds: int) -> set[Digest]:
        used: set[Digest | None] = set()
        newest = dict(self._ask("SELECT block, MAX(round) FROM versions GROUP BY block"))
        for version in self.versions():
            used.add(version.manifest)
            if version.round == 0 or version.round > newest[version.block] - rounds:
                used |= {version.snapshot, version.steady, version.delta}
            if version.round == newest[version.block]:
                used |= {version.momentum, version.residual}
        for block, round in newest.items():
            used |= {receipt.blob for receipt in self.outstanding(block)}
            open_ones = "WHERE block = ? AND round > ?"
            for assignment in self._many(Assignment, open_ones, block, round):
                used |= {assignment.base, *assignment.neighbours.values()}
        run = self.run()
        used.add(run.corpus if run else None)
        return {digest for digest in used if digest is not None}

    def _of_round(self, kind: type[T], block: int | None, round: int | None, order: str) -> list[T]:
        wanted = {"block": block, "round": round}
        given = {name: value for name, value in wanted.items() if value is not None}
        where = " AND ".join(f"{name} = ?" for name in given) or "TRUE"
        return self._many(kind, f"WHERE {where} ORDER BY round, {order}", *given.values())

    def _one(self, kind: type[T], rest: str = "", *values: Any) -> T | None:
        return next(iter(self._many(kind, rest, *values)), None)

    def _many(self, kind: type[T], rest: str = "", *values: Any) -> list[T]:
        columns = ", ".join(f'"{column}"' for column in COLUMNS[kind])
        rows = self._ask(f"SELECT {columns} FROM {TABLES[kind]} {rest}", *values)
        return [from_row(kind, row) for row in rows]

    def _ask(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with errors_are_clear(self.path):
            return self.connection.execute(sql, values).fetchall()


class SqliteTransaction(SqliteReading):
    """A Transaction of a SQLite file."""

    def begin_run(self, run: RunRecord) -> None:
        if self.run() is not None:
            raise Contradiction(f"{self.path} holds a run already; choose another folder.")
        self._add(run)

    def issue_token(self, token: str, role: Role, label: str, now: float) -> Token:
        issued = Token(hash_of_token(token), role, label, now)
        self._add(issued)
        return issued

    def revoke_token(self, hash: TokenHash, now: float) -> None:
        change = "UPDATE tokens SET revoked = COALESCE(revoked, ?) WHERE hash = ?"
        self._change_one(f"token {hash}", change, now, hash)

    def join(self, id: WorkerId, name: str, token: TokenHash, now: float) -> Worker:
        if self.worker(id) is None:
            self._add(Worker(id, name, token, now))
        change = "UPDATE workers SET name = ?, token = ? WHERE id = ?"
        self._change_one(f"worker {id}", change, name, token, id)
        return self._many(Worker, "WHERE id = ?", id)[0]

    def ban(self, id: WorkerId, now: float) -> None:
        change = "UPDATE workers SET banned = COALESCE(banned, ?) WHERE id = ?"
        self._change_one(f"worker {id}", change, now, id)

    def add_traffic(self, id: WorkerId, sent: int, received: int) -> None:
        self._change_one(
            f"worker {id}",
            "UPDATE workers SET bytes_sent = bytes_sent + ?, bytes_received = bytes_received + ? "
            "WHERE id = ?",
            sent,
            received,
            id,
        )

    def begin_block(self, version: Version) -> None:
        if version.round != 0:
            raise Contradiction(f"A block begins with round 0, not {version.round}; close rounds.")
        self._add(version)

    def assign(self, assignment: Assignment) -> None:
        place = (assignment.block, assignment.round, assignment.slot, assignment.worker)
        where = "WHERE block = ? AND round = ? AND slot = ? AND worker = ?"
        before = self._one(Assignment, where, *place)
        if before is None:
            self._add(assignment)
        elif replace(before, issued=assignment.issued, steps=assignment.steps) == assignment:
            self._change(f"UPDATE assignments SET steps = ? {where}", assignment.steps, *place)
        else:
            raise Contradiction(
                f"Worker {assignment.worker} has another assignment for block {assignment.block}, "
                f"round {assignment.round}, slot {assignment.slot}; hand out that one."
            )

    def give_receipt(self, receipt: Receipt) -> Receipt:
        if (standing := self.receipt(receipt.update)) is not None:
            return standing
        if receipt.into_round is not None or receipt.share is not None:
            raise Contradiction("Only a closed round gives shares; write the receipt without one.")
        with self.whole():
            self._add(receipt)
            if receipt.verdict == "taken":
                self._change_one(
                    f"worker {receipt.worker}",
                    "UPDATE workers SET updates = updates + 1, bytes_trained = bytes_trained + ? "
                    "WHERE id = ?",
                    receipt.bytes_trained,
                    receipt.worker,
                )
        return receipt

    def drop(self, update: Digest, now: float) -> None:
        self._change_one(
            f"taken update {update} that is in no snapshot yet",
            'UPDATE receipts SET dropped = COALESCE(dropped, ?) WHERE "update" = ? '
            "AND verdict = 'taken' AND into_round IS NULL",
            now,
            update,
        )

    def close_round(self, version: Version, shares: Mapping[Digest, float], state: bytes) -> None:
        newest = self.newest(version.block)
        if newest is None or version.round != newest.round + 1:
            had = "none" if newest is None else newest.round
            raise Contradiction(
                f"Round {version.round} of block {version.block} cannot be closed after {had}; "
                "go on from the newest version."
            )
        with self.whole():
            self._add(version)
            for update, share in shares.items():
                if not math.isfinite(share):  # SQLite would take NaN for nothing
                    raise Contradiction(f"Update {update} has a share of {share}; leave it out.")
                self._change_one(
                    f"taken update {update} of block {version.block} that is in no snapshot yet",
                    'UPDATE receipts SET into_round = ?, share = ? WHERE "update" = ? '
                    "AND block = ? AND verdict = 'taken' "
                    "AND into_round IS NULL AND dropped IS NULL",
                    version.round,
                    share,
                    update,
                    version.block,
                )
            self.keep_state(state)

    def keep_state(self, state: bytes) -> None:
        self._change(
            "INSERT INTO rounds (one, state) VALUES (1, ?) "
            "ON CONFLICT (one) DO UPDATE SET state = excluded.state",
            state,
        )

    def note(self, kind: str, detail: Mapping[str, Any], now: float) -> int:
        body = msgspec.json.encode(detail).decode()
        self._change("INSERT INTO events (time, kind, detail) VALUES (?, ?, ?)", now, kind, body)
        return int(self._ask("SELECT last_insert_rowid()")[0][0])

    def evaluated(self, evaluation: Evaluation) -> None:
        self._add(evaluation)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All of what follows, or none of it, even if the caller goes on after an error."""
        self._change("SAVEPOINT whole")
        try:
            yield
        except BaseException:
            if self.connection.in_transaction:
                self._change("ROLLBACK TO whole")
                self._change("RELEASE whole")
            raise
        self._change("RELEASE whole")

    def _add(self, record: Any) -> None:
        columns = COLUMNS[type(record)]
        names = ", ".join(f'"{column}"' for column in columns)
        marks = ", ".join("?" * len(columns))
        sql = f"INSERT INTO {TABLES[type(record)]} ({names}) VALUES ({marks})"
        self._change(sql, *to_row(record))

    def _change_one(self, what: str, sql: str, *values: Any) -> None:
        if self._change(sql, *values) != 1:
            raise Contradiction(f"The ledger knows no {what}; look at what it holds.")

    def _change(self, sql: str, *values: Any) -> int:
        if not self.connection.in_transaction:  # SQLite gave the whole of it up: the disk is full
            raise CannotSave(f"The transaction at {self.path} is over; begin another one.")
        with errors_are_clear(self.path):
            return self.connection.execute(sql, values).rowcount


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
            self.writer = self._connect()
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
                connection = self._connect()
                connection.execute("PRAGMA query_only = ON")
        try:
            yield connection
        finally:
            if self.closed:
                connection.close()
            else:
                self.readers.append(connection)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self.path, timeout=PATIENCE, isolation_level=None, check_same_thread=False
        )


def prepare(connection: sqlite3.Connection, path: Path, create: bool) -> None:
    """Checks the file, brings it to the newest schema, and makes every commit durable."""

    def ask(sql: str) -> Any:
        return connection.execute(sql).fetchone()[0]

    application, schema = ask("PRAGMA application_id"), ask("PRAGMA user_version")
    empty = ask("SELECT COUNT(*) FROM sqlite_master") == 0
    if empty and not create:
        raise BadLedger(f"The ledger at {path} is empty; restore a backup, or make a new run.")
    if not empty and application != APPLICATION:
        raise BadLedger(f"{path} is not a ledger of BlockTrain; give the path of one.")
    refuse_newer(schema, path)
    if ask("PRAGMA journal_mode = WAL") != "wal":
        raise CannotSave(f"{path} is on a file system that cannot share memory; use a local disk.")
    connection.execute("PRAGMA synchronous = FULL")  # a commit is on the disk when it returns
    connection.execute("PRAGMA fullfsync = ON")  # on a Mac too, where fsync alone does not do it
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA recursive_triggers = ON")  # a REPLACE deletes: let triggers see it
    if (damage := ask("PRAGMA quick_check(1)")) != "ok":
        raise damaged(path, " ".join(damage.split()))
    if schema < len(MIGRATIONS):
        migrate(connection, path)


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """From any older schema, or from nothing, to the newest one: the whole way or not at all."""
    connection.execute("BEGIN EXCLUSIVE")
    try:
        schema = connection.execute("PRAGMA user_version").fetchone()[0]  # others may have been
        refuse_newer(schema, path)
        for step in MIGRATIONS[schema:]:
            for sql in step:
                connection.execute(sql)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def refuse_newer(schema: int, path: Path) -> None:
    """What a newer BlockTrain wrote is not ours to guess at."""
    if schema > len(MIGRATIONS):
        raise BadLedger(
            f"{path} is of a newer BlockTrain (schema {schema}, this one knows {len(MIGRATIONS)}); "
            "upgrade blocktrain."
        )


def to_row(record: Any) -> list[Any]:
    """A record's columns."""
    kind = type(record)
    values = {column: getattr(record, column) for column in COLUMNS[kind]}
    for column in values:
        if (kind, column) in IN_JSON:
            values[column] = msgspec.json.encode(values[column]).decode()
    return list(values.values())


def from_row(kind: type[T], row: tuple[Any, ...]) -> T:
    """A record from its columns."""
    values = dict(zip(COLUMNS[kind], row, strict=True))
    for column in values:
        if (kind, column) in IN_JSON:
            values[column] = msgspec.json.decode(values[column], type=IN_JSON[kind, column])
    return kind(**values)


def damaged(path: Path, why: str) -> BadLedger:
    """The sentence for a file that cannot be trusted."""
    return BadLedger(
        f"The ledger at {path} is damaged ({why}); keep a copy of it and restore a backup."
    )


@contextmanager
def errors_are_clear(path: Path) -> Iterator[None]:
    """Turns SQLite's errors into sentences."""
    try:
        yield
    except (OverflowError, UnicodeEncodeError) as error:
        raise BadInput(f"The ledger cannot hold such a value ({error}); send another.") from None
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise damaged(path, str(error)) from None
        if code == sqlite3.SQLITE_CONSTRAINT:
            raise Contradiction(
                f"The ledger refuses this ({error}); look at what it holds."
            ) from None
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise CannotSave(
                f"Another process has been writing to {path} for {PATIENCE:.0f} s; stop it."
            ) from None
        if code in CANNOT_SAVE:
            raise CannotSave(
                f"Cannot write to {path} ({error}); what was written before is intact: free some "
                "space or check the folder, then go on."
            ) from None
        raise
