"""docs/results.json: what was measured, and how. Pages and pictures are made from it alone."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from blocktrain.bench.reproduce import Look
from blocktrain.bench.scales import Scale
from blocktrain.bench.steps import Notebook
from blocktrain.errors import BadInput


@dataclass(frozen=True)
class Result:
    """One row as it is published."""

    key: str
    asks: str
    unit: str
    paper: str
    bar: float | None
    goal: float | None
    care: str = ""
    """What a reader must know of how it was chosen or measured."""
    value: float | None = None
    """The mean over seeds."""
    spread: float | None = None
    """From the lowest to the highest seed."""
    met: str | None = None
    """goal, bar or neither."""
    values: list[float] = field(default_factory=list)
    table: list[dict[str, Any]] = field(default_factory=list)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    note: str = ""
    commands: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    seeds_left: int = 0
    """How many more are wanted."""
    core_hours: float | None = None
    cores: int | None = None
    precisions: list[str] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    date: str | None = None

    @property
    def measured(self) -> bool:
        """Whether there is anything to tell."""
        return self.date is not None


@dataclass(frozen=True)
class Results:
    """Everything that is published."""

    scale: str
    text: str
    budget: int
    trial: int
    deep: int
    headline: dict[str, Any]
    base: dict[str, Any]
    rows: list[Result]

    def row(self, key: str) -> Result | None:
        """A row by its key, if it has been measured."""
        return next((row for row in self.rows if row.key == key and row.measured), None)


def collect(looks: Sequence[Look], scale: Scale, folder: Path) -> Results:
    """What a folder of records tells."""
    rows = [result(each, scale, folder) for each in looks]
    sizes = (scale.budget, scale.trial, scale.deep)
    runs = (asdict(scale.headline), asdict(scale.base))
    return Results(scale.name, scale.text, *sizes, *runs, rows)


def result(seen: Look, scale: Scale, folder: Path) -> Result:
    """A row as it is to be published."""
    row, found = seen.row, seen.found
    place = Path(scale.folder)
    plain = Result(
        key=row.key,
        asks=row.asks,
        unit=row.unit,
        paper=row.paper,
        bar=row.bar if scale.judged else None,
        goal=row.goal if scale.judged else None,
        care=row.care if scale.judged else "",
        commands=[" ".join(["blocktrain", *step.command(place)]) for step in seen.steps],
    )
    if found is None:
        return plain
    records = [Notebook(folder).record(step) for step in seen.steps]
    value, several = (mean(found.values) if found.values else None), len(found.values) > 1
    left = len(scale.seeds) - len(found.values) if seen.missing else 0
    return replace(
        plain,
        value=value,
        spread=max(found.values) - min(found.values) if several else None,
        met=judged(value, plain),
        values=found.values,
        table=found.table,
        curves=found.curves,
        note=found.note,
        seeds=list(scale.seeds[: len(found.values)]) if several else [scale.base.pace.seed],
        seeds_left=left,
        core_hours=sum(record.core_seconds for record in records) / 3600,
        cores=max(record.cores for record in records),
        precisions=sorted({record.precision for record in records}),
        commits=sorted({record.commit for record in records}),
        date=max(record.date for record in records),
    )


def judged(value: float | None, row: Result) -> str | None:
    """What it reached. Less is better in every row; no value: what was asked for never came."""
    if row.bar is None or row.goal is None:
        return None
    if value is None:
        return "neither"
    return "goal" if value <= row.goal else "bar" if value <= row.bar else "neither"


def read(path: Path) -> Results | None:
    """What is published; None if nothing is."""
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except msgspec.DecodeError as error:
        raise BadInput(f"{path} is damaged ({error}); remove it, or take it from git.") from None


def as_json(results: Results) -> bytes:
    """Results as a file that people can read and git can compare."""
    return msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n"
