"""What the gateway does when much, or nothing good, is asked of it: turns, limits, failures."""

import json
import logging
import socket
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from tests.services.gateways import (
    Here,
    Serve,
    Served,
    Session,
    denoising,
    meanwhile,
    model,
    sampled,
    serve,
    until,
)

from blocktrain import metrics
from blocktrain.errors import BadModel, Unreachable
from blocktrain.inference.pipeline import StageReport
from blocktrain.inference.session import Asked, Said
from blocktrain.learning.model import Model
from blocktrain.services.coordinator import door as heads
from blocktrain.services.gateway import answers, door
from blocktrain.services.gateway.fair import Limits
from blocktrain.services.gateway.openai import Offer
from blocktrain.terms import Digest
from blocktrain.wire import messages, signing
from blocktrain.wire.registry import Registry
from blocktrain.wire.serving import Announce, Codec, Heard, Holding, Hop, Place, Stages

__all__ = ["denoising", "model", "serve"]

MAX_BODY = Offer().max_body

# --- taking turns ---------------------------------------------------------------------------------


def test_a_long_text_does_not_hold_up_a_short_one(serve: Serve) -> None:
    served = serve()  # its sessions compute at once and never wait by themselves
    stream = served.client().completions.create(
        **sampled(max_tokens=4000), stream=True, extra_body={"mode": "ar"}
    )
    next(iter(stream))
    short = served.client().completions.create(**sampled(max_tokens=8))
    assert short.usage
    assert short.usage.completion_tokens == 8
    assert served.here.open == 1  # the long one is still at it
    long, other = served.here.log.count(1), served.here.log.count(2)
    first = served.here.log.index(2)
    between = served.here.log[first : len(served.here.log) - served.here.log[::-1].index(2)]
    assert between.count(1) <= 3 * other < long + 3 * other  # by turns
    stream.close()


def crowded(served: Served, count: int) -> bool:
    line = served.gateway.line
    return line.served.total() + line.length == count


def test_beyond_the_line_one_is_told_to_come_again(serve: Serve) -> None:
    served = serve(limits=Limits(at_once=1, at_once_each=1, waiting=1, waiting_each=1))
    served.here.held = True
    with ExitStack() as stack:
        http = stack.enter_context(served.http())
        for number in (1, 2):
            stack.enter_context(meanwhile(served, **sampled()))
            until(partial(crowded, served, number))
        answer = http.post("v1/completions", json=sampled())
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "2")
        assert answer.json()["error"]["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError, match="come again"):
            served.client().completions.create(**sampled())
        route = http.get("v1/route").json()
        assert (route["served"], route["waiting"]) == (1, 1)
        served.here.held = False
    assert served.gateway.line.length == 0
    assert len(served.here.begun) == 2


def test_whoever_waits_in_line_is_told_so(serve: Serve) -> None:
    served = serve(limits=Limits(at_once=1))
    served.here.held = True
    with meanwhile(served, **sampled()):
        until(lambda: served.here.open == 1)
        with served.http() as http, http.stream("POST", "v1/watch", json=sampled()) as answer:
            lines = answer.iter_lines()
            assert json.loads(next(lines)[6:]) == {"say": "waiting", "count": 1}
            served.here.held = False
            assert any('"ended"' in line for line in lines)


# --- going away -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["v1/completions", "v1/watch"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_text(serve: Serve, path: str, stream: bool) -> None:
    served = serve()
    served.here.pause = 0.01
    with served.socket() as sock:
        sock.sendall(post(path, sampled(max_tokens=4000, stream=stream)))
        until(lambda: len(served.here.log) > 3)
        assert served.here.open == 1
    until(lambda: served.here.open == 0, within=2)
    made = len(served.here.log)
    time.sleep(0.05)
    assert len(served.here.log) <= made + 1
    until(lambda: served.gateway.line.served.total() == 0)


def test_a_whole_text_ends_with_its_reader_too(serve: Serve, denoising: Model) -> None:
    served = serve(Here(denoising, pause=0.01))
    with served.socket() as sock:
        sock.sendall(post("v1/watch", sampled(traversals=64)))
        until(lambda: len(served.here.log) > 3)
    until(lambda: served.here.open == 0, within=2)
    assert len(served.here.log) < 60


def test_whoever_leaves_the_line_frees_it(serve: Serve) -> None:
    served = serve(limits=Limits(at_once=1))
    served.here.held = True
    with meanwhile(served, **sampled()) as status:
        until(lambda: served.here.open == 1)
        with served.socket() as sock:
            sock.sendall(post("v1/completions", sampled()))
            until(lambda: served.gateway.line.length == 1)
        until(lambda: served.gateway.line.length == 0)
        served.here.held = False
    assert status == [200]
    assert len(served.here.begun) == 1


def test_the_openai_client_s_own_close_is_heard(serve: Serve) -> None:
    served = serve()
    served.here.pause = 0.01
    with served.client().completions.create(**sampled(max_tokens=4000), stream=True) as stream:
        next(iter(stream))
        assert served.here.open == 1
    until(lambda: served.here.open == 0, within=2)


class Wordy(Session):
    """Says much at once, and computes nothing."""

    async def step(self, asked: Asked) -> Said:
        await self.here.obey(self.number)
        hops = [Hop(f"{n:064x}", 1.0, 0.0, 100) for n in range(60)]
        return Said([], [65] * asked.wanted, [-1.0] * asked.wanted, hops=hops)


class WordyHere(Here):
    async def session(self, codec: Codec) -> Session:
        await super().session(codec)
        return Wordy(self, len(self.begun))


def test_a_reader_who_stands_still_is_left(
    serve: Serve, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "STANDSTILL", 0.3)
    served = serve(WordyHere(model))
    with served.socket(small=True) as sock:
        sock.sendall(post("v1/watch", sampled(max_tokens=4000, mode="ar")))
        until(lambda: served.here.open == 1)
        until(lambda: served.here.open == 0, within=10)  # though nobody hung up
        assert 10 < len(served.here.log) < 4000


# --- limits ---------------------------------------------------------------------------------------


def post(path: str, body: Any, *headers: str) -> bytes:
    told = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST /{path} HTTP/1.1", "Host: gateway", *headers, f"Content-Length: {len(told)}"]
    return "\r\n".join([*lines, "", ""]).encode() + told


def answer(sock: socket.socket) -> bytes:
    """All that comes until the other side hangs up, or nothing more for a while."""
    sock.settimeout(3)
    got = b""
    while b"\r\n\r\n" not in got or b"error" not in got:
        chunk = sock.recv(65536)
        if not chunk:
            break
        got += chunk
    return got


def test_a_request_that_is_too_long_is_refused_before_it_is_sent(serve: Serve) -> None:
    served = serve()
    for path in ("v1/completions", "v1/watch"):
        with served.socket() as sock:
            length = f"Content-Length: {MAX_BODY + 1}"
            sock.sendall(f"POST /{path} HTTP/1.1\r\nHost: gateway\r\n{length}\r\n\r\n".encode())
            assert answer(sock).startswith(b"HTTP/1.1 413")  # not one byte of it was sent


def test_a_request_without_a_length_is_refused_while_it_comes(serve: Serve) -> None:
    with serve().http() as http:
        told = http.post("v1/completions", content=(b"[" * 2**16 for _ in range(64)))
    assert told.status_code == 413
    assert (
        told.json()["error"]["message"]
        == f"A request here has at most {MAX_BODY} bytes; send less."
    )


def test_a_body_that_never_comes_is_not_waited_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "STANDSTILL", 0.2)
    with serve().socket() as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: 9\r\n\r\n{"
        )
        assert answer(sock).startswith(b"HTTP/1.1 503")


def test_a_head_that_never_ends_is_not_waited_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "HEAD_SECONDS", 0.2)
    with serve().socket() as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: ")
        sock.settimeout(3)
        assert sock.recv(100) == b""


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"\xff\xfe", b"[" * 9_000, b'{"prompt": {}}']
)
def test_garbage_is_no_request(serve: Serve, body: bytes) -> None:
    with serve().http() as http:
        for path in ("v1/completions", "v1/watch"):
            told = http.post(path, content=body)
            assert told.status_code == 400
            assert told.json()["error"]["message"].startswith("The request is not understood")


def test_a_page_of_another_site_may_not_ask(serve: Serve) -> None:
    served = serve()
    with served.http(headers={"Sec-Fetch-Site": "cross-site"}) as http:
        told = http.post("v1/completions", json=sampled())
        assert (told.status_code, served.here.begun) == (403, [])
        assert http.get("").status_code == 200  # a link to the playground is all right


def test_a_body_that_is_broken_off_harms_nobody(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    with served.socket() as sock:
        sock.sendall(post("v1/completions", sampled())[:-5])
    with served.http() as http:
        assert http.post("v1/completions", json=sampled()).status_code == 200
    assert "Exception" not in caplog.text


def test_paths_that_mean_nothing(serve: Serve) -> None:
    with serve().http() as http:
        for path in ("nowhere", "static/../app.py", "static/%2e%2e/app.py", "v1/stages"):
            assert http.get(path).status_code == 404
        assert http.get("v1/completions").status_code == 404
        assert http.get("v1/stages").json()["say"] == "refused"
        told = http.get("static/app.js")
        assert "default-src 'self'" in told.headers["Content-Security-Policy"]
        assert told.headers["Content-Type"] == "text/javascript; charset=utf-8"


# --- failures -------------------------------------------------------------------------------------


def test_a_pipeline_without_a_stage_is_said_before_the_stream_begins(
    serve: Serve, model: Model
) -> None:
    source = Here(model, fail_at=1, failure=Unreachable("No stage; start one."))
    served = serve(source)
    for stream in (True, False):
        with pytest.raises(openai.InternalServerError, match="No stage; start one") as caught:
            served.client().completions.create(**sampled(stream=stream))
        assert caught.value.status_code == 503
    assert source.open == 0


def test_a_failure_in_the_middle_is_an_event(serve: Serve, model: Model) -> None:
    source = Here(model, fail_at=4, failure=Unreachable("No stage; start one."))
    with pytest.raises(openai.APIError, match="No stage; start one") as caught:
        list(serve(source).client().completions.create(**sampled(), stream=True))
    assert not isinstance(caught.value, openai.APIStatusError)
    assert source.open == 0


def test_a_bug_is_an_answer_too_and_is_in_the_log(
    serve: Serve, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    for failure in (AssertionError("deep inside"), OSError("deep inside")):
        source = Here(model, fail_at=1, failure=failure)
        with pytest.raises(openai.InternalServerError, match="more in the log") as caught:
            serve(source).client().completions.create(**sampled())
        assert caught.value.status_code == 500
        assert "deep inside" not in caught.value.message
        assert source.open == 0
    assert caplog.text.count("deep inside") >= 2


def test_any_other_error_is_ours(serve: Serve, model: Model) -> None:
    source = Here(model, fail_at=1, failure=BadModel("It is damaged; copy it."))
    with pytest.raises(openai.InternalServerError, match="copy it") as caught:
        serve(source).client().completions.create(**sampled())
    assert caught.value.status_code == 500


def test_a_silent_stream_is_kept_alive(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "HEARTBEAT", 0.05)
    served = serve()
    served.here.held = True
    asked = sampled(max_tokens=4, stream=True)
    with served.http() as http, http.stream("POST", "v1/completions", json=asked) as told:
        lines = told.iter_lines()
        assert next(lines) == ": still here"  # though nothing has come of the text yet
        served.here.held = False
        assert "data: [DONE]" in [*lines]
    served.here.pause = 0.15
    assert list(served.client().completions.create(**asked))


# --- stages ---------------------------------------------------------------------------------------


def announcement(key: signing.Key, by: signing.Key | None = None, **changes: Any) -> bytes:
    place = Place(changes.pop("stage", key.id), "10.0.0.7", 9000)
    holding = Holding(Digest("0" * 64), 0, 1, "fp32", "cpu 1")
    body = messages.encode(Announce(place, holding, 0, 8, **changes))
    who = by or key
    purpose = "announce" if by is None else "join"
    signature = signing.sign(who, body, purpose).hex()
    return messages.encode(messages.Signed(body, who.id, signature))


def announced(http: httpx.Client, key: signing.Key, **changes: Any) -> bytes:
    """Announces, with the word that is asked for; what was said."""
    word = None
    for _ in range(2):
        said = announcement(key, word=word, **changes)
        heard = messages.decode(http.post("v1/stages", content=said).content, Heard)
        word = heard.word
    assert heard.taken
    return said


def test_stages_announce_themselves_and_leave(serve: Serve) -> None:
    registry, key = Registry(), signing.new_key()
    with serve(registry=registry).http() as http:
        overheard = announced(http, key)
        told = messages.decode(http.get("v1/stages").content, Stages)
        assert [each.place.stage for each in told.stages] == [key.id]
        assert registry.present(time.monotonic()) == told.stages
        announced(http, key, leaving=True)
        again = http.post("v1/stages", content=overheard)
        assert messages.decode(again.content, Heard).taken is False
        assert messages.decode(http.get("v1/stages").content, Stages).stages == []


def test_nobody_announces_another(serve: Serve) -> None:
    registry, key, other = Registry(), signing.new_key(), signing.new_key()
    lies = [
        announcement(key, stage=other.id),  # signed, but not by the stage
        announcement(key, by=key),  # for another purpose
        announcement(key).replace(key.id.encode(), other.id.encode()),
    ]
    with serve(registry=registry).http() as http:
        for lie in lies:
            told = http.post("v1/stages", content=lie)
            assert told.status_code == 401
            assert messages.decode(told.content, messages.Refused).why.startswith("An announcement")
        for garbage in (b"", b"[]", b"\xff", b"x" * 20_000):
            assert http.post("v1/stages", content=garbage).status_code in (400, 413)
    assert registry.present(time.monotonic()) == []


def test_one_address_cannot_fill_the_list(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(most_of_one=3)
    with serve(registry=registry).http() as http:
        for _ in range(3):
            announced(http, signing.new_key())
        key = signing.new_key()
        word = http.post("v1/stages", content=announcement(key)).json()["word"]
        told = http.post("v1/stages", content=announcement(key, word=word))
        assert told.status_code == 400
        assert "3 stages of this token or address" in told.text
        monkeypatch.setattr(door, "WORDS_PER_SECOND", 0.0)
        monkeypatch.setattr(door, "BURST", 5.0)
        for _ in range(6):
            told = http.post("v1/stages", content=announcement(signing.new_key()))
        assert told.status_code == 429
        assert http.post("v1/completions", json=sampled()).status_code == 200
    assert len(registry.present(time.monotonic())) == 3


# --- health ---------------------------------------------------------------------------------------


def test_health_says_whether_every_block_is_served(serve: Serve, model: Model) -> None:
    class Partly(Here):
        def report(self) -> list[StageReport]:
            return super().report()[: self.there]

        there = 3

    source = Partly(model)
    with serve(source).http() as http:
        assert http.get("healthz").json() == {"status": "ok", "stages": 3}
        source.there = 2
        told = http.get("healthz")
        assert (told.status_code, told.json()["status"]) == (503, "no route")
        assert http.get("v1/route").json()["ready"] is False


def test_what_was_done_is_counted_and_logged_but_not_what_was_said(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def counted(name: str, **labels: str) -> float:
        return metrics.SERVING.get_sample_value(f"blocktrain_{name}", labels) or 0.0

    served = serve()
    before = counted("text_bytes_total"), counted("texts_total", mode="exact", end="length")
    secret = "Nobody shall read this in a log"
    text = served.client().completions.create(**sampled(prompt=secret)).choices[0].text
    assert counted("text_bytes_total") == before[0] + 24
    assert counted("texts_total", mode="exact", end="length") == before[1] + 1
    with served.http() as http:
        page = http.get("metrics")
    assert page.headers["Content-Type"].startswith("text/plain")
    for name in ("gateway_requests_total", "first_byte_seconds_bucket", "stages", "texts_now"):
        assert f"blocktrain_{name}" in page.text
    assert "text for 127.0.0.1 by exact: length after 24 bytes" in caplog.text
    assert secret not in caplog.text
    assert text not in caplog.text
    assert secret not in page.text
