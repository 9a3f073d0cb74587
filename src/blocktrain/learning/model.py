"""The model as an ordered list of blocks.

Letters: B batch, T positions, D width, H heads, E head width, F hidden width, V vocabulary,
M code width. All values are bytes: V = 256.

A block is L layers and a head, so every prefix of the stack is a language model. What passes from
block to block depends on the objective: the residual stream for `neighbours`, a noisy target code
for `denoise` (learning/noise.py). `Model.prefixes` is the one place that composes blocks.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocktrain.errors import BadConfig, BadInput
from blocktrain.learning.embedding import MOST, NOTHING, Embedding
from blocktrain.learning.kernels import rms_norm, rotate
from blocktrain.learning.noise import Noise, seed_of

VOCABULARY = 256
MASK = 256  # the input of a byte that nobody knows yet (denoise only)
START = 10  # a text begins as if after a newline, so that its first byte is predicted too
EPSILON = 1e-6
ROPE_BASE = 10_000.0
SIGMA_FEATURES = 32
CONDITION = 64  # sigma is one number: a wider code of it would add half a block of parameters

Objective = Literal["neighbours", "denoise"]


@dataclass(frozen=True)
class Shape:
    """How large the model is and how it is cut."""

    objective: Objective = "neighbours"
    """`neighbours` (ours) or `denoise` (the paper's)."""
    blocks: int = 4
    """Blocks, each trained alone."""
    layers: int = 1
    """Layers per block."""
    width: int = 128
    """Width of the residual stream."""
    heads: int = 2
    """Attention heads."""
    window: int = 256
    """Positions a model sees at once."""
    grams: int = 6
    """Longest run of bytes that has a vector of its own; 1: single bytes only."""
    gram_rows: int = 2048
    """Vectors for the runs of each length."""

    def __post_init__(self) -> None:
        for name in ("blocks", "layers", "width", "heads", "window", "grams", "gram_rows"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.grams > MOST:
            raise BadConfig(f"grams is {self.grams}; it must be at most {MOST}.")
        if self.objective not in ("neighbours", "denoise"):
            raise BadConfig(f"objective '{self.objective}' is neither neighbours nor denoise.")
        if self.width % (2 * self.heads):
            raise BadConfig(
                f"width {self.width} does not divide into {self.heads} heads of even width; "
                f"choose a multiple of {2 * self.heads} or another number of heads."
            )

    def vectors(self, index: int) -> int:
        """How many of them, for tokens and for runs, a block has where bytes enter it."""
        if self.objective == "neighbours" and index:
            return 0
        masks = 1 if self.objective == "denoise" else 0
        return VOCABULARY + masks + (self.grams - 1) * self.gram_rows

    @property
    def hidden(self) -> int:
        """SwiGLU's inner width: 8/3 of the width, rounded up to 64 for whole cache lines."""
        return -(-8 * self.width // 3 // 64) * 64


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, EPSILON)


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    """A matrix without bias, rows drawn so that unit inputs give outputs of variance gain^2."""
    matrix = nn.Linear(inputs, outputs, bias=False)
    if not matrix.weight.is_meta:
        nn.init.normal_(matrix.weight, std=gain * inputs**-0.5)
    return matrix


def rope_angles(positions_T: Tensor, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines for the given positions."""
    rates = ROPE_BASE ** -(torch.arange(0, head_width, 2, device=positions_T.device) / head_width)
    angles = positions_T[:, None].float() * rates
    return angles.cos(), angles.sin()


@dataclass
class Sight:
    """Which positions a pass computes and what each may attend to."""

    angles: tuple[Tensor, Tensor]
    mask: Tensor | None = None  # None: plain causal; else bool, True where attention is allowed
    cache: "Cache | None" = None

    def known(self, tokens_BT: Tensor, reach: int) -> Tensor:
        """The tokens of this pass behind the `reach` before them, NOTHING before the window."""
        if self.cache is None:
            return F.pad(tokens_BT, (reach, 0), value=NOTHING)
        return self.cache.follow(tokens_BT, reach)


class Attention(nn.Module):
    """Causal self-attention with RoPE and QK-norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q = linear(shape.width, shape.width)
        self.k = linear(shape.width, shape.width)
        self.v = linear(shape.width, shape.width)
        self.o = linear(shape.width, shape.width, gain=0.5)
        self.q_norm = Norm(shape.width // shape.heads)
        self.k_norm = Norm(shape.width // shape.heads)

    def forward(self, x_BTD: Tensor, sight: Sight) -> Tensor:
        def by_head(x: Tensor) -> Tensor:
            return x.view(*x.shape[:2], self.heads, -1)

        q_BHTE = rotate(self.q_norm(by_head(self.q(x_BTD))).transpose(1, 2), *sight.angles)
        k_BHTE = rotate(self.k_norm(by_head(self.k(x_BTD))).transpose(1, 2), *sight.angles)
        v_BHTE = by_head(self.v(x_BTD)).transpose(1, 2)
        if sight.cache is not None:
            k_BHTE, v_BHTE = sight.cache.extend(self, k_BHTE, v_BHTE)
        out_BHTE = F.scaled_dot_product_attention(
            q_BHTE, k_BHTE, v_BHTE, attn_mask=sight.mask, is_causal=sight.mask is None
        )
        out: Tensor = self.o(out_BHTE.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """The feed-forward half of a layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = linear(shape.width, shape.hidden)
        self.up = linear(shape.width, shape.hidden)
        self.down = linear(shape.hidden, shape.width, gain=0.5)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = Norm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = Norm(shape.width)
        self.mlp = SwiGLU(shape)

    def forward(self, x_BTD: Tensor, sight: Sight) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), sight)
        out: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return out


class ModulatedLayer(Layer):
    """A layer that is told sigma: AdaLN with zero-initialised gates, as in DiT."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.modulation = nn.Linear(CONDITION, 6 * shape.width, bias=False)
        nn.init.zeros_(self.modulation.weight)

    def forward(  # type: ignore[override]
        self, x_BTD: Tensor, sight: Sight, told_B1D: Tensor
    ) -> Tensor:
        """One pass with shift, scale and gate for each half, read from what sigma says."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(told_B1D).chunk(6, dim=-1)
        inner = self.attention_norm(x_BTD) * (1 + scale1) + shift1
        x_BTD = x_BTD + gate1 * self.attention(inner, sight)
        inner = self.mlp_norm(x_BTD) * (1 + scale2) + shift2
        out: Tensor = x_BTD + gate2 * self.mlp(inner)
        return out


class Head(nn.Module):
    """Hidden states -> logits over the next byte. Starts at zero: CE starts at ln 256."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = Norm(shape.width)
        self.out = nn.Linear(shape.width, VOCABULARY, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, x_BTD: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(x_BTD))
        return logits


class Entered(nn.Module):
    """A block, which bytes and runs of them may enter."""

    embed: Embedding

    def begin(self, shape: Shape, tokens: int) -> None:
        """Makes room for vectors of so many tokens."""
        self.embed = Embedding(tokens, shape.width, shape.grams, shape.gram_rows)

    def enter(self, tokens_BT: Tensor, sight: Sight) -> Tensor:
        """What tokens are to the block's layers."""
        x_BTD: Tensor = self.embed(sight.known(tokens_BT, self.embed.reach))
        return x_BTD


class DecoderBlock(Entered):
    """A block of an ordinary decoder (`neighbours`). The first one also embeds bytes."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        if index == 0:
            self.begin(shape, VOCABULARY)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.head = Head(shape)

    def forward(self, x_BTD: Tensor, sight: Sight) -> Tensor:
        for layer in self.layers:
            x_BTD = layer(x_BTD, sight)
        return x_BTD


class DenoiseBlock(Entered):
    """A block that predicts the next byte from clean context and a noisy code of it (`denoise`)."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.begin(shape, VOCABULARY + 1)  # one more for MASK
        self.z_in = linear(VOCABULARY, shape.width)
        self.told = nn.Sequential(
            linear(SIGMA_FEATURES, CONDITION), nn.SiLU(), linear(CONDITION, CONDITION)
        )
        self.layers = nn.ModuleList(ModulatedLayer(shape) for _ in range(shape.layers))
        self.head = Head(shape)

    def forward(self, tokens_BT: Tensor, z_BTM: Tensor, sigma_B: Tensor, sight: Sight) -> Tensor:
        """EDM's raw output F, as logits; `z_BTM` already scaled by c_in."""
        told_B1D = F.silu(self.told(sigma_features(sigma_B)))[:, None]
        x_BTD = self.enter(tokens_BT, sight) + self.z_in(z_BTM)
        for layer in self.layers:
            x_BTD = layer(x_BTD, sight, told_B1D)
        logits: Tensor = self.head(x_BTD)
        return logits


def sigma_features(sigma_B: Tensor) -> Tensor:
    """c_noise = ln(sigma)/4 as sines and cosines of several rates."""
    rates = 2.0 ** torch.arange(SIGMA_FEATURES // 2, device=sigma_B.device).float().mul(0.5)
    angles = sigma_B.log()[:, None] / 4 * rates
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


Block = DecoderBlock | DenoiseBlock


DRAWING = threading.Lock()  # torch has one source of chance for all threads


def new_block(shape: Shape, index: int, seed: int) -> Block:
    """Block `index` as it is before any training: a pure function of shape, index and seed."""
    with DRAWING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, index))
        return empty_block(shape, index)


def empty_block(shape: Shape, index: int) -> Block:
    """A block whose values are about to be filled in."""
    return (DecoderBlock if shape.objective == "neighbours" else DenoiseBlock)(shape, index)


class Cache:
    """Keys and values of every attention layer, and all tokens, in buffers of one fixed length.

    Fixed lengths with an explicit mask are what makes incremental passes repeatable bit for bit.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.rows = rows
        self.length = length
        self.filled = 0
        self.buffers: dict[Attention, tuple[Tensor, Tensor]] = {}
        self.tokens: Tensor | None = None

    def follow(self, tokens_BT: Tensor, reach: int) -> Tensor:
        """Stores new tokens behind the filled part and returns them with the `reach` before."""
        if self.tokens is None:
            self.tokens = tokens_BT.new_full((self.rows, reach + self.length), NOTHING)
        end = self.filled + reach + tokens_BT.shape[1]
        self.tokens[:, self.filled + reach : end] = tokens_BT
        return self.tokens[:, self.filled : end]

    def extend(self, owner: Attention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new keys and values behind the filled part and returns the whole buffers."""
        if owner not in self.buffers:
            size = (self.rows, k.shape[1], self.length, k.shape[3])
            self.buffers[owner] = (k.new_zeros(size), v.new_zeros(size))
        keys, values = self.buffers[owner]
        end = self.filled + k.shape[2]
        keys[:, :, self.filled : end] = k
        values[:, :, self.filled : end] = v
        return keys, values

    def sight(self, new: int, shape: Shape, device: torch.device) -> Sight:
        """The next `new` positions, each seeing everything before it and itself."""
        if self.filled + new > self.length:
            raise BadInput(f"The cache has {self.length} positions; begin a new one before more.")
        positions = torch.arange(self.filled, self.filled + new, device=device)
        mask = torch.arange(self.length, device=device)[None, :] <= positions[:, None]
        return Sight(rope_angles(positions, shape.width // shape.heads), mask, self)


def denoise(
    block: Block, noise: Noise, tokens_BT: Tensor, z_BTM: Tensor, sigma_B: Tensor, sight: Sight
) -> Tensor:
    """What a `denoise` block says about the next bytes, with EDM's preconditioning around it."""
    raw_BTV = block(tokens_BT, noise.scale_in(z_BTM, sigma_B), sigma_B, sight)
    return noise.logits(raw_BTV, z_BTM, sigma_B)


def causal_sight(shape: Shape, positions: int, device: torch.device | None = None) -> Sight:
    """A pass over `positions` from the window's start, each seeing itself and what is before it."""
    return Sight(rope_angles(torch.arange(positions, device=device), shape.width // shape.heads))


@dataclass
class Model:
    """Blocks put together: an honest language model over bytes."""

    shape: Shape
    noise: Noise
    blocks: Sequence[Block]

    @property
    def parameters(self) -> int:
        """How many numbers the blocks hold."""
        return sum(p.numel() for block in self.blocks for p in block.parameters())

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.blocks[0].parameters()).device

    def prefixes(self, tokens_BT: Tensor, cache: Cache | None = None) -> Iterator[Tensor]:
        """Log-probabilities (B, T, V) of the byte after each position, by each prefix of the stack.

        The honest readout: nothing but `tokens_BT` enters. `denoise` starts from z = 0, follows the
        Euler chain and averages the blocks' log-probabilities.
        """
        if cache is None:
            sight = causal_sight(self.shape, tokens_BT.shape[1], tokens_BT.device)
        else:
            sight = cache.sight(tokens_BT.shape[1], self.shape, tokens_BT.device)
        if self.shape.objective == "neighbours":
            yield from self.decoder_prefixes(tokens_BT, sight)
        else:
            logs: list[Tensor] = []
            nothing_BTM = torch.zeros(*tokens_BT.shape, VOCABULARY, device=tokens_BT.device)
            for logits in self.denoise_chain(tokens_BT, nothing_BTM, sight):
                logs.append(logits.log_softmax(-1))
                yield torch.stack(logs).mean(0).log_softmax(-1)
        if cache is not None:
            cache.filled += tokens_BT.shape[1]

    def decoder_prefixes(self, tokens_BT: Tensor, sight: Sight) -> Iterator[Tensor]:
        """The residual stream passes through the blocks; each head reads it."""
        hidden_BTD = self.blocks[0].enter(tokens_BT, sight)
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD, sight)
            yield block.head(hidden_BTD).log_softmax(-1)

    def denoise_chain(self, tokens_BT: Tensor, z_BTM: Tensor, sight: Sight) -> Iterator[Tensor]:
        """Logits of each block along the Euler chain that starts at `z_BTM`."""
        sigmas = self.noise.chain(self.shape.blocks)
        logits: Tensor | None = None
        for index, block in enumerate(self.blocks):
            if logits is not None:
                z_BTM = self.noise.euler(z_BTM, logits, sigmas[index - 1], sigmas[index])
            sigma_B = torch.full((len(tokens_BT),), sigmas[index], device=z_BTM.device)
            logits = denoise(block, self.noise, tokens_BT, z_BTM, sigma_B, sight)
            yield logits

    def log_probabilities(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """Log-probabilities of the byte after each position, by the whole stack."""
        *_, last = self.prefixes(tokens_BT, cache)
        return last
