"""Spans: the same bits however a text and a model are cut, and nothing believed unseen."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.errors import BadInput
from blocktrain.inference.choice import Sampling, chosen
from blocktrain.inference.span import Span
from blocktrain.learning.device import threads
from blocktrain.learning.files import save_model
from blocktrain.learning.model import MASK, START, Model, Objective, Shape, causal_sight
from blocktrain.learning.noise import seed_of
from blocktrain.learning.objective import mask_spans
from blocktrain.terms import Array
from blocktrain.wire.serving import Weights

MakeModel = Callable[[Shape], Model]
CHOICE = Sampling(temperature=0.8).choice(0)


def text_of(length: int) -> list[int]:
    return random.Random(1).choices(range(256), k=length)


def in_steps(span: Span, tokens: list[int], sizes: list[int], rows: Array | None = None) -> Array:
    """The rows of a text that is fed in steps of these sizes."""
    memory, at, out = span.memory(), 0, []
    for size in sizes:
        given = None if rows is None else rows[at : at + size]
        out.append(span.step(memory, at, tokens[at : at + size], given))
        at += size
    assert memory.filled == at == len(tokens)
    return np.concatenate(out)


def some_splits(length: int) -> list[list[int]]:
    """Everything at once, mostly single tokens, and sizes around where kernels change."""
    luck, found = random.Random(2), [[length], [1, 1, 1, length - 3]]
    sizes = list[int]()
    while sum(sizes) < length:
        size = luck.choice([1, 3, 4, 7, 8, 9, 13, 16, 17, 31, 33])
        sizes.append(min(size, length - sum(sizes)))
    return [*found, sizes]


CASES = [
    (weights, count, width, heads)
    for weights in ("fp32", "bf16", "int8")
    for count in (1, 2)
    for width, heads in ((128, 2), (512, 8))
] + [("fp32", 3, 512, 8), ("fp32", 1, 128, 1)]  # threads that share unevenly; a wide head


@pytest.mark.parametrize(("weights", "count", "width", "heads"), CASES)
def test_any_split_into_steps_gives_the_same_bits(
    alive: MakeModel, tmp_path: Path, weights: Weights, count: int, width: int, heads: int
) -> None:
    save_model(alive(Shape(blocks=1, width=width, heads=heads, window=64)), tmp_path)
    tokens = text_of(64)
    with threads(count):
        span = Span.open(tmp_path, 0, 0, weights)
        first, *others = (in_steps(span, tokens, sizes) for sizes in some_splits(64))
        for rows in others:
            assert np.array_equal(rows, first)
        read = span.read(first)
        for at in (0, 1, 30, 63):
            assert torch.equal(span.read(first[at : at + 1])[0], read[at])


@pytest.mark.parametrize("count", [1, 2])
def test_denoise_keeps_the_same_bits_too(alive: MakeModel, count: int) -> None:
    model = alive(Shape("denoise", blocks=2, width=128, heads=2, window=64))
    with threads(count):
        span = Span.of(model)
        first, *others = (in_steps(span, text_of(64), sizes) for sizes in some_splits(64))
        for rows in others:
            assert np.array_equal(rows, first)
            assert torch.equal(span.read(rows), span.read(first))


def test_a_long_window_is_computed_in_parts(alive: MakeModel) -> None:
    span = Span.of(alive(Shape(blocks=1, width=32, heads=2, window=1100)))
    tokens = text_of(1100)
    whole = in_steps(span, tokens, [1100])
    assert np.array_equal(whole, in_steps(span, tokens, [300, 1, 700, 99]))


def test_spans_together_are_the_model(model: Model) -> None:
    """Split into spans: the same bits; against the model as it is trained: nearly so."""
    tokens = text_of(12)
    whole = in_steps(Span.of(model), tokens, [12])
    first, second = Span.of(model, 0, 1), Span.of(model, 2, 2)
    assert second.stream == first.stream == whole.shape[1]
    passed = in_steps(first, tokens, [5, 7])
    assert np.array_equal(in_steps(second, tokens, [1, 11], passed), whole)
    with torch.no_grad():
        prefixes = list(model.prefixes(torch.tensor([tokens])))
    assert torch.allclose(Span.of(model).read(whole), prefixes[2][0], atol=1e-4)
    assert torch.allclose(first.read(passed), prefixes[1][0], atol=1e-4)


def test_only_its_own_files_are_needed(model: Model, tmp_path: Path) -> None:
    manifest = save_model(model, tmp_path)
    for index in (0, 2):
        (tmp_path / manifest.blocks[index].file).unlink()
    span = Span.open(tmp_path, 1, 1)
    assert (span.holding.first, span.holding.last) == (1, 1)
    assert span.holding.model == manifest.digest
    assert not span.begins
    assert not span.ends
    assert "torch" in span.holding.kind
    with pytest.raises(BadInput, match="it has 3"):
        Span.open(tmp_path, 1, 3)


def test_going_back_forgets_what_came_after(model: Model) -> None:
    span, tokens = Span.of(model), text_of(12)
    plain = in_steps(span, tokens, [12])
    memory = span.memory()
    span.step(memory, 0, tokens[:4])
    span.step(memory, 4, [1, 2, 3, 4, 5])  # drafts that turn out wrong
    assert np.array_equal(span.step(memory, 4, tokens[4:]), plain[4:])
    assert np.array_equal(span.step(memory, 0, tokens), plain)  # a new context
    assert span.step(memory, 3, []).shape == (0, span.stream)
    assert memory.filled == 3


@pytest.mark.parametrize("first", [0, 1])
def test_memory_is_what_it_says(alive: MakeModel, objective: Objective, first: int) -> None:
    model = alive(Shape(objective, blocks=2, layers=2, width=32, heads=2, window=24))
    span = Span.of(model, first)
    memory = span.memory()
    span.step(memory, 0, [1], np.zeros((1, span.stream), np.float32) if first else None)
    held = [buffer for pair in memory.cache.buffers.values() for buffer in pair]
    held += [] if memory.cache.tokens is None else [memory.cache.tokens]
    assert sum(buffer.nbytes for buffer in held) == memory.bytes


@pytest.mark.parametrize("wanted", [1, 3])
def test_drafts_are_what_the_first_spans_head_would_choose(
    objective: Objective, alive: MakeModel, wanted: int
) -> None:
    model = alive(Shape(objective, blocks=2, width=32, heads=2, window=24))
    entry, tokens = Span.of(model, 0, 0), text_of(7)
    choice = Sampling(temperature=1).choice(at=40)
    drafted, rows = entry.draft(entry.memory(), 0, tokens, 6, choice, wanted)
    text = list(tokens)
    for number, byte in enumerate(drafted):
        last = in_steps(entry, text, [len(text)])[-1:]
        at = Sampling(temperature=1).choice(40 + wanted - 1 + number)
        assert chosen(entry.read(last), at) == [byte]
        text.append(byte)
    assert np.array_equal(rows, in_steps(entry, text, [len(text)]))
    again, _ = entry.draft(entry.memory(), 0, tokens, 6, choice, wanted + 1)
    assert again != drafted


def test_what_cannot_be_is_refused(model: Model, sentence: Callable[[BaseException], str]) -> None:
    first, second = Span.of(model, 0, 0), Span.of(model, 1, 2)
    memory, rows = first.memory(), np.zeros((2, first.stream), np.float32)
    first.step(memory, 0, [1, 2])
    bad = rows.copy()
    bad[1, 3] = np.nan
    for attempt in (
        lambda: first.step(memory, 3, [1]),
        lambda: first.step(memory, 2, [1] * 11),
        lambda: first.step(memory, 2, [MASK + 1]),
        lambda: first.step(memory, 2, [-1]),
        lambda: first.step(memory, 0, [1, 2], rows),
        lambda: second.step(second.memory(), 0, [1, 2]),
        lambda: second.step(second.memory(), 0, [1, 2], rows[:1]),
        lambda: second.step(second.memory(), 0, [1, 2], rows[:, 1:]),
        lambda: second.step(second.memory(), 0, [1, 2], bad),
        lambda: second.draft(second.memory(), 0, [1], 1, CHOICE, 1),
        lambda: first.draft(memory, 0, [1], 1, CHOICE, 0),
        lambda: first.draft(memory, 0, [1], 12, CHOICE, 1),
        lambda: second.read(np.full((1, second.stream), np.inf, np.float32)),
    ):
        with pytest.raises(BadInput) as caught:
            attempt()
        sentence(caught.value)
    assert memory.filled == 2  # as it was before


@pytest.fixture
def denoiser(alive: MakeModel) -> Model:
    return alive(Shape("denoise", blocks=3, width=32, heads=2, window=24))


def test_a_span_is_found_as_it_was_trained(denoiser: Model) -> None:
    """Against the model's own chain under the training mask, from the same z."""
    known, (start, end) = text_of(20), (5, 14)
    tokens_1T = torch.tensor([known])
    masked, sight = mask_spans(
        tokens_1T, torch.tensor([[start, end]]), causal_sight(denoiser.shape, 20)
    )
    asked = masked[0].tolist()
    assert asked.count(MASK) == end - start - 1
    entry, rest = Span.of(denoiser, 0, 0), Span.of(denoiser, 1, 2)
    z, seen, _ = entry.emit(asked, (start, end), CHOICE)
    final, made, logs = rest.emit(asked, (start, end), CHOICE, z)
    assert len(seen) == len(made) == len(logs) == end - start
    again = Span.of(denoiser).emit(asked, (start, end), CHOICE)
    assert np.array_equal(again[0], final)
    assert again[1:] == (made, logs)
    z_1TM = torch.zeros(1, 20, 256)
    drawn = torch.Generator().manual_seed(seed_of(CHOICE.seed, CHOICE.at))
    z_1TM[0, start:end] = 10 * torch.randn(end - start, 256, generator=drawn)
    with torch.no_grad():
        *_, logits = denoiser.denoise_chain(masked, z_1TM, sight)
    expected = logits[0, start:end].log_softmax(-1)
    assert chosen(expected, CHOICE) == made
    assert torch.tensor(logs) == pytest.approx(
        expected[torch.arange(9), torch.tensor(made)], abs=1e-3
    )


def test_known_bytes_inside_a_span_are_seen_and_the_seed_matters(denoiser: Model) -> None:
    span, hidden = Span.of(denoiser), [START, 65, MASK, MASK, MASK, MASK]
    plain = span.emit(hidden, (1, 6), CHOICE)
    assert span.emit(hidden, (1, 6), CHOICE)[2] == plain[2]
    helped = span.emit([START, 65, MASK, MASK, 66, MASK], (1, 6), CHOICE)
    assert helped[2][0] != plain[2][0]  # the first position looks ahead
    greedy = Sampling(temperature=0)
    one, other = (
        span.emit(hidden, (1, 6), c)
        for c in (greedy.choice(0), Sampling(temperature=0, seed=1).choice(0))
    )
    assert not np.array_equal(one[0], other[0])


@pytest.mark.parametrize(
    ("tokens", "place"),
    [
        ([START, 65, MASK, MASK], (2, 4)),  # position 2 should be known
        ([START, 65, MASK, MASK], (1, 3)),  # position 3 should be known
        ([START, 65, MASK, MASK], (1, 5)),
        ([START, 65, MASK, MASK], (1, 1)),
        ([START] * 25, (1, 25)),
        ([START, 300], (0, 2)),
    ],
)
def test_spans_that_cannot_be(denoiser: Model, tokens: list[int], place: tuple[int, int]) -> None:
    with pytest.raises(BadInput):
        Span.of(denoiser).emit(tokens, place, CHOICE)


def test_neighbours_find_no_span(alive: MakeModel) -> None:
    span = Span.of(alive(Shape(blocks=1, width=16, heads=2, window=12)))
    with pytest.raises(BadInput, match="use exact"):
        span.emit([START, 65], (0, 2), CHOICE)
