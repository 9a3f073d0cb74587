"""blocktrain coordinator: keeps a run over HTTP, for as long as it takes. Imports no torch."""

import logging
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from blocktrain.aggregation.folder import RunFolder
from blocktrain.commands.listen import Listen, listening, serve
from blocktrain.commands.logs import log_as
from blocktrain.console import PLAIN, Out, print_json
from blocktrain.errors import BadInput
from blocktrain.services.coordinator import Coordinator
from blocktrain.wire.certificates import load_or_make_authority
from blocktrain.wire.owner import Point
from blocktrain.wire.tls import server_context

LISTEN = Listen()


def coordinator(
    folder: Path,
    *,
    listen: Annotated[Listen, Parameter(name="*")] = LISTEN,
    reference_line: Path | None = None,
    log: Literal["text", "json"] = "text",
    output: Out = PLAIN,
) -> None:
    """Keep a run: open and close rounds, take updates, make snapshots. Stop it as you like.

    Parameters
    ----------
    folder: Path
        What `blocktrain init` made.
    reference_line: Path
        The history.jsonl of a reference, for the dashboard.
    log: str
        How to log: text for people, json for machines.
    """
    log_as(log)
    with RunFolder(folder) as run, listening(listen) as (sock, url):
        corpus = run.corpus if run.charter.corpus_served else None
        authority = load_or_make_authority(folder, run.charter.name)  # members need it without TLS
        papers, shown = listen.papers(folder)
        if papers:
            server_context(*papers)  # says what is wrong with them before anybody is told to come
        finger = shown.fingerprint if shown else None
        keeper, line = run.keeper(), points(reference_line)
        app = Coordinator(keeper, corpus, line, authority).app(listen.base_path)
        if output.json:
            print_json({"url": url, "run": run.id, "fingerprint": finger})
        trust = f" --fingerprint {finger}" if finger else ""
        tell = logging.getLogger(__name__).info if log == "json" else output.say
        tell(f"run {run.id[:16]}, dashboard at {url}")
        tell(f"workers: blocktrain join {url} --token TOKEN{trust}")
        serve(app, sock, papers)


def points(path: Path | None) -> list[Point]:
    """A reference line from its history."""
    if path is None:
        return []
    try:
        rows = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
        return [Point(0.0, row["bytes_seen"], row["ce_sample"]) for row in rows]
    except (OSError, msgspec.DecodeError, KeyError) as error:
        raise BadInput(f"{path} is no history of a reference ({error}); check it.") from None
