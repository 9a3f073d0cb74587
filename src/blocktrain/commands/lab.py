"""blocktrain lab"""

import os
import signal
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import cyclopts
from cyclopts import Parameter

from blocktrain import config
from blocktrain.aggregation.combine import Averaging
from blocktrain.aggregation.folder import open_ledger
from blocktrain.console import PLAIN, Out, Output, bar, bars, print_json
from blocktrain.errors import Different
from blocktrain.learning import device
from blocktrain.learning.data import Corpus, open_corpus
from blocktrain.learning.device import Precision
from blocktrain.learning.model import Shape
from blocktrain.learning.noise import Noise
from blocktrain.learning.objective import Task
from blocktrain.learning.optimiser import Rates
from blocktrain.services import picture
from blocktrain.services.begin import Timing
from blocktrain.services.hardship import NONE, Hardship
from blocktrain.services.lab import Lab, Watch, experiment
from blocktrain.services.replay import replay as do_again
from blocktrain.services.run import Exchange, Pace, Run


@dataclass(frozen=True)
class RunFlags(Run):
    """Every setting of a run as a flag."""

    shape: Annotated[Shape, Parameter(name="*", group="Shape")] = field(default_factory=Shape)
    task: Annotated[Task, Parameter(name="*", group="Task")] = field(default_factory=Task)
    noise: Annotated[Noise, Parameter(name="*", group="Noise")] = field(default_factory=Noise)
    rates: Annotated[Rates, Parameter(name="*", group="Rates")] = field(default_factory=Rates)
    averaging: Annotated[Averaging, Parameter(name="*", group="Averaging")] = field(
        default_factory=Averaging
    )
    pace: Annotated[Pace, Parameter(name="*", group="Pace")] = field(default_factory=Pace)
    exchange: Annotated[Exchange, Parameter(name="*", group="Exchange")] = field(
        default_factory=Exchange
    )
    config: Path | None = None
    """A TOML file with the sections shape, task, noise, rates, averaging, pace, exchange, timing.
    """

    @property
    def plain(self) -> Run:
        """The run without its flags."""
        return Run(**{one.name: getattr(self, one.name) for one in fields(Run)})


@dataclass(frozen=True)
class Place:
    """Where a run happens, and what goes wrong there."""

    data: str = "wikitext-2"
    """wikitext-2, enwik8, or a file or folder of your own."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    precision: Precision = "auto"
    """What training computes in: float32 or bf16; auto is bf16 where the device has units for it.
    CE is always measured in float32."""
    threads: int = 1
    """CPU threads per replica."""
    at_once: int | None = None
    """Replicas trained at the same time; as many as there are cores if not given."""
    hardship: Annotated[Hardship, Parameter(name="*", group="Hardship")] = NONE


@dataclass(frozen=True)
class Beside:
    """What is measured as the run goes on, and what it is compared with."""

    notes: int = Watch.notes
    """How many times CE of a sample is measured."""
    reference: bool = False
    """Also train the end-to-end models of full and of one block's depth on the same bytes."""


FLAGS, PLACE, BESIDE = RunFlags(), Place(), Beside()


def lab(
    *,
    out: Path,
    replay: Path | None = None,
    beside: Annotated[Beside, Parameter(name="*")] = BESIDE,
    run: Annotated[RunFlags, Parameter(name="*")] = FLAGS,
    place: Annotated[Place, Parameter(name="*")] = PLACE,
    output: Out = PLAIN,
) -> None:
    """Train a model, one block at a time, in this process; no network.

    The same command goes on where it was stopped. The last line is JSON: ce, ce_reference,
    ce_shallow, gap, bytes_seen, core_seconds, parameters, precision.

    Parameters
    ----------
    out: Path
        Folder for the assembled model, its history and its plot.
    replay: Path
        The ledger of a network's run: do its recorded work again, and compare every digest.
    """
    at_once = place.at_once or max(1, (os.cpu_count() or 1) // place.threads)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it saves, as after Ctrl+C
    with bar(f"opening {place.data}") as progress:
        corpus = open_corpus(place.data, progress)
    if replay is not None:
        return repeat(replay, corpus, out, place.threads, output)
    with bars("steps", "test split") as (steps, evaluation):
        watch = Watch(
            steps, evaluation, output.say, lambda row: output.say(spoken(row)), beside.notes
        )
        where = device.choose(place.device)
        studio = Lab(run.plain, corpus, out, where, watch, place.threads, at_once, place.hardship)
        with device.training_in(place.precision):
            result = experiment(studio, beside.reference)
            told = {**asdict(result), "precision": device.trains_in(where)}
    lines = {"blocks": out / "history.jsonl"}
    if beside.reference:
        lines |= {name: out / name / "history.jsonl" for name in ("reference", "shallow")}
    picture.curves(lines, out / "curve.png")
    output.say(f"model in {out}, plot in {out / 'curve.png'}")
    if not output.json:
        output.result(told, "Test split, honest readout, nats per byte")
    print_json(told)


def repeat(path: Path, corpus: Corpus, out: Path, count: int, output: Output) -> None:
    """Does a network's work again; the exit code tells whether every digest came out the same."""
    with bar("rounds") as progress, device.threads(count), open_ledger(path) as opened:
        found = do_again(opened, corpus, out / "replay", progress)
    told, title = {**asdict(found), "same": not found.different}, "Done again"
    if not found.different:
        return output.result(told, title)
    error = Different(
        f"{len(found.different)} digests are not those of the ledger, the first is "
        f"{found.different[0]}; use the same machine and threads as its workers."
    )
    output.result_beside(error, told, title)
    raise error


def spoken(row: dict[str, Any]) -> str:
    """A line of history for people."""
    return (
        f"round {row['round']:>5}  {row['bytes_seen'] / 1e6:7.2f} MB seen  "
        f"CE {row['ce_sample']:.4f} (64 KiB sample)  {row['core_seconds']:.0f} core-seconds"
    )


@dataclass(frozen=True)
class Sections(Run):
    """What may stand in a config file."""

    timing: Timing = field(default_factory=Timing)


def defaults_from(path: str) -> cyclopts.config.Dict:
    """The values of a config file, as defaults of the flags."""
    config.load(Path(path), Sections)  # refuses what does not fit, with the nearest known key
    sections = config.read(Path(path)).values()
    values = {key.replace("_", "-"): value for one in sections for key, value in one.items()}
    # One file serves all commands: the lab waits for nobody, so it has no flags for timing.
    return cyclopts.config.Dict(values, use_commands_as_keys=False, allow_unknown=True, source=path)
