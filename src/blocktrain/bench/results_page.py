"""docs/results.md and README's section, made from results.json alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blocktrain.bench import results_picture
from blocktrain.bench.results import Result, Results, as_json
from blocktrain.bench.tables import AVERAGED, SHALLOW
from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadInput

BEGIN = "<!-- results: made from docs/results.json by `blocktrain reproduce`; do not edit -->"
END = "<!-- end of results -->"
NOT_YET = "not measured yet"
GRIDS = "rates"  # the row whose runs nearly all others begin with
PAPER = (
    "*Paper*: P. Toth, Decentralised AI Training and Inference with BlockTrain (arXiv 2606.24722), "
    "known to us only by its abstract and summaries; no code was published and its model's size is "
    "not known, so its numbers are for orientation. *Bar*: what must be reached; *goal*: what is "
    "hoped for."
)
LAB = (
    "CE rows are of the lab: one process with the arithmetic of the network, whose work it can do "
    "again to the same digests (`lab --replay`). `wan_bytes` is of the network."
)


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
    parts = ["# Results", introduction(results), numbers(results.rows), notes(results.rows)]
    parts += [f"![{words}]({name})" for name, words in results_picture.drawn(results).items()]
    parts += ["## What each row is of", models(results)]
    parts += [question(row) for row in results.rows if not row.unit and row.measured]
    grids = results.row(GRIDS)
    parts += ["## How each was measured", *(how(row, grids) for row in results.rows)]
    return "\n\n".join(parts) + "\n"


def introduction(results: Results) -> str:
    """What all rows have in common."""
    again = "make reproduce" + ("" if results.scale == "full" else f"-{results.scale}")
    left = ", ".join(f"`{row.key}`" for row in results.rows if not row.measured)
    done = f"Not measured yet: {left}." if left else "All rows are measured."
    return (
        f"Made by `{again}` from results.json; do not edit. {done}\n\nCE is in nats per byte over "
        f"every byte of {results.text}, honest readout. "
        "A reference is trained end to end on the same bytes in the same order, with the same "
        "optimiser, and averages its weights as the run it is compared with. Runs end with a whole "
        "round, so bytes seen may differ a little (column MB seen). A value is the mean over its "
        "seeds, its spread the highest less the lowest. Core-hours of a row are those of all runs "
        "it looks at; rows share runs. What was tried without a row of its own is in the project's "
        f"lab book, LOG.md.\n\n{LAB}\n\n{PAPER}"
    )


def models(results: Results) -> str:
    """What is trained in which rows, and on how much."""
    wide, small = results.headline["shape"], results.base["shape"]
    narrow, most = wide | {"width": small["width"]}, results.budget
    kinds = [
        ("`ce`, `gap`, `gap_h80`, `flops_ratio`, `wide_rates`, `composition`", wide, most),
        ("`gap_k8`, `blocks`, `depth`", narrow, results.deep),
        ("`denoise_deep`", narrow, results.trial),
        ("all others, if they do not say otherwise", small, results.trial),
    ]
    lines = [
        {
            "rows": rows,
            "width": shape["width"],
            "window": shape["window"],
            "vectors for runs of bytes": vectors(shape),
            "MB seen by each block": f"{seen / 1e6:g}",
        }
        for rows, shape, seen in kinds
    ]
    return (
        f"{table(lines)}\n\n"
        "The last line's model is the default of `lab`, `train` and `make run`. Muon's rate comes "
        f"from grids (`rates`), tried in runs of {results.trial / 1e6:g} MB at width "
        f"{small['width']}: where there are vectors, each side has the rate that is best for it, "
        "elsewhere both have the reference's (`wide_rates` tells whether it holds for larger "
        "models and longer runs). Tables are of one seed: small differences say little, and how "
        "much blocks can lose is told by `denoise`, where one layer stands beside all of them."
    )


def vectors(shape: dict[str, Any]) -> str:
    """How runs of bytes enter a model."""
    kinds = shape["grams"] - 1
    return f"{kinds} x {shape['gram_rows']:,}" if kinds else "none"


def section(results: Results) -> str:
    """README's section: the numbers, and where the rest is."""
    parts = [f"{LAB} {PAPER}", numbers(results.rows), notes(results.rows)]
    if results_picture.CURVES in results_picture.drawn(results):
        parts.append(f"![CE against bytes seen](docs/{results_picture.CURVES})")
    parts += default_gap(results)
    parts.append(
        "[docs/results.md](docs/results.md) has every table, model, command, seed and hour, "
        "`docs/records` what each command came to "
        "(`blocktrain reproduce --known docs/records` goes on from it). "
        "`make reproduce` measures all of it again (it may take a day on two cores, and goes on "
        "where it was stopped), `make reproduce-quick` a small version of it in minutes."
    )
    return "\n\n".join(parts)


def default_gap(results: Results) -> list[str]:
    """How far behind the model is that users get: it is not the headline's."""
    row, pace = results.row("staleness"), results.base["pace"]
    return [
        "The default model, which `make run` trains, is smaller and has vectors for runs of bytes "
        f"({vectors(results.base['shape'])}); with them blocks end {line['gap']:.3f} behind end to "
        f"end ({line['MB seen']:.2f} MB, one seed){depth_there(results)}. `ce` and `gap` are of a "
        "wider model without them."
        for line in (row.table if row else [])
        if all(line[name] == pace[name] for name in ("local_steps", "first_steps"))
    ]


def depth_there(results: Results) -> str:
    """What one layer comes to beside it: how much blocks could lose at all."""
    row = results.row("denoise")
    lines = {line["readout"]: line for line in row.table} if row else {}
    if SHALLOW not in lines:
        return ""
    return (
        f". Depth hardly pays there: one layer end to end is {lines[SHALLOW]['gap']:.3f} behind, "
        f"and one-layer models averaged ({lines[AVERAGED]['M parameters']:.1f} M parameters) "
        f"{lines[AVERAGED]['gap']:.3f} (`denoise`)"
    )


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
            "met": f"{row.met} so far" if row.met and row.seeds_left else row.met or "",
        }
        for row in rows
        if row.unit
    ]
    return table(lines)


def notes(rows: Sequence[Result]) -> str:
    """What stands behind each number."""
    told = [(row.key, sentence(row.note), row.care) for row in rows if row.unit and row.measured]
    lines = [f"- `{key}`: {' '.join(filter(None, words))}" for key, *words in told if any(words)]
    return "\n".join(lines)


def sentence(words: str) -> str:
    """A note as it stands in a page."""
    return f"{words[0].upper()}{words[1:]}." if words else ""


def measured(row: Result) -> str:
    """A row's value with its spread, and whether seeds are missing."""
    if not row.measured:
        return NOT_YET
    if row.value is None:
        return row.note
    value = f"**{shown(row.value, row.unit)}**"
    if row.spread is not None:
        value += f", spread {shown(row.spread, row.unit)}"
    elif row.unit == "nats" and not row.seeds_left:
        value += " (one seed)"
    if row.seeds_left:
        value += f" ({len(row.seeds)} of {len(row.seeds) + row.seeds_left} seeds so far)"
    return value


def shown(value: float, unit: str) -> str:
    """A number as people write it."""
    return f"{value / 1e6:.1f} MB" if unit == "MB" else f"{value:.3f}"


def question(row: Result) -> str:
    """A row that is a table."""
    note = f"\n\n{sentence(row.note)}" if row.note else ""
    return f"## {row.asks} (`{row.key}`)\n\n{table(row.table)}{note}"


def how(row: Result, grids: Result | None) -> str:
    """What was typed, and under what circumstances; runs of the grids of rates are told once."""
    if row.measured:
        seeds = ", ".join(map(str, row.seeds))
        told = (
            f"{row.date}, commit {', '.join(row.commits)}, {row.cores} cores, "
            f"{' and '.join(row.precisions)}, "
            f"{row.core_hours:.2f} core-hours, seeds {seeds}."
        )
    else:
        told = f"{sentence(NOT_YET)} Commands that are known so far:"
    known = set(grids.commands) if grids and row.key != GRIDS else set()
    if known.intersection(row.commands):
        told += f" Runs of `{GRIDS}`, and:"
    lines = "\n".join(command for command in row.commands if command not in known)
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
