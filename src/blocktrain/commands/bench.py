"""blocktrain bench compute|memory|combine"""

import signal
from dataclasses import asdict

from blocktrain.bench import combine as combine_bench
from blocktrain.bench import compute as compute_bench
from blocktrain.bench import memory as memory_bench
from blocktrain.console import PLAIN, Out, bar, print_json


def compute(
    *,
    width: int = 512,
    positions: int = 8192,
    layers: int = 1,
    repeats: int = 7,
    output: Out = PLAIN,
) -> None:
    """A block's training step against the GEMM peak of this machine.

    Parameters
    ----------
    width: int
        Width of the residual stream.
    positions: int
        Positions per step.
    layers: int
        Layers per block.
    repeats: int
        Steps measured; the median counts.
    """
    with bar("steps") as progress:
        found = compute_bench.measure(width, positions, repeats, layers, progress)
    output.result(asdict(found), "Compute")


def memory(
    *,
    width: int = 1024,
    layers: int = 8,
    batch: int = 8,
    window: int = 256,
    output: Out = PLAIN,
) -> None:
    """A worker's peak memory against an end-to-end trainer's, in separate processes.

    Parameters
    ----------
    width: int
        Width of the residual stream; 1024 with 8 layers is 100 M parameters a block.
    layers: int
        Layers per block; the end-to-end trainer has four times as many.
    batch: int
        Windows per step.
    window: int
        Positions per window.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its processes and files go, too
    with bar("processes") as progress:
        found = memory_bench.measure(width, layers, batch, window, progress)
    output.result(asdict(found), "Memory")


def combine(
    *,
    parameters: int = 100_000_000,
    replicas: int = 6,
    beside: str = "int4",
    output: Out = PLAIN,
) -> None:
    """Combining many updates of a large block: memory in updates, speed against numpy.

    Parameters
    ----------
    parameters: int
        Of the block.
    replicas: int
        Updates combined.
    beside: str
        A codec of updates that is measured beside fp32: fp16, int8, int4 or int2.
    """
    found = combine_bench.measure(parameters, replicas, beside)
    if output.json:
        return print_json(found)
    for row in found["rows"]:
        output.result(row, f"Combine, {row['codec']}")
