"""What a model is like to serve, measured in this process: what plans need and nobody wrote down.

How far guesses reach is counted on texts that the model itself writes after held-out prompts: first
it writes, then at each place of the text is counted how many guessed bytes from there on would be
accepted. That gives the bytes per traversal for every length of draft without any further run.
"""

import hashlib
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from blocktrain import config
from blocktrain.disk import write_atomically
from blocktrain.errors import BadInput
from blocktrain.inference import decode
from blocktrain.inference.choice import Sampling, chosen
from blocktrain.inference.drafting import Lookup
from blocktrain.inference.local import LocalSession
from blocktrain.inference.plan import Speed
from blocktrain.inference.span import Span
from blocktrain.learning.data import Text
from blocktrain.learning.files import read_manifest
from blocktrain.learning.model import START
from blocktrain.learning.optimiser import digest_of
from blocktrain.wire.serving import MAX_DRAFT

TIMES = 15  # that a step is timed
PAUSE = 0.01  # seconds between two steps, as a stage has them: 3.3 ms then instead of 2.0
VERSION = 1  # of what is kept


@dataclass(frozen=True)
class Question:
    """Whose guesses, on what texts."""

    drafting: int
    """Blocks of the first stage, which drafts."""
    temperature: float
    prompts: Sequence[bytes]
    top_p: float = 1.0


class Reach(msgspec.Struct, frozen=True):
    """Bytes per traversal by the length of the draft, from 0 on."""

    exact: list[float]
    speculative: list[float]


def prompts(text: Text, count: int, size: int) -> list[bytes]:
    """So many pieces of a text, evenly spread over it, to begin generated texts with."""
    if count < 1 or not 0 < size <= len(text) // count:
        raise BadInput(f"{count} prompts of {size} bytes are not in {len(text)}; ask for fewer.")
    apart = len(text) // count
    begins = (number * apart + (apart - size) // 2 for number in range(count))
    return [text[begin : begin + size].tobytes() for begin in begins]


def speed(folder: Path, first: int, last: int) -> Speed:
    """How fast this machine computes a span, and says what follows."""
    span = Span.open(folder, first, last)
    many = max(1, span.shape.window // 2)
    return Speed(timed(span, 1, PAUSE), timed(span, many, PAUSE) / many, timed(span, 1, 0.0))


def timed(span: Span, count: int, pause: float) -> float:
    """Seconds for so many positions at once, each time after a pause: caches are cold then."""
    rows = None if span.begins else np.zeros((count, span.stream), np.float32)
    memory, seconds = span.memory(), []
    for _ in range(1 + TIMES):  # the first one touches memory that nobody had before
        time.sleep(pause)
        begun = time.perf_counter()
        span.read(span.step(memory, 0, [START] * count, rows)[-1:])
        seconds.append(time.perf_counter() - begun)
    return median(seconds[1:])


def reach(folder: Path, question: Question) -> Reach:
    """How far guesses reach; kept, so that the same question is answered at once."""
    manifest = read_manifest(folder)
    first = Span.open(folder, 0, question.drafting - 1)
    head = digest_of(first.drafter.state_dict()) if first.drafter else None
    asked = msgspec.json.encode((VERSION, manifest.digest, head, asdict(question)))
    path = config.cache_folder() / "surveys" / f"{hashlib.sha256(asked).hexdigest()}.json"
    with suppress(OSError, msgspec.DecodeError):  # what cannot be read is counted again
        return msgspec.json.decode(path.read_bytes(), type=Reach)
    model = Span.open(folder, 0, manifest.shape.blocks - 1)
    drafted, looked_up = [], []
    half = max(1, model.shape.window // 2)  # the rest is for the text: nothing is ever cut off
    for seed, prompt in enumerate(each[-half:] for each in question.prompts):
        length = max(1, model.shape.window - 1 - len(prompt))
        sampling = Sampling(question.temperature, question.top_p, seed, length)
        coming = decode.at_once(decode.ar(LocalSession(model), prompt, sampling))
        text = b"".join(piece.bytes for piece in coming)
        drafted.append(reached_by_draft(first, prompt, text, sampling))
        looked_up.append(reached_by_lookup(prompt, text))
    found = Reach(yields(drafted), yields(looked_up))
    with suppress(OSError):  # a full disk costs time, not the plan
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(found))
    return found


def reached_by_draft(first: Span, prompt: bytes, text: bytes, sampling: Sampling) -> list[int]:
    """From each place of a text, how many bytes the first stage's head would get right."""
    tokens = [START, *prompt, *text]
    rows = first.step(first.memory(), 0, tokens[:-1])
    said = chosen(first.guess(rows[len(prompt) :]), sampling.choice(0))
    run, runs = 0, []
    for mine, byte in zip(reversed(said), reversed(text), strict=True):
        run = run + 1 if mine == byte else 0
        runs.append(run)
    return runs[::-1]


def reached_by_lookup(prompt: bytes, text: bytes) -> list[int]:
    """The same for guesses from what the text has said before."""
    lookup, runs = Lookup(prompt), []
    for place in range(len(text)):
        guesses = lookup.guess(min(MAX_DRAFT, len(text) - place))
        runs.append(decode.agreed(guesses, list(text[place:])))
        lookup.add(text[place : place + 1])
    return runs


def yields(texts: Sequence[Sequence[int]]) -> list[float]:
    """Bytes per traversal by the length of the draft, from how far guesses reach at each place."""
    found = []
    for draft in range(MAX_DRAFT + 1):
        made = traversals = 0
        for runs in texts:
            place = 0
            while place < len(runs):
                place += 1 + min(runs[place], draft, len(runs) - place - 1)
                traversals += 1
            made += len(runs)
        found.append(made / traversals)
    return found
