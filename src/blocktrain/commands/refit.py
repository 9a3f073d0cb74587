"""blocktrain refit: a better drafting head for a model's first stage."""

from pathlib import Path

import torch

from blocktrain.console import PLAIN, Out, bar
from blocktrain.errors import BadInput
from blocktrain.inference import coverage
from blocktrain.inference import refit as refitting
from blocktrain.learning.data import open_corpus
from blocktrain.learning.files import read_manifest


def refit(
    model: Path,
    *,
    blocks: str = "1-2",
    data: str = "wikitext-2",
    steps: int = 600,
    output: Out = PLAIN,
) -> None:
    """Fit a drafting head, so that `exact` has more of its guesses accepted; the text stays.

    Parameters
    ----------
    model: Path
        A model directory; the head is put into it, and a first stage that holds these blocks
        finds it there.
    blocks: str
        What the first stage holds: 1, or 1-2.
    data: str
        Text to fit on: a known name, a file or a folder.
    steps: int
        Of 2,048 positions each.
    """
    if steps < 1:
        raise BadInput("At least one step is needed; give --steps 600.")
    first, last = coverage.parse(blocks, read_manifest(model).shape.blocks)
    if first:
        raise BadInput("Only a first stage drafts; give --blocks that begin with 1.")
    with bar("corpus") as progress:
        corpus = open_corpus(data, progress)
    torch.set_num_threads(1)  # two are slower at this size (LOG.md)
    with bar("fitting") as progress:
        found = refitting.refit(model, last, corpus.train, steps, progress)
    output.result(
        {
            "head": str(found.path),
            "agreed_before": found.agreed_before,
            "agreed": found.agreed,
        },
        "Drafting head",
    )
