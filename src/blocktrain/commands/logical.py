"""blocktrain bench logical: imports no torch."""

from typing import Annotated

from cyclopts import Parameter

from blocktrain.bench import logical as bench
from blocktrain.console import PLAIN, Out, bar, print_json

TRIAL = bench.Trial()


def logical(
    *,
    trial: Annotated[bench.Trial, Parameter(name="*")] = TRIAL,
    output: Out = PLAIN,
) -> None:
    """A logical model of 75.80 B parameters over three hosts: `whole` against `ar`.

    Every layer is executed, but all layers of a host read one physical fp16 layer. Makes network
    namespaces, for which it must be root. The last line is JSON.
    """
    with bar("layers") as progress:
        found = bench.measure(trial, progress)
    if not output.json:
        output.result(found, "Logical")
    print_json(found)
