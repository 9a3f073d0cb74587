"""Drafting heads: better guesses, the same text."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from blocktrain.errors import BadCorpus, BadInput, BadModel
from blocktrain.inference import refit as refitting
from blocktrain.inference.choice import Sampling
from blocktrain.inference.decode import Piece, Report, ar, exact
from blocktrain.inference.local import LocalSession
from blocktrain.inference.refit import draft_path, refit
from blocktrain.inference.span import Span
from blocktrain.learning.files import load_model, read_manifest, save_model
from blocktrain.learning.model import Model, Shape

MakeModel = Callable[[Shape], Model]


@pytest.fixture
def text() -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(97, 105, 4000, np.uint8)


@pytest.fixture
def folder(alive: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose heads know nothing of each other."""
    monkeypatch.setattr(refitting, "HELD_OUT", 512)
    monkeypatch.setattr(refitting, "POSITIONS", 512)
    model = alive(Shape(blocks=3, width=32, heads=2, window=32))
    for block in model.blocks:
        block.head.out.weight.mul_(0.3)
    save_model(model, tmp_path / "model")
    return tmp_path / "model"


def told(pieces: AsyncIterator[Piece]) -> tuple[bytes, Report]:
    async def gather() -> tuple[bytes, Report]:
        report, out = Report(), b""
        async for piece in pieces:
            report.add(piece)
            out += piece.bytes
        return out, report

    return asyncio.run(gather())


def test_a_refitted_head_guesses_better_and_the_text_stays(
    folder: Path, text: NDArray[np.uint8]
) -> None:
    def spans() -> list[Span]:
        return [Span.open(folder, 0, 1), Span.open(folder, 2, 2)]

    sampling = Sampling(temperature=0.8, length=80)
    prompt = text[:20].tobytes()
    plain, _ = told(ar(LocalSession(spans()), prompt, sampling))
    before, own = told(exact(LocalSession(spans()), prompt, sampling))
    seen: list[int] = []
    found = refit(folder, 1, text, steps=80, progress=lambda done, total: seen.append(done))
    assert seen == list(range(1, 81))
    assert found.agreed > found.agreed_before + 0.1
    assert spans()[0].drafter is not None
    assert spans()[1].drafter is None
    after, refitted = told(exact(LocalSession(spans()), prompt, sampling))
    assert plain == before == after
    assert refitted.traversals < own.traversals


def test_a_head_is_for_one_model_and_one_span(folder: Path, text: NDArray[np.uint8]) -> None:
    found = refit(folder, 0, text, steps=1)
    assert found.path == draft_path(folder, read_manifest(folder), 0)
    assert Span.open(folder, 0, 0).drafter is not None
    assert Span.open(folder, 0, 1).drafter is None
    assert Span.open(folder, 0, 2).drafter is None
    model = load_model(folder)
    longer = replace(model.shape, window=40)
    save_model(Model(longer, model.noise, model.blocks), folder)  # another model in its place
    assert found.path.exists()
    assert Span.open(folder, 0, 0).drafter is None


def test_an_unfitted_head_says_what_the_block_says(folder: Path, text: NDArray[np.uint8]) -> None:
    refit(folder, 0, text, steps=0)
    span = Span.open(folder, 0, 0)
    rows = span.step(span.memory(), 0, list(b"hello"))
    assert torch.allclose(span.guess(rows), span.read(rows), atol=3e-3)  # it is kept as fp16


@pytest.mark.parametrize("harm", ["cut", "nan", "other"])
def test_a_damaged_head_is_refused(folder: Path, text: NDArray[np.uint8], harm: str) -> None:
    path = refit(folder, 0, text, steps=0).path
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:-4])
    else:
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        if harm == "nan":
            tensors["norm.weight"][0] = torch.nan
        else:
            del tensors["norm.weight"]
        save_file(tensors, path)
    with pytest.raises(BadModel):
        Span.open(folder, 0, 0)


def test_what_cannot_be_refitted(
    folder: Path, text: NDArray[np.uint8], alive: MakeModel, tmp_path: Path
) -> None:
    for last in (-1, 2, 3):
        with pytest.raises(BadInput, match="choose fewer"):
            refit(folder, last, text)
    with pytest.raises(BadCorpus, match="longer"):
        refit(folder, 0, text[:1000])
    save_model(alive(Shape("denoise", blocks=2, width=16, heads=2, window=12)), tmp_path / "other")
    with pytest.raises(BadInput, match="neighbours"):
        refit(tmp_path / "other", 0, text)
