"""The training network: real sockets, real messages, and the same digests as the lab's."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from blocktrain.aggregation import backup
from blocktrain.aggregation.folder import RunFolder
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.commands.listen import Listen
from blocktrain.errors import (
    BadInput,
    BadRun,
    BlockTrainError,
    CannotSave,
    NoBlob,
    NotAllowed,
    OtherProtocol,
    TrafficSpent,
    Unreachable,
)
from blocktrain.learning.data import Corpus
from blocktrain.learning.objective import Task
from blocktrain.services.begin import Settings, begin
from blocktrain.services.embedded import Embedded, status
from blocktrain.services.follow import Follower
from blocktrain.services.replay import replay
from blocktrain.services.run import Exchange, Pace
from blocktrain.services.worker import Worker
from blocktrain.terms import Digest
from blocktrain.wire import messages, owner, signing
from blocktrain.wire.certificates import load_authority
from blocktrain.wire.tls import trust_by_fingerprint

from .conftest import QUICK, TINY, Coordinate, Place


def settled(folder: Path) -> None:
    """Every update that was taken is in exactly one snapshot, and every block is finished."""
    with SqliteLedger(folder / "ledger.sqlite") as ledger, ledger.reading() as r:
        for block in range(TINY.shape.blocks):
            newest = r.newest(block)
            assert newest is not None
            assert r.outstanding(block) == []
            combined = [
                receipt.update
                for round in range(1, newest.round + 1)
                for receipt in r.combined(block, round)
            ]
            taken = [each.update for each in r.receipts(block) if each.verdict == "taken"]
            assert sorted(combined) == sorted(taken)
            assert len(set(combined)) == len(combined)


def test_a_killed_worker_is_started_again_and_the_lab_gets_the_same_digests(
    tmp_path: Path, corpus: Corpus, words: Path
) -> None:
    run = replace(TINY, pace=Pace(rounds=6, local_steps=2, batch=4))
    crew = Embedded(tmp_path, 2, str(words))
    begin(crew.run, Settings("test", run, QUICK), corpus)
    killed = False
    deadline = time.monotonic() + 120
    with crew.up() as link:
        while (now := status(link)).state != "ended":
            assert time.monotonic() < deadline
            if not killed and min(block.round for block in now.blocks) >= 2:
                child = crew.children[1].process
                assert child is not None
                child.kill()
                child.wait()
                killed = True
            crew.look_after()
            time.sleep(0.1)
    assert killed
    settled(crew.run)
    with SqliteLedger(crew.run / "ledger.sqlite") as ledger:
        again = replay(ledger, corpus, tmp_path / "again")
    assert again.different == []
    assert (again.rounds, again.snapshots) == (6, 12)
    assert again.updates >= 12


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_the_lab_gets_the_same_digests_with_replicas_and_codecs(
    coordinate: Coordinate, tmp_path: Path, corpus: Corpus, codec: str
) -> None:
    run = replace(TINY, pace=Pace(rounds=3, local_steps=2, batch=2, replicas=2))
    place = coordinate(run, codec, timing=replace(QUICK, floor=20.0))  # nobody is late here
    crew = place.run_to_the_end(tmp_path / "workers", 4)
    assert sum(each.gave.updates for each in crew) == 12
    settled(place.folder)
    again = replay(place.keeper.ledger, corpus, tmp_path / "again")
    assert again.different == []
    assert (again.rounds, again.updates, again.snapshots) == (3, 12, 6)


def test_a_replay_notices_a_difference(
    coordinate: Coordinate, tmp_path: Path, corpus: Corpus
) -> None:
    place = coordinate(replace(TINY, pace=replace(TINY.pace, rounds=1)))
    place.run_to_the_end(tmp_path / "workers", 2)
    other = replace(corpus, train=np.flip(corpus.train))
    found = replay(place.keeper.ledger, other, tmp_path / "again")
    assert "the update of slot 0 for block 1, round 1" in found.different


def test_workers_count_their_bytes_and_follow_by_deltas(
    coordinate: Coordinate, tmp_path: Path
) -> None:
    place = coordinate(replace(TINY, pace=replace(TINY.pace, rounds=6)), "int4")
    crew = place.run_to_the_end(tmp_path / "workers", 2)
    charter = place.keeper.charter
    now = status(place.link())
    moved = sum(each.traffic().sent + each.traffic().received for each in crew)
    assert moved - 4096 < now.bytes_moved <= moved  # the last farewells are told to nobody
    # Six updates go up and five or six rounds of two deltas come down to each worker.
    bodies = sum(
        6 * charter.update_size(block) + 11 * charter.update_size(1 - block) for block in (0, 1)
    )
    assert bodies * 0.8 < now.bytes_moved < bodies * 1.2 + 60_000  # and some headers
    assert now.bytes_moved < 12 * charter.snapshot_size(0)


def blocks_in(worker: Worker) -> set[int]:
    """Of which blocks anything lies in its folder."""
    return {int(path.name.split("-")[0]) for path in worker.holdings.folder.iterdir()}


def test_a_late_joiner_needs_only_its_blocks(coordinate: Coordinate, tmp_path: Path) -> None:
    """The first of five blocks looks at the next one, the last one at all before it."""
    run = replace(
        TINY,
        shape=replace(TINY.shape, blocks=5),
        task=Task(lookahead=1),
        pace=Pace(rounds=6, local_steps=1, batch=1),
    )
    place = coordinate(run)
    first = place.worker(tmp_path / "first", name="first")
    first.join()
    while place.keeper.state.blocks[0].versions[-1].round < 3:
        assert first.turn()
    early, last = (place.worker(tmp_path / str(block), block=block) for block in (1, 5))
    for late in (early, last):
        late.join()
    first.blocks = [1, 2, 3]
    while not place.keeper.state.ended:
        for each in (early, last, first, first, first):  # one round: nobody waits for another
            each.turn()
    assert early.gave.updates > 0
    assert last.gave.updates > 0
    assert blocks_in(early) == {0, 1}
    assert blocks_in(last) == {0, 1, 2, 3, 4}
    pair = place.keeper.charter.snapshot_size(0) + place.keeper.charter.snapshot_size(1)
    assert early.traffic().received < 2 * pair + early.gave.updates * pair + 60_000


def test_ctrl_c_submits_what_was_trained(
    coordinate: Coordinate, tmp_path: Path, corpus: Corpus
) -> None:
    pace = Pace(rounds=1, local_steps=4000, batch=4)
    place = coordinate(replace(TINY, pace=pace))
    command = [sys.executable, "-m", "blocktrain", "join", place.url, "--token", place.token]
    command += ["--folder", str(tmp_path / "w"), "--data", str(place.words), "--block", "1"]
    child = subprocess.Popen(
        [*command, "--threads", "1", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not any(seat.held for seat in place.keeper.state.blocks[0].seats):
        assert child.poll() is None
        time.sleep(0.05)
    time.sleep(1.5)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=30)
    assert child.returncode == 0
    gave = msgspec.json.decode(out.splitlines()[-1])
    assert gave["updates"] == 1
    assert 0 < gave["bytes_trained"] < 4000 * 4 * 32
    with place.keeper.ledger.reading() as r:
        (receipt,) = r.receipts(0)
    assert receipt.bytes_trained == gave["bytes_trained"]
    assert not any(seat.held for seat in place.keeper.state.blocks[0].seats)


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "blocktrain", "join", url, "--token", "a-token"]
        with subprocess.Popen(
            [*command, "--folder", str(tmp_path)], stderr=subprocess.PIPE, text=True
        ) as child:
            assert child.stderr is not None
            link, _ = silent.accept()  # it has asked, and waits for an answer that does not come
            with link:
                child.send_signal(signal.SIGINT)
                assert "once more to leave at once" in child.stderr.readline()
                child.send_signal(signal.SIGINT)
                assert child.wait(5) == 130


def test_an_update_without_a_receipt_survives_kill_9(
    coordinate: Coordinate, tmp_path: Path
) -> None:
    place = coordinate()
    worker = place.worker(tmp_path / "w", block=1)
    worker.join()
    submit, worker.submit_pending = worker.submit_pending, lambda: None  # type: ignore[method-assign]
    worker.turn()  # trained, written, and then the power went
    assert worker.gave.updates == 0
    assert (worker.notebook.pending / "update.json").is_file()
    del submit
    again = place.worker(tmp_path / "w", block=1)
    again.join()
    again.turn()
    assert again.gave.updates == 1 or again.gave.updates == 2
    with place.keeper.ledger.reading() as r:
        rounds = [receipt.round for receipt in r.receipts(0)]
    assert rounds[0] == 1
    assert len(set(rounds)) == len(rounds)


def test_a_worker_that_is_let_in_again_counts_its_bytes_once(
    coordinate: Coordinate, tmp_path: Path
) -> None:
    place = coordinate()
    worker = place.worker(tmp_path / "w", block=1)
    worker.join()
    worker.turn()  # its receipt is remembered together with the bytes so far
    worker.join()
    assert worker.traffic() == messages.Traffic(worker.link.moved.sent, worker.link.moved.received)
    worker.notebook.keep_traffic(before := worker.traffic())
    again = place.worker(tmp_path / "w", block=1)  # another life
    assert again.traffic().sent == 0
    again.join()
    assert again.traffic().sent == before.sent + again.link.moved.sent


def test_the_optimiser_goes_on_where_it_was(coordinate: Coordinate, tmp_path: Path) -> None:
    place = coordinate(replace(TINY, pace=replace(TINY.pace, rounds=2)))
    for life in range(2):
        crew = [place.worker(tmp_path / name, block=1 + (name == "b")) for name in "ab"]
        for each in crew:
            each.join()
        for each in crew:
            while each.gave.updates == 0:
                assert each.turn()
        assert place.keeper.state.blocks[0].round >= life
    with place.keeper.ledger.reading() as r:
        told = [
            messages.decode(messages.decode(each.signed, messages.Signed).body, messages.Update)
            for each in r.receipts(0)
        ]
    assert told[1].optimiser_before == told[0].optimiser_after


def test_owners_pause_resume_and_stop(coordinate: Coordinate, tmp_path: Path) -> None:
    place = coordinate(replace(TINY, pace=replace(TINY.pace, rounds=50)))
    link = place.link()
    worker = place.worker(tmp_path / "w")
    worker.join()
    worker.turn()
    link.say("v1/command", owner.Command("pause"), messages.Done)
    assert status(link).state == "paused"
    ask = messages.Ask(worker.key.id)
    waiting = worker.link.say("v1/ask", ask, messages.Wait, messages.Assignment, messages.Finished)
    assert isinstance(waiting, messages.Wait)
    assert "paused" in waiting.why
    link.say("v1/command", owner.Command("resume"), messages.Done)
    assert status(link).state == "running"
    worker.turn()
    link.say("v1/command", owner.Command("stop"), messages.Done)
    deadline = time.monotonic() + 10
    while status(link).state != "ended":
        assert time.monotonic() < deadline
        worker.turn()
    settled(place.folder)
    kinds = [event.kind for event in status(link).events]
    assert [kind for kind in kinds if kind in ("paused", "resumed", "stopping", "ended")] == [
        "paused",
        "resumed",
        "stopping",
        "ended",
    ]


def test_nobody_comes_in_without_a_token_or_after_it_was_revoked(
    coordinate: Coordinate, tmp_path: Path
) -> None:
    place = coordinate()
    stranger = place.worker(tmp_path / "stranger")
    stranger.token = "not-a-token-of-this-run"
    with pytest.raises(NotAllowed, match="unknown or revoked"):
        stranger.join()
    issued = place.link().say("v1/tokens", owner.Issue("for anna"), owner.Issued)
    anna = place.worker(tmp_path / "anna")
    anna.token = issued.token
    anna.join()
    for path, said in [
        ("v1/command", owner.Command("stop")),
        ("v1/ban", owner.Ban(anna.key.id)),
        ("v1/tokens", owner.Issue("x")),
        ("v1/evaluations", owner.Evaluated([0, 0], 1.0, 1)),
    ]:
        for token in (issued.token, anna.link.bearer, "guess-guess"):
            with pytest.raises(NotAllowed):
                place.link(token).say(path, said, messages.Done)
    place.link().say("v1/tokens/revoke", owner.Revoke(issued.hash[:12]), messages.Done)
    with pytest.raises(NotAllowed, match="revoked"):
        anna.link.say("v1/ask", messages.Ask(anna.key.id), messages.Wait)
    with pytest.raises(NotAllowed, match="revoked"):
        anna.join()
    listed = place.link().ask("v1/tokens", owner.Tokens).tokens
    assert [(each.role, each.label, each.revoked is None) for each in listed] == [
        ("owner", "owner", True),
        ("worker", "for anna", False),
    ]


def test_a_banned_worker_is_out_and_what_it_gave_is_dropped(
    coordinate: Coordinate, tmp_path: Path
) -> None:
    pace = replace(TINY.pace, replicas=2, rounds=2)
    place = coordinate(replace(TINY, pace=pace))
    bad = place.worker(tmp_path / "bad", block=1)
    bad.join()
    bad.turn()
    assert bad.gave.updates == 1
    place.link().say("v1/ban", owner.Ban(bad.key.id[:8]), messages.Done)
    with pytest.raises(NotAllowed, match="nothing more"):
        bad.turn()
    place.run_to_the_end(tmp_path / "workers", 4)
    with place.keeper.ledger.reading() as r:
        (given,) = [each for each in r.receipts() if str(each.worker) == bad.key.id]
        manifests = [place.keeper.store.get(v.manifest) for v in r.versions() if v.manifest]
    assert given.dropped is not None
    assert given.into_round is None
    assert all(bad.key.id.encode() not in body for body in manifests)


def test_a_closed_round_is_signed_with_its_shares(coordinate: Coordinate, tmp_path: Path) -> None:
    place = coordinate()
    place.run_to_the_end(tmp_path / "workers", 2)
    with place.keeper.ledger.reading() as r:
        version = r.version(0, 2)
        assert version is not None
        assert version.manifest is not None
        combined = r.combined(0, 2)
    member = place.worker(tmp_path / "member")
    member.join()
    for link in (member.link, place.link()):
        signed = link.ask("v1/manifests/0/2", messages.Signed)
        assert messages.encode(signed) == place.keeper.store.get(version.manifest)
    signature = bytes.fromhex(signed.signature)
    assert signing.verify(place.keeper.key.id, signed.body, "closed", signature)
    closed = messages.decode(signed.body, messages.Closed)
    assert (closed.snapshot, closed.steady) == (version.snapshot, version.steady)
    assert [share.update for share in closed.shares] == [each.update for each in combined]
    assert sum(each.share or 0 for each in combined) == pytest.approx(1)
    for nothing in ("0/0", "0/4", "2/1", "0/999999999999999"):
        with pytest.raises(NoBlob, match="not closed"):
            member.link.ask(f"v1/manifests/{nothing}", messages.Signed)
    with pytest.raises(BadInput, match="no number"):
        member.link.ask("v1/manifests/0/-1", messages.Signed)
    with pytest.raises(NotAllowed):
        place.link("a-guessed-token").ask("v1/manifests/0/2", messages.Signed)


def test_under_a_base_path_and_over_tls_with_a_fingerprint(
    coordinate: Coordinate, tmp_path: Path
) -> None:
    place = coordinate(listen=Listen(port=0, base_path="/a/run", tls="auto"))
    assert place.url.startswith("https://")
    assert place.url.endswith("/a/run")
    finger = load_authority(place.folder).fingerprint
    trusted = trust_by_fingerprint(place.url, finger)
    worker = place.worker(tmp_path / "w", block=1)
    worker.link = place.link(verify=trusted)
    worker.join()
    worker.turn()
    assert worker.gave.updates == 1
    with pytest.raises(NotAllowed, match="fingerprint"):
        trust_by_fingerprint(place.url, "0" * 64)
    with pytest.raises((NotAllowed, Unreachable)):
        place.link(patience=1.0).ask("v1/hello", messages.Hello)


def test_a_private_text_is_served_to_members_only(coordinate: Coordinate, tmp_path: Path) -> None:
    place = coordinate(serve_corpus=True)
    worker = place.worker(tmp_path / "w", data=None, block=1)
    worker.join()
    assert worker.corpus.digest == place.keeper.charter.corpus
    worker.turn()
    assert worker.gave.updates == 1
    length, digest = place.keeper.charter.splits[0]
    with pytest.raises(NotAllowed):
        place.link("a-guessed-token").fetch("v1/corpus/train", digest, tmp_path / "x", length)
    for name in ("..", "owner.token", "%2e%2e%2fowner.token"):
        with pytest.raises(BlockTrainError):
            place.link().fetch(f"v1/corpus/{name}", digest, tmp_path / "x", length)


def test_a_backup_taken_while_it_runs_goes_on_elsewhere(
    coordinate: Coordinate, tmp_path: Path
) -> None:
    place = coordinate(replace(TINY, pace=replace(TINY.pace, rounds=4)), "int8")
    worker = place.worker(tmp_path / "w")
    worker.join()
    while place.keeper.state.blocks[1].versions[-1].round < 2:
        worker.turn()
    size = backup.back_up(place.folder, tmp_path / "run.tar")
    assert size == (tmp_path / "run.tar").stat().st_size
    assert (tmp_path / "run.tar").stat().st_mode & 0o077 == 0
    backup.restore(tmp_path / "run.tar", tmp_path / "restored")
    with pytest.raises(BadInput, match="not empty"):
        backup.restore(tmp_path / "run.tar", tmp_path / "restored")
    other = coordinate(folder=tmp_path / "restored")
    assert other.keeper.run == place.keeper.run
    assert other.keeper.state.blocks[1].versions[-1].round == 2
    other.run_to_the_end(tmp_path / "others", 2)
    settled(other.folder)
    (tmp_path / "not").write_bytes(b"x" * 4096)
    with pytest.raises(BadInput, match="no backup"):
        backup.restore(tmp_path / "not", tmp_path / "nowhere")


def test_one_coordinator_at_a_time(coordinate: Coordinate) -> None:
    place = coordinate()
    with pytest.raises(BadRun, match="Another coordinator"):
        RunFolder(place.folder)


def test_the_owner_measures_and_everybody_sees_it(
    coordinate: Coordinate, tmp_path: Path, corpus: Corpus
) -> None:
    place = coordinate()
    place.run_to_the_end(tmp_path / "workers", 2)
    row = Follower(place.link(), tmp_path / "fetched").measure(corpus)
    assert row["round"] == 3
    assert 0 < row["ce_sample"] < 6
    point = status(place.link()).curve[-1]
    assert point.ce == pytest.approx(row["ce_sample"], abs=1e-4)
    assert point.bytes_seen == 3 * 2 * 4 * 32


def test_metrics_and_pages(coordinate: Coordinate) -> None:
    import httpx

    place = coordinate()
    page = httpx.get(place.url)
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert httpx.get(f"{place.url}/static/app.js").status_code == 200
    assert httpx.get(f"{place.url}/static/../../coordinator.py").status_code == 404
    told = httpx.get(f"{place.url}/metrics").text
    assert 'blocktrain_round{block="1"} 1.0' in told
    assert "blocktrain_receipt_seconds_count" in told
    with httpx.stream("GET", f"{place.url}/v1/events") as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: status"
        body = next(lines).removeprefix("data: ").encode()
    assert messages.decode(body, owner.Status).run == place.keeper.run


def test_too_many_requests_are_slowed_down(coordinate: Coordinate) -> None:
    import httpx

    place = coordinate()
    with httpx.Client(base_url=place.url) as client:
        codes = [client.get("/v1/status").status_code for _ in range(150)]
    assert codes[0] == 200
    assert 429 in codes


def test_another_protocol_is_told_which_side_to_upgrade(
    coordinate: Coordinate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = coordinate()
    worker = place.worker(tmp_path / "w")
    key = worker.key
    join = messages.Join(1, place.keeper.run, key.id, "old", 1, "cpu", place.keeper.run)
    body = messages.encode(join)
    signed = messages.Signed(body, key.id, signing.sign(key, body, "join").hex())
    with pytest.raises(OtherProtocol, match="upgrade blocktrain on the worker"):
        place.link().say("v1/join", signed, messages.Joined)


def test_a_volunteers_limits(coordinate: Coordinate, tmp_path: Path) -> None:
    place = coordinate()
    with pytest.raises(CannotSave, match="--max-disk"):
        place.worker(tmp_path / "small", max_disk=1000).join()
    with pytest.raises(BadInput, match="There is no block 9"):
        place.worker(tmp_path / "nine", block=9).join()
    with pytest.raises(BadInput, match="--max-download"):
        place.worker(tmp_path / "thin", max_download=10.0).join()
    with pytest.raises(BadInput, match="--max-upload"):
        place.worker(tmp_path / "mute", max_upload=10.0).join()
    spent = place.worker(tmp_path / "spent")
    spent.link = place.link(limits=replace(spent.wishes, max_traffic=20_000).limits)
    spent.join()
    with pytest.raises(TrafficSpent):
        work_for_ever(spent)


def work_for_ever(worker: Worker) -> None:
    while worker.turn():
        pass


def test_blobs_are_for_members_and_no_longer_than_an_update(
    coordinate: Coordinate, tmp_path: Path
) -> None:
    place = coordinate()
    with pytest.raises(NotAllowed):
        place.link("a-guessed-token").send(f"v1/blobs/{'0' * 64}", b"x")
    worker = place.worker(tmp_path / "w")
    worker.join()
    largest = max(map(place.keeper.charter.update_size, range(2)))
    with pytest.raises(BadInput, match="at most"):
        worker.link.send(f"v1/blobs/{'0' * 64}", b"x" * (largest + 1))
    with pytest.raises(BadInput, match="digest"):
        worker.link.send(f"v1/blobs/{'0' * 64}", b"x")
    with pytest.raises(NoBlob, match="nothing here"):
        worker.link.send("v1/blobs/..%2fowner.token", b"x")
    with pytest.raises(BadInput, match="no digest"):
        worker.link.send("v1/blobs/owner.token", b"x")
    for n in range(3):
        body = bytes([n]) * 10
        worker.link.send(f"v1/blobs/{hashlib.sha256(body).hexdigest()}", body)
    with pytest.raises(NotAllowed, match="without naming"):
        worker.link.send(f"v1/blobs/{hashlib.sha256(b'y').hexdigest()}", b"y")
    with pytest.raises(NoBlob):
        worker.link.fetch(f"v1/blobs/{'1' * 64}", Digest("1" * 64), tmp_path / "x", 10)


def test_the_coordinator_needs_no_torch(tmp_path: Path) -> None:
    look = "import sys, blocktrain.commands.coordinator as c; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], env=os.environ).returncode == 0


def test_exchange_and_settings_are_checked(tmp_path: Path, corpus: Corpus) -> None:
    with pytest.raises(BadInput, match="no codec"):
        Exchange("zip")
    begin(tmp_path / "run", Settings("test", TINY, QUICK), corpus)
    with pytest.raises(BadRun, match="holds a run already"):
        begin(tmp_path / "run", Settings("test", TINY, QUICK), corpus)


def test_a_place_is_what_it_says(coordinate: Coordinate) -> None:
    place: Place = coordinate()
    hello = place.link().ask("v1/hello", messages.Hello)
    assert (hello.run, hello.coordinator) == (place.keeper.run, place.keeper.key.id)
