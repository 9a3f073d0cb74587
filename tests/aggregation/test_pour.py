"""What comes next into blobs: the right bytes, all or nothing, and nobody waits for ever."""

import os
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from blocktrain.aggregation.combine import Averaging, Kept, Next, Part, Standing, combine, combined
from blocktrain.aggregation.folder_store import FolderStore
from blocktrain.aggregation.pour import pour
from blocktrain.errors import BadTensors, CannotSave
from blocktrain.terms import Parameters
from blocktrain.wire.codecs import CODECS
from blocktrain.wire.tensors import Body, encode

LIKE = {"w": (300, 300), "b": (7,), "none": (3, 0), "scalar": (), "v": (200, 200)}
PUSHED = Averaging(outer_momentum=0.9, outer_rate=0.7)


def normal(seed: int, size: float = 1.0) -> Parameters:
    random = np.random.default_rng(seed)
    return {
        name: (size * np.asarray(random.standard_normal(shape))).astype(np.float32)
        for name, shape in LIKE.items()
    }


KEPT = Kept(normal(0), normal(1), normal(2, 0.01), normal(3, 0.001))
CHANGES = [normal(10, 0.01), normal(11, 0.01), normal(12, 0.01)]
PARTS = [Part(change.__getitem__, 100 + at) for at, change in enumerate(CHANGES)]


def pieces(codec: str, averaging: Averaging = PUSHED) -> Iterator[tuple[str, Next]]:
    tables = (KEPT.snapshot, KEPT.steady, KEPT.momentum, KEPT.residual)
    standing = Standing(*(table.__getitem__ for table in tables if table))
    return combined(LIKE, standing, PARTS, averaging, codec)


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("averaging", [Averaging(), PUSHED], ids=str)
def test_blobs_are_what_combine_makes(store: FolderStore, codec: str, averaging: Averaging) -> None:
    made = pour(store, LIKE, pieces(codec, averaging), codec)
    expected = combine(KEPT, PARTS, averaging, codec)
    assert store.get(made.snapshot) == encode(expected.snapshot, "fp32")
    assert store.get(made.steady) == encode(expected.steady, "fp32")
    for digest, values in ((made.momentum, expected.momentum), (made.residual, expected.residual)):
        assert (digest is None) == (values is None)
        if digest and values:
            assert store.get(digest) == encode(values, "fp32")
    delta = Body(store.view(made.delta), codec, LIKE)
    for name, base in KEPT.snapshot.items():
        after = np.asarray(base + delta.read(name))
        assert after.tobytes() == expected.snapshot[name].tobytes()
    assert len(set(store.digests())) == 3 + bool(made.momentum) + bool(made.residual)


def test_pouring_again_makes_the_same(store: FolderStore) -> None:
    first = pour(store, LIKE, pieces("int4"), "int4")
    assert pour(store, LIKE, pieces("int4"), "int4") == first
    assert len(set(store.digests())) == 5


def test_memory_stays_that_of_few_tensors(store: FolderStore) -> None:
    like = {f"{number:02}": (64, 512) for number in range(60)}
    tensor = np.ones((64, 512), np.float32)

    def made() -> Iterator[tuple[str, Next]]:
        for number, name in enumerate(like):
            fresh = tensor * number
            yield name, Next(fresh, fresh + 1, None, None, (fresh + 2,))

    tracemalloc.start()
    pour(store, like, made(), "fp32")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 15 * tensor.nbytes


# --- failures: each ends with an error, and with nothing in the store ---------------------------


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes writing fail once so many writes were made."""

    def arm(room: int) -> None:
        real, left, lock = os.write, [room], threading.Lock()

        def write(file: int, body: bytes) -> int:
            with lock:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(28, "No space left on device")
            return real(file, body)

        monkeypatch.setattr(os, "write", write)

    return arm


def poured_in_vain(
    store: FolderStore, made: Iterable[tuple[str, Next]], codec: str, error: type[BaseException]
) -> BaseException:
    """The error that ends it; no blob, no part of one and no thread is left."""
    threads = threading.active_count()
    with pytest.raises(error) as caught:
        pour(store, LIKE, made, codec)
    assert [*store.digests(), *store.parts.glob("*.part")] == []
    assert threading.active_count() == threads
    return caught.value


@pytest.mark.parametrize("codec", ["fp32", "int2"])
@pytest.mark.parametrize("room", range(20))  # four fp32 blobs of a header and four tensors
def test_a_full_disk_ends_it_at_any_write(
    store: FolderStore, codec: str, room: int, full_disk: Callable[[int], None]
) -> None:
    full_disk(room)
    error = poured_in_vain(store, pieces(codec), codec, CannotSave)
    assert "The disk is full" in str(error)


def test_a_full_disk_stops_the_maker(store: FolderStore, full_disk: Callable[[int], None]) -> None:
    like = {f"{number:03}": (1000,) for number in range(500)}
    made = 0

    def endless() -> Iterator[tuple[str, Next]]:
        nonlocal made
        for name in like:
            made += 1
            value = np.ones(1000, np.float32)
            yield name, Next(value, value, None, None, (value,))

    full_disk(30)
    with pytest.raises(CannotSave):
        pour(store, like, endless(), "fp32")
    assert 5 < made < 100


@pytest.mark.parametrize("error", [BadTensors, KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_maker_that_fails(
    store: FolderStore, codec: str, after: int, error: type[BaseException]
) -> None:
    """Also after its last tensor, when every blob is complete."""

    def failing() -> Iterator[tuple[str, Next]]:
        yield from islice(pieces(codec), after)
        raise error("no more")

    assert "no more" in str(poured_in_vain(store, failing(), codec, error))


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("after", [1, 4])
def test_a_maker_that_stops_early(store: FolderStore, codec: str, after: int) -> None:
    error = poured_in_vain(store, islice(pieces(codec), after), codec, BadTensors)
    assert "end before" in str(error)


def test_a_maker_that_makes_nothing(store: FolderStore) -> None:
    assert "made nothing" in str(poured_in_vain(store, iter(()), "fp32", BadTensors))
