"""blocktrain stage --blocks auto: as many blocks as fit into the memory that is free."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from blocktrain.commands.stage import KEPT_FREE, Held, bytes_held, span_for
from blocktrain.config import cache_folder
from blocktrain.errors import BadInput
from blocktrain.inference.span import Span
from blocktrain.learning.files import BlockFile, Manifest, save_model
from blocktrain.learning.model import Model, Shape
from blocktrain.learning.noise import Noise
from blocktrain.terms import Digest
from blocktrain.wire.serving import Holding, Weights

MakeModel = Callable[[Shape], Model]
Free = Callable[[int], None]
MIB = 2**20
SIZES = [300, 100, 100, 200]  # MiB of four blocks' files
MODEL = Manifest(
    1,
    Shape(blocks=4, grams=1),
    Noise(),
    [BlockFile(f"{n}", size * MIB, Digest("")) for n, size in enumerate(SIZES)],
)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    """Sets how many MiB this machine has free, beyond what a stage leaves to texts."""

    def of(mebibytes: int) -> None:
        memory = SimpleNamespace(available=KEPT_FREE + mebibytes * MIB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    return of


@pytest.mark.parametrize(
    ("weights", "mebibytes", "span"),
    [
        ("fp32", 700, (0, 3)),  # the files' own size, to the byte
        ("fp32", 699, (0, 2)),
        ("fp32", 499, (1, 3)),
        ("fp32", 399, (1, 2)),  # the first block and one more would be 400
        ("fp32", 100, (1, 1)),
        ("bf16", 351, (0, 3)),  # half of it, but for the vectors of bytes
        ("bf16", 349, (0, 2)),
        ("int8", 190, (0, 3)),  # 0.27 of it, and the same
        ("int8", 188, (0, 2)),
    ],
)
def test_as_many_blocks_as_fit(
    free: Free, weights: Weights, mebibytes: int, span: tuple[int, int]
) -> None:
    free(mebibytes)
    assert span_for(Held(weights=weights), MODEL, []) == span


def test_those_that_others_hold_count_only_if_of_the_same_model(free: Free) -> None:
    free(700)
    others = [Holding(MODEL.digest, 0, 1, "fp32", "cpu"), Holding(Digest("0f"), 2, 3, "fp32", "")]
    assert span_for(Held(), MODEL, others) == (2, 3)
    assert span_for(Held(), MODEL, others[1:]) == (0, 3)


def test_blocks_that_were_named_are_taken_whatever_is_free(free: Free) -> None:
    free(-10_000)
    assert span_for(Held(blocks="2-4"), MODEL, []) == (1, 3)


@pytest.mark.parametrize("mebibytes", [99, -100])
def test_what_does_not_fit_at_all_is_said(
    free: Free, mebibytes: int, sentence: Callable[[BaseException], str]
) -> None:
    free(mebibytes)
    with pytest.raises(BadInput, match="smallest block takes 100 MiB") as caught:
        span_for(Held(), MODEL, [])
    sentence(caught.value)


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
def test_weights_take_what_is_counted_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: MakeModel, weights: Weights
) -> None:
    """The layout that is mapped, of a block so wide that its matrices are nearly all of it."""
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    shape = Shape(blocks=1, layers=1, width=512, heads=8, window=8)
    manifest = save_model(alive(shape), tmp_path / "model")
    Span.open(tmp_path / "model", 0, 0, weights)
    (laid,) = (cache_folder() / "weights").iterdir()
    assert laid.stat().st_size == pytest.approx(bytes_held(manifest, 0, weights), rel=0.05)
