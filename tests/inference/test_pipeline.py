"""Stages put together: the same text as in one process, on the route that is best now."""

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from tests.inference.network import (
    CUTS,
    SMALL,
    Board,
    Network,
    addresses,
    run,
    until,
    write,
)

from blocktrain.errors import BadInput, Unreachable
from blocktrain.inference import pipeline as module
from blocktrain.inference import reach, traversals
from blocktrain.inference.desk import Desk
from blocktrain.inference.local import LocalSession
from blocktrain.inference.session import Asked
from blocktrain.inference.stage import Limits, Stage
from blocktrain.learning.model import MASK
from blocktrain.wire import activations, frame
from blocktrain.wire.serving import Choice, Codec

LONG = 52
"""Bytes of a text that goes beyond the window, and begins again from its newer half."""


@pytest.fixture(autouse=True)
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "LOOK_EVERY", 0.05)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    return Network(tmp_path_factory.mktemp("pipeline") / "network")


@pytest.fixture(scope="module")
def text(network: Network) -> bytes:
    """What one process writes, beyond the window."""

    async def local() -> bytes:
        return (await write(LocalSession(network.span(0, 2)), LONG))[0]

    return asyncio.run(local())


@pytest.mark.parametrize(
    ("cuts", "draft"),
    [([(0, 2)], 0), ([(0, 0), (1, 2)], 5), ([(0, 1), (2, 2)], 3), (CUTS, 0), (CUTS, 5)],
)
def test_stages_write_what_one_process_writes(
    network: Network, text: bytes, cuts: list[tuple[int, int]], draft: int
) -> None:
    async def test() -> None:
        async with (
            network.serving(*cuts) as stages,
            network.pipeline(addresses(stages)) as pipeline,
        ):
            session = await pipeline.session("fp32")
            found, told = await write(session, LONG, draft)
            assert found == text
            assert all(said.replayed == 0 for said in told)
            assert [hop.stage for hop in told[-1].hops] == [stage.id for stage in stages]
            await session.close()

    run(test)


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_a_codec_gives_the_same_text_by_drafts_as_byte_by_byte(
    network: Network, codec: Codec
) -> None:
    async def test() -> None:
        async with (
            network.serving(*CUTS) as stages,
            network.pipeline(addresses(stages)) as pipeline,
        ):
            plain = await pipeline.session(codec)
            drafted = await pipeline.session(codec)
            assert (await write(plain, 30))[0] == (await write(drafted, 30, draft=4))[0]

    run(test)


def test_log_probabilities_are_those_of_one_process(network: Network) -> None:
    asked = Asked(0, [10, *b"some words"], wanted=4)

    async def test() -> None:
        async with (
            network.serving(*CUTS) as stages,
            network.pipeline(addresses(stages)) as pipeline,
        ):
            session = await pipeline.session("fp32")
            said = await session.step(asked)
            here = await LocalSession(network.span(0, 2)).step(asked)
            assert said.probabilities is not None
            assert here.probabilities is not None
            assert np.array_equal(said.probabilities, here.probabilities)
            assert said.bytes == []

    run(test)


def test_every_byte_on_the_wire_is_counted(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against what was handed to sockets, but for pings and pongs."""
    written: list[int] = []
    original = frame.write

    def counting(writer: asyncio.StreamWriter, said: Any, body: bytes = b"") -> int:
        size = original(writer, said, body)
        if type(said).__name__ in ("Step", "Answer"):
            written.append(size)
        return size

    monkeypatch.setattr(frame, "write", counting)

    async def test() -> None:
        async with (
            network.serving(*CUTS) as stages,
            network.pipeline(addresses(stages)) as pipeline,
        ):
            session = await pipeline.session("fp32")
            await until(lambda: len(pipeline.report()) == 3)
            await asyncio.sleep(0.2)  # for the pipeline to have felt its way
            written.clear()
            said = await session.step(Asked(0, [10, *b"some words"], wanted=11))
            assert said.sent == sum(written)
            assert len(written) == 4
            assert said.sent > 2 * activations.size(11, 32, "fp32") + 11 * 1024

    run(test)


def test_many_texts_go_on_at_once(network: Network, text: bytes) -> None:
    async def test() -> None:
        async with (
            network.serving(*CUTS) as stages,
            network.pipeline(addresses(stages)) as pipeline,
        ):
            sessions = [await pipeline.session("fp32") for _ in range(5)]
            texts = (write(session, 12, draft) for draft, session in enumerate(sessions))
            found = await asyncio.gather(*texts)
            assert {made for made, _ in found} == {text[:12]}
            for session in sessions:
                await session.close()

    run(test)


def test_a_long_context_travels_in_pieces(
    network: Network, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 4)

    async def test() -> None:
        async with (
            network.serving(*CUTS) as stages,
            network.pipeline(addresses(stages)) as pipeline,
        ):
            session = await pipeline.session("fp32")
            assert (await write(session, LONG))[0] == text

    run(test)


def test_replicas_share_the_load(network: Network) -> None:
    async def test() -> None:
        async with (
            network.serving((0, 0), (0, 0), (1, 2), (1, 2)) as stages,
            network.pipeline(addresses(stages)) as pipeline,
        ):
            await until(lambda: len(pipeline.report()) == 4)
            for _ in range(8):
                await write(await pipeline.session("fp32"), 2)
            # Four each, but for what a busy machine makes of their speeds.
            assert min(stage.sessions for stage in stages) >= 2, pipeline.report()

    run(test)


def test_a_full_stage_is_avoided(network: Network) -> None:
    async def test() -> None:
        small = network.stage(network.span(0, 2), Limits(sessions=1))
        large = network.stage(network.span(0, 2))
        async with small, large, network.pipeline(addresses([small, large])) as pipeline:
            await until(lambda: len(pipeline.report()) == 2)
            for _ in range(6):
                await write(await pipeline.session("fp32"), 2)
            assert (small.sessions, large.sessions) == (1, 5)

    run(test)


def test_stages_come_and_go_while_it_serves(network: Network, text: bytes) -> None:
    async def test() -> None:
        board = Board()
        async with network.pipeline(board) as pipeline, network.serving((0, 2)) as [old]:
            board.put(old)
            session = await pipeline.session("fp32")
            assert (await write(session, 5))[0] == text[:5]
            async with network.serving((0, 2)) as [new]:
                board.put(new)
                await until(lambda: len(pipeline.report()) == 2)
                assert (await write(await pipeline.session("fp32"), 5))[0] == text[:5]
                assert (old.sessions, new.sessions) == (1, 1)  # the new one is used
                board.take(old)
                await old.leave(within=0.2)
                await until(lambda: len(pipeline.report()) == 1)
                found, told = await write(session, 5)  # the old text moves
                assert found == text[:5]
                assert told[0].replayed == 1
                assert new.sessions == 2

    run(test)


def test_without_a_cover_the_error_says_what_is_missing_and_it_works_later(
    network: Network,
    text: bytes,
    monkeypatch: pytest.MonkeyPatch,
    sentence: Callable[[BaseException], str],
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.3)

    async def test() -> None:
        async with network.serving((0, 0), (2, 2)) as stages:
            board = Board()
            board.put(*stages)
            async with network.pipeline(board) as pipeline:
                await until(lambda: len(pipeline.report()) == 2)
                with pytest.raises(Unreachable) as error:
                    await pipeline.session("fp32")
                assert "block 2" in sentence(error.value)
                async with network.serving((1, 1)) as [middle]:
                    board.put(middle)
                    await until(lambda: len(pipeline.report()) == 3)
                    session = await pipeline.session("fp32")
                    assert (await write(session, 5))[0] == text[:5]
                with pytest.raises(Unreachable) as error:
                    await write(session, 5)
                assert "No replica serves block 2" in sentence(error.value)

    run(test)


def test_a_stage_that_comes_within_the_patience_is_waited_for(network: Network) -> None:
    async def test() -> None:
        board = Board()
        async with network.pipeline(board) as pipeline, network.serving((0, 2)) as [stage]:
            asking = asyncio.create_task(pipeline.session("fp32"))
            await asyncio.sleep(0.5)
            assert not asking.done()
            board.put(stage)
            text, _ = await write(await asking, 2)
            assert len(text) == 2

    run(test)


def test_another_model_is_left_out_and_named(network: Network, tmp_path: Path) -> None:
    other = Network(tmp_path / "other", replace(network.shape, window=40))

    async def test() -> None:
        stage = network.stage(other.span(0, 2))
        async with stage, network.pipeline(addresses([stage])) as pipeline:
            await until(lambda: bool(pipeline.troubles))
            assert "serves another model" in pipeline.troubles[0]
            assert pipeline.report() == []

    run(test)


def test_a_silent_stage_is_given_up_and_its_text_moves(
    network: Network, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a host vanishes: links stay, but nothing comes over them any more."""

    async def test() -> None:
        async with network.serving((0, 2)) as [good]:
            mute = Mute(network.span(0, 2), network.papers(), network.authority.pem)
            board = Board()
            async with mute, network.pipeline(board) as pipeline:
                board.put(mute)
                session = await pipeline.session("fp32")
                assert (await write(session, 3))[0] == text[:3]
                board.put(good)
                await until(lambda: len(pipeline.report()) == 2)
                mute.silent = True
                begun = time.monotonic()
                found, told = await write(session, 3)
                assert found == text[:3]
                assert told[0].replayed == 1
                assert time.monotonic() - begun < 2.5
                assert [hop.stage for hop in told[0].hops] == [good.id]

    class Mute(Stage):
        silent = False

        async def _hear(self, guest: Any, head: Any) -> None:
            while self.silent:
                await asyncio.sleep(0.05)
            await super()._hear(guest, head)

    run(test)


def test_a_traversal_that_gets_lost_is_made_again_elsewhere(
    network: Network, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stages are there, but one swallows a step."""
    original = Desk._deliver
    swallowed: list[int] = []

    async def swallowing(desk: Desk, job: Any, outcome: Any) -> None:
        if job.said.start > 0 and not swallowed:
            swallowed.append(job.said.number)
            desk._let_go(job)
            return
        await original(desk, job, outcome)

    async def test() -> None:
        async with (
            network.serving((0, 0), (0, 0), (1, 2)) as stages,
            network.pipeline(addresses(stages)) as pipeline,
        ):
            await until(lambda: len(pipeline.report()) == 3)
            session = await pipeline.session("fp32")
            await write(session, 2)  # so that speeds are known
            monkeypatch.setattr(Desk, "_deliver", swallowing)
            begun = time.monotonic()
            found, told = await write(session, 10)
            assert found == text[:10]
            assert [said.replayed for said in told].count(1) == 1
            assert 1.0 <= time.monotonic() - begun < 3.0

    run(test)


def test_a_stage_that_is_only_slow_is_waited_for_longer(
    network: Network, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows how long a stage takes that has never been seen computing."""
    monkeypatch.setattr(traversals, "UNSEEN", 0.0)
    monkeypatch.setattr(traversals, "SHORTEST", 0.1)
    span = network.span(0, 2)

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(span, name)

        def step(self, *given: Any) -> Any:
            time.sleep(0.7)
            return span.step(*given)

    async def test() -> None:
        stage = network.stage(Slow())
        async with stage, network.pipeline(addresses([stage])) as pipeline:
            found, told = await write(await pipeline.session("fp32"), 2)
            assert found == text[:2]
            assert told[0].replayed >= 1  # it was given up, and then it was waited for
            assert told[1].replayed == 0  # now it is known

    run(test)


def test_no_frame_waits_for_the_one_before_to_be_acknowledged(network: Network) -> None:
    """Nagle's algorithm would hold small frames back, at either end of a link."""

    async def test() -> None:
        async with (
            network.serving(*CUTS) as stages,
            network.pipeline(addresses(stages)) as pipeline,
        ):
            await write(await pipeline.session("fp32"), 2)
            links = [guest.link for stage in stages for guest in stage._desk.guests.values()]
            route = (await pipeline.session("fp32"))._route
            assert route
            links += [stage.link for stage in route.stages]
            assert len(links) >= 6
            for link in links:
                sock = link._writer.get_extra_info("socket")
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(test)


def test_it_is_the_same_on_the_event_loop_of_gateways(network: Network, text: bytes) -> None:
    """uvicorn runs on uvloop, whose TLS is its own."""

    async def test() -> None:
        async with (
            network.serving(*CUTS) as stages,
            network.pipeline(addresses(stages)) as pipeline,
        ):
            session = await pipeline.session("fp32")
            assert (await write(session, LONG, 3))[0] == text
            await stages[1].close()
            with pytest.raises(Unreachable):
                await write(session, 2)

    run(test, uvloop.new_event_loop)


def test_a_stage_that_forgot_is_given_the_text_again(network: Network, text: bytes) -> None:
    async def test() -> None:
        async with (
            network.serving(*CUTS) as stages,
            network.pipeline(addresses(stages)) as pipeline,
        ):
            for number, stage in enumerate(stages):
                session = await pipeline.session("fp32")
                await session.step(Asked(0, [10, *b"The riv"], 0))
                stage._desk.rooms.end(())
                said = await session.step(Asked(8, list(b"er"), 0))
                assert said.replayed == 1, number
                await session.close()

    run(test)


def test_a_whole_span_is_found_as_in_one_process(tmp_path: Path) -> None:
    network = Network(tmp_path / "network", replace(SMALL, objective="denoise"))
    tokens = [10, *b"some", *[MASK] * 9]
    span, choice = (4, 14), Choice(0.8, 0.95, 3, 0)

    async def test() -> None:
        async with (
            network.serving(*CUTS) as stages,
            network.pipeline(addresses(stages)) as pipeline,
        ):
            here = LocalSession([network.span(*cut) for cut in CUTS])
            mine, seen = list[list[int]](), list[tuple[str, list[int]]]()
            expected = await here.emit(tokens, span, choice, lambda _, made: mine.append(made))
            session = await pipeline.session("fp32")
            said = await session.emit(tokens, span, choice, lambda *told: seen.append(told))
            assert said.bytes == expected.bytes
            assert said.logs == expected.logs
            assert seen == list(zip([stage.id for stage in stages], mine, strict=True))
            assert said.sent > 2 * activations.size(14, 256, "fp32")
            assert (await write(session, 5))[0] == (await write(here, 5))[0]  # `ar` by such a model

    run(test)


def test_what_makes_no_sense_is_refused(network: Network) -> None:
    async def test() -> None:
        async with (
            network.serving((0, 2)) as stages,
            network.pipeline(addresses(stages)) as pipeline,
        ):
            session = await pipeline.session("fp32")
            for asked in (Asked(1, [65], 1), Asked(0, [], 0), Asked(0, [65] * 49, 1)):
                with pytest.raises(BadInput):
                    await session.step(asked)
            assert (await session.step(Asked(0, [65], 0))).bytes == []

    run(test)


@pytest.mark.parametrize("address", ["nowhere", "host:0", "host:99999", "a b:1", ":1", "::1:4"])
def test_an_address_must_be_one(network: Network, address: str) -> None:
    async def test() -> None:
        with pytest.raises(BadInput, match="host:port"):
            async with network.pipeline([address]):
                pass

    run(test)


def test_reports_tell_who_is_there(network: Network) -> None:
    async def test() -> None:
        async with (
            network.serving((1, 2), (0, 0)) as stages,
            network.pipeline(addresses(stages)) as pipeline,
        ):
            await until(lambda: len(pipeline.report()) == 2)
            await write(await pipeline.session("fp32"), 3)
            first, last = pipeline.report()
            assert [first.stage, last.stage] == [stages[1].id, stages[0].id]
            assert (last.first, last.last, last.weights) == (1, 2, "fp32")
            assert last.address == f"127.0.0.1:{stages[0].port}"
            assert 0 < last.rtt_ms < 1000
            assert last.step_ms
            assert 0 <= last.silent < 2
            assert last.room == 256

    run(test)
