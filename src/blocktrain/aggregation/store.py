"""Blobs by digest: snapshots, steady blocks, updates, manifests, a private corpus.

A blob that `put` has returned survives kill -9 and loss of power, and until then nobody sees it:
whatever a ledger transaction names can be put first and is there.
"""

import re
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Protocol

from blocktrain.errors import BadBlob, NoBlob, RefusedBlob
from blocktrain.terms import Digest

GRACE = 3600.0  # seconds: a blob that was put must be named by a ledger transaction within these
HEX = "0123456789abcdef"
DIGEST = re.compile(f"[{HEX}]{{64}}")


class Group(Protocol):
    """Blobs that become durable, and seen, together."""

    def put(self, chunks: Iterable[bytes], *, limit: int, expected: Digest | None = None) -> Digest:
        """Takes a blob of at most `limit` bytes. From several threads at once, if you like."""
        ...


class Store(Protocol):
    """Where blobs are. Nothing above knows whether that is a folder."""

    def put(self, chunks: Iterable[bytes], *, limit: int, expected: Digest | None = None) -> Digest:
        """Stores a blob of at most `limit` bytes; when this returns, it is durable.

        If the `expected` blob is there already, the chunks are not even read.
        """
        ...

    def group(self) -> AbstractContextManager[Group]:
        """Several puts made durable together, at the end of the block: all, or on error none."""
        ...

    def get(self, digest: Digest) -> bytes:
        """The whole blob, checked against its digest."""
        ...

    def open_range(
        self, digest: Digest, start: int = 0, length: int | None = None
    ) -> Iterator[bytes]:
        """The blob from `start` on, at most `length` bytes. Who has it all checks the digest."""
        ...

    def view(self, digest: Digest) -> memoryview:
        """The whole blob as memory that is read only when looked at; nobody can write to it.

        The digest is not checked: it was when the blob was put. It survives the blob's deletion.
        """
        ...

    def size(self, digest: Digest) -> int | None:
        """How many bytes the blob has; None if it is not here."""
        ...

    def renew(self, digest: Digest) -> bool:
        """Makes a blob that is there young again; False if it is not there, or damaged."""
        ...

    def delete(self, digest: Digest) -> None:
        """Forgets the blob, if it is there."""
        ...

    def digests(self) -> Iterator[Digest]:
        """Every blob there is, in no order."""
        ...

    def prune(self, keep: AbstractSet[Digest], grace: float = GRACE) -> int:
        """Deletes all blobs but those to keep and those put within the last `grace` seconds.

        The young ones may be about to be named by a ledger transaction. Tells how many went.
        """
        ...


def checked(digest: str) -> Digest:
    """The digest, if it is one: only then may it become part of a path."""
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        shown = repr(digest)[:80]
        raise RefusedBlob(f"{shown} is no digest; it must be 64 lower-case hex digits.")
    return Digest(digest)


def missing(digest: Digest) -> NoBlob:
    """The sentence for a blob that is not there."""
    return NoBlob(f"Blob {digest} is not here; fetch the newest state and ask for what it names.")


def damaged(digest: Digest, why: str) -> BadBlob:
    """The sentence for a blob that cannot be trusted."""
    return BadBlob(f"Blob {digest} is damaged ({why}); put it again, or restore it from a backup.")
