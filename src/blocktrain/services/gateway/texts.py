"""Bytes as the model gives them -> text as people read it: whole characters, and no stop in it."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Shown:
    """What can be shown now."""

    text: str = ""
    bytes: bytes = b""
    """The same before it was text."""
    logs: list[float] = field(default_factory=list)
    """The log-probability of each byte."""


class Text:
    """One answer in the making.

    Text ends before the first stop, where first means: whose last byte comes first. So it ends at
    the same place whether bytes come one by one or many at once. What may still become a stop, and
    the beginning of a character, wait for their rest.
    """

    def __init__(self, stops: Sequence[bytes] = ()) -> None:
        self.stops = stops
        self.stopped = False
        self.generated = 0
        """Bytes that came, up to and with a stop."""
        self.held = bytearray()
        self.logs: list[float] = []
        """Of the held bytes."""

    def add(self, new: bytes, logs: Sequence[float]) -> Shown:
        """Takes what the model says next; gives what can be shown of it and of what was held."""
        for byte, log in zip(new, logs, strict=True):
            if self.stopped:
                break
            self.held.append(byte)
            self.logs.append(log)
            self.generated += 1
            reached = [len(stop) for stop in self.stops if self.held.endswith(stop)]
            if reached:
                self.stopped = True
                del self.held[-max(reached) :], self.logs[-max(reached) :]
        clear = len(self.held) - self.doubtful()
        return self.show(clear - unfinished(self.held[:clear]))

    def end(self) -> Shown:
        """What was held until now: nothing more will come. Half a character becomes a �."""
        return self.show(len(self.held))

    def doubtful(self) -> int:
        """How many of the held bytes may be the beginning of a stop."""
        if self.stopped:
            return 0
        longest = min(len(self.held), max(map(len, self.stops), default=0))
        lengths = range(longest, 0, -1)
        ends = (n for n in lengths if any(s.startswith(self.held[-n:]) for s in self.stops))
        return next(ends, 0)

    def show(self, count: int) -> Shown:
        """So many of the held bytes."""
        shown, logs = bytes(self.held[:count]), self.logs[:count]
        del self.held[:count], self.logs[:count]
        return Shown(shown.decode(errors="replace"), shown, logs)


def unfinished(tail: bytes | bytearray) -> int:
    """How many bytes at the end are the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(bytes(tail[-3:]))  # the longest character has four bytes
    return len(decoder.getstate()[0])
