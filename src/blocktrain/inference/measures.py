"""What a gateway has seen of stages and of the links between them: the base of every forecast.

A gateway sees its own round trips, and of each traversal the time it took and what each stage says
of computing and waiting, and of the round trip to the next. What is left over went by on the way
between stages, and is shared out by these round trips. A trip that nobody has seen cannot be
shorter than half of the difference of the round trips to its two ends, nor, by way of the gateway,
longer than half of their sum. A choice hopes for the former, so that what is unknown gets tried; a
forecast takes half of the longer round trip.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low

from blocktrain.wire.serving import Hop

RECENT = 8  # values of which the middle one is believed: the first of all is often far off
SMALL_ROWS = 16  # up to so many rows a step takes one time; beyond, a time for each row
SMALL_BODY = 16 * 1024  # bytes: below, a trip is all latency
UNSEEN_STEP = 0.02  # seconds of a small step that nobody has seen yet
UNSEEN_RATE = 1e6  # bytes per second


@dataclass
class Measure:
    """Something that is seen again and again."""

    _seen: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def see(self, value: float) -> None:
        """Once more."""
        self._seen.append(value)

    @property
    def value(self) -> float | None:
        """What is believed; None if nothing was seen."""
        return median_low(self._seen) if self._seen else None


@dataclass
class Speed:
    """How long a stage computes."""

    _small: Measure = field(default_factory=Measure)
    _row: Measure = field(default_factory=Measure)

    def see(self, rows: int, seconds: float) -> None:
        """Learns from one step."""
        if rows <= SMALL_ROWS:
            self._small.see(seconds)
        else:
            self._row.see(seconds / rows)

    @property
    def seen(self) -> bool:
        """Whether anything is known."""
        return self._small.value is not None or self._row.value is not None

    @property
    def small(self) -> float | None:
        """Seconds for a step of few rows, if one was seen."""
        return self._small.value

    def seconds(self, rows: int, unseen: float = UNSEEN_STEP) -> float:
        """What a step of so many rows will take."""
        small, row = self._small.value, self._row.value
        small = unseen if small is None else small
        if rows <= SMALL_ROWS:
            return small
        return max(small, rows * (small / SMALL_ROWS if row is None else row))


@dataclass
class Way:
    """From one stage to another."""

    _opened: bool = False
    _latency: Measure = field(default_factory=Measure)
    _rate: Measure = field(default_factory=Measure)
    rtt_ms: float | None = None
    """There and back, as the stage at its beginning has measured it last."""

    @property
    def latency(self) -> float | None:
        """Seconds for something small."""
        return self._latency.value

    @property
    def rate(self) -> float | None:
        """Bytes per second, where bodies were large enough to tell."""
        return self._rate.value

    def see(self, bytes: float, seconds: float) -> None:
        """Learns from one trip. The first one had to open a link, and says nothing of the rest."""
        if not self._opened:
            self._opened = True
        elif bytes < SMALL_BODY:
            self._latency.see(seconds)
        elif self.latency is not None and seconds > self.latency:
            self._rate.see(bytes / (seconds - self.latency))


@dataclass
class Ways:
    """All of them, by the ids of the two stages."""

    _ways: dict[tuple[str, str], Way] = field(default_factory=dict)

    def way(self, source: str, target: str) -> Way:
        """What is known of one way."""
        return self._ways.setdefault((source, target), Way())

    def hope(self, source: str, target: str, rtts: tuple[float, float]) -> float:
        """Seconds for something small, or the fewest that it could take."""
        latency = self.way(source, target).latency
        return abs(rtts[0] - rtts[1]) / 2 if latency is None else latency

    def forecast(self, source: str, target: str, rtts: tuple[float, float], bytes: int) -> float:
        """Seconds that it is likely to take."""
        way = self.way(source, target)
        latency = max(rtts) / 2 if way.latency is None else way.latency
        return latency + bytes / (way.rate or UNSEEN_RATE)

    def see(self, hops: Sequence[Hop], between: float) -> None:
        """Learns from a traversal that spent so many seconds on the way between its stages."""
        trips = trips_ms(hops, 1000 * between)
        for (before, hop), trip in zip(pairwise(hops), trips, strict=True):
            way = self.way(before.stage, hop.stage)
            way.see(hop.received, trip / 1000)
            way.rtt_ms = way.rtt_ms if before.onward_ms is None else before.onward_ms

    def onward(self, source: str) -> dict[str, float]:
        """Milliseconds from a stage to others and back, as it has measured them, by their ids."""
        return {
            target: way.rtt_ms
            for (begin, target), way in self._ways.items()
            if begin == source and way.rtt_ms is not None
        }

    def forget(self, stage: str) -> None:
        """A stage is gone."""
        self._ways = {pair: way for pair, way in self._ways.items() if stage not in pair}


def trips_ms(hops: Sequence[Hop], between: float) -> list[float]:
    """Shares out the milliseconds that a traversal spent between its stages, trip by trip.

    Each trip gets half of its measured round trip. What is left went by with sending, and goes by
    the bytes that were sent; but to a line that nobody has measured yet, if there is one.
    """
    between = max(0.0, between)  # clocks are not perfect
    halves = [None if hop.onward_ms is None else hop.onward_ms / 2 for hop in hops[:-1]]
    measured = sum(half for half in halves if half is not None)
    if measured > between:  # this time it went quicker than any ping
        return [(half or 0.0) * between / measured for half in halves]
    parts = [1 if half is None else 0 for half in halves]
    if not any(parts):
        parts = [max(1, hop.received) for hop in hops[1:]]
    left, whole = between - measured, sum(parts)
    return [(half or 0.0) + left * part / whole for half, part in zip(halves, parts, strict=True)]
