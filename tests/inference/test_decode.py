"""Decoding: three ways to the same text, one way to a whole span, and what they report."""

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import pairwise

import numpy as np
import pytest
import torch

from blocktrain.errors import BadInput
from blocktrain.inference import decode as decoding
from blocktrain.inference.choice import Sampling
from blocktrain.inference.decode import (
    Piece,
    Report,
    ar,
    exact,
    generate,
    speculative,
    whole,
)
from blocktrain.inference.local import LocalSession
from blocktrain.inference.session import Asked, Said, Watch
from blocktrain.inference.span import Span
from blocktrain.learning.model import MASK, START, Model, Objective, Shape
from blocktrain.wire.serving import Choice

MakeModel = Callable[[Shape], Model]
WINDOW = 24
PROMPTS = [b"", b"hello", b"a prompt that is longer than the window of 24"]
WAYS = [exact, speculative]


def drafting_model(alive: MakeModel, objective: Objective, grams: int = Shape.grams) -> Model:
    """Its first block guesses often but not always what the whole says: later ones add little."""
    model = alive(Shape(objective, blocks=3, width=32, heads=2, window=WINDOW, grams=grams))
    for block in model.blocks[1:]:
        block.head.load_state_dict(model.blocks[0].head.state_dict())
        for name, parameter in block.named_parameters():
            if name.endswith(("attention.o.weight", "mlp.down.weight")):
                parameter.mul_(0.1)
    for block in model.blocks:
        block.head.out.weight *= 0.2
    return model


class Recorded(LocalSession):
    """Remembers what was asked."""

    def __init__(self, spans: list[Span]) -> None:
        super().__init__(spans)
        self.asked: list[Asked] = []
        self.emitted: list[tuple[list[int], tuple[int, int], Choice]] = []

    async def step(self, asked: Asked) -> Said:
        self.asked.append(asked)
        return await super().step(asked)

    async def emit(
        self, tokens: list[int], span: tuple[int, int], choice: Choice, watch: Watch | None = None
    ) -> Said:
        self.emitted.append((tokens, span, choice))
        return await super().emit(tokens, span, choice, watch)


def session_over(model: Model) -> Recorded:
    """Every block in a span of its own, as stages would hold them."""
    return Recorded([Span.of(model, index, index) for index in range(model.shape.blocks)])


def all_of(pieces: AsyncIterator[Piece]) -> list[Piece]:
    async def gather() -> list[Piece]:
        return [piece async for piece in pieces]

    return asyncio.run(gather())


def text_of(pieces: list[Piece]) -> bytes:
    return b"".join(piece.bytes for piece in pieces)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_all_ways_give_the_same_text(
    objective: Objective, alive: MakeModel, temperature: float, prompt: bytes
) -> None:
    """Over the window's end, once or several times."""
    model = drafting_model(alive, objective)
    sampling = Sampling(temperature, top_p=0.95, seed=3, length=40)
    plain = all_of(ar(session_over(model), prompt, sampling))
    assert len(plain) == len(text_of(plain)) == 40
    assert bytes(generate(model, prompt, sampling)) == text_of(plain)
    for way in WAYS:
        session = session_over(model)
        pieces = all_of(way(session, prompt, sampling))
        assert text_of(pieces) == text_of(plain)
        logs = [log for piece in pieces for log in piece.logs]
        assert logs == [log for piece in plain for log in piece.logs]
        assert all(
            asked.start + len(asked.tokens) + asked.draft <= WINDOW for asked in session.asked
        )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_save_traversals(alive: MakeModel, temperature: float) -> None:
    model = drafting_model(alive, "neighbours")
    report = Report()
    for piece in all_of(exact(session_over(model), b"hello", Sampling(temperature, length=100))):
        report.add(piece)
    assert report.bytes == 100
    assert report.traversals < 70
    assert 0 < report.right < report.guessed  # some were wrong, or nothing was tested
    assert report.right == report.bytes - report.traversals
    assert report.bytes_per_traversal == 100 / report.traversals


def test_drafted_texts_are_drawn_as_the_model_says(alive: MakeModel) -> None:
    """Each byte's place in the model's own distribution, given those before it, is uniform.

    Checked where drafts are right and where they were corrected (Kolmogorov and Smirnov's
    distance; honest draws exceed this bound once in 10,000 runs, and the seeds are fixed).
    """
    model, temperature, luck = drafting_model(alive, "neighbours"), 0.8, np.random.default_rng(5)
    places: dict[bool, list[float]] = {True: [], False: []}
    session = session_over(model)
    for seed in range(150):
        pieces = all_of(exact(session, b"so", Sampling(temperature, 1.0, seed, 12)))
        tokens = torch.tensor([[START, *b"so", *text_of(pieces)]])
        logs = model.log_probabilities(tokens)[0].detach()
        shares = (logs / temperature).softmax(-1).double().numpy()
        accepted = [n + 1 < len(piece.bytes) for piece in pieces for n in range(len(piece.bytes))]
        for at, (byte, right) in enumerate(zip(text_of(pieces), accepted, strict=True)):
            share = shares[2 + at]
            places[right].append(share[:byte].sum() + luck.random() * share[byte])
    together = sorted(places[True] + places[False])
    assert min(len(places[True]), len(places[False])) > 150
    steps = np.arange(1, len(together) + 1) / len(together)
    distance = max(np.abs(steps - together).max(), np.abs(steps - 1 / len(steps) - together).max())
    assert distance < 2.23 / len(together) ** 0.5


def test_a_whole_model_drafts_without_a_mistake(alive: MakeModel) -> None:
    session = LocalSession(Span.of(drafting_model(alive, "neighbours")))
    pieces = all_of(exact(session, b"hello", Sampling(length=60)))
    assert all(len(piece.bytes) == piece.guessed + 1 for piece in pieces)
    assert len(pieces) < 20


def test_repeated_text_is_guessed(alive: MakeModel) -> None:
    """A greedy tiny model of single bytes soon runs in circles; looking back finds them."""
    model = drafting_model(alive, "neighbours", grams=1)
    pieces = all_of(speculative(session_over(model), b"hello", Sampling(0, length=100)))
    assert sum(piece.guessed for piece in pieces) > 0
    assert len(pieces) < 100


def test_text_is_what_full_passes_give(objective: Objective, alive: MakeModel) -> None:
    """Byte by byte with a cache, beyond the window, against passes without any cache."""
    here = alive(Shape(objective, blocks=2, width=32, heads=2, window=WINDOW))
    text = [START, *b"hello"]
    with torch.no_grad():
        for byte in generate(here, b"hello", Sampling(temperature=0, length=40)):
            logs = here.log_probabilities(torch.tensor([text]))[0, -1]
            assert logs[byte] > logs.max() - 1e-4
            text.append(byte)
            if len(text) == WINDOW + 1:
                text = text[-WINDOW // 2 :]


def test_a_seed_gives_a_text_and_another_seed_another(alive: MakeModel) -> None:
    here = drafting_model(alive, "neighbours")

    def text(seed: int) -> bytes:
        return bytes(generate(here, b"a", Sampling(temperature=1, top_p=1, seed=seed, length=30)))

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(2**63 - 1)


def test_a_longer_text_begins_as_the_shorter(alive: MakeModel) -> None:
    here = drafting_model(alive, "neighbours")
    short, long = (
        text_of(all_of(exact(session_over(here), b"a", Sampling(length=n)))) for n in (7, 50)
    )
    assert len(short) == 7
    assert long.startswith(short)
    assert all_of(exact(session_over(here), b"a", Sampling(length=0))) == []


def test_a_window_of_one_position(alive: MakeModel) -> None:
    here = alive(Shape(blocks=2, width=16, heads=2, window=1))
    texts = [
        text_of(all_of(way(session_over(here), b"xy", Sampling(length=5))))
        for way in (ar, exact, speculative)
    ]
    assert len(texts[0]) == 5
    assert len(set(texts)) == 1


def test_generation_works_inside_an_event_loop(alive: MakeModel) -> None:
    """As in a notebook."""
    here = drafting_model(alive, "neighbours")

    async def inside() -> bytes:
        return bytes(generate(here, b"a", Sampling(length=5)))

    assert asyncio.run(inside()) == bytes(generate(here, b"a", Sampling(length=5)))


def test_a_prompt_longer_than_a_message_is_read_in_parts(
    alive: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, prompt = drafting_model(alive, "neighbours"), bytes(range(50))
    plain = text_of(all_of(ar(session_over(here), prompt, Sampling(length=9))))
    monkeypatch.setattr("blocktrain.inference.decode.MAX_TOKENS", 12)
    monkeypatch.setattr("blocktrain.inference.decode.MAX_DRAFT", 4)
    session = session_over(here)
    pieces = all_of(exact(session, prompt, Sampling(length=9)))
    assert text_of(pieces) == plain
    assert [piece.bytes for piece in pieces[:2]] == [b"", b""]
    assert max(len(asked.tokens) for asked in session.asked) == 8


def test_probabilities_can_be_asked_for(model: Model) -> None:
    session = session_over(model)
    said = asyncio.run(session.step(Asked(0, [1, 2, 3], wanted=2)))
    with torch.no_grad():
        expected = model.log_probabilities(torch.tensor([[1, 2, 3]]))[0, 1:]
    assert said.probabilities is not None
    assert torch.allclose(torch.from_numpy(said.probabilities), expected, atol=1e-4)
    assert said.bytes == []
    assert len(said.hops) == 3
    assert said.seconds >= sum(hop.computed_ms for hop in said.hops) / 1000 > 0
    asyncio.run(session.close())
    with pytest.raises(BadInput, match="missing"):
        asyncio.run(session.step(Asked(3, [4], wanted=1)))


@pytest.mark.parametrize(
    "asked",
    [
        Asked(0, [1, 2], wanted=3, choice=Sampling().choice(0)),
        Asked(0, [1, 2], wanted=1, draft=1),
        Asked(0, [1, 2], wanted=0, draft=1, choice=Sampling().choice(0)),
    ],
)
def test_a_session_refuses_what_cannot_be(model: Model, asked: Asked) -> None:
    with pytest.raises(BadInput):
        asyncio.run(session_over(model).step(asked))


def test_spans_must_be_one_model(model: Model) -> None:
    for spans in ([], [Span.of(model, 0, 1)], [Span.of(model, 1, 2), Span.of(model, 0, 0)]):
        with pytest.raises(BadInput, match="in order"):
            LocalSession(spans)


@pytest.fixture
def denoiser(alive: MakeModel) -> Model:
    return alive(Shape("denoise", blocks=3, width=32, heads=2, window=WINDOW))


def test_a_whole_text_in_one_traversal(denoiser: Model) -> None:
    session, seen = session_over(denoiser), list[tuple[str, list[int]]]()

    def watch(stage: str, some: list[int]) -> None:
        seen.append((stage, some))

    (piece,) = all_of(whole(session, b"hello", 10, Sampling(seed=4), 1, watch))
    assert len(piece.bytes) == len(piece.logs) == 10
    ((tokens, span, choice),) = session.emitted
    assert tokens == [START, *b"hello"] + [MASK] * 9
    assert span == (5, 15)
    assert choice == Sampling(seed=4).choice(0)
    assert [stage[-1] for stage, _ in seen] == ["0", "1", "2"]
    assert bytes(seen[-1][1]) == piece.bytes
    assert seen[0][1] != seen[2][1]


def test_more_traversals_keep_the_surest_and_find_the_rest_again(
    denoiser: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "LUCK", 0.0)
    session = session_over(denoiser)
    pieces = all_of(whole(session, b"hello", 12, Sampling(), 4))
    assert [len(piece.bytes) for piece in pieces] == [0, 0, 0, 12]
    hidden = [tokens.count(MASK) for tokens, _, _ in session.emitted]
    assert hidden[0] == 11
    assert all(0 <= more - less <= 3 for more, less in pairwise(hidden))
    assert hidden[3] < hidden[0] - 6
    final = [START, *b"hello", *pieces[-1].bytes]
    for tokens, _, _ in session.emitted:
        known = [(token, byte) for token, byte in zip(tokens, final, strict=False) if token != MASK]
        assert all(token == byte for token, byte in known)  # what was kept has stayed
    kept = {place - 6 for place, token in enumerate(session.emitted[1][0][6:], 6) if token != MASK}
    logs = pieces[0].said.logs
    others = set(range(12)) - kept
    assert min(logs[n] for n in kept) >= sorted(logs[n] for n in others)[-2]  # the last is no input
    assert len({choice.seed for _, _, choice in session.emitted}) == 4


def test_luck_keeps_others_than_the_surest_at_first(
    denoiser: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(seed: int, luck: float) -> list[int]:
        monkeypatch.setattr(decoding, "LUCK", luck)
        session = session_over(denoiser)
        all_of(whole(session, b"hello", 18, Sampling(seed=seed), 3))
        return [n for n, token in enumerate(session.emitted[1][0]) if token != MASK]

    assert kept(1, 3.0) == kept(1, 3.0)  # a seed gives the same text again
    assert any(kept(seed, 3.0) != kept(seed, 0.0) for seed in range(3))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_what_does_not_fit_comes_span_by_span(denoiser: Model, prompt: bytes) -> None:
    session = session_over(denoiser)
    pieces = all_of(whole(session, prompt, 70, Sampling()))
    text = [START, *prompt]
    for piece, (tokens, (start, end), choice) in zip(pieces, session.emitted, strict=True):
        assert choice.at == len(text) - 1 - len(prompt)
        assert end == len(tokens) <= WINDOW
        known = tokens[: start + 1]
        assert known == text[-len(known) :]
        assert len(known) >= min(len(text), WINDOW // 4)
        text += piece.bytes
    assert len(text) == 1 + len(prompt) + 70
    assert len(pieces) < 6


def test_no_traversal_is_refused(denoiser: Model) -> None:
    with pytest.raises(BadInput):
        all_of(whole(session_over(denoiser), b"", 5, Sampling(), traversals=0))


def test_a_report_adds_up() -> None:
    report = Report()
    assert report.bytes_per_traversal == 0
    prefill = Said([], [], [], seconds=0.5, sent=400, replayed=1)
    report.add(Piece(b"", [], prefill))
    before = report.first_byte_s
    report.add(Piece(b"abc", [], Said([], [], [], seconds=0.25, sent=100), 5))
    assert (report.traversals, report.bytes, report.guessed, report.right) == (2, 3, 5, 2)
    assert (before, report.first_byte_s, report.seconds) == (None, 0.75, 0.75)
    assert (report.sent, report.replays) == (500, 1)
