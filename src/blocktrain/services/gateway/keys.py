"""API keys: whoever shows one may ask. Only hashes are kept, so a stolen file opens nothing.

A key is 256 random bits, so one round of sha256 is hash enough. The file is read again whenever it
has changed: a key that is issued or revoked beside a running gateway counts from the next request.
"""

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from blocktrain.disk import errors_are_clear, lock, write_atomically
from blocktrain.errors import BadInput, BadKey
from blocktrain.terms import Digest
from blocktrain.wire.messages import Name, Sha256

PREFIX = "bt-"
LONGEST = 256  # characters of a key that are looked at; ours have 46
MAX_FILE = 2**20
FORMAT = 1
NAME = re.compile(r"[\w .@:+-]{1,64}")


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key: whose it is, its hash, and when it was made."""

    name: Name
    hash: Sha256
    made: float


class Book(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds."""

    format: int = FORMAT
    keys: list[Entry] = []


BOOK = msgspec.json.Decoder(Book)


class Keys:
    """The keys of one gateway."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: tuple[int, int, int] | None = None
        self.entries: list[Entry] = []

    def whose(self, shown: str) -> str | None:
        """The name of the key's holder; None for a key that is none of ours.

        Every hash is compared, each in constant time: how long it takes tells nothing.
        """
        hashed, found = hash_of(shown[:LONGEST]), None
        for entry in self.current():
            if hmac.compare_digest(entry.hash, hashed):
                found = entry.name
        return found

    def current(self) -> list[Entry]:
        """All entries, as they are in the file now."""
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self.damaged(str(error.strerror)) from None
        seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if seen != self.seen:
            self.entries, self.seen = self.read(), seen
        return self.entries

    def read(self) -> list[Entry]:
        """All entries, from the file."""
        try:
            with self.path.open("rb") as file:
                book = BOOK.decode(file.read(MAX_FILE))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self.damaged(str(error)) from None
        if book.format != FORMAT:
            raise self.damaged(f"format {book.format} instead of {FORMAT}")
        return book.keys

    def issue(self, name: str) -> str:
        """A new key for somebody. It is shown this once, and kept nowhere."""
        if not NAME.fullmatch(name):
            raise BadInput("A key's name must be 1 to 64 letters, digits, spaces or .@:+-_ signs.")
        key = PREFIX + secrets.token_urlsafe(32)
        with self.changing() as entries:
            if any(entry.name == name for entry in entries):
                raise BadInput(f"There is a key of the name {name!r} already; revoke it first.")
            entries.append(Entry(name, hash_of(key), time.time()))
        return key

    def revoke(self, name: str) -> None:
        """From now on this key opens nothing."""
        with self.changing() as entries:
            kept = [entry for entry in entries if entry.name != name]
            if len(kept) == len(entries):
                raise BadInput(f"There is no key of the name {name!r}; look at the list of keys.")
            entries[:] = kept

    @contextmanager
    def changing(self) -> Iterator[list[Entry]]:
        """The entries, to be changed; written when that has gone well, by one at a time."""
        with errors_are_clear(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_name(self.path.name + ".lock")
            held = lock(beside, "Somebody else changes the API keys just now; try again.")
        try:
            entries = [*self.current()]
            yield entries
            with errors_are_clear(self.path):
                write_atomically(self.path, msgspec.json.encode(Book(FORMAT, entries)), 0o600)
        finally:
            os.close(held)

    def damaged(self, why: str) -> BadKey:
        """For a file that cannot be read."""
        return BadKey(f"The API keys in {self.path} cannot be read ({why}); restore the file.")


def hash_of(key: str) -> Digest:
    """What is kept of a key."""
    return Digest(hashlib.sha256(key.encode()).hexdigest())
