"""blocktrain train: a whole run on this machine, over real HTTP, watched to its end."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.live import Live
from rich.table import Table

from blocktrain import console
from blocktrain.commands.lab import FLAGS, RunFlags
from blocktrain.console import PLAIN, Out, bar, print_json
from blocktrain.disk import write_atomically
from blocktrain.errors import BadRun, Unreachable
from blocktrain.learning.data import Corpus, open_corpus
from blocktrain.learning.device import threads
from blocktrain.learning.evaluate import evaluate
from blocktrain.learning.files import save_model
from blocktrain.services import picture
from blocktrain.services.begin import Settings, Timing, begin
from blocktrain.services.embedded import Embedded, status
from blocktrain.services.follow import Follower
from blocktrain.wire.link import Link
from blocktrain.wire.owner import Status

NOTES = 10  # how often, in a whole run, CE of a sample is measured
SETTINGS = "settings.json"
LOOK = 0.5  # seconds between two looks at the run
# A run on one machine knows its workers: nobody else comes, so a silent one is soon given up.
TIMING = Timing(lease=15.0, grace=1.0)


@dataclass(frozen=True)
class Here:
    """How the run uses this machine."""

    data: str = "wikitext-2"
    """wikitext-2, enwik8, or a file or folder of your own."""
    workers: int | None = None
    """Worker processes; one for each replica of each block if not given."""
    threads: int = 1
    """CPU threads per worker."""
    reference_line: Path | None = None
    """The history.jsonl of a reference trained earlier, for the plot and the dashboard."""


HERE = Here()


def train(
    *,
    out: Path,
    run: Annotated[RunFlags, Parameter(name="*")] = FLAGS,
    timing: Annotated[Timing, Parameter(name="*", group="Timing")] = TIMING,
    here: Annotated[Here, Parameter(name="*")] = HERE,
    output: Out = PLAIN,
) -> None:
    """Train a model with real workers on this machine, over HTTP.

    A coordinator and its workers are processes of their own, as they are across the internet. The
    same command goes on where it was stopped. The last line is JSON.

    Parameters
    ----------
    out: Path
        Folder for the run, the assembled model, its history and its plot.
    """
    with bar(f"opening {here.data}") as progress:
        corpus = open_corpus(here.data, progress)
    count = here.workers or run.plain.shape.blocks * run.plain.pace.replicas
    crew = Embedded(out, count, here.data, here.threads, here.reference_line)
    settings = Settings(out.resolve().name, run.plain, timing)
    if not (crew.run / "ledger.sqlite").exists():
        begin(crew.run, settings, corpus)
        write_atomically(out / SETTINGS, msgspec.json.encode(asdict(settings)))
    else:
        refuse_other(out, settings)
    result = watch(crew, corpus, out, output)
    lines = {"blocks": out / "history.jsonl"}
    if here.reference_line:
        lines["reference"] = here.reference_line
    picture.curves(lines, out / "curve.png")
    output.say(f"model in {out}, plot in {out / 'curve.png'}")
    if not output.json:
        output.result(result, "Test split, honest readout, nats per byte")
    print_json(result)


def refuse_other(out: Path, settings: Settings) -> None:
    """A run goes on only as what it began."""
    kept = out / SETTINGS
    told = msgspec.json.encode(asdict(settings))
    if kept.exists() and kept.read_bytes() != told:
        raise BadRun(
            f"{out} holds a run with other settings; choose another --out, or repeat the command "
            "that made it."
        )


def watch(crew: Embedded, corpus: Corpus, out: Path, output: Out) -> dict[str, Any]:
    """Looks after the run until it has ended; returns what it came to."""
    began = time.monotonic()
    with crew.up() as link:
        output.say(f"dashboard at {crew.url}, logs in {out / 'logs'}")
        follower = Follower(link, out / "fetched")
        history = History(out / "history.jsonl")
        with Live(console=console.people, transient=True, auto_refresh=False) as live:
            while True:
                for name in crew.look_after():
                    output.say(f"{name} died and was started again; {out / 'logs'} says why")
                now = looked(link)
                if now is not None:
                    if console.people.is_terminal:
                        live.update(table(now), refresh=True)
                    closed = min(block.round - (block.phase != "finished") for block in now.blocks)
                    if history.is_due(closed, now.rounds):
                        with threads(1):  # the workers have the rest
                            history.add(follower.measure(corpus), output)
                    if now.state == "ended":
                        break
                time.sleep(LOOK)
        charter, found = follower.checkpoint()
        settings, model = follower.assemble(charter, found)
        now = status(link)
    save_model(model, out, {"run": asdict(settings), "data": corpus.name, "corpus": corpus.digest})
    with bar("test split") as progress:
        score = evaluate(model, corpus.test, progress)
    return {
        "ce": score.ce,
        "per_block": score.per_block,
        "bytes_seen": now.bytes_seen,
        "bytes_moved": now.bytes_moved,
        "parameters": model.parameters,
        "rounds": now.rounds,
        "updates": sum(block.taken + block.late for block in now.blocks),
        "refused": sum(block.refused for block in now.blocks),
        "seconds": time.monotonic() - began,
    }


def looked(link: Link) -> Status | None:
    """How the run is doing; None while the coordinator is being started again."""
    try:
        link.patience = 2.0
        return status(link)
    except Unreachable:
        return None


@dataclass
class History:
    """CE as the run goes on, on the disk."""

    path: Path

    def rows(self) -> list[dict[str, Any]]:
        """What was measured so far."""
        if not self.path.exists():
            return []
        return [msgspec.json.decode(line) for line in self.path.read_bytes().splitlines()]

    def is_due(self, closed: int, rounds: int) -> bool:
        """Whether it is time for another measurement: about NOTES times in a run."""
        last = max((row["round"] for row in self.rows()), default=0)
        return closed * NOTES // rounds > last * NOTES // rounds

    def add(self, row: dict[str, Any], output: Out) -> None:
        """Writes down one more."""
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        output.say(
            f"round {row['round']:>5}  {row['bytes_seen'] / 1e6:7.2f} MB seen  "
            f"CE {row['ce_sample']:.4f} (64 KiB sample)"
        )


def table(now: Status) -> Table:
    """The run at a glance."""
    newest = f"CE {now.curve[-1].ce:.4f}" if now.curve else "CE not measured yet"
    done = min(block.round for block in now.blocks)
    left = now.age / max(1, done) * (now.rounds - done) if done else None
    shown = Table(
        "block", "round", "phase", "updates", "deadline", "taken", "late", "refused",
        title=f"{newest}, {now.bytes_moved / 1e6:.1f} MB moved, "
        f"{sum(worker.here for worker in now.workers)} workers, "
        + ("time left unknown" if left is None else f"about {left / 60:.0f} min left"),
        title_justify="left",
    )  # fmt: skip
    for block in now.blocks:
        wait = "-" if block.seconds_left is None else f"{block.seconds_left:.0f} s"
        shown.add_row(
            str(block.block + 1),
            f"{block.round} of {now.rounds}",
            block.phase,
            f"{block.updates} of {now.replicas}",
            wait,
            *map(str, (block.taken, block.late, block.refused)),
        )
    return shown
