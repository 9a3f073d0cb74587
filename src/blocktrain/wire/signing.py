"""Ed25519 identities: whoever holds the key is the worker, the coordinator or the owner.

Ed25519 reads what it signs twice and keeps it in memory: sign the digest of a large body.
"""

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NewType

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadKey

PublicId = NewType("PublicId", str)
"""A public key as 64 lower-case hex digits: one key, one id."""

PREFIX = b"blocktrain signature 1\n"  # of all that we sign, so that it is nothing else
MAX_KEY_FILE = 4096
ID = re.compile("[0-9a-f]{64}")

# The points of small order, by y, on the curve over 2^255 - 19. Anybody can sign for such a "key".
PRIME = 2**255 - 19
Y8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
WEAK = {0, 1, PRIME - 1, Y8, PRIME - Y8}


@dataclass(frozen=True)
class Key:
    """A private key."""

    private: Ed25519PrivateKey

    @property
    def id(self) -> PublicId:
        """The public half, by which others know whoever holds this key."""
        return PublicId(self.private.public_key().public_bytes_raw().hex())

    def __repr__(self) -> str:
        return f"Key(id={self.id})"


def new_key() -> Key:
    """A new identity."""
    return Key(Ed25519PrivateKey.generate())


def sign(key: Key, body: bytes, purpose: str) -> bytes:
    """64 bytes that say: the holder of the key stands by this body, for this purpose only."""
    return key.private.sign(message(body, purpose))


def verify(id: str, body: bytes, purpose: str, signature: bytes) -> bool:
    """Whether `id` signed this body for this purpose. False for garbage, whatever it is."""
    try:
        if not is_id(id):
            return False
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(id))
        public.verify(signature, message(body, purpose))
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError, AttributeError):
        return False
    return True


def is_id(id: str) -> bool:
    """Whether this is the one spelling of a key for which only its holder can sign."""
    if not isinstance(id, str) or not ID.fullmatch(id):
        return False
    y = int.from_bytes(bytes.fromhex(id), "little") & (2**255 - 1)
    return y < PRIME and y not in WEAK


def message(body: bytes, purpose: str) -> bytes:
    """What is signed. No two pairs of body and purpose give the same."""
    name = purpose.encode()
    if not 0 < len(name) < 256:
        raise ValueError(f"a purpose has 1 to 255 bytes, not {len(name)}")
    return PREFIX + bytes([len(name)]) + name + body


def load_or_make_key(path: Path) -> Key:
    """The identity kept there; a new one, kept from now on, if there is none."""
    if not path.exists():
        with suppress(BadKey):  # another process was faster: its key is the one
            save_key(new_key(), path)
    return load_key(path)


def save_key(key: Key, path: Path) -> None:
    """Writes the key, for its owner's eyes only. An identity is never overwritten."""
    body = key.private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    with errors_are_clear(path):
        try:
            write_atomically(path, body, mode=0o600, replace=False)
        except FileExistsError:
            raise BadKey(f"There is a key at {path} already; use it, or move it away.") from None


def load_key(path: Path) -> Key:
    """The key in a file that nobody else can read."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            body = file.read(MAX_KEY_FILE)
    except OSError as error:
        raise BadKey(f"The key {path} cannot be read ({error.strerror}); check the path.") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadKey(f"The key {path} is open to others; close it with: chmod 600 {path}.")
    try:
        private = serialization.load_pem_private_key(body, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        private = None
    if not isinstance(private, Ed25519PrivateKey):
        raise BadKey(f"{path} holds no Ed25519 key; restore it, or move it away for a new one.")
    return Key(private)
