"""How a row compares runs: tables against one reference, CE beside bytes moved."""

from dataclasses import dataclass, field
from typing import Any

from blocktrain.bench.costs import flops_of, moved_per_round
from blocktrain.bench.scales import changed
from blocktrain.bench.steps import Notebook, Record
from blocktrain.services.run import Run

Table = list[dict[str, Any]]
Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Found:
    """What a row came to."""

    values: list[float] = field(default_factory=list)
    """One for each seed."""
    table: Table = field(default_factory=list)
    curves: dict[str, Curve] = field(default_factory=dict)
    """CE of a sample against bytes seen, in the order of the table if there is one."""
    note: str = ""


def against(
    book: Notebook, runs: list[Run], reference: Run, *settings: str, flops: bool = False
) -> Table:
    """A line for each run: its settings, CE, and the gap to the reference.

    The reference averages its weights as each run does.
    """
    aims = [changed(reference, steady=run.averaging.steady) for run in runs]
    found = book.labs(*runs, *aims)
    table: Table = []
    for run, record, aim in zip(runs, found[: len(runs)], found[len(runs) :], strict=True):
        table.append({name: setting(run, name) for name in settings})
        table[-1] |= {"MB seen": record.result["bytes_seen"] / 1e6}
        table[-1] |= {"ce": record.result["ce"], "gap": less(record, aim)}
        if flops:
            table[-1]["FLOPs / reference's"] = flops_of(run) / flops_of(reference)
    return table


def moving(book: Notebook, family: str, runs: list[Run]) -> Found:
    """CE beside bytes moved."""
    table: Table = []
    curves: dict[str, Curve] = {}
    for run, found in zip(runs, book.labs(*runs), strict=True):
        pace, averaging, codec = run.pace, run.averaging, run.exchange.codec
        outer = f"rate {averaging.outer_rate:g}, momentum {averaging.outer_momentum:g}"
        moved = pace.rounds * moved_per_round(run) / 1e6
        table.append(
            {
                "workers per block": pace.replicas,
                "local steps": pace.local_steps,
                "codec": codec,
                "outer step": outer,
                "Muon's rate": f"{run.recipe.rates.matrix:.3g}",
                "MB seen": found.result["bytes_seen"] / 1e6,
                "ce": found.result["ce"],
                "MB moved": moved,
                "by each worker": moved / (run.shape.blocks * pace.replicas),
            }
        )
        label = f"{family}, replicas: {pace.replicas}, {pace.local_steps} steps, {codec}"
        plain = (averaging.outer_rate, averaging.outer_momentum) == (1, 0)
        curves[label if plain else f"{label}, {outer}"] = curve(found)
    return Found(table=table, curves=curves)


def setting(run: Run, name: str) -> Any:
    """One setting by its name."""
    sections = (run.shape, run.task, run.averaging, run.rates, run.pace)
    return next(getattr(each, name) for each in sections if hasattr(each, name))


def less(one: Record, other: Record) -> float:
    """How much higher the first one's CE is."""
    return float(one.result["ce"] - other.result["ce"])


def curve(record: Record) -> Curve:
    """CE of a sample against bytes seen."""
    return [(float(seen), sample) for seen, sample in record.history]


def two(one: Record, other: Record, words: str = "end to end") -> str:
    """What a gap is the difference of."""
    return f"{one.result['ce']:.3f}, {words} {other.result['ce']:.3f}"


def times(run: Run, reference: Run) -> str:
    """What the bytes cost more than end to end."""
    return f"{flops_of(run) / flops_of(reference):.2f} times its FLOPs for the same bytes"


def mb(record: Record) -> str:
    """What each block saw."""
    return f"{record.result['bytes_seen'] / 1e6:.1f} MB"


def reached(history: list[tuple[int, float]], aim: float) -> float | None:
    """Share of a run after which CE of a sample was first no more than the aim; None if never.

    Between two measurements CE is taken to fall in a straight line.
    """
    before: tuple[int, float] | None = None
    for seen, sample in history:
        if sample <= aim:
            at = float(seen)
            if before is not None and before[1] > sample:
                at = before[0] + (seen - before[0]) * (before[1] - aim) / (before[1] - sample)
            return at / history[-1][0]
        before = (seen, sample)
    return None
