"""Lies in messages: whatever is posted, wherever, is answered with a sentence and never a 500."""

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.attacks.siege import NOTHING, Peer, Siege, sealed, why

from blocktrain.services.coordinator import working
from blocktrain.terms import Digest
from blocktrain.wire import messages, owner
from blocktrain.wire.messages import Message
from blocktrain.wire.serving import Announce, Holding, Publish
from blocktrain.wire.serving import Place as ServedAt
from blocktrain.wire.signing import new_key


@dataclass(frozen=True)
class Mouth:
    """An endpoint that takes messages, and one that it would take from this peer."""

    path: str
    honest: Message
    purpose: str = ""
    """Of the signature, if it takes a signed one."""

    def body(self, peer: Peer, inner: bytes) -> bytes:
        """What is posted, so that these bytes reach whoever decodes them."""
        return messages.encode(sealed(peer.key, inner, self.purpose)) if self.purpose else inner


def announcement(id: str) -> Announce:
    """What a stage would say of itself."""
    holding = Holding(NOTHING, 0, 1, "fp32", "cpu")
    return Announce(ServedAt(id, "10.0.0.7", 9000), holding, sessions=0, room=4)


def mouths(siege: Siege, peer: Peer) -> list[Mouth]:
    """Every endpoint that takes messages. None of these does harm, however often it is said."""
    run, id = siege.keeper.run, peer.id
    update = messages.Update(id, run, 0, 1, 0, NOTHING, NOTHING, 1, 1, 0.1, 1.0, NOTHING, NOTHING)
    return [
        Mouth("join", messages.Join(2, run, id, "somebody", 1, "cpu", NOTHING), "join"),
        Mouth("ask", messages.Ask(id, None, 0.1)),
        Mouth("alive", messages.Alive(id)),
        Mouth("leave", messages.Leave(id)),
        Mouth("updates", update, "update"),
        Mouth("stages", announcement(id), "announce"),
        Mouth("served", Publish("newest")),
        Mouth("command", owner.Command("resume")),
        Mouth("ban", owner.Ban("0" * 64)),
        Mouth("tokens", owner.Issue("somebody")),
        Mouth("tokens/revoke", owner.Revoke("0" * 64)),
        Mouth("evaluations", owner.Evaluated([1], 2.0, 3)),
    ]


def post(siege: Siege, peer: Peer, mouth: Mouth, body: bytes) -> tuple[int, str]:
    """Whatever is posted, by somebody who may; the answer must be one that others understand."""
    siege.coordinator.office.door.buckets.clear()  # it is not the question here
    owners = mouth.path == "join" or isinstance(mouth.honest, OWNERS)
    bearer = siege.token if owners else peer.session
    headers = {"Authorization": f"Bearer {bearer}"}
    response = peer.http.post(f"/v1/{mouth.path}", content=body, headers=headers)
    assert response.status_code < 500, (mouth.path, body, response.text)
    if response.status_code == 200:
        return 200, ""
    assert response.status_code in (400, 403, 404, 413, 426), response.text
    return response.status_code, why(response)


OWNERS = (Publish, owner.Command, owner.Ban, owner.Issue, owner.Revoke, owner.Evaluated)


@pytest.fixture(scope="module")
def crowd(standing: Siege) -> Iterator[tuple[Siege, Peer, list[Mouth]]]:
    """For fuzzing, which keeps its fixtures for all examples."""
    peer = standing.peer(new_key())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(working, "LONGEST_WAIT", 0.05)  # who asks for no block waits in vain
        yield standing, peer, mouths(standing, peer)


def test_every_endpoint_that_takes_messages_is_here(siege: Siege) -> None:
    posts = {
        route.path  # type: ignore[attr-defined]
        for route in siege.coordinator.app().routes
        if "POST" in (route.methods or ())  # type: ignore[attr-defined]
    }
    assert posts == {f"/v1/{mouth.path}" for mouth in mouths(siege, siege.peer())}


NO_MESSAGES = [
    b"",
    b" ",
    b"null",
    b"[]",
    b"{}",
    b"0",
    b'"ask"',
    b"\xef\xbb\xbf{}",
    b"\xff\xfe{\0}\0",
    b"{'say':'ask'}",
    b'{"say":"ask"',
    b'{"say":"ask"} {"say":"ask"}',
    b'{"say":["ask"]}',
    b'{"say":"\\ud800"}',
    b'{"say":null}',
    b"[" * 100_000,
    b'{"a":' * 30_000,
    b'{"say":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"say":NaN}',
    b'{"say":1e999}',
    b'{"say":' + b"9" * 100_000 + b"}",
    b'{"say":0.' + b"9" * 100_000 + b"}",
    b'{"say":"' + b"a" * 150_000 + b'"}',
    gzip.compress(b'{"say":"ask"}'),
    b"<?xml version='1.0'?><!DOCTYPE a [<!ENTITY b SYSTEM 'file:///etc/passwd'>]><a>&b;</a>",
    b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",  # a pickle
]


def test_what_is_no_message_is_not_understood(siege: Siege) -> None:
    peer = siege.peer()
    for mouth in mouths(siege, peer):
        for body in NO_MESSAGES:
            status, sentence = post(siege, peer, mouth, body)
            assert (status, sentence[:26]) == (400, "The message is not underst"), (mouth, body)
            if mouth.purpose:
                status, sentence = post(siege, peer, mouth, mouth.body(peer, body))
                assert (status, sentence[:26]) == (400, "The message is not underst"), body


def test_a_message_is_said_to_the_one_who_takes_it(siege: Siege) -> None:
    """Every message at every endpoint: only the right one is understood."""
    peer = siege.peer()
    every = mouths(siege, peer)
    for mouth in every:
        for other in every:
            said = mouth.body(peer, messages.encode(other.honest))
            status, sentence = post(siege, peer, mouth, said)
            if mouth is not other:
                assert status == 400
                assert "not understood" in sentence
            else:
                assert "not understood" not in sentence


def test_unknown_fields_are_refused_and_the_last_of_two_counts(siege: Siege) -> None:
    """A key twice is JSON; what is signed is the bytes, so there is no doubt about them."""
    peer = siege.peer()
    alive = messages.encode(messages.Alive(peer.id))
    more = alive[:-1] + b',"and":"more"}'
    assert "unknown field" in why(peer.say("alive", more))
    twice = alive.replace(b'"worker"', b'"worker":"%s","worker"' % (b"0" * 64))
    assert peer.say("alive", twice).status_code == 200
    other = alive[:-1] + b',"worker":"%s"}' % (b"0" * 64)
    assert peer.say("alive", other).status_code == 403


def test_a_newline_at_the_end_is_no_part_of_a_word(siege: Siege) -> None:
    """In a pattern $ would let it pass."""
    peer = siege.peer()
    every = {mouth.path: mouth for mouth in mouths(siege, peer)}
    for path, message in (
        ("command", b'{"say":"command","do":"stop\\n"}'),
        ("tokens", b'{"say":"issue","label":"","role":"owner\\n"}'),
        ("alive", b'{"say":"alive","worker":"%s\\n"}' % peer.id.encode()),
    ):
        status, sentence = post(siege, peer, every[path], message)
        assert status == 400
        assert "not understood" in sentence


@given(body=st.binary(max_size=300))
def test_random_bytes_are_answered(crowd: tuple[Siege, Peer, list[Mouth]], body: bytes) -> None:
    siege, peer, every = crowd
    for mouth in every:
        assert post(siege, peer, mouth, body)[0] == 400
        if mouth.purpose:
            assert post(siege, peer, mouth, mouth.body(peer, body))[0] == 400


NUMBERS = [-1, 0, 1, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, 0.0, -0.0, 5e-324, 1e9, 1e308]
VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=70).filter(lambda text: text != "stop"),
    st.none() | st.booleans(),
    st.just(Digest("0" * 64)),
    st.lists(st.integers(-1, 2**64), max_size=3),
    st.dictionaries(st.sampled_from(["sent", "received", "say"]), st.integers(-1, 2**54)),
)


@given(data=st.data())
def test_random_values_are_answered(
    crowd: tuple[Siege, Peer, list[Mouth]], data: st.DataObject
) -> None:
    """An honest message in which some fields are anything at all, signed if it must be."""
    siege, peer, every = crowd
    mouth = data.draw(st.sampled_from(every))
    told: dict[str, Any] = msgspec.to_builtins(mouth.honest)
    fields = data.draw(st.lists(st.sampled_from(sorted(told)), max_size=3))
    for name in fields:
        told[name] = data.draw(VALUES)
    post(siege, peer, mouth, mouth.body(peer, msgspec.json.encode(told)))


def test_after_all_that_honest_workers_are_served(siege: Siege) -> None:
    state = siege.keeper.state
    assert not state.stopping
    assert state.paused_since is None
