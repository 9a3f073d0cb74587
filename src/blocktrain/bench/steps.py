"""One command of a reproduction: its name, what it came to, and doing it as a child process.

    OUT/NAME.json    what the command came to: once it is there, the step is done
    OUT/NAME.log     what the command said
    OUT/NAME/        its folder, if it has one: a lab run goes on from there

A lab run's name holds a digest of all its settings: what is measured once is found again by every
row that needs it, and other defaults make other names.
"""

import hashlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from blocktrain import config
from blocktrain.bench.costs import flops_of
from blocktrain.disk import write_atomically
from blocktrain.errors import BadRun, BlockTrainError
from blocktrain.learning import device
from blocktrain.services.children import parent_alive
from blocktrain.services.hardship import NONE, Hardship
from blocktrain.services.lab import Watch
from blocktrain.services.run import Run
from blocktrain.terms import Progress, silent

WIKITEXT = "wikitext-2"
OUT = "OUT/"  # begins an argument that is a path in the reproduction's folder
WORTH_THREADS = 1e12  # FLOPs of a run; threads of small models wait for each other (LOG.md)
LOOK = 0.5  # seconds between two looks at a child's progress
LAST_WORDS = 60.0  # seconds that a child has to save after Ctrl+C; a state of 8 blocks takes 1


@dataclass(frozen=True)
class Step:
    """A `blocktrain` command whose last line is JSON."""

    name: str
    arguments: tuple[str, ...]
    rounds: int = 0
    """Of a lab run."""
    flops: float = 0.0
    """By which the time that is left is told; 0 for what is short."""

    def command(self, folder: Path) -> list[str]:
        """The arguments with their paths."""
        return [
            str(folder / each.removeprefix(OUT)) if each.startswith(OUT) else each
            for each in self.arguments
        ]


@dataclass(frozen=True)
class Record:
    """What a step came to, and under what circumstances."""

    name: str
    result: dict[str, Any]
    history: list[tuple[int, float]]
    """Bytes seen and CE of a 64 KiB sample of valid, as a lab run went on."""
    core_seconds: float
    cores: int
    commit: str
    date: str
    precision: str
    """That this machine trains in."""


class Missing(Exception):
    """A row cannot be told yet: these steps are not done."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__(", ".join(step.name for step in steps))
        self.steps = list(steps)


@dataclass
class Notebook:
    """What has been measured, by name; remembers what was asked for."""

    folder: Path
    data: str = WIKITEXT
    """What models are trained and measured on."""
    notes: int = Watch.notes
    """How many times CE of a sample is measured in each run."""
    asked: dict[str, Step] = field(default_factory=dict)

    def read(self, *steps: Step) -> list[Record]:
        """The records of these steps; Missing, with all that are, if one is."""
        self.asked |= {step.name: step for step in steps}
        if missing := [step for step in steps if not self.path(step).exists()]:
            raise Missing(missing)
        return [self.record(step) for step in steps]

    def labs(self, *runs: Run) -> list[Record]:
        """The records of these runs in the lab."""
        return self.read(*(lab(run, self.data, notes=self.notes) for run in runs))

    def of_model(self, command: str, run: Run, *flags: str) -> Record:
        """The record of a command on the model that a lab run made."""
        return self.read(of_model(command, run, self.data, *flags))[0]

    def path(self, step: Step) -> Path:
        """Where a step's record is."""
        return self.folder / f"{step.name}.json"

    def record(self, step: Step) -> Record:
        """A record from its file."""
        path = self.path(step)
        try:
            return msgspec.json.decode(path.read_bytes(), type=Record)
        except msgspec.DecodeError as error:
            raise BadRun(f"{path} is damaged ({error}); remove it to measure it again.") from None


# --- which commands there are --------------------------------------------------------------------


@cache
def lab(
    run: Run, data: str = WIKITEXT, hardship: Hardship = NONE, notes: int = Watch.notes
) -> Step:
    """A run in the lab. One replica alone gets every core as threads, if that pays."""
    flags = flags_of(run) + other_than(NONE, hardship)
    digest = hashlib.sha256(msgspec.json.encode(asdict(run))).hexdigest()[:8]
    name = "-".join(["lab", *(each.removeprefix("--") for each in flags), digest])
    flops = flops_of(run) if run.shape.objective == "neighbours" else 0.0
    if run.shape.blocks * run.pace.replicas == 1 and flops > WORTH_THREADS:
        flags += ["--threads", str(os.cpu_count() or 1)]
    if notes != Watch.notes:
        flags += ["--notes", str(notes)]
    arguments = ("lab", *flags, *text(data), "--out", OUT + name, "--json")
    return Step(name, arguments, run.pace.rounds, flops)


def text(data: str) -> tuple[str, ...]:
    """The flag for another text than the usual one."""
    return () if data == WIKITEXT else ("--data", data)


def of_model(command: str, run: Run, data: str, *flags: str) -> Step:
    """A command on the model that a lab run made."""
    name = lab(run).name
    return Step(f"{command}-{name}", (command, OUT + name, *text(data), *flags, "--json"))


def three_hosts(run: Run) -> Step:
    """The same run across three hosts."""
    name = lab(run).name.replace("lab", "three-hosts", 1)
    flags = ("bench", "three-hosts", *flags_of(run), "--out", OUT + name, "--json")
    return Step(name, flags)


def bench(name: str, *flags: str) -> Step:
    """A benchmark that keeps nothing."""
    return Step("-".join([name, *(each.removeprefix("--") for each in flags)]),
                ("bench", name, *flags, "--json"))  # fmt: skip


def flags_of(run: Run) -> list[str]:
    """Flags of `lab` for every setting that is not the default."""
    plain, flags = Run(), list[str]()
    for section in fields(Run):
        flags += other_than(getattr(plain, section.name), getattr(run, section.name))
    return flags


def other_than(usual: Any, ours: Any) -> list[str]:
    """Flags for what is set otherwise."""
    flags = []
    for setting in fields(ours):
        value = getattr(ours, setting.name)
        if value != getattr(usual, setting.name):
            flags += [f"--{setting.name.replace('_', '-')}", str(value)]
    return flags


# --- doing one -----------------------------------------------------------------------------------


def do(step: Step, folder: Path, progress: Progress = silent) -> Record:
    """Does a step in a child process and keeps what it came to."""
    folder.mkdir(parents=True, exist_ok=True)
    commit = commit_of(Path(__file__).parents[1])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    log = folder / f"{step.name}.log"
    command = step.command(folder)
    with log.open("ab") as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "blocktrain.services.children", *command],
            stdout=subprocess.PIPE,
            stderr=said,
            stdin=parent_alive(),  # it ends when this process does, so that nobody trains twice
            env=config.environment(),
        )
        answer = heard(child, lambda: tell_rounds(step, folder, progress))
    lines = answer.decode().splitlines()
    if child.returncode or not lines:
        last = (log.read_text().strip() or "no word").splitlines()[-1]
        why = last.removeprefix("blocktrain: ").rstrip(".")
        raise BlockTrainError(f"`blocktrain {' '.join(command)}` failed ({why}); {log} says more.")
    result = json.loads(lines[-1])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    record = Record(
        name=step.name,
        result=result,
        history=history(folder / step.name / "history.jsonl"),
        core_seconds=result.get("core_seconds", spent),  # a lab run knows of its earlier starts
        cores=os.cpu_count() or 1,
        commit=commit,
        date=datetime.now(UTC).date().isoformat(),
        precision=device.trains_in(device.choose()),
    )
    write_atomically(folder / f"{step.name}.json", msgspec.json.encode(record))
    return record


def heard(child: "subprocess.Popen[bytes]", look: Callable[[], None]) -> bytes:
    """What a child says on stdout until it ends; after Ctrl+C it may save first."""
    try:
        while True:
            try:
                answer, _ = child.communicate(timeout=LOOK)
                return answer
            except subprocess.TimeoutExpired:
                look()
    except BaseException:
        try:
            child.wait(LAST_WORDS)  # Ctrl+C reached it too
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise


def tell_rounds(step: Step, folder: Path, progress: Progress) -> None:
    """How far a lab run is, as it saves it once a minute."""
    state = folder / step.name / "state.json"
    if step.rounds and state.exists():
        progress(json.loads(state.read_bytes())["round"], step.rounds)


def history(path: Path) -> list[tuple[int, float]]:
    """Bytes seen and CE of a sample, from a lab run's folder."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    return [(row["bytes_seen"], row["ce_sample"]) for row in rows]


def commit_of(place: Path) -> str:
    """The commit that this code is, with a + if it was changed since."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(place), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", ".")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
