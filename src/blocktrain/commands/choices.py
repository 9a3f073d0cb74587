"""blocktrain bench codecs|replicas"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from blocktrain.bench import choices as bench
from blocktrain.commands.lab import FLAGS, RunFlags
from blocktrain.console import PLAIN, Out, bar
from blocktrain.learning.data import open_corpus


def codecs(
    *names: str,
    out: Path,
    data: str = "wikitext-2",
    run: Annotated[RunFlags, Parameter(name="*")] = FLAGS,
    output: Out = PLAIN,
) -> None:
    """CE by codec of updates and deltas, in the lab.

    Parameters
    ----------
    names: str
        fp16, int8, int4, int2; fp32 is always among them.
    out: Path
        Folder with a run for each codec; the same command goes on where it was stopped.
    data: str
        wikitext-2, enwik8, or a file or folder of your own.
    """
    with bar(f"opening {data}") as progress:
        corpus = open_corpus(data, progress)
    rows = bench.codecs(run.plain, names, corpus, out, output.say)
    output.rows(rows, "Test split, honest readout, nats per byte")


def replicas(
    *counts: int,
    out: Path,
    data: str = "wikitext-2",
    run: Annotated[RunFlags, Parameter(name="*")] = FLAGS,
    output: Out = PLAIN,
) -> None:
    """CE by replicas per block, in the lab: same rounds, steps and bytes.

    Parameters
    ----------
    counts: int
        Replicas per block; 1 is always among them. --batch must have so many equal parts.
    out: Path
        Folder with a run for each number; the same command goes on where it was stopped.
    data: str
        wikitext-2, enwik8, or a file or folder of your own.
    """
    with bar(f"opening {data}") as progress:
        corpus = open_corpus(data, progress)
    rows = bench.replicas(run.plain, counts, corpus, out, output.say)
    output.rows(rows, "Test split, honest readout, nats per byte")
