"""What a choice costs in CE: the same run in the lab, once for each way to do it.

Every row is a lab run in its own folder, so that a table that was cut off goes on where it was.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from blocktrain.errors import BadConfig
from blocktrain.learning.data import Corpus
from blocktrain.services.lab import Lab, Watch, experiment
from blocktrain.services.run import Exchange, Run
from blocktrain.wire.tensors import largest

Row = dict[str, Any]


def codecs(
    run: Run, names: Sequence[str], corpus: Corpus, folder: Path, say: Callable[[str], None]
) -> list[Row]:
    """CE by codec, against fp32."""
    rows: list[Row] = []
    for name in dict.fromkeys(["fp32", *names]):
        found = train(replace(run, exchange=Exchange(name)), corpus, folder / name, say)
        like = {"a matrix": (run.shape.width, 4 * run.shape.width)}
        size = largest(name, like) / (4 * run.shape.width**2)
        base = rows[0]["ce"] if rows else found["ce"]
        rows.append({"codec": name, "bytes_per_value": round(size, 3), **found})
        rows[-1]["cost"] = found["ce"] - base
    return rows


def replicas(
    run: Run, counts: Sequence[int], corpus: Corpus, folder: Path, say: Callable[[str], None]
) -> list[Row]:
    """CE by replicas per block: the same rounds, steps and bytes, each with its part of a batch."""
    rows: list[Row] = []
    for count in dict.fromkeys([1, *counts]):
        if run.pace.batch % count:
            raise BadConfig(f"A batch of {run.pace.batch} has no {count} equal parts; set --batch.")
        pace = replace(run.pace, replicas=count, batch=run.pace.batch // count)
        found = train(replace(run, pace=pace), corpus, folder / str(count), say)
        base = rows[0]["ce"] if rows else found["ce"]
        rows.append({"replicas": count, "batch": pace.batch, **found})
        rows[-1]["cost"] = found["ce"] - base
    return rows


def train(run: Run, corpus: Corpus, folder: Path, say: Callable[[str], None]) -> Row:
    """One run to its end."""
    say(f"{folder.name}:")
    watch = Watch(noted=lambda row: say(f"  round {row['round']}: CE {row['ce_sample']} (sample)"))
    lab = Lab(run, corpus, folder, torch.device("cpu"), watch)
    result = asdict(experiment(lab, with_reference=False))
    return {key: result[key] for key in ("ce", "bytes_seen", "core_seconds")}
