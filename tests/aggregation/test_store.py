"""Blobs by digest: one contract for every store, then what a folder must survive."""

import hashlib
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blocktrain.aggregation.folder_store import CHUNK, FolderStore
from blocktrain.aggregation.store import Store
from blocktrain.errors import BadBlob, BadInput, BlobTooLarge, CannotSave, NoBlob, RefusedBlob
from blocktrain.terms import Digest

Sentence = Callable[[BaseException], str]
MB = 2**20


def digest_of(body: bytes) -> Digest:
    return Digest(hashlib.sha256(body).hexdigest())


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class StoreContract:
    """What every store promises. Another one needs only a class with a `store` fixture."""

    def test_what_is_put_is_got(self, store: Store) -> None:
        digest = store.put([b"one ", b"", b"two"], limit=7)
        assert digest == digest_of(b"one two")
        assert store.get(digest) == b"one two"
        assert store.size(digest) == 7
        assert list(store.digests()) == [digest]

    def test_the_empty_blob_is_a_blob(self, store: Store) -> None:
        digest = store.put([], limit=0)
        assert store.get(digest) == b""
        assert store.size(digest) == 0
        assert b"".join(store.open_range(digest)) == b""

    def test_what_is_not_there(self, store: Store, sentence: Sentence) -> None:
        nothing = digest_of(b"nothing")
        assert store.size(nothing) is None
        store.delete(nothing)
        with pytest.raises(NoBlob) as error:
            store.get(nothing)
        assert nothing in sentence(error.value)
        with pytest.raises(NoBlob):
            store.open_range(nothing)

    def test_deleted_is_gone_and_can_come_back(self, store: Store) -> None:
        digest = store.put([b"body"], limit=4)
        store.delete(digest)
        assert store.size(digest) is None
        assert list(store.digests()) == []
        assert store.put([b"body"], limit=4) == digest
        assert store.get(digest) == b"body"

    def test_the_limit_is_checked_before_more_is_read(
        self, store: Store, sentence: Sentence
    ) -> None:
        asked = 0

        def endless() -> Iterator[bytes]:
            nonlocal asked
            while True:
                asked += 1
                yield b"x" * 10

        with pytest.raises(BlobTooLarge) as error:
            store.put(endless(), limit=35)
        assert asked == 4
        assert "35" in sentence(error.value)
        assert list(store.digests()) == []
        assert store.put([b"x" * 35], limit=35)  # the limit itself is within it

    def test_other_content_than_expected_is_refused(self, store: Store, sentence: Sentence) -> None:
        with pytest.raises(RefusedBlob) as error:
            store.put([b"a lie"], limit=10, expected=digest_of(b"the truth"))
        assert digest_of(b"the truth") in sentence(error.value)
        assert list(store.digests()) == []

    def test_what_is_there_already_is_not_read_again(self, store: Store) -> None:
        digest = store.put([b"body"], limit=4)

        unread = iter([b"other"])
        assert store.put(unread, limit=4, expected=digest) == digest
        assert next(unread) == b"other"
        assert store.put([b"bo", b"dy"], limit=4) == digest  # nor is it written twice
        assert list(store.digests()) == [digest]

    def test_the_senders_error_is_the_senders(self, store: Store) -> None:
        def cut_off() -> Iterator[bytes]:
            yield b"half"
            raise ConnectionResetError("gone")

        with pytest.raises(ConnectionResetError):
            store.put(cut_off(), limit=100)
        assert list(store.digests()) == []

    @pytest.mark.parametrize(
        "digest",
        [
            "",
            "../../../etc/passwd",
            "/etc/passwd",
            "ab/" + "c" * 61,
            "A" * 64,
            "a" * 63,
            "a" * 65,
            "a" * 64 + "\n",
            "g" * 64,
            "٣" * 64,
            "a" * 63 + "\0",
            b"a" * 64,
            5,
        ],
    )
    def test_only_digests_name_blobs(self, store: Store, digest: Any, sentence: Sentence) -> None:
        asks: list[Callable[[Any], object]] = [
            store.get,
            store.size,
            store.delete,
            store.open_range,
            store.view,
            lambda digest: store.put([b""], limit=1, expected=digest),
        ]
        for ask in asks:
            with pytest.raises(RefusedBlob) as error:
                ask(digest)
            assert "digest" in sentence(error.value)

    def test_ranges(self, store: Store) -> None:
        body = random.Random(1).randbytes(2 * CHUNK + 77)
        digest = store.put([body], limit=len(body))
        for start, length in [
            (0, None),
            (0, 0),
            (5, 10),
            (CHUNK - 1, CHUNK + 2),
            (len(body) - 3, None),
            (len(body), None),
            (7, 10 * CHUNK),
        ]:
            end = None if length is None else start + length
            assert b"".join(store.open_range(digest, start, length)) == body[start:end]

    def test_ranges_that_cannot_be(self, store: Store, sentence: Sentence) -> None:
        digest = store.put([b"body"], limit=4)
        for start, length in [(5, 1), (-1, 1), (0, -1)]:
            with pytest.raises(BadInput) as error:
                store.open_range(digest, start, length)
            sentence(error.value)

    def test_a_range_being_read_survives_deletion(self, store: Store) -> None:
        body = bytes(2 * CHUNK)
        digest = store.put([body], limit=len(body))
        reading = store.open_range(digest)
        first = next(reading)
        store.delete(digest)
        assert first + b"".join(reading) == body

    def test_a_view_is_the_blob_and_cannot_be_written_to(self, store: Store) -> None:
        body = random.Random(2).randbytes(CHUNK + 3)
        view = store.view(store.put([body], limit=len(body)))
        assert view == body
        assert (view.format, view.ndim, view.readonly) == ("B", 1, True)
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 1
        assert len(store.view(store.put([], limit=0))) == 0

    def test_a_view_of_what_is_not_there(self, store: Store, sentence: Sentence) -> None:
        with pytest.raises(NoBlob) as error:
            store.view(digest_of(b"nothing"))
        assert digest_of(b"nothing") in sentence(error.value)
        with store.group() as group:
            settling = group.put([b"body"], limit=4)
            with pytest.raises(NoBlob):
                store.view(settling)
        assert bytes(store.view(settling)) == b"body"

    def test_a_view_survives_deletion(self, store: Store) -> None:
        body = bytes(range(256)) * 1000
        digest = store.put([body], limit=len(body))
        view = store.view(digest)
        store.delete(digest)
        assert view == body

    def test_a_group_is_seen_at_its_end(self, store: Store) -> None:
        with store.group() as group:
            digests = [group.put([body], limit=9) for body in (b"a", b"b", b"a")]
            assert [store.size(digest) for digest in digests] == [None] * 3
            assert list(store.digests()) == []
        assert [store.get(digest) for digest in digests] == [b"a", b"b", b"a"]

    def test_a_group_that_fails_leaves_nothing(self, store: Store) -> None:
        old = store.put([b"old"], limit=9)

        def fail() -> None:
            with store.group() as group:
                group.put([b"new"], limit=9)
                group.put([b"old"], limit=9)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert list(store.digests()) == [old]

    def test_one_bad_put_does_not_spoil_its_group(self, store: Store) -> None:
        with store.group() as group:
            good = group.put([b"good"], limit=9)
            with pytest.raises(BlobTooLarge):
                group.put([b"much too long"], limit=9)
        assert list(store.digests()) == [good]

    def test_prune_keeps_what_is_named_and_what_is_young(self, store: Store, clock: Clock) -> None:
        named, old = (store.put([body], limit=9) for body in (b"named", b"old"))
        clock.now += 90
        young = store.put([b"young"], limit=9)
        assert store.prune({named}, grace=100) == 0
        clock.now += 20
        assert store.prune({named}, grace=100) == 1
        assert set(store.digests()) == {named, young}
        assert store.size(old) is None

    @pytest.mark.parametrize("expected", [True, False])
    def test_putting_again_makes_young_again(
        self, store: Store, clock: Clock, expected: bool
    ) -> None:
        digest = store.put([b"body"], limit=9)
        clock.now += 200
        store.put([b"body"], limit=9, expected=digest if expected else None)
        assert store.prune(set(), grace=100) == 0
        clock.now += 200
        assert store.prune(set(), grace=100) == 1

    def test_many_writers_and_a_pruner(self, store: Store, clock: Clock) -> None:
        bodies = [bytes([number % 50]) * 5000 for number in range(400)]  # each one eight times
        over = threading.Event()

        def prune_all_the_time() -> None:
            while not over.is_set():
                store.prune(set(), grace=50)

        for body in bodies[:25]:
            store.put([body], limit=5000)
        clock.now += 100  # these are old: who puts them again must still find them there
        pruner = threading.Thread(target=prune_all_the_time)
        pruner.start()
        try:
            with ThreadPoolExecutor(16) as pool:
                digests = list(pool.map(lambda body: store.put([body], limit=5000), bodies))
        finally:
            over.set()
            pruner.join()
        assert [store.get(digest) for digest in digests] == bodies
        assert set(store.digests()) == set(digests)

    def test_a_group_filled_by_many_threads(self, store: Store) -> None:
        bodies = [bytes([number % 40]) * 3000 for number in range(120)]
        with store.group() as group, ThreadPoolExecutor(8) as pool:
            digests = list(pool.map(lambda body: group.put([body], limit=3000), bodies))
        assert [store.get(digest) for digest in digests] == bodies

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        chunks=st.lists(st.binary(max_size=40), max_size=6),
        start=st.integers(0, 240),
        length=st.none() | st.integers(0, 300),
    )
    def test_any_chunks_any_range(
        self, store: Store, chunks: list[bytes], start: int, length: int | None
    ) -> None:
        body = b"".join(chunks)
        digest = store.put(chunks, limit=len(body), expected=digest_of(body))
        assert store.get(digest) == body
        if start <= len(body):
            end = None if length is None else start + length
            assert b"".join(store.open_range(digest, start, length)) == body[start:end]


class TestFolderStore(StoreContract):
    """A folder keeps the contract."""

    @pytest.fixture
    def store(self, tmp_path: Path, clock: Clock) -> FolderStore:
        return FolderStore(tmp_path / "store", clock)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blobs"


def parts(folder: Path) -> list[Path]:
    return list((folder / "parts").glob("*.part"))


def file_of(folder: Path, digest: Digest) -> Path:
    (path,) = folder.glob(f"?/?/{digest}")
    return path


def test_blobs_are_there_when_the_folder_is_opened_again(folder: Path) -> None:
    digest = FolderStore(folder).put([b"body"], limit=4)
    strange = file_of(folder, digest).with_name("a stranger's file")
    strange.write_text("not ours")
    store = FolderStore(folder)
    assert store.get(digest) == b"body"
    assert list(store.digests()) == [digest]
    assert store.prune(set(), grace=-1e9) == 1
    assert strange.exists()


@pytest.mark.parametrize("damage", [b"badly", b"bod", b""])
def test_damage_is_noticed_and_healed_by_putting_again(
    folder: Path, damage: bytes, sentence: Sentence
) -> None:
    store = FolderStore(folder)
    digest = store.put([b"body"], limit=4)
    file_of(folder, digest).write_bytes(damage)
    with pytest.raises(BadBlob) as error:
        store.get(digest)
    assert type(error.value) is BadBlob
    assert digest in sentence(error.value)
    assert store.put([b"body"], limit=4, expected=digest) == digest
    assert store.get(digest) == b"body"


def test_a_view_is_read_only_when_looked_at(folder: Path) -> None:
    store = FolderStore(folder)
    digest = store.put([bytes(MB)] * 64, limit=64 * MB)
    tracemalloc.start()
    view = store.view(digest)
    assert view[63 * MB] == 0
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(view) == 64 * MB
    assert most < MB // 10


def test_a_view_of_what_cannot_be_read(folder: Path, sentence: Sentence) -> None:
    store = FolderStore(folder)
    digest = store.put([b"body"], limit=4)
    file_of(folder, digest).unlink()
    (folder / digest[0] / digest[1] / digest).mkdir()
    with pytest.raises(BadBlob) as error:
        store.view(digest)
    assert type(error.value) is BadBlob
    sentence(error.value)


def test_what_a_killed_process_left_is_swept_unless_another_one_works_there(folder: Path) -> None:
    first = FolderStore(folder)
    with first.group() as group:
        digest = group.put([b"on its way"], limit=10)
        second = FolderStore(folder)  # for example `blocktrain status`, while a run goes on
        assert len(parts(folder)) == 1
    assert second.get(digest) == b"on its way"
    left = folder / "parts" / "0123.part"
    left.write_bytes(b"half a blob")
    first.close()
    second.close()
    FolderStore(folder)
    assert not left.exists()


def test_content_is_synced_before_the_name_and_the_name_before_it_is_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What loss of power would need; kill -9 cannot show it."""
    store = FolderStore(folder)
    happened: list[tuple[str, int]] = []
    seen_early: list[Digest] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(file: int) -> None:
        real_fsync(file)
        status = os.fstat(file)
        if stat.S_ISDIR(status.st_mode):
            seen_early.extend(store.digests())
            seen_early.extend(d for d in expected if store.size(d) is not None)
        happened.append(("sync", status.st_ino))

    def replace(source: Path, target: Path) -> None:
        happened.append(("name", os.stat(source).st_ino))
        happened.append(("in", os.stat(target.parent).st_ino))
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    bodies = [bytes([number]) * 100 for number in range(20)]
    expected = [digest_of(body) for body in bodies]
    with store.group() as group:
        for body in bodies:
            group.put([body], limit=100)
    names = [at for at, (what, _) in enumerate(happened) if what == "name"]
    assert len(names) == 20
    for at in names:
        file, leaf = happened[at][1], happened[at + 1][1]
        assert ("sync", file) in happened[: names[0]]
        assert ("sync", leaf) in happened[names[-1] :]
    assert seen_early == []
    assert set(store.digests()) == set(expected)

    folders = {os.stat(path).st_ino for path in (folder, *folder.glob("?"))}
    assert folders <= {file for what, file in happened[names[-1] :] if what == "sync"}

    happened.clear()  # what is there already: its name may be another caller's, not yet durable
    store.put([bodies[0]], limit=100)
    assert [what for what, _ in happened] == ["sync"]


@pytest.mark.parametrize("failing", ["content", "names"])
def test_a_disk_that_fails_to_sync(
    folder: Path, failing: str, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    store = FolderStore(folder)
    old = store.put([b"old"], limit=9)
    real = os.fsync

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode) == (failing == "names"):
            raise OSError(5, "Input/output error")
        real(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(CannotSave) as error:
            store.put([b"new"], limit=9)
    sentence(error.value)
    assert list(store.digests()) == [old]
    assert store.get(old) == b"old"
    assert parts(folder) == []
    assert store.get(store.put([b"new"], limit=9)) == b"new"


def test_a_disk_that_takes_a_little_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    store = FolderStore(folder)
    monkeypatch.setattr(os, "write", lambda file, body: real(file, bytes(body)[:7]))
    assert store.get(store.put([b"a longer body", b"", b"another"], limit=99))


def test_a_folder_that_cannot_be(tmp_path: Path, sentence: Sentence) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotSave) as error:
        FolderStore(tmp_path / "file" / "blobs")
    sentence(error.value)


PUT_FOR_EVER = """
import os, random, sys
from pathlib import Path
from blocktrain.aggregation.folder_store import FolderStore
store, luck = FolderStore(Path(sys.argv[1])), random.Random(int(sys.argv[2]))
while True:
    with store.group() as group:
        digests = [group.put([luck.randbytes(3000)] * 20, limit=10**6) for _ in range(3)]
    digests.append(store.put([luck.randbytes(200_000)], limit=10**6))
    os.write(1, "".join(digest + chr(10) for digest in digests).encode())
"""


def test_kill_9_loses_nothing_that_was_put(folder: Path) -> None:
    durable: list[Digest] = []
    for turn, instant in enumerate([0.0, 0.003, 0.011, 0.02, 0.05, 0.09, 0.15, 0.3]):
        child = subprocess.Popen(
            [sys.executable, "-c", PUT_FOR_EVER, str(folder), str(turn)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        durable.append(Digest(child.stdout.readline().decode().strip()))
        time.sleep(instant)
        child.send_signal(signal.SIGKILL)
        durable += [Digest(line.decode()) for line in child.stdout.read().split()]
        child.stdout.close()
        child.wait()
        store = FolderStore(folder)
        assert parts(folder) == []
        for digest in durable:
            assert hashlib.sha256(store.get(digest)).hexdigest() == digest
        for digest in store.digests():  # nor is there half a blob under any name
            store.get(digest)
        store.close()
    assert len(durable) > 8 * 4


KILLED_AT_EVERY_STEP = """
import hashlib, os, signal, sys
from pathlib import Path
from blocktrain.aggregation.folder_store import FolderStore

folder, say = Path(sys.argv[1]), os.write

def armed(name, left):
    real = getattr(os, name)
    def call(*values, **options):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return real(*values, **options)
    setattr(os, name, call)

for step in range(1000):
    bodies = [b"%d of step %d" % (number, step) for number in range(3)]
    child = os.fork()
    if child == 0:
        store, left = FolderStore(folder), [step]
        for name in ("open", "write", "mkdir", "utime", "fsync", "replace", "close"):
            armed(name, left)
        with store.group() as group:
            for body in bodies:
                group.put([body], limit=100)
        os._exit(0)
    finished = os.waitpid(child, 0)[1] == 0
    store = FolderStore(folder)
    there = [d for d in map(lambda b: hashlib.sha256(b).hexdigest(), bodies) if store.size(d)]
    assert all(store.get(digest) for digest in there)
    assert len(there) == 3 or not finished
    assert not list((folder / "parts").glob("*.part"))
    store.close()
    print(len(there))
    if finished:
        break
"""


def test_killed_at_every_step_of_a_group(folder: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EVERY_STEP, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    there = [int(line) for line in child.stdout.split()]
    assert there[0] == 0
    assert there[-1] == 3
    assert len(there) > 20  # steps at which it was killed


FILL = f"""
import os, resource, sys
from pathlib import Path
from blocktrain.aggregation.folder_store import FolderStore
from blocktrain.errors import CannotSave

folder, disk = Path(sys.argv[1]), sys.argv[2]
if disk == "small files":
    resource.setrlimit(resource.RLIMIT_FSIZE, ({2 * MB}, resource.RLIM_INFINITY))
store = FolderStore(folder / "blobs")
kept = [store.put([os.urandom({MB // 4})], limit={MB}) for _ in range(3)]

def refused(put):
    try:
        put()
    except CannotSave as error:
        return str(error)
    raise AssertionError("the disk is not full")

def group():
    with store.group() as group:
        group.put([b"a small one"], limit=100)
        group.put([os.urandom(1000)] * 4000, limit={8 * MB})

print(refused(lambda: store.put([os.urandom(1000)] * 4000, limit={8 * MB})))
print(refused(group))
assert not list((folder / "blobs" / "parts").glob("*.part"))
assert sorted(store.digests()) == sorted(kept)
for digest in kept:
    store.get(digest)
again = store.put([os.urandom({MB // 4})], limit={MB})  # there is room again for what fits
assert store.get(again)
"""


@pytest.mark.parametrize("disk", ["small disk", "small files"])
def test_a_full_disk(tmp_path: Path, disk: str) -> None:
    mount = 'mount -t tmpfs -o size=2m small "$1"'
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
    lines = child.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("The disk is full") and "; " in line for line in lines)
