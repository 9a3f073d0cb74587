"""A serving network as people start it: papers, stages and a gateway as real processes."""

import asyncio
import json
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from tests.commands.forked import Forked
from tests.inference.network import write

import blocktrain
from blocktrain.aggregation.folder import owners_token
from blocktrain.errors import BadInput, BadKey, BadRun
from blocktrain.inference.local import LocalSession
from blocktrain.inference.pipeline import Pipeline
from blocktrain.inference.span import Span
from blocktrain.learning.data import Corpus, open_corpus
from blocktrain.learning.files import read_manifest, save_model
from blocktrain.learning.model import Model, Shape, new_block
from blocktrain.learning.noise import Noise
from blocktrain.services.begin import Settings, begin
from blocktrain.services.belonging import Pass, belong
from blocktrain.services.papers import admit, authority_in, member_in
from blocktrain.services.run import Run
from blocktrain.services.serving import Cast, Serving
from blocktrain.wire.serving import Weights

SHAPE = Shape(blocks=3, layers=1, width=32, heads=2, window=48)
ASKED_FOR: dict[str, Any] = {
    "model": "blocktrain", "prompt": "The", "max_tokens": 24,
    "temperature": 0.8, "top_p": 0.95, "seed": 0,
}  # fmt: skip
Typed = Callable[..., dict[str, Any]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    blocks = [new_block(SHAPE, index, seed=3) for index in range(SHAPE.blocks)]
    for block in blocks:
        block.head.out.weight.data.normal_()
    save_model(Model(SHAPE, Noise(), blocks), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def text(tmp_path: Path) -> Corpus:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 64)
    return open_corpus(str(tmp_path / "text"))


@contextmanager
def command(*arguments: str) -> Iterator[dict[str, Any]]:
    """A command that tells where it is on its first line, and is told to stop at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "blocktrain", *arguments, "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGTERM)
        # uvicorn cleans up, and then dies of the signal after all
        assert process.wait(15) in (0, -signal.SIGTERM)
        process.stdout.close()


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
def test_stages_in_processes_say_what_one_process_says(
    tmp_path: Path, model: Path, weights: Weights
) -> None:
    owner = tmp_path / "owner"
    for name in ("a", "b", "gateway"):
        admit(authority_in(owner), tmp_path / name)

    async def served(places: list[str]) -> bytes:
        manifest = read_manifest(model)
        member = member_in(tmp_path / "gateway")
        async with Pipeline(manifest.shape, manifest.digest, *member, places) as pipeline:
            session = await pipeline.session("fp32")
            assert {stage.weights for stage in pipeline.report()} == {weights}
            return (await write(session, 16, draft=2))[0]

    both = ["--threads", "1", "--weights", weights]
    first = command("stage", str(model), "--blocks", "1-2", "--papers", str(tmp_path / "a"), *both)
    second = command("stage", str(model), "--blocks", "3", "--papers", str(tmp_path / "b"), *both)
    with first as one, second as two:
        places = [f"{each['host']}:{each['port']}" for each in (one, two)]
        assert (one["blocks"], two["blocks"]) == ([1, 2], [3, 3])
        found = asyncio.run(served(places))
    local, _ = asyncio.run(write(LocalSession(Span.open(model, 0, 2, weights)), 16))
    assert found == local


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Typed]:
    """A short command in a process of its own, and the last line of what it said."""
    forked = Forked(["blocktrain.commands.stage", "blocktrain.commands.gateway"])
    notes = tmp_path_factory.mktemp("notes")

    def run(*arguments: str) -> dict[str, Any]:
        done = forked.run([*arguments, "--json"], Path.cwd(), notes)
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return said

    yield run
    forked.close()


def test_across_hosts_as_the_readme_says(tmp_path: Path, model: Path, typed: Typed) -> None:
    """The owner admits three hosts, a stage finds the gateway by HTTPS, a friend has a key."""
    authority, *papers = (f"{tmp_path / name}" for name in ("authority", "gateway", "anna", "ben"))
    for each in papers:
        typed("admit", authority, each)
    tls = ["--tls", "auto", "--authority", authority, "--tls-names", "gateway.example"]
    with command(
        "gateway", f"{model}", "--papers", papers[0], "--host", "0.0.0.0", "--port", "0", *tls
    ) as told:
        url = told["url"].replace("0.0.0.0", "localhost")
        assert url.startswith("https://")
        key = typed("keys", "issue", papers[0], "a friend")["key"]
        where = ["--host", "0.0.0.0", "--public", "127.0.0.1", "--announce", url, "--threads", "1"]
        anna = command("stage", f"{model}", "--blocks", "1-2", "--papers", papers[1], *where)
        ben = command("stage", f"{model}", "--blocks", "3", "--papers", papers[2], *where)
        trusted = ssl.create_default_context(cafile=f"{authority}/authority.pem")
        with anna, ben, asking(url, key, trusted) as friend:
            wait_for(f"{url}/healthz", trusted)
            answer = friend.completions.create(**ASKED_FOR, extra_body={"codec": "fp32"})
            text = "".join(blocktrain.generate(blocktrain.load(model), "The", length=24))
            assert answer.choices[0].text == text
            refused, doubted = openai.AuthenticationError, openai.APIConnectionError
            with asking(url, "bt-nobody", trusted) as stranger, pytest.raises(refused):
                stranger.completions.create(**ASKED_FOR)
            with asking(url, key, ssl.create_default_context()) as other, pytest.raises(doubted):
                other.completions.create(**ASKED_FOR)  # who does not know the authority
            typed("keys", "revoke", papers[0], "a friend")
            with pytest.raises(refused):
                friend.completions.create(**ASKED_FOR)


def asking(url: str, key: str, trusted: ssl.SSLContext) -> openai.OpenAI:
    """The real client, as docs/serving.md tells to make it."""
    http = openai.DefaultHttpxClient(verify=trusted, trust_env=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, http_client=http, max_retries=0)


def wait_for(url: str, trusted: ssl.SSLContext) -> None:
    """Until every block is served."""
    deadline = time.monotonic() + 30
    while httpx.get(url, verify=trusted, trust_env=False).status_code != 200:
        assert time.monotonic() < deadline, "not every block came to be served"
        time.sleep(0.1)


def test_a_model_is_served_with_one_command_and_outlives_a_stage(
    tmp_path: Path, model: Path
) -> None:
    home = tmp_path / "home"
    with command("serve", str(model), "--folder", str(home), "--port", "0") as told:
        text = completed(told["url"], codec="fp32")
        assert text == "".join(blocktrain.generate(blocktrain.load(model), "The", length=24))
        (last,) = (
            process
            for process in psutil.process_iter(["cmdline"])
            if "3-3" in (process.info["cmdline"] or []) and str(model) in process.info["cmdline"]
        )
        last.kill()
        deadline = time.monotonic() + 30
        while httpx.get(f"{told['url']}/healthz").status_code == 200:
            assert time.monotonic() < deadline, "nobody noticed"
        while httpx.get(f"{told['url']}/healthz").status_code != 200:
            assert time.monotonic() < deadline, "it was not started again"
        assert completed(told["url"], codec="fp32") == text


def test_what_keeps_a_child_from_starting_is_told(tmp_path: Path, model: Path) -> None:
    home = tmp_path / "home"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway = ["--open", "--port", str(taken.getsockname()[1])]
        crew = Serving(home, model)
        told = "gateway did not start: Cannot listen .* choose another --port"
        with pytest.raises(BadRun, match=told), crew.up(3, gateway):
            raise AssertionError
    crew = Serving(home, model, Cast(stages=1, weights="bf17"))
    with crew.up(3, ["--open", "--port", "0"]):
        with pytest.raises(BadRun, match=r"stage-1-3-1 did not start: .*bf17"):
            crew.wait_until_ready()
        with pytest.raises(BadRun, match="is served with"), Serving(home, model).up(3, []):
            raise AssertionError


def completed(url: str, **more: Any) -> str:
    """What a gateway makes of a prompt."""
    answer = httpx.post(f"{url}/v1/completions", json={**ASKED_FOR, **more}, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_members_of_a_run_serve_its_newest_checkpoint(tmp_path: Path, text: Corpus) -> None:
    """Stages and a gateway that know nothing but the run's URL and a token."""
    run = Run(shape=SHAPE)
    begin(tmp_path / "run", Settings("served", run), text)
    token = owners_token(tmp_path / "run")

    def member(name: str) -> list[str]:
        return ["--token", token, "--folder", str(tmp_path / name)]

    with command("coordinator", str(tmp_path / "run"), "--port", "0") as keeps:
        url = keeps["url"]
        one = command("stage", url, *member("one"), "--blocks", "1-2", "--threads", "1")
        two = command("stage", url, *member("two"), "--blocks", "auto", "--threads", "1")
        with one as first:
            time.sleep(2)  # until it stands on the list, so that the other sees what is missing
            with two as second, command("gateway", url, *member("g"), "--port", "0", "--open") as g:
                assert (first["blocks"], second["blocks"]) == ([1, 2], [3, 3])
                deadline = time.monotonic() + 30
                while httpx.get(f"{g['url']}/healthz").status_code != 200:
                    assert time.monotonic() < deadline
                assert len(completed(g["url"], mode="ar", echo=False)) > 0


def test_a_key_is_kept_and_a_certificate_is_new(tmp_path: Path) -> None:
    authority = authority_in(tmp_path / "owner")
    admit(authority, tmp_path / "host")
    key = (tmp_path / "host" / "member.key").read_bytes()
    certificate = (tmp_path / "host" / "member.pem").read_bytes()
    admit(authority_in(tmp_path / "owner"), tmp_path / "host")
    assert (tmp_path / "host" / "member.key").read_bytes() == key
    assert (tmp_path / "host" / "member.pem").read_bytes() != certificate
    assert member_in(tmp_path / "host").authority_pem == authority.pem


def test_two_cannot_be_one_member(tmp_path: Path, model: Path) -> None:
    admit(authority_in(tmp_path / "owner"), tmp_path / "host")
    first = belong(str(model), Pass(papers=tmp_path / "host"))
    with pytest.raises(BadRun, match="give another --papers"):
        belong(str(model), Pass(papers=tmp_path / "host"))
    first.close()
    belong(str(model), Pass(papers=tmp_path / "host")).close()


def test_without_papers_one_is_told_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(BadKey, match="blocktrain admit"):
        member_in(tmp_path)


@pytest.mark.parametrize(
    ("blocks", "stages", "spans"),
    [
        (4, 3, ["1-2", "3-3", "4-4"]),
        (4, 1, ["1-4"]),
        (8, 3, ["1-3", "4-6", "7-8"]),
        (3, 3, ["1-1", "2-2", "3-3"]),
    ],
)
def test_the_first_stages_hold_what_is_left_over(
    blocks: int, stages: int, spans: list[str]
) -> None:
    assert Cast(stages=stages).spans(blocks) == spans


def test_more_stages_than_blocks_cannot_be() -> None:
    with pytest.raises(BadInput, match="choose 1 to 4"):
        Cast(stages=5).spans(4)
