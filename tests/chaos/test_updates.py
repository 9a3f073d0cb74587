"""Updates that come twice, in another order, too late, from somebody else, or in pieces.

Each test scripts the workers by hand, then lets honest ones finish the run.
"""

import hashlib
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.chaos.light import Light, Made, begin_light, quick, signed
from tests.chaos.lives import Lives
from tests.chaos.network import Network, network
from tests.chaos.settled import Settled, settled

from blocktrain.aggregation.folder import BLOBS
from blocktrain.aggregation.folder_store import FolderStore
from blocktrain.errors import BadInput, NoBlob, NotAllowed
from blocktrain.terms import Digest
from blocktrain.wire.messages import Assignment, encode

PATIENT = {"floor": 60.0, "first_allowance": 60.0, "lease": 60.0}
"""Nothing happens by itself while a test takes its time."""


def joined(net: Network) -> Light:
    """A worker who has come in."""
    worker = net.worker()
    worker.join()
    return worker


def finished(net: Network) -> Settled:
    """Honest workers go on to the end."""
    net.set_to_work(*net.workers)
    net.finish()
    return settled(net.run, net.receipts)


def test_the_same_update_again_and_again(tmp_path: Path, lives: Lives) -> None:
    """At once, after its round has closed, after a kill, after the run: one receipt, one share."""
    begin_light(tmp_path / "run", quick(**PATIENT))
    with network(tmp_path / "run", lives) as net:
        first, second = joined(net), joined(net)
        made = first.make(first.assigned())
        receipt = first.send(made)
        assert (receipt.verdict, receipt.round, receipt.factor) == ("taken", 1, 1.0)
        assert first.send(made) == receipt
        second.send(second.make(second.assigned()))
        while second.assigned().round != 2:
            time.sleep(0.02)
        assert first.send(made) == receipt
        net.kill_coordinator()
        net.look_after()
        assert first.submit(made) == receipt
        finished(net)
        assert first.send(made) == receipt  # when no round remembers it any more
    assert len(settled(net.run, net.receipts).taken) == 6


def test_two_updates_for_one_slot(tmp_path: Path, lives: Lives) -> None:
    """The first one counts, whoever sends the second."""
    begin_light(tmp_path / "run", quick(**PATIENT))
    with network(tmp_path / "run", lives) as net:
        first, stranger = joined(net), joined(net)
        task = first.assigned()
        assert first.send(first.make(task)).verdict == "taken"
        again = first.send(first.make(task, luck=1))
        assert again.verdict == "refused"
        assert "came first" in again.why
        theirs = stranger.send(stranger.make(task, luck=2))
        assert theirs.verdict == "refused"
        assert "never yours" in theirs.why
        found = finished(net)
    assert len(found.taken) == 6
    assert len(found.refused) == 2


def test_the_order_of_arrival_does_not_matter(tmp_path: Path, lives: Lives) -> None:
    snapshots = []
    for order in (1, -1):
        run = tmp_path / f"run{order}"
        begin_light(run, quick(rounds=1, replicas=3, quorum=3, **PATIENT))
        with network(run, lives) as net:
            workers = [joined(net) for _ in range(3)]
            made = [(worker, worker.make(worker.assigned())) for worker in workers]
            for worker, update in made[::order]:
                assert worker.send(update).verdict == "taken"
            snapshots.append([version.snapshot for version in finished(net).versions])
    assert snapshots[0] == snapshots[1]


@pytest.mark.parametrize("forgotten", [False, True])
def test_an_update_that_comes_after_its_round(
    tmp_path: Path, lives: Lives, forgotten: bool
) -> None:
    """One round late it is salvaged, later it is refused, and the receipt says so.

    Also when its base is so old that its blob is not kept any more, and nobody remembers its norm.
    """
    begin_light(tmp_path / "run", quick(rounds=5, quorum=1, **PATIENT, grace=0.0))
    with network(tmp_path / "run", lives) as net:
        slow, brisk = joined(net), joined(net)
        late = slow.make(slow.assigned())
        assert brisk.send(brisk.make(brisk.assigned())).round == 1  # closes the round
        while (task := brisk.assigned()).round != 2:
            time.sleep(0.02)
        salvaged = slow.send(late)
        assert (salvaged.verdict, salvaged.round, salvaged.factor) == ("salvaged", 2, 0.5)
        assert "came late" in salvaged.why
        base = slow.assigned()
        assert base.round == 2
        too_late = slow.make(base)
        for round in (2, 3):
            assert brisk.send(brisk.make(task)).round == round
            task = brisk.assigned()
        if forgotten:
            FolderStore(net.run / BLOBS).delete(base.base.snapshot)
            net.kill_coordinator()
            net.look_after()
        refused = slow.send(too_late)
        assert refused.verdict == "refused"
        assert "too long ago" in refused.why
        found = finished(net)
    assert late.name in [receipt.update for receipt in found.late]
    assert too_late.name in [receipt.update for receipt in found.refused]


@pytest.mark.parametrize("lie", ["key", "words", "session", "worker", "run"])
def test_a_forged_update(tmp_path: Path, lives: Lives, lie: str) -> None:
    """Nobody speaks for another: not by key, not by changed words, not by session."""
    begin_light(tmp_path / "run", quick(**PATIENT))
    with network(tmp_path / "run", lives) as net:
        honest, forger = joined(net), joined(net)
        task = honest.assigned()
        made = honest.make(task)
        honest.put(made)
        with pytest.raises((NotAllowed, BadInput)):
            forger.submit(forged(lie, made, honest, forger, task))
        assert honest.submit(made).verdict == "taken"
        found = finished(net)
    assert len(found.taken) == 6
    assert not found.refused


def forged(lie: str, made: Made, honest: Light, forger: Light, task: Assignment) -> Made:
    """An update that its alleged author did not make."""
    update, by = made.update, made.signed.by
    match lie:
        case "key":  # the forger's signature under the other's name
            return Made(replace(signed(forger.key, update, "update"), by=by), made.body)
        case "words":  # the other's signature under changed words
            changed = encode(replace(update, bytes_trained=update.bytes_trained - 1))
            return Made(replace(made.signed, body=changed), made.body)
        case "session":  # the other's update, sent by the forger
            return made
        case "worker":  # the forger's own key, the other's name inside
            return Made(signed(forger.key, update, "update"), made.body)
        case _:  # of another run
            return forger.make(task, run=Digest("0" * 64))


def test_truncated_tensors(tmp_path: Path, lives: Lives) -> None:
    """Cut on the way, they are not stored; cut before they were named, they are refused."""
    begin_light(tmp_path / "run", quick(**PATIENT))
    with network(tmp_path / "run", lives) as net:
        worker, other = joined(net), joined(net)
        made = worker.make(worker.assigned())
        with pytest.raises(NoBlob, match="send the blob first"):
            worker.submit(made)
        with pytest.raises(BadInput, match="has digest"):
            worker.link.send(f"v1/blobs/{made.update.blob}", made.body[:-1])
        with pytest.raises(NoBlob, match="send the blob first"):
            worker.submit(made)
        assert worker.send(made).verdict == "taken"
        cut = made.body[: len(made.body) // 2]
        task = other.assigned()
        told = other.make(task, blob=hashlib.sha256(cut).hexdigest())
        receipt = other.send(Made(told.signed, cut))
        assert receipt.verdict == "refused"
        assert "cut short" in receipt.why
        found = finished(net)
    assert len(found.taken) == 6
    assert [each.update for each in found.refused] == [told.name]


def test_uploads_that_come_again(tmp_path: Path, lives: Lives) -> None:
    """What a line held back and delivers late does not count against the worker."""
    begin_light(tmp_path / "run", quick(**PATIENT))
    with network(tmp_path / "run", lives) as net:
        worker = joined(net)
        for _ in range(2):
            made = worker.make(worker.assigned())
            for _ in range(4):
                worker.put(made)
            assert worker.submit(made).verdict == "taken"
            for _ in range(4):
                worker.put(made)
        found = finished(net)
    assert len(found.taken) == 6


@pytest.mark.parametrize("how", ["hangs up", "stays silent"])
def test_uploads_that_never_end(tmp_path: Path, lives: Lives, how: str) -> None:
    """A worker that dies in the middle of an upload, six times over, is as welcome as before."""
    begin_light(tmp_path / "run", quick(**PATIENT))
    with network(tmp_path / "run", lives) as net, ExitStack() as stack:
        worker, other = joined(net), joined(net)
        made = worker.make(worker.assigned())
        for _ in range(6):
            half = stack.enter_context(half_an_upload(net, worker, made))
            if how == "hangs up":
                half.close()
        time.sleep(0.3)  # until the coordinator has seen them: else the next request is faster
        assert worker.send(made).verdict == "taken"
        assert other.send(other.make(other.assigned())).verdict == "taken"
        found = finished(net)
    assert len(found.taken) == 6


def half_an_upload(net: Network, worker: Light, made: Made) -> socket.socket:
    """A connection on which the first half of the tensors was sent."""
    connection = socket.create_connection(("127.0.0.1", net.port))
    head = (
        f"PUT /v1/blobs/{made.update.blob} HTTP/1.1\r\nHost: here\r\n"
        f"Authorization: Bearer {worker.link.bearer}\r\n"
        f"Content-Length: {len(made.body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + made.body[: len(made.body) // 2])
    return connection
