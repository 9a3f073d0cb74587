"""One checkpoint for all who serve, while the run goes on."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.inference.network import until

from blocktrain.commands.gateway import upkeep_of
from blocktrain.commands.owner import As
from blocktrain.commands.stage import Where, keep, publish
from blocktrain.console import Output
from blocktrain.errors import NotAllowed
from blocktrain.inference import reach
from blocktrain.inference.pipeline import Pipeline
from blocktrain.inference.session import Asked
from blocktrain.inference.span import Span
from blocktrain.inference.stage import Stage
from blocktrain.learning.files import read_manifest
from blocktrain.services import belonging
from blocktrain.services.announcing import beside
from blocktrain.services.belonging import Belonging, Pass, belong, watch_banned
from blocktrain.services.coordinator import served
from blocktrain.wire.messages import Done
from blocktrain.wire.owner import Ban, Checkpoint
from blocktrain.wire.serving import Choice, Publish

from .conftest import Coordinate, Place

Member = Callable[[Place, str], Belonging]


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Member]:
    """Makes somebody who belongs to a run, and lives in a folder of that name."""
    made: list[Belonging] = []

    def join(place: Place, name: str) -> Belonging:
        made.append(belong(place.url, Pass(token=place.token, folder=tmp_path / name)))
        return made[-1]

    yield join
    for each in made:
        each.close()


def test_later_stages_serve_what_the_first_one_does_until_the_owner_moves_them(
    coordinate: Coordinate, member: Member, tmp_path: Path
) -> None:
    place = coordinate()
    first = member(place, "first").fetch([0])[1]
    place.run_to_the_end(tmp_path / "workers", 2)
    later = member(place, "later")
    assert later.fetch([1])[1].digest == first.digest
    assert first.made["rounds"] == [0, 0]
    publish(place.url, asking=As(token=place.token), output=Output(json=True))
    assert later.served is not None
    newest = later.served()
    assert newest != first.digest
    found = later.fetch([1])[1]
    assert (found.digest, found.made["rounds"]) == (newest, [3, 3])


def test_when_nobody_has_served_for_a_while_the_newest_is_next(
    coordinate: Coordinate, member: Member, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = coordinate()
    first = member(place, "first").fetch([])[1]
    place.run_to_the_end(tmp_path / "workers", 2)
    monkeypatch.setattr(served, "HELD", 0.2)
    time.sleep(0.3)
    later = member(place, "later").fetch([])[1]
    assert (first.made["rounds"], later.made["rounds"]) == ([0, 0], [3, 3])


def test_only_the_owner_moves_them(coordinate: Coordinate) -> None:
    place = coordinate()
    issued = place.link()
    with pytest.raises(NotAllowed, match="token"):
        place.link("somebody's-token").say("v1/served", Publish("newest"), Checkpoint)
    with pytest.raises(NotAllowed, match="session"):
        issued.ask("v1/served", Checkpoint)  # which is for those who serve
    assert len(issued.say("v1/served", Publish("newest"), Checkpoint).versions) == 2


def test_what_is_served_is_kept(coordinate: Coordinate, member: Member) -> None:
    """Though the run has forgotten it, and prunes whatever it does not name."""
    place = coordinate()
    member(place, "first").fetch([])
    keeper, checkpoint = place.keeper, place.coordinator.serving.checkpoint
    versions = checkpoint.current(time.monotonic()).versions

    def prune(grace: float) -> None:
        keeper.store.prune(set(), grace)

    time.sleep(1.1)

    async def renewed() -> None:
        async with beside(checkpoint.keep()):
            await asyncio.sleep(0.3)

    asyncio.run(renewed())
    prune(1.0)
    assert [keeper.store.size(each.steady) is not None for each in versions] == [True, True]
    time.sleep(1.1)
    prune(1.0)
    assert keeper.store.size(versions[0].steady) is None


def test_stages_and_gateways_move_by_themselves(
    coordinate: Coordinate, member: Member, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(belonging, "FOLLOW_EVERY", 0.1)
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    place = coordinate()
    mine, theirs = (member(place, name) for name in ("stage", "gateway"))
    manifest = theirs.fetch([])[1]
    quiet, present = Output(json=True), theirs.present
    assert present is not None

    async def text(pipeline: Pipeline) -> list[float]:
        session = await pipeline.session("fp32")
        said = await session.step(Asked(0, [10, 84], 1, 0, Choice(0, 1.0, 0, 0)))
        await session.close()
        return said.logs

    async def test() -> None:
        pipeline = Pipeline(
            manifest.shape,
            manifest.digest,
            *theirs.member,
            lambda: asyncio.to_thread(present),
        )
        span = Span.open(mine.fetch([0, 1])[0], 0, 1)
        serving = asyncio.create_task(keep(span, mine, Where(), quiet))
        async with pipeline, beside(*(each() for each in upkeep_of(pipeline, theirs, quiet))):
            before = await text(pipeline)
            await asyncio.to_thread(place.run_to_the_end, tmp_path / "workers", 2)
            assert not serving.done()
            assert await text(pipeline) == before
            asking = As(token=place.token)
            await asyncio.to_thread(publish, place.url, asking=asking, output=quiet)
            port = await serving
            assert port is not None
            folder = tmp_path / "stage"
            (moved,) = folder.glob("*/model")
            assert read_manifest(moved).made["rounds"] == [3, 3]
            again = Span.open(moved, 0, 1)
            serving = asyncio.create_task(keep(again, mine, Where(port=port), quiet))
            assert await text(pipeline) != before
            assert pipeline.model == again.holding.model != manifest.digest
            signal.raise_signal(signal.SIGTERM)
            assert await serving is None

    assert threading.current_thread() is threading.main_thread()  # for the signal
    asyncio.run(test())


def test_a_banned_member_loses_its_links_within_seconds(
    coordinate: Coordinate, member: Member, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First a gateway, which a stage turns out; then the stage, which another gateway leaves."""
    monkeypatch.setattr(belonging, "FOLLOW_EVERY", 0.1)
    monkeypatch.setattr(reach, "REFUSED", 0.1)
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    place = coordinate()
    stage, bad, good = (member(place, name) for name in ("stage", "bad", "good"))
    manifest, quiet = good.fetch([])[1], Output(json=True)

    def ban(who: Belonging) -> None:
        with closing(place.link()) as link:
            link.say("v1/ban", Ban(who.key.id), Done)

    async def test() -> None:
        span = Span.open(stage.fetch([0, 1])[0], 0, 1)
        async with Stage(span, *stage.member) as server:
            address = [f"127.0.0.1:{server.port}"]
            pipelines = [
                Pipeline(manifest.shape, manifest.digest, *who.member, address)
                for who in (bad, good)
            ]
            assert stage.banned is not None
            watching = watch_banned(stage.banned, server.ban)
            upkeep = upkeep_of(pipelines[1], good, quiet)
            async with pipelines[0], pipelines[1], beside(watching, *(each() for each in upkeep)):
                await until(lambda: all(each.report() for each in pipelines))
                await asyncio.to_thread(ban, bad)
                await until(lambda: not pipelines[0].report())
                await until(lambda: "banned" in " ".join(pipelines[0].troubles))
                assert (await pipelines[1].session()).holdings  # nobody else is put out
                assert server.report().refused["NotAllowed"] >= 1
                assert server.report().links == 1
                await asyncio.to_thread(ban, stage)
                await until(lambda: not pipelines[1].report())
                await until(lambda: "banned from the run" in " ".join(pipelines[1].troubles))
                await until(lambda: server.report().links == 0)

    asyncio.run(test())
