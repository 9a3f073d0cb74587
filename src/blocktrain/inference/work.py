"""What one stage does to one traversal, without sockets, so that a thread can do it."""

from typing import Any, Protocol

import msgspec
from torch import Tensor

from blocktrain.inference.choice import chosen, logs_of
from blocktrain.learning.model import MASK, VOCABULARY, Shape
from blocktrain.terms import Array
from blocktrain.wire import activations
from blocktrain.wire.serving import Answer, Choice, Emit, Holding, Step

LOG_BYTES = 4 * VOCABULARY  # of one row of log-probabilities, as fp32


class Blocks(Protocol):
    """Consecutive blocks that compute: inference/span.py, or whoever else can."""

    @property
    def shape(self) -> Shape: ...
    @property
    def stream(self) -> int: ...
    @property
    def holding(self) -> Holding: ...
    def memory(self) -> Any: ...
    def step(self, memory: Any, start: int, tokens: list[int], rows: Array | None) -> Array: ...
    def draft(
        self, memory: Any, start: int, tokens: list[int], count: int, choice: Choice, wanted: int
    ) -> tuple[list[int], Array]: ...
    def read(self, rows: Array) -> Tensor: ...
    def emit(
        self, tokens: list[int], span: tuple[int, int], choice: Choice, z: Array | None
    ) -> tuple[Array, list[int], list[float]]: ...


def why_not(blocks: Blocks, said: Step | Emit) -> str | None:
    """Why this cannot be taken further here, or None. Nothing is trusted that a stranger says."""
    first, window = blocks.holding.first == 0, blocks.shape.window
    if first != (not said.hops):
        return "The first stage takes what no other has had, and the others what one has."
    if isinstance(said, Emit):
        start, end = said.span
        if not 0 <= start < end <= len(said.tokens) <= window:
            return f"The span {start} to {end} must lie in a text of at most {window} tokens."
        return None
    rows = len(said.tokens) + (said.draft if first else 0)
    if said.start + rows > window:
        return f"Positions up to {said.start + rows} do not fit in a window of {window}."
    if said.wanted + (0 if first else said.draft) > len(said.tokens):
        return f"{said.wanted} rows are wanted of {len(said.tokens)} tokens."
    if said.draft and (said.choice is None or said.wanted == 0):
        return "A draft needs to know how bytes are chosen, and from which row."
    if MASK in said.tokens and blocks.shape.objective == "neighbours":
        return "This model has never seen a hidden byte; all must be known."
    return None


def body_size(blocks: Blocks, said: Step | Emit) -> int:
    """Bytes that must come with this."""
    if blocks.holding.first == 0:
        return 0
    return activations.size(len(said.tokens), width(blocks, said), said.codec)


def next_size(blocks: Blocks, said: Step | Emit) -> int:
    """Bytes that will go on from here, or a few more."""
    draft = said.draft if isinstance(said, Step) else 0
    if said.route:
        return activations.size(len(said.tokens) + draft, width(blocks, said), said.codec)
    return (said.wanted + draft) * LOG_BYTES if isinstance(said, Step) else 0


def width(blocks: Blocks, said: Step | Emit) -> int:
    """Of a row that travels: the stream, or one code for each byte there is."""
    return blocks.stream if isinstance(said, Step) else VOCABULARY


def take_step(blocks: Blocks, memory: Any, said: Step, body: bytes) -> tuple[Step | Answer, bytes]:
    """The step as the next stage gets it or, where none is left, its answer."""
    tokens, drafted = said.tokens, said.draft
    if blocks.holding.first > 0:
        before = activations.decode(body, len(tokens), blocks.stream, said.codec)
        rows = blocks.step(memory, said.start, tokens, before)
    elif said.draft:
        assert said.choice is not None
        made, rows = blocks.draft(memory, said.start, tokens, said.draft, said.choice, said.wanted)
        tokens, drafted = tokens + made, len(made)
    else:
        rows = blocks.step(memory, said.start, tokens, None)
    if said.route:
        passed = msgspec.structs.replace(said, tokens=tokens, draft=drafted, route=said.route[1:])
        return passed, activations.encode(rows, said.codec)
    return answer(blocks, said, rows, tokens[len(tokens) - drafted :])


def answer(blocks: Blocks, said: Step, rows: Array, drafted: list[int]) -> tuple[Answer, bytes]:
    """What the last rows say."""
    count = said.wanted + len(drafted)
    bytes_: list[int] = []
    logs: list[float] = []
    body = b""
    if count:
        read = blocks.read(rows[len(rows) - count :])
        if said.choice is None:
            body = read.numpy().astype("<f4", copy=False).tobytes()
        else:
            bytes_ = chosen(read, said.choice)
            logs = logs_of(read, bytes_)
    return Answer(said.session, said.number, drafted, bytes_, logs, said.hops), body


def take_emit(blocks: Blocks, said: Emit, body: bytes) -> tuple[Emit | Answer, bytes, list[int]]:
    """The same for a span that is found at once; and how it looks so far."""
    before = None
    if blocks.holding.first > 0:
        before = activations.decode(body, len(said.tokens), width(blocks, said), said.codec)
    z, seen, logs = blocks.emit(said.tokens, said.span, said.choice, before)
    if said.route:
        passed = msgspec.structs.replace(said, route=said.route[1:])
        return passed, activations.encode(z, said.codec), seen
    return Answer(said.session, said.number, [], seen, logs, said.hops), b"", seen
