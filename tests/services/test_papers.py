"""Papers that end while somebody serves: new ones are got, found, asked for and loaded in time."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from blocktrain.errors import BadKey
from blocktrain.inference.pipeline import Pipeline
from blocktrain.inference.session import Asked
from blocktrain.inference.span import Span
from blocktrain.inference.stage import Stage
from blocktrain.services import papers, serving
from blocktrain.services.announcing import beside
from blocktrain.services.belonging import Belonging, Pass, belong
from blocktrain.services.children import Child
from blocktrain.services.coordinator import serving as coordinating
from blocktrain.services.papers import (
    Member,
    Watched,
    admit,
    authority_in,
    end_of,
    keep_papers,
    member_in,
)
from blocktrain.wire.certificates import Authority
from blocktrain.wire.serving import Choice
from blocktrain.wire.signing import load_key

from .conftest import Coordinate


def give(authority: Authority, member: Member, life: timedelta) -> None:
    """Papers that live so long from now on."""
    made = authority.issue_member(load_key(member.papers.key).id, life)
    member.papers.certificate.write_bytes(made)


def test_members_of_a_run_serve_longer_than_their_papers_live(
    coordinate: Coordinate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """A certificate lives for 3 seconds here; a text goes on for 5, and new links are opened."""
    monkeypatch.setattr(coordinating, "LIFE", timedelta(seconds=3))
    monkeypatch.setattr(papers, "LOOK_EVERY", 0.2)
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    place, troubles = coordinate(), list[str]()

    def member(name: str) -> Belonging:
        made = belong(place.url, Pass(token=place.token, folder=tmp_path / name))
        request.addfinalizer(made.close)
        return made

    stage_of, gateway_of, late = member("stage"), member("gateway"), member("late")
    folder, manifest = stage_of.fetch([0, 1])
    first = end_of(stage_of.member)
    span = Span.open(folder, 0, 1)

    async def test() -> None:
        async with Stage(span, *stage_of.member) as stage:
            where = [f"127.0.0.1:{stage.port}"]
            pipeline = Pipeline(manifest.shape, manifest.digest, *gateway_of.member, where)
            keeping = [
                keep_papers(stage_of.renew, stage.renew, troubles.append),
                keep_papers(gateway_of.renew, pipeline.renew, troubles.append),
            ]
            async with beside(*keeping), pipeline:
                session = await pipeline.session("fp32")
                replayed = 0
                for number in range(24):
                    choice = Choice(0.8, 1.0, 7, number)
                    tokens = [10, 84] if number == 0 else [65]
                    start = 0 if number == 0 else number + 1
                    said = await session.step(Asked(start, tokens, 1, 0, choice))
                    replayed += said.replayed
                    await asyncio.sleep(0.2)
                assert replayed == 0
                assert datetime.now(UTC) > first + timedelta(seconds=1)
                assert await asyncio.to_thread(late.renew)
                newcomer = Pipeline(manifest.shape, manifest.digest, *late.member, where)
                async with newcomer:
                    await (await newcomer.session("fp32")).step(Asked(0, [10], 1, 0, choice))

    asyncio.run(test())
    assert troubles == []
    assert end_of(stage_of.member) > first


def test_papers_that_the_owner_puts_into_a_folder_are_found(tmp_path: Path) -> None:
    authority = authority_in(tmp_path / "authority")
    member = admit(authority, tmp_path / "anna")
    watched = Watched(member)
    assert not watched.renew()
    give(authority, member, timedelta(days=3))
    assert watched.renew()
    with pytest.raises(BadKey, match=r"end on .* blocktrain admit AUTHORITY"):
        watched.renew()
    admit(authority, tmp_path / "anna")
    assert watched.renew()
    assert not watched.renew()
    member.papers.certificate.write_bytes(b"half of it")
    for _ in range(2):  # until they are put right
        with pytest.raises(BadKey, match="does not belong together"):
            watched.renew()


def test_papers_that_have_ended_are_not_tried(tmp_path: Path) -> None:
    authority = authority_in(tmp_path / "authority")
    member = admit(authority, tmp_path / "anna")
    give(authority, member, timedelta(seconds=-1))
    with pytest.raises(BadKey, match=r"ended on .* blocktrain admit AUTHORITY"):
        member_in(tmp_path / "anna")
    other = authority_in(tmp_path / "other")
    give(other, member, timedelta(days=1))
    with pytest.raises(BadKey, match="does not belong together"):
        member_in(tmp_path / "anna")


def test_a_trouble_with_papers_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(papers, "LOOK_EVERY", 0.01)
    answers = [True, BadKey("One."), BadKey("One."), BadKey("Two."), True, BadKey("Two."), False]
    loaded, told, over = list[int](), list[str](), asyncio.Event()

    def renew() -> bool:
        answer = answers.pop(0)
        if not answers:
            over.set()
        if isinstance(answer, BadKey):
            raise answer
        return bool(answer)

    async def test() -> None:
        async with beside(keep_papers(renew, lambda: loaded.append(1), told.append)):
            while answers:
                await asyncio.sleep(0.01)

    asyncio.run(test())
    assert told == ["One.", "Two.", "Two."]
    assert len(loaded) == 2


def test_who_serves_on_one_machine_renews_its_childrens_papers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = serving.Serving(tmp_path, tmp_path / "model")
    admit(authority_in(tmp_path / "authority"), tmp_path / "members" / "gateway")
    crew.children.append(Child("gateway", [], tmp_path / "log"))
    watched = Watched(member_in(tmp_path / "members" / "gateway"))
    crew.look_after()
    assert not watched.renew()
    monkeypatch.setattr(serving, "RENEW_AFTER", -1.0)
    crew.look_after()
    assert watched.renew()
