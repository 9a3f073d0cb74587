"""The texts that a stage remembers: so many and no more, shared fairly between those who ask. Pure.

A session lives at the end of a path: peer, link, secret. Nobody else's link leads to it, so that a
stolen secret opens nothing. When there is no room for a new one, the one that has not been used for
longest goes, if that is STALE or more; else the peer (and of its links the one) with the most
sessions must give one up to whoever has fewer. Whoever has the most himself is refused.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from blocktrain.inference.turns import Path
from blocktrain.wire.serving import Step

STALE = 10.0  # seconds without a step: a text in the making takes one every few round trips

M = TypeVar("M")


@dataclass
class Room(Generic[M]):
    """What is remembered of one text."""

    path: Path
    memory: M
    used: float
    """When the last step came."""
    in_hand: int = 0
    """Steps that wait, are computed or are passed on."""
    leaving: bool = False
    """Whether it is to be forgotten as soon as nothing is in hand."""
    passed: Step | None = None
    """The newest step as it came here, once it has been passed on."""


class Rooms(Generic[M]):
    """All of them, by path; whoever was used last is at the end."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._all: dict[Path, Room[M]] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def free(self) -> int:
        """How many more fit without anybody's leaving."""
        return max(0, self.most - len(self._all))

    def use(self, path: Path, now: float) -> Room[M] | None:
        """The session at that path, which is used now; None if nothing is remembered."""
        room = self._all.pop(path, None)
        if room:
            room.used = now
            self._all[path] = room
        return room

    def open(self, path: Path, memory: Callable[[], M], now: float) -> Room[M] | None:
        """A new session, in a room that `give_way` has made; None if there is none."""
        if not self.free:
            return None
        room = self._all[path] = Room(path, memory(), now)
        return room

    def end(self, path: Path) -> None:
        """Forgets what is at that path and all that is further in."""
        for inner in [p for p in self._all if p[: len(path)] == path]:
            del self._all[inner]

    def under(self, path: Path) -> list[Room[M]]:
        """All sessions of a peer or of a link."""
        return [s for p, s in self._all.items() if p[: len(path)] == path]

    def unused(self, now: float, seconds: float) -> list[Room[M]]:
        """Those without a step for so long."""
        return [s for s in self._all.values() if not s.in_hand and now - s.used >= seconds]

    def give_way(self, path: Path, now: float) -> Room[M] | None:
        """Who has to go before a session at `path` can be opened; None if nobody can."""
        resting = (s for s in self._all.values() if not s.in_hand)  # the longest unused first
        oldest = next(resting, None)
        if oldest is None or now - oldest.used >= STALE:
            return oldest
        for depth in (1, 2):  # between peers, then between the links of one
            held = Counter(p[:depth] for p in self._all if p[: depth - 1] == path[: depth - 1])
            richest, most = held.most_common(1)[0] if held else (path[:depth], 0)
            if most > held[path[:depth]] + 1:
                return self._first_to_go(richest)
        return None

    def _first_to_go(self, path: Path) -> Room[M] | None:
        """Of the richest link in here, the session unused for longest."""
        links = Counter(p[:2] for p in self._all if p[: len(path)] == path)
        for link, _ in links.most_common():
            for room in self.under(link):
                if not room.in_hand:
                    return room
        return None
