"""The picture of `bench wan`: bytes per second against the round trip, for each mode."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no screen is needed, and none is assumed
from matplotlib import pyplot as plt

COLOURS = {"ar": "#333333", "speculative": "#b08900", "exact": "#0b6e4f", "whole": "#7a3b8f"}

WORDS = {"whole": "whole, one traversal"}


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """One panel for each temperature and rate; what was forecast is dotted."""
    panels = sorted({(row["temperature"], row["mbit"]) for row in rows})
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4 * len(panels), 4.2), dpi=140, sharey=True, squeeze=False
    )
    for axis, (temperature, mbit) in zip(axes[0], panels, strict=True):
        for mode, colour in COLOURS.items():
            some = sorted(
                (row["rtt_ms"], row["bytes_per_s"], row["planned_bytes_per_s"])
                for row in rows
                if (row["temperature"], row["mbit"], row["mode"]) == (temperature, mbit, mode)
                and (mode != "whole" or row["traversals"] == 1)
            )
            if some:
                rtts, rates, planned = zip(*some, strict=True)
                axis.plot(
                    rtts, rates, color=colour, marker="o", linewidth=2, label=WORDS.get(mode, mode)
                )
                axis.plot(rtts, planned, color=colour, linestyle=":", marker="x")
        axis.set_title(f"temperature {temperature:g}, {mbit:g} Mbit/s", fontsize=10)
        axis.set_xlabel("round trip, ms (dotted: as planned)")
        axis.set_yscale("log")
        axis.grid(alpha=0.25, which="both")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("bytes per second")
    axes[0][0].legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.58))
    figure.tight_layout()
    figure.savefig(out)
    plt.close(figure)
