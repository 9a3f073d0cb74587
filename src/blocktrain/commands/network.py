"""blocktrain bench network"""

import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from blocktrain.bench import network as bench
from blocktrain.commands.lab import FLAGS, RunFlags
from blocktrain.console import PLAIN, Out, bar
from blocktrain.learning.data import open_corpus


def network(
    *,
    data: str = "wikitext-2",
    counted: int = 4,
    repeats: int = 5,
    run: Annotated[RunFlags, Parameter(name="*")] = FLAGS,
    output: Out = PLAIN,
) -> None:
    """CPU-seconds of the network against the lab's for the same work, and seconds to a first step.

    Parameters
    ----------
    data: str
        wikitext-2, enwik8, or a file or folder of your own.
    counted: int
        Rounds that count, besides the first and the last.
    repeats: int
        Both sides so many times, by turns; the medians count.
    """
    with bar(f"opening {data}") as progress:
        corpus = open_corpus(data, progress)
    with tempfile.TemporaryDirectory() as folder:
        found = bench.measure(
            bench.shorter(run.plain, counted + 2), (data, corpus), Path(folder), repeats, output.say
        )
    output.result(found, "Network")
