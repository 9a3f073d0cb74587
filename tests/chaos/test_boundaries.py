"""A coordinator that is killed at every effect boundary of a round, and started again."""

import itertools
import re
import shutil
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.chaos.kill_points import MARK
from tests.chaos.light import begin_light, quick
from tests.chaos.lives import Lives
from tests.chaos.network import network
from tests.chaos.settled import settled

from blocktrain.aggregation.combine import Averaging
from blocktrain.aggregation.deadlines import Rules
from blocktrain.aggregation.folder import RunFolder
from blocktrain.wire.messages import Traffic

EFFECTS = {
    "a blob is written",
    "contents or names are synced",
    "a blob has its name",
    "a round is handed over to be combined",
    "a transaction is committed",
    "POST join is answered",
    "POST ask is answered",
    "PUT blobs is answered",
    "POST updates is answered",
}
AT_ONCE = 4  # most of a run is waiting
SWEEPS = 3  # at most; nearly always one


def crossed(log: Path) -> list[tuple[int, str]]:
    """What the lives of a coordinator crossed, in order: each counts its own from 1."""
    found = re.findall(rf"^{MARK}(\d+) (.*)$", log.read_text(), re.MULTILINE)
    return [(int(number), name) for number, name in found]


# Updates of two slots, snapshot, steady, delta, momentum and manifest; int4 has a residual besides.
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("codec", "rounds", "blobs"), [("int4", 2, 8), ("fp32", 1, 7)])
def test_killed_at_every_boundary(
    tmp_path: Path, lives: Lives, codec: str, rounds: int, blobs: int
) -> None:
    """One kill in each run, one boundary further each time, until a run is over before it.

    The second round of int4 reads the residual that was written in the first. Threads cross their
    boundaries in an order of their own, so a kind that is rare may be passed by in one sweep.
    """
    rules = Rules(
        rounds=rounds, blocks=1, replicas=2, quorum=2, local_steps=3, bytes_per_step=8, grace=0.0
    )
    begin_light(tmp_path / "new", rules, Averaging(outer_momentum=0.5), codec)

    def killed_behind(number: int) -> str | None:
        run = tmp_path / str(number)
        shutil.copytree(tmp_path / "new", run)
        with network(run, lives, workers=1, kill_at=[number]) as net:
            net.finish()
            net.kill_coordinator()
        found = settled(run, net.receipts)
        assert [len(found.taken), len(found.refused)] == [2 * rounds, 0]
        shutil.rmtree(run)
        effects = [effect for _, effect in crossed(net.log)]
        if net.starts > 1:
            return effects[number - 1]
        assert effects.count("a blob is written") == blobs * rounds
        return None

    died_behind: Counter[str] = Counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in range(SWEEPS):
            for first in itertools.count(1, AT_ONCE):
                effects = [*pool.map(killed_behind, range(first, first + AT_ONCE))]
                died_behind.update(effect for effect in effects if effect)
                if None in effects:
                    break
            if died_behind.keys() == EFFECTS:
                break
    assert died_behind.keys() == EFFECTS, died_behind
    assert died_behind["a transaction is committed"] >= 5 * rounds + 1, died_behind


@pytest.mark.usefixtures("impatient")
def test_killed_again_and_again(tmp_path: Path, lives: Lives) -> None:
    """The first life dies at its first boundary, the second at its second, and so on.

    So that lives die while they take up what the one before them left.
    """
    patient = {"lease": 60.0, "floor": 60.0, "first_allowance": 60.0}
    begin_light(tmp_path / "run", quick(rounds=3, blocks=2, ahead=1, **patient))
    with network(tmp_path / "run", lives, workers=3, kill_at=itertools.count(1)) as net:
        net.finish()
    found = settled(tmp_path / "run", net.receipts)
    assert len(found.taken) == 12
    deaths = net.starts - 1
    assert deaths > 10
    numbers = [number for number, _ in crossed(net.log)]
    assert numbers[: sum(range(deaths + 1))] == [*itertools.chain(*lives_up_to(deaths))]


def lives_up_to(last: int) -> list[range]:
    """What each life crossed, if every one died where it should."""
    return [range(1, life + 1) for life in range(1, last + 1)]


def test_stopped_while_workers_wait(tmp_path: Path, lives: Lives) -> None:
    """Told to stop, it does, whoever waits for work at that moment; then the run goes on."""
    patient = {"lease": 60.0, "floor": 60.0, "first_allowance": 60.0}
    begin_light(tmp_path / "run", quick(replicas=1, quorum=1, **patient))
    with network(tmp_path / "run", lives) as net:
        busy = net.worker()
        busy.join()
        task = busy.assigned()
        idle = [net.worker() for _ in range(3)]
        net.set_to_work(*idle)
        time.sleep(0.3)  # they have come in, and wait
        assert net.life is not None
        began = time.monotonic()
        net.life.end(signal.SIGTERM)
        assert time.monotonic() - began < 5
        net.look_after()
        assert busy.send(busy.make(task)).verdict == "taken"
        net.finish()
    assert len(settled(tmp_path / "run", net.receipts).taken) == 3


def test_a_question_that_nobody_waits_for(tmp_path: Path) -> None:
    """A server that stops gives up its questions; the keeper goes on with the others."""
    begin_light(tmp_path / "run", quick())
    with RunFolder(tmp_path / "run") as run:
        keeper = run.keeper()
        given_up = keeper.hear("0" * 64, Traffic())
        other = keeper.write(lambda t: t.note("kept", {}, 1.0))
        assert given_up.cancel()
        keeper.start()
        assert other.result(10) > 0
        assert keeper.write(lambda t: len(t.latest_events())).result(10) > 0
        keeper.close()
