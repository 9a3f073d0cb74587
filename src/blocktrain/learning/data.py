"""A corpus -> batches with cursors, the same on every machine.

What a replica trains on follows from (seed, slot, round) and the plan alone. Windows are numbered
through all epochs; row r of step s of round n of slot k has the number

    i = (((n - 1) * steps + s) * slots + k) * batch + r

so that `slots` replicas with batch b see, step by step, what one replica with batch b * slots sees.
An epoch is one pass over all windows without replacement.

Shapes: B rows of a batch, T window, so a row is T + 1 bytes: T to read and their T successors.
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blocktrain.errors import BadCorpus, BadInput
from blocktrain.learning.fetch import SOURCES, fetch, nearest
from blocktrain.lengths import Lengths
from blocktrain.terms import Digest, Progress, silent

Text = NDArray[np.uint8]
Rows = NDArray[np.int64]

SPLITS = ("train", "valid", "test")
SMALLEST = 64  # bytes in a split; fewer say nothing about a model
LARGEST_FOLDER = 2**30  # bytes; a folder is joined in memory, a file is mapped


@dataclass(frozen=True)
class Corpus:
    """Text in three splits. Two with one digest hold the same bytes, wherever they lie."""

    name: str = field(compare=False)
    train: Text = field(compare=False, repr=False)
    valid: Text = field(compare=False, repr=False)
    test: Text = field(compare=False, repr=False)
    digest: Digest

    def split(self, name: str) -> Text:
        """One split by its name."""
        if name not in SPLITS:
            raise BadInput(f"There is no split '{name}'; choose one of {', '.join(SPLITS)}.")
        text: Text = getattr(self, name)
        return text


@dataclass(frozen=True)
class Plan:
    """What a round asks of its replicas: the part of the index law that does not move."""

    seed: int
    slots: int
    steps: Lengths
    batch: int
    window: int

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise BadInput(f"The seed is {self.seed}; choose one from 0 to 2**64 - 1.")
        sizes = {"slots": self.slots, "batch": self.batch, "window": self.window}
        for name, size in (sizes | {"steps": self.steps.full}).items():
            if size < 1:
                raise BadInput(f"{name} is {size}; choose 1 or more.")


@dataclass(frozen=True)
class Cursor:
    """The next batch of one slot: rounds count from 1, steps within the round from 0."""

    slot: int
    round: int
    step: int = 0


def open_corpus(name_or_path: str, progress: Progress = silent) -> Corpus:
    """A known corpus by name, fetched if need be, or any file or folder of files.

    A known name wins over a path of the same name; './wikitext-2' is always the path.
    """
    if name_or_path in SOURCES:
        files = [_mapped(file) for file in fetch(name_or_path, progress)]
        return _corpus(name_or_path, files if len(files) == len(SPLITS) else _cut(files[0]))
    path = Path(name_or_path).expanduser()
    # os.path.exists, as Path.exists raises for names too long to be; '' would be this folder.
    if not name_or_path or not os.path.exists(path):
        raise BadCorpus(
            f"There is no file, folder or corpus called '{name_or_path}'; {nearest(name_or_path)}"
        )
    try:
        text = _joined(path) if path.is_dir() else _mapped(path)
    except OSError as error:
        raise BadCorpus(
            f"{error.filename or path} cannot be read ({error.strerror}); check who may read it."
        ) from None
    if len(text) < SMALLEST * 20:  # valid and test are a twentieth each
        raise BadCorpus(
            f"{path} has {len(text)} bytes, too few to train and to test on; "
            f"give at least {SMALLEST * 20} bytes of text."
        )
    return _corpus(path.resolve().name or str(path), _cut(text))


def open_splits(name: str, folder: Path) -> Corpus:
    """A corpus that lies in a folder as the files train, valid and test."""
    return _corpus(name, [_mapped(folder / split) for split in SPLITS])


def split_digests(corpus: Corpus) -> list[tuple[int, Digest]]:
    """Length and sha256 of each split: what the corpus's digest is made of."""
    parts = [corpus.split(name) for name in SPLITS]
    return [(len(part), Digest(hashlib.sha256(part.data).hexdigest())) for part in parts]


def batches(data: Text, plan: Plan, cursor: Cursor) -> Iterator[tuple[Rows, Cursor]]:
    """What is left of a slot's round, as (rows of shape (B, T + 1), cursor of the next batch)."""
    if not 0 <= cursor.slot < plan.slots:
        raise BadInput(f"There is no slot {cursor.slot}; choose one from 0 to {plan.slots - 1}.")
    if cursor.round < 1:
        raise BadInput(f"There is no round {cursor.round}; rounds count from 1.")
    steps = plan.steps.of(cursor.round)
    if not 0 <= cursor.step <= steps:
        raise BadInput(f"There is no step {cursor.step}; the round has steps 0 to {steps}.")
    # One window fewer than fit, so that the number is the same in every epoch, whatever its phase:
    # phase + windows * T + 1 <= (T - 1) + windows * T + 1 <= len(data).
    windows = len(data) // plan.window - 1
    if windows < 1:
        raise BadCorpus(
            f"{len(data)} bytes are too few for a window of {plan.window}; "
            f"choose a smaller window or give more text."
        )
    return _batches(data, windows, plan, cursor)


def _batches(data: Text, windows: int, plan: Plan, cursor: Cursor) -> Iterator[tuple[Rows, Cursor]]:
    ahead = np.arange(plan.window + 1)
    before = plan.steps.before(cursor.round)
    for step in range(cursor.step, plan.steps.of(cursor.round)):
        turn = before + step
        numbers_B = (turn * plan.slots + cursor.slot) * plan.batch + np.arange(plan.batch)
        epochs_B, places_B = np.divmod(numbers_B, windows)
        starts_B = np.empty_like(numbers_B)
        for epoch in range(int(epochs_B[0]), int(epochs_B[-1]) + 1):
            here = epochs_B == epoch
            phase, order = _shuffled(plan.seed, epoch, windows, plan.window)
            starts_B[here] = phase + order[places_B[here]] * plan.window
        rows_BT = data[starts_B[:, None] + ahead].astype(np.int64)
        yield rows_BT, Cursor(cursor.slot, cursor.round, step + 1)


@functools.lru_cache(maxsize=2)  # a batch may lie across two epochs
def _shuffled(seed: int, epoch: int, windows: int, window: int) -> tuple[int, Rows]:
    """An epoch's phase, and its windows in the order in which they are read.

    Raw Philox words under the key (seed, epoch): the first gives the phase, the others sort the
    windows. numpy promises those words for ever, but not what Generator.permutation makes of
    them, and a run is replayed on machines with another numpy.
    """
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(windows + 1)
    order = np.argsort(words[1:], kind="stable").astype(np.int64)
    order.setflags(write=False)
    return int(words[0] % window), order


def _corpus(name: str, parts: list[Text]) -> Corpus:
    # Lengths and digests in the order of SPLITS: no name and no path, so that the same bytes have
    # one digest on every machine.
    told = [[len(part), hashlib.sha256(part.data).hexdigest()] for part in parts]
    digest = Digest(hashlib.sha256(json.dumps(told).encode()).hexdigest())
    train, valid, test = parts
    return Corpus(name, train, valid, test, digest)


def _cut(text: Text) -> list[Text]:
    """90, 5 and 5 percent of the bytes; for enwik8 that is its standard split."""
    return np.split(text, [len(text) * 90 // 100, len(text) * 95 // 100])


def _mapped(path: Path) -> Text:
    if not path.is_file():
        raise BadCorpus(f"{path} is neither a file nor a folder; copy what it holds into a file.")
    if path.stat().st_size == 0:
        raise BadCorpus(f"{path} is empty; give a file with text in it.")
    # A plain view: indexing numpy's memmap class costs more and gives nothing here.
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


def _joined(folder: Path) -> Text:
    """All files under a folder, in the order of their relative paths, a newline between two."""
    files = [
        file
        for file in folder.rglob("*")
        if file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    files.sort(key=lambda file: file.relative_to(folder).as_posix())
    if not files:
        raise BadCorpus(f"{folder} has no files in it; give a folder with text.")
    if sum(file.stat().st_size for file in files) > LARGEST_FOLDER:
        raise BadCorpus(
            f"{folder} holds more than {LARGEST_FOLDER >> 30} GiB, too much to join in memory; "
            f"join its files into one file and give that."
        )
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), dtype=np.uint8)
