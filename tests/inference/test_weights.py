"""Weights as stages hold them: laid out once, mapped from a file, close to what was trained."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from blocktrain.config import cache_folder
from blocktrain.errors import BadModel
from blocktrain.inference.span import Span
from blocktrain.inference.weights import INNER, TILE, Matrix, rounded
from blocktrain.learning.files import save_model
from blocktrain.learning.model import Model, Shape
from blocktrain.wire.serving import Weights

MakeModel = Callable[[Shape], Model]
KINDS: list[Weights] = ["fp32", "bf16", "int8"]


def laid_files(weights: Weights) -> list[Path]:
    return sorted((cache_folder() / "weights").glob(f"*-{weights}-*.safetensors"))


@pytest.fixture(autouse=True)
def a_new_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("weights", KINDS)
def test_a_product_is_the_matrix_product(weights: Weights) -> None:
    """Also where it takes several inner sums and several tiles."""
    inputs, outputs = 2 * INNER + 7, TILE // INNER + 100
    trained = torch.randn(outputs, inputs)
    x = torch.randn(2, 3, inputs)
    exact = x @ trained.T
    held = rounded(trained, weights)
    assert held.weight.shape == (inputs, outputs)
    error = (held(x) - exact).abs().max() / exact.abs().max()
    assert error < {"fp32": 1e-5, "bf16": 0.01, "int8": 0.02}[weights]


def test_int8_has_one_scale_for_each_output() -> None:
    trained = torch.tensor([[1.0, -2.0], [100.0, 50.0], [0.0, 0.0]])
    held = rounded(trained, "int8")
    assert held.weight.T.tolist() == [[64, -127], [127, 64], [0, 0]]
    assert torch.allclose(held(torch.eye(2)).T, trained, atol=0.4)


def test_tiles_bound_what_becomes_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = torch.Tensor.to

    def counted(tensor: torch.Tensor, *to: object) -> torch.Tensor:
        made.append(tensor.numel())
        return plain(tensor, *to)  # type: ignore[call-overload,no-any-return]

    held = Matrix(torch.zeros(1024, 4096, dtype=torch.bfloat16))
    monkeypatch.setattr(torch.Tensor, "to", counted)
    held(torch.zeros(4, 1024))
    assert max(made) == TILE
    assert sum(made) == 1024 * 4096


@pytest.mark.parametrize("weights", KINDS)
def test_what_a_span_says_stays_close(alive: MakeModel, tmp_path: Path, weights: Weights) -> None:
    model = alive(Shape(blocks=2, width=64, heads=2, window=24))
    save_model(model, tmp_path / "model")
    span = Span.open(tmp_path / "model", 0, 1, weights)
    tokens = list(b"what is said stays close")
    read = span.read(span.step(span.memory(), 0, tokens))
    with torch.no_grad():
        said = model.log_probabilities(torch.tensor([tokens]))[0]
    surprise = (said.exp() * (said - read)).sum(-1).mean()  # KL, in nats
    assert surprise < {"fp32": 1e-6, "bf16": 0.01, "int8": 0.05}[weights]
    assert weights == "fp32" or surprise > 1e-6


@pytest.mark.parametrize("weights", KINDS)
def test_a_block_is_laid_out_once_and_then_mapped(
    alive: MakeModel, tmp_path: Path, weights: Weights
) -> None:
    """The mapped file has no page of its own in memory: all of them can be dropped and re-read."""
    save_model(alive(Shape(blocks=1, width=128, heads=2, window=24)), tmp_path / "model")
    first = Span.open(tmp_path / "model", 0, 0, weights)
    (path,) = laid_files(weights)
    written = path.stat().st_mtime_ns
    for file in (tmp_path / "model").glob("block-*"):
        file.unlink()  # nobody needs it any more
    span = Span.open(tmp_path / "model", 0, 0, weights)
    assert laid_files(weights) == [path]
    assert path.stat().st_mtime_ns == written
    assert all(value.data_ptr() % 64 == 0 for value in load_file(path).values())
    rows = span.step(span.memory(), 0, [1, 2, 3])
    assert (rows == first.step(first.memory(), 0, [1, 2, 3])).all()
    mappings = re.findall(
        rf"{re.escape(str(path))}\n(.*?)VmFlags", Path("/proc/self/smaps").read_text(), re.S
    )
    assert mappings
    assert all("Anonymous:             0 kB" in mapping for mapping in mappings)


def test_kinds_differ_in_size(alive: MakeModel, tmp_path: Path) -> None:
    save_model(alive(Shape(blocks=2, width=128, heads=2, window=24)), tmp_path / "model")
    sizes = []
    for weights in KINDS:
        Span.open(tmp_path / "model", 1, 1, weights)
        sizes.append(laid_files(weights)[0].stat().st_size)
    assert sizes[1] < 0.53 * sizes[0]
    assert sizes[2] < 0.29 * sizes[0]


@pytest.mark.parametrize("harm", ["flip", "cut", "empty"])
def test_a_damaged_file_is_made_again(alive: MakeModel, tmp_path: Path, harm: str) -> None:
    save_model(alive(Shape(blocks=1, width=32, heads=2, window=24)), tmp_path / "model")
    span = Span.open(tmp_path / "model", 0, 0, "bf16")
    before = span.step(span.memory(), 0, [1, 2, 3])
    (path,) = laid_files("bf16")
    body = path.read_bytes()
    del span
    harmed = {"flip": body[:-1] + bytes([body[-1] ^ 1]), "cut": body[:-9], "empty": b""}[harm]
    path.unlink()
    path.write_bytes(harmed)
    span = Span.open(tmp_path / "model", 0, 0, "bf16")
    assert path.read_bytes() == body
    assert (span.step(span.memory(), 0, [1, 2, 3]) == before).all()


def test_a_damaged_model_is_not_laid_out(alive: MakeModel, tmp_path: Path) -> None:
    manifest = save_model(alive(Shape(blocks=1, width=32, heads=2, window=24)), tmp_path / "model")
    path = tmp_path / "model" / manifest.blocks[0].file
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(BadModel, match="digest"):
        Span.open(tmp_path / "model", 0, 0)
    assert laid_files("fp32") == []
