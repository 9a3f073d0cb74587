"""What decoding asks of a model, wherever its blocks are.

`inference/local.py` answers in one process, `inference/pipeline.py` over stages on many hosts. Both
give the same bytes, to the last bit of every probability.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from blocktrain.learning.model import Shape
from blocktrain.terms import Array
from blocktrain.wire.serving import Choice, Hop

Watch = Callable[[str, list[int]], None]
"""Called as (stage, bytes) when a stage says how an unfinished text looks after its blocks."""


@dataclass(frozen=True)
class Said:
    """What one traversal gave."""

    drafted: list[int]
    """What the first stage appended to the tokens it was given."""
    bytes: list[int]
    """One for each wanted row and each drafted one (Session.step), or of the span (emit)."""
    logs: list[float]
    """Natural log of the model's own probability of each of `bytes`."""
    probabilities: Array | None = None
    """(rows, 256) log-probabilities, where no choice was asked for."""
    hops: list[Hop] = field(default_factory=list)
    seconds: float = 0.0
    """From asking to having the answer, failures included."""
    sent: int = 0
    """Bytes on the wire, all hops and the answer together, frames included."""
    replayed: int = 0
    """How often a stage was replaced and the history given again."""


@dataclass(frozen=True)
class Asked:
    """One traversal as decoding wants it; positions count from the context's beginning."""

    start: int
    tokens: list[int]
    """All that the model has not seen from `start` on; what came before, it remembers."""
    wanted: int
    """How many of the last rows should be read."""
    draft: int = 0
    """How many bytes the first stage should append itself."""
    choice: Choice | None = None
    """None gives log-probabilities instead of bytes."""


class Session(Protocol):
    """One text in the making."""

    @property
    def shape(self) -> Shape:
        """Of the model."""

    async def step(self, asked: Asked) -> Said:
        """One traversal. `start` 0 begins a new context; a smaller start than before goes back."""

    async def emit(
        self, tokens: list[int], span: tuple[int, int], choice: Choice, watch: Watch | None = None
    ) -> Said:
        """One traversal that finds every byte of a span (denoise models only)."""

    async def close(self) -> None:
        """Lets every stage forget this text."""
