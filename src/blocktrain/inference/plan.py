"""How fast a text will come over given hosts and lines, before anything is started. Pure.

A traversal goes from the gateway through every stage and back. It takes, for each line, half a
round trip and the bytes over the line's rate, and at each stage what that needs to compute. A line
that was silent begins slowly: TCP sends a few packets, and twice as many after each round trip.

A draft of k bytes yields on average so many bytes per traversal (`Yields`): given by the share of
drafted bytes that are accepted, or counted on texts of the model itself (inference/survey.py).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from blocktrain.errors import BadInput
from blocktrain.learning.model import VOCABULARY, Shape
from blocktrain.wire import activations
from blocktrain.wire.frame import PREFIX
from blocktrain.wire.messages import Message
from blocktrain.wire.serving import MAX_DRAFT, USUAL, Answer, Choice, Codec, Emit, Hop, Place, Step

Mode = Literal["ar", "speculative", "exact", "whole"]
Yields = Sequence[float]
"""Bytes per traversal by the length of its draft, from 0 on; at least 1 each."""

PACKET, PAYLOAD = 1500, 1448  # bytes
PACKETS_FIRST = 10  # that TCP sends before it has heard anything (RFC 6928)
HANDLING = 0.001  # seconds at a stage besides computing: 0.9 ms on loopback, on two cores
SECRET, STAGE = "0" * 32, "0" * 64
ANYWHERE = Place(STAGE, "192.168.100.100", 40000)
HOP = Hop(STAGE, 12.345678, 0.123456, 12345, 50.123)
CHOICE = Choice(0.8, 0.95, 12345, 100)


@dataclass(frozen=True)
class Line:
    """From one host to the next."""

    source: str
    target: str
    rtt: float
    """Seconds there and back."""
    rate: float
    """Bytes per second."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.source} -> {self.target}"

    def seconds(self, count: float, silent: bool = False) -> float:
        """Until so many bytes have come; more if the line was silent before."""
        sending, window = 0.0, PACKETS_FIRST * PACKET
        left = count * PACKET / PAYLOAD
        while silent and left > window and window < self.rate * self.rtt:
            sending += self.rtt
            left -= window
            window *= 2
        return self.rtt / 2 + sending + left / self.rate


@dataclass(frozen=True)
class Speed:
    """How fast a stage computes."""

    step: float
    """Seconds for a step of few positions."""
    position: float
    """Seconds for each position of many."""
    drafting: float | None = None
    """Seconds for each byte of a draft, where they are fewer than for a step after a pause."""

    @property
    def draft(self) -> float:
        """Seconds for each byte of a draft."""
        return self.step if self.drafting is None else self.drafting

    def seconds(self, rows: int) -> float:
        """For so many positions at once."""
        return max(self.step, rows * self.position)


@dataclass(frozen=True)
class Seat:
    """A stage on a host."""

    host: str
    first: int
    last: int
    speed: Speed


@dataclass(frozen=True)
class Way:
    """The stages in order, and the lines between: from the gateway, and back to it."""

    seats: Sequence[Seat]
    lines: Sequence[Line]

    def __post_init__(self) -> None:
        if len(self.lines) != len(self.seats) + 1:
            raise BadInput("A way has one line more than stages; it must lead there and back.")


@dataclass(frozen=True)
class Task:
    """What is to be generated."""

    shape: Shape
    prompt: int = 128
    """Bytes of the prompt."""
    length: int = 256
    """Bytes to generate."""
    codec: Codec = USUAL

    def __post_init__(self) -> None:
        if self.length < 1 or self.prompt < 0:
            raise BadInput(
                f"{self.length} bytes after a prompt of {self.prompt} cannot be forecast; "
                "there must be 1 or more, after 0 or more."
            )

    @property
    def context(self) -> int:
        """Positions of the first traversal."""
        return min(1 + self.prompt, self.shape.window)

    @property
    def renewals(self) -> int:
        """How often the window gets full, so that the newer half of the text is read again."""
        beyond = self.context + self.length - 1 - self.shape.window
        return max(0, math.ceil(beyond / self.half))

    @property
    def half(self) -> int:
        """Positions that are read again then."""
        return max(1, self.shape.window // 2)


@dataclass(frozen=True)
class Cost:
    """Where a traversal's time goes."""

    lines: list[float]
    """Seconds on each line."""
    stages: list[float]
    """Seconds at each stage."""
    moved: int
    """Bytes of all frames."""

    @property
    def seconds(self) -> float:
        """All together."""
        return sum(self.lines) + sum(self.stages)


@dataclass(frozen=True)
class Forecast:
    """How a mode will do."""

    mode: Mode
    bytes_per_s: float
    traversals: float
    bytes_per_traversal: float
    draft: int
    """Bytes drafted for each traversal."""
    first_byte_ms: float
    wire_bytes_per_byte: float
    traversal_ms: float
    """Of an ordinary traversal."""
    limiting_link: str
    """The line on which it spends the most time."""
    link_ms: float
    """So much of it."""
    limited_by: str
    """What most of it goes into: round trips, rates, or computing."""


def from_acceptance(accepted: float) -> list[float]:
    """Yields where each drafted byte is accepted with this probability if those before it are."""
    if not 0 <= accepted <= 1:
        raise BadInput(f"{accepted} cannot be the accepted share; it must be from 0 to 1.")
    return [sum(accepted**n for n in range(draft + 1)) for draft in range(MAX_DRAFT + 1)]


def forecast(way: Way, task: Task, mode: Mode, yields: Yields = (1.0,)) -> Forecast:
    """For a mode that goes on from byte to byte, with the draft that is best for it."""
    drafts = 1 if mode == "ar" else min(len(yields), task.half)
    return max(
        (by_draft(way, task, mode, draft, yields[draft]) for draft in range(drafts)),
        key=lambda found: found.bytes_per_s,
    )


def by_draft(way: Way, task: Task, mode: Mode, draft: int, each: float) -> Forecast:
    """With drafts of one length, where each traversal yields so many bytes."""
    first = step_cost(way, task, task.context, (draft, mode), silent=True)
    again = step_cost(way, task, task.half, (draft, mode))
    ordinary = step_cost(way, task, 1, (draft, mode))
    count = max(task.length / each, 1.0 + task.renewals)
    parts = [(first, 1.0), (again, task.renewals), (ordinary, count - 1 - task.renewals)]
    return told(way, task, (mode, draft), parts, first.seconds)


def whole(way: Way, task: Task, traversals: int = 1) -> Forecast:
    """For a text found in so many traversals, or so many for each span if it needs several."""
    if traversals < 1:
        raise BadInput(f"traversals is {traversals}; it must be at least 1.")
    spans = list(spans_of(task))
    costs = [emit_cost(way, task, span) for span in spans]
    first = emit_cost(way, task, spans[0], silent=True)
    parts = [(first, 1.0), (costs[0], traversals - 1.0)]
    parts += [(cost, float(traversals)) for cost in costs[1:]]
    waited = first.seconds + (traversals - 1) * costs[0].seconds
    return told(way, task, ("whole", 0), parts, waited)


def spans_of(task: Task) -> Iterator[tuple[int, int]]:
    """Positions of each span's traversals and bytes that they find, as decode.whole cuts them."""
    window, known, made = task.shape.window, 1 + task.prompt, 0
    while made < task.length:
        count = min(task.length - made, window + 1 - min(known, max(1, window // 4)))
        yield min(known, window + 1 - count) + count - 1, count
        known += count
        made += count


def told(
    way: Way, task: Task, how: tuple[Mode, int], parts: list[tuple[Cost, float]], waited: float
) -> Forecast:
    """A forecast from all traversals of a text, by kind; the last kind is the ordinary one."""
    (mode, draft), ordinary = how, parts[-1][0]
    traversals = sum(count for _, count in parts)
    slowest = max(range(len(way.lines)), key=lambda number: ordinary.lines[number])
    return Forecast(
        mode=mode,
        bytes_per_s=task.length / sum(cost.seconds * count for cost, count in parts),
        traversals=traversals,
        bytes_per_traversal=task.length / traversals,
        draft=draft,
        first_byte_ms=1000 * waited,
        wire_bytes_per_byte=sum(cost.moved * count for cost, count in parts) / task.length,
        traversal_ms=1000 * ordinary.seconds,
        limiting_link=way.lines[slowest].name,
        link_ms=1000 * ordinary.lines[slowest],
        limited_by=most_of(way, ordinary),
    )


def most_of(way: Way, cost: Cost) -> str:
    """What most of a traversal's time goes into."""
    trips = sum(line.rtt / 2 for line in way.lines)
    slowest = max(range(len(way.seats)), key=lambda number: cost.stages[number])
    shares = {
        "round trips": trips,
        "rates": sum(cost.lines) - trips,
        f"computing, most on {way.seats[slowest].host}": sum(cost.stages),
    }
    return max(shares, key=lambda name: shares[name])


def step_cost(
    way: Way, task: Task, rows: int, drafted: tuple[int, Mode], silent: bool = False
) -> Cost:
    """Of a traversal that brings so many rows, and a draft by the mode's own way."""
    draft, mode = drafted
    by_stage = draft if mode == "exact" else 0  # which then computes one byte after another
    given = rows if mode == "exact" else rows + draft
    codec, width = task.codec, stream_of(task.shape)
    sizes = []
    for number in range(len(way.seats)):
        tokens = [100] * (rows + draft if number else given)
        body = activations.size(len(tokens), width, codec) if number else 0
        route, hops = [ANYWHERE] * (len(way.seats) - number - 1), [HOP] * number
        said = Step(
            SECRET, 100, SECRET, route, 100, tokens, 1 + draft, by_stage, codec, CHOICE, hops
        )
        sizes.append(frame_size(said, body))
    sizes.append(frame_size(answer(way, 1 + draft, by_stage)))
    first, *others = way.seats
    return Cost(
        [line.seconds(size, silent) for line, size in zip(way.lines, sizes, strict=True)],
        [
            HANDLING + first.speed.seconds(given) + by_stage * first.speed.draft,
            *(HANDLING + seat.speed.seconds(rows + draft) for seat in others),
        ],
        sum(sizes),
    )


def emit_cost(way: Way, task: Task, span: tuple[int, int], silent: bool = False) -> Cost:
    """Of a traversal over so many positions that finds so many bytes at once."""
    (rows, count), sizes = span, []
    for number in range(len(way.seats)):
        body = activations.size(rows, VOCABULARY, task.codec) if number else 0
        route, hops = [ANYWHERE] * (len(way.seats) - number - 1), [HOP] * number
        said = Emit(
            SECRET, 1, SECRET, route, [100] * rows, (rows - count, rows), CHOICE, task.codec,
            False, hops,
        )  # fmt: skip
        sizes.append(frame_size(said, body))
    sizes.append(frame_size(answer(way, count, 0)))
    return Cost(
        [line.seconds(size, silent) for line, size in zip(way.lines, sizes, strict=True)],
        [HANDLING + seat.speed.seconds(rows) for seat in way.seats],
        sum(sizes),
    )


def answer(way: Way, count: int, drafted: int) -> Answer:
    """What comes back, as long as it usually is."""
    logs, hops = [-1.2345678901234567] * count, [HOP] * len(way.seats)
    return Answer(SECRET, 100, [100] * drafted, [100] * count, logs, hops)


def frame_size(said: Message, body: int = 0) -> int:
    """Bytes of one frame."""
    return PREFIX.size + len(msgspec.json.encode(said)) + body


def stream_of(shape: Shape) -> int:
    """Width of a row between stages, as Span.stream says."""
    return shape.width if shape.objective == "neighbours" else 2 * VOCABULARY
