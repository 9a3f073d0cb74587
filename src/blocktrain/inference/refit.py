"""A head for drafting: half a layer that learns what the whole model makes of the first rows.

A block's own head gets a tenth of its training and its rows are meant for the next block, so it
guesses worse than it could. Refitted for 600 steps on models/small, blocks 1-2 name the whole
model's likeliest byte at 0.85 of all held-out bytes instead of 0.75, block 1 alone at 0.76 instead
of 0.63 (`blocktrain refit`). The text does not depend on it, only how fast it comes.

Letters: B batch, T positions, D width, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from blocktrain.errors import BadCorpus, BadInput, BadModel
from blocktrain.learning.files import (
    Manifest,
    load_model,
    read_manifest,
    refuse_not_finite,
    save_tensors,
)
from blocktrain.learning.model import Head, Model, Norm, Shape, SwiGLU, causal_sight
from blocktrain.learning.optimiser import Optimiser, Rates
from blocktrain.terms import Progress, silent

POSITIONS = 2048  # that one step looks at
HELD_OUT = 16 * 1024  # bytes at the text's end on which the gain is measured


class DraftHead(nn.Module):
    """The feed-forward half of a layer, and a head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = Norm(shape.width)
        self.mlp = SwiGLU(shape)
        self.head = Head(shape)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits of the next byte."""
        logits: Tensor = self.head(rows + self.mlp(self.norm(rows)))
        return logits


@dataclass(frozen=True)
class Refitted:
    """What came of it."""

    path: Path
    agreed_before: float
    """Share of held-out bytes for which the first blocks' own head and the model agree."""
    agreed: float
    """The same for the new head."""


def draft_path(folder: Path, manifest: Manifest, last: int) -> Path:
    """Where the drafting head of blocks 0 to `last` lies; another model's would have another name.

    It is no part of the model: without it, the block's own head drafts.
    """
    return folder / f"draft-{last + 1}-{manifest.digest[:16]}.safetensors"


def load_draft_head(folder: Path, manifest: Manifest, last: int) -> DraftHead | None:
    """The drafting head for a first stage that holds blocks 0 to `last`, if there is one."""
    path = draft_path(folder, manifest, last)
    if not path.is_file():
        return None
    with torch.device("meta"):
        head = DraftHead(manifest.shape)
    try:
        tensors = load_file(path)
        head.load_state_dict({name: t.float() for name, t in tensors.items()}, assign=True)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise BadModel(f"{path} is no drafting head ({error}); delete it.") from None
    refuse_not_finite(dict(head.named_parameters()), path)
    return head.requires_grad_(False)


def refit(
    folder: Path,
    last: int,
    text: NDArray[np.uint8],
    steps: int = 600,
    progress: Progress = silent,
) -> Refitted:
    """Trains a drafting head for blocks 0 to `last` and puts it into the model directory."""
    manifest = read_manifest(folder)
    shape = manifest.shape
    if shape.objective != "neighbours" or not 0 <= last < shape.blocks - 1:
        raise BadInput(
            f"Blocks 1 to {last + 1} need no drafting head; only a part of a `neighbours` model "
            "does, choose fewer blocks."
        )
    if len(text) < 2 * HELD_OUT + shape.window:
        raise BadCorpus(f"{len(text)} bytes are too few to refit a head; give a longer text.")
    model = load_model(folder)
    head = new_draft_head(model, last)
    optimiser, rates = Optimiser(head, Rates(), {}), Rates()
    luck = np.random.default_rng(0)
    for step in range(steps):
        rows_BTD, said_BTV = looked_at(model, last, drawn(text[:-HELD_OUT], shape.window, luck))
        guessed_BTV = head(rows_BTD).log_softmax(-1)
        loss = -(said_BTV.exp() * guessed_BTV).sum(-1).mean()
        loss.backward()
        optimiser.step(rates.at(step / steps))
        progress(step + 1, steps)
    path = draft_path(folder, manifest, last)
    save_tensors(path, {name: each.half() for name, each in head.state_dict().items()})
    return Refitted(path, *agreement(model, last, head, text[-HELD_OUT:]))


def new_draft_head(model: Model, last: int) -> DraftHead:
    """Says at first what the block's own head says."""
    head = DraftHead(model.shape)
    head.head.load_state_dict(model.blocks[last].head.state_dict())
    nn.init.zeros_(head.mlp.down.weight)
    return head


def drawn(text: NDArray[np.uint8], window: int, luck: np.random.Generator) -> Tensor:
    """Windows from anywhere in the text."""
    starts = luck.integers(0, len(text) - window, max(1, POSITIONS // window))
    return torch.from_numpy(np.stack([text[at : at + window] for at in starts]).astype(np.int64))


@torch.no_grad()
def looked_at(model: Model, last: int, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The rows after block `last`, and the whole model's log-probabilities."""
    sight = causal_sight(model.shape, tokens_BT.shape[1])
    hidden_BTD = model.blocks[0].enter(tokens_BT, sight)
    for index, block in enumerate(model.blocks):
        hidden_BTD = block(hidden_BTD, sight)
        if index == last:
            rows_BTD = hidden_BTD
    return rows_BTD, model.blocks[-1].head(hidden_BTD).log_softmax(-1)


@torch.no_grad()
def agreement(
    model: Model, last: int, head: DraftHead, text: NDArray[np.uint8]
) -> tuple[float, float]:
    """How often the block's own head, and the new one, name the model's likeliest byte."""
    window = model.shape.window
    whole = torch.from_numpy(text[: len(text) // window * window].astype(np.int64))
    rows_BTD, said_BTV = looked_at(model, last, whole.view(-1, window))
    best_BT = said_BTV.argmax(-1)
    own, new = (
        float((each(rows_BTD).argmax(-1) == best_BT).float().mean())
        for each in (model.blocks[last].head, head)
    )
    return own, new
