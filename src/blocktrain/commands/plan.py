"""blocktrain plan: how fast a model will answer over given hosts, before anything is started."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter

from blocktrain.console import PLAIN, Out, bar
from blocktrain.errors import BadInput
from blocktrain.inference import layout, survey
from blocktrain.inference import plan as law
from blocktrain.inference.plan import Forecast, Task, Way
from blocktrain.learning.data import open_corpus
from blocktrain.learning.files import read_manifest
from blocktrain.wire.serving import USUAL, Codec

PROMPTS = 6  # that guesses are counted on


@dataclass(frozen=True)
class Wish:
    """What is to be generated, and how."""

    length: int = 256
    """Bytes of a text."""
    prompt: int = 128
    """Bytes of a prompt."""
    temperature: float = 0.8
    """0 is greedy."""
    codec: Codec = USUAL
    """How activations travel: fp32, fp16 or int8."""
    traversals: int = 8
    """That whole takes."""


@dataclass(frozen=True)
class Known:
    """What need not be measured on this machine."""

    acceptance: float | None = None
    """Share of the first stage's drafted bytes that are accepted; without, it is measured here."""
    lookup_acceptance: float | None = None
    """The same for guesses from the text so far (speculative)."""
    mbit: float | None = None
    """Megabits a second of lines of which the file does not tell."""
    data: str = "wikitext-2"
    """Text whose valid split gives prompts for measuring: a known name, a file or a folder."""


WISH, KNOWN = Wish(), Known()


def plan(
    model: Path,
    *,
    hosts: Path | None = None,
    links: Path | None = None,
    wish: Annotated[Wish, Parameter(name="*")] = WISH,
    known: Annotated[Known, Parameter(name="*")] = KNOWN,
    output: Out = PLAIN,
) -> None:
    """Forecast bytes per second by every mode, and the link that limits them.

    Parameters
    ----------
    model: Path
        A model directory.
    hosts: Path
        A file of hosts and what is between them, in TOML (docs/serving.md).
    links: Path
        Or what was measured: a gateway's /v1/route, or a links file of bench wan, as JSON.
    """
    given = hosts or links
    if given is None or (hosts and links):
        raise BadInput("Hosts or measured links must be given, one of them; add --hosts FILE.")
    shape = read_manifest(model).shape
    here = layout.read(given)
    if known.mbit is not None:
        here = replace(here, mbit=known.mbit)
    torch.set_num_threads(1)  # as a stage on a small host has
    way = layout.way(here, shape.blocks, lambda first, last: survey.speed(model, first, last))
    task = Task(shape, wish.prompt, wish.length, wish.codec)
    found = forecasts(model, way, task, wish, known)
    output.rows([asdict(each) if output.json else shown(each) for each in found], "Plan")


def shown(found: Forecast) -> dict[str, Any]:
    """What people want to know of it."""
    share = f"{found.link_ms:.0f} of {found.traversal_ms:.0f} ms"
    return {
        "mode": found.mode,
        "bytes/s": round(found.bytes_per_s, 1),
        "bytes a traversal": round(found.bytes_per_traversal, 2),
        "draft": found.draft,
        "first byte": f"{found.first_byte_ms:.0f} ms",
        "limited by": found.limited_by,
        "slowest link": f"{found.limiting_link}, {share}",
    }


def forecasts(model: Path, way: Way, task: Task, wish: Wish, known: Known) -> list[Forecast]:
    """Every mode that this model has."""
    exact, speculative = yields(model, way, wish, known)
    found = [
        law.forecast(way, task, "ar"),
        law.forecast(way, task, "speculative", speculative),
        law.forecast(way, task, "exact", exact),
    ]
    if task.shape.objective == "denoise":
        found.append(law.whole(way, task, wish.traversals))
    return found


def yields(model: Path, way: Way, wish: Wish, known: Known) -> tuple[law.Yields, law.Yields]:
    """Bytes per traversal of exact and of speculative: as given, else measured here."""
    if known.acceptance is not None and known.lookup_acceptance is not None:
        return law.from_acceptance(known.acceptance), law.from_acceptance(known.lookup_acceptance)
    with bar(f"opening {known.data}") as progress:
        corpus = open_corpus(known.data, progress)
    prompts = survey.prompts(corpus.valid, PROMPTS, max(1, wish.prompt))
    reach = survey.reach(model, survey.Question(way.seats[0].last + 1, wish.temperature, prompts))
    exact, speculative = reach.exact, reach.speculative
    if known.acceptance is not None:
        exact = law.from_acceptance(known.acceptance)
    if known.lookup_acceptance is not None:
        speculative = law.from_acceptance(known.lookup_acceptance)
    return exact, speculative
