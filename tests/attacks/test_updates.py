"""Lies in an update: each is refused with its own reason, and somebody else gets the slot."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.attacks.conftest import HASTY, LONG
from tests.attacks.siege import Peer, Siege, besieged, sealed, why

from blocktrain.aggregation.folder import BLOBS
from blocktrain.aggregation.folder_store import FolderStore
from blocktrain.aggregation.keeper import UNNAMED
from blocktrain.aggregation.ledger import Transaction, WorkerId, hash_of_token
from blocktrain.aggregation.retention import blobs_kept
from blocktrain.learning.data import Corpus
from blocktrain.services.begin import Settings, begin
from blocktrain.services.run import Exchange
from blocktrain.terms import Parameters
from blocktrain.wire import messages, owner, tensors
from blocktrain.wire.messages import Assignment

ONE_BLOCK = replace(LONG, shape=replace(LONG.shape, blocks=1), pace=replace(LONG.pace, replicas=1))


def narrow(
    codec: str,
) -> Callable[[pytest.TempPathFactory, Corpus], Iterator[Siege]]:
    """A run with one slot: while somebody has it, nobody else does."""

    @pytest.fixture(scope="module")
    def made(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Iterator[Siege]:
        folder = tmp_path_factory.mktemp("run") / "run"
        run = replace(ONE_BLOCK, exchange=Exchange(codec))
        begin(folder, Settings("test", run, HASTY), corpus)
        with besieged(folder) as siege:
            yield siege

    return made


exact = narrow("fp32")
halves = narrow("fp16")
low_bit = narrow("int4")


def spoil(siege: Siege, lie: Callable[[Peer, Assignment], bytes], sentence: str) -> None:
    """Somebody lies; the receipt says how, and the next one who asks has the slot."""
    liar, next_one = siege.peer(), siege.peer()
    task = liar.assignment()
    assert siege.keeper.state.held_by(liar.id)
    receipt = liar.submit(liar.update(task, lie(liar, task)))
    assert (receipt.verdict, receipt.round, receipt.factor) == ("refused", 0, 0.0)
    assert sentence in receipt.why
    assert siege.keeper.state.held_by(liar.id) is None
    again = next_one.assignment()
    assert (again.round, again.slot) == (task.round, task.slot)
    assert next_one.submit(next_one.update(again)).verdict == "taken"
    for peer in (liar, next_one):
        peer.say("leave", messages.Leave(peer.id))


def changed(change: Callable[[Parameters], object]) -> Callable[[Peer, Assignment], bytes]:
    """An honest update in the run's codec, but for this."""

    def lie(peer: Peer, task: Assignment) -> bytes:
        values = peer.change(task)
        change(values)
        return tensors.encode(values, peer.siege.keeper.charter.codec)

    return lie


def poison(value: float) -> Callable[[Parameters], object]:
    """One number of the last tensor is this."""

    def change(values: Parameters) -> None:
        values[max(values)].flat[-1] = value

    return change


def scale(factor: float) -> Callable[[Parameters], object]:
    return lambda values: [np.multiply(v, np.float32(factor), out=v) for v in values.values()]


def matrix(values: Parameters) -> str:
    """The name of one."""
    return next(name for name, value in values.items() if value.ndim == 2)


def transpose(values: Parameters) -> None:
    name = next(n for n, v in values.items() if v.ndim == 2 and v.shape[0] != v.shape[1])
    values[name] = np.ascontiguousarray(values[name].T)


def lose(values: Parameters) -> None:
    del values[matrix(values)]


def rename(values: Parameters) -> None:
    values["x" + matrix(values)[1:]] = values.pop(matrix(values))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (transpose, "'shape':"),
        (lose, "The body lacks"),
        (rename, "The body lacks"),
        (poison(np.nan), "not finite"),
        (poison(np.inf), "not finite"),
        (poison(-np.inf), "not finite"),
        (poison(3e38), "The norm of the change"),  # whose square is beyond float32
        (scale(1e6), "The norm of the change"),
        (scale(-1e6), "The norm of the change"),
    ],
)
def test_content_that_cannot_be_averaged_is_refused(
    exact: Siege, change: Callable[[Parameters], object], sentence: str
) -> None:
    spoil(exact, changed(change), sentence)


def test_the_words_of_a_liar_are_escaped(exact: Siege) -> None:
    lie = header_is(b'{"__metadata__":{"codec":"\\u001b[2J<script>"}}')
    spoil(exact, garbled(lie), r"by codec '\x1b[2J<script>', not by fp32")
    with exact.keeper.ledger.reading() as r:
        told = [event.detail["why"] for event in r.latest_events(100) if event.kind == "refused"]
    assert all(text.isprintable() for text in told)


@pytest.mark.parametrize("codec", ["fp16", "int8", "int4", "int2"])
def test_another_codec_is_refused(exact: Siege, codec: str) -> None:
    def lie(peer: Peer, task: Assignment) -> bytes:
        return tensors.encode(peer.change(task), codec)

    spoil(exact, lie, f"by codec '{codec}', not by fp32")


def garbled(change: Callable[[bytes], bytes]) -> Callable[[Peer, Assignment], bytes]:
    """The bytes of an honest update, but for this."""

    def lie(peer: Peer, task: Assignment) -> bytes:
        return change(tensors.encode(peer.change(task), peer.siege.keeper.charter.codec))

    return lie


def header_is(text: bytes) -> Callable[[bytes], bytes]:
    """Another header of the right length, as far as it goes."""

    def change(body: bytes) -> bytes:
        size = int.from_bytes(body[:8], "little")
        return body[:8] + text.ljust(size)[:size] + body[8 + size :]

    return change


def double(body: bytes) -> bytes:
    """A key twice: parsers disagree on which one counts."""
    size = int.from_bytes(body[:8], "little")
    entries = json.loads(body[8 : 8 + size])
    name = max(entries)
    return header_is(b'{"%s":1,"%s":2}' % (name.encode(), name.encode()))(body)


def beyond_the_end(body: bytes) -> bytes:
    """A tensor said to lie where the body has ended."""
    size = int.from_bytes(body[:8], "little")
    entries = json.loads(body[8 : 8 + size])
    entries[max(entries)]["data_offsets"] = [2**40, 2**40 + 4]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return (len(text).to_bytes(8, "little") + text + body[8 + size :])[: len(body)]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda body: b"x", "cut short"),
        (lambda body: body[:-1], "cut short"),
        (lambda body: body[:100], "cut short"),
        (lambda body: b"\xff" * 8 + body[8:], "cut short"),
        (lambda body: b"\0" * 8 + body[8:], "not JSON"),
        (header_is(b"[" * 100_000), "nested"),
        (header_is(b"[" * 500), "not JSON"),
        (header_is(b'{"a":' + b"9" * 500), "not JSON"),
        (header_is(b"null"), "not a JSON object"),
        (header_is(b'{"__metadata__":[]}'), "codec None"),
        (double, "twice"),
        (beyond_the_end, "data_offsets"),
        (lambda body: body.replace(b'{"', b'{ "', 1)[: len(body)], "header"),
        (lambda body: np.random.default_rng(0).bytes(len(body)), "cut short"),
    ],
)
def test_bytes_that_are_no_tensors_are_refused(
    exact: Siege, change: Callable[[bytes], bytes], sentence: str
) -> None:
    spoil(exact, garbled(change), sentence)


def last_is(value: int, dtype: str, suffix: str = "") -> Callable[[bytes], bytes]:
    """Some part's last number has these bits."""

    def change(body: bytes) -> bytes:
        size = int.from_bytes(body[:8], "little")
        entries = json.loads(body[8 : 8 + size])
        name = next(
            name
            for name, entry in entries.items()
            if name.endswith(suffix) and entry.get("dtype") == dtype
        )
        end = 8 + size + entries[name]["data_offsets"][1]
        return body[: end - 2] + value.to_bytes(2, "little") + body[end:]

    return change


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00], ids=["inf", "-inf", "nan"])
def test_half_precision_that_is_not_finite_is_refused(halves: Siege, bits: int) -> None:
    spoil(halves, garbled(last_is(bits, "F16")), "not finite")


# In order: infinite, not a number, -1, the largest, and one that some machines take for 0.
@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xBF80, 0x7F7F, 1])
def test_a_scale_that_no_encoder_writes_is_refused(low_bit: Siege, bits: int) -> None:
    spoil(low_bit, garbled(last_is(bits, "BF16", ".scale")), "has a scale that is not a number")


def test_a_scale_that_makes_it_absurd_is_refused(low_bit: Siege) -> None:
    spoil(low_bit, garbled(last_is(0x7000, "BF16", ".scale")), "The norm of the change")


# --- words that cannot be true --------------------------------------------------------------------


def test_words_that_cannot_be_true_are_refused(exact: Siege) -> None:
    """The slot stays: whoever has it may still send what is right."""
    peer = exact.peer()
    task = peer.assignment()
    rules, other = exact.keeper.charter.rules, exact.keeper.charter.corpus
    lies: list[tuple[dict[str, Any], str]] = [
        ({"bytes_trained": task.steps * rules.bytes_per_step + 1}, "cannot be right"),
        ({"bytes_trained": 2**53}, "cannot be right"),
        ({"bytes_trained": 0}, "cannot be right"),
        ({"steps": 0}, "cannot be right"),
        ({"steps": rules.local_steps + 1}, "cannot be right"),
        ({"steps": 2**53}, "cannot be right"),
        ({"seconds": 0.0}, "cannot be right"),
        ({"slot": task.slot + 1}, "never yours"),
        ({"slot": 2**53}, "never yours"),
        ({"base": other}, "does not build on"),
        ({"round": task.round + 1}, "does not build on"),
        ({"round": 0}, "does not build on"),
        ({"round": 2**53}, "does not build on"),
        ({"block": 1}, "no block 1"),
        ({"block": 2**53}, "no block"),
    ]
    for lie, sentence in lies:
        receipt = peer.submit(peer.update(task, **lie))
        assert receipt.verdict == "refused", lie
        assert sentence in receipt.why, lie
    assert exact.keeper.state.held_by(peer.id) is None  # a wrong base is a spoilt slot
    again = peer.assignment()
    assert peer.submit(peer.update(again)).verdict == "taken"
    peer.say("leave", messages.Leave(peer.id))


def test_a_pace_of_nothing_holds_up_nobody(exact: Siege) -> None:
    """5e-324 seconds for two steps are 0 seconds a step, by which something might be divided."""
    liar = exact.peer()
    for _ in range(2):
        receipt = liar.submit(liar.update(liar.assignment(), seconds=5e-324))
        assert receipt.verdict == "taken"
    assert liar.assignment().steps == exact.keeper.charter.rules.local_steps
    liar.say("leave", messages.Leave(liar.id))


def test_a_bug_that_one_request_meets_harms_no_other(siege: Siege) -> None:
    with siege.keeper.door:  # so that they come in one turn
        bad = siege.keeper.write(lambda t: 1 // 0)
        good = siege.keeper.write(lambda t: len(t.tokens()))
    assert good.result(5) >= 1
    with pytest.raises(ZeroDivisionError):
        bad.result(5)


def test_a_blob_that_is_named_late_is_not_pruned_meanwhile(siege: Siege) -> None:
    """A pruning reads the ledger first; whatever is named after that must look young."""
    keeper, peer = siege.keeper, siege.peer()
    task = peer.assignment()
    update = peer.update(task)
    store = FolderStore(siege.folder / BLOBS)
    old = time.time() - 2 * UNNAMED
    os.utime(siege.folder / BLOBS / update.blob[0] / update.blob[1] / update.blob, (old, old))
    with keeper.ledger.reading() as r:
        keep = blobs_kept(r)
    assert peer.submit(update).verdict != "refused"
    store.prune(keep, UNNAMED)
    assert store.size(update.blob) is not None
    store.close()


def test_numbers_beyond_all_bounds_are_not_understood(exact: Siege) -> None:
    peer = exact.peer()
    task = peer.assignment()
    update = messages.encode(peer.update(task))
    for old, new in (
        (b'"slot":0', b'"slot":-1'),
        (b'"slot":0', b'"slot":9007199254740993'),
        (b'"slot":0', b'"slot":' + b"9" * 5000),
        (b'"seconds":0.1', b'"seconds":-0.1'),
        (b'"seconds":0.1', b'"seconds":1e10'),
        (b'"seconds":0.1', b'"seconds":1e999'),
        (b'"seconds":0.1', b'"seconds":NaN'),
        (b'"loss":1.0', b'"loss":Infinity'),
        (b'"loss":1.0', b'"loss":"1.0"'),
    ):
        assert old in update
        lie = sealed(peer.key, update.replace(old, new), "update")
        response = peer.say("updates", lie)
        assert response.status_code == 400, new
        assert "not understood" in why(response)
    peer.say("leave", messages.Leave(peer.id))


def test_an_update_without_its_tensors_is_told_to_send_them(exact: Siege) -> None:
    peer = exact.peer()
    task = peer.assignment()
    update = peer.update(task, blob="0" * 64)
    response = peer.say("updates", sealed(peer.key, update, "update"))
    assert response.status_code == 404
    assert "send the blob first" in why(response)
    assert peer.submit(peer.update(task)).verdict == "taken"  # nothing is held against it
    peer.say("leave", messages.Leave(peer.id))


def test_another_workers_slot_cannot_be_filled_or_spoilt(siege: Siege) -> None:
    victim, liar = siege.peer(), siege.peer()
    task = victim.assignment()
    honest = liar.update(task)
    rubbish = liar.update(task, garbled(lambda body: body[:100])(liar, task))
    assert "never yours" in liar.submit(honest).why
    assert liar.submit(rubbish).verdict == "refused"
    held = siege.keeper.state.held_by(victim.id)
    assert held is None or held[1].slot == task.slot  # None: its round was closed meanwhile
    assert victim.submit(victim.update(task)).verdict != "refused"


def test_blobs_that_nobody_names_are_limited(siege: Siege) -> None:
    peer = siege.peer()
    for number in range(3):
        peer.put(b"%d, never named" % number)
    answer = peer.http.put(f"/v1/blobs/{'0' * 64}", content=b"one more")
    assert answer.status_code == 403
    assert "without naming them" in why(answer)
    task = peer.assignment()
    update = siege.peer().update(task, worker=peer.id)  # the tensors are here, by another hand
    assert peer.submit(update).verdict != "refused"
    peer.put(b"once more")


def test_what_workers_say_they_moved_does_not_hide_the_run(siege: Siege) -> None:
    """Everything that is told must fit into what others can read."""
    for _ in range(2):
        liar = siege.peer()
        lie = messages.Alive(liar.id, messages.Traffic(2**53, 2**53))
        assert liar.say("alive", lie).status_code == 200
    told = siege.client().get("/v1/status")
    assert messages.decode(told.content, owner.Status).bytes_moved == 2**53


def test_a_crowd_of_long_names_does_not_hide_the_run(siege: Siege) -> None:
    def crowd(t: Transaction) -> None:
        for number in range(400):
            id, name = WorkerId(f"{number:064x}"), "中" * 64
            t.join(id, name, hash_of_token(siege.token), time.time())
            t.note("refused", {"worker": id, "why": "x" * 400}, time.time())

    siege.keeper.write(crowd).result()
    told = siege.client().get("/v1/status")
    assert len(told.content) <= messages.MAX_MESSAGE
    status = messages.decode(told.content, owner.Status)
    assert status.workers
    assert status.events
