"""Stages are killed with SIGKILL while a text goes through them: with a replica, nothing changes.

Real processes and real links. Each stage dies at each point: before the generation, during prefill,
during decode, during verify and during a `whole` text; each time before it computes, after that, or
when it has passed the step on. What a death may cost is bounded: the step in which it happens takes
less than BOUND.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from copy import copy

import pytest
from tests.inference.network import (
    CUTS,
    PROMPT,
    Board,
    Network,
    Process,
    Processes,
    living_model,
    run,
    until,
    write,
)

from blocktrain.errors import Unreachable
from blocktrain.inference import decode, reach
from blocktrain.inference import pipeline as module
from blocktrain.inference.choice import Sampling
from blocktrain.inference.decode import Piece
from blocktrain.inference.local import LocalSession
from blocktrain.inference.pipeline import Pipeline
from blocktrain.inference.session import Said, Session
from blocktrain.learning.files import save_model
from blocktrain.learning.model import Shape
from blocktrain.wire.serving import Codec

BOUND = 2.0  # seconds; the lost work itself takes some milliseconds with this model
LENGTH, DRAFT = 14, 3
DENOISE = Shape("denoise", blocks=3, layers=1, width=32, heads=2, window=48)
every_stage = pytest.mark.parametrize("victim", [0, 1, 2])


@pytest.fixture(autouse=True)
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "LOOK_EVERY", 0.05)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    return Network(tmp_path_factory.mktemp("failover") / "network")


@pytest.fixture(scope="module")
def denoising(network: Network) -> Network:
    """The same members with a model that finds a whole text at once."""
    other = copy(network)
    other.shape, other.model, other._spans = DENOISE, network.folder / "denoise", {}
    other.digest = save_model(living_model(DENOISE), other.model).digest
    for cut in CUTS:
        other.span(*cut)
    return other


@pytest.fixture(scope="module")
def processes(network: Network) -> Iterator[Processes]:
    for cut in CUTS:  # so that the first ones to start find the weights laid out
        network.span(*cut)
    started = Processes(network)
    yield started
    started.close()


@pytest.fixture(scope="module")
def steady(processes: Processes) -> list[Process]:
    """One stage for each span, none of which ever dies."""
    return [processes.start(*cut) for cut in CUTS]


@pytest.fixture(scope="module")
def text(network: Network) -> bytes:
    """What one process writes, byte by byte."""

    async def local() -> bytes:
        return (await write(LocalSession(network.span(0, 2)), LENGTH))[0]

    return asyncio.run(local())


@asynccontextmanager
async def among(
    network: Network, steady: list[Process], number: int, mortal: Process
) -> AsyncIterator[tuple[Pipeline, Board]]:
    """A pipeline in which a mortal stage stands for one of the steady ones."""
    board = Board()
    board.put(mortal, *(stage for other, stage in enumerate(steady) if other != number))
    async with network.pipeline(board) as pipeline:
        await until(lambda: len(pipeline.report()) == 3)
        yield pipeline, board


async def replace(pipeline: Pipeline, board: Board, replica: Process) -> None:
    """A replica comes."""
    board.put(replica)
    await until(lambda: any(stage.stage == replica.id for stage in pipeline.report()))


def replayed(told: list[Said]) -> list[int]:
    """The traversals, from 1, in which a stage was replaced."""
    return [number for number, said in enumerate(told, 1) if said.replayed]


@every_stage
@pytest.mark.parametrize("point", ["before", "after", "passed"])
@pytest.mark.parametrize(
    ("during", "step", "draft"), [("prefill", 1, 0), ("decode", 4, 0), ("verify", 3, DRAFT)]
)
def test_a_stage_that_dies_is_replaced_and_the_text_is_the_same(
    network: Network,
    processes: Processes,
    steady: list[Process],
    text: bytes,
    victim: int,
    point: str,
    during: str,
    step: int,
    draft: int,
) -> None:
    async def test() -> None:
        mortal = processes.start(*CUTS[victim], step=step, point=point)
        async with among(network, steady, victim, mortal) as (pipeline, board):
            session = await pipeline.session("fp32")
            await replace(pipeline, board, steady[victim])
            found, told = await write(session, LENGTH, draft)
            assert mortal.over(within=5)
            assert found == text
            # The last stage may have answered, or the others gone on, before the death is noticed.
            expected = {step} if point != "passed" else {step, step + 1}
            assert len(replayed(told)) == 1
            assert set(replayed(told)) <= expected
            assert max(said.seconds for said in told) < BOUND
            assert told[-1].hops[victim].stage == steady[victim].id
            await session.close()

    run(test)


@every_stage
@pytest.mark.parametrize("point", ["before", "after", "passed"])
def test_a_whole_text_outlives_a_stage(
    denoising: Network, processes: Processes, victim: int, point: str
) -> None:
    """In the second of four traversals: what the first one found is not lost."""
    model, sampling = str(denoising.model), Sampling(0.8, 0.95, seed=11)

    async def made(session: Session) -> list[Piece]:
        coming = decode.whole(session, PROMPT, LENGTH, sampling, traversals=4)
        return [piece async for piece in coming]

    async def test() -> None:
        mortal, *steady = (
            processes.start(*cut, model=model, step=step, point=point)
            for cut, step in [(CUTS[victim], 2), *((cut, 0) for cut in CUTS)]
        )
        async with among(denoising, steady, victim, mortal) as (pipeline, board):
            session = await pipeline.session("fp32")
            await replace(pipeline, board, steady[victim])
            pieces = await made(session)
            assert mortal.over(within=5)
            local = await made(LocalSession(denoising.span(0, 2)))
            assert [piece.bytes for piece in pieces] == [piece.bytes for piece in local]
            assert len(pieces[-1].bytes) == LENGTH
            expected = {2} if point != "passed" else {2, 3}
            told = [piece.said for piece in pieces]
            assert len(replayed(told)) == 1
            assert set(replayed(told)) <= expected
            assert max(said.seconds for said in told) < BOUND
            await session.close()

    run(test)


@every_stage
@pytest.mark.parametrize("begun", [False, True])
def test_a_stage_that_dies_before_the_generation_is_not_missed(
    network: Network,
    processes: Processes,
    steady: list[Process],
    text: bytes,
    victim: int,
    begun: bool,
) -> None:
    """Before or after the session was opened."""

    async def test() -> None:
        mortal = processes.start(*CUTS[victim])
        async with among(network, steady, victim, mortal) as (pipeline, board):
            session = await pipeline.session("fp32") if begun else None
            await replace(pipeline, board, steady[victim])
            mortal.end_by(signal.SIGKILL)
            begin = time.monotonic()
            session = session or await pipeline.session("fp32")
            found, told = await write(session, LENGTH)
            assert found == text
            assert told[0].seconds < BOUND
            assert time.monotonic() - begin < BOUND + LENGTH * 0.2
            await session.close()

    run(test)


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_a_replay_keeps_to_the_codec(
    network: Network, processes: Processes, steady: list[Process], codec: Codec
) -> None:
    async def test() -> None:
        mortal = processes.start(*CUTS[1], step=5, point="before")
        async with among(network, steady, 1, mortal) as (pipeline, board):
            session = await pipeline.session(codec)
            await replace(pipeline, board, steady[1])
            found, told = await write(session, LENGTH)
            assert replayed(told) == [5]
            undisturbed = await pipeline.session(codec)
            assert (await write(undisturbed, LENGTH))[0] == found

    run(test)


def test_many_texts_survive_together(
    network: Network, processes: Processes, steady: list[Process], text: bytes
) -> None:
    async def test() -> None:
        mortal = processes.start(*CUTS[1], step=30, point="after")
        async with among(network, steady, 1, mortal) as (pipeline, board):
            sessions = [await pipeline.session("fp32") for _ in range(6)]
            await replace(pipeline, board, steady[1])
            made = await asyncio.gather(
                *(write(session, LENGTH, draft % 2) for draft, session in enumerate(sessions))
            )
            assert mortal.over(within=5)
            assert {found for found, _ in made} == {text}
            assert all(len(replayed(told)) == 1 for _, told in made)

    run(test)


def test_two_stages_die_one_after_the_other_within_a_step(
    network: Network, processes: Processes, steady: list[Process], text: bytes
) -> None:
    """The replica of the first one dies in the replay."""

    async def test() -> None:
        first = processes.start(*CUTS[1], step=3, point="before")
        second = processes.start(*CUTS[1], step=1, point="before")
        async with among(network, steady, 1, first) as (pipeline, board):
            session = await pipeline.session("fp32")
            await replace(pipeline, board, second)
            writing = asyncio.create_task(write(session, LENGTH))
            assert await asyncio.to_thread(second.over, 5)
            board.put(steady[1])  # within the patience
            found, told = await writing
            assert first.over()
            assert found == text
            assert told[2].replayed == 2
            assert told[2].seconds < 2 * BOUND

    run(test)


@every_stage
def test_a_frozen_host_is_replaced(
    network: Network, processes: Processes, steady: list[Process], text: bytes, victim: int
) -> None:
    """It holds its links but says nothing: only its silence tells."""

    async def test() -> None:
        mortal = processes.start(*CUTS[victim])
        async with among(network, steady, victim, mortal) as (pipeline, board):
            session = await pipeline.session("fp32")
            await write(session, 3)
            await replace(pipeline, board, steady[victim])
            mortal.send(signal.SIGSTOP)
            found, told = await write(session, LENGTH)
            assert found == text
            assert replayed(told) == [1]
            assert told[0].seconds < BOUND + 0.5  # three pings, half a second apart

    run(test)


def test_without_a_replica_the_error_is_clear_and_it_works_when_one_returns(
    network: Network,
    processes: Processes,
    steady: list[Process],
    text: bytes,
    monkeypatch: pytest.MonkeyPatch,
    sentence: Callable[[BaseException], str],
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.5)

    async def test() -> None:
        papers = network.papers()
        mortal = processes.start(*CUTS[1], papers=papers, step=4)
        async with among(network, steady, 1, mortal) as (pipeline, _):
            session = await pipeline.session("fp32")
            begun = time.monotonic()
            with pytest.raises(Unreachable) as error:
                await write(session, LENGTH)
            assert time.monotonic() - begun < BOUND
            assert "No replica serves block 2" in sentence(error.value)
            with pytest.raises(Unreachable) as error:
                await pipeline.session("fp32")
            assert "No stage serves block 2; start one with" in sentence(error.value)
            assert any("does not answer" in trouble for trouble in pipeline.troubles)
            # The same host comes back, at the same place.
            processes.start(*CUTS[1], papers=papers, port=mortal.port)
            await until(lambda: len(pipeline.report()) == 3)
            again = await pipeline.session("fp32")
            assert (await write(again, LENGTH))[0] == text
            assert (await write(session, LENGTH))[0] == text  # even the broken one goes on

    run(test)


def test_stages_join_and_leave_while_texts_are_written(
    network: Network, processes: Processes, steady: list[Process], text: bytes
) -> None:
    async def test() -> None:
        board = Board()
        board.put(*steady)
        done, stop = list[bytes](), asyncio.Event()

        async def texts(pipeline: Pipeline) -> None:
            while not stop.is_set():
                session = await pipeline.session("fp32")
                done.append((await write(session, LENGTH))[0])
                await session.close()

        async with network.pipeline(board) as pipeline:
            await until(lambda: len(pipeline.report()) == 3)
            writing = [asyncio.create_task(texts(pipeline)) for _ in range(3)]
            for number in (0, 1, 2, 1):
                joined = processes.start(*CUTS[number])
                await replace(pipeline, board, joined)
                await until(lambda id=joined.id: uses(pipeline, id))  # type: ignore[misc]
                board.take(joined)
                joined.send(signal.SIGTERM)
                assert await asyncio.to_thread(joined.over, 10)
                await until(lambda: len(pipeline.report()) == 3)
            stop.set()
            await asyncio.gather(*writing)
        assert len(done) > 8
        assert set(done) == {text}

    def uses(pipeline: Pipeline, id: str) -> bool:
        return any(stage.stage == id and stage.step_ms for stage in pipeline.report())

    run(test)
