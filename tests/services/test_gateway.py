"""The gateway over real sockets, asked by the real `openai` client."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.routing import Route
from tests.services.gateways import (
    DENOISE,
    NAME,
    PROMPT,
    SHAPE,
    Here,
    Serve,
    Served,
    bytes_of,
    denoising,
    model,
    sampled,
    serve,
    serving,
    until,
)

from blocktrain import metrics
from blocktrain.errors import Unreachable
from blocktrain.learning.model import Model, Shape
from blocktrain.services.coordinator.door import HEAD_AT_MOST, HEAD_SECONDS
from blocktrain.services.gateway.answers import STANDSTILL, STATUS_OF
from blocktrain.services.gateway.app import House
from blocktrain.services.gateway.door import BURST, WORDS_PER_SECOND
from blocktrain.services.gateway.fair import Limits
from blocktrain.services.gateway.keys import Keys
from blocktrain.services.gateway.openai import DEFAULT_TOKENS, MAX_STOP, MAX_STOPS, Ask, Offer
from blocktrain.wire.certificates import make_authority
from blocktrain.wire.registry import LEASE

__all__ = ["denoising", "model", "serve"]

DOCUMENT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


@pytest.fixture(scope="module")
def locked(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    """A gateway with TLS by an authority of our own, and a key to it."""
    folder = tmp_path_factory.mktemp("gateway")
    keys = Keys(folder / "keys.json")
    key = keys.issue("anna")
    with serving(Here(model), House(NAME, keys=keys), make_authority(folder, "test")) as served:
        yield served, key


def expected(length: int, temperature: float = 0.8, seed: int = 5, shape: Shape = SHAPE) -> str:
    return bytes_of(shape, temperature, seed)[:length].decode(errors="replace")


# --- OpenAI's client ------------------------------------------------------------------------------


def test_the_real_client_gets_the_model_s_own_text(
    locked: tuple[Served, str], model: Model
) -> None:
    served, key = locked
    assert served.url.startswith("https://")
    answer = served.client(key).completions.create(**sampled())
    (choice,) = answer.choices
    assert choice.text == expected(24)
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("length", 0, None)
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", NAME, "cmpl-")
    assert answer.usage
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == 24 + len(PROMPT)


def test_the_answer_says_what_it_took(locked: tuple[Served, str]) -> None:
    served, key = locked
    answer = served.client(key).completions.create(**sampled(), extra_body={"mode": "ar"})
    report = answer.model_extra and answer.model_extra["blocktrain"]
    assert (report["mode"], report["codec"], report["seed"]) == ("ar", "int8", 5)
    assert (report["traversals"], report["bytes"], report["replays"]) == (24, 24, 0)
    assert (report["guessed"], report["accepted"], report["bytes_per_traversal"]) == (0, 0, 1.0)
    assert [hop["stage"] for hop in report["hops"]] == [f"{n:064x}" for n in range(3)] + [None]
    assert all(hop["traversals"] == 24 for hop in report["hops"])
    assert all(hop["computed_ms"] > 0 for hop in report["hops"][:3])
    assert report["slowest"]["what"] in ("stage", "line")
    assert report["slowest_link"]["ms"] == max(hop["line_ms"] for hop in report["hops"])
    assert 0 < report["first_byte_s"] < report["seconds"]
    exact = served.client(key).completions.create(**sampled()).model_extra
    assert exact
    assert exact["blocktrain"]["mode"] == "exact"
    assert exact["blocktrain"]["guessed"] >= exact["blocktrain"]["accepted"]


def test_a_stream_has_the_same_text_in_pieces(locked: tuple[Served, str], model: Model) -> None:
    served, key = locked
    options: Any = {"include_usage": True}
    with served.client(key).completions.create(
        **sampled(), stream=True, stream_options=options
    ) as stream:
        chunks = list(stream)
    *pieces, last, usage = chunks
    assert "".join(each.choices[0].text for each in [*pieces, last]) == expected(24)
    assert len(pieces) > 3
    assert {each.choices[0].finish_reason for each in pieces} == {None}
    assert last.choices[0].finish_reason == "length"
    assert last.model_extra
    assert last.model_extra["blocktrain"]["bytes"] == 24
    assert usage.choices == []
    assert usage.usage
    assert usage.usage.completion_tokens == 24
    assert len({each.id for each in chunks}) == 1


def test_the_asynchronous_client_streams_six_at_once(
    locked: tuple[Served, str], model: Model
) -> None:
    served, key = locked

    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(**sampled(seed=seed), stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def play() -> list[str]:
        http = openai.DefaultAsyncHttpxClient(verify=served.trust, trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key=key, http_client=http
        ) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(6)))

    assert asyncio.run(play()) == [expected(24, seed=seed) for seed in range(6)]


def test_every_mode_of_a_decoder_gives_the_same_text(serve: Serve, model: Model) -> None:
    client = serve().client()
    for mode in ("ar", "exact", "speculative"):
        for temperature in (0.0, 1.2):
            asked = sampled(temperature=temperature, max_tokens=40)  # longer than the window
            answer = client.completions.create(**asked, extra_body={"mode": mode})
            assert answer.choices[0].text == expected(40, temperature), mode


def test_the_models_are_one(locked: tuple[Served, str]) -> None:
    served, key = locked
    client = served.client(key)
    assert [each.id for each in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "blocktrain"
    with pytest.raises(openai.NotFoundError, match="ask for 'tiny'"):
        client.models.retrieve("gpt-5")


def test_without_the_right_key_nothing_is_said(locked: tuple[Served, str]) -> None:
    served, key = locked
    for wrong in ("bt-", key[:-1], key + "x", "x" * 10_000):
        client = served.client(wrong)
        with pytest.raises(openai.AuthenticationError, match="Show an API key") as caught:
            client.completions.create(**sampled())
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    with served.http() as http:
        for path in ("v1/route", "v1/models", "v1/models/tiny"):
            answer = http.get(path)
            assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        for path in ("v1/watch", "v1/completions"):
            assert http.post(path, json={}).status_code == 401
        assert http.post("v1/watch", headers={"Authorization": key}).status_code == 401
        assert http.get("healthz").status_code == 200
    assert served.here.begun.count("int8") == len(served.here.begun)


def test_a_key_that_is_revoked_counts_no_more(serve: Serve, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    key = keys.issue("ben")
    client = serve(keys=Keys(keys.path)).client(key)
    assert client.models.list().data
    keys.revoke("ben")
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_what_cannot_be_is_an_error_of_openai_s_shape(serve: Serve) -> None:
    client = serve().client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**sampled(n=2))
    assert (caught.value.param, caught.value.type) == ("n", "invalid_request_error")
    assert "leave n out" in caught.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(**sampled(model="gpt-5"))
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError, match="nothing here"):
        client.chat.completions.create(model=NAME, messages=[])


# --- text -----------------------------------------------------------------------------------------


def test_a_stop_ends_the_text_before_it_and_the_work_too(serve: Serve, model: Model) -> None:
    served = serve()
    made = bytes_of(SHAPE, 0.8, 5)
    stop = bytes(byte for byte in made if byte < 128)[3:4].decode()
    before = made[: made.index(stop.encode())]
    asked = sampled(max_tokens=4000, stop=["never to be seen", stop])
    answer = served.client().completions.create(**asked, extra_body={"mode": "ar"})
    assert answer.choices[0].text == before.decode(errors="replace")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage
    assert answer.usage.completion_tokens == len(before) + 1 == len(served.here.log)
    until(lambda: served.here.open == 0)
    chunks = list(served.client().completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_an_echo_and_a_text_of_nothing(serve: Serve, model: Model) -> None:
    client = serve().client()
    answer = client.completions.create(**sampled(echo=True))
    assert answer.choices[0].text == PROMPT + expected(24)
    nothing = client.completions.create(**sampled(echo=True, max_tokens=0))
    assert nothing.choices[0].text == PROMPT
    streamed = client.completions.create(**sampled(echo=True), stream=True)
    assert "".join(each.choices[0].text for each in streamed) == PROMPT + expected(24)


def test_log_probabilities_are_those_of_the_bytes(serve: Serve, model: Model) -> None:
    client = serve().client()
    logs = client.completions.create(**sampled(logprobs=0)).choices[0].logprobs
    made = bytes_of(SHAPE, 0.8, 5)[:24]
    assert logs
    assert logs.tokens
    assert [each if len(each) == 1 else chr(int(each[-2:], 16)) for each in logs.tokens] == [
        chr(byte) for byte in made
    ]
    assert logs.token_logprobs
    assert len(logs.token_logprobs) == 24
    assert all(each < 0 for each in logs.token_logprobs)
    assert logs.text_offset
    assert logs.text_offset[0] == len(PROMPT)
    pieces = client.completions.create(**sampled(logprobs=0), stream=True)
    streamed = [each.choices[0].logprobs for each in pieces]
    assert [log for each in streamed for log in (each and each.token_logprobs) or []] == (
        logs.token_logprobs
    )


def test_text_comes_in_whole_characters(serve: Serve, model: Model) -> None:
    client = serve().client()
    streamed = client.completions.create(**sampled(max_tokens=48), stream=True)
    text = [each.choices[0].text for each in streamed]
    assert "".join(text) == expected(48)  # decoded in one go: no character was cut


def test_a_whole_text_is_what_a_denoising_model_gives(serve: Serve, denoising: Model) -> None:
    served = serve(of=denoising)
    client = served.client()
    once = client.completions.create(**sampled())
    report = once.model_extra and once.model_extra["blocktrain"]
    assert (report["mode"], report["traversals"], report["bytes"]) == ("whole", 1, 24)
    again = client.completions.create(**sampled(), extra_body={"traversals": 3})
    assert again.model_extra
    assert again.model_extra["blocktrain"]["traversals"] == 3
    assert again.choices[0].text != once.choices[0].text
    plain = client.completions.create(**sampled(), extra_body={"mode": "ar"})
    assert plain.choices[0].text == expected(24, shape=DENOISE)


# --- watching -------------------------------------------------------------------------------------


def watched(served: Served, **body: Any) -> list[dict[str, Any]]:
    with served.http() as http:
        answer = http.post("v1/watch", json=body)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events.pop() == ""
    return [json.loads(each.removeprefix("data: ")) for each in events if each[0] != ":"]


def test_whoever_watches_sees_every_traversal_and_where_it_went(serve: Serve, model: Model) -> None:
    served = serve()
    begun, *pieces, ended = watched(served, **sampled())
    assert begun == {"say": "begun", "seed": 5}
    assert {piece["say"] for piece in pieces} == {"piece"}
    assert "".join(piece["text"] for piece in pieces) + ended["text"] == expected(24)
    assert sum(piece["bytes"] for piece in pieces) == 24 == ended["bytes"]
    for piece in pieces:
        assert [leg["stage"] for leg in piece["legs"]] == [f"{n:064x}" for n in range(3)] + [None]
        assert piece["guessed"] >= piece["bytes"] - 1
    assert ended["report"]["traversals"] == len(pieces)


def test_a_whole_text_is_seen_to_sharpen_stage_by_stage(serve: Serve, denoising: Model) -> None:
    served = serve(of=denoising)
    asked = sampled(max_tokens=60, traversals=2)  # more than the window has room for
    events = watched(served, **asked)
    assert [each["say"] for each in events[:5]] == ["begun"] + ["sight"] * 3 + ["piece"]
    stages = [each["stage"] for each in events if each["say"] == "sight"]
    assert stages == [f"{n:064x}" for n in range(3)] * (len(stages) // 3)
    pieces = [each for each in events if each["say"] == "piece"]
    assert len(stages) == 3 * len(pieces)
    assert [piece["bytes"] for piece in pieces[::2]] == [0] * (len(pieces) // 2)
    text = "".join(piece["text"] for piece in pieces) + events[-1]["text"]
    answer = served.client().completions.create(
        **{k: v for k, v in asked.items() if k != "traversals"}, extra_body={"traversals": 2}
    )
    assert answer.choices[0].text == text


def test_a_failure_while_somebody_watches_is_told(serve: Serve, denoising: Model) -> None:
    served = serve(Here(denoising, fail_at=2, failure=Unreachable("No stage; start one.")))
    *_, last = watched(served, **sampled(traversals=3))
    assert last["error"]["message"] == "No stage; start one."
    assert served.here.open == 0


def test_the_route_says_what_is_served_and_by_whom(serve: Serve) -> None:
    served = serve(base_path="/models/tiny")
    assert served.url.endswith("/models/tiny")
    with served.http() as http:
        told = http.get("v1/route").json()
        assert http.get("").status_code == 200
    assert (told["model"], told["blocks"], told["ready"], told["mode"]) == (NAME, 3, True, "exact")
    assert told["modes"] == ["ar", "exact", "speculative"]
    assert told["stages"][0]["address"] == "10.0.0.1:9000"
    assert (told["served"], told["waiting"]) == (0, 0)


# --- what is written about it ---------------------------------------------------------------------


def test_the_document_names_every_route_field_number_and_metric(serve: Serve) -> None:
    served = serve()
    for route in served.gateway.app().routes:
        assert isinstance(route, Route)
        path = route.path.replace(":path", "")
        for method in (route.methods or set()) - {"HEAD"}:
            assert f"{method} `{path}`" in DOCUMENT or path.startswith("/static"), path
    for field in Ask.__struct_fields__:
        assert re.search(rf"`{field}`|penalties", DOCUMENT), field
    report = served.client().completions.create(**sampled()).model_extra
    assert report
    shown = json.loads("{" + DOCUMENT.split("```json\n")[1].split("```")[0] + "}")["blocktrain"]
    assert shown.keys() == report["blocktrain"].keys()
    assert shown["hops"][0].keys() == report["blocktrain"]["hops"][0].keys()
    offer, limits = Offer(), Limits()
    for number in (
        HEAD_AT_MOST, offer.max_body, offer.max_prompt, offer.max_tokens, DEFAULT_TOKENS,
        limits.at_once, limits.at_once_each, limits.waiting, limits.waiting_each,
    ):  # fmt: skip
        assert f"{number:,}" in DOCUMENT, number
    for words in (
        f"within {HEAD_SECONDS:.0f} seconds",
        f"within {STANDSTILL:.0f} seconds",
        f"{WORDS_PER_SECOND:.0f} a second, {BURST:.0f} at once",
        f"in the last {LEASE:.0f} seconds",
        f"up to {MAX_STOPS} texts of up to {MAX_STOP} characters",
    ):
        assert words in DOCUMENT, words
    names = re.findall(r"^# TYPE (\S+) ", metrics.render_serving().decode(), re.M)
    for name in names:
        assert f"`{name}" in DOCUMENT or name.endswith("_created"), name
    for _, status in STATUS_OF:
        assert f"\n| {status} |" in DOCUMENT, status
