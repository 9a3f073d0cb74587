"""Who is served when: so many at once, the others in line, and the keys take turns.

Those who are served share the pipeline traversal by traversal, since a stage works on steps as they
come and a text asks for its next one only after the last. So nobody's long text holds up another;
only a place can be waited for, and no key may take all of them.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count

from blocktrain.errors import BadConfig, BlockTrainError

MOST_REMEMBERED = 10_000  # keys, or addresses where there are none

Turn = asyncio.Future[None]
"""Done when its holder may begin."""


@dataclass(frozen=True)
class Limits:
    """How many requests at once, and how many may wait."""

    at_once: int = 128
    """Requests served at the same time."""
    at_once_each: int = 64
    """Of these, requests of one key."""
    waiting: int = 512
    """Requests in line; further ones are told to come again."""
    waiting_each: int = 128
    """Of these, requests of one key."""

    def __post_init__(self) -> None:
        if min(self.at_once, self.at_once_each) < 1 or min(self.waiting, self.waiting_each) < 0:
            raise BadConfig("Of requests at once there must be 1 or more, in line 0 or more.")


class Full(BlockTrainError):
    """Nobody else fits into the line now."""


class Line:
    """Lets requests in: by order of arrival within a key, by turns between keys."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.served: Counter[str] = Counter()
        self.waiting: dict[str, deque[Turn]] = {}
        self.last: dict[str, int] = {}
        """When each key had its last turn, counted in turns; the longest ago comes first."""
        self.turns = count(1)

    @property
    def length(self) -> int:
        """How many wait."""
        return sum(map(len, self.waiting.values()))

    @contextmanager
    def place(self, key: str) -> Iterator[Turn]:
        """A place in the line, given up at the end; await the turn before doing anything."""
        turn = self.enter(key)
        try:
            yield turn
        finally:
            self.leave(key, turn)

    def enter(self, key: str) -> Turn:
        """Stands in line, at its end; where there is room, that is at once in front."""
        turn: Turn = asyncio.get_running_loop().create_future()
        line = self.waiting.setdefault(key, deque())
        line.append(turn)
        self.admit()
        crowded = len(line) > self.limits.waiting_each or self.length > self.limits.waiting
        if crowded and not turn.done():
            self.step_out(key, turn)
            raise Full("Too many requests are under way or wait; come again in a few seconds.")
        return turn

    def leave(self, key: str, turn: Turn) -> None:
        """Makes room for the next one, whether its turn had come or not."""
        if turn.done() and not turn.cancelled():
            self.served[key] -= 1
            if not self.served[key]:
                del self.served[key]
        else:
            self.step_out(key, turn)
        self.admit()

    def step_out(self, key: str, turn: Turn) -> None:
        """Leaves the line from wherever in it."""
        line = self.waiting.get(key, deque())
        with suppress(ValueError):  # admit() has found it cancelled already
            line.remove(turn)
        if not line:
            self.waiting.pop(key, None)

    def admit(self) -> None:
        """As many as there is room for, of the keys whose last turn is the longest ago."""
        while self.served.total() < self.limits.at_once:
            allowed = [k for k in self.waiting if self.served[k] < self.limits.at_once_each]
            if not allowed:
                return
            key = min(allowed, key=lambda k: self.last.get(k, 0))
            turn = self.waiting[key][0]
            self.step_out(key, turn)
            if not turn.cancelled():
                turn.set_result(None)
                self.served[key] += 1
                self.remember(key)

    def remember(self, key: str) -> None:
        """Notes a key's turn, also for when it comes again: else those who never queue win."""
        self.last.pop(key, None)
        self.last[key] = next(self.turns)
        if len(self.last) > MOST_REMEMBERED:
            del self.last[next(iter(self.last))]
