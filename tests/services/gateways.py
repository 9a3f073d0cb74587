"""A gateway on a real socket in a thread, over a model in this process whose every step obeys."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from tests.inference.network import living_model

from blocktrain.commands.listen import Listen, listening
from blocktrain.inference.decode import Sampling, generate
from blocktrain.inference.local import LocalSession
from blocktrain.inference.pipeline import StageReport
from blocktrain.inference.session import Asked, Said, Watch
from blocktrain.inference.span import Span
from blocktrain.learning.model import Model, Shape
from blocktrain.services.coordinator.door import Head
from blocktrain.services.gateway import Gateway
from blocktrain.services.gateway.app import House
from blocktrain.wire.certificates import Authority
from blocktrain.wire.serving import Choice, Codec
from blocktrain.wire.tls import client_context

NAME = "tiny"
PROMPT = "The river"
SHAPE = Shape(blocks=3, layers=1, width=16, heads=1, window=32)
DENOISE = Shape("denoise", blocks=3, layers=1, width=16, heads=1, window=32)
Serve = Callable[..., "Served"]


@dataclass
class Here:
    """A model in this process as a gateway's source: a span for each block, as if on hosts."""

    model: Model
    pause: float = 0.0
    """Seconds that every traversal takes besides."""
    held: bool = False
    """Whether traversals wait until this is over."""
    fail_at: int | None = None
    """The traversal, from 1, that goes wrong."""
    failure: Exception = field(default_factory=lambda: AssertionError("a bug"))
    begun: list[Codec] = field(default_factory=list)
    open: int = 0
    log: list[int] = field(default_factory=list)
    """Of each traversal, which session made it."""
    troubles: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.spans = [Span.of(self.model, n, n) for n in range(self.model.shape.blocks)]

    @property
    def shape(self) -> Shape:
        return self.model.shape

    async def session(self, codec: Codec) -> "Session":
        self.begun.append(codec)
        self.open += 1
        return Session(self, len(self.begun))

    def report(self) -> list[StageReport]:
        return [
            StageReport(
                stage=f"{n:064x}", address=f"10.0.0.{n + 1}:9000", first=n, last=n,
                weights="fp32", rtt_ms=0.0, sessions=self.open, room=8, queued=0, step_ms=None,
                silent=0.0,
            )
            for n in range(self.shape.blocks)
        ]  # fmt: skip

    async def obey(self, session: int) -> None:
        self.log.append(session)
        while self.held:
            await asyncio.sleep(0.002)
        await asyncio.sleep(self.pause)
        if self.fail_at is not None and self.log.count(session) >= self.fail_at:
            raise self.failure


class Session:
    """One text of `Here`."""

    def __init__(self, here: Here, number: int) -> None:
        self.here, self.number = here, number
        self.local = LocalSession(here.spans)

    @property
    def shape(self) -> Shape:
        return self.here.shape

    async def step(self, asked: Asked) -> Said:
        await self.here.obey(self.number)
        return await self.local.step(asked)

    async def emit(
        self, tokens: list[int], span: tuple[int, int], choice: Choice, watch: Watch | None = None
    ) -> Said:
        await self.here.obey(self.number)
        return await self.local.emit(tokens, span, choice, watch)

    async def close(self) -> None:
        self.here.open -= 1
        await self.local.close()


@dataclass
class Served:
    """A gateway that is up."""

    url: str
    gateway: Gateway
    source: Any
    authority: Authority | None = None
    clients: list[openai.OpenAI] = field(default_factory=list)

    @property
    def here(self) -> Here:
        assert isinstance(self.source, Here)
        return self.source

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":")[2].split("/")[0])

    @property
    def trust(self) -> Any:
        return client_context(self.authority.pem) if self.authority else True

    def http(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, verify=self.trust, trust_env=False, **more)

    def socket(self, small: bool = False) -> socket.socket:
        """A bare connection; a small one has no room for what it does not read."""
        sock = socket.socket()
        if small:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect(("127.0.0.1", self.port))
        return sock

    def client(self, key: str = "none", retries: int = 0) -> openai.OpenAI:
        """The real one, from PyPI."""
        client = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            max_retries=retries,
            http_client=openai.DefaultHttpxClient(verify=self.trust, trust_env=False),
        )
        self.clients.append(client)
        return client


@contextmanager
def serving(
    source: Any, house: House, authority: Authority | None = None, base_path: str = ""
) -> Iterator[Served]:
    """A gateway in a thread of this process, as the command would run it."""
    gateway = Gateway(source, house)
    with listening(Listen(port=0, base_path=base_path)) as (sock, url):
        papers = None
        if authority:
            folder = Path(house.keys.path.parent if house.keys else "/nowhere")
            papers = authority.server_certificate(["127.0.0.1", "localhost"], folder)
            url = url.replace("http://", "https://")
        config = uvicorn.Config(
            gateway.app(base_path),
            log_config=None,
            timeout_graceful_shutdown=1,
            http=Head,
            ssl_certfile=papers.certificate if papers else None,
            ssl_keyfile=papers.key if papers else None,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            until(lambda: server.started or not thread.is_alive())
            served = Served(url, gateway, source, authority)
            yield served
            for client in served.clients:
                client.close()
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def model() -> Model:
    return living_model(SHAPE)


@pytest.fixture(scope="module")
def denoising() -> Model:
    return living_model(DENOISE)


@pytest.fixture
def serve(model: Model) -> Iterator[Serve]:
    """A gateway of one's own."""
    with ExitStack() as stack:

        def make(*told: Any, of: Model = model, base_path: str = "", **house: Any) -> Served:
            source = told[0] if told else Here(of)
            return stack.enter_context(serving(source, House(NAME, **house), base_path=base_path))

        yield make


@cache
def bytes_of(shape: Shape, temperature: float, seed: int) -> bytes:
    """What the model says, byte by byte in this thread; shorter texts begin the same way."""
    sampling = Sampling(temperature, 1.0, seed, 48)
    return bytes(generate(living_model(shape), PROMPT.encode(), sampling))


def sampled(**more: Any) -> dict[str, Any]:
    """A request."""
    return {
        "model": NAME, "prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 5, **more
    }  # fmt: skip


@contextmanager
def meanwhile(served: Served, path: str = "v1/completions", **body: Any) -> Iterator[list[int]]:
    """Somebody else asks, and gets the answer before this is over; gives the status then."""
    status: list[int] = []

    def ask() -> None:
        with served.http(timeout=20) as http:
            status.append(http.post(path, json=body).status_code)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield status
    finally:
        thread.join()


def until(true: Callable[[], bool], within: float = 5.0) -> None:
    """Waits for something that must become true."""
    end = time.monotonic() + within
    while not true():
        assert time.monotonic() < end, "it did not become true in time"
        time.sleep(0.005)
