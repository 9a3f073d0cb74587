"""A model far larger than memory over three hosts: one `whole` traversal against `ar`.

Every layer is executed at full width and depth; all layers of a host read one physical fp16 layer,
which is much larger than any cache. Three network namespaces with a WAN between them, one stage
each (bench/logical_stage.py), activations as fp16 over plain TCP.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Any, cast

import msgspec
import psutil

from blocktrain import config
from blocktrain.bench.hosts import Host, Wan, hosts
from blocktrain.bench.logical_shape import (
    SAID,
    STAGES,
    Ended,
    Failed,
    Layer,
    Post,
    Shape,
    Traversed,
    fitted,
    peak_memory,
)
from blocktrain.errors import BadInput, BlockTrainError
from blocktrain.terms import Progress, silent

HOSTS = ("one", "two", "three")
STAGE = "blocktrain.bench.logical_stage"  # by name: this process needs no torch
MOST_POSITIONS = 4096


@dataclass(frozen=True)
class Trial:
    """What is tried."""

    parameters: float = 75.8e9
    """That a traversal goes through; the shape follows from it."""
    positions: int = 32
    """Of one whole traversal, and that `ar` would need as many traversals for."""
    ar_positions: int = 2
    """That `ar` is measured over; its time for all positions is scaled from these."""
    rtt_ms: float = 50.0
    """From any host to any other and back."""
    mbit: float = 100.0
    """Megabits a second, up and down, of each host."""

    def __post_init__(self) -> None:
        if not 1 <= self.ar_positions <= self.positions <= MOST_POSITIONS:
            raise BadInput(
                f"{self.positions} positions of which {self.ar_positions} by ar cannot be; they "
                f"must be at least 1, at most {MOST_POSITIONS}, and the latter no more."
            )


def measure(trial: Trial, progress: Progress = silent) -> dict[str, Any]:
    """One `whole` traversal, then `ar` over a few positions on the same kernel."""
    shape = fitted(trial.parameters)
    refuse_too_large(shape)
    wan = Wan(rtt_ms=trial.rtt_ms, mbit=trial.mbit)
    with hosts(HOSTS, wan) as made, started(list(made.values()), trial, shape) as lines:
        said = collect(lines, trial, shape, progress)
    traversals = {
        mode: [each for each in said if isinstance(each, Traversed) and each.mode == mode]
        for mode in ("whole", "ar", "direct")
    }
    (whole,) = traversals["whole"]
    ended = [each for each in said if isinstance(each, Ended)]
    ar, direct = (mean(each.seconds for each in traversals[mode]) for mode in ("ar", "direct"))
    count = trial.positions
    return {
        "parameters": shape.parameters,
        "parameters_physical": shape.physical,
        "aliased": True,
        "aliasing": f"each host holds one physical fp16 layer, and its {shape.layers // STAGES} "
        "layers, each executed in full, all read that one",
        "width": shape.width,
        "hidden": shape.hidden,
        "layers": shape.layers,
        "hosts": STAGES,
        "positions": count,
        "whole_seconds": whole.seconds,
        "whole_bytes_moved": whole.moved,
        "ar_positions_measured": trial.ar_positions,
        "ar_seconds_per_position": ar,
        "ar_seconds": ar * count,
        "ar_scaled": f"ar_seconds is {count} x the mean of {trial.ar_positions} measured positions",
        "ar_bytes_per_position": mean(each.moved for each in traversals["ar"]),
        "ratio": ar * count / whole.seconds,
        "whole_upcast_share": upcast_share(ended, "whole"),
        "ar_upcast_share": upcast_share(ended, "ar"),
        "direct": "ar once more with torch's own fp16 matrix-vector product instead of tiles",
        "direct_seconds_per_position": direct,
        "direct_ratio": direct * count / whole.seconds,
        "peak_memory_bytes": peak_memory() + sum(each.peak for each in ended),
        "threads": ended[0].threads,
        "rtt_ms": trial.rtt_ms,
        "mbit": trial.mbit,
    }


def refuse_too_large(shape: Shape) -> None:
    """Before anything is started."""
    needed, free = 2 * shape.physical, psutil.virtual_memory().available
    if needed > free:
        raise BadInput(
            f"The physical layers need {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are "
            "free; choose fewer --parameters."
        )


@contextmanager
def started(places: list[Host], trial: Trial, shape: Shape) -> Iterator[Iterable[str]]:
    """Starts a stage on every host; gives the lines that all of them say, as they come."""
    reading, writing = os.pipe()
    addresses = [place.address for place in places]
    with os.fdopen(reading) as lines:
        with os.fdopen(writing, "w") as out:
            for index, place in enumerate(places):
                post = Post(shape, index, addresses, trial.positions, trial.ar_positions)
                place.start(
                    [sys.executable, "-m", STAGE, msgspec.json.encode(post).decode()],
                    stdout=out,
                    env=config.environment(OMP_WAIT_POLICY="PASSIVE"),
                )
        yield lines


def collect(lines: Iterable[str], trial: Trial, shape: Shape, progress: Progress) -> list[SAID]:
    """What the stages said besides their layers, once all have ended."""
    done, total = 0, shape.layers * (1 + 2 * trial.ar_positions)
    said: list[SAID] = []
    progress(done, total)
    for line in lines:
        match cast(SAID, msgspec.json.decode(line, type=SAID)):
            case Layer():
                done += 1
                progress(done, total)
            case Failed(index, why):
                raise BlockTrainError(f"Stage {index + 1} failed ({why}); start again.")
            case other:
                said.append(other)
    if sum(isinstance(each, Ended) for each in said) < STAGES:
        raise BlockTrainError("A stage ended without a word; is there enough memory for it?")
    return said


def upcast_share(ended: list[Ended], mode: str) -> float:
    """Of the threads' seconds in products, what went into up-casting."""
    spent = [each.spent[mode] for each in ended]
    upcast = sum(each.upcast for each in spent)
    return upcast / (upcast + sum(each.product for each in spent))
