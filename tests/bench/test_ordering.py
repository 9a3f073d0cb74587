"""The order of methods at a tiny scale: what `blocktrain reproduce` measures at full size.

The text is of made-up words, each followed by one of three: spelling needs the letters before,
the next word needs to know the last one, so a second layer is worth 0.23 nats. To single bytes,
that is: vectors for runs of bytes would find all of it out in one layer.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.bench.scales import changed, sized
from blocktrain.learning.data import Corpus, open_corpus
from blocktrain.services.lab import Lab, Watch, experiment
from blocktrain.services.run import Run

WORDS, FOLLOWING = 60, 3
STEPS = 150
BLOCKS = sized(
    changed(
        Run(),
        blocks=2,
        width=32,
        window=64,
        batch=16,
        local_steps=10,
        lookahead=1,
        grams=1,
        matrix=0.02,
    ),
    STEPS * 16 * 64,
)
METHODS = {
    "end to end": BLOCKS.end_to_end(2),
    "end to end, one block's depth": BLOCKS.end_to_end(1),
    "neighbours": BLOCKS,
    "neighbours without lookahead": changed(BLOCKS, lookahead=0),
    "denoise": changed(BLOCKS, objective="denoise"),
}
CLEARLY = 0.05  # nats per byte; the least margin below was 0.10 when this was written


def story(path: Path, words: int = 60_000) -> Corpus:
    """Words of two to four letters out of six, each followed by one of three."""
    random = np.random.default_rng(0)
    spelled = [
        "".join(chr(97 + letter) for letter in random.integers(0, 6, int(random.integers(2, 5))))
        for _ in range(WORDS)
    ]
    following = random.integers(0, WORDS, (WORDS, FOLLOWING))
    at, told = 0, []
    for choice in random.integers(0, FOLLOWING, words):
        at = int(following[at, choice])
        told.append(spelled[at])
    path.write_text(" ".join(told))
    return open_corpus(str(path))


@pytest.fixture(scope="module")
def ce(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Test CE of each method, after the same bytes in the same order."""
    folder = tmp_path_factory.mktemp("ordering")
    corpus = story(folder / "story")
    cpu = torch.device("cpu")
    return {
        name: experiment(Lab(run, corpus, folder / name, cpu, Watch(notes=1), 1, 1), False).ce
        for name, run in METHODS.items()
    }


def test_all_see_the_same_bytes() -> None:
    assert len({run.bytes_after(run.pace.rounds) for run in METHODS.values()}) == 1


def test_depth_is_worth_something_here(ce: dict[str, float]) -> None:
    assert ce["end to end"] + CLEARLY < ce["end to end, one block's depth"], ce


def test_blocks_that_know_their_neighbours_are_more_than_shallow_models(
    ce: dict[str, float],
) -> None:
    assert ce["neighbours"] + CLEARLY < ce["end to end, one block's depth"], ce


def test_the_loss_is_better_taken_downstream(ce: dict[str, float]) -> None:
    assert ce["neighbours"] + CLEARLY < ce["neighbours without lookahead"], ce


def test_neighbours_beat_the_papers_objective_read_honestly(ce: dict[str, float]) -> None:
    assert ce["neighbours"] + CLEARLY < ce["denoise"], ce


def test_nobody_beats_end_to_end_in_so_few_rounds(ce: dict[str, float]) -> None:
    """A composed CE below the matched reference would be a reason to look for a leak first."""
    assert all(ce["end to end"] <= each for each in ce.values()), ce
