"""What the bench of a logical model and its stages tell each other; needs no torch.

The layers are those of learning/model.py: full attention with RoPE and QK-norm, and SwiGLU. Each
host holds one of them physically, and every layer of its span reads that one.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from blocktrain.errors import BadInput

TOKENS, OUTPUTS = 257, 256  # bytes and, at the input, MASK
HEAD_WIDTH = 128
STAGES = 3
LAYERS_PER_WIDTH = 36  # a model of width d has about d / 36 layers, if SwiGLU has 8/3 of its width
FEWEST, MOST = 1e6, 1e13  # parameters


@dataclass(frozen=True)
class Shape:
    """How large the model is: logically, and in memory."""

    width: int
    hidden: int
    """SwiGLU's inner width."""
    layers: int
    """Of all stages together."""

    @property
    def layer(self) -> int:
        """Parameters of one layer: its matrices, two norms, and the norms of queries and keys."""
        matrices = 4 * self.width**2 + 3 * self.width * self.hidden
        return matrices + 2 * self.width + 2 * HEAD_WIDTH

    @property
    def ends(self) -> int:
        """Parameters of the embedding and of the head with its norm."""
        return (TOKENS + OUTPUTS + 1) * self.width

    @property
    def parameters(self) -> int:
        """What one traversal goes through."""
        return self.layers * self.layer + self.ends

    @property
    def physical(self) -> int:
        """What is in memory, on all hosts together."""
        return STAGES * self.layer + self.ends


def fitted(parameters: float) -> Shape:
    """The shape with so many parameters, as nearly as whole layers and cache lines allow."""
    if not FEWEST <= parameters <= MOST:
        raise BadInput(f"{parameters:g} parameters are too few or too many; choose between "
                       f"{FEWEST:g} and {MOST:g}.")  # fmt: skip
    # Of 12 width^2 parameters a layer, times width / 36 layers, there are width^3 / 3.
    ideal = (LAYERS_PER_WIDTH / 12 * parameters) ** (1 / 3)
    width = max(1, round(ideal / HEAD_WIDTH)) * HEAD_WIDTH

    def of(layers: int) -> Shape:
        bare = Shape(width, 0, layers)
        left = (parameters - bare.parameters) / (3 * width * layers)
        hidden = 64 * round(left / 64)
        return Shape(width, min(max(hidden, 2 * width), 4 * width), layers)

    most = int(parameters / (10 * width**2))  # with hidden = 2 width
    choices = [of(layers) for layers in range(STAGES, most + 2 * STAGES, STAGES)]
    return min(choices, key=lambda shape: abs(shape.parameters - parameters))


@dataclass(frozen=True)
class Post:
    """What one stage is told when it starts."""

    shape: Shape
    index: int
    addresses: list[str]
    """Of all stages, in order."""
    positions: int
    ar_positions: int


class Said(msgspec.Struct, frozen=True, tag_field="say", tag=str.lower):
    """A line that a stage says."""


class Layer(Said, frozen=True):
    """One more layer is done."""


class Traversed(Said, frozen=True):
    """The first stage has got the answer of one traversal."""

    mode: str
    seconds: float
    moved: int
    """Bytes of all frames, from host to host and back to the first."""


class Spent(msgspec.Struct, frozen=True):
    """Seconds of all threads in one mode."""

    upcast: float
    product: float


class Ended(Said, frozen=True):
    """A stage has done its part."""

    peak: int
    """Bytes of memory it had at most."""
    threads: int
    spent: dict[str, Spent]
    """By mode."""


class Failed(Said, frozen=True):
    """A stage cannot go on."""

    index: int
    why: str


SAID = Layer | Traversed | Ended | Failed


def peak_memory() -> int:
    """Bytes of memory that this process had at most (Linux tells)."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
