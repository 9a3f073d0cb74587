"""A stage over real links: what it computes, what it remembers, whom it serves."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.inference.network import (
    CUTS,
    SECRET,
    Network,
    addresses,
    run,
    step,
    until,
    write,
)

from blocktrain.errors import Unreachable
from blocktrain.inference.links import new_name
from blocktrain.inference.stage import Limits, Stage
from blocktrain.learning.model import START
from blocktrain.terms import Array
from blocktrain.wire import activations
from blocktrain.wire.frame import Head
from blocktrain.wire.serving import (
    Answer,
    Forget,
    Greeting,
    Hop,
    Ping,
    Place,
    Pong,
    Refusal,
    Step,
    Trouble,
    Welcome,
)

OTHER = "0d" * 16


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    return Network(tmp_path_factory.mktemp("stage") / "network")


def place_of(stage: Stage) -> Place:
    return Place(stage.id, "127.0.0.1", stage.port)


class Held:
    """Blocks that compute when they may: a span with a gate before it."""

    def __init__(self, span: Any) -> None:
        self._span = span
        self.may = threading.Event()
        self.computing = threading.Event()
        self.order: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._span, name)

    def step(self, memory: Any, start: int, tokens: list[int], rows: Array | None) -> Array:
        self.computing.set()
        assert self.may.wait(20)
        self.order.append(tokens[0])
        found: Array = self._span.step(memory, start, tokens, rows)
        return found


@pytest.fixture
def held(network: Network) -> Iterator[Held]:
    blocks = Held(network.span(0, 2))
    yield blocks
    blocks.may.set()


def test_a_stage_says_what_it_holds_and_that_it_is_there(network: Network) -> None:
    async def test() -> None:
        async with network.stage(network.span(0, 1), Limits(sessions=5)) as stage:
            async with network.visitor() as guest:
                await guest.visit(stage.port, stage.id)
                welcome = await guest.hear()
                assert isinstance(welcome, Welcome)
                assert (welcome.holding.first, welcome.holding.last) == (0, 1)
                assert welcome.holding.model == network.digest
                assert (welcome.sessions, welcome.room) == (0, 5)
                guest.say(Ping(7))
                assert await guest.hear() == Pong(7, 0, 5, 0)
                assert stage.report().links == 1
            await until(lambda: stage.report().links == 0)

    run(test)


def test_steps_give_what_the_span_gives_however_they_are_cut(network: Network) -> None:
    span = network.span(0, 2)
    tokens = [10, *b"a text of some bytes"]
    rows = span.step(span.memory(), 0, tokens, None)
    expected = span.read(rows[-3:]).numpy().tobytes()

    async def test() -> None:
        async with network.stage(network.span(0, 2)) as stage, network.guest(stage) as guest:
            guest.say(step(guest.name, tokens, wanted=3, choice=None))
            assert isinstance(await guest.hear(body=3 * 1024), Answer)
            assert guest.body == expected
            cuts = [(0, 7, 0), (7, 18, 0), (18, 21, 3)]
            for start, end, wanted in cuts:
                part = step(guest.name, tokens[start:end], start, wanted=wanted, session=OTHER)
                guest.say(part if wanted == 0 else step_without_choice(part))
                assert isinstance(await guest.hear(body=wanted * 1024), Answer)
            assert guest.body == expected

    def step_without_choice(said: Step) -> Step:
        return step(said.gateway, said.tokens, said.start, wanted=3, session=OTHER, choice=None)

    run(test)


def test_a_stage_passes_on_what_it_made_and_says_what_it_took(network: Network) -> None:
    span, tokens = network.span(0, 0), [10, *b"some text"]

    async def test() -> None:
        got: asyncio.Queue[tuple[Step, bytes]] = asyncio.Queue()

        class Next(Stage):
            """Keeps what it hears."""

            async def _hear(self, guest: Any, head: Head) -> None:
                assert isinstance(head.said, Step)
                await got.put((head.said, await guest.link.body(head, head.body)))

        last = Next(network.span(1, 2), network.papers(), network.authority.pem)
        async with last, network.stage(span) as stage, network.guest(stage) as guest:
            asked = step(guest.name, tokens, route=[place_of(last)], codec="int8", number=4)
            guest.say(asked)
            said, body = await asyncio.wait_for(got.get(), 5)
            rows = span.step(span.memory(), 0, tokens, None)
            assert body == activations.encode(rows, "int8")
            assert said.tokens == tokens
            assert said.route == []
            assert (said.session, said.number, said.gateway) == (SECRET, 4, guest.name)
            [hop] = said.hops
            assert hop.stage == stage.id
            assert hop.received > len(tokens)
            assert hop.computed_ms > 0

    run(test)


def test_the_first_stage_drafts_and_the_last_one_answers_for_all(network: Network) -> None:
    async def test() -> None:
        async with network.serving((0, 0), (1, 2)) as (first, last), network.visitor() as guest:
            for stage in (last, first):
                await guest.visit(stage.port, stage.id)
                assert isinstance(await guest.hear(), Welcome)
            guest.say(step(guest.name, [10, 65], route=[place_of(last)], draft=5))
            guest.links.reverse()
            answer = await guest.hear()
            assert isinstance(answer, Answer)
            assert len(answer.drafted) == 5
            assert len(answer.bytes) == len(answer.logs) == 6
            assert [hop.stage for hop in answer.hops] == [first.id, last.id]
            assert all(log <= 0 for log in answer.logs)

    run(test)


def test_pings_are_answered_while_it_computes(network: Network, held: Held) -> None:
    async def test() -> None:
        async with network.stage(held) as stage, network.guest(stage) as guest:
            guest.say(step(guest.name, [10]))
            await asyncio.to_thread(held.computing.wait, 5)
            for number in range(20):
                begun = time.monotonic()
                guest.say(Ping(number))
                assert isinstance(await guest.hear(), Pong)
                assert time.monotonic() - begun < 5  # nothing is computed before `may`
            held.may.set()
            assert isinstance(await guest.hear(), Answer)

    run(test)


def test_a_flood_of_one_gateway_does_not_starve_another(network: Network, held: Held) -> None:
    async def test() -> None:
        async with (
            network.stage(held) as stage,
            network.guest(stage) as flood,
            network.guest(stage) as good,
        ):
            for text in range(40):
                flood.say(step(flood.name, [100], session=f"{text:032x}"))
            await until(lambda: stage.report().queued == 39)
            good.say(step(good.name, [200]))
            await until(lambda: stage.report().queued == 40)
            held.may.set()
            assert isinstance(await good.hear(), Answer)
            for _ in range(40):
                assert isinstance(await flood.hear(), Answer)
            assert held.order.index(200) <= 2

    run(test)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"tokens": [65] * 49}, "do not fit"),
        ({"tokens": [65], "start": 48}, "do not fit"),
        ({"tokens": [65] * 40, "draft": 20}, "do not fit"),
        ({"tokens": [65], "wanted": 2}, "2 rows are wanted of 1"),
        ({"tokens": [65, 256]}, "hidden byte"),
        ({"tokens": [65], "draft": 3, "choice": None}, "draft needs"),
        ({"tokens": [65], "draft": 3, "wanted": 0}, "draft needs"),
        ({"tokens": [65], "name": "ab" * 16}, "somebody else's name"),
        ({"tokens": [65], "hops": [Hop("ab" * 32, 0, 0, 0)]}, "somebody else's name"),
        ({"tokens": [65], "route": [Place("ab" * 32, "h", 1)] * 64}, "at most 64 stages"),
    ],
)
def test_a_step_that_cannot_be_is_refused_and_the_link_stays(
    network: Network, lie: dict[str, Any], words: str
) -> None:
    async def test() -> None:
        async with network.stage(network.span(0, 2)) as stage, network.guest(stage) as guest:
            guest.say(step(**{"name": guest.name, **lie}))
            trouble = await guest.hear()
            assert isinstance(trouble, Trouble)
            assert (trouble.reason, trouble.stage) == ("wrong", stage.id)
            assert words in trouble.words
            guest.say(step(guest.name, [65], number=2))
            assert (await guest.hear()).number == 2

    run(test)


def test_only_the_first_stage_begins_a_text(network: Network) -> None:
    async def test() -> None:
        async with network.stage(network.span(1, 2)) as stage, network.guest(stage) as guest:
            guest.say(step(guest.name, [65]), bytes(activations.size(1, 32, "fp32")))
            trouble = await guest.hear()
            assert trouble.reason == "wrong"
            assert "first stage" in trouble.words

    run(test)


def test_what_was_never_there_is_forgotten_and_what_was_can_be_gone_back_in(
    network: Network,
) -> None:
    async def test() -> None:
        async with network.stage(network.span(0, 2)) as stage, network.guest(stage) as guest:
            guest.say(step(guest.name, [65], start=3))
            assert (await guest.hear()).reason == "forgotten"
            guest.say(step(guest.name, [10, 65, 66]))
            once = await guest.hear()
            guest.say(step(guest.name, [67, 68], start=3))
            assert isinstance(await guest.hear(), Answer)
            guest.say(step(guest.name, [65, 66], start=1))
            assert (await guest.hear()).bytes == once.bytes
            guest.say(step(guest.name, [65], start=5))  # what was behind is dropped
            assert (await guest.hear()).reason == "forgotten"
            assert stage.sessions == 1
            guest.say(Forget(SECRET))
            await until(lambda: stage.sessions == 0)

    run(test)


def test_texts_end_with_their_link_all_along_the_route(network: Network) -> None:
    async def test() -> None:
        async with network.serving(*CUTS) as stages:
            async with network.pipeline(addresses(stages)) as pipeline:
                texts = [await pipeline.session("fp32") for _ in range(3)]
                for text in texts:
                    await write(text, 2)
                assert [stage.sessions for stage in stages] == [3, 3, 3]
                await texts[0].close()
                await until(lambda: [stage.sessions for stage in stages] == [2, 2, 2])
            await until(lambda: [stage.sessions for stage in stages] == [0, 0, 0])
            await until(lambda: [stage.report().links for stage in stages] == [0, 0, 0])

    run(test)


def test_a_text_that_nobody_goes_on_with_is_forgotten(network: Network) -> None:
    async def test() -> None:
        limits = Limits(idle=0.2)
        async with (
            network.stage(network.span(0, 2), limits) as stage,
            network.guest(stage) as guest,
        ):
            guest.say(step(guest.name, [65]))
            assert isinstance(await guest.hear(), Answer)
            assert stage.sessions == 1
            await until(lambda: stage.sessions == 0, within=2)

    run(test)


@pytest.mark.parametrize("bound", ["sessions", "memory"])
def test_there_is_room_for_so_many_texts(network: Network, bound: str) -> None:
    span = network.span(0, 2)
    each = span.memory().bytes
    limits = Limits(sessions=2) if bound == "sessions" else Limits(memory=3 * each - 1)

    async def test() -> None:
        async with (
            network.stage(span, limits) as stage,
            network.guest(stage) as guest,
            network.guest(stage) as other,
        ):
            assert stage.room == 2
            for text in (SECRET, OTHER):
                guest.say(step(guest.name, [65], session=text))
                assert isinstance(await guest.hear(), Answer)
            guest.say(step(guest.name, [65], session="cc" * 16))
            assert (await guest.hear()).reason == "busy"
            other.say(step(other.name, [65]))  # who has none gets the oldest of those
            assert isinstance(await other.hear(), Answer)
            guest.say(step(guest.name, [66], session=SECRET, start=1))
            assert (await guest.hear()).reason == "forgotten"
            assert (stage.sessions, stage.room) == (2, 0)

    run(test)


def test_what_waits_is_bounded_in_bytes(network: Network, held: Held) -> None:
    """40 rows of log-probabilities have 40 KiB; so much must be free before they are computed."""

    async def test() -> None:
        limits = Limits(bodies=120 * 1024)
        async with network.stage(held, limits) as stage, network.guest(stage) as guest:
            asked = [
                step(guest.name, [65] * 40, wanted=40, choice=None, session=f"{text:032x}")
                for text in range(5)
            ]
            for each in asked:
                guest.say(each)
            for _ in range(2):
                assert (await guest.hear()).reason == "busy"
            held.may.set()
            for _ in range(3):
                assert isinstance(await guest.hear(body=40 * 1024), Answer)
            guest.say(asked[4])
            assert isinstance(await guest.hear(body=40 * 1024), Answer)

    run(test)


@pytest.mark.parametrize("at", ["nobody", "somebody else"])
def test_a_next_stage_that_is_not_there_is_named(network: Network, at: str) -> None:
    """Whoever sits at the right address must also be the right one."""

    async def test() -> None:
        async with network.serving((0, 0), (1, 2)) as (first, last), network.guest(first) as guest:
            place = Place("ab" * 32, "127.0.0.1", last.port)
            if at == "nobody":
                await last.close()
            guest.say(step(guest.name, [65], route=[place]))
            trouble = await guest.hear()
            assert (trouble.reason, trouble.stage) == ("unreachable", "ab" * 32)
            assert last.report().links == 0

    run(test)


def test_a_next_stage_that_hangs_up_is_named_for_every_text_that_it_has(network: Network) -> None:
    async def test() -> None:
        async with network.serving((0, 0), (1, 2)) as (first, last), network.visitor() as guest:
            for stage in (last, first):
                await guest.visit(stage.port, stage.id)
                await guest.hear()
            for text in (SECRET, OTHER):
                guest.say(step(guest.name, [65], route=[place_of(last)], session=text))
            await until(lambda: last.report().steps == 2)
            await last.close()
            troubles = [await guest.hear(), await guest.hear()]
            assert {trouble.session for trouble in troubles} == {SECRET, OTHER}
            assert {trouble.stage for trouble in troubles} == {last.id}

    run(test)


def test_an_answer_that_no_gateway_waits_for_is_a_trouble(network: Network) -> None:
    async def test() -> None:
        async with network.serving((0, 0), (1, 2)) as (first, last), network.guest(first) as guest:
            guest.say(step(guest.name, [65], route=[place_of(last)]))
            trouble = await guest.hear()
            assert trouble.reason == "unreachable"
            assert "no link to its last stage" in trouble.words

    run(test)


def test_a_step_that_fails_is_a_trouble_and_the_stage_goes_on(
    network: Network, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with network.stage(held) as stage, network.guest(stage) as guest:
            held.order = None  # type: ignore[assignment]
            guest.say(step(guest.name, [65]))
            trouble = await guest.hear()
            assert (trouble.reason, trouble.stage) == ("unreachable", stage.id)
            assert "log" in trouble.words
            await until(lambda: stage.sessions == 0)  # what it remembers may be half of something
            held.order = []
            guest.say(step(guest.name, [65], number=2))
            assert isinstance(await guest.hear(), Answer)

    held.may.set()
    run(test)
    assert "a step failed" in caplog.text


def test_rows_that_are_not_finite_are_a_trouble(network: Network) -> None:
    async def test() -> None:
        async with network.stage(network.span(1, 2)) as stage, network.guest(stage) as guest:
            rows = np.full((1, 32), np.nan, np.float32)
            hops = [Hop(guest.id, 0, 0, 0)]  # as if he were the stage before
            guest.say(step(guest.name, [65], hops=hops), rows.tobytes())
            trouble = await guest.hear()
            assert trouble.reason == "wrong"
            assert "finite" in trouble.words

    run(test)


def test_leaving_takes_nothing_new_and_finishes_what_is_in_hand(
    network: Network, held: Held
) -> None:
    async def test() -> None:
        async with network.stage(held) as stage, network.guest(stage) as guest:
            guest.say(step(guest.name, [65]))
            await asyncio.to_thread(held.computing.wait, 5)
            leaving = asyncio.create_task(stage.leave(within=0.5))
            await asyncio.sleep(0.05)
            guest.say(step(guest.name, [65], session=OTHER))
            assert (await guest.hear()).reason == "busy"
            guest.say(Ping(1))
            assert (await guest.hear()).room == 0
            with pytest.raises(Unreachable):
                await network.visitor().visit(stage.port, stage.id)
            await asyncio.sleep(0.6)  # longer than texts may take to end: but a step is in hand
            assert not leaving.done()
            held.may.set()
            assert isinstance(await guest.hear(), Answer)
            await leaving
            await asyncio.wait_for(stage.closed(), 1)
            assert await guest.hear() is None

    run(test)


def test_links_are_bounded(network: Network) -> None:
    async def test() -> None:
        limits = Limits(links=3, links_per_peer=2)
        async with (
            network.stage(network.span(0, 2), limits) as stage,
            network.guest(stage) as guest,
            network.guest(stage),
        ):
            await guest.visit(stage.port, stage.id)
            assert isinstance(await guest.hear(), Welcome)
            await guest.visit(stage.port, stage.id)
            refusal = await guest.hear()
            assert isinstance(refusal, Refusal)
            assert "You have 2 links" in refusal.words
            assert await guest.hear() is None
            async with network.visitor() as another:
                await another.visit(stage.port, stage.id)
                assert "no room for one more link" in (await another.hear()).words
            assert stage.report().links == 3

    run(test)


@pytest.mark.parametrize(("theirs", "who"), [(0, "gateway's side"), (99, "this side")])
def test_another_protocol_is_refused_with_who_must_upgrade(
    network: Network, theirs: int, who: str
) -> None:
    async def test() -> None:
        async with network.stage(network.span(0, 2)) as stage, network.visitor() as visitor:
            await visitor.come_in(stage.port, stage.id)
            visitor.say(Greeting(theirs, new_name(visitor.id)))
            assert who in (await visitor.hear()).words
            assert await visitor.hear() is None

    run(test)


def test_a_port_in_use_is_a_clear_error(
    network: Network, sentence: Callable[[BaseException], str]
) -> None:
    async def test() -> None:
        async with network.stage(network.span(0, 2)) as stage:
            with pytest.raises(Unreachable) as error:
                async with network.stage(network.span(0, 2), port=stage.port):
                    pass
            assert str(stage.port) in sentence(error.value)

    run(test)


def test_a_banned_guest_is_put_out_with_all_of_its_links(network: Network) -> None:
    """Also with one that it greeted over again under the same name; others stay."""

    async def test() -> None:
        async with (
            network.serving((0, 2)) as (stage,),
            network.guest(stage) as good,
            network.guest(stage) as bad,
        ):
            await bad.visit(stage.port, stage.id)
            assert isinstance(await bad.hear(), Welcome)
            stage.ban([bad.id])
            for link in bad.links:
                async with asyncio.timeout(5):
                    head = await link.hear()
                    assert head
                    assert isinstance(head.said, Refusal)
                    assert "banned" in head.said.words
                    assert await link.hear() is None
            await until(lambda: stage.report().links == 1)
            good.say(Ping(1))
            assert isinstance(await good.hear(), Pong)
            await bad.visit(stage.port, stage.id)
            assert isinstance(await bad.hear(), Refusal)
            stage.ban([])  # the owner gave it another token
            await bad.visit(stage.port, stage.id)
            assert isinstance(await bad.hear(), Welcome)

    run(test)


def test_a_stage_leaves_a_banned_next_one(network: Network) -> None:
    """A text that went there is troubled at once, and so is whoever asks for that way again."""

    async def test() -> None:
        async with network.serving((0, 0), (1, 2)) as (first, last), network.guest(first) as guest:
            await guest.visit(last.port, last.id)  # for the answers
            assert isinstance(await guest.hear(), Welcome)
            asked = step(guest.name, [START], route=[place_of(last)])
            guest.links[0].say(asked)
            assert isinstance(await guest.hear(), Answer)
            first.ban([last.id])
            guest.links.reverse()
            for _ in range(2):
                trouble = await guest.hear()
                assert isinstance(trouble, Trouble)
                assert (trouble.reason, trouble.stage) == ("unreachable", last.id)
                guest.say(replace(asked, number=2))
            assert "banned" in trouble.words

    run(test)
