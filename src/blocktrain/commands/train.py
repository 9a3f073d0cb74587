"""blocktrain train: a whole run on this machine, over real HTTP, watched to its end."""

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.live import Live
from rich.table import Table

from blocktrain import console, generate
from blocktrain.aggregation.folder import LEDGER
from blocktrain.commands.lab import FLAGS, RunFlags
from blocktrain.console import PLAIN, Out, bar, print_json
from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadInput, BadRun, NoBlob, Unreachable
from blocktrain.learning.data import Corpus, open_corpus
from blocktrain.learning.device import choose, threads
from blocktrain.learning.evaluate import evaluate
from blocktrain.learning.files import save_model
from blocktrain.learning.model import Model
from blocktrain.lengths import Lengths
from blocktrain.services import picture
from blocktrain.services.begin import Settings, Timing, begin
from blocktrain.services.embedded import Embedded, status
from blocktrain.services.follow import Follower
from blocktrain.services.lab import Lab, Watch, end_to_end_ce
from blocktrain.wire.owner import Status

NOTES = 10  # how often, in a whole run, CE of a sample is measured
SETTINGS = "settings.json"
LOOK = 0.5  # seconds between two looks at the run
SOON = 2.0  # seconds to wait for the coordinator: while we wait, nobody starts it again
PROMPT, SAMPLE = 64, 200  # bytes of the test split, and those that the model writes after them


@dataclass(frozen=True)
class Near(Timing):
    """A run on one machine knows its workers: nobody else comes, and a silent one is given up."""

    grace: float = 1.0
    """How long a round waits for the others once it has its quorum."""
    lease: float = 15.0
    """A worker that is silent for this long loses its slot."""

    @property
    def plain(self) -> Timing:
        """The same as any run keeps it."""
        return Timing(**asdict(self))


TIMING = Near()


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
    reference: bool = False
    """Afterwards, train the end-to-end model of full depth on the same bytes."""


HERE = Here()


def train(
    *,
    out: Path | None = None,
    resume: Path | None = None,
    run: Annotated[RunFlags, Parameter(name="*")] = FLAGS,
    timing: Annotated[Near, Parameter(name="*", group="Timing")] = TIMING,
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
    resume: Path
        The folder of a run that was stopped: it goes on with the settings it began with.
    """
    if (out is None) == (resume is None):
        raise BadInput("Give --out for a new run, or --resume with the folder of an old one.")
    folder = out or resume or Path()
    wanted = Begun(Settings(folder.resolve().name, run.plain, timing.plain), here.data)
    begun = kept_settings(folder, wanted, resume is not None)
    with bar(f"opening {begun.data}") as progress:
        corpus = open_corpus(begun.data, progress)
    plain = begun.settings.run
    count = here.workers or plain.shape.blocks * plain.pace.replicas
    crew = Embedded(folder, count, begun.data, here.threads, here.reference_line)
    if not (crew.run / LEDGER).exists():
        begin(crew.run, begun.settings, corpus)
    result = watch(crew, corpus, plain.pace.steps, output)
    lines = {"blocks": folder / "history.jsonl"}
    if here.reference:
        studio = Lab(plain, corpus, folder, choose("auto"), Watch(note=output.say))
        depth = plain.shape.blocks * plain.shape.layers
        result["ce_reference"] = end_to_end_ce(studio, depth, "reference")
        result["gap"] = result["ce"] - result["ce_reference"]
        lines["reference"] = folder / "reference" / "history.jsonl"
    elif here.reference_line:
        lines["reference"] = here.reference_line
    picture.curves(lines, folder / "curve.png")
    output.say(f"model in {folder}, plot in {folder / 'curve.png'}")
    output.say(f"sample: {readable_text(result['sample'])}")
    if not output.json:
        told = {key: value for key, value in result.items() if key != "sample"}
        output.result(told, "Test split, honest readout, nats per byte")
    print_json(result)


@dataclass(frozen=True)
class Begun:
    """What a run began with."""

    settings: Settings
    data: str


def kept_settings(folder: Path, wanted: Begun, resume: bool) -> Begun:
    """What the run in this folder began with, or begins with now; it never changes."""
    path = folder / SETTINGS
    if not path.exists():
        if resume:
            raise BadRun(f"There is no run in {folder}; begin one with --out.")
        with errors_are_clear(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, msgspec.json.encode(wanted))
        return wanted
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Begun)
    except msgspec.DecodeError as error:
        raise BadRun(f"{path} is damaged ({error}); choose another --out.") from None
    if not resume and kept != wanted:
        raise BadRun(
            f"{folder} holds a run with other settings; choose another --out, or go on with "
            f"--resume {folder}."
        )
    return kept


def watch(crew: Embedded, corpus: Corpus, steps: Lengths, output: Out) -> dict[str, Any]:
    """Looks after the run until it has ended; returns what it came to."""
    began, out = time.monotonic(), crew.folder
    with crew.up() as link:
        output.say(f"dashboard at {crew.url}, logs in {out / 'logs'}")
        link.patience = SOON
        follower, outlook = Follower(link, out / "fetched"), Outlook(steps)
        history = History(out / "history.jsonl")
        with Live(console=console.people, transient=True, auto_refresh=False) as live:
            while True:
                for name in crew.look_after():
                    output.say(f"{name} died and was started again; {out / 'logs'} says why")
                # A coordinator may die under any of these questions: the next look starts it
                # again, and what was not answered is asked again.
                with suppress(Unreachable, NoBlob):
                    now = status(link)
                    left = outlook.left(now, time.monotonic())
                    if console.people.is_terminal:
                        live.update(table(now, left), refresh=True)
                    if history.is_due(closed_rounds(now), now.rounds, steps):
                        with threads(1):  # the workers have the rest
                            history.add(follower.measure(corpus), output)
                    if now.state == "ended":
                        settings, model = follower.assemble(*follower.checkpoint())
                        now = status(link)
                        break
                time.sleep(LOOK)
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
        "sample": sample(model, corpus),
    }


def sample(model: Model, corpus: Corpus) -> str:
    """What the model makes of a beginning that it was not trained on."""
    prompt = corpus.test[:PROMPT].tobytes().decode(errors="replace")
    return "".join(generate(model, prompt, SAMPLE))


def readable_text(text: str) -> str:
    """Text that a terminal only shows: a model may write anything."""
    return "".join(c if c.isprintable() else " " for c in text)


@dataclass
class History:
    """CE as the run goes on, on the disk."""

    path: Path

    def rows(self) -> list[dict[str, Any]]:
        """What was measured so far."""
        if not self.path.exists():
            return []
        return [msgspec.json.decode(line) for line in self.path.read_bytes().splitlines()]

    def is_due(self, closed: int, rounds: int, steps: Lengths) -> bool:
        """Whether it is time for another measurement: about NOTES times in a run."""
        last = max((row["round"] for row in self.rows()), default=0)
        total, done, noted = (steps.before(each + 1) for each in (rounds, closed, last))
        return done * NOTES // total > noted * NOTES // total

    def add(self, row: dict[str, Any], output: Out) -> None:
        """Writes down one more."""
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        output.say(
            f"round {row['round']:>5}  {row['bytes_seen'] / 1e6:7.2f} MB seen  "
            f"CE {row['ce_sample']:.4f} (64 KiB sample)"
        )


def closed_rounds(now: Status) -> int:
    """Rounds that every block has behind it."""
    return min(block.round - (block.phase != "finished") for block in now.blocks)


@dataclass
class Outlook:
    """How long the rest takes, at this start's pace: earlier starts and pauses tell nothing."""

    steps: Lengths
    """Local steps of every round: a long one takes longer."""
    first: int | None = None
    """Steps of the rounds that were closed at the first look."""
    seconds: float = 0.0
    """That passed since then without a pause."""
    last: float = 0.0
    """When we looked last."""

    def left(self, now: Status, at: float) -> float | None:
        """Seconds; None until a round was closed under our eyes."""
        total, closed = (self.steps.before(each + 1) for each in (now.rounds, closed_rounds(now)))
        if self.first is None:
            self.first = closed
        elif now.state != "paused":
            self.seconds += at - self.last
        self.last = at
        done = closed - self.first
        return self.seconds / done * (total - closed) if done else None


def table(now: Status, left: float | None) -> Table:
    """The run at a glance; `left` are the seconds it still takes, if that is known."""
    newest = f"CE {now.curve[-1].ce:.4f}" if now.curve else "CE not measured yet"
    shown = Table(
        "block", "round", "phase", "updates", "deadline", "taken", "late", "refused",
        title=f"{newest}, {now.bytes_moved / 1e6:.1f} MB moved, "
        f"{sum(worker.here for worker in now.workers)} workers, "
        + ("time left unknown" if left is None else f"about {ceil(left / 60)} min left"),
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
