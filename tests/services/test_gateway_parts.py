"""The gateway's parts, each by itself: the line, the keys, the text, and what a request may say."""

import asyncio
import contextlib
import hashlib
import json
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from blocktrain.errors import BadConfig, BadInput, BadKey, BadRun
from blocktrain.services.gateway import openai
from blocktrain.services.gateway.fair import Full, Limits, Line
from blocktrain.services.gateway.keys import Keys
from blocktrain.services.gateway.openai import Offer, Wanted, Wrong, parse
from blocktrain.services.gateway.texts import Shown, Text

# --- the line -------------------------------------------------------------------------------------


def in_line(line: Line, keys: str) -> list[tuple[str, asyncio.Future[None]]]:
    return [(key, line.enter(key)) for key in keys]


def test_keys_take_turns_however_many_wait_for_one_of_them() -> None:
    async def play() -> str:
        line = Line(Limits(at_once=1))
        waiting = in_line(line, "aaaaabbc")
        order = ""
        while waiting:
            (served,) = [each for each in waiting if each[1].done()]
            order += served[0]
            waiting.remove(served)
            line.leave(*served)
        assert (line.length, line.waiting, line.served) == (0, {}, Counter())
        return order

    assert asyncio.run(play()) == "abcabaaa"


def test_one_key_never_takes_every_place() -> None:
    async def play() -> None:
        line = Line(Limits(at_once=4, at_once_each=3))
        mine = in_line(line, "aaaaaa")
        assert [turn.done() for _, turn in mine] == [True] * 3 + [False] * 3
        assert line.enter("b").done()  # though three of a stood there first
        line.leave(*mine[0])
        assert mine[3][1].done()

    asyncio.run(play())


def test_a_full_line_is_said_so_and_nobody_else_suffers() -> None:
    async def play() -> None:
        line = Line(Limits(at_once=1, waiting=3, waiting_each=2))
        first, *_ = in_line(line, "aaa")
        with pytest.raises(Full, match="come again"):
            line.enter("a")
        other = line.enter("b")
        with pytest.raises(Full, match="come again"):
            line.enter("c")
        assert line.length == 3
        line.leave(*first)
        assert other.done()  # a was served last

    asyncio.run(play())


def test_whoever_goes_away_while_waiting_or_served_makes_room() -> None:
    async def play() -> None:
        line = Line(Limits(at_once=1))
        order: list[str] = []

        async def visit(name: str, key: str) -> None:
            with line.place(key) as turn:
                await turn
                order.append(name)
                await asyncio.sleep(0.005)

        names = [("first", "a"), ("second", "a"), ("third", "b"), ("fourth", "b")]
        visits = [asyncio.create_task(visit(*each)) for each in names]
        await asyncio.sleep(0)
        visits[2].cancel()  # in line
        visits[0].cancel()  # being served; its end lets `third` in, which is cancelled already
        ends = await asyncio.gather(*visits, return_exceptions=True)
        assert [isinstance(end, asyncio.CancelledError) for end in ends] == [1, 0, 1, 0]
        assert order == ["first", "fourth", "second"]
        assert (line.length, line.served) == (0, Counter())

    asyncio.run(play())


@given(some.lists(some.tuples(some.sampled_from("abc"), some.integers(0, 9)), max_size=60))
def test_no_place_is_lost_and_no_limit_passed(plan: list[tuple[str, int]]) -> None:
    async def play() -> None:
        limits = Limits(at_once=3, at_once_each=2, waiting=4, waiting_each=3)
        line, here = Line(limits), []
        for key, what in plan:
            if what < 6:
                try:
                    here.append((key, line.enter(key)))
                except Full:
                    waiting = len(line.waiting.get(key, ()))
                    assert line.length == 4 or waiting == 3
            elif here:
                line.leave(*here.pop(what % len(here)))
            served = Counter(key for key, turn in here if turn.done())
            assert served == line.served
            assert served.total() <= 3
            assert all(count <= 2 for count in served.values())
            assert line.length == len(here) - served.total()
            idle = [key for key in line.waiting if line.served[key] < 2]
            assert served.total() == 3 or not idle  # nobody waits for nothing
        for each in here:
            line.leave(*each)
        assert (line.length, line.waiting, line.served) == (0, {}, Counter())

    asyncio.run(play())


def test_limits_that_would_serve_nobody_are_refused(sentence: Callable[..., str]) -> None:
    for wrong in ({"at_once": 0}, {"at_once_each": 0}, {"waiting": -1}):
        with pytest.raises(BadConfig) as caught:
            Limits(**wrong)
        sentence(caught.value)


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_opens_until_it_is_revoked_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "gateway" / "keys.json"
    keys, running = Keys(path), Keys(path)  # the command line, and a gateway beside it
    assert running.whose("bt-anything") is None
    anna, ben = keys.issue("anna"), keys.issue("ben")
    assert (running.whose(anna), running.whose(ben)) == ("anna", "ben")
    assert running.whose(anna[:-1]) is None
    assert running.whose("") is None
    kept = path.read_text()
    assert anna not in kept
    assert hashlib.sha256(anna.encode()).hexdigest() in kept
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys.revoke("anna")
    assert (running.whose(anna), running.whose(ben)) == (None, "ben")


def test_what_cannot_be_with_keys_is_said(tmp_path: Path, sentence: Callable[..., str]) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.issue("anna")
    for wrong in (
        lambda: keys.issue("anna"),
        lambda: keys.issue(""),
        lambda: keys.issue("x" * 65),
        lambda: keys.issue("a\nb"),
        lambda: keys.revoke("ben"),
    ):
        with pytest.raises(BadInput) as caught:
            wrong()
        sentence(caught.value)
    assert [entry.name for entry in keys.current()] == ["anna"]
    with keys.changing(), pytest.raises(BadRun, match="try again"):
        keys.issue("ben")


@pytest.mark.parametrize("body", [b"", b"[]", b'{"format":2,"keys":[]}', b"\xff", b"[" * 5000])
def test_a_damaged_file_of_keys_opens_nothing(tmp_path: Path, body: bytes) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.issue("anna")
    keys.path.write_bytes(body)
    with pytest.raises(BadKey, match="restore the file"):
        keys.whose("bt-anything")


# --- text -----------------------------------------------------------------------------------------


def told(text: Text, pieces: list[bytes]) -> tuple[str, bytes, list[float]]:
    """All that is shown of these pieces, with the byte's number as its log."""
    shown, number = [], 0
    for piece in pieces:
        shown.append(text.add(piece, [float(number + n) for n in range(len(piece))]))
        number += len(piece)
    shown.append(text.end())
    return (
        "".join(each.text for each in shown),
        b"".join(each.bytes for each in shown),
        [log for each in shown for log in each.logs],
    )


PIECES = some.lists(some.binary(max_size=5), max_size=8)
STOPS = some.lists(some.binary(min_size=1, max_size=4), max_size=3)


@given(PIECES)
def test_any_bytes_in_any_pieces_give_the_same_text(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    logs = [float(n) for n in range(len(whole))]
    assert told(Text(), pieces) == (whole.decode(errors="replace"), whole, logs)


@given(some.text(max_size=20))
def test_no_half_character_is_ever_shown(text: str) -> None:
    shown = Text()
    for byte in text.encode():
        piece = shown.add(bytes([byte]), [0.0]).text
        assert len(piece) <= 1
        assert "�" not in piece or "�" in text
    assert shown.end().text == ""


@given(some.text("ab", max_size=30), some.lists(some.text("ab", min_size=1, max_size=4)))
def test_a_text_ends_before_its_first_stop(text: str, stops: list[str]) -> None:
    expected, stopped = text, False
    for end in range(len(text) + 1):  # by the definition: the first end of any stop
        reached = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if reached:
            expected, stopped = text[: end - max(reached)], True
            break
    for step in (1, 3, 100):
        shown = Text([stop.encode() for stop in stops])
        pieces = [text[n : n + step].encode() for n in range(0, len(text), step)]
        assert told(shown, pieces)[0] == expected
        assert shown.stopped == stopped
        assert shown.generated == (end if stopped else len(text))


def test_what_may_become_a_stop_waits() -> None:
    text = Text([b"END"])
    assert text.add(b"one E", [0.0] * 5) == Shown("one ", b"one ", [0.0] * 4)
    assert text.add(b"N", [0.0]).text == ""
    assert text.add(b"!", [0.0]).text == "EN!"
    assert text.add(b"EN", [0.0] * 2).text == ""
    assert text.add(b"D and more", [0.0] * 10).text == ""
    assert text.stopped
    assert text.end() == Shown()


# --- requests -------------------------------------------------------------------------------------


OFFER = Offer()
HALF = b'{"prompt": "\\ud800"}'  # of a character: there are no bytes for it


def asked(offer: Offer = OFFER, objective: Any = "neighbours", **fields: Any) -> Wanted:
    return parse(json.dumps(fields).encode(), "tiny", objective, offer)


def test_a_request_says_what_is_wanted_and_the_rest_is_as_openai_has_it() -> None:
    wanted = asked(model="tiny", prompt="Hé")
    assert (wanted.prompt, wanted.mode, wanted.codec) == ("Hé".encode(), "exact", "int8")
    assert (wanted.sampling.temperature, wanted.sampling.top_p) == (1.0, 1.0)
    assert wanted.sampling.length == openai.DEFAULT_TOKENS
    assert (wanted.stops, wanted.stream, wanted.usage, wanted.echo, wanted.logs) == (
        [], False, False, False, False,
    )  # fmt: skip
    assert asked().sampling.seed != asked().sampling.seed
    assert asked(objective="denoise").mode == "whole"
    wanted = asked(
        prompt=["x"], max_tokens=7, temperature=0, top_p=0.5, seed=3, stop="\n", stream=True,
        stream_options={"include_usage": True}, echo=True, mode="ar", codec="int8", user="me",
        n=1, best_of=1, suffix=None, presence_penalty=0, logit_bias={},
    )  # fmt: skip
    assert wanted.sampling == type(wanted.sampling)(0, 0.5, 3, 7)
    assert (wanted.stops, wanted.stream, wanted.usage, wanted.echo) == ([b"\n"], True, True, True)
    assert (wanted.mode, wanted.codec, wanted.prompt) == ("ar", "int8", b"x")
    assert asked(prompt=[0, 255]).prompt == b"\0\xff"
    assert asked(logprobs=0).logs


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("model", {"model": "gpt-5"}),
        ("prompt", {"prompt": ["a", "b"]}),
        ("prompt", {"prompt": [1, 256]}),
        ("prompt", {"prompt": [[1]]}),
        ("prompt", {"prompt": "x" * 33_000}),
        ("max_tokens", {"max_tokens": 4097}),
        ("max_tokens", {"max_tokens": "many"}),
        ("max_tokens", {"max_tokens": -1}),
        ("temperature", {"temperature": -0.1}),
        ("top_p", {"top_p": 0}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 2**63}),
        ("stop", {"stop": ["a"] * 5}),
        ("stop", {"stop": ""}),
        ("stop", {"stop": "x" * 257}),
        ("n", {"n": 2}),
        ("best_of", {"best_of": 2}),
        ("suffix", {"suffix": "the end"}),
        ("presence_penalty", {"presence_penalty": 1}),
        ("frequency_penalty", {"frequency_penalty": -1}),
        ("logit_bias", {"logit_bias": {"50256": -100}}),
        ("logprobs", {"logprobs": 5}),
        ("logprobs", {"logprobs": 0, "echo": True}),
        ("mode", {"mode": "whole"}),
        ("mode", {"mode": "beam"}),
        ("traversals", {"traversals": 0}),
        ("codec", {"codec": "fp64"}),
        ("messages", {"messages": []}),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    param: str, fields: dict[str, Any], sentence: Callable[..., str]
) -> None:
    with pytest.raises(Wrong) as caught:
        asked(**fields)
    assert caught.value.param == param
    if not str(caught.value).startswith("The request is not understood: "):
        sentence(caught.value)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"prompt": NaN}', HALF]
)
def test_what_is_no_request_is_not_understood(body: bytes) -> None:
    with pytest.raises(Wrong, match="not understood"):
        parse(body, "tiny", "neighbours", OFFER)


@given(some.recursive(some.none() | some.booleans() | some.floats() | some.text(), some.lists))
def test_nothing_that_is_said_breaks_the_parser(value: Any) -> None:
    for field in openai.Ask.__struct_fields__:
        with contextlib.suppress(Wrong):
            assert isinstance(asked(**{field: value}), Wanted)
