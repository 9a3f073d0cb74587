"""Readouts beside the headline's: honest, or labelled LEAKY."""

from collections.abc import Callable
from math import log

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from blocktrain.learning import evaluate as evaluation
from blocktrain.learning.evaluate import evaluate
from blocktrain.learning.model import START, Model, Shape, causal_sight, new_block
from blocktrain.learning.noise import Noise
from blocktrain.learning.readouts import other_honest, readouts

MakeModel = Callable[[Shape], Model]
DENOISE = Shape("denoise", blocks=2, width=16, heads=2, window=12, grams=1)


def text_of(length: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, length, dtype=np.uint8)


def untrained(shape: Shape) -> Model:
    return Model(shape, Noise(), [new_block(shape, index, 0) for index in range(shape.blocks)])


def test_leaky_readouts_are_labelled_and_cheaper_at_low_sigma(alive: MakeModel) -> None:
    model = alive(DENOISE)
    text = text_of(60)
    found = readouts(model, text, seed=1)
    assert [(each.name, each.leaky) for each in found] == [
        ("headline: chain from 0, mean of the blocks", False),
        ("chain from 0, last block", False),
        ("chain from noise, 1 draw", False),
        ("chain from noise, 16 draws", False),
        ("first block at sigma_max", False),
        ("true target at sigma 10.00", True),
        (f"true target at sigma {model.noise.chain(2)[1]:.2f}", True),
        ("true target at sigma 1.00", True),
    ]
    assert all(np.isfinite(each.ce) for each in found)
    assert found[0].ce == pytest.approx(evaluate(model, text).ce, abs=1e-6)
    assert found[-1].ce < min(each.ce for each in found if not each.leaky)


def test_even_an_untrained_model_seems_to_know_when_it_is_shown_the_target() -> None:
    """Its noise term is alive even with a head of zeros."""
    found = readouts(untrained(DENOISE), text_of(200), seed=1)
    without_noise = [each.ce for each in (found[0], found[1], found[4])]
    assert without_noise == pytest.approx([log(256)] * 3, abs=1e-4)
    leaky = [each.ce for each in found if each.leaky]
    assert leaky[-1] < log(256) - 0.2
    assert leaky == sorted(leaky, reverse=True)  # the less noise, the more is given away


def test_honest_readouts_follow_their_definitions(alive: MakeModel) -> None:
    model = alive(DENOISE)
    text = text_of(9)
    tokens = torch.tensor([[START, *text[:-1].tolist()]])
    targets = torch.from_numpy(text.astype(np.int64))[None, :, None]
    found = {each.name: each.ce for each in readouts(model, text, seed=1)}
    first = next(iter(model.prefixes(tokens)))
    expected = -float(first.gather(-1, targets).mean())
    assert found["first block at sigma_max"] == pytest.approx(expected, abs=1e-5)


def test_sixteen_draws_are_mixed_as_probabilities(alive: MakeModel) -> None:
    """CE of a mixture is below the mean CE of its parts, and one draw is the first of them."""
    model = alive(DENOISE)
    tokens = torch.tensor([[START, *text_of(11).tolist()]])
    _, one, mixture, _ = other_honest(model, tokens, seed=1)
    torch.testing.assert_close(mixture.exp().sum(-1), torch.ones(1, 12), atol=1e-5, rtol=0)
    random, draws = torch.Generator().manual_seed(1), []
    sight = causal_sight(DENOISE, 12)
    for _ in range(16):
        z = 10.0 * torch.randn(1, 12, 256, generator=random)
        *_, last = model.denoise_chain(tokens, z, sight)
        draws.append(last.softmax(-1))
    torch.testing.assert_close(one.exp(), draws[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(mixture.exp(), torch.stack(draws).mean(0), atol=1e-5, rtol=0)


def test_other_readouts_follow_from_the_seed(alive: MakeModel) -> None:
    model = alive(DENOISE)
    one, again, other = (readouts(model, text_of(40), seed) for seed in (1, 1, 2))
    assert one == again
    assert one[2].ce != other[2].ce
    assert one[-1].ce != other[-1].ce
    assert one[:2] == other[:2]  # starts from nothing: nothing is drawn


def test_their_progress_goes_on_to_the_end(
    alive: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "POSITIONS_AT_ONCE", 24)
    told: list[tuple[int, int]] = []
    readouts(alive(DENOISE), text_of(60), 1, lambda *at: told.append(at))
    assert told == sorted(told)
    assert told[-1] == (120, 120)


def test_a_model_of_one_block_has_all_readouts_too() -> None:
    model = untrained(Shape("denoise", blocks=1, width=16, heads=2, window=12))
    assert len(readouts(model, text_of(20), seed=0)) == 7


def test_heads_are_averaged_as_log_probabilities(alive: MakeModel) -> None:
    model = alive(Shape(blocks=3, width=16, heads=2, window=12))
    text = text_of(9)
    found = {each.name: each.ce for each in readouts(model, text, seed=1)}
    assert list(found) == [
        "headline: last head", "mean of the last 2 heads", "mean of the last 3 heads"
    ]  # fmt: skip
    tokens = torch.tensor([[START, *text[:-1].tolist()]])
    targets = torch.from_numpy(text.astype(np.int64))[None, :, None]
    logs = list(model.prefixes(tokens))
    mixed = (logs[1] + logs[2]).div(2).log_softmax(-1)
    wanted = -float(mixed.gather(-1, targets).mean())
    assert found["headline: last head"] == pytest.approx(evaluate(model, text).ce, abs=1e-6)
    assert found["mean of the last 2 heads"] == pytest.approx(wanted, abs=1e-5)
    one = untrained(Shape(blocks=1, width=16, heads=2, window=12))
    assert [each.name for each in readouts(one, text, seed=0)] == ["headline: last head"]
