"""What a survey counts is what decoding then does, traversal for traversal."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from blocktrain.errors import BadInput
from blocktrain.inference import decode, survey
from blocktrain.inference.choice import Sampling
from blocktrain.inference.drafting import Lookup
from blocktrain.inference.local import LocalSession
from blocktrain.inference.session import Said
from blocktrain.inference.span import Span
from blocktrain.inference.survey import Question, Reach
from blocktrain.learning.files import save_model
from blocktrain.learning.model import Model, Shape
from blocktrain.wire.serving import MAX_DRAFT

Sentence = Callable[[BaseException], str]
MakeModel = Callable[[Shape], Model]
TINY = Shape(blocks=3, layers=1, width=16, heads=2, window=48)
SMALL = Path(__file__).parents[2] / "models" / "small"
PROMPT = b" The river rises in the hills of the north and flows to the sea . The river"


@dataclass
class Fixed:
    """Guesses the same number every time: of the first stage's bytes, or of the lookup's."""

    count: int
    lookup: Lookup | None = None

    def ask(self, longest: int) -> tuple[list[int], int]:
        count = min(self.count, longest)
        return (self.lookup.guess(count), 0) if self.lookup else ([], count)

    def learn(self, said: Said, tokens: int, guessed: int, made: list[int]) -> None:
        if self.lookup:
            self.lookup.add(bytes(made))


@pytest.fixture
def folder(tmp_path: Path, alive: MakeModel, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model; surveys are kept beside it."""
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    save_model(alive(TINY), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.usefixtures("folder")
def test_counted_traversals_are_those_of_decoding(temperature: float) -> None:
    """With a trained model, whose drafts are worth something."""
    spans = [Span.open(SMALL, 0, 1), Span.open(SMALL, 2, 3)]
    sampling = Sampling(temperature, 1.0, seed=0, length=255 - len(PROMPT))
    reach = survey.reach(SMALL, Question(2, temperature, [PROMPT]))
    for count in (1, 4):
        for counted, lookup in ((reach.exact, None), (reach.speculative, Lookup(PROMPT))):
            guesser = Fixed(count, lookup)
            pieces = decode.verified(LocalSession(spans), PROMPT, sampling, guesser)
            traversals = len(list(decode.at_once(pieces)))
            assert counted[count] == pytest.approx(sampling.length / traversals)
    assert reach.exact[4] > reach.exact[1] > 1.3
    assert reach.exact[0] == reach.speculative[0] == 1


def test_an_answer_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question = Question(1, 0.8, [PROMPT])
    first = survey.reach(folder, question)
    (kept,) = (folder.parent / "cache" / "surveys").iterdir()
    changed = Reach([9.0], [8.0])
    kept.write_bytes(msgspec.json.encode(changed))
    assert survey.reach(folder, question) == changed
    assert survey.reach(folder, Question(1, 0.7, [PROMPT])) != changed
    kept.write_bytes(b"{")
    assert survey.reach(folder, question) == first


def test_yields_by_hand() -> None:
    """A guess reaches two bytes from place 0 on, one from place 1, none from place 2, and so on."""
    found = survey.yields([[2, 1, 0, 3, 2, 1, 0]])
    assert found[0] == 1
    assert found[1] == 7 / 4  # 0 and 1, 2, 3 and 4, 5 and 6
    assert found[2] == 7 / 3  # 0 to 2, 3 to 5, 6
    assert found[3] == found[MAX_DRAFT] == 7 / 2  # 0 to 2, 3 to 6


def test_speed_is_of_a_machine(folder: Path) -> None:
    for first, last in ((0, 1), (2, 2), (0, 2)):
        found = survey.speed(folder, first, last)
        assert 0 < found.position <= found.step < 1


def test_prompts_are_spread_over_a_text(sentence: Sentence) -> None:
    text = np.frombuffer(bytes(range(200)), np.uint8)
    assert survey.prompts(text, 2, 10) == [bytes(range(45, 55)), bytes(range(145, 155))]
    for count, size in ((0, 5), (4, 0), (4, 51)):
        with pytest.raises(BadInput) as caught:
            survey.prompts(text, count, size)
        sentence(caught.value)
