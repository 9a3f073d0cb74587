"""What a ledger is asked and told, in SQL.

aggregation/ledger.py says what each of these promises.
"""

import math
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from blocktrain.aggregation.ledger import (
    Assignment,
    Evaluation,
    Event,
    Receipt,
    Role,
    RunRecord,
    Token,
    TokenHash,
    Version,
    Worker,
    WorkerId,
    hash_of_token,
)
from blocktrain.aggregation.sqlite_file import errors_are_clear
from blocktrain.errors import CannotSave, Contradiction
from blocktrain.terms import Digest

T = TypeVar("T")

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
