"""Messages: what is said is understood, and nothing else is."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import BadInput, OtherProtocol
from blocktrain.terms import Digest
from blocktrain.wire import messages, owner
from blocktrain.wire.messages import (
    MAX_MESSAGE,
    PROTOCOL,
    Assignment,
    Certified,
    Finished,
    Hello,
    Join,
    Message,
    Receipt,
    Signed,
    Version,
    Wait,
    decode,
    encode,
    refuse_other_protocol,
)

D = Digest("ab" * 32)
SPOKEN: list[Message] = [
    Hello(PROTOCOL, D, "cd" * 32, "blocktrain 0.1.0"),
    Assignment(1, 2, 0, 20, Version(1, 1, D, D, D), [Version(0, 0, D, D, None)], 4096, 12.5),
    Wait(3.0, "every slot is taken"),
    Finished("all rounds are closed"),
    Receipt(D, "cd" * 32, "salvaged", 3, 0.5, "one round late"),
    Signed(b"{}", "cd" * 32, "ef" * 64),
    Join(PROTOCOL, D, "cd" * 32, "ann", 2**30, "cpu", D),
    Certified("-----BEGIN", "-----BEGIN"),
]


@pytest.mark.parametrize("message", SPOKEN, ids=lambda m: type(m).__name__)
def test_what_is_said_is_understood(message: Message) -> None:
    assert decode(encode(message), type(message)) == message


def test_an_answer_may_be_one_of_several() -> None:
    kinds = (Assignment, Wait, Finished)
    for message in SPOKEN[1:4]:
        assert decode(encode(message), *kinds) == message
    with pytest.raises(BadInput, match="not understood"):
        decode(encode(SPOKEN[0]), *kinds)


def test_every_message_is_a_sentence_with_its_own_tag() -> None:
    kinds = {kind for room in (messages, owner) for kind in vars(room).values() if is_message(kind)}
    assert len(kinds) >= 24
    tags = [kind.__struct_config__.tag for kind in kinds]
    assert len(set(tags)) == len(tags)
    assert all(str(kind.__doc__).rstrip().endswith((".", "?")) for kind in kinds)


def is_message(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Message) and kind is not Message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'{"say":"wait","seconds":1}',
        b'{"say":"wait","seconds":-1,"why":""}',
        b'{"say":"wait","seconds":1,"why":"","more":1}',
        b'{"say":"wait","seconds":1e400,"why":""}',
        b'{"say":"hello","seconds":1,"why":""}',
        b'{"say":"wait","seconds":1,"why":"' + b"x" * 401 + b'"}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(BadInput, match="not understood"):
        decode(body, Wait)


def test_length_is_checked_first() -> None:
    with pytest.raises(BadInput, match=str(MAX_MESSAGE)):
        decode(b" " * (MAX_MESSAGE + 1), Wait)


@pytest.mark.parametrize("field", ["update", "worker"])
@pytest.mark.parametrize("bad", ["", "AB" * 32, "../" * 21 + "a", "ab" * 33])
def test_digests_and_identities_are_hex_and_nothing_else(field: str, bad: str) -> None:
    receipt = msgspec.to_builtins(SPOKEN[4])
    with pytest.raises(BadInput):
        decode(msgspec.json.encode({**receipt, field: bad}), Receipt)


@given(st.binary(max_size=200))
def test_garbage_never_crashes(body: bytes) -> None:
    with pytest.raises(BadInput):
        decode(body, Wait, Finished)


@pytest.mark.parametrize(("theirs", "who"), [(PROTOCOL - 1, "the worker"), (PROTOCOL + 1, "this")])
def test_another_protocol_names_the_side_to_upgrade(theirs: int, who: str) -> None:
    with pytest.raises(OtherProtocol, match=f"upgrade blocktrain on {who}"):
        refuse_other_protocol(theirs, "the worker")
    refuse_other_protocol(PROTOCOL, "the worker")
