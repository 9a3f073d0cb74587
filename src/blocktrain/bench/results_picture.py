"""The pictures of a reproduction, each drawn only if there is something measured to draw."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no screen is needed, and none is assumed
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from blocktrain.bench.comparing import Table
from blocktrain.bench.results import Results

BLOCKS, ALIKE, END_TO_END, DILOCO = "#0b6e4f", "#8cbfae", "#333333", "#b08900"
CURVES, CREWS = "results-curves.png", "results-crews.png"
FRONTIER, EACH = "results-frontier.png", "results-frontier-each.png"
STALENESS, CUTS = "results-staleness.png", "results-blocks.png"
SAMPLE = "CE, nats per byte (64 KiB sample of valid)"
STYLES = ("-", "--", "-.", ":")


def drawn(results: Results) -> dict[str, str]:
    """The pictures there is data for, and what they show."""
    needs = {
        CURVES: ("CE against bytes seen, one worker per block", ("ce", "gap")),
        CREWS: ("CE against bytes seen, several workers per block", ("replicas", "diloco")),
        FRONTIER: ("CE against bytes moved by all workers", ("replicas", "diloco", "codecs")),
        EACH: ("CE against bytes moved by each worker", ("replicas", "diloco", "codecs")),
        STALENESS: ("Gap against local steps per round", ("staleness",)),
        CUTS: ("Gap against the number of blocks", ("blocks",)),
    }
    return {name: words for name, (words, keys) in needs.items() if any(map(results.row, keys))}


def draw(results: Results, folder: Path) -> list[Path]:
    """Draws them into a folder; what could not be drawn from these results is not left there."""
    painters: dict[str, Callable[[Axes, Results], None]] = {
        CURVES: curves,
        CREWS: crews,
        FRONTIER: partial(frontier, column="MB moved", whose="all workers"),
        EACH: partial(frontier, column="by each worker", whose="each worker"),
        STALENESS: staleness,
        CUTS: cuts,
    }
    made = []
    for name, paint in painters.items():
        if name not in drawn(results):
            (folder / name).unlink(missing_ok=True)
            continue
        figure, axes = plt.subplots(figsize=(7.5, 4.5), dpi=140)
        paint(axes, results)
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
        figure.savefig(folder / name, bbox_inches="tight")
        plt.close(figure)
        made.append(folder / name)
    return made


def curves(axes: Axes, results: Results) -> None:
    """CE against bytes seen: reference and blocks, the first seed."""
    gap, ce = results.row("gap"), results.row("ce")
    if gap:
        whole, words = gap.table[0]["reference"], "end to end"
        line(axes, gap.curves["reference"], words, whole, color=END_TO_END, linestyle="--")
    if ce:
        line(axes, ce.curves["blocks"], "four blocks", ce.values[0], color=BLOCKS)
    axes.set_xlabel("MB seen by each block, seed 0")
    axes.set_ylabel(SAMPLE)


def crews(axes: Axes, results: Results) -> None:
    """CE against bytes seen: blocks, and workers that hold the whole model; one is end to end. The
    first lines of each table: others meet less often, or step otherwise."""
    for key, colour in (("replicas", BLOCKS), ("diloco", DILOCO)):
        for style, (name, points) in zip(STYLES, lines_of(results, key).items(), strict=False):
            one = key == "diloco" and "replicas: 1" in name
            words, shade = ("end to end, int4", END_TO_END) if one else (name, colour)
            line(axes, points, words, color=shade, linestyle=style, linewidth=1.5)
    axes.set_xlabel("MB seen by each block")
    axes.set_ylabel(SAMPLE)


def frontier(axes: Axes, results: Results, column: str, whose: str) -> None:
    """CE against bytes moved, each run a point: blocks and DiLoCo on the same axes. A line joins
    those of a family that none of it beats in both. A worker who holds the whole model and is
    alone is end to end: he needs no network, and beats whatever does."""
    whole = results.row("diloco")
    for words, colour, entries in (
        ("blocks", BLOCKS, entries_of(results, "replicas", "codecs")),
        ("DiLoCo: each worker holds the whole model", DILOCO,
         [entry for entry in whole.table if entry["workers per block"] > 1] if whole else []),
        ("end to end: one worker, alone", END_TO_END,
         [entry for entry in whole.table if entry["workers per block"] == 1] if whole else []),
    ):  # fmt: skip
        points = {worded(entry): (entry[column], entry["ce"]) for entry in entries}
        if not points:
            continue
        axes.plot(*zip(*points.values(), strict=True), "o", color=colour, markersize=5)
        best = unbeaten(points.values())
        axes.plot(*zip(*best, strict=True), color=colour, alpha=0.5, label=words, marker="o")
        for told, at in points.items():
            axes.annotate(told, at, xytext=(5, 4), textcoords="offset points", fontsize=7,
                          color=colour)  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.12)
    axes.set_xlabel(f"MB moved by {whose} (workers per block x local steps; int4 if not told)")
    axes.set_ylabel("CE, nats per byte (test)")


def entries_of(results: Results, *keys: str) -> Table:
    """The lines of these rows' tables, as far as they are measured."""
    return [entry for row in filter(None, map(results.row, keys)) for entry in row.table]


def worded(entry: dict[str, Any]) -> str:
    """How a run's workers met."""
    told = f"{entry['workers per block']} x {entry['local steps']}"
    codec = "" if entry["codec"] == "int4" else f", {entry['codec']}"
    return told + codec + ("" if entry["outer step"].endswith("momentum 0") else ", outer step")


def unbeaten(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those for which no other has both less."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not found or y < found[-1][1]:
            found.append((x, y))
    return found


def staleness(axes: Axes, results: Results) -> None:
    """Gap against local steps per round, alike or growing."""
    row = results.row("staleness")
    assert row is not None
    alike = [entry for entry in row.table if not entry["first_steps"]]
    growing = [entry for entry in row.table if entry["first_steps"]]
    gaps(axes, alike, "longest round", "blocks, all rounds alike", color=ALIKE, marker="s")
    gaps(axes, growing, "longest round", "blocks, rounds that grow to this length", below=True)
    against_zero(axes, alike, "longest round", "local steps per round, equal bytes")


def cuts(axes: Axes, results: Results) -> None:
    """Gap against K."""
    row = results.row("blocks")
    assert row is not None
    usual = [entry for entry in row.table if entry["lookahead"] == row.table[0]["lookahead"]]
    far = [entry for entry in row.table if entry not in usual]
    gaps(axes, usual, "blocks", f"blocks, loss taken {usual[0]['lookahead']} blocks downstream")
    if far:
        words = f"{far[0]['lookahead']} blocks downstream"
        gaps(axes, far, "blocks", words, below=True, color=ALIKE, marker="s")
    against_zero(axes, row.table, "blocks", "blocks, the same layers in all")


def gaps(
    axes: Axes, table: Table, setting: str, words: str, below: bool = False, **style: Any
) -> None:
    """The gap of each line of a table, and how many rounds there were, if it tells."""
    x, y = [entry[setting] for entry in table], [entry["gap"] for entry in table]
    axes.plot(x, y, **{"color": BLOCKS, "marker": "o", "linewidth": 2.2, "label": words, **style})
    for entry, at, gap in zip(table, x, y, strict=True):
        told = f"{gap:+.3f}" + (f"\n{entry['rounds']} rounds" if "rounds" in entry else "")
        axes.annotate(told, (at, gap), xytext=(0, -9 if below else 9), ha="center", fontsize=8,
                      textcoords="offset points", va="top" if below else "bottom")  # fmt: skip


def against_zero(axes: Axes, table: Table, setting: str, words: str) -> None:
    """The reference is the line at 0."""
    axes.axhline(0, color=END_TO_END, linestyle="--", label="end to end")
    axes.margins(x=0.08, y=0.3)
    axes.set_xscale("log")
    x = sorted({entry[setting] for entry in table})
    axes.set_xticks(x, map(str, x))
    axes.minorticks_off()
    axes.set_xlabel(words)
    axes.set_ylabel("gap in CE to end to end, nats per byte (test)")


def lines_of(results: Results, key: str) -> dict[str, list[tuple[float, float]]]:
    """A row's curves, if it was measured."""
    row = results.row(key)
    return row.curves if row is not None else {}


def line(
    axes: Axes,
    points: list[tuple[float, float]],
    words: str,
    whole: float | None = None,
    **style: Any,
) -> None:
    """One curve over megabytes; its last value stands in the legend, where nothing covers it, and
    beside it CE of the whole test split, if given."""
    label = f"{words}: {points[-1][1]:.3f}" + (f" (test split: {whole:.3f})" if whole else "")
    style = {"linewidth": 2, **style, "label": label}
    axes.plot([x / 1e6 for x, _ in points], [y for _, y in points], **style)
