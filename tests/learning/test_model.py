"""The model: distributions, causality, caches, shapes, and where it starts."""

from collections.abc import Callable
from copy import deepcopy
from math import log

import pytest
import torch
from torch import Tensor

from blocktrain.errors import BadConfig, BadInput
from blocktrain.learning.model import (
    CONDITION,
    MASK,
    START,
    VOCABULARY,
    Cache,
    DecoderBlock,
    Model,
    Shape,
    Sight,
    causal_sight,
    denoise,
    new_block,
    rope_angles,
    sigma_features,
)
from blocktrain.learning.noise import Noise

Sentence = Callable[[BaseException], str]


def some_bytes(rows: int, positions: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, positions), generator=random)


def raw_output(model: Model, tokens: Tensor, z_or_hidden: Tensor, sight: Sight) -> Tensor:
    """The second block alone: residual stream -> residual stream, or tokens and z -> logits."""
    block = model.blocks[1]
    if isinstance(block, DecoderBlock):
        out: Tensor = block(z_or_hidden, sight)
        return out
    return denoise(block, model.noise, tokens, z_or_hidden, torch.full((len(tokens),), 2.0), sight)


def inputs(model: Model) -> tuple[Tensor, Tensor]:
    """Bytes, and what passes between blocks: a residual stream or noisy codes."""
    width = model.shape.width if model.shape.objective == "neighbours" else VOCABULARY
    random = torch.Generator().manual_seed(5)
    return some_bytes(2, 12), torch.randn(2, 12, width, generator=random)


# --- what it says -------------------------------------------------------------------------------


def test_every_prefix_is_a_normalised_distribution(model: Model) -> None:
    found = list(model.prefixes(some_bytes(3, 12)))
    assert len(found) == model.shape.blocks
    for logs in found:
        assert logs.shape == (3, 12, VOCABULARY)
        torch.testing.assert_close(logs.exp().sum(-1), torch.ones(3, 12), atol=1e-5, rtol=0)


def test_every_prefix_says_something_else(model: Model) -> None:
    first, second, third = model.prefixes(some_bytes(1, 12))
    assert float((first - second).abs().max()) > 1e-3
    assert float((second - third).abs().max()) > 1e-3


def test_the_whole_stack_is_the_last_prefix(model: Model) -> None:
    tokens = some_bytes(2, 12)
    *_, last = model.prefixes(tokens)
    assert torch.equal(model.log_probabilities(tokens), last)


def test_a_prefix_is_the_model_of_its_blocks(alive: Callable[[Shape], Model]) -> None:
    """Of `neighbours` only: a shorter chain of `denoise` has other sigmas."""
    model = alive(Shape(blocks=3, width=16, heads=2, window=12))
    shape = Shape(blocks=2, width=16, heads=2, window=12)
    tokens = some_bytes(2, 12)
    shorter = Model(shape, model.noise, model.blocks[:2])
    assert torch.equal(list(model.prefixes(tokens))[1], shorter.log_probabilities(tokens))


def test_it_starts_at_ln_256(shape: Shape) -> None:
    blocks = [new_block(shape, index, seed=0) for index in range(shape.blocks)]
    for logs in Model(shape, Noise(), blocks).prefixes(some_bytes(2, 12)):
        torch.testing.assert_close(logs, torch.full_like(logs, -log(256)), atol=1e-6, rtol=0)


def test_rows_do_not_see_each_other(model: Model) -> None:
    tokens = some_bytes(3, 12)
    other = tokens.clone()
    other[1] = (other[1] + 1) % 256
    before, after = model.log_probabilities(tokens), model.log_probabilities(other)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1], after[1])


def test_it_knows_how_large_it_is_and_where(model: Model) -> None:
    expected = sum(p.numel() for block in model.blocks for p in block.parameters())
    assert model.parameters == expected > 0
    assert model.device == torch.device("cpu")


def test_text_begins_after_a_newline_and_mask_is_no_byte() -> None:
    assert bytes([START]) == b"\n"
    assert MASK == VOCABULARY == 256


# --- causality ----------------------------------------------------------------------------------


def test_a_byte_changes_nothing_before_it_in_any_prefix(model: Model) -> None:
    tokens = some_bytes(2, 12)
    whole = list(model.prefixes(tokens))
    for t in range(12):
        other = tokens.clone()
        other[:, t:] = (other[:, t:] + 101) % 256
        for before, after in zip(whole, model.prefixes(other), strict=True):
            assert torch.equal(before[:, :t], after[:, :t])
            assert float((before[:, t] - after[:, t]).abs().max()) > 1e-4  # it can be seen at all


def test_a_block_alone_is_causal_in_everything_it_is_given(model: Model) -> None:
    tokens, passed = inputs(model)
    sight = causal_sight(model.shape, 12)
    before = raw_output(model, tokens, passed, sight)
    for t in range(12):
        other_tokens, other_passed = tokens.clone(), passed.clone()
        other_tokens[:, t:] = (other_tokens[:, t:] + 101) % 256
        other_passed[:, t:] += 1.0 + torch.randn(other_passed[:, t:].shape)
        after = raw_output(model, other_tokens, other_passed, sight)
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.equal(before[:, t], after[:, t])


def test_a_mask_loosened_by_one_is_found_out(model: Model) -> None:
    """The positive control of the test above."""
    tokens, passed = inputs(model)
    at = torch.arange(12)
    loose = Sight(rope_angles(at, 8), at[:, None] + 1 >= at[None, :])
    before = raw_output(model, tokens, passed, loose)
    passed[:, 6:] += torch.randn(passed[:, 6:].shape)
    after = raw_output(model, tokens, passed, loose)
    assert not torch.equal(before[:, 5], after[:, 5])
    assert torch.equal(before[:, :5], after[:, :5])


def test_an_explicit_causal_mask_is_the_plain_one(model: Model) -> None:
    tokens, passed = inputs(model)
    at = torch.arange(12)
    masked = Sight(rope_angles(at, 8), at[:, None] >= at[None, :])
    torch.testing.assert_close(
        raw_output(model, tokens, passed, masked),
        raw_output(model, tokens, passed, causal_sight(model.shape, 12)),
        atol=1e-5,
        rtol=0,
    )


# --- incremental passes -------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [[12], [1] * 12, [5, 4, 3], [1, 11], [11, 1]], ids=str)
def test_passes_with_a_cache_equal_one_full_pass(model: Model, parts: list[int]) -> None:
    tokens = some_bytes(2, 12)
    whole = list(model.prefixes(tokens))
    cache = Cache(rows=2, length=16)
    pieces = [list(model.prefixes(part, cache)) for part in torch.split(tokens, parts, dim=1)]
    assert cache.filled == 12
    for number, full in enumerate(whole):
        joined = torch.cat([piece[number] for piece in pieces], dim=1)
        torch.testing.assert_close(joined, full, atol=1e-4, rtol=0)


def test_equal_passes_with_a_cache_are_equal_bit_for_bit(model: Model) -> None:
    tokens = some_bytes(1, 12)

    def incremental() -> Tensor:
        cache = Cache(rows=1, length=12)
        parts = torch.split(tokens, 4, dim=1)
        return torch.cat([model.log_probabilities(part, cache) for part in parts], dim=1)

    assert torch.equal(incremental(), incremental())


def test_what_lies_behind_the_filled_part_of_a_cache_is_not_seen(model: Model) -> None:
    """So a rejected draft can be taken back by setting `filled` only."""
    tokens = some_bytes(1, 8)
    clean, used = Cache(1, 12), Cache(1, 12)
    model.log_probabilities(tokens[:, :4], clean)
    model.log_probabilities(tokens[:, :4], used)
    model.log_probabilities(some_bytes(1, 8, seed=9), used)
    used.filled = 4
    assert torch.equal(
        model.log_probabilities(tokens[:, 4:], clean), model.log_probabilities(tokens[:, 4:], used)
    )


# --- parts --------------------------------------------------------------------------------------


def test_only_distances_between_positions_matter(model: Model) -> None:
    tokens, passed = inputs(model)
    here, there, wider = (
        raw_output(model, tokens, passed, Sight(rope_angles(positions, 8)))
        for positions in (torch.arange(12), torch.arange(90, 102), torch.arange(0, 24, 2))
    )
    torch.testing.assert_close(here, there, atol=1e-4, rtol=0)
    assert float((here - wider).abs().max()) > 1e-2


def test_gradients_are_those_of_finite_differences(model: Model) -> None:
    """Norms and rotations have backward passes of our own."""
    tokens, passed = inputs(model)
    block = deepcopy(model.blocks[1]).double().requires_grad_(True)
    cos, sin = rope_angles(torch.arange(4), 8)
    sight = Sight((cos.double(), sin.double()))
    weights = [p for name, p in block.named_parameters() if "norm" in name or "attention" in name]

    def output(given: Tensor, *_: Tensor) -> Tensor:
        if isinstance(block, DecoderBlock):
            hidden: Tensor = block.head(block(given, sight))
            return hidden[..., :3]
        sigma = torch.full((1,), 2.0, dtype=torch.float64)
        logits: Tensor = block(tokens[:1, :4], given, sigma, sight)
        return logits[..., :3]

    given = passed[:1, :4].double().requires_grad_(True)
    assert torch.autograd.gradcheck(output, (given, *weights), fast_mode=True)


def test_a_new_denoise_layer_changes_nothing_as_its_gates_are_zero() -> None:
    shape = Shape("denoise", blocks=1, layers=2, width=16, heads=2, window=8)
    block = new_block(shape, 0, seed=0)
    told, hidden = torch.randn(1, 1, CONDITION), torch.randn(1, 8, 16)
    for layer in block.layers:
        assert torch.equal(layer(hidden, causal_sight(shape, 8), told), hidden)


@pytest.mark.parametrize("part", range(6))
def test_shift_scale_and_gate_of_each_half_all_count(
    alive: Callable[[Shape], Model], part: int
) -> None:
    model = alive(Shape("denoise", blocks=2, width=16, heads=2, window=12))
    tokens, z = inputs(model)
    sight = causal_sight(model.shape, 12)
    before = raw_output(model, tokens, z, sight)
    with torch.no_grad():
        weight = model.blocks[1].get_parameter("layers.0.modulation.weight")
        weight[16 * part : 16 * (part + 1)] += 0.5
    assert float((raw_output(model, tokens, z, sight) - before).abs().max()) > 1e-3


def test_a_denoise_block_is_told_sigma(alive: Callable[[Shape], Model]) -> None:
    model = alive(Shape("denoise", blocks=2, width=16, heads=2, window=12))
    tokens, z = inputs(model)
    sight = causal_sight(model.shape, 12)
    low, high = (model.blocks[0](tokens, z, torch.full((2,), sigma), sight) for sigma in (2.0, 2.5))
    assert float((low - high).abs().max()) > 1e-3


def test_sigmas_have_features_of_their_own() -> None:
    features = sigma_features(torch.tensor([1.0, 1.1, 3.0, 10.0]))
    assert features.shape == (4, 32)
    distances = torch.cdist(features, features) + 10 * torch.eye(4)
    assert float(distances.min()) > 0.1


# --- beginnings and shapes ----------------------------------------------------------------------


def test_a_new_block_follows_from_shape_index_and_seed_alone(shape: Shape) -> None:
    def values(index: int, seed: int) -> dict[str, Tensor]:
        return new_block(shape, index, seed).state_dict()

    torch.manual_seed(1)
    one = values(1, seed=5)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    torch.randn(100)
    again = values(1, seed=5)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["layers.0.mlp.up.weight"], values(1, 6)["layers.0.mlp.up.weight"])
    assert not torch.equal(one["layers.0.mlp.up.weight"], values(2, 5)["layers.0.mlp.up.weight"])
    torch.set_rng_state(state)
    values(0, 0)
    assert torch.equal(torch.get_rng_state(), state), "others' randomness was used up"


def test_only_the_first_decoder_block_embeds() -> None:
    shape = Shape(blocks=2, width=16, heads=2)
    assert "embed.weight" in new_block(shape, 0, 0).state_dict()
    assert "embed.weight" not in new_block(shape, 1, 0).state_dict()


@pytest.mark.parametrize(("width", "hidden"), [(24, 64), (48, 128), (96, 256), (256, 704)])
def test_the_hidden_width_is_eight_thirds_rounded_up_to_64(width: int, hidden: int) -> None:
    assert Shape(width=width, heads=1).hidden == hidden


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"width": 100, "heads": 3}, "width 100 does not divide into 3 heads"),
        ({"width": 12, "heads": 4}, "even width"),
        ({"blocks": 0}, "blocks is 0"),
        ({"layers": -1}, "layers is -1"),
        ({"width": 0}, "width is 0"),
        ({"heads": 0}, "heads is 0"),
        ({"window": 0}, "window is 0"),
    ],
)
def test_a_shape_that_cannot_be(wrong: dict[str, int], told: str, sentence: Sentence) -> None:
    with pytest.raises(BadConfig) as caught:
        Shape(**wrong)  # type: ignore[arg-type]
    assert told in sentence(caught.value)


def test_an_objective_that_does_not_exist() -> None:
    with pytest.raises(BadConfig, match="neither neighbours nor denoise"):
        Shape("dream")  # type: ignore[arg-type]


def test_any_seed_that_data_takes_makes_a_block() -> None:
    shape = Shape(blocks=1, width=16, heads=2)
    largest = new_block(shape, 0, 2**64 - 1)
    assert largest.get_parameter("layers.0.attention.q.weight").std() > 0


def test_a_full_cache_says_so() -> None:
    cache = Cache(rows=1, length=4)
    with pytest.raises(BadInput, match="begin a new one"):
        cache.sight(5, Shape(width=16, heads=2), torch.device("cpu"))
