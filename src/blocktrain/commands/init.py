"""blocktrain init: make a run for others to join."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from blocktrain.commands.lab import FLAGS, RunFlags
from blocktrain.console import PLAIN, Out, bar
from blocktrain.learning.data import open_corpus
from blocktrain.services.begin import Settings, Timing, begin


@dataclass(frozen=True)
class About:
    """What the run is about."""

    name: str = ""
    """What people call the run."""
    data: str = "wikitext-2"
    """wikitext-2, enwik8, or a file or folder of your own."""
    serve_corpus: bool = False
    """Let the coordinator serve the text to its workers: for text that has no public name."""


ABOUT, TIMING = About(), Timing()


def init(
    folder: Path,
    *,
    about: Annotated[About, Parameter(name="*")] = ABOUT,
    run: Annotated[RunFlags, Parameter(name="*")] = FLAGS,
    timing: Annotated[Timing, Parameter(name="*", group="Timing")] = TIMING,
    output: Out = PLAIN,
) -> None:
    """Make a run for others to join: charter, first snapshots, keys, the owner's token.

    Parameters
    ----------
    folder: Path
        A new folder, for `blocktrain coordinator`.
    """
    with bar(f"opening {about.data}") as progress:
        corpus = open_corpus(about.data, progress)
    settings = Settings(about.name or folder.resolve().name, run.plain, timing, about.serve_corpus)
    token = begin(folder, settings, corpus)
    output.say(f"next: blocktrain coordinator {folder}")
    output.result({"folder": str(folder), "token": token}, "A run; its owner's token")
