"""blocktrain train in a process of its own: killed, stopped by Ctrl+C, and gone on with to its end.

One run with three lives: kill -9 ends the first, Ctrl+C the second; the third one, in this process,
loses its coordinator twice.
"""

import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

import blocktrain
from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.cli import main
from blocktrain.commands import train as commands
from blocktrain.commands.train import (
    TIMING,
    Begun,
    History,
    Outlook,
    closed_rounds,
    table,
    train,
)
from blocktrain.errors import BadInput, BadRun
from blocktrain.learning.model import Model
from blocktrain.lengths import Lengths
from blocktrain.services.embedded import Embedded, status
from blocktrain.services.follow import Follower
from blocktrain.services.run import Run
from blocktrain.terms import Digest
from blocktrain.wire.link import Link
from blocktrain.wire.messages import Traffic
from blocktrain.wire.owner import BlockStatus, Checkpoint, Point, Status, WorkerStatus

ROUNDS = 10
CONFIG = f"""
[shape]
blocks = 2
layers = 1
width = 16
heads = 2
window = 16

[pace]
rounds = {ROUNDS}
local_steps = 1
batch = 2

[timing]
lease = 14.0
"""
LINE = b'{"bytes_seen": 10, "ce_sample": 5.5}\n{"bytes_seen": 20, "ce_sample": 5.25}\n'


@dataclass
class Life:
    """What a process came to."""

    code: int
    out: str
    said: str
    ended: float


@dataclass
class Story:
    """A run, and how its three processes ended."""

    folder: Path
    text: Path
    lives: list[Life]
    line: list[Point]
    """The reference line that the second one showed."""
    killed: list[bool]
    """Whether the run had ended, each time that the third one's coordinator was killed."""


def live(*arguments: str, until: Callable[[int, str], None] | None = None) -> Life:
    """The command in a group of its own; `until` gets its id and URL as soon as it is up."""
    process = subprocess.Popen(
        [sys.executable, "-m", "blocktrain", "train", *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    said = process.stderr.readline()
    assert said.startswith("dashboard at http"), said
    if until:
        until(process.pid, said.split()[2].rstrip(","))
    ended = time.time()
    out, rest = process.communicate(timeout=100)
    return Life(process.returncode, out, said + rest, ended)


def live_here(*arguments: str) -> Life:
    """The command in this process, which has torch already."""
    out, said, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(said):
        patch.setattr(sys, "argv", ["blocktrain", *arguments])
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Life(code, out.getvalue(), said.getvalue(), time.time())


@contextmanager
def coordinators_that_die() -> Iterator[list[bool]]:
    """Kills the coordinator of a run in this process while a checkpoint is fetched: the first one
    of a run under way, and the first one of its end. The list tells which of them it was."""
    crews, killed = list[Embedded](), list[bool]()
    start, assemble = Embedded.start_coordinator, Follower.assemble

    def started(self: Embedded) -> None:
        crews.append(self)
        start(self)

    def assembled(self: Follower, charter: Charter, found: Checkpoint) -> tuple[Run, Model]:
        if found.ended not in killed:
            killed.append(found.ended)
            coordinator = crews[0].children[0].process
            assert coordinator is not None
            coordinator.kill()
            coordinator.wait()
        return assemble(self, charter, found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Embedded, "start_coordinator", started)
        patch.setattr(Follower, "assemble", assembled)
        patch.setattr(commands, "SOON", 0.2)
        yield killed


def kill_in_the_middle(group: int, url: str) -> None:
    """After the first round, kill -9 of the whole group: nobody can say good-bye."""
    with closing(Link(url, patience=30.0)) as link:
        while min(block.round for block in status(link).blocks) < 2:
            time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("train")
    text = folder / "words.txt"
    text.write_text("the cat sat on the mat. " * 1000)
    out = folder / "out"
    (folder / "run.toml").write_text(CONFIG)
    begun = ["--out", str(out), "--data", str(text), "--config", str(folder / "run.toml")]
    begun += ["--workers", "1"]
    again = ["--resume", str(out), "--workers", "1"]
    line: list[Point] = []
    (folder / "line.jsonl").write_bytes(LINE)

    def look_and_stop(process: int, url: str) -> None:
        with closing(Link(url, patience=30.0)) as link:
            line.extend(status(link).reference)
        os.kill(process, signal.SIGINT)

    lives = [
        live(*begun, until=kill_in_the_middle),
        live(*again, "--reference-line", str(folder / "line.jsonl"), until=look_and_stop),
    ]
    with coordinators_that_die() as killed:
        lives.append(live_here("train", *again, "--reference", "--json"))
    return Story(out, text, lives, line, killed)


def result(story: Story) -> dict[str, Any]:
    last = story.lives[-1]
    assert last.code == 0, last.said
    (line,) = last.out.splitlines()  # with --json nothing else is on stdout
    return dict(json.loads(line))


def test_ctrl_c_is_a_sentence_and_130(story: Story) -> None:
    killed, stopped, _ = story.lives
    assert killed.code == -signal.SIGKILL
    assert stopped.code == 130
    assert "Stopped. What was saved is intact; the same command goes on" in stopped.said
    assert "Traceback" not in stopped.said
    assert json.loads(stopped.out.splitlines()[-1])["exit_code"] == 130


def test_what_is_resumed_goes_on_to_the_last_round(story: Story) -> None:
    assert result(story)["rounds"] == ROUNDS
    with SqliteLedger(story.folder / "run" / "ledger.sqlite") as ledger, ledger.reading() as r:
        closed = {
            block: [r.version(block, round) for round in range(1, ROUNDS + 1)] for block in (0, 1)
        }
        receipts = r.receipts()
    for versions in closed.values():
        times = [version.closed for version in versions if version]
        assert len(times) == ROUNDS
        assert times == sorted(times)  # no round was made again
        assert 1 <= sum(at < story.lives[0].ended for at in times) < ROUNDS
    taken = [receipt for receipt in receipts if receipt.verdict == "taken"]
    assert len(taken) == result(story)["updates"] >= 2 * ROUNDS
    assert len({receipt.worker for receipt in taken}) == 1  # it came back as who it was


def test_a_run_ends_with_its_model_ce_plot_and_sample(story: Story) -> None:
    found = result(story)
    model = blocktrain.load(story.folder, "cpu")
    text = story.text.read_bytes()
    score = blocktrain.evaluate(model, text[len(text) * 95 // 100 :])
    assert found["ce"] == pytest.approx(score.ce, abs=1e-4)
    assert found["per_block"] == pytest.approx(score.per_block, abs=1e-4)
    assert found["ce"] < 5.5  # it began at 5.55
    assert found["parameters"] == model.parameters
    assert found["bytes_seen"] == ROUNDS * 2 * 16
    assert found["bytes_moved"] > 0
    assert len(found["sample"].encode()) >= 200
    assert "sample: " in story.lives[-1].said
    assert (story.folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    rows = (story.folder / "history.jsonl").read_bytes().splitlines()
    rounds = [msgspec.json.decode(row)["round"] for row in rows]
    assert rounds == sorted(set(rounds))
    assert rounds[-1] == ROUNDS


def test_what_cannot_be_begun_or_resumed(story: Story, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--out for a new run, or --resume"):
        train()
    with pytest.raises(BadRun, match="begin one with --out"):
        train(resume=tmp_path / "nothing")
    with pytest.raises(BadRun, match="other settings"):
        train(out=story.folder)


# --- the settings ---------------------------------------------------------------------------------


def test_a_config_file_names_the_run_and_its_timing(story: Story) -> None:
    kept = msgspec.json.decode((story.folder / "settings.json").read_bytes(), type=Begun).settings
    assert (kept.run.shape.width, kept.run.pace.rounds) == (16, ROUNDS)
    assert (kept.timing.lease, kept.timing.grace) == (14.0, TIMING.grace)  # the rest is train's own


# --- a coordinator that dies under a question -----------------------------------------------------


def test_a_coordinator_that_dies_under_a_question_is_started_again(story: Story) -> None:
    """While the CE of a run under way was measured, and again when its end was fetched."""
    assert story.killed == [False, True]
    assert story.lives[-1].code == 0
    assert story.lives[-1].said.count("coordinator died and was started again") == 2


# --- the reference, and the lab -------------------------------------------------------------------


def test_a_reference_is_trained_beside_it_if_asked(story: Story) -> None:
    found = result(story)
    assert 0 < found["ce_reference"] < 5.6
    assert found["gap"] == pytest.approx(found["ce"] - found["ce_reference"])
    rows = History(story.folder / "reference" / "history.jsonl").rows()
    assert rows[-1]["bytes_seen"] == found["bytes_seen"]


def test_the_dashboard_shows_a_reference_line_of_earlier(story: Story) -> None:
    assert [(each.bytes_seen, each.ce) for each in story.line] == [(10, 5.5), (20, 5.25)]


def replayed(story: Story, ledger: Path, out: Path) -> Life:
    """What `blocktrain lab --replay` comes to."""
    return live_here(
        "lab", "--replay", str(ledger), "--data", str(story.text), "--out", str(out), "--json"
    )


def test_the_lab_does_the_run_again_and_notices_a_difference(story: Story, tmp_path: Path) -> None:
    again = replayed(story, story.folder / "run", tmp_path)
    assert again.code == 0, again.said
    (line,) = again.out.splitlines()
    found = json.loads(line)
    assert found["same"] is True
    assert (found["rounds"], found["snapshots"]) == (ROUNDS, 2 * ROUNDS)
    assert found["updates"] == result(story)["updates"]

    other = tmp_path / "other.sqlite"
    with (
        closing(sqlite3.connect(story.folder / "run" / "ledger.sqlite")) as source,
        closing(sqlite3.connect(other)) as copy,
    ):
        source.backup(copy)
        copy.execute("DROP TRIGGER versions_stand")
        where = (ROUNDS,)
        copy.execute("UPDATE versions SET steady = printf('%064d', 1) WHERE round = ?", where)
        copy.commit()
    different = replayed(story, other, tmp_path)
    assert different.code == 14
    (line,) = different.out.splitlines()
    found = json.loads(line)
    assert (found["same"], found["exit_code"]) == (False, 14)
    assert found["different"] == [f"the steady copy of block {b}, round {ROUNDS}" for b in (1, 2)]
    assert "2 digests are not those of the ledger" in different.said


# --- what people see meanwhile --------------------------------------------------------------------


def block_at(round: int, phase: str = "open") -> BlockStatus:
    return BlockStatus(0, round, phase, 5.0, 3.0, 1, 1, 7, 2, 1)


def worker_that(here: bool) -> WorkerStatus:
    return WorkerStatus("a" * 64, "", here, None, None, None, None, 0, 0, Traffic(), False)


def seen(*rounds: int, state: str = "running") -> Status:
    """A run of 11 rounds that is as old as the hills."""
    return Status(
        run=Digest("0" * 64), name="", data="", codec="int4", parameters=1, rounds=11, replicas=2,
        state=state, age=1e6, bytes_seen=0, bytes_moved=12_340_000,
        blocks=[block_at(each) for each in rounds],
        workers=[worker_that(True), worker_that(False), worker_that(True)],
        curve=[Point(1.0, 10, 5.5), Point(2.0, 20, 1.81234)], reference=[], events=[],
    )  # fmt: skip


def test_the_table_tells_ce_bytes_workers_and_time_left() -> None:
    shown = table(seen(4, 5), 200.0)
    assert shown.title == "CE 1.8123, 12.3 MB moved, 2 workers, about 4 min left"
    assert [list(column.cells)[1] for column in shown.columns] == [
        "1", "5 of 11", "open", "1 of 2", "3 s", "7", "2", "1",
    ]  # fmt: skip
    early = msgspec.structs.replace(seen(1), curve=[])
    assert str(table(early, None).title).startswith("CE not measured yet, ")
    assert str(table(early, None).title).endswith(", time left unknown")


def test_time_left_goes_by_the_pace_of_this_start() -> None:
    """Whatever the age of the run: it was resumed at round 5 of 11, and paused for an hour."""
    outlook = Outlook(Lengths(20))
    assert outlook.left(seen(5, 6), at=100.0) is None
    assert outlook.left(seen(5, 7), at=109.0) is None  # the slower block has closed none
    assert outlook.left(seen(6, 7), at=110.0) == pytest.approx(6 * 10.0)
    assert outlook.left(seen(6, 7, state="paused"), at=3710.0) == pytest.approx(6 * 10.0)
    assert outlook.left(seen(6, 7), at=3720.0) == pytest.approx(6 * 20.0)  # this round is slower
    assert outlook.left(seen(7, 7), at=3720.0) == pytest.approx(5 * 10.0)
    done = msgspec.structs.replace(seen(11), blocks=[block_at(11, "finished")])
    assert closed_rounds(done) == 11
    assert outlook.left(done, at=3760.0) == 0


def test_time_left_knows_that_rounds_grow() -> None:
    outlook = Outlook(steps := Lengths(20, 2))
    assert outlook.left(seen(1), at=0.0) is None
    left = outlook.left(seen(2), at=10.0)  # the first of 11 rounds took 10 s
    assert left is not None
    assert left == pytest.approx(10.0 * steps.before(12) / steps.of(1) - 10.0)
    assert left > 10 * 10.0
