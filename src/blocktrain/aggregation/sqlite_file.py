"""One SQLite file that is a ledger: how it is opened, its tables, its errors as sentences."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blocktrain.errors import BadInput, BadLedger, CannotSave, Contradiction

PATIENCE = 10.0  # seconds to wait for another process that writes to the same ledger
CANNOT_SAVE = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
)

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


def connect(path: Path) -> sqlite3.Connection:
    """A connection for any thread; transactions begin and end as they are told."""
    return sqlite3.connect(path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)


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
