"""A store in a local folder. Nothing above aggregation/folder.py knows that it is one."""

import fcntl
import hashlib
import mmap
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from pathlib import Path

from blocktrain.aggregation.store import DIGEST, GRACE, HEX, Group, checked, damaged, missing
from blocktrain.disk import errors_are_clear, sync_all, write_all
from blocktrain.errors import BadInput, BlobTooLarge, NoBlob, RefusedBlob
from blocktrain.terms import Digest

CHUNK = 2**20  # bytes read at once


class FolderStore:
    """A Store in a folder.

    FOLDER/0/f/0f3a…    a blob; 16 x 16 folders, made when needed. With 256 x 256 of them a group of
                        100 blobs had 182 to sync, not 89, and took 0.19 s, not 0.02 s, for it.
    FOLDER/parts/       blobs on their way; swept when nobody else has the folder open
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.clock = clock
        self.parts = folder / "parts"
        self.settling: set[Digest] = set()  # named in the folder, but not yet durably so: unseen
        self.ageing = threading.Lock()
        with errors_are_clear(folder):
            self.parts.mkdir(parents=True, exist_ok=True)
            self.open = os.open(self.parts / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
            self.close = weakref.finalize(self, os.close, self.open)
            self._sweep()
            self.leaves = set(self._leaves())  # whose own names are durable
            # Names given just before a kill -9 may not be yet: 0.02 s for all of them.
            sync_all(self._with_parents(self.leaves) | {folder.absolute().parent})

    def put(self, chunks: Iterable[bytes], *, limit: int, expected: Digest | None = None) -> Digest:
        with self.group() as group:
            return group.put(chunks, limit=limit, expected=expected)

    @contextmanager
    def group(self) -> Iterator[Group]:
        group = FolderGroup(self)
        try:
            yield group
            self._settle(group)
        finally:
            for part in group.parts.values():
                part.unlink(missing_ok=True)

    def get(self, digest: Digest) -> bytes:
        path = self._seen(digest)
        try:
            body = path.read_bytes()
        except FileNotFoundError:
            raise missing(digest) from None
        except OSError as error:
            raise damaged(digest, str(error.strerror)) from None
        actual = hashlib.sha256(body).hexdigest()
        if actual != digest:
            raise damaged(digest, f"its content has digest {actual}")
        return body

    def open_range(
        self, digest: Digest, start: int = 0, length: int | None = None
    ) -> Iterator[bytes]:
        size = self.size(digest)
        if size is None:
            raise missing(digest)
        if not 0 <= start <= size or (length is not None and length < 0):
            raise BadInput(
                f"The range from {start} (length {length}) is not within the {size} bytes of blob "
                f"{digest}; ask for another one."
            )
        return self._read(digest, start, size - start if length is None else length)

    def _read(self, digest: Digest, start: int, length: int) -> Iterator[bytes]:
        try:
            with self._path(digest).open("rb", buffering=0) as file:
                file.seek(start)
                while chunk := file.read(min(CHUNK, length)):
                    length -= len(chunk)
                    yield chunk
        except FileNotFoundError:  # deleted since
            raise missing(digest) from None

    def view(self, digest: Digest) -> memoryview:
        """A mapped file. If its disk fails later, the process ends by SIGBUS: there is no error."""
        try:
            with self._seen(digest).open("rb") as file:
                if os.fstat(file.fileno()).st_size == 0:  # nothing cannot be mapped
                    return memoryview(b"")
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            raise missing(digest) from None
        except OSError as error:
            raise damaged(digest, str(error.strerror)) from None

    def size(self, digest: Digest) -> int | None:
        try:
            return self._seen(digest).stat().st_size
        except (NoBlob, FileNotFoundError):
            return None

    def delete(self, digest: Digest) -> None:
        with errors_are_clear(self.folder):
            self._path(digest).unlink(missing_ok=True)

    def digests(self) -> Iterator[Digest]:
        for path in self._blobs():
            if path.name not in self.settling:
                yield Digest(path.name)

    def prune(self, keep: AbstractSet[Digest], grace: float = GRACE) -> int:
        pruned = 0
        for path in self._blobs():
            if path.name in keep:
                continue
            with self.ageing, suppress(FileNotFoundError):  # nobody makes it young in between
                if self.clock() - path.stat().st_mtime > grace:
                    path.unlink()
                    pruned += 1
        return pruned

    def _path(self, digest: Digest) -> Path:
        name = checked(digest)
        return self.folder / name[0] / name[1] / name

    def _seen(self, digest: Digest) -> Path:
        """The blob's path, unless it is not yet durable."""
        path = self._path(digest)
        if digest in self.settling:
            raise missing(digest)
        return path

    def _blobs(self) -> Iterator[Path]:
        for leaf in self._leaves():
            for path in leaf.iterdir():
                if DIGEST.fullmatch(path.name):
                    yield path

    def _leaves(self) -> Iterator[Path]:
        return self.folder.glob(f"[{HEX}]/[{HEX}]")

    def _with_parents(self, leaves: AbstractSet[Path]) -> set[Path]:
        return {*leaves, *(leaf.parent for leaf in leaves), self.folder}

    def _sweep(self) -> None:
        """Removes what a killed process left behind, if no other one has the folder open."""
        with suppress(BlockingIOError):
            fcntl.flock(self.open, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for part in self.parts.glob("*.part"):
                part.unlink(missing_ok=True)
        fcntl.flock(self.open, fcntl.LOCK_SH)

    def renew(self, digest: Digest) -> bool:
        """Makes a blob that is there young again; False if it is not there, or damaged."""
        path = self._path(digest)
        now = self.clock()
        try:
            with self.ageing:
                os.utime(path, (now, now))
            with path.open("rb") as file:  # reading is cheaper than writing, and heals damage
                return hashlib.file_digest(file, "sha256").hexdigest() == digest
        except OSError:
            return False

    def _settle(self, group: "FolderGroup") -> None:
        """Contents first, then names, then the folders that hold the names."""
        now = self.clock()
        digests = group.parts.keys() | group.renewed
        leaves = {self._path(digest).parent for digest in digests}
        new = leaves - self.leaves
        with errors_are_clear(self.folder):
            for leaf in new:
                leaf.mkdir(parents=True, exist_ok=True)
            for part in group.parts.values():
                os.utime(part, (now, now))
            sync_all(group.parts.values())
            for digest, part in group.parts.items():
                path = self._path(digest)
                with self.ageing:
                    if not path.exists():  # else it is durable already, and stays seen
                        self.settling.add(digest)
                    part.replace(path)
            sync_all(leaves | (self._with_parents(new) if new else set()))
        self.leaves |= new
        self.settling.difference_update(digests)  # not on error: then nobody knows


class FolderGroup:
    """Blobs written to `parts`, waiting for their names."""

    def __init__(self, store: FolderStore) -> None:
        self.store = store
        self.parts: dict[Digest, Path] = {}
        self.renewed: set[Digest] = set()

    def put(self, chunks: Iterable[bytes], *, limit: int, expected: Digest | None = None) -> Digest:
        if expected is not None and self._there(checked(expected)):
            return expected
        part = self.store.parts / f"{secrets.token_hex(16)}.part"
        try:
            digest = self._write(part, chunks, limit)
            if expected is not None and digest != expected:
                raise RefusedBlob(f"The blob has digest {digest}, not {expected}; send it again.")
            if not self._there(digest) and self.parts.setdefault(digest, part) is part:
                return digest
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        part.unlink()
        return digest

    def _there(self, digest: Digest) -> bool:
        if digest in self.parts or digest in self.renewed:
            return True
        if self.store.renew(digest):
            self.renewed.add(digest)
            return True
        return False

    def _write(self, part: Path, chunks: Iterable[bytes], limit: int) -> Digest:
        """Writes and hashes as the chunks come."""
        hasher, written = hashlib.sha256(), 0
        with errors_are_clear(part):
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            for chunk in chunks:  # an error from there is not the disk's
                written += len(chunk)
                if written > limit:
                    raise BlobTooLarge(f"The blob is longer than {limit} bytes; send less.")
                hasher.update(chunk)
                with errors_are_clear(part):
                    write_all(file, chunk)
        finally:
            os.close(file)
        return Digest(hasher.hexdigest())
