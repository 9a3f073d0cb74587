"""blocktrain bench three-hosts"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from blocktrain.bench import three_hosts as bench
from blocktrain.bench.hosts import Wan
from blocktrain.commands.lab import FLAGS, RunFlags
from blocktrain.console import PLAIN, Out, bar, print_json
from blocktrain.learning.data import open_corpus
from blocktrain.services.begin import Settings, Timing


@dataclass(frozen=True)
class Between:
    """What is between the hosts, and what they train on."""

    rtt_ms: float = 50.0
    """From any host to any other and back."""
    mbit: float = 100.0
    """Megabits a second, up and down, of each host."""
    data: str = "wikitext-2"
    """wikitext-2, enwik8, or a file or folder of your own."""
    every: float = 20.0
    """Seconds between two measurements of CE, at the least."""


BETWEEN, TIMING = Between(), Timing(lease=30.0, grace=2.0)


def three_hosts(
    *,
    out: Path,
    between: Annotated[Between, Parameter(name="*")] = BETWEEN,
    run: Annotated[RunFlags, Parameter(name="*")] = FLAGS,
    timing: Annotated[Timing, Parameter(name="*", group="Timing")] = TIMING,
    output: Out = PLAIN,
) -> None:
    """Three hosts with a WAN between them train one model: what CE, for how many bytes moved?

    Makes network namespaces, for which it must be root. The last line is JSON.

    Parameters
    ----------
    out: Path
        Folder for the run and what every process said.
    """
    with bar(f"opening {between.data}") as progress:
        corpus = open_corpus(between.data, progress)
    out.mkdir(parents=True, exist_ok=True)
    trial = bench.Trial(
        Settings("three-hosts", run.plain, timing),
        Wan(rtt_ms=between.rtt_ms, mbit=between.mbit),
        between.data,
        between.every,
    )
    found = bench.measure(trial, corpus, out, output.say)
    if not output.json:
        output.result(found, "Three hosts")
    print_json(found)
