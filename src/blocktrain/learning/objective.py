"""What one block is asked to do.

`neighbours` (ours): continue the residual stream of the blocks before, so that the blocks after can
finish the prediction. Neighbours are frozen copies; only the block's own parameters get gradients.
`denoise` (the paper's): predict the next byte from clean context and a noisy code of it, alone.

Letters: B batch, T positions, D width, V vocabulary, M code width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blocktrain.errors import BadConfig
from blocktrain.learning import device
from blocktrain.learning.model import (
    MASK,
    VOCABULARY,
    Block,
    Shape,
    Sight,
    causal_sight,
    denoise,
)
from blocktrain.learning.noise import Noise, target_code
from blocktrain.learning.optimiser import Rates

Loader = Callable[[], Block]
"""Opens a neighbour when it is needed; from a file it is memory-mapped, so it costs no memory."""

UNASKED = -100  # in place of a target that nobody has to find
KEPT_ACTIVATIONS = 128 * 2**20  # bytes in a frozen copy; if there would be more, none are kept
FEATURES_AT_ONCE = 64 * 2**20  # bytes of upstream features held: memory must not grow with K


@dataclass(frozen=True)
class Task:
    """How a block's loss is made."""

    lookahead: int = 2
    """How many blocks downstream the loss looks through (neighbours)."""
    own_share: float = 0.1
    """Share of the loss taken at the block's own head (neighbours)."""
    masked_share: float = 0.25
    """Share of the samples with a masked span (denoise)."""
    span: int = 64
    """Longest masked span (denoise)."""
    empty_share: float = 0.0
    """Share of the samples that get no noisy code, as the honest readout begins (denoise)."""

    def __post_init__(self) -> None:
        if self.lookahead < 0:
            raise BadConfig(f"lookahead is {self.lookahead}; it must be 0 or more.")
        for name in ("own_share", "masked_share", "empty_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadConfig(f"{name} is {getattr(self, name)}; it must be from 0 to 1.")
        if self.span < 2:
            raise BadConfig(f"span is {self.span}; it must be at least 2.")


class Objective(Protocol):
    """What local training needs to know."""

    def prepare(self, rows: Iterator[Tensor], micro: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Batches -> (batch, upstream features), looking ahead as memory allows."""

    def loss(self, block: Block, rows_BT1: Tensor, features: Tensor | None, key: int) -> Tensor:
        """Mean loss over the rows; `key` seeds whatever is drawn."""


@dataclass(frozen=True)
class Recipe:
    """What every replica of every block must agree on to learn the same thing."""

    shape: Shape = field(default_factory=Shape)
    task: Task = field(default_factory=Task)
    noise: Noise = field(default_factory=Noise)
    rates: Rates = field(default_factory=Rates)
    micro: int = 2048
    """Positions computed at once; the rest of a batch follows. Activations stay in cache."""

    @property
    def rows_at_once(self) -> int:
        """The same in windows."""
        return max(1, self.micro // self.shape.window)


def objective_for(
    index: int,
    recipe: Recipe,
    neighbours: Sequence[Loader],
    known: "Sequence[Sequence[Tensor]] | None" = None,
) -> Objective:
    """The objective of block `index`; `neighbours` opens every block of the model by its index.

    Who trains several blocks on the same batches gives what `streams` said of each batch.
    """
    if recipe.shape.objective == "denoise":
        return Denoise(index, recipe.shape, recipe.task, recipe.noise)
    seen = neighbours[index + 1 : index + 1 + recipe.task.lookahead]
    downstream = [load().requires_grad_(False) for load in seen]  # gradients only pass through
    features = None if known is None or not index else [batch[index - 1] for batch in known]
    return Neighbours(recipe.shape, recipe.task, neighbours[:index], downstream, features)


def watched(index: int, recipe: Recipe) -> list[int]:
    """The blocks whose steady copies the objective of block `index` opens."""
    if recipe.shape.objective == "denoise":
        return []
    last = min(index + 1 + recipe.task.lookahead, recipe.shape.blocks)
    return [each for each in range(last) if each != index]


@dataclass
class Neighbours:
    """Upstream features without gradient, and a loss taken downstream."""

    shape: Shape
    task: Task
    upstream: Sequence[Loader]
    downstream: Sequence[Block]
    known: Sequence[Tensor] | None = None
    """The features of each batch, if somebody else has computed them."""

    def prepare(self, rows: Iterator[Tensor], micro: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Streams one upstream block at a time over as many batches as 64 MiB of features allow."""
        if not self.upstream:
            yield from ((batch, None) for batch in rows)
            return
        if self.known is not None:
            yield from zip(rows, self.known, strict=True)
            return
        held: list[Tensor] = []
        for batch in rows:
            held.append(batch)
            if (len(held) + 1) * batch[:, 1:].numel() * self.shape.width * 4 > FEATURES_AT_ONCE:
                yield from self.with_features(held, micro)
                held = []
        yield from self.with_features(held, micro)

    @torch.no_grad()
    def with_features(
        self, batches: list[Tensor], micro: int
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The residual stream that the blocks before leave for each batch."""
        if not batches:
            return
        sight = causal_sight(self.shape, batches[0].shape[1] - 1, batches[0].device)
        features: list[Tensor] = []
        with device.precision(batches[0].device):
            for number, load in enumerate(self.upstream):
                block = load()
                if number == 0:
                    features = [entered(block, batch, sight, micro) for batch in batches]
                for whole in features:
                    pass_through(block, whole, sight, micro)
        with torch.enable_grad():
            yield from zip(batches, features, strict=True)

    def loss(self, block: Block, rows_BT1: Tensor, features: Tensor | None, key: int) -> Tensor:
        """CE at the furthest head in sight, and a share of it at the block's own."""
        sight = causal_sight(self.shape, rows_BT1.shape[1] - 1, rows_BT1.device)
        hidden_BTD = block.enter(rows_BT1[:, :-1], sight) if features is None else features
        hidden_BTD = block(hidden_BTD, sight)
        own = cross_entropy(block.head(hidden_BTD), rows_BT1)
        if not self.downstream:
            return own
        twice = activations(self.shape, len(rows_BT1)) > KEPT_ACTIVATIONS
        for copy in self.downstream:
            hidden_BTD = again_later(copy, hidden_BTD, sight) if twice else copy(hidden_BTD, sight)
        far = cross_entropy(self.downstream[-1].head(hidden_BTD), rows_BT1)
        return self.task.own_share * own + (1 - self.task.own_share) * far


def activations(shape: Shape, rows: int) -> int:
    """About how many bytes a block keeps for its backward pass over so many windows."""
    return 4 * rows * shape.window * shape.layers * (8 * shape.width + 3 * shape.hidden)


def again_later(copy: Block, hidden_BTD: Tensor, sight: Sight) -> Tensor:
    """Through a frozen copy, whose layers are each gone through once more when gradients come.

    The result is the same to the bit. It costs one forward pass, and a worker of a large block
    then has its own activations and those of one layer in memory, however far its loss is taken.
    """
    for layer in copy.layers:
        hidden_BTD = checkpoint(
            layer, hidden_BTD, sight, use_reentrant=False, preserve_rng_state=False
        )
    return hidden_BTD


@torch.no_grad()
def streams(rows_BT1: Tensor, neighbours: Sequence[Loader], recipe: Recipe) -> list[Tensor]:
    """The residual stream that each block but the first finds, by frozen copies of those before.

    Bit for bit what each would compute on its own, but every copy is gone through once.
    """
    sight = causal_sight(recipe.shape, rows_BT1.shape[1] - 1, rows_BT1.device)
    with device.precision(rows_BT1.device):
        features_BTD = entered(neighbours[0](), rows_BT1, sight, recipe.rows_at_once)
        found = []
        for load in neighbours[:-1]:
            pass_through(load(), features_BTD, sight, recipe.rows_at_once)
            found.append(features_BTD.clone())
    return found


def entered(block: Block, rows_BT1: Tensor, sight: Sight, micro: int) -> Tensor:
    """What rows are to the first block's layers, `micro` rows at a time: bounded memory."""
    return torch.cat([block.enter(rows[:, :-1], sight) for rows in torch.split(rows_BT1, micro)])


def pass_through(block: Block, features_BTD: Tensor, sight: Sight, micro: int) -> None:
    """One more block, `micro` rows at a time and in place: bounded memory."""
    for part in torch.split(features_BTD, micro):
        part.copy_(block(part, sight))


@dataclass
class Denoise:
    """CE of the next byte from clean context and its own noisy code; no neighbour is needed."""

    index: int
    shape: Shape
    task: Task
    noise: Noise

    def prepare(self, rows: Iterator[Tensor], micro: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Nothing comes from upstream."""
        yield from ((batch, None) for batch in rows)

    def loss(self, block: Block, rows_BT1: Tensor, features: Tensor | None, key: int) -> Tensor:
        """Unweighted CE at a sigma of the block's own interval."""
        random = torch.Generator().manual_seed(key)
        tokens_BT, targets_BT = rows_BT1[:, :-1], rows_BT1[:, 1:]
        interval = self.noise.interval(self.index, self.shape.blocks)
        sigma_B = self.noise.draw(len(rows_BT1), interval, random).to(rows_BT1.device)
        code = target_code(self.noise.code_seed)
        noise = torch.randn(*targets_BT.shape, VOCABULARY, generator=random).to(rows_BT1.device)
        z_BTM = code.to(rows_BT1.device)[targets_BT] + sigma_B[:, None, None] * noise
        spans = draw_spans(len(rows_BT1), tokens_BT.shape[1], self.task, random)
        shown_BT = draw_shown(spans, tokens_BT.shape[1], random).to(rows_BT1.device)
        told_B = torch.rand(len(rows_BT1), generator=random) >= self.task.empty_share
        z_BTM *= told_B[:, None, None].to(rows_BT1.device)
        sight = causal_sight(self.shape, tokens_BT.shape[1], tokens_BT.device)
        tokens_BT, sight = mask_spans(tokens_BT, spans, sight, shown_BT)
        logits = denoise(block, self.noise, tokens_BT, z_BTM, sigma_B, sight)
        # A byte shown inside a span is seen by the position that would have to find it.
        targets_BT = targets_BT.masked_fill(shown_BT.roll(-1, dims=1), UNASKED)
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten(), ignore_index=UNASKED)


def draw_spans(rows: int, positions: int, task: Task, random: torch.Generator) -> Tensor:
    """(rows, 2): start and end of each row's masked span; start = end where there is none."""
    masked = torch.rand(rows, generator=random) < task.masked_share
    longest = min(task.span, positions)
    length = 2 + (torch.rand(rows, generator=random) * (longest - 1)).long()
    start = (torch.rand(rows, generator=random) * (positions - length + 1)).long()
    return torch.stack((start, start + length * masked), dim=1)


def draw_shown(spans_B2: Tensor, positions: int, random: torch.Generator) -> Tensor:
    """(rows, positions): inputs inside a span that are known all the same, as when it is refined.

    Nothing in half of the spans, which one traversal must find; any share of the others. Without
    these, more traversals would give the blocks something that they have never seen.
    """
    shares = torch.rand(len(spans_B2), 1, generator=random)
    luck_BT = torch.rand(len(spans_B2), positions, generator=random)
    at = torch.arange(positions)
    return (at > spans_B2[:, :1]) & (at < spans_B2[:, 1:]) & (luck_BT < 2 * shares - 1)


def mask_spans(
    tokens_BT: Tensor, spans_B2: Tensor, sight: Sight, shown_BT: Tensor | None = None
) -> tuple[Tensor, Sight]:
    """Hides the bytes that a span must find, and lets its positions see each other.

    Position t predicts byte t+1. A span of positions [start, end) knows byte `start` and must find
    bytes start+1 .. end, so the inputs of positions start+1 .. end-1 become MASK. Its positions see
    the clean prefix and each other both ways; later positions are ordinary. What is shown stays.
    """
    spans_B2 = spans_B2.to(tokens_BT.device)
    if bool((spans_B2[:, 0] == spans_B2[:, 1]).all()):
        return tokens_BT, sight
    at = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    inside_BT = (at >= spans_B2[:, :1]) & (at < spans_B2[:, 1:])
    hidden_BT = inside_BT & (at > spans_B2[:, :1])
    if shown_BT is not None:
        hidden_BT &= ~shown_BT
    causal_TT = at[:, None] >= at[None, :]
    mask = causal_TT | (inside_BT[:, :, None] & inside_BT[:, None, :])
    return tokens_BT.masked_fill(hidden_BT, MASK), Sight(sight.angles, mask[:, None])


def cross_entropy(logits_BTV: Tensor, rows_BT1: Tensor) -> Tensor:
    """Mean CE of every next byte, in nats."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), rows_BT1[:, 1:].flatten())
