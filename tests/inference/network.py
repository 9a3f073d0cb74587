"""A serving network for tests: an authority and its members, a tiny model, stages and pipelines."""

import asyncio
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import psutil
import torch

from blocktrain.config import environment
from blocktrain.inference.links import Link, Trust, dial, new_name
from blocktrain.inference.pipeline import Pipeline
from blocktrain.inference.reach import Source
from blocktrain.inference.session import Asked, Said, Session
from blocktrain.inference.span import Span
from blocktrain.inference.stage import Limits, Stage
from blocktrain.inference.work import Blocks
from blocktrain.learning.files import save_model
from blocktrain.learning.model import START, Model, Shape, new_block
from blocktrain.learning.noise import Noise
from blocktrain.terms import Digest
from blocktrain.wire.certificates import MEMBER_LIFE, Authority, make_authority
from blocktrain.wire.messages import Message
from blocktrain.wire.serving import Announce, Choice, Holding, Place, Step, Welcome
from blocktrain.wire.signing import new_key, save_key
from blocktrain.wire.tls import Papers, member_host

SMALL = Shape(blocks=3, layers=1, width=32, heads=2, window=48)
PROMPT = b"The river"
SECRET = "5e" * 16
NOTHING = Holding(Digest("0" * 64), 0, 0, "fp32", "")
CUTS = [(0, 0), (1, 1), (2, 2)]
"""Three stages of one block each."""


def living_model(shape: Shape) -> Model:
    """Random and alive: heads, gates and norms included."""
    random = torch.Generator().manual_seed(7)
    blocks = [new_block(shape, index, seed=3) for index in range(shape.blocks)]
    for block in blocks:
        for parameter in block.parameters():
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=random)
    return Model(shape, Noise(), [block.requires_grad_(False) for block in blocks])


class Network:
    """A run's authority, and a model that its members serve."""

    def __init__(self, folder: Path, shape: Shape = SMALL) -> None:
        self.folder, self.shape = folder, shape
        folder.mkdir(parents=True)
        self.authority = make_authority(folder, "test")
        self.model, self.cache = folder / "model", str(folder / "cache")
        self.digest = save_model(living_model(shape), self.model).digest
        self._numbers = itertools.count()
        self._spans: dict[tuple[int, int], Span] = {}

    def papers(self, authority: Authority | None = None, life: timedelta = MEMBER_LIFE) -> Papers:
        """Of a new member."""
        key, number = new_key(), next(self._numbers)
        papers = Papers(self.folder / f"{number}.pem", self.folder / f"{number}.key")
        papers.certificate.write_bytes((authority or self.authority).issue_member(key.id, life))
        save_key(key, papers.key)
        return papers

    def span(self, first: int, last: int) -> Span:
        """Opened once: a span keeps nothing of what it computes."""
        if (first, last) not in self._spans:
            with patch.dict(os.environ, BLOCKTRAIN_CACHE=self.cache):
                self._spans[first, last] = Span.open(self.model, first, last)
        return self._spans[first, last]

    def stage(self, blocks: Blocks, limits: Limits | None = None, port: int = 0) -> Stage:
        """A stage in this process."""
        return Stage(
            blocks, self.papers(), self.authority.pem, "127.0.0.1", port, limits or Limits()
        )

    def pipeline(self, source: Source) -> Pipeline:
        """A gateway's."""
        return Pipeline(self.shape, self.digest, self.papers(), self.authority.pem, source)

    @asynccontextmanager
    async def serving(self, *cuts: tuple[int, int]) -> AsyncIterator[list[Stage]]:
        """Stages in this process, one for each span."""
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self.stage(self.span(*cut))) for cut in cuts]

    def visitor(self, papers: Papers | None = None) -> "Visitor":
        """Somebody with papers who speaks for himself."""
        return Visitor(Trust(papers or self.papers(), self.authority.pem))

    @asynccontextmanager
    async def guest(self, stage: Stage) -> AsyncIterator["Visitor"]:
        """One who has been welcomed."""
        async with self.visitor() as visitor:
            await visitor.visit(stage.port, stage.id)
            assert isinstance(await visitor.hear(), Welcome)
            yield visitor


class Visitor:
    """Somebody with papers and one link, over which he says what he likes."""

    def __init__(self, trust: Trust) -> None:
        self.trust, self.name = trust, new_name(trust.id)
        self.links: list[Link] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for link in self.links:
            link.abort()
            await link.closed()

    @property
    def id(self) -> str:
        return self.trust.id

    async def visit(self, port: int, stage: str) -> None:
        """Opens a link and greets."""
        self.links.append(await dial(self.trust, self.name, "127.0.0.1", port, stage))

    async def come_in(self, port: int, stage: str) -> None:
        """Opens a link and says nothing."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=self.trust.asking, server_hostname=member_host(stage)
        )
        self.links.append(Link(reader, writer))

    def say(self, said: Message, body: bytes = b"") -> None:
        self.links[-1].say(said, body)

    def raw(self, data: bytes) -> None:
        """Says what is no proper frame."""
        self.links[-1]._writer.write(data)

    async def hear(self, body: int = 0) -> Any:
        """What comes next on the newest link; None: it has ended."""
        async with asyncio.timeout(10):
            head = await self.links[-1].hear()
            if head:
                self.body = await self.links[-1].body(head, body)
        return head.said if head else None


def addresses(stages: Sequence[Stage]) -> list[str]:
    """A fixed list for a pipeline."""
    return [f"127.0.0.1:{stage.port}" for stage in stages]


@asynccontextmanager
async def far(stage: Stage, delay: float) -> AsyncIterator[str]:
    """A stage's address from which everything, either way, comes so many seconds later."""
    tasks: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

        async def read() -> None:
            data = b"-"
            while data:
                with suppress(ConnectionError):
                    data = await reader.read(65536)
                queue.put_nowait((loop.time() + delay, data))

        reading = asyncio.create_task(read())
        try:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(due - loop.time())
                if not data:
                    break
                writer.write(data)
        finally:
            reading.cancel()
            writer.close()

    def passes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def both() -> None:
            there = await asyncio.open_connection("127.0.0.1", stage.port)
            await asyncio.gather(carry(reader, there[1]), carry(there[0], writer))

        tasks.add(asyncio.create_task(both()))

    async with await asyncio.start_server(passes, "127.0.0.1", 0) as server:
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Process:
    """A stage in a process of its own."""

    def __init__(self, pid: int, port: int, id: str) -> None:
        self.pid, self.port, self.id = pid, port, id
        self._handle = os.pidfd_open(pid)

    def send(self, how: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, how)

    def over(self, within: float = 0.0) -> bool:
        """Whether it has ended, or does within so many seconds."""
        return bool(select.select([self._handle], [], [], within)[0])

    def memory(self) -> int:
        """Bytes that it holds in memory now."""
        rss: int = psutil.Process(self.pid).memory_info().rss
        return rss

    def end_by(self, how: signal.Signals) -> None:
        """Ends it, and waits for that."""
        self.send(how)
        assert self.over(within=20)

    def close(self) -> None:
        self.end_by(signal.SIGKILL)
        os.close(self._handle)


class Processes:
    """Starts stages in processes of their own."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._all: list[Process] = []
        self._parent = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("stage_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(BLOCKTRAIN_CACHE=network.cache),
        )

    def start(self, first: int, last: int, papers: Papers | None = None, **told: Any) -> Process:
        """A stage that serves these blocks; see stage_process.Told."""
        papers = papers or self.network.papers()
        line = {
            "model": str(self.network.model),
            "first": first,
            "last": last,
            "certificate": str(papers.certificate),
            "key": str(papers.key),
            "authority": str(self.network.folder / "authority.pem"),
            **told,
        }
        assert self._parent.stdin
        assert self._parent.stdout
        self._parent.stdin.write(json.dumps(line) + "\n")
        self._parent.stdin.flush()
        process = Process(**json.loads(self._parent.stdout.readline()))
        self._all.append(process)
        return process

    def close(self) -> None:
        """No stage goes on."""
        assert self._parent.stdin
        assert self._parent.stdout
        for process in self._all:
            process.close()
        self._parent.stdin.close()
        self._parent.wait()
        self._parent.stdout.close()


class Board:
    """A source that can be written on while pipelines read it."""

    def __init__(self) -> None:
        self.places: dict[str, Announce] = {}

    def put(self, *stages: Stage | Process) -> None:
        """Names stages; what they hold, they say themselves."""
        for stage in stages:
            place = Place(stage.id, "127.0.0.1", stage.port)
            self.places[stage.id] = Announce(place, NOTHING, 0, 8)

    def take(self, stage: Stage | Process) -> None:
        del self.places[stage.id]

    async def __call__(self) -> list[Announce]:
        return list(self.places.values())


def step(name: str, tokens: list[int], start: int = 0, **told: Any) -> Step:
    """What a gateway of this name says to a stage that holds everything."""
    fields: dict[str, Any] = {
        "session": SECRET,
        "number": 1,
        "gateway": name,
        "route": [],
        "start": start,
        "tokens": tokens,
        "wanted": 1,
        "draft": 0,
        "codec": "fp32",
        "choice": Choice(0.8, 0.95, 11, 0),
        "hops": [],
    }
    return Step(**{**fields, **told})


async def write(
    session: Session, length: int, draft: int = 0, temperature: float = 0.8, prompt: bytes = PROMPT
) -> tuple[bytes, list[Said]]:
    """A text, byte by byte or by drafts, beyond the window if it is long; and each traversal."""
    window = session.shape.window
    text, made, told = [START, *prompt], list[int](), list[Said]()
    start, unread = 0, list(text)
    while len(made) < length:
        if start + len(unread) > window:
            start, unread = 0, text[-window // 2 :]
        choice = Choice(temperature, 0.95, 11, len(made))
        room = min(draft, window - start - len(unread))
        said = await session.step(Asked(start, unread, 1, room, choice))
        assert len(said.bytes) == len(said.logs) == 1 + len(said.drafted)
        new = said.bytes[:1]
        for drafted, byte in zip(said.drafted, said.bytes[1:], strict=True):
            if drafted != new[-1]:
                break
            new.append(byte)
        start += len(unread) + len(new) - 1
        unread = new[-1:]
        text += new
        made += new
        told.append(said)
    return bytes(made[:length]), told


async def until(true: Callable[[], bool], within: float = 5.0) -> None:
    """Waits for something that must become true."""
    end = time.monotonic() + within
    while not true():
        assert time.monotonic() < end, "it did not become true in time"
        await asyncio.sleep(0.01)


def run(
    test: Callable[[], Awaitable[None]],
    loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> None:
    """An asynchronous test, in an event loop of its own that complains about what is left over."""

    async def main() -> None:
        await test()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, f"still running: {left}"

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
