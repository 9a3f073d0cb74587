"""Every row of the results again from nothing: does what is missing, then tells what was found.

A step that fails costs only the rows that need it; the others go on.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from blocktrain.bench.comparing import Found
from blocktrain.bench.questions import ROWS, Row
from blocktrain.bench.scales import Scale
from blocktrain.bench.steps import WIKITEXT, Doing, Missing, Notebook, Record, Step
from blocktrain.disk import lock, write_atomically
from blocktrain.errors import BadInput, BlockTrainError
from blocktrain.learning.data import open_corpus
from blocktrain.terms import Progress, silent

LOOK = 0.5  # seconds between two looks at what is under way


@dataclass(frozen=True)
class Look:
    """One row as far as it can be told now."""

    row: Row
    found: Found | None
    """Of the first seeds only, as long as others are missing."""
    steps: list[Step]
    """All that it has asked for so far."""
    missing: list[Step]
    """First seeds first; others may begin beside them."""


def look(row: Row, scale: Scale, folder: Path) -> Look:
    """Tells a row from what has been measured."""
    book = Notebook(folder, scale.data, scale.notes)
    try:
        return Look(row, row.tell(book, scale), list(book.asked.values()), [])
    except Missing as not_yet:
        missing = not_yet.steps
    if len(scale.seeds) > 1:
        fewer = look(row, replace(scale, seeds=scale.seeds[:-1]), folder)
        first = fewer.missing
        return replace(fewer, missing=[*first, *(step for step in missing if step not in first)])
    return Look(row, None, list(book.asked.values()), missing)


def chosen(names: Sequence[str], scale: Scale) -> list[Row]:
    """The rows of these names; all of the scale if none is given."""
    rows = [row for row in ROWS if row.quick or scale.judged]
    known = {row.key: row for row in rows}
    for name in names:
        if name not in known:
            raise BadInput(f"There is no row '{name}' here; choose among {', '.join(known)}.")
    return [known[name] for name in names] or rows


@dataclass
class Measuring:
    """Does steps, as many at a time as there are cores, until every row can be told."""

    rows: Sequence[Row]
    scale: Scale
    folder: Path
    begin: Callable[[Step, Path, int], Doing] = Doing
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    say: Callable[[str], None] = lambda text: None
    steps: Progress = silent
    rounds: Progress = silent
    """Of all steps that are under way, together."""
    running: list[Doing] = field(default_factory=list)
    done: list[tuple[Step, Record]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Why, by the step's name."""

    def run(self) -> dict[str, str]:
        """Does all that can be done; what failed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        held = lock(
            self.folder / "lock",
            f"Another process measures into {self.folder}; wait for it, or choose another --out.",
        )
        try:
            cut_text(self.scale, self.folder)
            while self.start() or self.running:
                self.look_after()
        finally:
            for doing in self.running:
                doing.stop()
            for doing in self.running:  # all have been told: they save at the same time
                doing.wait()
            os.close(held)
        return self.failed

    def start(self) -> bool:
        """Begins what there are cores for; whether anything is left to begin."""
        busy = {doing.step.name for doing in self.running}
        todo = [step for step in self.left() if step.name not in busy]
        for step in together(todo, [doing.step for doing in self.running], self.cores):
            share = max(1, self.cores // (len(self.running) + len(todo)))
            self.say(f"{len(todo)} to do{self.hours(todo)}: {step.name}")
            todo.remove(step)
            self.running.append(self.begin(step, self.folder, share))
        self.steps(len(self.done), len(self.done) + len(self.running) + len(todo))
        return bool(todo)

    def left(self) -> list[Step]:
        """What can be done next: every step that a row is known to wait for, once."""
        looks = (look(row, self.scale, self.folder) for row in self.rows)
        waiting = {step.name: step for each in looks for step in each.missing}
        return [step for name, step in waiting.items() if name not in self.failed]

    def look_after(self) -> None:
        """Waits until a step ends."""
        while True:
            for doing in list(self.running):
                try:
                    record = doing.ended()
                except BlockTrainError as error:
                    self.failed[doing.step.name] = str(error)
                    self.say(f"failed: {error}")
                else:
                    if record is None:
                        continue
                    self.done.append((doing.step, record))
                self.running.remove(doing)
                return
            total = sum(doing.step.rounds for doing in self.running)
            self.rounds(sum(doing.rounds() for doing in self.running), max(1, total))
            time.sleep(LOOK)

    def hours(self, todo: Sequence[Step]) -> str:
        """How long what is known to be left may take, by the speed of what was done before."""
        flops = sum(step.flops for step, _ in self.done)
        if not flops:
            return ""
        spent = sum(record.core_seconds for step, record in self.done if step.flops)
        seconds = spent / self.cores * sum(step.flops for step in todo) / flops
        return f", about {seconds / 3600:.1f} h"


def together(todo: Sequence[Step], running: Sequence[Step], cores: int) -> Sequence[Step]:
    """What may begin now; what must be alone comes last."""
    if any(step.alone for step in running):
        return []
    others = [step for step in todo if not step.alone]
    return others[: max(0, cores - len(running))] if others or running else todo[:1]


def adopt(known: Path, folder: Path) -> None:
    """Takes records of an earlier reproduction for measured, where there are none yet."""
    paths = sorted(known.glob("*.json"))
    if not paths:
        raise BadInput(f"{known} has no records; without --known everything is measured again.")
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        if not (folder / path.name).exists():
            Notebook(known).record(Step(path.stem, ()))  # damaged ones are refused
            write_atomically(folder / path.name, path.read_bytes())


def keep(folder: Path, place: Path) -> Path:
    """Copies every record to those that are published: a few thousand bytes each. A fresh clone
    has these and no runs; what is measured there must not forget the rest."""
    place.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.json"):
        write_atomically(place / path.name, path.read_bytes())
    return place


def cut_text(scale: Scale, folder: Path) -> None:
    """Makes the shorter text of a small scale."""
    if scale.cut and not (folder / "text").exists():
        train = open_corpus(WIKITEXT).train
        write_atomically(folder / "text", train[: scale.cut].tobytes())
