"""The picture at the end of a run: CE against bytes seen."""

from pathlib import Path
from typing import Any

import matplotlib
import msgspec

matplotlib.use("Agg")  # no screen is needed, and none is assumed
from matplotlib import pyplot as plt

STYLES: dict[str, dict[str, Any]] = {
    "blocks": {"color": "#0b6e4f", "linewidth": 2.2, "label": "blocks, each trained alone"},
    "reference": {"color": "#333333", "linestyle": "--", "label": "end to end, same bytes"},
    "shallow": {"color": "#b08900", "linestyle": ":", "label": "end to end, one block's depth"},
}


def curves(histories: dict[str, Path], out: Path) -> None:
    """Draws the histories (history.jsonl files) that exist into a PNG."""
    figure, axes = plt.subplots(figsize=(7.5, 4.5), dpi=140)
    for name, path in histories.items():
        if not path.exists():
            continue
        rows = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
        seen = [row["bytes_seen"] / 1e6 for row in rows]
        ce = [row["ce_sample"] for row in rows]
        style = STYLES[name]
        if ce:  # the last value stands in the legend, where neighbouring lines cannot cover it
            axes.plot(seen, ce, **{**style, "label": f"{style['label']}: {ce[-1]:.3f}"})
    axes.set_xlabel("MB seen by each block")
    axes.set_ylabel("CE, nats per byte (64 KiB sample of valid)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out)
    plt.close(figure)
