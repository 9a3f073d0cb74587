"""Muon and AdamW of one block: right directions, right rates, a state that goes on bit for bit."""

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blocktrain.errors import BadConfig, BadModel
from blocktrain.learning.files import load_tensors, save_tensors
from blocktrain.learning.model import Block, Model, Shape, new_block
from blocktrain.learning.optimiser import (
    Optimiser,
    Rates,
    digest_of,
    evened,
    orthogonal,
    state_shapes,
)

Sentence = Callable[[BaseException], str]


def give_gradients(block: nn.Module, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for parameter in block.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=random)


def values(block: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in block.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def trainable(model: Model, index: int = 0) -> Block:
    return deepcopy(model.blocks[index]).requires_grad_(True)


# --- directions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(64, 64), (16, 64), (64, 16), (48, 40)], ids=str)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_orthogonal_brings_all_singular_values_near_one(
    size: tuple[int, int], scale: float
) -> None:
    u, _, v = torch.linalg.svd(torch.randn(size), full_matrices=False)
    spread = torch.linspace(0.1, 1.0, min(size))
    found = torch.linalg.svdvals(orthogonal(scale * (u * spread) @ v))
    assert 0.6 < float(found.min()) <= float(found.max()) < 1.3


def test_orthogonal_keeps_the_direction() -> None:
    matrix = torch.randn(24, 48)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix)
    cosine = float((found * (u @ v)).sum() / (found.norm() * (u @ v).norm()))
    assert cosine > 0.95


def test_rows_that_always_go_far_are_held_back() -> None:
    far = torch.tensor([[4.0], [1.0], [0.5]])
    energy = torch.zeros(3, 1)
    for step in range(200):
        direction = far * torch.randn(3, 64, generator=torch.Generator().manual_seed(step))
        even = evened(direction, energy, 0.95)
        assert float(even.norm()) == pytest.approx(float(direction.norm()), rel=1e-4)
    lengths = even.norm(dim=1)
    assert float(lengths.max() / lengths.min()) < 1.5  # it was 8
    assert bool(torch.allclose(energy.sqrt(), far, rtol=0.15))


def test_the_first_step_is_even_already_and_nothing_stays_nothing() -> None:
    direction = torch.tensor([[3.0, 4.0], [0.0, 0.5], [0.0, 0.0]])
    even = evened(direction, torch.zeros(3, 1), 0.95)
    assert bool(torch.allclose(even[0].norm(), even[1].norm(), rtol=1e-4))
    assert not even[2].any()
    assert not evened(torch.zeros(3, 2), torch.zeros(3, 1), 0.95).any()


def test_orthogonal_of_nothing_is_nothing() -> None:
    assert torch.equal(orthogonal(torch.zeros(8, 4)), torch.zeros(8, 4))


def test_every_parameter_is_in_exactly_one_hand(model: Model) -> None:
    for index in range(model.shape.blocks):
        block = trainable(model, index)
        optimiser = Optimiser(block, Rates(), {})
        names = [*optimiser.matrices, *optimiser.others]
        assert sorted(names) == sorted(name for name, _ in block.named_parameters())
        for name, parameter in block.named_parameters():
            inner = any(part in name for part in ("attention.", "mlp.", "z_in."))
            assert (name in optimiser.matrices) == (inner and parameter.ndim == 2)
        for name in ("layers.0.attention.q.weight", "layers.0.mlp.down.weight"):
            assert name in optimiser.matrices
        for name in ("head.out.weight", "head.norm.weight", "layers.0.attention.q_norm.weight"):
            assert name in optimiser.others


def test_every_parameter_moves(model: Model) -> None:
    block = trainable(model)
    before = values(block)
    give_gradients(block, seed=0)
    Optimiser(block, Rates(), {}).step(1.0)
    after = values(block)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in block.parameters()), "gradients must be cleared"


def test_muon_against_its_formula() -> None:
    block = new_block(Shape(blocks=1, width=16, heads=2), 0, seed=0)
    rates = Rates(matrix=0.03, momentum=0.9, decay=0.1)
    optimiser = Optimiser(block, rates, {})
    name = "layers.0.mlp.gate.weight"  # taller than wide
    matrix = block.get_parameter(name).detach().clone()
    momentum, energy = torch.zeros_like(matrix), torch.zeros(len(matrix), 1)
    for number, factor in enumerate((1.0, 0.5, 0.25)):
        give_gradients(block, seed=number)
        gradient = block.get_parameter(name).grad
        assert gradient is not None
        momentum = 0.9 * momentum + 0.1 * gradient
        direction = orthogonal(0.9 * momentum + 0.1 * gradient)
        energy = 0.9 * energy + 0.1 * (direction**2).mean(1, keepdim=True)
        even = direction / energy.sqrt()
        direction = even * direction.norm() / even.norm()
        tall = (matrix.shape[0] / matrix.shape[1]) ** 0.5
        assert tall == 2.0
        matrix = matrix * (1 - 0.03 * factor * 0.1) - 0.03 * factor * tall * direction
        optimiser.step(factor)
        torch.testing.assert_close(block.get_parameter(name).detach(), matrix, atol=1e-4, rtol=0)


def test_adamw_against_torchs_own() -> None:
    block = new_block(Shape(blocks=1, width=16, heads=2), 0, seed=0)
    twin = deepcopy(block)
    theirs = torch.optim.AdamW(twin.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    optimiser = Optimiser(block, Rates(other=0.01), {})
    for number, factor in enumerate((1.0, 0.5, 0.25)):
        give_gradients(block, seed=number)
        give_gradients(twin, seed=number)
        optimiser.step(factor)
        theirs.param_groups[0]["lr"] = 0.01 * factor
        theirs.step()
    for name in optimiser.others:
        torch.testing.assert_close(block.get_parameter(name), twin.get_parameter(name))


# --- settings -----------------------------------------------------------------------------------


def moved(rates: Rates, name: str, steps: int = 1) -> Tensor:
    """How far one parameter goes in some steps."""
    block = new_block(Shape(blocks=1, width=16, heads=2), 0, seed=0)
    optimiser = Optimiser(block, rates, {})
    before = block.get_parameter(name).detach().clone()
    for number in range(steps):
        give_gradients(block, seed=number)
        optimiser.step(1.0)
    return block.get_parameter(name).detach() - before


def test_each_rate_turns_its_own_parameters() -> None:
    for name, mine in (("layers.0.mlp.up.weight", "matrix"), ("head.out.weight", "other")):
        plain = moved(Rates(), name)
        doubled = moved(Rates(**{mine: 2 * getattr(Rates(), mine)}), name)
        torch.testing.assert_close(doubled, 2 * plain, atol=1e-5, rtol=1e-3)
        other = "other" if mine == "matrix" else "matrix"
        assert torch.equal(moved(Rates(**{other: 0.001}), name), plain)


def test_momentum_and_decay_turn_matrices_only() -> None:
    for changed in (Rates(momentum=0.5), Rates(decay=0.1)):
        matrix, other = "layers.0.attention.o.weight", "head.out.weight"
        assert not torch.equal(moved(changed, matrix, steps=2), moved(Rates(), matrix, steps=2))
        assert torch.equal(moved(changed, other, steps=2), moved(Rates(), other, steps=2))


def test_rates_rise_stay_and_fall() -> None:
    rates = Rates(warmup=0.1, cooldown=0.4, final=0.05)
    assert 0 < rates.at(0.0) <= 1e-3  # the very first step is small, not lost
    assert rates.at(0.05) == pytest.approx(0.5)
    assert [rates.at(done) for done in (0.1, 0.3, 0.6)] == [1.0, 1.0, 1.0]
    assert rates.at(0.8) == pytest.approx((1 + 0.05) / 2)
    assert rates.at(1.0) == pytest.approx(0.05)
    assert rates.at(1.5) == pytest.approx(0.05)  # more bytes than planned: no sign change
    path = [rates.at(number / 1000) for number in range(1001)]
    assert max(abs(a - b) for a, b in pairwise(path)) < 0.011  # no jump
    assert path[:100] == sorted(path[:100])
    assert path[600:] == sorted(path[600:], reverse=True)


def test_rates_without_warmup_or_cooldown_are_level() -> None:
    level = Rates(warmup=0.0, cooldown=0.0)
    assert {level.at(number / 10) for number in range(12)} == {1.0}


def test_a_run_that_is_all_warmup_and_cooldown_has_one_peak() -> None:
    rates = Rates(warmup=0.5, cooldown=0.5, final=0.0)
    assert rates.at(0.25) == pytest.approx(0.5)
    assert rates.at(0.5) == pytest.approx(1.0)
    assert rates.at(0.75) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"matrix": 0.0},
        {"other": -1.0},
        {"matrix": float("nan")},
        {"warmup": -0.1},
        {"cooldown": -0.1},
        {"warmup": 0.6, "cooldown": 0.5},
    ],
    ids=str,
)
def test_rates_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(BadConfig):
        Rates(**wrong)


# --- state --------------------------------------------------------------------------------------


def test_a_state_from_a_file_goes_on_bit_for_bit(model: Model, tmp_path: Path) -> None:
    block = trainable(model)
    twin = deepcopy(block)
    one, other = Optimiser(block, Rates(), {}), Optimiser(twin, Rates(), {})
    for number in range(3):
        give_gradients(block, seed=number)
        give_gradients(twin, seed=number)
        one.step(0.7)
        other.step(0.7)
    save_tensors(tmp_path / "state.safetensors", other.state())
    other = Optimiser(twin, Rates(), load_tensors(tmp_path / "state.safetensors"))
    assert digest_of(other.state()) == digest_of(one.state())
    for number in range(3, 6):
        give_gradients(block, seed=number)
        give_gradients(twin, seed=number)
        one.step(0.7)
        other.step(0.7)
    assert same(values(block), values(twin))
    assert same(one.state(), other.state())


def test_going_on_without_the_state_is_noticed(model: Model) -> None:
    """The positive control of the test above."""
    block = trainable(model)
    twin = deepcopy(block)
    one, other = Optimiser(block, Rates(), {}), Optimiser(twin, Rates(), {})
    for number in range(2):
        give_gradients(block, seed=number)
        give_gradients(twin, seed=number)
        one.step(0.7)
        other.step(0.7)
        other = Optimiser(twin, Rates(), {})
    assert not same(values(block), values(twin))


@pytest.mark.parametrize("replicas", [1, 4, 9])
def test_the_mean_of_noisy_replicas_goes_as_far_as_one(replicas: int) -> None:
    """Where gradients are nothing but noise, sqrt(R) makes up for what averaging takes away."""

    def gone(rates: Rates, seeds: range) -> dict[str, Tensor]:
        moved: dict[str, Tensor] = {}
        for seed in seeds:
            block = new_block(Shape(blocks=1, width=16, heads=2), 0, seed=0)
            before = values(block)
            give_gradients(block, seed)
            Optimiser(block, rates, {}).step(1.0)
            for name, value in values(block).items():
                moved[name] = moved.get(name, 0) + (value - before[name]) / len(seeds)
        return moved

    one = gone(Rates(), range(1))
    many = gone(Rates().shared_by(replicas), range(replicas))
    assert Rates().shared_by(1) == Rates()
    for name in ("layers.0.mlp.gate.weight", "embed.weight"):  # Muon's, AdamW's
        assert 0.85 <= many[name].norm() / one[name].norm() <= 1.15


def test_a_parameter_without_a_gradient_stays(model: Model) -> None:
    block = trainable(model)
    before = values(block)
    Optimiser(block, Rates(decay=0.1), {}).step(1.0)
    assert same(before, values(block))


@pytest.mark.parametrize("damage", ["missing", "wrong shape", "of another objective"])
def test_a_state_of_another_model(model: Model, damage: str, sentence: Sentence) -> None:
    block = trainable(model)
    state = Optimiser(block, Rates(), {}).state()
    name = "momentum.layers.0.mlp.up.weight"
    if damage == "missing":
        del state[name]
    elif damage == "wrong shape":
        state[name] = state[name].T.contiguous()
    else:
        block = new_block(Shape(blocks=1, width=24, heads=2), 0, seed=0)
    with pytest.raises(BadModel) as caught:
        Optimiser(block, Rates(), state)
    assert "of another model" in sentence(caught.value)


# --- digests ------------------------------------------------------------------------------------

THREE = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(2, 2), "step": torch.tensor(3.0)}


def test_a_digest_names_values_names_and_shapes() -> None:
    plain = digest_of(THREE)
    assert len(plain) == 64
    assert plain == digest_of(dict(reversed(THREE.items())))  # not the order of a dict
    others = [
        {**THREE, "a": torch.tensor([1.0, 2.0000002])},
        {**THREE, "a": torch.tensor([2.0, 1.0])},
        {**THREE, "b": torch.zeros(4)},
        {**THREE, "b": torch.zeros(4, 1)},
        {**THREE, "step": torch.tensor(4.0)},
        {"c" if name == "a" else name: value for name, value in THREE.items()},
        {"a": THREE["a"], "b": THREE["b"]},
        {**THREE, "c": torch.zeros(0)},
    ]
    digests = {digest_of(tensors) for tensors in others}
    assert len(digests) == len(others)
    assert plain not in digests


def test_a_digest_does_not_depend_on_memory_layout() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    turned = matrix.T.contiguous().T
    assert not turned.is_contiguous()
    assert digest_of({"m": matrix}) == digest_of({"m": turned})


@pytest.mark.parametrize(
    "bad",
    [
        {"matrix": 0},
        {"matrix": float("inf")},
        {"other": -1},
        {"momentum": 1.0},
        {"momentum": float("nan")},
        {"final": -1},
        {"decay": -5},
        {"warmup": 0.6, "cooldown": 0.6},
        {"warmup": -0.1},
    ],
)
def test_rates_that_make_no_sense(bad: dict[str, float]) -> None:
    with pytest.raises(BadConfig):
        Rates(**bad)


def test_the_shapes_of_a_state_are_known_before_there_is_one(model: Model) -> None:
    block = trainable(model)
    told = state_shapes({name: tuple(p.shape) for name, p in block.named_parameters()})
    state = Optimiser(block, Rates(), {}).state()
    assert told == {name: tuple(value.shape) for name, value in state.items()}
