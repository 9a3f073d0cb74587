"""The audit passes honest models, catches leaky ones, and says when it proved nothing."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.errors import BadCorpus
from blocktrain.learning import coding
from blocktrain.learning.audit import (
    AGREE_BITS,
    Audit,
    Loosened,
    Text,
    audit,
    catches_leaks,
    first_and_last_rows,
    is_causal,
    leaky,
    loosen,
    teacher_forced_bits,
    there_and_back,
    unigram_ce,
    unmoved,
)
from blocktrain.learning.model import (
    START,
    Cache,
    Model,
    Objective,
    Shape,
    Sight,
    causal_sight,
    new_block,
)
from blocktrain.learning.noise import Noise
from blocktrain.learning.objective import Denoise, Task

OBJECTIVES: list[Objective] = ["neighbours", "denoise"]
PROSE = b"".join(f"{number} green bottles hang on the wall\n".encode() for number in range(200))
SONG: Text = np.frombuffer(PROSE, np.uint8)
TRAIN, HELD_OUT = SONG[:6000], SONG[6000:6260]


@pytest.fixture(autouse=True)
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many streams of few steps: a step takes as long for 12 streams as for one."""
    monkeypatch.setattr(coding, "STREAM_BYTES", 50)


def fresh(objective: Objective, kind: type[Model] = Model, grams: int = 1) -> Model:
    """Of single bytes: with runs of them this text is found out without a leak, too."""
    shape = Shape(objective, blocks=2, layers=1, width=32, heads=2, window=32, grams=grams)
    return kind(shape, Noise(), [new_block(shape, index, seed=0) for index in range(2)])


def shaken(objective: Objective, kind: type[Model] = Model) -> Model:
    """Random heads and gates: what the model says depends on all that it sees."""
    model = fresh(objective, kind)
    random = torch.Generator().manual_seed(1)
    for block in model.blocks:
        for parameter in block.requires_grad_(False).parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=random))
    return model


@functools.cache
def trained(objective: Objective, kind: type[Model] = Model, grams: int = 1) -> Model:
    """Good enough to lose something when its context is scrambled, or to use what leaks."""
    model = fresh(objective, kind, grams)
    random = np.random.default_rng(0)
    every = [parameter for block in model.blocks for parameter in block.parameters()]
    optimiser = torch.optim.AdamW(every, lr=1e-2)
    losses = [Denoise(index, model.shape, Task(masked_share=0), model.noise) for index in range(2)]
    for step in range(60):
        starts = random.integers(0, len(TRAIN) - 33, 16)
        rows = torch.from_numpy(TRAIN[starts[:, None] + np.arange(33)].astype(np.int64))
        if objective == "denoise" and kind is Model:
            each = zip(losses, model.blocks, strict=True)
            loss = torch.stack([one.loss(block, rows, None, step) for one, block in each]).sum()
        else:
            log_BTV = model.log_probabilities(rows[:, :-1])
            loss = F.nll_loss(log_BTV.flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    for block in model.blocks:
        block.requires_grad_(False)
    return model


class Peeking(Model):
    """Reads the next byte from its own context where that is known: only a decoder cannot."""

    def prefixes(self, tokens_BT: Tensor, cache: Cache | None = None) -> Iterator[Tensor]:
        for log_BTV in super().prefixes(tokens_BT, cache):
            next_BT = F.one_hot(tokens_BT[:, 1:], 256)
            yield (log_BTV + 3 * F.pad(next_BT, (0, 0, 0, 1))).log_softmax(-1)


class Early(Sight):
    """Lets bytes enter one position too early, where the next one is known."""

    def known(self, tokens_BT: Tensor, reach: int) -> Tensor:
        return super().known(tokens_BT.roll(-1, dims=1), reach)


class Hasty(Model):
    """Leaks where bytes enter, not where they attend."""

    def decoder_prefixes(self, tokens_BT: Tensor, sight: Sight) -> Iterator[Tensor]:
        return super().decoder_prefixes(tokens_BT, Early(sight.angles, sight.mask, sight.cache))

    def denoise_chain(self, tokens_BT: Tensor, z_BTM: Tensor, sight: Sight) -> Iterator[Tensor]:
        early = Early(sight.angles, sight.mask, sight.cache)
        return super().denoise_chain(tokens_BT, z_BTM, early)


# --- the whole audit ----------------------------------------------------------------------------


@pytest.mark.parametrize("grams", [1, 6])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_honest_model_passes(objective: Objective, grams: int) -> None:
    seen: list[float] = []
    model = trained(objective, grams=grams)
    found = audit(model, HELD_OUT, progress=lambda done, all_: seen.append(done / all_))
    assert found.failures() == []
    assert found.passed
    assert found.causal
    assert found.positive_control
    assert found.round_trip
    assert found.ce < found.unigram_ce - 0.5
    assert found.scrambled_ce > found.ce + 0.5
    assert found.unigram_ce == unigram_ce(HELD_OUT)
    assert abs(found.code_bits - found.ce_bits) <= AGREE_BITS
    assert seen == sorted(seen)
    assert seen[-1] == 1


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", [Loosened, Hasty, Peeking])
def test_a_leaky_model_fails(objective: Objective, kind: type[Model]) -> None:
    make = shaken if kind is Peeking else trained
    model = make(objective, kind)  # type: ignore[arg-type]  # a class can be hashed
    found = audit(model, HELD_OUT)
    assert not found.passed
    assert not found.causal
    assert found.positive_control
    # What it claims is not what a decoder gets: the code is far longer.
    assert found.code_bits > found.ce_bits + 2 * AGREE_BITS
    assert any("leaks" in sentence for sentence in found.failures())
    assert any("promises" in sentence for sentence in found.failures())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_untrained_model_proves_nothing(objective: Objective) -> None:
    """Heads and gates of zero: whatever leaks in cannot come out."""
    found = audit(fresh(objective), HELD_OUT[:200])
    assert found.causal
    assert not found.positive_control
    assert not found.passed
    assert len(found.failures()) == 1
    assert "proves nothing" in found.failures()[0]


def test_an_audit_repeats() -> None:
    model = trained("neighbours")
    assert audit(model, HELD_OUT[:100], seed=1) == audit(model, HELD_OUT[:100], seed=1)


def test_a_short_text_is_audited_and_none_is_refused() -> None:
    assert audit(trained("neighbours"), HELD_OUT[:20]).passed
    with pytest.raises(BadCorpus):
        audit(trained("neighbours"), HELD_OUT[:0])


GOOD = Audit(
    causal=True,
    positive_control=True,
    scrambled_ce=3.5,
    ce=1.5,
    unigram_ce=3.0,
    code_bits=9040,
    ce_bits=9000,
    round_trip=True,
)


@pytest.mark.parametrize(
    "change",
    [
        {"causal": False},
        {"positive_control": False},
        {"scrambled_ce": 1.59},
        {"scrambled_ce": float("nan")},
        {"ce": 2.99, "scrambled_ce": 2.99},
        {"round_trip": False},
        {"code_bits": 8935.0},
        {"code_bits": 9065.0},
        {"code_bits": float("nan")},
        {"ce_bits": 100_000.0, "code_bits": 100_501.0},
    ],
)
def test_each_failure_is_one_sentence(change: dict[str, float]) -> None:
    found = replace(GOOD, **change)  # type: ignore[arg-type]
    assert not found.passed
    assert len(found.failures()) == 1
    assert found.failures()[0].endswith(".")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"ce": 2.99, "scrambled_ce": 3.0},
        {"ce": 3.1, "scrambled_ce": 3.0},  # nothing to lose
        {"ce_bits": 100_000.0, "code_bits": 100_499.0},
    ],
)
def test_what_is_good_enough_passes(change: dict[str, float]) -> None:
    assert replace(GOOD, **change).passed  # type: ignore[arg-type]


# --- perturbation -------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_prefix_is_causal_and_every_loosened_one_is_caught(objective: Objective) -> None:
    model = shaken(objective)
    batches = first_and_last_rows(model, HELD_OUT[:200])
    assert [batch.shape[1] for batch in batches] == [33]
    assert is_causal(model, batches, seed=0)
    assert catches_leaks(model, batches[0], seed=0)
    assert not is_causal(shaken(objective, Loosened), batches, seed=0)


def test_the_last_batch_of_another_shape_is_checked_too() -> None:
    first, last = first_and_last_rows(shaken("neighbours"), TRAIN)
    assert first.shape == (128, 33)
    assert last.shape[0] < 128
    assert last[-1, -1] == TRAIN[-1]
    assert first[0, 0] == START


def test_the_true_target_is_caught_at_every_sigma() -> None:
    model = fresh("denoise")  # the code of the target goes around the network: no training needed
    [rows] = first_and_last_rows(model, HELD_OUT)
    assert unmoved(lambda changed: leaky(model, changed, 0), rows, seed=0) == [False] * 3


@pytest.mark.parametrize("position", [0, 1, 15, 30, 31])
def test_a_leak_at_one_position_is_caught(position: int) -> None:
    """Every cut matters: the first, the last and those between."""

    def said(rows_BT1: Tensor) -> list[Tensor]:
        logs = torch.zeros(len(rows_BT1), 32, 4)
        logs[:, position, 0] = rows_BT1[:, position + 1].float()
        return [torch.zeros(len(rows_BT1), 32, 4), logs]

    rows = torch.from_numpy(TRAIN[: 16 * 33].reshape(16, 33).astype(np.int64))
    assert unmoved(said, rows, seed=0) == [True, False]


def test_a_single_row_is_cut_at_both_ends_and_between() -> None:
    seen: list[int] = []
    row = torch.zeros(1, 33, dtype=torch.long)

    def said(rows_BT1: Tensor) -> list[Tensor]:
        seen.append(int((rows_BT1 == 0).sum()))
        return [torch.zeros(1, 32, 1)]

    unmoved(said, row, seed=0)
    assert seen == [33, 1, 17, 32]  # bytes that stayed: every later one is another


def test_what_is_not_a_number_is_not_the_same() -> None:
    assert unmoved(
        lambda rows: [torch.full((2, 4, 1), torch.nan)], torch.zeros(2, 5).long(), 0
    ) == [False]


def test_loosening_shows_one_position_more() -> None:
    shape = fresh("neighbours").shape
    plain = loosen(causal_sight(shape, 4), torch.zeros(1, 4)).mask
    assert plain is not None
    assert plain.tolist() == torch.ones(4, 4).tril(1).bool().tolist()
    cached: Sight = loosen(Cache(1, 4).sight(2, shape, torch.device("cpu")), torch.zeros(1, 2))
    assert cached.mask is not None
    assert cached.mask.tolist() == [[True, True, False, False], [True, True, True, False]]


# --- round trip ---------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("length", [1, 32, 33, 49, 151])
def test_code_and_ce_agree_at_every_length(objective: Objective, length: int) -> None:
    """Shorter than a window, as long, longer, and in streams of unequal length."""
    text: Text = SONG[:length]
    model = shaken(objective)
    bits, same = there_and_back(model, text.tobytes())
    assert same
    assert abs(bits - teacher_forced_bits(model, text)) <= AGREE_BITS


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_ce_is_that_of_the_same_contexts(objective: Objective) -> None:
    """Without the coder's rounding and floor the two agree to a hundredth of a bit."""
    model, text = shaken(objective), SONG[:301]
    cut = coding.cut_for(len(text), model.shape)
    apart_ST = cut.apart(text)
    bits: list[float] = []

    def add(step: int, probabilities_SV: coding.Probabilities) -> coding.Bytes:
        column_S = apart_ST[: len(probabilities_SV), step]
        chosen_S = probabilities_SV[np.arange(len(column_S)), column_S]
        bits.extend(-np.log2((chosen_S - coding.FLOOR) / (1 - 256 * coding.FLOOR)))
        return column_S

    coding.walk(model, cut, add)
    assert len(bits) == len(text)
    assert sum(bits) == pytest.approx(teacher_forced_bits(model, text), abs=0.01)


def test_unigram_entropy() -> None:
    assert unigram_ce(np.full(10, 7, np.uint8)) == 0
    assert unigram_ce(np.arange(256, dtype=np.uint8)) == pytest.approx(np.log(256))
