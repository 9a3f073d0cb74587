"""A session in one process: every span here, one after another, and nothing on a wire."""

import time
from collections.abc import Sequence

from blocktrain.errors import BadInput
from blocktrain.inference.choice import chosen, logs_of
from blocktrain.inference.session import Asked, Said, Watch
from blocktrain.inference.span import Span
from blocktrain.learning.model import Shape
from blocktrain.terms import Array
from blocktrain.wire.serving import Choice, Hop


class LocalSession:
    """A Session over spans that together are a model. It computes where it is called, at once."""

    def __init__(self, spans: Span | Sequence[Span]) -> None:
        self.spans = [spans] if isinstance(spans, Span) else list(spans)
        blocks = [b for s in self.spans for b in range(s.holding.first, s.holding.last + 1)]
        if not self.spans or blocks != list(range(self.spans[0].shape.blocks)):
            raise BadInput("These spans are not one model; give each block once, in order.")
        self.memories = [span.memory() for span in self.spans]

    @property
    def shape(self) -> Shape:
        """Of the model."""
        return self.spans[0].shape

    async def step(self, asked: Asked) -> Said:
        """One traversal."""
        clock = Clock()
        first, *later = zip(self.spans, self.memories, strict=True)
        drafted = list[int]()
        if asked.draft:
            if asked.choice is None:
                raise BadInput("A draft needs to know how bytes are chosen; give a choice.")
            drafted, rows = first[0].draft(
                first[1], asked.start, asked.tokens, asked.draft, asked.choice, asked.wanted
            )
        else:
            rows = first[0].step(first[1], asked.start, asked.tokens)
        clock.lap()
        for span, memory in later:
            rows = span.step(memory, asked.start, asked.tokens + drafted, rows)
            clock.lap()
        return self.answer(asked, drafted, rows, clock)

    def answer(self, asked: Asked, drafted: list[int], rows: Array, clock: "Clock") -> Said:
        """What the last rows say."""
        count = asked.wanted + len(drafted)
        if count > len(rows):
            raise BadInput(f"{asked.wanted} rows are wanted of {len(asked.tokens)}; ask for fewer.")
        logs_RV = self.spans[-1].read(rows[len(rows) - count :])
        if asked.choice is None:
            return Said([], [], [], logs_RV.numpy(), clock.hops, clock.seconds)
        made = chosen(logs_RV, asked.choice)
        logs = logs_of(logs_RV, made)
        return Said(drafted, made, logs, hops=clock.hops, seconds=clock.seconds)

    async def emit(
        self, tokens: list[int], span: tuple[int, int], choice: Choice, watch: Watch | None = None
    ) -> Said:
        """One traversal that finds every byte of a span."""
        clock, z = Clock(), None
        for each in self.spans:
            z, made, logs = each.emit(tokens, span, choice, z)
            clock.lap()
            if watch:
                watch(clock.hops[-1].stage, made)
        return Said([], made, logs, hops=clock.hops, seconds=clock.seconds)

    async def close(self) -> None:
        """Forgets the text."""
        self.memories = [span.memory() for span in self.spans]


class Clock:
    """How long each span took; a span's name is its number, as long as a stage's would be."""

    def __init__(self) -> None:
        self.began = self.last = time.perf_counter()
        self.hops: list[Hop] = []

    def lap(self) -> None:
        """One span is done."""
        now = time.perf_counter()
        self.hops.append(Hop(f"{len(self.hops):064x}", 1000 * (now - self.last), 0.0, 0))
        self.last = now

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self.began
