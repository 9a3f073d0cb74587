"""Honest CE: every byte once, with context, and nothing but context."""

from collections.abc import Callable
from math import log

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.errors import BadCorpus
from blocktrain.learning import evaluate as module
from blocktrain.learning.evaluate import (
    Score,
    cross_entropies,
    evaluate,
    honest,
    windows,
)
from blocktrain.learning.model import START, Model, Shape, new_block
from blocktrain.learning.noise import Noise

MakeModel = Callable[[Shape], Model]
CPU = torch.device("cpu")


def text_of(length: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def untrained(shape: Shape) -> Model:
    return Model(shape, Noise(), [new_block(shape, index, 0) for index in range(shape.blocks)])


# --- windows ------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(1, 64))
def test_every_byte_counts_once_with_half_a_window_of_context(length: int, window: int) -> None:
    whole = torch.arange(length + 1)  # every token says where it lies
    counted: list[int] = []
    for tokens, targets, counts in windows(whole, window):
        assert tokens.shape == targets.shape == counts.shape
        assert tokens.shape[1] == min(window, length)
        assert torch.equal(targets, tokens + 1)
        for row in range(len(tokens)):
            for at in counts[row].nonzero()[:, 0].tolist():
                target = int(targets[row, at])
                context = at + 1
                assert context >= min(target, (window + 1) // 2)
                counted.append(target)
    assert sorted(counted) == list(range(1, length + 1))


def test_rows_go_through_the_model_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(500)
    together = [tokens.shape for tokens, _, _ in windows(whole, 16)]
    monkeypatch.setattr(module, "POSITIONS_AT_ONCE", 40)
    apart = [tokens.shape for tokens, _, _ in windows(whole, 16)]
    assert len(together) == 1
    assert {rows for rows, _ in apart[:-1]} == {2}
    assert sum(rows for rows, _ in apart) == together[0][0]


# --- CE -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 11, 12, 13, 100])
def test_a_model_that_knows_nothing_costs_ln_256(shape: Shape, length: int) -> None:
    score = evaluate(untrained(shape), text_of(length))
    assert score.ce == pytest.approx(log(256), abs=1e-5)
    assert score.per_block == pytest.approx([log(256)] * 3, abs=1e-5)
    assert score.bytes == length
    assert score.bits_per_byte == pytest.approx(8.0, abs=1e-5)


def test_a_text_shorter_than_a_window_is_one_pass_after_a_newline(model: Model) -> None:
    text = text_of(7)
    tokens = torch.tensor([[START, *text[:-1].tolist()]])
    targets = torch.from_numpy(text.astype(np.int64))[None, :, None]
    expected = [-float(logs.gather(-1, targets).mean()) for logs in model.prefixes(tokens)]
    score = evaluate(model, text)
    assert score.per_block == pytest.approx(expected, abs=1e-5)
    assert score.ce == score.per_block[-1]


def test_a_longer_text_is_scored_byte_by_byte_as_by_hand(model: Model) -> None:
    """Windows of 12, half of each new: positions 0-11, then the last 6 of each next window."""
    text = text_of(30)
    whole = torch.tensor([START, *text.tolist()])
    nats = []
    for first, new in ((0, 0), (6, 6), (12, 6), (18, 6)):
        logs = model.log_probabilities(whole[None, first : first + 12])[0]
        nats += [-float(logs[at, whole[first + at + 1]]) for at in range(new, 12)]
    assert len(nats) == 30
    assert evaluate(model, text).ce == pytest.approx(sum(nats) / 30, abs=1e-5)


def test_how_many_rows_go_at_once_does_not_matter(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_of(100)
    together = evaluate(model, text)
    monkeypatch.setattr(module, "POSITIONS_AT_ONCE", 1)
    assert evaluate(model, text).per_block == pytest.approx(together.per_block, abs=1e-5)


def test_an_empty_text(model: Model) -> None:
    with pytest.raises(BadCorpus, match="empty"):
        evaluate(model, text_of(0))


def test_progress_is_told_to_the_end(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POSITIONS_AT_ONCE", 24)
    told: list[tuple[int, int]] = []
    evaluate(model, text_of(100), lambda done, total: told.append((done, total)))
    assert told[-1] == (100, 100)
    assert len(told) > 2
    assert told == sorted(told)


def test_no_gradients_are_kept(shape: Shape) -> None:
    model = untrained(shape)
    assert all(p.requires_grad for p in model.blocks[0].parameters())
    seen: list[bool] = []

    def readout(tokens: Tensor) -> list[Tensor]:
        logs = list(model.prefixes(tokens))
        seen.append(logs[-1].requires_grad)
        return logs

    cross_entropies(readout, text_of(20), 12, CPU)
    assert seen == [False]


def test_bits_are_nats_over_ln_2() -> None:
    assert Score(log(2) * 3, 10, []).bits_per_byte == pytest.approx(3.0)


# --- what a readout is given --------------------------------------------------------------------


def test_a_readout_is_given_context_and_nothing_else() -> None:
    """All that ever reaches it is a tensor of bytes, each row without its last target."""
    text = text_of(40)
    given_rows: list[list[int]] = []

    def readout(*given: object) -> list[Tensor]:
        (tokens,) = given
        assert isinstance(tokens, Tensor)
        given_rows.extend(tokens.tolist())
        return [torch.full((*tokens.shape, 256), -log(256))]

    assert cross_entropies(readout, text, 16, CPU) == pytest.approx([log(256)])
    whole = [START, *text.tolist()]
    assert given_rows == [whole[first : first + 16] for first in (0, 8, 16, 24)]
    assert len(whole) - 1 == 24 + 16  # the last byte of all was in no row


def test_changing_the_future_changes_no_earlier_distribution(model: Model) -> None:
    text = text_of(20)
    other = text.copy()
    other[10:] += 1

    def seen(which: NDArray[np.uint8]) -> list[Tensor]:
        kept: list[Tensor] = []

        def readout(tokens: Tensor) -> list[Tensor]:
            logs = list(honest(model)(tokens))
            kept.extend(logs)
            return logs

        cross_entropies(readout, which, 20, CPU)
        return kept

    for before, after in zip(seen(text), seen(other), strict=True):
        assert torch.equal(before[:, :11], after[:, :11])  # byte 10 is still predicted alike
        assert not torch.equal(before[:, 11], after[:, 11])


def test_each_readout_gets_its_own_ce() -> None:
    """One is certain and right, one knows nothing, one says 1/2 to the right byte."""
    text = np.tile(np.arange(64, dtype=np.uint8), 4)

    def readout(tokens: Tensor) -> list[Tensor]:
        following = (tokens + 1) % 64
        right = torch.nn.functional.one_hot(following, 256).float()
        half = 0.5 * right + 0.5 / 255 * (1 - right)
        return [(right + 1e-30).log(), torch.full_like(right, 1 / 256).log(), half.log()]

    certain, nothing, half = cross_entropies(readout, text, 16, CPU)
    first = -log(1e-30) / 256  # only the byte after START is not as the rule says
    assert certain == pytest.approx(first, rel=1e-3)
    assert nothing == pytest.approx(log(256), abs=1e-6)
    assert half == pytest.approx((255 * log(2) + log(510)) / 256, abs=1e-5)
