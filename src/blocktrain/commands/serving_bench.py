"""blocktrain bench stages|activations|serve|wan|failover"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from cyclopts import Parameter

from blocktrain.bench import activations as activations_bench
from blocktrain.bench import failover as failover_bench
from blocktrain.bench import serve as serve_bench
from blocktrain.bench import stages as stages_bench
from blocktrain.bench import wan as wan_bench
from blocktrain.bench import wan_picture, wan_quality, wan_rows
from blocktrain.bench.wan_plan import Planner
from blocktrain.console import PLAIN, Out, Output, bar, print_json
from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.inference.survey import prompts
from blocktrain.learning.data import open_corpus

SMALL, JUDGE = Path("models/small"), Path("models/judge")
"""The models that lie in the repository."""
WHOLE = Path("runs/whole")
"""The one that `make whole` trains."""
PROMPT = 128  # bytes
SURVEYED = 6  # prompts that forecasts are made from
STAGES, SERVE, WAN = stages_bench.Trial(), serve_bench.Trial(), wan_bench.Trial()
FAILOVER = failover_bench.Trial()


@dataclass(frozen=True)
class Who:
    """Who generates, from what, and who judges."""

    model: Path = SMALL
    """A model directory, for ar, speculative and exact."""
    whole_model: Path = WHOLE
    """One trained with denoise on masked spans, for whole; `make whole` trains it."""
    judge: Path = JUDGE
    """An end-to-end model, to judge whole by."""
    judged: int = 16
    """Texts of each kind that are judged."""
    data: str = "wikitext-2"
    """wikitext-2, enwik8, or a file or folder of your own: prompts are from its test split."""


WHO = Who()
SHOWN = {
    "mode": "mode",
    "temp": "temperature",
    "ms": "rtt_ms",
    "Mbit/s": "mbit",
    "bytes/s": "bytes_per_s",
    "planned": "planned_bytes_per_s",
    "x ar": "times_ar",
    "traversals": "traversals",
    "as ar": "identical",
}
"""Of a row, what fits on a terminal."""
JUDGED = {
    "mode": "mode",
    "traversals": "traversals",
    "judge's CE": "judge_ce",
    "distinct-2": "distinct_2",
    "-4": "distinct_4",
    "entropy": "entropy",
    "as ar": "beside_ar",
}


def wan(
    *,
    out: Path = Path("runs/wan"),
    trial: Annotated[wan_bench.Trial, Parameter(name="*")] = WAN,
    who: Annotated[Who, Parameter(name="*")] = WHO,
    output: Out = PLAIN,
) -> None:
    """Bytes per second over a WAN by every mode, beside what was forecast.

    Makes network namespaces, for which it must be root. The last line is JSON.

    Parameters
    ----------
    out: Path
        Folder for texts, table and picture; texts that are there are not made again.
    """
    torch.set_num_threads(1)  # as many as each stage has: forecasts are made here
    with bar(f"opening {who.data}") as progress:
        corpus = open_corpus(who.data, progress)
    given = prompts(corpus.test, trial.prompts, PROMPT)
    whole = if_there(who.whole_model, output)
    models = wan_bench.Models(who.model, whole, given)
    with bar("planning"):
        other = prompts(corpus.valid, SURVEYED, PROMPT)
        planned = Planner(models, trial.length, other).all(trial)
    rows = wan_rows.rows(wan_bench.measure(trial, models, out, output.say), planned)
    quality, verdict = [], ""
    if whole:
        judged, sampled = prompts(corpus.test, who.judged, PROMPT), max(trial.temperature)
        panel = wan_quality.Panel(who.model, whole, who.judge, judged, trial.length, sampled)
        with bar("judging") as progress:
            quality = wan_quality.compare(panel, trial.traversals, progress)
        verdict = wan_quality.verdict(quality, [r for r in rows if r["temperature"] == sampled])
    found = {"rows": rows, "quality": quality, "verdict": verdict}
    with errors_are_clear(out):
        write_atomically(out / "wan.json", msgspec.json.encode(found))
        wan_picture.draw(rows, out / "wan.png")
    if not output.json:
        output.rows([{name: row[key] for name, key in SHOWN.items()} for row in rows], "WAN")
        if quality:
            output.rows([{n: row[key] for n, key in JUDGED.items()} for row in quality], "Quality")
            output.say(verdict)
    print_json(found)


def if_there(whole: Path, output: Output) -> Path | None:
    """The model for whole, or a word that there is none."""
    if whole.exists():
        return whole
    output.say(f"No row is of whole: there is no {whole}; `make whole` trains it.")
    return None


def failover(
    *,
    model: Path = SMALL,
    whole_model: Path = WHOLE,
    data: str = "wikitext-2",
    trial: Annotated[failover_bench.Trial, Parameter(name="*")] = FAILOVER,
    output: Out = PLAIN,
) -> None:
    """What it costs a text when a stage of its route dies, with a replica, over a WAN.

    Makes network namespaces, for which it must be root. The last line is JSON. Lost is the work
    that was under way and what the replica must be told again; extra is the rest of the delay.

    Parameters
    ----------
    model: Path
        A model directory, for ar and exact.
    whole_model: Path
        One trained with denoise on masked spans, for whole; `make whole` trains it.
    data: str
        wikitext-2, enwik8, or a file or folder of your own: the prompt is from its test split.
    """
    with bar(f"opening {data}") as progress:
        text = open_corpus(data, progress).test
    models = wan_bench.Models(model, if_there(whole_model, output), prompts(text, 1, PROMPT))
    with tempfile.TemporaryDirectory() as folder:
        rows = failover_bench.measure(trial, models, Path(folder), output.say)
    if not output.json:
        shown = failover_bench.SHOWN
        output.rows([{name: row[key] for name, key in shown.items()} for row in rows], "Failover")
    print_json(failover_bench.summary(trial, rows))


def serve(
    *,
    model: Path = SMALL,
    data: str = "wikitext-2",
    trial: Annotated[serve_bench.Trial, Parameter(name="*")] = SERVE,
    output: Out = PLAIN,
) -> None:
    """Many texts at once through a gateway: nothing dropped, all served alike.

    Parameters
    ----------
    model: Path
        A model directory.
    data: str
        wikitext-2, enwik8, or a file or folder of your own: prompts are from its test split.
    """
    with bar(f"opening {data}") as progress:
        text = open_corpus(data, progress).test
    with tempfile.TemporaryDirectory() as folder:
        found = serve_bench.measure(trial, model, text, Path(folder))
    output.result(found, "Serve")


def stages(
    *,
    trial: Annotated[stages_bench.Trial, Parameter(name="*")] = STAGES,
    output: Out = PLAIN,
) -> None:
    """Three stages on loopback against the same model in one process, per traversal."""
    with tempfile.TemporaryDirectory() as folder, bar("traversals") as progress:
        found = stages_bench.measure(trial, Path(folder), progress)
    output.result(found, "Stages")


def activations(
    *,
    model: Path = SMALL,
    data: str = "wikitext-2",
    sample: int = 64 * 1024,
    stages: int = 3,
    output: Out = PLAIN,
) -> None:
    """CE by the codec of activations between stages.

    Parameters
    ----------
    model: Path
        A model directory.
    data: str
        wikitext-2, enwik8, or a file or folder of your own: its test split is read.
    sample: int
        Bytes of it.
    stages: int
        Into how many the model is cut.
    """
    with bar(f"opening {data}") as progress:
        text = open_corpus(data, progress).test[:sample]
    with bar("bytes") as progress:
        rows = activations_bench.measure(model, text, stages, progress)
    output.rows(rows, "Activations")
