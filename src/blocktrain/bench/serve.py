"""Many texts at once through a real gateway over HTTP: is any dropped, and are all served alike?

A gateway and three stages, each a process of its own (services/serving.py). All streams begin at
once and are as long as each other. A stream's rate is its bytes over the time from asking to its
end; besides, what each has when the first one ends is counted: then all still compete.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec

from blocktrain.errors import BadInput
from blocktrain.inference.survey import prompts
from blocktrain.learning.data import Text
from blocktrain.learning.files import read_manifest
from blocktrain.services.serving import Cast, Serving

SILENCE = 60.0  # seconds without a byte after which a stream counts as dropped
PROMPT = 128  # bytes
DATA = "data: "


@dataclass(frozen=True)
class Trial:
    """What is tried."""

    streams: int = 64
    """Texts at once."""
    length: int = 256
    """Bytes of each."""
    mode: str = "exact"
    """ar, exact or speculative."""
    temperature: float = 0.8
    """How bytes are chosen; 0 is greedy."""
    stages: int = 3
    """Into how many the model is cut."""

    def __post_init__(self) -> None:
        if min(self.streams, self.length, self.stages) < 1:
            raise BadInput("Streams, their length and the stages must be 1 or more; choose more.")


@dataclass
class Stream:
    """One text on its way to us."""

    began: float
    text: str = ""
    came: list[tuple[float, int]] = field(default_factory=list)
    """When how many characters were there."""
    generated: int = 0
    """Bytes, as the gateway counts them."""
    ended: float | None = None
    trouble: str = ""

    @property
    def first(self) -> float | None:
        """Seconds to the first byte."""
        return self.came[0][0] - self.began if self.came else None

    def had(self, when: float) -> int:
        """Characters that had come by then."""
        return max((count for at, count in self.came if at <= when), default=0)


def measure(trial: Trial, model: Path, text: Text, folder: Path) -> dict[str, Any]:
    """All streams at once; then the first one again, alone: its text must be the same."""
    blocks = read_manifest(model).shape.blocks
    given = prompts(text, trial.streams, PROMPT)
    crew = Serving(folder, model, Cast(stages=trial.stages))
    with crew.up(blocks, ["--port", "0", "--open"]):
        crew.wait_until_ready()
        together = asyncio.run(ask(trial, crew.url, given))
        alone = asyncio.run(ask(trial, crew.url, given[:1]))[0]
    return summary(trial, together, alone)


def summary(trial: Trial, together: list[Stream], alone: Stream) -> dict[str, Any]:
    """What the streams came to."""
    whole = [each for each in together if each.ended and each.generated == trial.length]
    troubles = sorted({each.trouble for each in together if each.trouble})
    result: dict[str, Any] = {
        "streams": trial.streams,
        "dropped": trial.streams - len(whole),
        "troubles": troubles,
        "mode": trial.mode,
        "temperature": trial.temperature,
        "length": trial.length,
        "stages": trial.stages,
    }
    if not whole:
        return result
    ends = [each.ended for each in whole if each.ended]
    rates = [trial.length / (each.ended - each.began) for each in whole if each.ended]
    shares = [float(each.had(min(ends))) for each in whole]
    waits = [each.first for each in whole if each.first is not None]
    return result | {
        "bytes_per_s": sum(each.generated for each in whole)
        / (max(ends) - min(each.began for each in whole)),
        "stream_bytes_per_s": median(rates),
        "slowest_over_median": min(rates) / median(rates),
        "jain": jain(rates),
        "least_over_median_at_first_end": min(shares) / median(shares) if any(shares) else 0.0,
        "jain_at_first_end": jain(shares),
        "first_byte_ms": 1000 * median(waits),
        "first_byte_ms_slowest": 1000 * max(waits),
        "alone_bytes_per_s": trial.length / (alone.ended - alone.began) if alone.ended else 0.0,
        "same_text_alone": together[0].text == alone.text,
    }


def jain(shares: Sequence[float]) -> float:
    """Jain's index: 1 if all have the same, 1/n if one has all."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


async def ask(trial: Trial, url: str, given: Sequence[bytes]) -> list[Stream]:
    """All texts at once."""
    unbounded = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, timeout=SILENCE, limits=unbounded, trust_env=False
    ) as client:
        asking = (
            listen(client, trial, prompt, number) for number, prompt in enumerate(given, start=1)
        )
        return await asyncio.gather(*asking)


async def listen(client: httpx.AsyncClient, trial: Trial, prompt: bytes, seed: int) -> Stream:
    """One text, piece by piece."""
    wanted = {
        "prompt": list(prompt),
        "max_tokens": trial.length,
        "temperature": trial.temperature,
        "seed": seed,
        "mode": trial.mode,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    stream = Stream(time.perf_counter())
    try:
        async with client.stream("POST", "/v1/completions", json=wanted) as response:
            if response.status_code != httpx.codes.OK:
                words = (await response.aread()).decode(errors="replace")
                stream.trouble = f"HTTP {response.status_code}: {words[:200]}"
                return stream
            async for line in response.aiter_lines():
                hear(stream, line)
    except httpx.TransportError as error:
        stream.trouble = f"{type(error).__name__}: {error}"
    return stream


def hear(stream: Stream, line: str) -> None:
    """One line of a stream of events."""
    if line == f"{DATA}[DONE]":
        stream.ended = time.perf_counter()
    elif line.startswith(DATA):
        event = msgspec.json.decode(line.removeprefix(DATA))
        if "error" in event:
            stream.trouble = str(event["error"].get("message"))
        for choice in event.get("choices", []):
            stream.text += choice["text"]
        if stream.text:
            stream.came.append((time.perf_counter(), len(stream.text)))
        if event.get("usage"):
            stream.generated = event["usage"]["completion_tokens"]
