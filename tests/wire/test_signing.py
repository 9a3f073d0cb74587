"""Identities: what is signed verifies, for its purpose only, and no garbage gets through."""

import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import BadKey, CannotSave
from blocktrain.wire.signing import (
    PRIME,
    WEAK,
    is_id,
    load_key,
    load_or_make_key,
    message,
    new_key,
    save_key,
    sign,
    verify,
)

Sentence = Callable[[BaseException], str]
KEY, OTHER = new_key(), new_key()


@given(body=st.binary(max_size=200), purpose=st.text(min_size=1, max_size=60))
def test_what_is_signed_verifies(body: bytes, purpose: str) -> None:
    signature = sign(KEY, body, purpose)
    assert len(signature) == 64
    assert verify(KEY.id, body, purpose, signature)
    assert not verify(OTHER.id, body, purpose, signature)
    assert not verify(KEY.id, body + b"x", purpose, signature)
    assert not verify(KEY.id, body, purpose + "x", signature)


@given(
    st.tuples(st.binary(max_size=6), st.text("ab", min_size=1, max_size=4)),
    st.tuples(st.binary(max_size=6), st.text("ab", min_size=1, max_size=4)),
)
def test_purpose_and_body_cannot_be_shifted(one: tuple[bytes, str], two: tuple[bytes, str]) -> None:
    assert (message(*one) == message(*two)) == (one == two)


def test_a_purpose_moves_no_byte_to_the_body() -> None:
    signature = sign(KEY, b"bc", "a")
    assert not verify(KEY.id, b"c", "ab", signature)


@given(byte=st.integers(0, 63), bit=st.integers(0, 7))
def test_one_wrong_bit(byte: int, bit: int) -> None:
    signature = bytearray(sign(KEY, b"body", "update"))
    signature[byte] ^= 1 << bit
    assert not verify(KEY.id, b"body", "update", bytes(signature))


garbage = st.one_of(
    st.text(max_size=70),
    st.binary(max_size=70),
    st.integers(),
    st.none(),
    st.text("0af", min_size=64),
)


@given(id=garbage, body=garbage, purpose=garbage, signature=garbage)
def test_garbage_is_false_and_raises_nothing(
    id: Any, body: Any, purpose: Any, signature: Any
) -> None:
    good = sign(KEY, b"body", "update")
    assert not verify(id, body, purpose, signature)
    assert not verify(id, b"body", "update", good)
    assert not verify(KEY.id, b"body", "update", signature)
    assert not verify(KEY.id, body, "update", good)
    assert not verify(KEY.id, b"body", purpose, good)


def test_a_key_has_one_spelling() -> None:
    """Else a banned worker would come back in capitals."""
    signature = sign(KEY, b"body", "update")
    for id in (KEY.id.upper(), " " + KEY.id, KEY.id + "\n", KEY.id[:2] + " " + KEY.id[2:]):
        assert not is_id(id)
        assert not verify(id, b"body", "update", signature)


@pytest.mark.parametrize("y", sorted(WEAK))
@pytest.mark.parametrize("sign_bit", [0, 1])
def test_keys_for_which_anybody_can_sign_are_refused(y: int, sign_bit: int) -> None:
    id = (y | sign_bit << 255).to_bytes(32, "little").hex()
    assert not is_id(id)


def test_such_a_key_is_a_danger_indeed() -> None:
    """The library alone takes one signature, which anybody can write down, for every body."""
    neutral = (1).to_bytes(32, "little")
    forged = neutral + bytes(32)
    Ed25519PublicKey.from_public_bytes(neutral).verify(forged, message(b"any body", "update"))
    assert not verify(neutral.hex(), b"any body", "update", forged)


def test_the_weak_points_are_those_of_order_up_to_eight() -> None:
    d = -121665 * pow(121666, -1, PRIME) % PRIME

    def double(x2: int, y: int) -> tuple[int, int]:
        """Of (x, y) on the curve, as (x², y): x itself is not needed."""
        k = d * x2 * y * y % PRIME
        new_x2 = 4 * x2 * y * y * pow(1 + k, -2, PRIME) % PRIME
        return new_x2, (y * y + x2) * pow(1 - k, -1, PRIME) % PRIME

    for y in WEAK:
        point = ((y * y - 1) * pow(d * y * y + 1, -1, PRIME) % PRIME, y)
        for _ in range(3):
            point = double(*point)
        assert point == (0, 1)


def test_keys_that_are_no_points_in_canonical_form_are_refused() -> None:
    for y in (PRIME, PRIME + 1, 2**255 - 1):
        assert not is_id(y.to_bytes(32, "little").hex())
    assert is_id(KEY.id)


@pytest.mark.parametrize("purpose", ["", "x" * 256])
def test_a_purpose_must_be_one(purpose: str) -> None:
    with pytest.raises(ValueError, match="purpose"):
        sign(KEY, b"body", purpose)


def test_a_saved_key_is_the_same_and_for_one_pair_of_eyes(tmp_path: Path) -> None:
    save_key(KEY, tmp_path / "key.pem")
    assert load_key(tmp_path / "key.pem").id == KEY.id
    assert stat.S_IMODE((tmp_path / "key.pem").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["key.pem"]
    assert repr(KEY) == f"Key(id={KEY.id})"


def test_a_key_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    first = load_or_make_key(path)
    assert load_or_make_key(path).id == first.id
    with pytest.raises(BadKey):
        save_key(OTHER, path)
    assert load_key(path).id == first.id


def test_processes_that_make_a_key_at_once_get_the_same(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from blocktrain.wire.signing import *;"
        "sys.stdin.readline(); print(load_or_make_key(Path(sys.argv[1])).id)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "key.pem")]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    ids = [child.communicate("go\n")[0] for child in children]
    assert set(ids) == {load_key(tmp_path / "key.pem").id + "\n"}


def test_keys_that_cannot_be_used(tmp_path: Path, sentence: Sentence) -> None:
    path = tmp_path / "key.pem"
    with pytest.raises(BadKey) as error:
        load_key(path)
    sentence(error.value)
    save_key(KEY, path)
    path.chmod(0o640)
    with pytest.raises(BadKey, match="chmod 600") as error:
        load_key(path)
    sentence(error.value)
    path.chmod(0o600)
    of_another_kind = X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    for body in (b"", b"garbage", path.read_bytes()[:60], of_another_kind):
        path.write_bytes(body)
        with pytest.raises(BadKey) as error:
            load_key(path)
        sentence(error.value)


def test_a_folder_that_is_not_there(tmp_path: Path, sentence: Sentence) -> None:
    with pytest.raises(CannotSave) as error:
        load_or_make_key(tmp_path / "nowhere" / "key.pem")
    sentence(error.value)
