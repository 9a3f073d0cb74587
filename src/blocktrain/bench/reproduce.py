"""Every row of the results again from nothing: does what is missing, then tells what was found.

A step that fails costs only the rows that need it; the others go on.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blocktrain.bench.comparing import Found
from blocktrain.bench.questions import ROWS, Row
from blocktrain.bench.scales import Scale
from blocktrain.bench.steps import WIKITEXT, Missing, Notebook, Record, Step
from blocktrain.disk import lock, write_atomically
from blocktrain.errors import BadInput, BlockTrainError
from blocktrain.learning.data import open_corpus
from blocktrain.terms import Progress, silent

Do = Callable[[Step], Record]


@dataclass(frozen=True)
class Look:
    """One row as far as it can be told now."""

    row: Row
    found: Found | None
    """Of the first seeds only, as long as others are missing."""
    steps: list[Step]
    """All that it has asked for so far."""
    missing: list[Step]


def look(row: Row, scale: Scale, folder: Path) -> Look:
    """Tells a row from what has been measured."""
    book = Notebook(folder, scale.data, scale.notes)
    try:
        return Look(row, row.tell(book, scale), list(book.asked.values()), [])
    except Missing as not_yet:
        missing = not_yet.steps
    if len(scale.seeds) > 1:
        fewer = look(row, replace(scale, seeds=scale.seeds[:-1]), folder)
        return replace(fewer, missing=fewer.missing or missing)
    return Look(row, None, list(book.asked.values()), missing)


def chosen(names: Sequence[str], scale: Scale) -> list[Row]:
    """The rows of these names; all of the scale if none is given."""
    rows = [row for row in ROWS if row.quick or scale.judged]
    known = {row.key: row for row in rows}
    for name in names:
        if name not in known:
            raise BadInput(f"There is no row '{name}' here; choose among {', '.join(known)}.")
    return [known[name] for name in names] or rows


def measure(
    rows: Sequence[Row],
    scale: Scale,
    folder: Path,
    do: Do,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = silent,
) -> dict[str, str]:
    """Does steps until every row can be told; what failed, and why, by the step's name."""
    folder.mkdir(parents=True, exist_ok=True)
    held = lock(
        folder / "lock",
        f"Another process measures into {folder}; wait for it, or choose another --out.",
    )
    failed: dict[str, str] = {}
    done: list[tuple[Step, Record]] = []
    try:
        cut_text(scale, folder)
        while todo := left(rows, scale, folder, failed):
            progress(len(done), len(done) + len(todo))
            step = todo[0]
            say(f"{len(todo)} to do{hours(todo, done)}: {step.name}")
            try:
                done.append((step, do(step)))
            except BlockTrainError as error:
                failed[step.name] = str(error)
                say(f"failed: {error}")
    finally:
        os.close(held)
    progress(len(done), len(done))
    return failed


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


def keep(folder: Path, place: Path) -> None:
    """Copies every record to where it can be published: a few thousand bytes each."""
    place.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.json"):
        write_atomically(place / path.name, path.read_bytes())


def cut_text(scale: Scale, folder: Path) -> None:
    """Makes the shorter text of a small scale."""
    if scale.cut and not (folder / "text").exists():
        train = open_corpus(WIKITEXT).train
        write_atomically(folder / "text", train[: scale.cut].tobytes())


def left(rows: Sequence[Row], scale: Scale, folder: Path, failed: dict[str, str]) -> list[Step]:
    """What can be done next: every step that a row is known to wait for, once."""
    waiting = {step.name: step for row in rows for step in look(row, scale, folder).missing}
    return [step for name, step in waiting.items() if name not in failed]


def hours(todo: Sequence[Step], done: Sequence[tuple[Step, Record]]) -> str:
    """How long what is known to be left may take, by the speed of what was done before."""
    flops = sum(step.flops for step, _ in done)
    if not flops:
        return ""
    core_seconds = sum(record.core_seconds for step, record in done if step.flops)
    cores = done[-1][1].cores
    seconds = core_seconds / cores * sum(step.flops for step in todo) / flops
    return f", about {seconds / 3600:.1f} h"
