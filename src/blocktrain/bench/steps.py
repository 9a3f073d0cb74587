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
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from blocktrain import config
from blocktrain.bench.costs import flops_of
from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadRun, BlockTrainError
from blocktrain.learning import device
from blocktrain.learning.files import MANIFEST
from blocktrain.services.children import parent_alive
from blocktrain.services.hardship import NONE, Hardship
from blocktrain.services.lab import Watch
from blocktrain.services.run import Run

WIKITEXT = "wikitext-2"
OUT = "OUT/"  # begins an argument that is a path in the reproduction's folder
PRECISION = "float32"  # of every lab run: rows share runs that machines of many kinds have made
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
    alone: bool = False
    """Whether nothing else may run beside it."""

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
    """That was trained in."""


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
        return self.read(*map(self.lab, runs))

    def lab(self, run: Run) -> Step:
        """A run in the lab, on this text."""
        return lab(run, self.data, notes=self.notes)

    def of_model(self, command: str, made: Step, *flags: str) -> Record:
        """The record of a command on the model that a step has made. Records outlive models: if
        the model is needed and gone, it is made again."""
        step = of_model(command, made, self.data, *flags)
        self.asked[step.name] = step
        if not self.path(step).exists() and not (self.folder / made.name / MANIFEST).exists():
            raise Missing([made])
        return self.read(step)[0]

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
    """A run in the lab."""
    flags = flags_of(run) + other_than(NONE, hardship)
    digest = hashlib.sha256(msgspec.json.encode(asdict(run))).hexdigest()[:8]
    name = "-".join(["lab", *(each.removeprefix("--") for each in flags), digest])
    flops = flops_of(run) if run.shape.objective == "neighbours" else 0.0
    if notes != Watch.notes:
        flags += ["--notes", str(notes)]
    flags += ["--precision", PRECISION]
    arguments = ("lab", *flags, *text(data), "--out", OUT + name, "--json")
    return Step(name, arguments, run.pace.rounds, flops)


def text(data: str) -> tuple[str, ...]:
    """The flag for another text than the usual one."""
    return () if data == WIKITEXT else ("--data", data)


def of_model(command: str, made: Step, data: str, *flags: str) -> Step:
    """A command on the model that a step has made."""
    arguments = (command, OUT + made.name, *text(data), *flags, "--json")
    return Step(f"{command}-{made.name}", arguments)


def three_hosts(run: Run) -> Step:
    """The same run across three hosts."""
    name = lab(run).name.replace("lab", "three-hosts", 1)
    flags = ("bench", "three-hosts", *flags_of(run), "--out", OUT + name, "--json")
    return Step(name, flags, alone=True)  # it has deadlines


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


class Doing:
    """A step under way in a child process, which ends when this process does: else it would go on
    beside the one that is started again."""

    def __init__(self, step: Step, folder: Path, cores: int = 1) -> None:
        self.step, self.folder = step, folder
        self.command = step.command(folder)
        self.log = folder / f"{step.name}.log"
        self.commit = commit_of(Path(__file__).parents[1])
        self.answer = tempfile.TemporaryFile()  # noqa: SIM115  closed when the step has ended
        share = ["--at-once", str(cores)] if step.rounds else []  # no result depends on it
        with self.log.open("ab") as said:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "blocktrain.services.children", *self.command, *share],
                stdout=self.answer,
                stderr=said,
                stdin=parent_alive(),
                env=config.environment(OMP_NUM_THREADS=str(cores)),  # evaluation, too
                start_new_session=True,  # Ctrl+C is for the parent, who tells it
            )

    def rounds(self) -> int:
        """How far a lab run is, as it saves it once a minute."""
        state = self.folder / self.step.name / "state.json"
        return int(json.loads(state.read_bytes())["round"]) if state.exists() else 0

    def ended(self) -> Record | None:
        """What it came to, if it has ended; kept, too."""
        pid, status, used = os.wait4(self.child.pid, os.WNOHANG)
        if not pid:
            return None
        self.child.returncode = os.waitstatus_to_exitcode(status)
        record = self.record(used.ru_utime + used.ru_stime)
        with errors_are_clear(self.folder):
            write_atomically(self.folder / f"{self.step.name}.json", msgspec.json.encode(record))
        return record

    def record(self, spent: float) -> Record:
        """What it said last, under today's circumstances."""
        with self.answer:
            self.answer.seek(0)
            lines = self.answer.read().splitlines()
        if self.child.returncode or not lines:
            last = (self.log.read_text().strip() or "no word").splitlines()[-1]
            why = last.removeprefix("blocktrain: ").rstrip(".")
            said = f"`blocktrain {' '.join(self.command)}` failed ({why}); {self.log} says more."
            raise BlockTrainError(said)
        result = json.loads(lines[-1])
        return Record(
            name=self.step.name,
            result=result,
            history=history(self.folder / self.step.name / "history.jsonl"),
            core_seconds=result.get("core_seconds", spent),  # a lab run knows of earlier starts
            cores=os.cpu_count() or 1,
            commit=self.commit,
            date=datetime.now(UTC).date().isoformat(),
            precision=result.get("precision") or device.trains_in(device.choose()),
        )

    def stop(self) -> None:
        """Lets it save what it has. What a shell started in the background is deaf to Ctrl+C."""
        self.child.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Until it has."""
        try:
            self.child.wait(LAST_WORDS)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.answer.close()


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
