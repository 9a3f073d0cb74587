"""blocktrain bench coordinator: imports no torch."""

from typing import Annotated

from cyclopts import Parameter

from blocktrain.bench import coordinator as bench
from blocktrain.console import PLAIN, Out, bar

LOAD = bench.Load()


def coordinator(
    *,
    load: Annotated[bench.Load, Parameter(name="*")] = LOAD,
    output: Out = PLAIN,
) -> None:
    """How long receipts take while many workers submit over HTTPS, and all of them at once.

    Coordinator and driver share this machine's cores; the CPU seconds of both are told.
    """
    with bar("updates") as progress:
        found = bench.measure(load, progress)
    output.result(found, "Coordinator")
