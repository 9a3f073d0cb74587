"""docs/results.md and README's section, made from results.json alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blocktrain.bench import results_picture
from blocktrain.bench.results import Result, Results, as_json
from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadInput

BEGIN = "<!-- results: made from docs/results.json by `blocktrain reproduce`; do not edit -->"
END = "<!-- end of results -->"
NOT_YET = "not measured yet"


def publish(results: Results, folder: Path, readme: Path | None) -> list[Path]:
    """Writes results.json, results.md, the pictures there is data for, and README's section."""
    with errors_are_clear(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "results.json", as_json(results))
        pictures = results_picture.draw(results, folder)
        page = folder / "results.md"
        write_atomically(page, whole_page(results).encode())
        if readme is not None:
            write_atomically(readme, with_section(readme.read_text(), results).encode())
    return [folder / "results.json", page, *pictures]


def whole_page(results: Results) -> str:
    """results.md."""
    parts = ["# Results", introduction(results), numbers(results.rows)]
    parts += [f"![{words}]({name})" for name, words in results_picture.drawn(results).items()]
    parts += [question(row) for row in results.rows if not row.unit]
    parts += ["## How each was measured", *(how(row) for row in results.rows)]
    return "\n\n".join(parts) + "\n"


def introduction(results: Results) -> str:
    """What all rows have in common."""
    again = "make reproduce" + ("" if results.scale == "full" else f"-{results.scale}")
    return (
        f"Made by `{again}` from results.json; do not edit. CE in nats per byte over every byte of "
        f"{results.text}, honest readout. Every reference is trained end to end on the "
        "same bytes in the same order, with the same optimiser and averaging; Muon's rate of each "
        "side is the best of one grid, by CE of a sample of the valid split, in runs "
        f"of {results.trial / 1e6:g} MB with the tables' model. "
        "In `ce`, `gap`, `gap_h80`, `flops_ratio` and `composition` both sides have the rate of a "
        "grid that is best for the reference, in runs as short and as wide as the tables'; there "
        f"the model has {shape(results.headline)}, elsewhere "
        f"{shape(results.base)} if a table does not say otherwise. In the former "
        f"each block sees at least {results.budget / 1e6:g} MB, elsewhere "
        f"{results.trial / 1e6:g} MB. `gap_k8` and `blocks` have the former's vectors and rate, "
        f"the latter's width, and {results.deep / 1e6:g} MB. "
        "A value is the mean over its seeds, its spread the highest less the lowest. References "
        "have rounds of the usual length, and average their weights as the run they are compared "
        "with. Rounds are whole, so bytes may differ a little: tables tell them. What was tried "
        "without a row of its own is in the project's lab book, LOG.md."
    )


def shape(run: dict[str, Any]) -> str:
    """A run's model in words."""
    told = run["shape"]
    layers = "one layer" if told["layers"] == 1 else f"{told['layers']} layers"
    kinds = told["grams"] - 1
    runs = f"{kinds} x {told['gram_rows']:,} vectors" if kinds else "no vectors"
    cut = f"{told['blocks']} blocks of {layers}, width {told['width']}, window {told['window']}"
    return f"{cut}, {runs} for runs of bytes"


def section(results: Results) -> str:
    """README's section: the numbers, and where the rest is."""
    parts = [numbers(results.rows)]
    if results_picture.CURVES in results_picture.drawn(results):
        parts.append(f"![CE against bytes seen](docs/{results_picture.CURVES})")
    parts.append(
        f"CE in nats per byte, {results.budget / 1e6:g} MB seen by each block in the first three "
        f"and `flops_ratio`, where there are {shape(results.headline)}; "
        f"{results.trial / 1e6:g} MB in `six_workers_extra`, with {shape(results.base)}; "
        f"{results.deep / 1e6:g} MB in `gap_k8`, with the former's vectors and the latter's width. "
        "[docs/results.md](docs/results.md) has every table, command, seed and hour, "
        "`docs/records` what each command came to "
        "(`blocktrain reproduce --known docs/records` goes on from it). "
        "`make reproduce` measures all of it again (it may take a day on two cores, and goes on "
        "where it was stopped), `make reproduce-quick` a small version of it in minutes."
    )
    return "\n\n".join(parts)


def with_section(text: str, results: Results) -> str:
    """README with its section as results.json has it."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise BadInput(f"README.md needs one line '{BEGIN}' and below it one line '{END}'.")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{section(results)}\n\n{END}{rest.split(END)[1]}"


def numbers(rows: Sequence[Result]) -> str:
    """The rows that are one number each."""
    lines = [
        {
            "row": f"{row.asks} (`{row.key}`)",
            "paper": row.paper,
            "bar": "" if row.bar is None else f"<= {shown(row.bar, row.unit)}",
            "goal": "" if row.goal is None else f"<= {shown(row.goal, row.unit)}",
            "measured": measured(row),
            "met": row.met or "",
        }
        for row in rows
        if row.unit
    ]
    return table(lines)


def measured(row: Result) -> str:
    """A row's value with its spread, and whether seeds are missing."""
    if not row.measured:
        return NOT_YET
    if row.value is None:
        return row.note
    value = f"**{shown(row.value, row.unit)}**"
    if row.spread is not None:
        value += f", spread {shown(row.spread, row.unit)}"
    if row.seeds_left:
        value += f" ({len(row.seeds)} of {len(row.seeds) + row.seeds_left} seeds so far)"
    return value


def shown(value: float, unit: str) -> str:
    """A number as people write it."""
    return f"{value / 1e6:.1f} MB" if unit == "MB" else f"{value:.3f}"


def question(row: Result) -> str:
    """A row that is a table."""
    body = table(row.table) if row.measured else NOT_YET[0].upper() + NOT_YET[1:] + "."
    note = f"\n\n{row.note[0].upper()}{row.note[1:]}." if row.note else ""
    return f"## {row.asks} (`{row.key}`)\n\n{body}{note}"


def how(row: Result) -> str:
    """What was typed, and under what circumstances."""
    if row.measured:
        seeds = ", ".join(map(str, row.seeds))
        told = (
            f"{row.date}, commit {', '.join(row.commits)}, {row.cores} cores, "
            f"{' and '.join(row.precisions)}, "
            f"{row.core_hours:.2f} core-hours, seeds {seeds}"
        )
        told += f"; {row.note}." if row.note and row.unit else "."
    else:
        told = f"{NOT_YET[0].upper()}{NOT_YET[1:]}; first of all:"
    lines = "\n".join(row.commands)
    return f"### `{row.key}`\n\n{told}\n\n```console\n{lines}\n```"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A table in Markdown."""
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *([cell(row[head]) for head in heads] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    """One value of a table."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) >= 10 else f"{value:.3f}"
