"""How commands speak to people and to programs.

People get words, tables and progress bars on stderr and stdout; with --json the last line of stdout
is one JSON object and nothing else is on stdout. Progress bars appear only on a terminal.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from blocktrain.errors import BlockTrainError
from blocktrain.terms import Progress

people = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Output:
    """How a command answers."""

    json: bool = False
    """Print one JSON object as the last line instead of words."""

    def result(self, values: dict[str, Any], title: str) -> None:
        """The outcome: a table for people, one line for programs."""
        if self.json:
            print_json(values)
            return
        table = Table(title=title, title_justify="left", show_header=False)
        for key, value in values.items():
            table.add_row(key, readable(value))
        Console(highlight=False).print(table)

    def result_beside(self, error: BlockTrainError, values: dict[str, Any], title: str) -> None:
        """What came before an error: people see it first, programs beside it in the last line."""
        error.told = values
        if not self.json:
            self.result(values, title)

    def rows(self, rows: list[dict[str, Any]], title: str) -> None:
        """Several outcomes of one kind."""
        if self.json:
            print_json({"rows": rows})
            return
        table = Table(*(rows[0].keys() if rows else ()), title=title, title_justify="left")
        for row in rows:
            table.add_row(*(readable(value) for value in row.values()))
        Console(highlight=False).print(table)

    def say(self, text: str) -> None:
        """A line for people, never on stdout."""
        people.print(text, markup=False, soft_wrap=True)


Out = Annotated[Output, Parameter(name="*")]
"""The --json flag that every command has."""
PLAIN = Output()


def print_json(values: dict[str, Any]) -> None:
    """One JSON object on a line of its own."""
    sys.stdout.write(msgspec.json.encode(values).decode() + "\n")
    sys.stdout.flush()


def readable(value: Any) -> str:
    """Numbers as people write them."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) >= 1000 else f"{value:.4f}"
    if isinstance(value, list):
        return ", ".join(readable(each) for each in value)
    return str(value)


@contextmanager
def bars(*labels: str) -> Iterator[tuple[Progress, ...]]:
    """Progress bars on a terminal, each shown once it has begun; nothing elsewhere."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=people, disable=not people.is_terminal, transient=True) as shown:

        def showing(label: str) -> Progress:
            task = shown.add_task(label, total=None, visible=False)
            return lambda done, total: shown.update(
                task, completed=done, total=total, visible=done < total
            )

        yield tuple(showing(label) for label in labels)


@contextmanager
def bar(label: str) -> Iterator[Progress]:
    """One progress bar."""
    with bars(label) as (progress,):
        yield progress
