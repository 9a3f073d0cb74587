"""What one block is asked to do: nobody else moves, nothing leaks, every setting turns."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from math import log
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blocktrain.errors import BadConfig
from blocktrain.learning import objective as module
from blocktrain.learning.model import MASK, Block, Model, Shape, Sight, causal_sight, denoise
from blocktrain.learning.noise import Noise, seed_of, target_code
from blocktrain.learning.objective import (
    Denoise,
    Loader,
    Neighbours,
    Recipe,
    Task,
    cross_entropy,
    draw_shown,
    draw_spans,
    mask_spans,
    objective_for,
    streams,
)

MakeModel = Callable[[Shape], Model]
SHAPE = Shape(blocks=4, layers=2, width=16, heads=2, window=12)
RECIPE = Recipe(SHAPE)
DENOISE = replace(SHAPE, objective="denoise", layers=1)


def rows(count: int, seed: int = 0, positions: int = 12) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, positions + 1), generator=random)


def loaders(model: Model) -> list[Loader]:
    """Every block as a loader; its blocks even ask for gradients, which they must not get."""
    copies = [deepcopy(block).requires_grad_(True) for block in model.blocks]
    return [lambda copy=copy: copy for copy in copies]  # type: ignore[misc]


def counting(neighbours: list[Loader]) -> tuple[list[Loader], list[int]]:
    """The same loaders, and a list that grows by an index whenever one is used."""
    used: list[int] = []

    def counted(index: int) -> Block:
        used.append(index)
        return neighbours[index]()

    return [partial(counted, index) for index in range(len(neighbours))], used


def own(model: Model, index: int) -> Block:
    return deepcopy(model.blocks[index]).requires_grad_(True)


def loss_of(model: Model, index: int, recipe: Recipe, batch: Tensor) -> float:
    """The loss of block `index`, which is as it is in the model, beside its neighbours."""
    goal = objective_for(index, recipe, loaders(model))
    ((batch, features),) = goal.prepare(iter([batch]), micro=2)
    return goal.loss(own(model, index), batch, features, key=0).item()


def stack_ces(model: Model, batch: Tensor) -> list[float]:
    """Plain CE at every head of the composed stack."""
    targets = batch[:, 1:, None]
    return [-float(logs.gather(-1, targets).mean()) for logs in model.prefixes(batch[:, :-1])]


# --- neighbours ---------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(4))
def test_only_the_block_itself_gets_gradients(alive: MakeModel, index: int) -> None:
    model = alive(SHAPE)
    neighbours = loaders(model)
    goal = objective_for(index, RECIPE, neighbours)
    block = own(model, index)
    before = [deepcopy(load().state_dict()) for load in neighbours]
    for batch, features in goal.prepare(iter([rows(2), rows(2, seed=1)]), micro=1):
        assert features is None or not features.requires_grad
        goal.loss(block, batch, features, key=0).backward()  # type: ignore[no-untyped-call]
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name
    for load, values in zip(neighbours, before, strict=True):
        for name, parameter in load().named_parameters():
            assert parameter.grad is None
            assert torch.equal(parameter, values[name])


@pytest.mark.parametrize("index", [1, 2, 3])
def test_upstream_features_are_the_stacks_residual_stream(alive: MakeModel, index: int) -> None:
    model = alive(SHAPE)
    batch = rows(3)
    goal = objective_for(index, RECIPE, loaders(model))
    ((_, features),) = goal.prepare(iter([batch]), micro=2)
    sight = causal_sight(SHAPE, 12)
    hidden = model.blocks[0].enter(batch[:, :-1], sight)
    for block in model.blocks[:index]:
        hidden = block(hidden, sight)
    assert features is not None
    torch.testing.assert_close(features, hidden, atol=1e-5, rtol=0)
    read = model.blocks[index - 1].head(features).log_softmax(-1)
    expected = list(model.prefixes(batch[:, :-1]))[index - 1]
    torch.testing.assert_close(read, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("index", [1, 2, 3])
def test_streams_computed_once_are_what_each_block_would_find(alive: MakeModel, index: int) -> None:
    recipe = replace(RECIPE, micro=2 * SHAPE.window)
    batches, opened = [rows(3), rows(3)], loaders(alive(SHAPE))
    own = list(objective_for(index, recipe, opened).prepare(iter(batches), 2))
    known = [streams(batch, opened, recipe) for batch in batches]
    given = list(objective_for(index, recipe, opened, known).prepare(iter(batches), 2))
    for (_, one), (_, other) in zip(own, given, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_going_through_copies_twice_changes_no_bit(
    alive: MakeModel, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    """Layer by layer, the furthest first; the own block keeps its activations."""
    recipe = replace(RECIPE, task=Task(lookahead=2))
    passes: list[int] = []

    def once() -> tuple[Tensor, list[Tensor]]:
        model = alive(SHAPE)
        for number, block in enumerate(model.blocks):
            for layer in block.layers:
                layer.register_forward_pre_hook(lambda *_, number=number: passes.append(number))
        goal = objective_for(index, recipe, loaders(model))
        block = model.blocks[index].requires_grad_(True)
        ((batch, features),) = goal.prepare(iter([rows(3)]), micro=3)
        passes.clear()
        loss = goal.loss(block, batch, features, key=0)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), [p.grad for p in block.parameters() if p.grad is not None]

    kept_loss, kept = once()
    seen = [number for number in range(index, min(index + 3, 4)) for _ in range(SHAPE.layers)]
    assert passes == seen
    monkeypatch.setattr(module, "KEPT_ACTIVATIONS", 0)
    twice_loss, twice = once()
    assert passes == seen + seen[: SHAPE.layers - 1 : -1]
    assert torch.equal(kept_loss, twice_loss)
    assert len(kept) == len(twice) > 0
    assert all(map(torch.equal, kept, twice))


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_the_part_computed_at_once_does_not_matter(alive: MakeModel, micro: int) -> None:
    goal = objective_for(2, RECIPE, loaders(alive(SHAPE)))
    ((_, whole),) = goal.prepare(iter([rows(8)]), micro=8)
    ((_, parts),) = goal.prepare(iter([rows(8)]), micro=micro)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)


BATCH_OF_FEATURES = 2 * 12 * SHAPE.width * 4  # bytes, for two rows


@pytest.mark.parametrize(("limit", "at_once"), [(0, 1), (1, 1), (2, 2), (3, 3), (100, 7)])
def test_streaming_gives_the_same_and_holds_no_more_than_the_limit(
    alive: MakeModel, monkeypatch: pytest.MonkeyPatch, limit: int, at_once: int
) -> None:
    model = alive(SHAPE)
    batches = [rows(2, seed=number) for number in range(7)]
    whole = list(objective_for(2, RECIPE, loaders(model)).prepare(iter(batches), micro=1))

    monkeypatch.setattr(module, "FEATURES_AT_ONCE", limit * BATCH_OF_FEATURES)
    counted, loads = counting(loaders(model))
    taken = 0

    def watched() -> Iterator[Tensor]:
        nonlocal taken
        for batch in batches:
            taken += 1
            yield batch

    goal = objective_for(2, RECIPE, counted)
    loads.clear()  # those downstream
    count = 0
    for batch, features in goal.prepare(watched(), micro=1):
        assert taken - count <= at_once
        assert torch.equal(batch, whole[count][0])
        assert torch.equal(cast(Tensor, features), cast(Tensor, whole[count][1]))
        count += 1
    assert count == 7
    chunks = -(-7 // at_once)
    assert loads == [0, 1] * chunks  # one upstream block at a time, once per chunk


def test_gradients_stay_on_when_streaming_is_left_half_way(alive: MakeModel) -> None:
    goal = objective_for(2, RECIPE, loaders(alive(SHAPE)))
    stream = goal.prepare(iter([rows(2), rows(2)]), micro=1)
    next(stream)
    assert torch.is_grad_enabled()
    del stream
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("lookahead", [0, 1, 2, 9])
@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("own_share", [0.0, 0.1, 1.0])
def test_the_loss_is_taken_at_the_right_head(
    alive: MakeModel, lookahead: int, index: int, own_share: float
) -> None:
    model = alive(SHAPE)
    recipe = replace(RECIPE, task=Task(lookahead=lookahead, own_share=own_share))
    ces = stack_ces(model, rows(3))
    assert min(abs(a - b) for i, a in enumerate(ces) for b in ces[:i]) > 1e-3  # heads differ
    far = min(index + lookahead, 3)
    expected = ces[index] if far == index else own_share * ces[index] + (1 - own_share) * ces[far]
    assert loss_of(model, index, recipe, rows(3)) == pytest.approx(expected, abs=1e-5)


def test_the_last_blocks_loss_is_plain_ce(alive: MakeModel) -> None:
    model = alive(SHAPE)
    for share in (0.0, 0.5):
        recipe = replace(RECIPE, task=Task(own_share=share))
        found = loss_of(model, 3, recipe, rows(3))
        assert found == pytest.approx(stack_ces(model, rows(3))[-1], abs=1e-5)


def test_seeing_to_the_end_is_end_to_end_training(alive: MakeModel) -> None:
    """Block 1's gradient through frozen copies of all others is the whole stack's."""
    model = alive(SHAPE)
    block = own(model, 0)
    recipe = replace(RECIPE, task=Task(lookahead=3, own_share=0.0))
    loss = objective_for(0, recipe, loaders(model)).loss(block, rows(2), None, key=0)
    loss.backward()  # type: ignore[no-untyped-call]
    stack = Model(SHAPE, model.noise, [own(model, index) for index in range(4)])
    logs = stack.log_probabilities(rows(2)[:, :-1])
    (-logs.gather(-1, rows(2)[:, 1:, None]).mean()).backward()  # type: ignore[no-untyped-call]
    for name, parameter in stack.blocks[0].named_parameters():
        if not name.startswith("head."):
            torch.testing.assert_close(
                block.get_parameter(name).grad, parameter.grad, atol=1e-6, rtol=1e-4
            )


def test_the_first_block_needs_no_upstream_and_sees_at_most_lookahead_blocks(
    alive: MakeModel,
) -> None:
    counted, opened = counting(loaders(alive(SHAPE)))
    goal = objective_for(0, replace(RECIPE, task=Task(lookahead=1)), counted)
    assert isinstance(goal, Neighbours)
    assert [features for _, features in goal.prepare(iter([rows(2)]), micro=1)] == [None]
    assert opened == [1]


# --- denoise: what the block is shown -----------------------------------------------------------


class Watched:
    """Stands in for a block: notes what it is shown and answers as the real one, or nothing."""

    loss: Tensor

    def __init__(self, block: Block | None = None) -> None:
        self.block = block

    def __call__(self, tokens: Tensor, z: Tensor, sigma: Tensor, sight: Sight) -> Tensor:
        self.tokens, self.shown, self.sigma, self.sight = tokens, z, sigma, sight
        answer = None if self.block is None else self.block(tokens, z, sigma, sight)
        self.raw: Tensor = torch.zeros_like(z) if answer is None else answer
        return self.raw

    @property
    def z(self) -> Tensor:
        """Before it was scaled by c_in."""
        return self.shown * (self.sigma**2 + 1 / 256).sqrt()[:, None, None]


def shown(goal: Denoise, batch: Tensor, key: int = 0, block: Block | None = None) -> Watched:
    watched = Watched(block)
    watched.loss = goal.loss(cast(Any, watched), batch, None, key)
    return watched


def denoise_goal(index: int = 1, noise: Noise | None = None, **task: Any) -> Denoise:
    recipe = Recipe(DENOISE, Task(**task), noise or Noise())
    goal = objective_for(index, recipe, [])
    assert isinstance(goal, Denoise)
    return goal


def test_denoise_needs_nothing_from_upstream() -> None:
    batches = [rows(2), rows(2, seed=1)]
    found = list(denoise_goal().prepare(iter(batches), micro=1))
    assert all(features is None for _, features in found)
    assert all(torch.equal(batch, given) for (batch, _), given in zip(found, batches, strict=True))


def test_what_is_drawn_follows_from_the_key() -> None:
    goal = denoise_goal(masked_share=0.5)
    one, again, other = (shown(goal, rows(4), key) for key in (1, 1, 2))
    assert torch.equal(one.shown, again.shown)
    assert torch.equal(one.tokens, again.tokens)
    assert not torch.equal(one.shown, other.shown)
    assert not torch.equal(one.sigma, other.sigma)


@pytest.mark.parametrize("index", range(4))
def test_sigma_is_of_the_blocks_own_interval(index: int) -> None:
    low, high = Noise().interval(index, 4)
    sigma = shown(denoise_goal(index), rows(400)).sigma
    assert low <= float(sigma.min()) < float(sigma.max()) <= high
    assert float(sigma.max()) - float(sigma.min()) > 0.8 * (high - low)


def test_z_is_the_next_bytes_code_and_noise_of_size_sigma() -> None:
    batch = rows(40)
    seen = shown(denoise_goal(masked_share=0.0), batch)
    assert torch.equal(seen.tokens, batch[:, :-1])
    noise = (seen.z - target_code(0)[batch[:, 1:]]) / seen.sigma[:, None, None]
    assert float(noise.mean()) == pytest.approx(0, abs=0.02)
    assert float(noise.std()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_the_samples_gets_no_code(share: float) -> None:
    batch = rows(400)
    seen = shown(denoise_goal(masked_share=0.0, empty_share=share), batch)
    told = shown(denoise_goal(masked_share=0.0), batch)
    empty = (seen.z == 0).flatten(1).all(1)
    assert float(empty.float().mean()) == pytest.approx(share, abs=0.07)
    assert torch.equal(seen.z[~empty], told.z[~empty])  # the others get what they always got


def test_a_target_changes_the_code_at_its_own_position_only() -> None:
    goal, batch = denoise_goal(masked_share=0.0), rows(3)
    for t in (0, 5, 11):
        other = batch.clone()
        other[:, t + 1] = (other[:, t + 1] + 1) % 256
        change = shown(goal, other).z - shown(goal, batch).z
        code = target_code(0)
        expected = code[other[:, t + 1]] - code[batch[:, t + 1]]
        torch.testing.assert_close(change[:, t], expected, atol=1e-4, rtol=0)
        change[:, t] = 0
        assert float(change.abs().max()) == 0


def test_no_target_reaches_an_earlier_position(alive: MakeModel) -> None:
    block = alive(DENOISE).blocks[1]
    goal, batch = denoise_goal(masked_share=0.0), rows(3)
    before = shown(goal, batch, block=block).raw
    for t in range(12):
        other = batch.clone()
        other[:, t + 1 :] = (other[:, t + 1 :] + 1) % 256
        after = shown(goal, other, block=block).raw
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.equal(before[:, t], after[:, t])  # its own noisy code it does see


def test_at_huge_sigma_nothing_is_given_away() -> None:
    """With no network (raw = 0) the loss is what z alone tells: ln 256 if it tells nothing."""
    far = Noise(sigma_min=1e3, sigma_max=2e3, log_mean=log(1.4e3), log_std=0.3)
    near = Noise(sigma_min=0.05, sigma_max=0.1, log_mean=log(0.07), log_std=0.3)
    for noise, least, most in ((far, log(256) - 1e-3, log(256) + 1e-3), (near, 0.0, 0.1)):
        loss = shown(denoise_goal(noise=noise), rows(32)).loss
        assert least <= float(loss) <= most


# --- denoise: masked spans ----------------------------------------------------------------------

SPANS = torch.tensor([[3, 8], [0, 0], [10, 12], [5, 7]])


def test_the_bytes_a_span_must_find_are_hidden() -> None:
    tokens = rows(4)[:, :-1]
    masked, _ = mask_spans(tokens, SPANS, causal_sight(DENOISE, 12))
    for row, (start, end) in enumerate(SPANS.tolist()):
        hidden = list(range(start + 1, end))
        for at in range(12):
            assert int(masked[row, at]) == (MASK if at in hidden else int(tokens[row, at]))


def test_span_positions_see_each_other_and_everyone_sees_what_is_before() -> None:
    _, sight = mask_spans(rows(4)[:, :-1], SPANS, causal_sight(DENOISE, 12))
    assert sight.mask is not None
    for row, (start, end) in enumerate(SPANS.tolist()):
        span = range(start, end)
        for at in range(12):
            for other in range(12):
                allowed = other <= at or (at in span and other in span)
                assert bool(sight.mask[row, 0, at, other]) == allowed


def test_without_spans_the_pass_is_plainly_causal() -> None:
    tokens, sight = rows(4)[:, :-1], causal_sight(DENOISE, 12)
    same, plain = mask_spans(tokens, torch.tensor([[3, 3]] * 4), sight)
    assert same is tokens
    assert plain is sight


def spanned(model: Model, tokens: Tensor, z: Tensor) -> Tensor:
    """What block 2 says with positions 3..7 of every row masked."""
    spans = torch.tensor([[3, 8]] * len(tokens))
    masked, sight = mask_spans(tokens, spans, causal_sight(DENOISE, 12))
    sigma = torch.full((len(tokens),), 3.0)
    return denoise(model.blocks[1], model.noise, masked, z, sigma, sight)


def test_nothing_after_a_span_leaks_back_into_it(alive: MakeModel) -> None:
    model = alive(DENOISE)
    tokens, z = rows(2)[:, :-1], torch.randn(2, 12, 256)
    before = spanned(model, tokens, z)
    later, later_z = tokens.clone(), z.clone()
    later[:, 8:] = (later[:, 8:] + 7) % 256
    later_z[:, 8:] += 1
    after = spanned(model, later, later_z)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8], after[:, 8])


def test_the_hidden_bytes_are_hidden_from_everyone(alive: MakeModel) -> None:
    model = alive(DENOISE)
    tokens, z = rows(2)[:, :-1], torch.randn(2, 12, 256)
    other = tokens.clone()
    other[:, 4:8] = (other[:, 4:8] + 7) % 256
    assert torch.equal(spanned(model, tokens, z), spanned(model, other, z))
    other[:, 3] = (other[:, 3] + 7) % 256  # the byte before the first that must be found
    assert not torch.equal(spanned(model, tokens, z)[:, 3], spanned(model, other, z)[:, 3])


def test_the_noise_of_a_span_is_seen_both_ways_inside_it_and_not_before_it(
    alive: MakeModel,
) -> None:
    model = alive(DENOISE)
    tokens, z = rows(2)[:, :-1], torch.randn(2, 12, 256)
    before = spanned(model, tokens, z)
    other = z.clone()
    other[:, 7] += 1
    after = spanned(model, tokens, other)
    assert torch.equal(before[:, :3], after[:, :3])
    for at in range(3, 8):
        assert not torch.equal(before[:, at], after[:, at])


def test_the_loss_hides_spans_and_counts_every_position_that_cannot_see_its_target() -> None:
    goal, batch = denoise_goal(masked_share=1.0, span=6), rows(50)
    seen = shown(goal, batch)
    hidden = seen.tokens == MASK
    assert bool((seen.tokens[~hidden] == batch[:, :-1][~hidden]).all())
    assert set(hidden.sum(1).tolist()) == {0, 1, 2, 3, 4, 5}
    assert seen.sight.mask is not None
    logits = Noise().logits(seen.raw, seen.z, seen.sigma)
    after = seen.sight.mask[:, 0].diagonal(1, 1, 2)  # whether position t sees the input after it
    told = torch.nn.functional.pad(after & ~hidden[:, 1:], (0, 1))
    assert 20 < int(told.sum()) < 100
    expected = cross_entropy_of(logits, batch, ~told)
    torch.testing.assert_close(seen.loss, expected)


def cross_entropy_of(logits: Tensor, batch: Tensor, asked: Tensor) -> Tensor:
    logs = logits.log_softmax(-1).gather(-1, batch[:, 1:, None])[..., 0]
    return -logs[asked].mean()


def test_half_of_the_spans_show_nothing_and_the_others_any_share() -> None:
    spans = torch.tensor([[2, 30]] * 4000)
    known = draw_shown(spans, 40, torch.Generator().manual_seed(0))
    assert not bool(known[:, :3].any() or known[:, 30:].any())
    shares = known[:, 3:30].float().mean(1)
    assert float((shares == 0).float().mean()) == pytest.approx(0.5, abs=0.05)
    assert float(shares[shares > 0].mean()) == pytest.approx(0.5, abs=0.05)
    assert not bool(draw_shown(torch.tensor([[5, 5]] * 50), 40, torch.Generator()).any())


@pytest.mark.parametrize("share", [0.0, 0.25, 0.8, 1.0])
def test_the_share_of_masked_rows_follows_the_setting(share: float) -> None:
    random = torch.Generator().manual_seed(0)
    spans = draw_spans(4000, 12, Task(masked_share=share), random)
    found = float((spans[:, 0] < spans[:, 1]).float().mean())
    assert found == pytest.approx(share, abs=0.0 if share in (0, 1) else 0.03)


@given(st.integers(2, 40), st.integers(2, 40), st.integers(0, 2**32))
def test_spans_lie_within_the_row_and_reach_every_length(
    positions: int, span: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    spans = draw_spans(3000, positions, Task(masked_share=1.0, span=span), random)
    start, end = spans[:, 0], spans[:, 1]
    assert int(start.min()) >= 0
    assert int(end.max()) <= positions
    assert set((end - start).tolist()) == set(range(2, min(span, positions) + 1))
    assert int(start.min()) == 0
    assert int(end.max()) == positions


# --- settings and small parts -------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"lookahead": -1},
        {"own_share": 1.1},
        {"own_share": float("nan")},
        {"masked_share": -0.1},
        {"empty_share": 2.0},
        {"span": 1},
    ],
    ids=str,
)
def test_a_task_that_cannot_be(
    wrong: dict[str, float], sentence: Callable[[BaseException], str]
) -> None:
    with pytest.raises(BadConfig) as caught:
        Task(**wrong)  # type: ignore[arg-type]
    assert next(iter(wrong)) in sentence(caught.value)


def test_cross_entropy_is_of_every_next_byte() -> None:
    batch, logits = rows(2), torch.randn(2, 12, 256)
    logs = logits.log_softmax(-1)
    by_hand = [-float(logs[b, t, batch[b, t + 1]]) for b in range(2) for t in range(12)]
    assert float(cross_entropy(logits, batch)) == pytest.approx(sum(by_hand) / 24, abs=1e-5)


def test_keys_are_the_same_on_every_machine_and_differ_in_every_part() -> None:
    assert seed_of(1, 2, 3, 4, 5) == 8_931_086_815_356_491_135
    keys = {seed_of(*parts) for parts in [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3), (3, 2, 1)]}
    assert len(keys) == 5
    assert all(0 <= key < 2**63 for key in keys)
