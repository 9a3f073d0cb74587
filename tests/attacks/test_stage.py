"""Liars, strangers and floods at a stage's door: refused with a reason, and nobody else notices.

The stages are real processes. While each attack goes on, a good gateway writes texts through them:
each must come out right and without a replay, and in the end the stage that was attacked must hold
no more memory than its limits allow.
"""

import asyncio
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.inference.network import (
    CUTS,
    SECRET,
    Board,
    Network,
    Process,
    Processes,
    Visitor,
    run,
    step,
    until,
    write,
)

from blocktrain.errors import BadInput
from blocktrain.inference import reach, traversals
from blocktrain.inference.links import new_name
from blocktrain.inference.local import LocalSession
from blocktrain.inference.pipeline import Pipeline, PipelineSession
from blocktrain.inference.session import Asked
from blocktrain.inference.stage import Stage
from blocktrain.wire import frame
from blocktrain.wire.certificates import make_authority
from blocktrain.wire.frame import Head
from blocktrain.wire.messages import Message
from blocktrain.wire.serving import (
    SERVING_PROTOCOL,
    Answer,
    Choice,
    Emit,
    Forget,
    Greeting,
    Hop,
    Ping,
    Place,
    Pong,
    Refusal,
    Trouble,
    Welcome,
)
from blocktrain.wire.tls import Papers

LENGTH = 8
LIMITS = {"sessions": 24, "links_per_peer": 8, "links": 64, "bodies": 4 * 2**20}
MEMORY = 48 * 2**20  # bytes that an attack may leave behind: read-ahead of all links, and malloc
PING = b'{"say":"ping","number":1}'


def framed(message: bytes, body: int = 0) -> bytes:
    """A frame that claims so long a body."""
    return frame.PREFIX.pack(len(message), body) + message


@dataclass
class Siege:
    """Three stages, and what one process writes with the same model."""

    network: Network
    stages: list[Process]
    text: bytes

    @property
    def first(self) -> Process:
        return self.stages[0]

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{stage.port}" for stage in self.stages]


@dataclass
class Good:
    """What goes on while an attack does."""

    pipeline: Pipeline
    session: PipelineSession
    """The newest text's."""
    seconds: list[float] = field(default_factory=list)
    """That each step took."""
    texts: list[bytes] = field(default_factory=list)
    replayed: int = 0


@pytest.fixture(scope="module")
def siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    network = Network(tmp_path_factory.mktemp("siege") / "network")

    async def local() -> bytes:
        return (await write(LocalSession(network.span(0, 2)), LENGTH))[0]

    text = asyncio.run(local())
    for cut in CUTS:
        network.span(*cut)
    processes = Processes(network)
    yield Siege(network, [processes.start(*cut, limits=LIMITS) for cut in CUTS], text)
    processes.close()


@asynccontextmanager
async def attacked(siege: Siege, slowest: float = 1.0) -> AsyncIterator[Good]:
    """A good gateway before, during and after what happens in here."""
    async with siege.network.pipeline(siege.addresses) as pipeline:
        good = Good(pipeline, await pipeline.session("fp32"))
        over = asyncio.Event()

        async def writing() -> None:
            while not over.is_set():
                found, told = await write(good.session, LENGTH)
                good.texts.append(found)
                good.seconds += [said.seconds for said in told]
                good.replayed += sum(said.replayed for said in told)
                await good.session.close()
                good.session = await pipeline.session("fp32")

        task = asyncio.create_task(writing())
        await until(lambda: len(good.texts) >= 2 or task.done())
        before = [stage.memory() for stage in siege.stages]
        good.seconds.clear()
        yield good
        count = len(good.texts)
        await until(lambda: len(good.texts) >= count + 2 or task.done())
        over.set()
        await task
        assert set(good.texts) == {siege.text}
        assert good.replayed == 0
        assert max(good.seconds) < slowest
        for stage, bytes_ in zip(siege.stages, before, strict=True):
            assert stage.memory() - bytes_ < MEMORY


# Who comes without the right papers.


def shown(papers: Papers | None) -> ssl.SSLContext:
    """A client that believes anybody and shows these papers, if any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if papers:
        context.load_cert_chain(*papers)
    return context


def what_is_got(port: int, context: ssl.SSLContext) -> bytes:
    """What a stranger hears after a handshake of his and a greeting."""
    greeting = msgspec.json.encode(Greeting(SERVING_PROTOCOL, new_name("ab" * 32)))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        suppress(ssl.SSLError, ConnectionError),
        context.wrap_socket(plain) as link,
    ):
        link.sendall(framed(greeting))
        return link.recv(1000)
    return b""


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        ("nobody", "peer did not return a certificate"),
        ("another authority's", "certificate verify failed"),
        ("an ended one", "certificate verify failed"),
        ("the coordinator's", "certificate verify failed"),
        ("the authority's own", "certificate verify failed"),
    ],
)
def test_who_is_not_of_the_run_gets_nothing(
    siege: Siege, tmp_path: Path, who: str, reason: str
) -> None:
    network = siege.network

    def papers() -> Papers | None:
        match who:
            case "nobody":
                return None
            case "another authority's":
                return network.papers(make_authority(tmp_path, "other"))
            case "an ended one":
                return network.papers(life=timedelta(seconds=-1))
            case "the coordinator's":
                return network.authority.issue_server(["localhost"], tmp_path)
        return Papers(network.folder / "authority.pem", network.folder / "authority.key")

    async def test() -> None:
        context = shown(papers())
        async with attacked(siege):
            assert await asyncio.to_thread(what_is_got, siege.first.port, context) == b""
        async with network.stage(network.span(0, 0)) as here:  # whose reasons can be seen
            assert await asyncio.to_thread(what_is_got, here.port, context) == b""
            await until(lambda: bool(here.report().refused))
            [(found, count)] = here.report().refused.items()
            assert reason in found
            assert count == 1
            assert here.report().links == 0

    run(test)


def test_a_gateway_and_a_stage_of_different_runs_do_not_speak(siege: Siege, tmp_path: Path) -> None:
    other = make_authority(tmp_path, "other")
    blocks, network = siege.network.span(0, 2), siege.network

    async def test() -> None:
        stage = Stage(blocks, network.papers(other), other.pem)
        async with stage, network.pipeline([f"127.0.0.1:{stage.port}"]) as pipeline:
            await until(lambda: bool(pipeline.troubles))
            assert "does not answer" in pipeline.troubles[0]
            assert pipeline.report() == []
            assert stage.report().links == 0

    run(test)


@pytest.mark.parametrize(
    "garbage",
    [b"\x16\x03\x01\xff\xff" + bytes(70_000), b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000)],
)
def test_what_is_no_tls_is_hung_up_on(siege: Siege, garbage: bytes) -> None:
    def get() -> bytes:
        with socket.create_connection(("127.0.0.1", siege.first.port), timeout=10) as plain:
            got = b""
            with suppress(ConnectionError):
                plain.sendall(garbage)
                while piece := plain.recv(1000):
                    got += piece
        return got

    async def test() -> None:
        async with attacked(siege):
            begun = time.monotonic()
            assert len(await asyncio.to_thread(get)) < 20  # at most an alert
            assert time.monotonic() - begun < 6  # a handshake's time, if it looked like one

    run(test)


# Who has papers, and says what cannot be.


GARBAGE = {
    "huge message": frame.PREFIX.pack(2**32 - 1, 0),
    "empty message": frame.PREFIX.pack(0, 0),
    "huge body": framed(PING, 2**32 - 1),
    "unexpected body": framed(PING, 1) + b"x",
    "no JSON": framed(os.urandom(100)),
    "deep JSON": framed(b"[" * 60_000),
    "unknown": framed(b'{"say":"hello"}'),
    "wrong type": framed(b'{"say":"ping","number":"many"}'),
    "an answer": framed(
        b'{"say":"answer","session":"%s","number":1,"drafted":[],"bytes":[],"logs":[],"hops":[]}'
        % SECRET.encode()
    ),
    "a welcome": framed(b'{"say":"refusal","words":"I will not talk to you"}'),
}


@pytest.mark.parametrize("what", GARBAGE)
@pytest.mark.parametrize("greeted", [False, True])
def test_garbage_is_refused_with_a_reason(siege: Siege, what: str, greeted: bool) -> None:
    async def test() -> None:
        async with attacked(siege), siege.network.visitor() as liar:
            stage = siege.stages[1]
            await (liar.visit if greeted else liar.come_in)(stage.port, stage.id)
            if greeted:
                assert isinstance(await liar.hear(), Welcome)
            liar.raw(GARBAGE[what])
            refusal = await liar.hear()
            assert isinstance(refusal, Refusal)
            assert len(refusal.words) > 20
            assert await liar.hear() is None

    run(test)


def test_a_step_with_a_body_of_another_length_is_refused_before_it_comes(siege: Siege) -> None:
    async def test() -> None:
        async with attacked(siege), siege.network.visitor() as liar:
            stage = siege.stages[1]
            for claimed in (0, 127, 129, 2**30):
                await liar.visit(stage.port, stage.id)
                assert isinstance(await liar.hear(), Welcome)
                message = msgspec.json.encode(step(liar.name, [65], hops=[Hop(liar.id, 0, 0, 0)]))
                liar.raw(framed(message, claimed))
                assert "it must have 128" in (await liar.hear()).words
                assert await liar.hear() is None

    run(test)


# Who comes slowly, or not at all.


def test_slow_ones_are_sent_away_in_time_and_hold_nobody_up(siege: Siege) -> None:
    """A handshake that never begins, a greeting and a message that drip in, a body that does."""
    limit = frame.PATIENCE + 2

    async def ends(reader: asyncio.StreamReader, begun: float) -> float:
        with suppress(OSError):
            while await reader.read(1000):
                pass
        return time.monotonic() - begun

    async def drip(liar: Visitor, data: bytes) -> float:
        """Says one byte after another until it is sent away; returns when that was."""
        begun, link = time.monotonic(), liar.links[-1]
        for number in range(len(data)):
            liar.raw(data[number : number + 1])
            await asyncio.sleep(0.25)
            if not link.open or time.monotonic() - begun > limit:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    head = await link.hear()
                    assert head is None or isinstance(head.said, Refusal)
                    break
        return time.monotonic() - begun

    async def test() -> None:
        stage = siege.stages[2]
        async with attacked(siege), siege.network.visitor() as liar:
            silent = [await asyncio.open_connection("127.0.0.1", stage.port) for _ in range(5)]
            waiting = [asyncio.create_task(ends(r, time.monotonic())) for r, _ in silent]
            liars = [siege.network.visitor() for _ in range(3)]
            await liars[0].come_in(stage.port, stage.id)
            for each in liars[1:]:
                await each.visit(stage.port, stage.id)
                assert isinstance(await each.hear(), Welcome)
            asked = step(liars[2].name, [65], hops=[Hop(liars[2].id, 0, 0, 0)])
            body = framed(msgspec.json.encode(asked), 128)
            liars[2].raw(body)
            greeting = msgspec.json.encode(Greeting(SERVING_PROTOCOL, liar.name))
            took = await asyncio.gather(
                drip(liars[0], framed(greeting)),
                drip(liars[1], framed(PING)),
                drip(liars[2], bytes(128)),
                *waiting,
            )
            assert max(took) < limit, took
            for _, writer in silent:
                writer.close()
            for each in liars:
                await each.__aexit__()

    run(test)


def test_a_crowd_of_strangers_at_the_door_does_not_keep_members_out(siege: Siege) -> None:
    """400 connections that never begin a handshake."""

    async def test() -> None:
        stage = siege.first
        async with attacked(siege):
            crowd = []
            try:
                for _ in range(400):
                    crowd.append(await asyncio.open_connection("127.0.0.1", stage.port))
                begun = time.monotonic()
                async with siege.network.visitor() as member:
                    await member.visit(stage.port, stage.id)
                    assert isinstance(await member.hear(), Welcome)
                assert time.monotonic() - begun < 2
            finally:
                for _, writer in crowd:
                    writer.transport.abort()

    run(test)


def test_who_never_reads_is_cut_off(siege: Siege) -> None:
    """As a host that froze: its answers pile up, but not without end."""

    async def test() -> None:
        stage = siege.first
        async with attacked(siege), siege.network.visitor() as frozen:
            await frozen.visit(stage.port, stage.id)
            await frozen.hear()
            frozen.links[-1]._writer.transport.pause_reading()  # type: ignore[attr-defined]
            sock = frozen.links[-1]._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            many = b"".join([framed(PING)] * 2000)
            end = time.monotonic() + 30
            while frozen.links[-1].open and time.monotonic() < end:
                frozen.raw(many)
                with suppress(OSError, TimeoutError):
                    async with asyncio.timeout(5):
                        await frozen.links[-1]._writer.drain()
            assert not frozen.links[-1].open

    run(test)


# Floods.


def test_a_flood_of_texts_is_refused_and_takes_nobodys_room(siege: Siege) -> None:
    """One gateway begins 500 texts through all stages, which have room for 24."""

    async def test() -> None:
        async with attacked(siege, slowest=2.0) as good, siege.network.visitor() as flood:
            for stage in reversed(siege.stages):
                await flood.visit(stage.port, stage.id)
                assert isinstance(await flood.hear(), Welcome)
            route = [Place(s.id, "127.0.0.1", s.port) for s in siege.stages[1:]]
            last = flood.links[0]
            answered = asyncio.create_task(drained(last))
            refused = 0
            for text in range(500):
                flood.say(step(flood.name, [65] * 40, route=route, session=f"{text:032x}"))
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        said = await flood.hear()
                        assert isinstance(said, Trouble)
                        assert said.reason == "busy"
                        refused += 1
            assert refused > 50
            assert all(stage.sessions <= 24 for stage in good.pipeline.report())
            answered.cancel()
            await asyncio.gather(answered, return_exceptions=True)

    async def drained(link: Any) -> None:
        while head := await link.hear():
            await link.body(head, 0)

    run(test)


def test_a_flood_of_links_is_refused(siege: Siege) -> None:
    async def test() -> None:
        stage = siege.stages[1]
        async with attacked(siege), siege.network.visitor() as flood:
            said = []
            for _ in range(20):
                await flood.visit(stage.port, stage.id)
                said.append(await flood.hear())
            assert sum(isinstance(each, Welcome) for each in said) == 8
            assert all("links" in each.words for each in said if isinstance(each, Refusal))

    run(test)


def test_a_flood_of_pings_holds_nobody_up(siege: Siege) -> None:
    async def test() -> None:
        stage = siege.first
        async with attacked(siege), siege.network.visitor() as flood:
            await flood.visit(stage.port, stage.id)
            await flood.hear()
            for _ in range(10):
                flood.raw(framed(PING) * 500)
                for _ in range(500):
                    assert isinstance(await flood.hear(), Pong)

    run(test)


# Who knows what he should not: another gateway's name and its text's secret.


def test_a_stolen_secret_opens_nothing(siege: Siege) -> None:
    """He may ask, forget and pretend as he likes: it is always about a text of his own."""

    async def test() -> None:
        async with attacked(siege) as good, siege.network.visitor() as thief:
            stage = siege.first
            await thief.visit(stage.port, stage.id)
            assert isinstance(await thief.hear(), Welcome)
            for number in range(40):
                route = good.session._route
                assert route
                stolen: dict[str, Any] = {"session": route.secret}
                stolen["number"] = good.session._number + 1
                thief.say(Forget(route.secret))
                thief.say(step(thief.name, [65], start=5, **stolen))
                assert (await thief.hear()).reason == "forgotten", number
                thief.say(step(good.pipeline.name, [65], **stolen))
                trouble = await thief.hear()
                assert trouble.reason == "wrong"
                assert "somebody else's name" in trouble.words
                await asyncio.sleep(0.01)

    run(test)


def test_nobody_waits_under_anothers_name(siege: Siege) -> None:
    async def test() -> None:
        async with attacked(siege) as good, siege.network.visitor() as thief:
            for stage in siege.stages:
                await thief.come_in(stage.port, stage.id)
                thief.say(Greeting(SERVING_PROTOCOL, good.pipeline.name))
                assert "somebody else's" in (await thief.hear()).words
                assert await thief.hear() is None

    run(test)


def test_an_answer_that_somebody_else_asked_for_is_not_believed(
    siege: Siege, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member plays the stage before the last, and has it answer into another's text."""
    original, forgeries = traversals.take_answer, list[int]()

    def watched(waiting: Any, said: Answer, body: bytes) -> None:
        if [hop.stage for hop in said.hops] != waiting.route.ids:
            forgeries.append(said.number)
        original(waiting, said, body)

    monkeypatch.setattr(traversals, "take_answer", watched)

    async def test() -> None:
        async with attacked(siege) as good, siege.network.visitor() as thief:
            last = siege.stages[2]
            await thief.visit(last.port, last.id)
            assert isinstance(await thief.hear(), Welcome)
            rows = os.urandom(32)
            for _ in range(60):
                route = good.session._route
                assert route
                for number in (good.session._number, good.session._number + 1):
                    forged = step(
                        good.pipeline.name,
                        [65],
                        session=route.secret,
                        number=number,
                        codec="int8",
                        hops=[Hop(siege.first.id, 0, 0, 0), Hop(thief.id, 0, 0, 0)],
                    )
                    thief.say(forged, bytes(4) + rows)
                await asyncio.sleep(0.01)
            assert forgeries  # some came in time to be taken for an answer

    run(test)


# Stages that lie to gateways.


class Liar(Stage):
    """Answers every step with what it likes."""

    def answer(self, asked: Any) -> tuple[Message, bytes]:
        raise NotImplementedError

    async def _hear(self, guest: Any, head: Head) -> None:
        if isinstance(head.said, Ping):
            await super()._hear(guest, head)
            return
        await guest.link.body(head, head.body)
        if not isinstance(head.said, Forget):
            said, body = self.answer(head.said)
            guest.link.say(said, body)


LIES = {
    "too many bytes": lambda s, me: (answer(s, me, bytes=[1] * 9, logs=[0.0] * 9), b""),
    "no logs": lambda s, me: (answer(s, me, bytes=[1], logs=[]), b""),
    "a draft nobody asked for": lambda s, me: (
        answer(s, me, drafted=[1], bytes=[1, 1], logs=[0.0, 0.0]),
        b"",
    ),
    "an unexpected body": lambda s, me: (answer(s, me, bytes=[1], logs=[0.0]), bytes(10**6)),
    "a question": lambda s, me: (Ping(1), b""),
    "a greeting": lambda s, me: (Greeting(1, SECRET), b""),
    "busy": lambda s, me: (Trouble(s.session, s.number, "busy", me, "no"), b""),
    "forgotten": lambda s, me: (Trouble(s.session, s.number, "forgotten", me, "no"), b""),
    "wrong": lambda s, me: (Trouble(s.session, s.number, "wrong", me, "no"), b""),
    "another to blame": lambda s, me: (Trouble(s.session, s.number, "busy", "ab" * 32, "no"), b""),
}


def answer(asked: Any, me: str, **told: Any) -> Answer:
    fields: dict[str, Any] = {"drafted": [], "bytes": [], "logs": []}
    return Answer(asked.session, asked.number, **{**fields, **told}, hops=[Hop(me, 0, 0, 0)])


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_stage_is_left_for_an_honest_one(
    siege: Siege, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "LOOK_EVERY", 0.05)
    network = siege.network

    class ThisLiar(Liar):
        def answer(self, asked: Any) -> tuple[Message, bytes]:
            made: tuple[Message, bytes] = LIES[lie](asked, self.id)  # type: ignore[no-untyped-call]
            return made

    async def test() -> None:
        blocks, board = network.span(0, 2), Board()
        liar = ThisLiar(blocks, network.papers(), network.authority.pem)
        async with liar, network.stage(blocks) as honest, network.pipeline(board) as pipeline:
            board.put(liar)
            session = await pipeline.session("fp32")
            board.put(honest)
            await until(lambda: any(s.stage == honest.id for s in pipeline.report()))
            board.take(liar)
            found, told = await write(session, LENGTH)
            assert found == siege.text
            assert told[0].replayed >= 1
            assert [hop.stage for hop in told[0].hops] == [honest.id]

    run(test)


@pytest.mark.parametrize("reason", ["forgotten", "busy", "unreachable"])
def test_who_blames_others_is_found_out(
    siege: Siege, reason: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage in the middle of the route says that the last one fails."""
    monkeypatch.setattr(reach, "LOOK_EVERY", 0.05)
    network = siege.network
    first, middle, last = siege.stages

    class Slanderer(Liar):
        def answer(self, asked: Any) -> tuple[Message, bytes]:
            return Trouble(asked.session, asked.number, reason, last.id, "no"), b""

    async def test() -> None:
        liar = Slanderer(network.span(1, 1), network.papers(), network.authority.pem)
        board = Board()
        async with liar, network.pipeline(board) as pipeline:
            board.put(first, liar, last)
            session = await pipeline.session("fp32")
            board.put(middle)
            await until(lambda: len(pipeline.report()) == 4)
            found, told = await write(session, LENGTH)
            assert found == siege.text
            assert told[0].replayed >= 1
            assert {said.hops[1].stage for said in told} == {middle.id}

    run(test)


def test_what_a_stage_refuses_is_told_to_whoever_asked(siege: Siege) -> None:
    async def test() -> None:
        async with siege.network.pipeline(siege.addresses) as pipeline:
            session = await pipeline.session("fp32")
            with pytest.raises(BadInput, match="A stage refuses this step"):
                await session.step(Asked(0, [65] * 40, 1, draft=60, choice=Choice(0, 1, 0, 0)))
            with pytest.raises(BadInput, match="not trained"):
                await session.emit([10, 65], (0, 2), Choice(0, 1, 0, 0))
            assert (await write(session, LENGTH))[0] == siege.text

    run(test)


def test_an_emit_that_cannot_be_is_refused(siege: Siege) -> None:
    async def test() -> None:
        async with siege.network.visitor() as liar:
            await liar.visit(siege.first.port, siege.first.id)
            await liar.hear()
            for span in ((3, 3), (2, 1), (0, 9), (0, 2**50)):
                choice = Choice(0, 1, 0, 0)
                liar.say(Emit(SECRET, 1, liar.name, [], [65] * 4, span, choice, "fp32", False, []))
                trouble = await liar.hear()
                assert (trouble.reason, "span" in trouble.words) == ("wrong", True)

    run(test)
