"""blocktrain train in a process of its own: killed, stopped by Ctrl+C, and gone on with to its end.

One run with three lives: kill -9 ends the first, Ctrl+C the second.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

import blocktrain
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.commands.train import train
from blocktrain.errors import BadInput, BadRun
from blocktrain.services.embedded import status
from blocktrain.wire.link import Link

ROUNDS = 10
SIZE = ["--blocks", "2", "--layers", "1", "--width", "16", "--heads", "2", "--window", "16"]
PACE = ["--rounds", str(ROUNDS), "--local-steps", "1", "--batch", "2", "--workers", "1"]


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


def kill_in_the_middle(group: int, url: str) -> None:
    """After the first round, kill -9 of the whole group: nobody can say good-bye."""
    with closing(Link(url, patience=30.0)) as link:
        while min(block.round for block in status(link).blocks) < 2:
            time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)


def ctrl_c(process: int, url: str) -> None:
    os.kill(process, signal.SIGINT)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("train")
    text = folder / "words.txt"
    text.write_text("the cat sat on the mat. " * 1000)
    out = folder / "out"
    begun = ["--out", str(out), "--data", str(text), *SIZE, *PACE]
    again = ["--resume", str(out), "--workers", "1"]
    lives = [live(*begun, until=kill_in_the_middle), live(*again, until=ctrl_c), live(*again)]
    return Story(out, text, lives)


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
