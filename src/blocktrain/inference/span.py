"""Consecutive blocks of a model, computing for a stage or for one process.

Rows that pass between spans are numpy float32, because they travel. However a text is split into
steps, and a model into spans, every row comes out with the same bits: rows are padded to a multiple
of 4 or 16, at most 512 are computed at once, keys and values lie in buffers of one fixed length
under an explicit mask, and matrices are held as inference/weights.py says.

Letters: T positions, R rows, D width, V vocabulary, M code width, W width of the stream.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from blocktrain.errors import BadInput
from blocktrain.inference.choice import chosen, logs_of
from blocktrain.inference.refit import DraftHead, load_draft_head
from blocktrain.inference.weights import assembled, laid_out, open_block
from blocktrain.learning.files import read_manifest
from blocktrain.learning.model import (
    MASK,
    START,
    VOCABULARY,
    Block,
    Cache,
    Model,
    Shape,
    Sight,
    causal_sight,
    denoise,
    rope_angles,
)
from blocktrain.learning.noise import Noise, seed_of, target_code
from blocktrain.learning.objective import mask_spans
from blocktrain.terms import Array, Digest
from blocktrain.wire.serving import Choice, Holding, Weights

AT_ONCE = 512  # positions computed together; more would cost memory, and bits are known up to here
NOWHERE = Digest("0" * 64)  # the digest of a model that lies in no folder


@dataclass
class Memory:
    """What a span remembers of one session: keys and values of every position so far."""

    cache: Cache
    bytes: int
    """Of memory, once it is in use; the same for every session."""

    @property
    def filled(self) -> int:
        """How many positions are remembered."""
        return self.cache.filled


class Span:
    """Blocks `first` to `last` of a model, both included, from 0."""

    def __init__(
        self, shape: Shape, noise: Noise, blocks: Sequence[Block], holding: Holding
    ) -> None:
        self.shape = shape
        self.noise = noise
        self.blocks = blocks
        self.holding = holding
        self.drafter: DraftHead | None = None
        """Drafts instead of the last block's own head, if there is one."""
        self.device = next(blocks[0].head.buffers()).device
        # Products with something output-major (the keys; the codes of denoise) have equal bits from
        # 4 rows on up to 64 terms and from 16 rows on up to 512 (measured with 1 and 2 threads).
        terms = shape.width // shape.heads if shape.objective == "neighbours" else VOCABULARY
        self.multiple = 4 if terms <= 64 else 16
        length = shape.window + self.multiple
        positions = torch.arange(length, device=self.device)
        self.angles = rope_angles(positions, shape.width // shape.heads)
        self.edge = torch.zeros(2 * length, device=self.device)  # seen, then not: see `sight`
        self.edge[length:] = -torch.inf

    @classmethod
    def open(cls, folder: Path, first: int, last: int, weights: Weights = "fp32") -> "Span":
        """From a model directory; only its own blocks' files are opened, and memory-mapped."""
        manifest = read_manifest(folder)
        if not 0 <= first <= last < manifest.shape.blocks:
            raise BadInput(
                f"There are no blocks {first + 1}-{last + 1} in {folder}; "
                f"it has {manifest.shape.blocks}, choose among those."
            )
        chosen_ones = range(first, last + 1)
        blocks = [open_block(folder, manifest, index, weights) for index in chosen_ones]
        holding = Holding(manifest.digest, first, last, weights, kind_of(torch.device("cpu")))
        span = cls(manifest.shape, manifest.noise, blocks, holding)
        if span.begins and not span.ends:
            span.drafter = load_draft_head(folder, manifest, last)
        return span

    @classmethod
    def of(cls, model: Model, first: int = 0, last: int | None = None) -> "Span":
        """Of a model in memory, where its matrices are turned: that memory is needed once more."""
        last = model.shape.blocks - 1 if last is None else last
        blocks = [
            assembled(model.shape, index, "fp32", laid_out(model.blocks[index], "fp32"))
            for index in range(first, last + 1)
        ]
        holding = Holding(NOWHERE, first, last, "fp32", kind_of(model.device))
        return cls(model.shape, model.noise, blocks, holding)

    @property
    def stream(self) -> int:
        """Width of one row between spans.

        The model's width for `neighbours`; for `denoise` z and the sum of the log-probabilities
        that the blocks so far gave.
        """
        return self.shape.width if self.shape.objective == "neighbours" else 2 * VOCABULARY

    @property
    def begins(self) -> bool:
        """Whether the model's first block is here."""
        return self.holding.first == 0

    @property
    def ends(self) -> bool:
        """Whether the model's last block is here."""
        return self.holding.last == self.shape.blocks - 1

    def memory(self) -> Memory:
        """Room for one session: a window and the padding of its last rows."""
        length = self.shape.window + self.multiple
        layers = self.shape.layers * len(self.blocks)
        embeds = self.shape.vectors(self.holding.first) > 0
        tokens = 8 * embeds * (length + self.shape.grams - 1)
        return Memory(Cache(1, length), 2 * 4 * layers * length * self.shape.width + tokens)

    def step(
        self, memory: Memory, start: int, tokens: list[int], rows: Array | None = None
    ) -> Array:
        """One row for each token, which stands at `start` or after; what was there is forgotten.

        `rows` is what the span before made of the same tokens; the first span needs none.
        """
        if start > memory.filled:
            raise BadInput(
                f"Positions {memory.filled} to {start - 1} are missing; give them first."
            )
        if start + len(tokens) > self.shape.window:
            raise BadInput(f"The window has {self.shape.window} positions; begin a new context.")
        rows_TW = self.checked(tokens, rows, self.stream)
        memory.cache.filled = start
        out = [np.empty((0, self.stream), np.float32)]
        for at in range(0, len(tokens), AT_ONCE):
            part = None if rows_TW is None else rows_TW[at : at + AT_ONCE]
            out.append(self.advance(memory.cache, tokens[at : at + AT_ONCE], part))
        return np.concatenate(out)

    @torch.inference_mode()
    def advance(self, cache: Cache, tokens: list[int], rows: Array | None) -> Array:
        """The same for a few tokens behind what the cache holds."""
        before, count = cache.filled, len(tokens)
        padding = -count % self.multiple
        sight = self.sight(cache, before, before + count + padding)
        tokens_1T = torch.tensor([tokens + [START] * padding], device=self.device)
        out_1TW = self.through(tokens_1T, self.padded(rows, padding), sight)
        cache.filled = before + count  # the padding will be written over, and nobody sees it
        return as_array(out_1TW[0, :count])

    def sight(self, cache: Cache, start: int, end: int) -> Sight:
        """Positions [start, end), each seeing itself and everything before it in the cache.

        The mask of position p is `length` numbers of the edge, of which p + 1 come before it.
        """
        length = cache.length
        rows_TL = self.edge[length - end : 2 * length - 1 - start].unfold(0, length, 1)
        cos, sin = self.angles
        return Sight((cos[start:end], sin[start:end]), rows_TL.flip(0), cache)

    def padded(self, rows: Array | None, padding: int) -> Tensor | None:
        """Rows as a batch of one with zeros behind, in memory that torch has aligned."""
        if rows is None:
            return None
        out_1TW = torch.zeros(1, len(rows) + padding, rows.shape[1])
        out_1TW[0, : len(rows)] = torch.from_numpy(np.ascontiguousarray(rows))
        return out_1TW.to(self.device)

    def through(self, tokens_1T: Tensor, rows_1TW: Tensor | None, sight: Sight) -> Tensor:
        """What these blocks make of the rows of the blocks before."""
        if self.shape.objective == "neighbours":
            hidden_1TD = rows_1TW
            if hidden_1TD is None:
                hidden_1TD = self.blocks[0].enter(tokens_1T, sight)
            for block in self.blocks:
                hidden_1TD = block(hidden_1TD, sight)
            return hidden_1TD
        if rows_1TW is None:
            rows_1TW = torch.zeros(*tokens_1T.shape, self.stream, device=self.device)
        z_1TM, sum_1TV = rows_1TW.chunk(2, dim=-1)
        for logits_1TV, moved_1TM in self.chain(tokens_1T, z_1TM, sight):
            sum_1TV, z_1TM = sum_1TV + logits_1TV.log_softmax(-1), moved_1TM
        return torch.cat((z_1TM, sum_1TV), dim=-1)

    def chain(
        self, tokens_1T: Tensor, z_1TM: Tensor, sight: Sight
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Each `denoise` block's logits, and z moved on to the sigma of the block after it.

        After the model's last block, z is D: the mean of the codes that it believes in.
        """
        sigmas = self.noise.chain(self.shape.blocks)
        for index, block in enumerate(self.blocks, start=self.holding.first):
            sigma_1 = torch.full((1,), sigmas[index], device=self.device)
            logits_1TV = denoise(block, self.noise, tokens_1T, z_1TM, sigma_1, sight)
            if index < self.shape.blocks - 1:
                z_1TM = self.noise.euler(z_1TM, logits_1TV, sigmas[index], sigmas[index + 1])
            else:
                z_1TM = logits_1TV.softmax(-1) @ target_code(self.noise.code_seed).to(self.device)
            yield logits_1TV, z_1TM

    @torch.inference_mode()
    def read(self, rows: Array) -> Tensor:
        """Log-probabilities (R, 256) of the byte after each row, by this span's last head.

        A model's last span so gives what the model says; an earlier one what it would draft.
        """
        rows_RW = self.padded(rows, -len(rows) % self.multiple)
        assert rows_RW is not None
        if self.shape.objective == "neighbours":
            logits_RV = self.blocks[-1].head(rows_RW)[0]
        else:
            logits_RV = rows_RW[0, :, VOCABULARY:] / (self.holding.last + 1)
        logs_RV: Tensor = logits_RV[: len(rows)].log_softmax(-1).cpu()
        if not bool(logs_RV.isfinite().all()):
            raise BadInput("Nothing can be read from these rows; give the context again.")
        return logs_RV

    @torch.inference_mode()
    def guess(self, rows: Array) -> Tensor:
        """What the whole model will say of these rows, as far as can be told here."""
        if self.drafter is None:
            return self.read(rows)
        logits_RV: Tensor = self.drafter(torch.from_numpy(rows).to(self.device))
        return logits_RV.log_softmax(-1).cpu()

    def draft(
        self, memory: Memory, start: int, tokens: list[int], count: int, choice: Choice, wanted: int
    ) -> tuple[list[int], Array]:
        """`count` bytes more, as this span guesses them, and the rows of all tokens and bytes.

        `wanted` rows at the end of `tokens` choose bytes choice.at, choice.at + 1, ... of the text,
        so the last token's row chooses byte number choice.at + wanted - 1: that is the first byte
        drafted, and draft j (from 0) has number choice.at + wanted - 1 + j.
        """
        if not (self.begins and tokens and wanted):
            raise BadInput("Only the first stage drafts, after a wanted row; ask for no draft.")
        if start + len(tokens) + count > self.shape.window:
            raise BadInput(f"The window has {self.shape.window} positions; draft fewer bytes.")
        rows, drafted = [self.step(memory, start, tokens)], list[int]()
        for number in range(choice.at + wanted - 1, choice.at + wanted - 1 + count):
            logs_1V = self.guess(rows[-1][-1:])
            drafted += chosen(logs_1V, msgspec.structs.replace(choice, at=number))
            rows.append(self.step(memory, memory.filled, drafted[-1:]))
        return drafted, np.concatenate(rows)

    @torch.inference_mode()
    def emit(
        self, tokens: list[int], span: tuple[int, int], choice: Choice, z: Array | None = None
    ) -> tuple[Array, list[int], list[float]]:
        """z after these blocks, the bytes they would now put into the span, and their logs.

        Positions [start, end) see each other both ways and find bytes start + 1 to end; position
        start + i finds byte number choice.at + i of the text. Among the inputs start + 1 to end - 1
        MASK is unknown and a byte is known (objective.mask_spans). The first span draws z at
        sigma_max where the span is and leaves it 0 elsewhere: no target enters.

        That draw is part of the model, whatever the temperature: it is what lets positions agree on
        one of several answers, and every block was trained to see noise of this size. Temperature
        and top_p act where bytes are read from the last block: at 1 the byte follows p(byte | z),
        at 0 it is the likeliest given z, so that another seed still gives another text.
        """
        if self.shape.objective != "denoise":
            raise BadInput("This model was not trained to find a whole span; use exact or ar.")
        start, end = span
        if not 0 <= start < end <= len(tokens) <= self.shape.window:
            raise BadInput(f"There is no span {start}-{end} in the window; make it shorter.")
        if MASK in tokens[: start + 1] + tokens[end:]:
            raise BadInput("A byte outside the span is unknown; put it into the span.")
        z_TM = self.checked(tokens, z, VOCABULARY)
        tokens_1T = torch.tensor([tokens], device=self.device)
        if z_TM is None:
            z_1TM = torch.zeros(1, len(tokens), VOCABULARY)
            random = torch.Generator().manual_seed(seed_of(choice.seed, choice.at))
            drawn = torch.randn(end - start, VOCABULARY, generator=random)
            z_1TM[0, start:end] = self.noise.sigma_max * drawn
        else:
            z_1TM = torch.from_numpy(np.array(z_TM))[None]
        z_1TM = z_1TM.to(self.device)
        plain = causal_sight(self.shape, len(tokens), self.device)
        _, sight = mask_spans(tokens_1T, torch.tensor([span]), plain)
        *_, (logits_1TV, z_1TM) = self.chain(tokens_1T, z_1TM, sight)
        logs_TV = logits_1TV[0, start:end].log_softmax(-1).cpu()
        made = chosen(logs_TV, choice)
        return as_array(z_1TM[0]), made, logs_of(logs_TV, made)

    def checked(self, tokens: list[int], rows: Array | None, width: int) -> Array | None:
        """What came from others, after a look at everything that could break or poison a pass."""
        known = VOCABULARY if self.shape.objective == "neighbours" else MASK + 1
        if not all(0 <= token < known for token in tokens):
            raise BadInput(f"A token is not from 0 to {known - 1}; send bytes.")
        if (rows is None) != self.begins:
            raise BadInput("The first stage takes no rows and every other one needs them; mend it.")
        if rows is not None and (
            rows.shape != (len(tokens), width) or not bool(np.isfinite(rows).all())
        ):
            raise BadInput(f"Rows must be {len(tokens)} of {width} finite numbers; send these.")
        return rows


def as_array(rows: Tensor) -> Array:
    """For the wire."""
    out: Array = rows.cpu().numpy()
    return out


def kind_of(device: torch.device) -> str:
    """What else decides last bits, in a few words."""
    if device.type == "cpu":
        where = f"cpu {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads"
    else:
        where = device.type
        if device.type == "cuda":
            where += f" {torch.cuda.get_device_name(device)}"
    return re.sub(r"[^\w .@:+-]", "-", f"{where} torch {torch.__version__}")[:64]
