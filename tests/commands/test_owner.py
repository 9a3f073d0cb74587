"""What an owner types: init, coordinator, tokens, pause, ban, backup, evaluate --follow, stop.

Two runs, each with a coordinator in a process of its own: `quiet` has no worker, and `story` has
one, is measured and backed up meanwhile, and is stopped; what was backed up is then kept over TLS.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.commands.forked import Done, Forked

from blocktrain.errors import NotAllowed, Unreachable
from blocktrain.services import membership
from blocktrain.services.embedded import status
from blocktrain.wire import messages
from blocktrain.wire.certificates import make_authority
from blocktrain.wire.link import Link
from blocktrain.wire.owner import Status
from blocktrain.wire.signing import Key, load_or_make_key
from blocktrain.wire.tls import client_context

BEGUN = [sys.executable, "-m", "blocktrain"]
SIZE = ["--blocks", "2", "--layers", "1", "--width", "16", "--heads", "2", "--window", "16"]
PACE = ["--local-steps", "2", "--batch", "2", "--rounds", "500", "--grace", "0.2"]
HEAVY = ["init", "join", "model", "owner"]  # commands; see forked.py
THREADS = 3  # neither one nor as many as two cores would have
# `blocktrain join`, and then what torch has been told.
JOIN = "from blocktrain.cli import main; main(); import torch; print(torch.get_num_threads())"


@dataclass
class Desk:
    """Where an owner types commands."""

    forked: Forked
    folder: Path

    def type(self, *typed: str) -> Done:
        return self.forked.run([*typed, "--json"], self.folder, self.folder)

    def told(self, *typed: str) -> dict[str, Any]:
        done = self.type(*typed)
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        return dict(json.loads(line))

    def refused(self, *typed: str) -> dict[str, Any]:
        done = self.type(*typed)
        assert "Traceback" not in done.stderr
        told = dict(json.loads(done.stdout.splitlines()[-1]))
        assert told["exit_code"] == done.returncode
        return told


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with closing(Forked(["blocktrain.commands." + each for each in HEAVY])) as forked:
        folder = tmp_path_factory.mktemp("desk")
        (folder / "words.txt").write_text("the cat sat on the mat. " * 1000)
        yield Desk(forked, folder)


@dataclass
class Up:
    """A coordinator that is up."""

    folder: Path
    first: dict[str, Any]
    """What it said when it was."""

    @property
    def url(self) -> str:
        return str(self.first["url"])


@contextmanager
def kept(folder: Path, *more: str) -> Iterator[Up]:
    """`blocktrain coordinator FOLDER`; its log is beside the folder."""
    command = [*BEGUN, "coordinator", str(folder), "--port", "0", "--json", *more]
    with folder.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    with process.stdout:
        try:
            yield Up(folder, json.loads(process.stdout.readline()))
        finally:
            process.terminate()
            process.wait(20)


def made(desk: Desk, name: str) -> tuple[Path, dict[str, Any]]:
    """`blocktrain init`."""
    folder = desk.folder / name
    text = ["--data", str(desk.folder / "words.txt")]
    return folder, desk.told("init", str(folder), "--name", name, *text, *SIZE, *PACE)


# --- a run with no worker -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quiet(desk: Desk) -> Iterator[Up]:
    folder, told = made(desk, "quiet")
    assert told == {"folder": str(folder), "token": (folder / "owner.token").read_text().strip()}
    with kept(folder) as up:
        yield up


def visit(up: Up, folder: Path, token: str) -> tuple[Link, Key]:
    """Comes in as a worker does, without torch."""
    link, key = Link(up.url, patience=5.0), load_or_make_key(folder / "key.pem")
    membership.join(link, membership.Visitor(key, token, "visitor", "cpu"))
    return link, key


def test_status_is_for_anybody(desk: Desk, quiet: Up) -> None:
    told = desk.told("status", quiet.url)
    assert set(told) == {"say", *Status.__struct_fields__}
    assert (told["name"], told["state"], told["rounds"]) == ("quiet", "running", 500)
    assert told["run"] == quiet.first["run"]
    assert [block["round"] for block in told["blocks"]] == [1, 1]
    shown = desk.forked.run(["status", quiet.url], desk.folder, desk.folder)
    assert "quiet: running" in shown.stderr  # for people, words and tables
    assert "Blocks" in shown.stdout


def test_tokens_are_issued_listed_and_revoked(desk: Desk, quiet: Up, tmp_path: Path) -> None:
    run = ["--run", str(quiet.folder)]
    anna = desk.told("tokens", "issue", quiet.url, "--label", "anna", *run)
    assert anna["label"] == "anna"
    rows = desk.told("tokens", "list", quiet.url, *run)["rows"]
    row = {"hash": anna["hash"], "role": "worker", "label": "anna", "revoked": False}
    assert rows[-1] == row
    assert (rows[0]["role"], anna["token"] in str(rows)) == ("owner", False)
    link, _ = visit(quiet, tmp_path, anna["token"])
    link.close()
    told = desk.told("tokens", "revoke", quiet.url, anna["hash"][:12], *run)
    assert told == {"revoked": anna["hash"][:12]}
    rows = desk.told("tokens", "list", quiet.url, *run)["rows"]
    assert rows[-1] == {**row, "revoked": True}
    refused = desk.refused("join", quiet.url, "--token", anna["token"], "--folder", str(tmp_path))
    assert refused["exit_code"] == 9
    assert "revoked" in refused["error"]


def test_pause_and_resume(desk: Desk, quiet: Up) -> None:
    run = ["--run", str(quiet.folder)]
    assert desk.told("pause", quiet.url, *run) == {"done": "pause"}
    assert desk.told("status", quiet.url)["state"] == "paused"
    assert desk.told("resume", quiet.url, *run) == {"done": "resume"}
    assert desk.told("status", quiet.url)["state"] == "running"


def test_a_ban(desk: Desk, quiet: Up, tmp_path: Path) -> None:
    token = (quiet.folder / "owner.token").read_text().strip()
    link, key = visit(quiet, tmp_path, token)
    with closing(link):
        assert desk.told("ban", quiet.url, key.id[:8], "--token", token) == {"banned": key.id[:8]}
        (row,) = [w for w in desk.told("status", quiet.url)["workers"] if w["worker"] == key.id]
        assert row["banned"] is True
        with pytest.raises(NotAllowed, match="nothing more"):
            link.say("v1/ask", messages.Ask(key.id), messages.Wait)


def test_people_read_of_comings_and_goings_in_the_log(
    desk: Desk, quiet: Up, tmp_path: Path
) -> None:
    token = (quiet.folder / "owner.token").read_text().strip()
    link, key = visit(quiet, tmp_path, token)
    link.close()
    for typed in (["pause", quiet.url], ["resume", quiet.url], ["ban", quiet.url, key.id]):
        desk.told(*typed, "--token", token)
    who = f"worker {key.id[:12]}"
    wanted = [f"joined, {who}, name visitor", "paused", "resumed", f"banned, {who}"]
    log, until = quiet.folder.with_suffix(".log"), time.monotonic() + 10
    while f"{wanted[-1]}\n" not in log.read_text():  # answers come before the log
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.01)
    lines = log.read_text().splitlines()
    for told in wanted:
        assert any(line.endswith(f" INFO blocktrain.events: {told}") for line in lines), told


def test_a_wrong_token_is_exit_code_9(desk: Desk, quiet: Up, tmp_path: Path) -> None:
    wrong = ["--token", "not-the-owners-token"]
    for typed in (
        ["pause", quiet.url, *wrong],
        ["resume", quiet.url],  # and none
        ["stop", quiet.url, *wrong],
        ["ban", quiet.url, "0" * 64, *wrong],
        ["tokens", "issue", quiet.url, *wrong],
        ["tokens", "list", quiet.url, *wrong],
        ["tokens", "revoke", quiet.url, "0" * 64, *wrong],
        ["pause", quiet.url, "--token", "-begins-with-a-hyphen"],  # as one of 64 does
        ["join", quiet.url, "--token", "-begins-with-a-hyphen", "--folder", str(tmp_path)],
    ):
        assert desk.refused(*typed)["exit_code"] == 9, typed
    assert desk.told("status", quiet.url)["state"] == "running"


def test_owners_need_no_torch() -> None:
    look = "import sys, blocktrain.commands.owner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look]).returncode == 0


# --- a run with a worker --------------------------------------------------------------------------


@dataclass
class Story:
    """What was said in a run that was measured, backed up and stopped."""

    kept: Up
    now: Status
    gave: dict[str, Any]
    threads: int
    measured: list[dict[str, Any]] = field(default_factory=list)
    backup: dict[str, Any] = field(default_factory=dict)
    at_backup: int = 0


@pytest.fixture(scope="module")
def story(desk: Desk) -> Story:
    folder, told = made(desk, "story")
    text = ["--data", str(desk.folder / "words.txt")]
    with (
        kept(folder, "--log", "json") as up,
        closing(Link(up.url, patience=10.0)) as link,
        ThreadPoolExecutor(1) as beside,
    ):
        join = ["join", up.url, "--token", told["token"], "--folder", str(desk.folder / "worker")]
        worker = subprocess.Popen(
            [sys.executable, "-c", JOIN, *join, "--threads", str(THREADS), *text, "--json"],
            stdout=subprocess.PIPE,
        )
        at_backup = wait_for(link, rounds=2)
        backup = desk.told("backup", str(folder), str(desk.folder / "story.tar"))
        follow = ["--follow", up.url, "--every", "0.1", "--run", str(folder)]
        measuring = beside.submit(desk.told, "evaluate", *follow, *text)
        wait_for(link, points=2)
        stop = [*BEGUN, "stop", up.url, "--token", told["token"], "--json"]
        stopped = subprocess.run(stop, capture_output=True, check=True)
        assert json.loads(stopped.stdout) == {"done": "stop"}
        measured = measuring.result(60)["rows"]
        out, _ = worker.communicate(timeout=60)
        assert worker.returncode == 0
        gave, threads = out.splitlines()[-2:]
        now = status(link)
    return Story(up, now, json.loads(gave), int(threads), measured, backup, at_backup)


def wait_for(link: Link, rounds: int = 0, points: int = 0) -> int:
    """Until so many rounds are closed, and CE was measured so often; rounds that are closed."""
    deadline = time.monotonic() + 90
    while True:
        now = status(link)
        closed = min(block.round for block in now.blocks) - 1
        if closed >= rounds and len(now.curve) >= points:
            return closed
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_stop_ends_a_run_and_its_worker_goes(story: Story) -> None:
    assert story.now.state == "ended"
    assert {"stopping", "ended"} <= {event.kind for event in story.now.events}
    assert story.gave["refused"] == 0
    assert story.gave["updates"] == sum(block.taken for block in story.now.blocks) >= 4
    (row,) = story.now.workers
    assert row.bytes_trained == story.gave["bytes_trained"] > 0


def test_join_threads_reaches_torch(story: Story) -> None:
    assert story.threads == THREADS


def test_evaluate_follow_measures_until_the_end(story: Story) -> None:
    rounds = [row["round"] for row in story.measured]
    assert rounds == sorted(rounds)
    assert rounds[-1] == min(block.round for block in story.now.blocks)
    assert story.measured[-1]["ce_sample"] < 5.55
    told = [point.ce for point in story.now.curve]  # and everybody has seen them
    assert told == pytest.approx([row["ce_sample"] for row in story.measured], abs=1e-4)


def logged(up: Up) -> list[dict[str, Any]]:
    """The lines of a coordinator's log, which are JSON."""
    lines = up.folder.with_suffix(".log").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_log_json_is_one_object_a_line(story: Story) -> None:
    rows = logged(story.kept)
    assert len(rows) >= 2
    for row in rows:
        if row["from"] != "blocktrain.events":
            assert {*row} - {"trace"} == {"time", "level", "from", "message"}
        assert abs(time.time() - row["time"]) < 600
        assert row["level"] in ("debug", "info", "warning")
    assert any(story.kept.url in row["message"] for row in rows)
    assert {"blocktrain.commands.coordinator", "uvicorn.error"} <= {row["from"] for row in rows}


def test_what_happens_is_logged_with_its_fields(story: Story) -> None:
    """All that the ledger notes, in its order; nothing twice."""
    events = [row for row in logged(story.kept) if row["from"] == "blocktrain.events"]
    assert [row["number"] for row in events] == [*range(1, len(events) + 1)]
    kinds = {row["event"] for row in events}
    assert {"joined", "opened", "taken", "closed", "evaluated", "stopping", "ended"} <= kinds
    (worker,) = story.now.workers
    taken = [row for row in events if row["event"] == "taken"]
    assert len(taken) == story.gave["updates"]
    assert {row["worker"] for row in taken} == {worker.worker}
    assert {row["block"] for row in taken} == {0, 1}
    assert {row["level"] for row in taken} == {"debug"}
    closed = [(row["block"], row["round"]) for row in events if row["event"] == "closed"]
    assert sorted(closed) == sorted({(row["block"], row["round"]) for row in taken})
    (first,) = [row for row in events if row["event"] == "closed" and row["round"] == 1][:1]
    told = f"closed, block {first['block'] + 1}, round 1, updates {first['updates']}"
    assert (first["message"], first["level"]) == (told, "info")


def test_what_was_backed_up_is_restored_and_kept_with_our_own_certificate(
    desk: Desk, story: Story
) -> None:
    """The certificate is of somebody who is neither the run's authority nor known to anybody."""
    tar, folder = desk.folder / "story.tar", desk.folder / "restored"
    assert story.backup == {"file": str(tar), "bytes": tar.stat().st_size}
    assert desk.told("restore", str(tar), str(folder)) == {"folder": str(folder)}
    ours = desk.folder / "ours"
    ours.mkdir()
    authority = make_authority(ours, "our own")
    papers = authority.server_certificate(["127.0.0.1"], ours)
    certificate = ["--tls-cert", str(papers.certificate), "--tls-key", str(papers.key)]
    with kept(folder, *certificate) as up:
        assert up.url.startswith("https://")
        assert up.first == {**story.kept.first, "url": up.url, "fingerprint": None}
        with closing(Link(up.url, verify=client_context(authority.pem), patience=5.0)) as link:
            now = status(link)
        assert now.state == "running"
        assert now.name == "story"
        assert min(block.round for block in now.blocks) > story.at_backup
        refused = desk.refused("status", up.url)  # whoever does not trust it hears nothing
        assert refused["exit_code"] in (NotAllowed.exit_code, Unreachable.exit_code)
        assert "certificate" in refused["error"].lower()
    half = desk.refused("coordinator", str(folder), *certificate[:2])
    assert half["exit_code"] == 2
    assert "--tls-key" in half["error"]
    others = ["--tls-key", str(ours / "authority.key")]  # a key, but not that certificate's
    wrong = desk.refused("coordinator", str(folder), "--port", "0", *certificate[:2], *others)
    assert wrong["exit_code"] == 12
    assert "its own key" in wrong["error"]
