"""The table of `bench wan`: medians over prompts, beside what was forecast."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from blocktrain.bench.wan import Text
from blocktrain.bench.wan_driver import Made
from blocktrain.inference.plan import Forecast, Mode

Row = dict[str, Any]
Kind = tuple[float, float, float, Mode, int]
"""Round trip, rate, temperature, mode, and the traversals that `whole` was asked for."""
Planned = Mapping[Kind, Forecast]
ORDER: tuple[Mode, ...] = ("ar", "speculative", "exact", "whole")


def rows(texts: Iterable[Text], planned: Planned) -> list[Row]:
    """One row for each kind of text."""
    ordered = sorted(texts, key=rank)
    ar = {same(text): text for text in ordered if text.made.job.mode == "ar"}
    return [row(kind, list(some), ar, planned) for kind, some in groupby(ordered, kind_of)]


def row(kind: Kind, texts: list[Text], ar: dict[tuple[float, ...], Text], planned: Planned) -> Row:
    """Medians over the prompts."""
    rtt_ms, mbit, temperature, mode, asked = kind
    made = [text.made for text in texts]
    beside = [(ar[same(text)].made, text.made) for text in texts if same(text) in ar]
    identical = None  # whole is another model's text
    if mode in ("speculative", "exact") and beside:
        identical = all(one.text == other.text for one, other in beside)
    return {
        "mode": mode,
        "temperature": temperature,
        "rtt_ms": rtt_ms,
        "mbit": mbit,
        "bytes_per_s": median(each.rate for each in made),
        "traversals": asked or median(each.traversals for each in made),
        "wire_bytes_per_byte": median(each.sent / len(each.text) for each in made),
        "first_byte_ms": median(1000 * each.first_byte for each in made),
        "planned_bytes_per_s": planned[kind].bytes_per_s,
        "bytes_per_traversal": median(len(each.text) / each.traversals for each in made),
        "accepted": accepted(made),
        "times_ar": median(other.rate / one.rate for one, other in beside) if beside else None,
        "identical": identical,
        "prompts": len(made),
    }


def accepted(made: Sequence[Made]) -> float | None:
    """Of the guessed bytes, those that were right."""
    guessed = sum(each.guessed for each in made)
    return sum(each.right for each in made) / guessed if guessed else None


def kind_of(text: Text) -> Kind:
    """What prompts are taken together."""
    job = text.made.job
    return text.rtt_ms, text.mbit, job.temperature, job.mode, job.traversals


def rank(text: Text) -> tuple[float, ...]:
    """Where it stands in the table."""
    rtt_ms, mbit, temperature, mode, asked = kind_of(text)
    return rtt_ms, mbit, temperature, ORDER.index(mode), asked, text.made.job.prompt


def same(text: Text) -> tuple[float, ...]:
    """All but the mode: what is compared with `ar`."""
    job = text.made.job
    return text.rtt_ms, text.mbit, job.temperature, job.prompt
