"""Members of a run: their papers, what they announce, and the blocks they fetch."""

import asyncio
import json
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from blocktrain.aggregation import backup
from blocktrain.aggregation.folder import owners_token
from blocktrain.commands.listen import Listen
from blocktrain.errors import BadInput, BadModel, NoBlob, NotAllowed
from blocktrain.learning.data import Corpus
from blocktrain.learning.files import load_block, read_manifest
from blocktrain.learning.local import parameters_of
from blocktrain.services.announcing import Voice
from blocktrain.services.begin import Settings, begin
from blocktrain.services.coordinator import serving
from blocktrain.services.coordinator.serving import LIFE
from blocktrain.services.follow import Follower, fetch_blocks
from blocktrain.services.membership import Membership, become_member
from blocktrain.terms import Digest
from blocktrain.wire import messages, owner, signing
from blocktrain.wire.certificates import end_of_member, load_authority
from blocktrain.wire.link import Link
from blocktrain.wire.serving import Announce, Heard, Holding, Publish, Stages
from blocktrain.wire.serving import Place as ServedAt
from blocktrain.wire.signing import new_key
from blocktrain.wire.tls import client_context, member_host, peer_id, server_context

from .conftest import QUICK, TINY, Coordinate, Place


def member(place: Place, folder: Path) -> Membership:
    """Somebody with a token of their own."""
    issued = place.link().say("v1/tokens", owner.Issue("member"), owner.Issued)
    return become_member(place.link(issued.token), issued.token, folder, "member")


def announcement(id: str, port: int = 9000, leaving: bool = False) -> Announce:
    holding = Holding(Digest("ab" * 32), 0, 1, "fp32", "cpu")
    return Announce(ServedAt(id, "10.0.0.7", port), holding, 1, 3, leaving)


# --- papers ---------------------------------------------------------------------------------------


async def meet(server: Membership, client: Membership) -> tuple[str | None, bytes]:
    """A real link between two members; whom the server saw, and what the client heard."""
    seen: list[str | None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(peer_id(writer.get_extra_info("ssl_object")))
        writer.write(await reader.readexactly(5))
        writer.close()

    serves = server_context(*server.papers, server.authority, require_clients=True)
    listener = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=serves)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        asks = client_context(client.authority, client.papers)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=asks, server_hostname=member_host(server.id)
        )
        writer.write(b"hello")
        heard = await reader.read()
        writer.close()
        await writer.wait_closed()
    return seen[0], heard


@pytest.mark.parametrize("tls", ["off", "auto"])
def test_members_meet_by_the_papers_that_they_get(
    coordinate: Coordinate, tmp_path: Path, tls: Literal["off", "auto"]
) -> None:
    place = coordinate(listen=Listen(port=0, tls=tls))
    authority = load_authority(place.folder)
    trusted = client_context(authority.pem) if tls == "auto" else None
    ann, bob = (
        become_member(place.link(verify=trusted), place.token, tmp_path / name, name)
        for name in ("ann", "bob")
    )
    assert ann.authority == authority.pem
    assert ann.charter == place.keeper.charter
    assert asyncio.run(meet(ann, bob)) == (bob.id, b"hello")
    assert (tmp_path / "ann" / "key.pem").stat().st_mode & 0o077 == 0
    again = become_member(place.link(verify=trusted), place.token, tmp_path / "ann", "ann")
    assert again.id == ann.id  # after a restart it is the same one
    assert asyncio.run(meet(bob, again)) == (ann.id, b"hello")


def test_the_command_makes_an_authority_for_a_run_that_has_none(
    coordinate: Coordinate, tmp_path: Path, corpus: Corpus
) -> None:
    run = tmp_path / "old"
    begin(run, Settings("old", TINY, QUICK), corpus)
    for name in ("authority.key", "authority.pem"):
        (run / name).unlink()
    command = [sys.executable, "-m", "blocktrain", "coordinator", str(run), "--port", "0", "--json"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        told = json.loads(child.stdout.readline())
        assert told["fingerprint"] is None  # links to it are plain ones
        with closing(Link(told["url"], patience=20.0)) as link:
            ann = become_member(link, owners_token(run), tmp_path / "ann")
    finally:
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=20)
    assert ann.authority == load_authority(run).pem


def test_papers_are_renewed_after_half_of_their_life(
    coordinate: Coordinate, tmp_path: Path
) -> None:
    ann = member(coordinate(), tmp_path / "ann")
    context = server_context(*ann.papers, ann.authority, require_clients=True)
    before, now = ann.papers.certificate.read_bytes(), datetime.now(UTC)
    assert abs(end_of_member(before, ann.authority, ann.id) - now - LIFE) < timedelta(minutes=1)
    assert not ann.renew()
    assert not ann.renew(now + LIFE / 2 - timedelta(hours=1))
    assert ann.papers.certificate.read_bytes() == before
    assert ann.renew(now + LIFE / 2 + timedelta(hours=1))
    assert ann.papers.certificate.read_bytes() != before
    context.load_cert_chain(*ann.papers)  # as a stage does that goes on serving


def test_no_papers_for_whoever_is_no_member_any_more(
    coordinate: Coordinate, tmp_path: Path
) -> None:
    place = coordinate()
    ann = member(place, tmp_path / "ann")
    with pytest.raises(NotAllowed, match="session"):
        place.link().ask("v1/certificate", messages.Certified)  # not even the owner's token
    place.link().say("v1/ban", owner.Ban(ann.id), messages.Done)
    soon = datetime.now(UTC) + LIFE
    for forbidden in (
        lambda: ann.renew(soon),
        ann.stages,
        lambda: ann.announce(announcement(ann.id)),
    ):
        with pytest.raises(NotAllowed, match="takes nothing more"):
            forbidden()


def test_another_members_certificate_is_not_taken(coordinate: Coordinate, tmp_path: Path) -> None:
    """A coordinator that errs is noticed before the papers are needed."""
    place = coordinate()
    ann, bob = (member(place, tmp_path / name) for name in ("ann", "bob"))
    before = ann.papers.certificate.read_bytes()
    ann.link.bearer = bob.link.bearer  # so that it is bob's certificate that comes
    with pytest.raises(Exception, match="tell the run's owner"):
        ann.renew(datetime.now(UTC) + LIFE)
    assert ann.papers.certificate.read_bytes() == before
    assert ssl.PEM_cert_to_DER_cert(ann.authority.decode())


def test_a_restored_coordinator_is_joined_again(coordinate: Coordinate, tmp_path: Path) -> None:
    place = coordinate()
    backup.back_up(place.folder, tmp_path / "run.tar")
    ann = become_member(place.link(), place.token, tmp_path / "ann", "ann")
    backup.restore(tmp_path / "run.tar", tmp_path / "restored")
    other = coordinate(folder=tmp_path / "restored")
    session = ann.link.bearer
    ann.link = other.link(session)
    with pytest.raises(NotAllowed, match="not known here"):
        ann.link.ask("v1/certificate", messages.Certified)
    ann.announce(announcement(ann.id))
    assert [each.place.stage for each in ann.stages()] == [ann.id]


# --- who serves what ------------------------------------------------------------------------------


def test_stages_are_seen_by_members_until_they_leave(
    coordinate: Coordinate, tmp_path: Path
) -> None:
    place = coordinate()
    ann, bob = (member(place, tmp_path / name) for name in ("ann", "bob"))
    assert bob.stages() == []
    ann.announce(announcement(ann.id))
    bob.announce(announcement(bob.id))
    ann.announce(announcement(ann.id, port=9001))  # it moved
    ports = {each.place.stage: each.place.port for each in bob.stages()}
    assert ports == {ann.id: 9001, bob.id: 9000}
    assert len(place.link().ask("v1/stages", Stages).stages) == 2  # the owner may look, too
    with pytest.raises(NotAllowed):
        place.link("a-guessed-token").ask("v1/stages", Stages)
    bob.announce(announcement(bob.id, leaving=True))
    assert [each.place.stage for each in ann.stages()] == [ann.id]


def send_away(place: Place, ann: Membership, gone: str) -> None:
    """The owner bans her, or revokes the token that she, the first one, came with."""
    link = place.link()
    if gone == "banned":
        link.say("v1/ban", owner.Ban(ann.id), messages.Done)
    else:
        token = link.ask("v1/tokens", owner.Tokens).tokens[1]
        link.say("v1/tokens/revoke", owner.Revoke(token.hash), messages.Done)


@pytest.mark.parametrize("gone", ["banned", "revoked"])
def test_a_stage_whose_owner_is_sent_away_is_gone(
    coordinate: Coordinate, tmp_path: Path, gone: str
) -> None:
    place = coordinate()
    ann, bob = (member(place, tmp_path / name) for name in ("ann", "bob"))
    ann.announce(announcement(ann.id))
    bob.announce(announcement(bob.id))
    send_away(place, ann, gone)
    assert [each.place.stage for each in bob.stages()] == [bob.id]


@pytest.mark.parametrize("gone", ["banned", "revoked"])
def test_members_learn_who_is_one_no_more(
    coordinate: Coordinate, tmp_path: Path, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = coordinate()
    ann, bob = (member(place, tmp_path / name) for name in ("ann", "bob"))
    assert bob.banned() == []
    send_away(place, ann, gone)
    assert bob.banned() == [ann.id]
    with pytest.raises(NotAllowed):
        ann.banned()
    monkeypatch.setattr(serving, "DOUBT", -LIFE)  # as if all that were long ago
    assert bob.banned() == []


def test_nobody_announces_for_another(coordinate: Coordinate, tmp_path: Path) -> None:
    place = coordinate()
    ann, bob = (member(place, tmp_path / name) for name in ("ann", "bob"))
    body = messages.encode(announcement(ann.id))

    def signed(key: signing.Key, purpose: str, by: str) -> messages.Signed:
        return messages.Signed(body, by, signing.sign(key, body, purpose).hex())

    right = signed(ann.key, "announce", ann.id)
    with pytest.raises(NotAllowed, match="another worker"):
        bob.link.say("v1/stages", right, messages.Done)  # overheard
    for lie in (
        signed(bob.key, "announce", bob.id),
        signed(bob.key, "announce", ann.id),
        signed(ann.key, "update", ann.id),
        signed(new_key(), "announce", ann.id),
    ):
        with pytest.raises(NotAllowed, match="signature"):
            ann.link.say("v1/stages", lie, messages.Done)
    assert ann.stages() == []
    assert ann.link.say("v1/stages", right, Heard).taken is False  # it has no word


def test_what_a_stage_said_cannot_be_said_again(coordinate: Coordinate, tmp_path: Path) -> None:
    """Not even by somebody who overheard its session, too."""
    ann = member(coordinate(), tmp_path / "ann")
    told: list[messages.Signed] = []
    say = ann.link.say

    def overheard(path: str, message: messages.Signed, *kinds: Any) -> Any:
        told.append(message)
        return say(path, message, *kinds)

    ann.link.say = overheard  # type: ignore[method-assign, assignment]
    ann.announce(announcement(ann.id))
    ann.announce(announcement(ann.id, port=9001))
    assert len(told) == 3  # the first one had no word
    assert [each.place.port for each in ann.stages()] == [9001]
    assert not any(say("v1/stages", each, Heard).taken for each in told)
    assert [each.place.port for each in ann.stages()] == [9001]
    ann.announce(announcement(ann.id, leaving=True))
    assert not any(say("v1/stages", each, Heard).taken for each in told)
    assert ann.stages() == []
    ann.announce(announcement(ann.id))  # said by a thread that was slow: it has left
    assert ann.stages() == []


def test_however_many_announce_it_can_be_read(coordinate: Coordinate, tmp_path: Path) -> None:
    """Their number is told as far as it fits, and asking too often is refused as ever."""
    place = coordinate()
    ann = member(place, tmp_path / "ann")
    coordinator = place.coordinator
    crowd = [new_key().id for _ in range(1000)]
    for id in crowd:
        coordinator.office.door.members[id] = None  # type: ignore[index]
        hear = partial(coordinator.serving.registry.hear, now=time.monotonic(), of=id)
        Voice(hear)(announcement(id))
    assert 500 < len(ann.stages()) < 1000


# --- blocks ---------------------------------------------------------------------------------------


@pytest.fixture
def trained(coordinate: Coordinate, tmp_path: Path) -> Place:
    """A run that is over."""
    place = coordinate(replace(TINY, pace=replace(TINY.pace, rounds=2)))
    place.run_to_the_end(tmp_path / "workers", 2)
    return place


def test_members_fetch_their_blocks_and_agree_on_the_model(trained: Place, tmp_path: Path) -> None:
    ann, bob = (member(trained, tmp_path / name) for name in ("ann", "bob"))
    size = trained.keeper.charter.snapshot_size(0)
    before = ann.link.moved.received
    folder, manifest = fetch_blocks(ann, [0])
    assert size < ann.link.moved.received - before < size + 10_000  # only what it needs
    other, theirs = fetch_blocks(bob, [1])
    gateway, named = fetch_blocks(member(trained, tmp_path / "gateway"), [])
    assert manifest.digest == theirs.digest == named.digest
    assert manifest.made["rounds"] == [2, 2]
    for place, held in ((folder, [0]), (other, [1]), (gateway, [])):
        assert read_manifest(place) == manifest
        files = {path.name for path in place.iterdir()} - {"manifest.json"}
        assert files == {manifest.blocks[block].file for block in held}
    follower = Follower(trained.link(), tmp_path / "fetched")
    _, model = follower.assemble(*follower.checkpoint())
    for place, block in ((folder, 0), (other, 1)):
        found = parameters_of(load_block(place, manifest, block))
        expected = parameters_of(model.blocks[block])
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in found)
        with pytest.raises(BadModel, match="missing"):
            load_block(place, manifest, 1 - block)
    with pytest.raises(BadInput, match="There is no block 3"):
        fetch_blocks(ann, [2])


def test_what_is_there_is_not_fetched_again_and_damage_is_healed(
    trained: Place, tmp_path: Path
) -> None:
    ann = member(trained, tmp_path / "ann")
    folder, manifest = fetch_blocks(ann, [0, 1])
    entry = manifest.blocks[0]
    path = folder / entry.file
    body = path.read_bytes()

    def received(work: Callable[[], object]) -> int:
        before = ann.link.moved.received
        work()
        return ann.link.moved.received - before

    assert received(lambda: fetch_blocks(ann, [0, 1])) < 10_000
    path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    assert received(lambda: fetch_blocks(ann, [0])) > len(body)
    assert path.read_bytes() == body
    path.rename(path.with_name(path.name + ".part"))  # as if the line had been cut just before
    with path.with_name(path.name + ".part").open("r+b") as part:
        part.truncate(len(body) - 1000)
    assert 1000 < received(lambda: fetch_blocks(ann, [0])) < 11_000
    assert path.read_bytes() == body
    load_block(folder, manifest, 0)
    assert (folder / manifest.blocks[1].file).is_file()  # another span of the same model may stay


def test_a_newer_checkpoint_takes_the_place_of_the_older(
    coordinate: Coordinate, tmp_path: Path
) -> None:
    place = coordinate()
    ann = member(place, tmp_path / "ann")
    folder, first = fetch_blocks(ann, [0])
    assert first.made["rounds"] == [0, 0]
    (folder / f"{first.blocks[1].file}.part").write_bytes(b"half")
    place.run_to_the_end(tmp_path / "workers", 2)
    assert fetch_blocks(ann, [0])[1] == first
    place.link().say("v1/served", Publish("newest"), owner.Checkpoint)
    again, last = fetch_blocks(ann, [0])
    assert again == folder
    assert last.digest != first.digest
    assert {path.name for path in folder.iterdir()} == {"manifest.json", last.blocks[0].file}


def test_a_block_that_was_pruned_meanwhile_is_no_end(trained: Place, tmp_path: Path) -> None:
    ann = member(trained, tmp_path / "ann")
    found = ann.checkpoint()
    gone = replace_versions(found, Digest("1" * 64))
    told = [gone, gone, found]
    ann.checkpoint = lambda: told.pop(0)  # type: ignore[method-assign]
    folder, manifest = fetch_blocks(ann, [1])
    assert told == []
    assert read_manifest(folder) == manifest
    load_block(folder, manifest, 1)
    ann.checkpoint = lambda: gone  # type: ignore[method-assign]
    with pytest.raises(NoBlob):
        fetch_blocks(ann, [1])
    assert read_manifest(folder) == manifest  # what was there still is


def replace_versions(found: owner.Checkpoint, steady: Digest) -> owner.Checkpoint:
    versions = [
        messages.Version(each.block, each.round, each.snapshot, steady, each.delta)
        for each in found.versions
    ]
    return owner.Checkpoint(found.run, found.charter, versions, found.ended)


def test_a_checkpoint_of_something_else_is_not_believed(trained: Place, tmp_path: Path) -> None:
    ann = member(trained, tmp_path / "ann")
    ann.admitted = replace(ann.admitted, run=Digest("0" * 64))
    with pytest.raises(BadInput, match="do not trust"):
        fetch_blocks(ann, [0])
