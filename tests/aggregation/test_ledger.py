"""The run's memory: one contract for every ledger, then what a SQLite file must survive."""

import hashlib
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blocktrain.aggregation import sqlite_file
from blocktrain.aggregation.ledger import (
    Assignment,
    Evaluation,
    Ledger,
    Receipt,
    RunRecord,
    Token,
    TokenHash,
    Transaction,
    Version,
    Worker,
    WorkerId,
    hash_of_token,
    new_token,
)
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.aggregation.sqlite_file import MIGRATIONS
from blocktrain.errors import BadInput, BadLedger, CannotSave, Contradiction
from blocktrain.terms import Digest

Sentence = Callable[[BaseException], str]
Open = Callable[[], Ledger]

NOW = 1_700_000_000.25
TOKEN = "the worker's token"
RUN = RunRecord(b"[pace]\nrounds = 5\n", Digest("c" * 64), NOW)
ANNA, BEN = WorkerId("a" * 64), WorkerId("b" * 64)


def digest_of(*what: object) -> Digest:
    return Digest(hashlib.sha256(repr(what).encode()).hexdigest())


def version(block: int, round: int) -> Version:
    return Version(
        block=block,
        round=round,
        snapshot=digest_of("snapshot", block, round),
        steady=digest_of("steady", block, round),
        momentum=digest_of("momentum", block, round),
        residual=digest_of("residual", block, round),
        delta=digest_of("delta", block, round) if round else None,
        manifest=digest_of("manifest", block, round) if round else None,
        closed=NOW + round,
    )


def receipt(number: int, block: int = 0, round: int = 1, worker: WorkerId = ANNA) -> Receipt:
    return Receipt(
        update=digest_of("update", number, block, round),
        blob=digest_of("blob", number, block, round),
        worker=worker,
        block=block,
        round=round,
        slot=number,
        bytes_trained=1000 + number,
        verdict="taken",
        reason="",
        signed=bytes([number % 256]) * 64,
        receipt=b"signed words",
        given=NOW + number,
    )


def assignment(slot: int, block: int = 0, round: int = 1) -> Assignment:
    neighbours = {1: version(1, round - 1).steady, 12: version(12, round - 1).steady}
    base = version(block, round - 1).snapshot
    return Assignment(ANNA, block, round, slot, base, neighbours, 20, 5000, NOW)


def begin(t: Transaction) -> None:
    """A run of two blocks and two workers."""
    t.begin_run(RUN)
    token = t.issue_token(TOKEN, "worker", "for friends", NOW)
    t.join(ANNA, "anna", token.hash, NOW)
    t.join(BEN, "ben", token.hash, NOW + 1)
    t.begin_block(version(0, 0))
    t.begin_block(version(1, 0))
    t.keep_state(b"0")


def take_and_close(t: Transaction, block: int, round: int, replicas: int = 3) -> None:
    """A whole round: receipts, and the close that gives them their shares."""
    for slot in range(replicas):
        t.give_receipt(receipt(slot, block, round))
    shares = {r.update: 1 / replicas for r in t.outstanding(block)}
    t.close_round(version(block, round), shares, str(round).encode())


class LedgerContract:
    """What every ledger promises. Another one needs only a class with a `reopen` fixture."""

    @pytest.fixture
    def ledger(self, reopen: Open) -> Iterator[Ledger]:
        ledger = reopen()
        with ledger.transaction() as t:
            begin(t)
        yield ledger
        ledger.close()

    def test_a_run_begins_once(self, ledger: Ledger, sentence: Sentence) -> None:
        with ledger.reading() as r:
            assert r.run() == RUN
        with ledger.transaction() as t, pytest.raises(Contradiction) as error:
            t.begin_run(replace(RUN, config=b"another"))
        sentence(error.value)
        with ledger.reading() as r:
            assert r.run() == RUN

    def test_what_is_written_is_there_when_opened_again(self, ledger: Ledger, reopen: Open) -> None:
        with ledger.transaction() as t:
            t.assign(assignment(0))
            take_and_close(t, 0, 1)
            t.note("closed", {"block": 0, "deep": [1, {"ü": None}]}, NOW)
        ledger.close()
        again = reopen()
        with again.reading() as r:
            assert r.newest(0) == version(0, 1)
            assert r.newest(1) == version(1, 0)
            assert r.state() == b"1"
            assert r.assignments() == [assignment(0)]
            assert [event.detail for event in r.events()] == [
                {"block": 0, "deep": [1, {"ü": None}]}
            ]
        again.close()

    def test_an_error_undoes_the_whole_transaction(self, ledger: Ledger) -> None:
        def fail() -> None:
            with ledger.transaction() as t:
                take_and_close(t, 0, 1)
                assert t.newest(0) == version(0, 1)  # a transaction sees its own changes
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        with ledger.reading() as r:
            assert r.newest(0) == version(0, 0)
            assert r.receipts() == []
            assert r.state() == b"0"

    def test_a_transaction_within_one_is_a_bug(self, ledger: Ledger) -> None:
        def nest() -> None:
            with ledger.transaction() as t:
                t.keep_state(b"undone")
                with ledger.transaction():
                    pass

        with pytest.raises(Exception, match="transaction within a transaction"):
            nest()
        with ledger.reading() as r:
            assert r.state() == b"0"

    def test_tokens(self, ledger: Ledger) -> None:
        owners = new_token()
        with ledger.transaction() as t:
            issued = t.issue_token(owners, "owner", "mine", NOW + 5)
        assert issued == Token(hash_of_token(owners), "owner", "mine", NOW + 5)
        with ledger.reading() as r:
            assert r.token(owners) == issued
            assert r.token(issued.hash) is None  # the hash opens no door
            assert r.token("a guess") is None
            assert r.token("\udc80") is None
            assert [token.label for token in r.tokens()] == ["for friends", "mine"]
        with ledger.transaction() as t:
            t.revoke_token(issued.hash, NOW + 6)
            t.revoke_token(issued.hash, NOW + 7)
            with pytest.raises(Contradiction):
                t.revoke_token(TokenHash("nobody's"), NOW)
            with pytest.raises(Contradiction):
                t.issue_token(owners, "owner", "twice", NOW)
        with ledger.reading() as r:
            assert r.token(owners) == replace(issued, revoked=NOW + 6)

    def test_tokens_are_long_and_new(self) -> None:
        tokens = {new_token() for _ in range(100)}
        assert len(tokens) == 100
        assert min(map(len, tokens)) >= 43

    def test_workers_come_back_as_themselves(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            t.give_receipt(receipt(0))
            t.add_traffic(ANNA, 100, 2000)
            t.add_traffic(ANNA, 1, 2)
            t.ban(ANNA, NOW + 5)
            t.ban(ANNA, NOW + 9)
            token = t.issue_token("another", "worker", "", NOW)
            anna = t.join(ANNA, "anna the second", token.hash, NOW + 60)
        assert anna == Worker(ANNA, "anna the second", token.hash, NOW, NOW + 5, 1, 1000, 101, 2002)
        with ledger.reading() as r:
            assert [worker.id for worker in r.workers()] == [ANNA, BEN]
            assert r.worker(ANNA) == anna
            assert r.worker(WorkerId("c" * 64)) is None

    def test_nobody_joins_without_a_token_nor_is_a_stranger_dealt_with(
        self, ledger: Ledger, sentence: Sentence
    ) -> None:
        stranger = WorkerId("e" * 64)
        acts: list[Callable[[Transaction], object]] = [
            lambda t: t.join(stranger, "eve", hash_of_token("forged"), NOW),
            lambda t: t.ban(stranger, NOW),
            lambda t: t.add_traffic(stranger, 1, 1),
            lambda t: t.give_receipt(receipt(0, worker=stranger)),
            lambda t: t.assign(replace(assignment(0), worker=stranger)),
        ]
        for act in acts:
            with pytest.raises(Contradiction) as error, ledger.transaction() as t:
                act(t)
            sentence(error.value)
        with ledger.reading() as r:
            assert len(r.workers()) == 2
            assert r.receipts() == []

    def test_values_that_cannot_be(self, ledger: Ledger, sentence: Sentence) -> None:
        for bad in (
            replace(receipt(0), bytes_trained=2**70),
            replace(receipt(0), reason="\udc80"),
        ):
            with pytest.raises(BadInput) as error, ledger.transaction() as t:
                t.give_receipt(bad)
            sentence(error.value)
        for bad in (
            replace(receipt(0), bytes_trained=-1),
            replace(receipt(0), verdict="perhaps"),  # type: ignore[arg-type]
            replace(receipt(0), into_round=1, share=0.5),
        ):
            with pytest.raises(Contradiction) as error2, ledger.transaction() as t:
                t.give_receipt(bad)
            sentence(error2.value)
        evaluation = Evaluation(NOW, (0, 0), float("nan"), 5, hash_of_token(TOKEN))
        with pytest.raises(Contradiction), ledger.transaction() as t:
            t.evaluated(evaluation)

    def test_assignments_are_kept_as_they_were_given(
        self, ledger: Ledger, sentence: Sentence
    ) -> None:
        with ledger.transaction() as t:
            for slot, block, round in [(1, 0, 1), (0, 0, 1), (0, 1, 1), (0, 0, 2)]:
                t.assign(assignment(slot, block, round))
            t.assign(replace(assignment(0), issued=NOW + 50))  # handed out again after a restart
            t.assign(replace(assignment(1), steps=3))
            t.assign(assignment(1))  # with more time again
            t.assign(replace(assignment(0), worker=BEN))  # a slot whose first worker was lost
            with pytest.raises(Contradiction) as error:
                t.assign(replace(assignment(0), base=digest_of("other")))
        sentence(error.value)
        with ledger.reading() as r:
            first = [assignment(0), replace(assignment(0), worker=BEN), assignment(1)]
            assert r.assignments(0, 1) == first
            assert r.assignments(round=1) == [*first, assignment(0, 1)]
            assert r.assignments(block=1) == [assignment(0, 1)]
            assert r.assignments()[-1] == assignment(0, 0, 2)
            assert len(r.assignments()) == 5

    def test_an_update_has_one_receipt(self, ledger: Ledger) -> None:
        first = receipt(0)
        with ledger.transaction() as t:
            assert t.give_receipt(first) == first
        again = replace(first, verdict="refused", reason="no", receipt=b"other words", worker=BEN)
        with ledger.transaction() as t:
            assert t.give_receipt(again) == first
        with ledger.reading() as r:
            assert r.receipt(first.update) == first
            assert r.receipt(digest_of("none")) is None
            anna = r.worker(ANNA)
        assert anna is not None
        assert (anna.updates, anna.bytes_trained) == (1, first.bytes_trained)

    def test_refused_updates_count_for_nothing(self, ledger: Ledger) -> None:
        refused = replace(receipt(0), verdict="refused", reason="its norm is absurd")
        with ledger.transaction() as t:
            t.give_receipt(refused)
            t.give_receipt(receipt(1))
            assert t.outstanding(0) == [receipt(1)]
            with pytest.raises(Contradiction):
                t.close_round(version(0, 1), {refused.update: 1.0}, b"1")
        with ledger.reading() as r:
            assert r.receipts(0, 1) == [refused, receipt(1)]
            anna = r.worker(ANNA)
        assert anna is not None
        assert anna.updates == 1

    def test_what_a_banned_worker_gave_is_dropped_unless_it_is_in_a_snapshot(
        self, ledger: Ledger
    ) -> None:
        with ledger.transaction() as t:
            take_and_close(t, 0, 1)
            t.give_receipt(receipt(0, round=2))
            t.drop(receipt(0, round=2).update, NOW + 9)
            t.drop(receipt(0, round=2).update, NOW + 10)
            assert t.outstanding(0) == []
            with pytest.raises(Contradiction):
                t.close_round(version(0, 2), {receipt(0, round=2).update: 1.0}, b"2")
            with pytest.raises(Contradiction):
                t.drop(receipt(0, round=1).update, NOW)
        with ledger.reading() as r:
            standing = r.receipt(receipt(0, round=2).update)
        assert standing == replace(receipt(0, round=2), dropped=NOW + 9)

    def test_a_tally_of_what_became_of_updates(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            assert t.tally() == {}
            t.give_receipt(receipt(0))
            t.give_receipt(replace(receipt(1), reason="It came late."))
            t.give_receipt(replace(receipt(2), verdict="refused", reason="no"))
            t.give_receipt(receipt(3, block=1))
            assert t.tally() == {0: (1, 1, 1), 1: (1, 0, 0)}

    def test_closing_a_round_changes_everything_together(self, ledger: Ledger) -> None:
        late = receipt(7, round=1)
        with ledger.transaction() as t:
            for slot in (2, 0, 1):
                t.give_receipt(receipt(slot))
            t.close_round(
                version(0, 1), {receipt(slot).update: 0.5 for slot in (0, 2)}, b"one closed"
            )
            t.give_receipt(late)
            t.give_receipt(receipt(0, round=2))
        with ledger.reading() as r:
            assert r.combined(0, 1) == [
                replace(receipt(slot), into_round=1, share=0.5) for slot in (0, 2)
            ]
            assert r.outstanding(0) == [receipt(1), late, receipt(0, round=2)]
            assert r.state() == b"one closed"
            assert r.version(0, 1) == r.newest(0) == version(0, 1)
            assert r.versions(0) == [version(0, 0), version(0, 1)]
            assert r.versions() == [version(0, 0), version(1, 0), version(0, 1)]
        with ledger.transaction() as t:
            shares = {r.update: 0.25 for r in t.outstanding(0)}
            t.close_round(version(0, 2), shares, b"two closed")
        with ledger.reading() as r:
            assert [row.update for row in r.combined(0, 2)] == list(shares)
            assert r.outstanding(0) == []

    def test_no_update_is_combined_twice_nor_elsewhere(
        self, ledger: Ledger, sentence: Sentence
    ) -> None:
        mine, others = receipt(0), receipt(0, block=1)
        with ledger.transaction() as t:
            t.give_receipt(mine)
            t.give_receipt(others)
            t.close_round(version(0, 1), {mine.update: 1.0}, b"1")
        new = receipt(3, round=2)
        for wrong in (mine.update, others.update, digest_of("unknown")):
            with ledger.transaction() as t:
                t.give_receipt(new)
                with pytest.raises(Contradiction) as error:  # caught: and yet nothing of it stays
                    t.close_round(version(0, 2), {new.update: 0.5, wrong: 0.5}, b"2")
            sentence(error.value)
            with ledger.reading() as r:
                assert r.newest(0) == version(0, 1)
                assert r.outstanding(0) == [new]
                assert r.state() == b"1"

    @pytest.mark.parametrize("share", [float("nan"), float("inf")])
    def test_a_share_is_a_number(self, ledger: Ledger, share: float) -> None:
        with ledger.transaction() as t:
            t.give_receipt(receipt(0))
            with pytest.raises(Contradiction):
                t.close_round(version(0, 1), {receipt(0).update: share}, b"1")
        with ledger.reading() as r:
            assert r.newest(0) == version(0, 0)

    def test_rounds_follow_each_other(self, ledger: Ledger, sentence: Sentence) -> None:
        wrong: list[Callable[[Transaction], None]] = [
            lambda t: t.close_round(version(0, 2), {}, b""),
            lambda t: t.close_round(version(0, 0), {}, b""),
            lambda t: t.close_round(version(9, 1), {}, b""),
            lambda t: t.close_round(replace(version(0, 1), manifest=None), {}, b""),
            lambda t: t.begin_block(version(0, 0)),
            lambda t: t.begin_block(version(2, 1)),
        ]
        for act in wrong:
            with pytest.raises(Contradiction) as error, ledger.transaction() as t:
                act(t)
            sentence(error.value)
        with ledger.reading() as r:
            assert r.versions() == [version(0, 0), version(1, 0)]
            assert r.state() == b"0"

    def test_events_are_told_in_order(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            numbers = [t.note("joined", {"n": n}, NOW + n) for n in range(7)]
        assert numbers == sorted(set(numbers))
        with ledger.reading() as r:
            assert [event.detail["n"] for event in r.events(limit=3)] == [0, 1, 2]
            assert [event.number for event in r.events(after=numbers[4])] == numbers[5:]
            assert [event.detail["n"] for event in r.latest_events(2)] == [5, 6]
            assert (r.events()[0].kind, r.events()[0].time) == ("joined", NOW)

    def test_evaluations(self, ledger: Ledger) -> None:
        rows = [Evaluation(NOW, (n, n + 1), 5.55 - n, 10 * n, hash_of_token(TOKEN)) for n in (1, 0)]
        with ledger.transaction() as t:
            for row in rows:
                t.evaluated(row)
        with ledger.reading() as r:
            assert r.evaluations() == rows

    def test_a_reading_is_of_one_moment(self, ledger: Ledger) -> None:
        with ledger.reading() as r:
            assert r.state() == b"0"
            with ledger.transaction() as t:
                take_and_close(t, 0, 1)
            assert r.state() == b"0"
            assert r.newest(0) == version(0, 0)
        with ledger.reading() as r:
            assert r.state() == b"1"

    def test_blobs_in_use(self, ledger: Ledger) -> None:
        with ledger.transaction() as t:
            for round in range(1, 6):
                take_and_close(t, 0, round)
            t.assign(assignment(0, 0, 3))  # of a round closed long ago
            t.assign(assignment(0, 0, 6))
            t.give_receipt(receipt(0, round=6))
            t.give_receipt(replace(receipt(1, round=6), verdict="refused"))
        kept = {RUN.corpus, receipt(0, round=6).blob}
        for block, newest in ((0, 5), (1, 0)):
            kept |= {version(block, newest).momentum, version(block, newest).residual}  # type: ignore[arg-type]
        for block, round in ((0, 0), (1, 0), (0, 4), (0, 5)):
            kept |= {version(block, round).snapshot, version(block, round).steady}
        kept |= {digest_of("delta", 0, round) for round in (4, 5)}
        kept |= {digest_of("manifest", 0, round) for round in range(1, 6)}
        kept |= set(assignment(0, 0, 6).neighbours.values())
        with ledger.reading() as r:
            assert r.blobs_in_use(rounds=2) == kept

    def test_many_writers_are_each_told_the_truth(self, ledger: Ledger) -> None:
        def act(number: int) -> Receipt | str:
            try:
                with ledger.transaction() as t:
                    given = t.give_receipt(receipt(number))
                    if number % 7 == 0:
                        raise KeyError(number)
                    return given
            except KeyError as error:
                return f"undone {error}"

        with ThreadPoolExecutor(40) as pool:
            outcomes = list(pool.map(act, range(200)))
        with ledger.reading() as r:
            there = {row.slot for row in r.receipts()}
            anna = r.worker(ANNA)
        for number, outcome in enumerate(outcomes):
            assert outcome == (receipt(number) if number % 7 else f"undone {number}")
            assert (number in there) == bool(number % 7)
        assert anna is not None
        assert anna.updates == len(there)

    def test_nothing_begins_after_the_end(self, ledger: Ledger, sentence: Sentence) -> None:
        ledger.close()
        ledger.close()
        acts: list[Callable[[], object]] = [
            lambda: ledger.transaction().__enter__(),
            lambda: ledger.reading().__enter__(),
        ]
        for act in acts:
            with pytest.raises(CannotSave) as error:
                act()
            sentence(error.value)

    def test_readers_see_whole_rounds_while_a_writer_writes(self, ledger: Ledger) -> None:
        over = threading.Event()
        looked = Counter[int]()

        def look() -> None:
            while not over.is_set():
                with ledger.reading() as r:
                    newest = r.newest(0)
                    assert newest is not None
                    assert r.state() == str(newest.round).encode()
                    assert len(r.combined(0, newest.round)) == (3 if newest.round else 0)
                    assert r.outstanding(0) == []
                looked[newest.round] += 1

        with ThreadPoolExecutor(3) as pool:
            lookers = [pool.submit(look) for _ in range(3)]
            try:
                for round in range(1, 40):
                    with ledger.transaction() as t:
                        take_and_close(t, 0, round)
            finally:
                over.set()
            for looker in lookers:
                looker.result()
        assert len(looked) > 3

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_values_come_back_as_they_were(self, ledger: Ledger, data: st.DataObject) -> None:
        text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
        numbers = st.integers(0, 2**63 - 1)
        times = st.floats(0, 1e12)
        row = Receipt(
            update=digest_of(data.draw(st.integers())),
            blob=digest_of(data.draw(st.integers())),
            worker=ANNA,
            block=data.draw(numbers),
            round=data.draw(numbers),
            slot=data.draw(numbers),
            bytes_trained=data.draw(st.integers(0, 2**50)),
            verdict=data.draw(st.sampled_from(["taken", "refused"])),
            reason=data.draw(text),
            signed=data.draw(st.binary(max_size=64)),
            receipt=data.draw(st.binary(max_size=200)),
            given=data.draw(times),
        )
        work = Assignment(
            worker=ANNA,
            block=row.block,
            round=row.round,
            slot=row.slot,
            base=row.update,
            neighbours=data.draw(st.dictionaries(numbers, st.just(row.update), max_size=3)),
            steps=data.draw(numbers),
            bytes_before=data.draw(numbers),
            issued=row.given,
        )
        detail = data.draw(st.dictionaries(text, text | st.integers(-(2**53), 2**53) | st.none()))

        def look(t: Transaction) -> None:
            number = t.note(row.reason, detail, row.given)
            assert t.events(after=number - 1)[0].detail == detail
            assert t.give_receipt(row) == t.receipt(row.update) == row
            t.assign(work)
            assert t.assignments(work.block, work.round) == [work]
            raise KeyError  # so that the next example begins anew

        with pytest.raises(KeyError), ledger.transaction() as t:
            look(t)


class TestSqliteLedger(LedgerContract):
    """A SQLite file keeps the contract."""

    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Open:
        return lambda: SqliteLedger(tmp_path / "ledger.db", create=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger of a run that has begun."""
    path = tmp_path / "ledger.db"
    with SqliteLedger(path, create=True) as ledger, ledger.transaction() as t:
        begin(t)
    return path


@pytest.mark.parametrize(
    "lie",
    [
        "UPDATE receipts SET verdict = 'refused'",
        "UPDATE receipts SET bytes_trained = 10 * bytes_trained",
        "UPDATE receipts SET receipt = x'00'",
        "UPDATE receipts SET worker = '" + BEN + "'",
        "UPDATE receipts SET into_round = 2 WHERE slot = 0",
        "UPDATE receipts SET into_round = NULL, share = NULL WHERE slot = 0",
        "UPDATE receipts SET into_round = 1 WHERE slot = 1",
        "DELETE FROM receipts",
        "REPLACE INTO receipts SELECT * FROM receipts",
        "UPDATE versions SET snapshot = steady",
        "DELETE FROM versions",
        "UPDATE events SET kind = 'nothing'",
        "DELETE FROM events",
        "DELETE FROM workers",
    ],
)
def test_what_stands_cannot_be_changed_even_in_sql(path: Path, lie: str) -> None:
    with SqliteLedger(path) as ledger:
        with ledger.transaction() as t:
            t.give_receipt(receipt(0))
            t.give_receipt(receipt(1))
            t.close_round(version(0, 1), {receipt(0).update: 1.0}, b"1")
            t.note("closed", {}, NOW)
        with pytest.raises(sqlite3.IntegrityError):
            ledger.writer.execute(lie)
        ledger.writer.execute("UPDATE receipts SET into_round = 2, share = 0.5 WHERE slot = 1")


def test_no_token_is_in_any_file(path: Path) -> None:
    secret = new_token()
    with SqliteLedger(path) as ledger:
        with ledger.transaction() as t:
            t.issue_token(secret, "owner", "mine", NOW)
        files = list(path.parent.iterdir())
        assert len(files) > 1  # the write-ahead log too
        bodies = b"".join(file.read_bytes() for file in files)
    assert hash_of_token(secret).encode() in bodies
    assert secret.encode() not in bodies


def test_every_commit_is_synced(path: Path) -> None:
    with SqliteLedger(path) as ledger:
        assert ledger.writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert ledger.writer.execute("PRAGMA synchronous").fetchone() == (2,)


def test_two_processes_may_write(path: Path) -> None:
    """`blocktrain tokens issue`, while the coordinator runs."""
    with SqliteLedger(path) as one, SqliteLedger(path) as two:

        def act(number: int) -> None:
            with (one, two)[number % 2].transaction() as t:
                t.issue_token(f"token {number}", "worker", "", NOW + number)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(act, range(40)))
        with one.reading() as r:
            assert len(r.tokens()) == 41


def test_another_process_that_does_not_let_go(
    path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    monkeypatch.setattr(sqlite_file, "PATIENCE", 0.05)
    with SqliteLedger(path) as one, SqliteLedger(path) as two, one.transaction() as t:
        t.keep_state(b"1")
        with pytest.raises(CannotSave) as error, two.transaction():
            pass
        sentence(error.value)


def bad_ledgers() -> dict[str, Callable[[Path], object]]:
    def middle(path: Path) -> None:
        body = bytearray(path.read_bytes())
        body[4096 : len(body) // 2] = b"\xff" * (len(body) // 2 - 4096)
        path.write_bytes(body)

    def a_folder(path: Path) -> None:
        path.unlink()
        path.mkdir()

    def of_others(path: Path) -> None:
        path.unlink()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE recipes (cake)")

    return {
        "missing": lambda path: path.unlink(),
        "a folder": a_folder,
        "empty": lambda path: path.write_bytes(b""),
        "garbage": lambda path: path.write_bytes(b"garbage " * 1000),
        "cut": lambda path: path.write_bytes(path.read_bytes()[:10_000]),
        "middle": middle,
        "of others": of_others,
    }


@pytest.mark.parametrize("damage", bad_ledgers())
def test_a_ledger_that_cannot_be_trusted(path: Path, damage: str, sentence: Sentence) -> None:
    bad_ledgers()[damage](path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(BadLedger) as error:
        SqliteLedger(path)
    assert str(path) in sentence(error.value)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_nothing_old_is_taken_for_a_new_ledger(path: Path, sentence: Sentence) -> None:
    """`create` makes what is not there; it never makes anything anew."""
    with SqliteLedger(path, create=True) as ledger, ledger.reading() as r:
        assert r.run() == RUN
    for damage in ("garbage", "of others"):
        bad_ledgers()[damage](path)
        with pytest.raises(BadLedger) as error:
            SqliteLedger(path, create=True)
        sentence(error.value)


def test_a_folder_that_is_not_there(tmp_path: Path, sentence: Sentence) -> None:
    with pytest.raises(CannotSave) as error:
        SqliteLedger(tmp_path / "nowhere" / "ledger.db", create=True)
    sentence(error.value)


NEXT = (
    "ALTER TABLE workers ADD COLUMN country TEXT NOT NULL DEFAULT 'unknown'",
    "CREATE TABLE prizes (worker TEXT NOT NULL REFERENCES workers (id))",
)


def test_an_older_ledger_is_brought_forward(
    path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    with SqliteLedger(path) as ledger, ledger.transaction() as t:
        take_and_close(t, 0, 1)
    with monkeypatch.context() as future:
        future.setattr(sqlite_file, "MIGRATIONS", (*MIGRATIONS, NEXT, ("CREATE TABLE more (x)",)))
        for _ in range(2):  # the second time there is nothing to do
            with SqliteLedger(path) as ledger, ledger.reading() as r:
                assert r.newest(0) == version(0, 1)
                assert len(r.combined(0, 1)) == 3
                asked = ledger.writer.execute("SELECT DISTINCT country FROM workers")
                assert asked.fetchall() == [("unknown",)]
    before = path.read_bytes()
    with pytest.raises(BadLedger) as error:  # back in the present
        SqliteLedger(path)
    assert "upgrade blocktrain" in sentence(error.value)
    assert path.read_bytes() == before


def test_a_step_forward_that_fails_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as future:
        future.setattr(
            sqlite_file, "MIGRATIONS", (*MIGRATIONS, (*NEXT, "CREATE TABLE workers (x)"))
        )
        with pytest.raises(sqlite3.OperationalError, match="workers already exists"):
            SqliteLedger(path)
    with SqliteLedger(path) as ledger, ledger.reading() as r:
        assert len(r.workers()) == 2
        columns = ledger.writer.execute("PRAGMA table_info (workers)").fetchall()
        assert "country" not in [column[1] for column in columns]


def test_every_step_has_been_taken(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)


def test_backups_while_rounds_are_closed(path: Path, tmp_path: Path) -> None:
    copies = [tmp_path / "copies" / f"backup-{number}" for number in range(6)]
    copies[0].parent.mkdir()
    rounds = []
    over = threading.Event()
    with SqliteLedger(path) as ledger:

        def work() -> None:
            for round in range(1, 10_000):
                if over.is_set():
                    return
                with ledger.transaction() as t:
                    take_and_close(t, 0, round)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            for copy in copies:
                time.sleep(0.05)
                ledger.backup(copy)
            ledger.backup(copies[0])  # over an older one
        finally:
            over.set()
            worker.join()
    assert sorted(copies[0].parent.iterdir()) == copies  # one file each, and nothing else
    for copy in copies:
        with closing(sqlite3.connect(f"file:{copy}?mode=ro", uri=True)) as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        with SqliteLedger(copy) as ledger, ledger.reading() as r:
            newest = r.newest(0)
            assert newest is not None
            assert r.run() == RUN
            assert r.state() == str(newest.round).encode()
            assert r.outstanding(0) == []
            assert len(r.receipts(0)) == 3 * newest.round
            assert len(r.versions(0)) == newest.round + 1
        rounds.append(newest.round)
    assert rounds[1] < rounds[-1] <= rounds[0]


def test_a_backup_that_cannot_be_written(path: Path, sentence: Sentence) -> None:
    with SqliteLedger(path) as ledger:
        with pytest.raises(CannotSave) as error:
            ledger.backup(path.parent / "nowhere" / "copy")
        sentence(error.value)
        with ledger.reading() as r:
            assert r.run() == RUN


WRITE_FOR_EVER = """
import hashlib, os, sys, threading
from pathlib import Path
from blocktrain.aggregation.ledger import Receipt, Version
from blocktrain.aggregation.sqlite import SqliteLedger

ledger, turn = SqliteLedger(Path(sys.argv[1])), sys.argv[2]
with ledger.reading() as r:
    worker = r.workers()[0].id

def say(line):
    os.write(1, line.encode() + bytes([10]))

def receipts(thread):
    number = 0
    while True:
        update = hashlib.sha256(f"{turn} {thread} {number}".encode()).hexdigest()
        receipt = Receipt(update, update, worker, 0, 1, thread, 10, "taken", "", b"s", b"r", 1.0)
        with ledger.transaction() as t:
            t.give_receipt(receipt)
        say(f"taken {update}")
        number += 1

for thread in range(4):
    threading.Thread(target=receipts, args=(thread,), daemon=True).start()
while True:
    with ledger.transaction() as t:
        round, taken = t.newest(0).round + 1, t.outstanding(0)
        names = ["%064x" % round] * 6
        shares = {receipt.update: 1 / len(taken) for receipt in taken}
        t.close_round(Version(0, round, *names, 1.0), shares, f"{round} {len(taken)}".encode())
    say(f"closed {round}")
"""


def test_kill_9_loses_nothing_that_was_written(path: Path) -> None:
    said: list[str] = []
    for turn, instant in enumerate([0.0, 0.004, 0.01, 0.03, 0.07, 0.12, 0.2, 0.35]):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITE_FOR_EVER, str(path), str(turn)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        said.append(child.stdout.readline())
        time.sleep(instant)
        child.send_signal(signal.SIGKILL)
        said += child.stdout.readlines()
        child.stdout.close()
        child.wait()
        with SqliteLedger(path) as ledger, ledger.reading() as r:
            rows = {row.update: row for row in r.receipts()}
            newest = r.newest(0)
            state = (r.state() or b"").decode()
            anna = r.worker(ANNA)
            versions = r.versions(0)
        assert newest is not None
        assert anna is not None
        words = [line.split() for line in said]
        assert {word for kind, word in words if kind == "taken"} <= rows.keys()
        assert newest.round >= max(
            (int(word) for kind, word in words if kind == "closed"), default=0
        )
        assert [v.round for v in versions] == list(range(newest.round + 1))
        combined = Counter(row.into_round for row in rows.values())
        if newest.round:  # the state is that of the newest round: they were written together
            assert state == f"{newest.round} {combined[newest.round]}"
        for round, count in combined.items():
            shares = [row.share or 0 for row in rows.values() if row.into_round == round]
            assert round is None or sum(shares) == pytest.approx(1.0), count
        assert anna.updates == len(rows)
    assert len(said) > 50


FILL = """
import resource, sys
from pathlib import Path
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.errors import CannotSave

folder, disk = Path(sys.argv[1]), sys.argv[2]
ballast = folder / "ballast"
if disk == "small files":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
else:
    ballast.write_bytes(bytes(2**20))
ledger, written = SqliteLedger(folder / "ledger.db", create=True), 0

def write():
    global written
    with ledger.transaction() as t:
        t.note("kept", {"text": "x" * 20_000}, 1.0)
        t.keep_state(b"kept")
    written += 1

def check():
    with ledger.reading() as r:
        assert len(r.events(limit=10_000)) == written
        assert r.state() == b"kept"

for _ in range(3):
    try:
        while written < 1000:
            write()
    except CannotSave as error:
        print(error)
    check()
try:
    ledger.backup(folder / "copy")
except CannotSave as error:
    print(error)
    assert not (folder / "copy").exists()
print(written)
if disk == "small files":
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
else:
    ballast.unlink()
write()
check()
ledger.close()
ledger = SqliteLedger(folder / "ledger.db")
check()
"""


@pytest.mark.parametrize("disk", ["small disk", "small files"])
def test_a_full_disk(tmp_path: Path, disk: str) -> None:
    mount = 'mount -t tmpfs -o size=3m small "$1"'
    shell = ["sh", "-c", f'{mount} && shift && exec "$@"', "sh", str(tmp_path)]
    small = ["unshare", "--mount", *shell]
    if disk == "small disk" and subprocess.run([*small, "true"], check=False).returncode != 0:
        disk = "small files"  # only root may make small disks
    command = [sys.executable, "-c", FILL, str(tmp_path), disk]
    child = subprocess.run(
        [*small, *command] if disk == "small disk" else command,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    *sentences, written = child.stdout.splitlines()
    assert 5 < int(written) < 1000
    assert len(sentences) >= 3
    assert all("; " in line and "intact" in line for line in sentences)
