"""Corpora from files and folders, and the index law of batches."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.errors import BadCorpus, BadInput
from blocktrain.learning.data import (
    LARGEST_FOLDER,
    Corpus,
    Cursor,
    Plan,
    Rows,
    Text,
    batches,
    open_corpus,
)
from blocktrain.lengths import Lengths

PROSE = b"".join(f"{number} bottles of beer on the wall\n".encode() for number in range(100))


def counting(length: int) -> Text:
    """Bytes that say where they lie, modulo 256."""
    return np.arange(length, dtype=np.int64).astype(np.uint8)


def rows_of(data: Text, plan: Plan, cursor: Cursor) -> list[Rows]:
    return [rows for rows, _ in batches(data, plan, cursor)]


# --- corpora ------------------------------------------------------------------------------------


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    path = tmp_path / "prose.txt"
    path.write_bytes(PROSE)
    return path


def test_a_file_is_split_by_bytes_and_only_read(prose: Path) -> None:
    corpus = open_corpus(str(prose))
    assert corpus.name == "prose.txt"
    parts = [corpus.split(name) for name in ("train", "valid", "test")]
    assert b"".join(part.tobytes() for part in parts) == PROSE
    assert len(corpus.train) == len(PROSE) * 90 // 100
    assert len(corpus.valid) == len(PROSE) * 95 // 100 - len(corpus.train)
    for part in parts:
        assert part.dtype == np.uint8
        assert type(part) is np.ndarray
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 0


def test_the_digest_names_the_splits_and_nothing_else(prose: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "folder" / "elsewhere"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(PROSE)
    corpus, same = open_corpus(str(prose)), open_corpus(str(elsewhere))
    assert corpus.digest == same.digest
    assert corpus == same
    assert open_corpus(str(elsewhere.parent)).digest == corpus.digest
    told = [
        [len(part), hashlib.sha256(part.tobytes()).hexdigest()]
        for part in (corpus.train, corpus.valid, corpus.test)
    ]
    assert corpus.digest == hashlib.sha256(json.dumps(told).encode()).hexdigest()
    elsewhere.write_bytes(PROSE[:-1] + b"!")
    assert open_corpus(str(elsewhere)).digest != corpus.digest


def test_an_unknown_split_is_refused_with_the_known_ones(prose: Path) -> None:
    with pytest.raises(BadInput, match="'dev'; choose one of train, valid, test"):
        open_corpus(str(prose)).split("dev")


def whole(corpus: Corpus) -> bytes:
    return b"".join(part.tobytes() for part in (corpus.train, corpus.valid, corpus.test))


def test_a_folder_is_joined_in_the_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "c.txt").write_bytes(PROSE)
    (tmp_path / "a.txt").write_bytes(b"first")
    (tmp_path / "b" / "z.txt").write_bytes(b"second")
    (tmp_path / ".hidden").write_bytes(b"never")
    (tmp_path / ".git" / "config").write_bytes(b"never")
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    corpus = open_corpus(str(tmp_path))
    assert whole(corpus) == b"first\nsecond\n" + PROSE
    assert not corpus.train.flags.writeable


def test_a_hidden_folder_may_be_given_by_name(tmp_path: Path) -> None:
    hidden = tmp_path / ".notes"
    hidden.mkdir()
    (hidden / "a").write_bytes(PROSE)
    assert whole(open_corpus(str(hidden))) == PROSE


def test_a_folder_too_large_to_join_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(LARGEST_FOLDER + 1)  # sparse: takes no room on the disk
    with pytest.raises(BadCorpus, match="join its files into one file"):
        open_corpus(str(tmp_path))


def test_what_is_no_text_is_refused_with_advice(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(BadCorpus, match="is empty; give a file with text"):
        open_corpus(str(empty))
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(BadCorpus, match="no files in it; give a folder"):
        open_corpus(str(bare))
    with pytest.raises(BadCorpus, match="neither a file nor a folder"):
        open_corpus("/dev/zero")


def test_1280_bytes_are_enough_and_1279_are_not(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(PROSE[:1280])
    assert len(open_corpus(str(path)).test) == 64
    path.write_bytes(PROSE[:1279])
    with pytest.raises(BadCorpus, match=r"has 1279 bytes.*give at least 1280"):
        open_corpus(str(path))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("wikitxt-2", "did you mean 'wikitext-2'"),
        ("WikiText2", "did you mean 'wikitext-2'"),
        ("enwiki8", "did you mean 'enwik8'"),
        ("/no/such/path", "known corpora: wikitext-2, enwik8"),
        ("", "known corpora"),
        ("x" * 5000, "known corpora"),
        ("a\0b", "known corpora"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, advice: str) -> None:
    with pytest.raises(BadCorpus, match=advice):
        open_corpus(name)


# --- batches ------------------------------------------------------------------------------------


def test_rows_are_windows_of_the_text_with_one_byte_more() -> None:
    data = counting(5000)
    plan = Plan(seed=1, slots=1, steps=Lengths(3), batch=4, window=16)
    for rows, _ in batches(data, plan, Cursor(slot=0, round=1)):
        assert rows.shape == (4, 17)
        assert rows.dtype == np.int64
        assert (np.diff(rows, axis=1) % 256 == 1).all()  # each byte is followed by its successor


def test_the_order_is_the_same_on_every_machine_and_for_ever() -> None:
    plan = Plan(seed=2024, slots=2, steps=Lengths(2), batch=3, window=10)
    starts = [
        [rows[:, 0].tolist() for rows in rows_of(counting(250), plan, Cursor(slot, round_))]
        for slot, round_ in ((0, 1), (1, 1), (0, 4))
    ]
    assert starts == [
        [[157, 197, 207], [137, 97, 67]],
        [[77, 227, 147], [57, 167, 37]],
        [[86, 16, 146], [226, 206, 56]],
    ]


@pytest.mark.parametrize("length", [40, 41, 47, 48, 49, 1000])
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_an_epoch_reads_every_window_once_and_the_next_one_elsewhere(
    length: int, seed: int
) -> None:
    window, windows = 8, length // 8 - 1
    plan = Plan(seed=seed, slots=1, steps=Lengths(windows), batch=1, window=window)
    # Positions, not bytes: what batches does to text it does to anything it can index.
    where = np.arange(length).astype(np.uint16)
    phases = []
    for epoch in range(8):
        rows = rows_of(where, plan, Cursor(slot=0, round=epoch + 1))  # type: ignore[arg-type]
        starts = np.sort([int(row[0, 0]) for row in rows])
        assert (np.diff(starts) == window).all()
        assert 0 <= starts[0] < window
        assert max(int(row.max()) for row in rows) < length
        phases.append(int(starts[0]))
    assert len(set(phases)) > 1


def test_epochs_differ_in_order() -> None:
    data, plan = counting(256), Plan(seed=3, slots=1, steps=Lengths(31), batch=1, window=8)
    orders = [
        tuple(int(row[0, 0]) // 8 for row in rows_of(data, plan, Cursor(0, round_)))
        for round_ in (1, 2, 3)
    ]
    assert len(set(orders)) == 3


def test_a_batch_may_lie_across_many_epochs() -> None:
    data = counting(40)
    wide = Plan(seed=5, slots=1, steps=Lengths(1), batch=50, window=8)
    narrow = Plan(seed=5, slots=1, steps=Lengths(50), batch=1, window=8)
    (rows,) = rows_of(data, wide, Cursor(0, 1))
    assert (rows == np.concatenate(rows_of(data, narrow, Cursor(0, 1)))).all()


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**64 - 1),
    slots=st.integers(1, 5),
    steps=st.integers(1, 4),
    batch=st.integers(1, 4),
    round_=st.integers(1, 50),
)
def test_slots_together_see_what_one_large_replica_sees(
    seed: int, slots: int, steps: int, batch: int, round_: int
) -> None:
    data = counting(300)
    many, one = (
        Plan(seed, each, Lengths(steps), batch * (slots // each), 7) for each in (slots, 1)
    )
    apart = [rows_of(data, many, Cursor(slot, round_)) for slot in range(slots)]
    together = rows_of(data, one, Cursor(0, round_))
    for step in range(steps):
        joined = np.concatenate([rows[step] for rows in apart])
        assert (joined == together[step]).all()


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**64 - 1),
    steps=st.integers(1, 6),
    slot=st.integers(0, 2),
    round_=st.integers(1, 10**9),
    data=st.data(),
)
def test_a_cursor_resumes_exactly(
    seed: int, steps: int, slot: int, round_: int, data: st.DataObject
) -> None:
    text, plan = counting(300), Plan(seed, 3, Lengths(steps), 2, 7)
    everything = list(batches(text, plan, Cursor(slot, round_)))
    stop = data.draw(st.integers(1, steps))
    cursor = everything[stop - 1][1]
    rest = list(batches(text, plan, cursor))
    assert cursor == Cursor(slot, round_, stop)
    assert [c for _, c in rest] == [c for _, c in everything[stop:]]
    for (resumed, _), (straight, _) in zip(rest, everything[stop:], strict=True):
        assert (resumed == straight).all()


def test_rounds_that_grow_read_the_same_text_in_the_same_order() -> None:
    growing, alike = (Plan(7, 2, steps, 3, 7) for steps in (Lengths(9, first=2), Lengths(1)))
    apart = [
        rows
        for number in range(1, 60)
        for rows in rows_of(counting(300), growing, Cursor(1, number))
    ]
    assert len(apart) > 200
    for number, rows in enumerate(apart):
        (same,) = rows_of(counting(300), alike, Cursor(1, number + 1))
        assert (rows == same).all()


def test_seeds_differ() -> None:
    data = counting(5000)
    first, second = (
        rows_of(data, Plan(seed, 1, Lengths(1), 32, 16), Cursor(0, 1))[0] for seed in (1, 2)
    )
    assert (first != second).any()


def test_a_window_longer_than_the_text_is_refused() -> None:
    plan = Plan(seed=0, slots=1, steps=Lengths(1), batch=1, window=50)
    assert len(rows_of(counting(100), plan, Cursor(0, 1))) == 1
    with pytest.raises(BadCorpus, match=r"99 bytes.*window of 50; choose a smaller window"):
        batches(counting(99), plan, Cursor(0, 1))


@pytest.mark.parametrize(
    ("cursor", "words"),
    [
        (Cursor(slot=2, round=1), "no slot 2; choose one from 0 to 1"),
        (Cursor(slot=-1, round=1), "no slot -1"),
        (Cursor(slot=0, round=0), "no round 0; rounds count from 1"),
        (Cursor(slot=0, round=1, step=4), "no step 4"),
        (Cursor(slot=0, round=1, step=-1), "no step -1"),
    ],
)
def test_a_cursor_outside_the_plan_is_refused_at_once(cursor: Cursor, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        batches(counting(1000), Plan(seed=0, slots=2, steps=Lengths(3), batch=1, window=8), cursor)


def test_a_finished_round_has_nothing_left() -> None:
    plan = Plan(seed=0, slots=1, steps=Lengths(3), batch=1, window=8)
    assert list(batches(counting(1000), plan, Cursor(0, 1, step=3))) == []


@pytest.mark.parametrize("name", ["slots", "steps", "batch", "window"])
def test_a_plan_without_something_is_refused(name: str) -> None:
    fields = {"seed": 0, "slots": 1, "steps": 1, "batch": 1, "window": 1, name: 0}
    with pytest.raises(BadInput, match=f"{name} is 0"):
        Plan(**fields | {"steps": Lengths(fields["steps"])})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_that_is_no_key_is_refused(seed: int) -> None:
    with pytest.raises(BadInput, match="The seed is"):
        Plan(seed=seed, slots=1, steps=Lengths(1), batch=1, window=1)
