"""Generation: what the cache computes is what the model says."""

from collections.abc import Callable

import pytest
import torch

from blocktrain.errors import BadConfig
from blocktrain.inference.decode import Sampling, choose, feed, generate, new_cache
from blocktrain.learning.model import START, Model, Objective, Shape


@pytest.fixture
def here(alive: Callable[[Shape], Model]) -> Model:
    return alive(Shape(blocks=2, width=32, heads=2, window=24))


def test_greedy_text_is_what_full_passes_give(
    objective: Objective, alive: Callable[[Shape], Model]
) -> None:
    """Byte by byte with a cache, beyond the window, against passes without any cache."""
    here = alive(Shape(objective, blocks=2, width=32, heads=2, window=24))
    made = list(generate(here, b"hello", Sampling(temperature=0, length=40)))
    text = [START, *b"hello"]
    with torch.no_grad():
        for byte in made:
            logs = here.log_probabilities(torch.tensor([text]))[0, -1]
            best = logs.max()
            assert logs[byte] > best - 1e-4
            text.append(byte)
            if len(text) == 24 + 1:
                text = text[-12:]


def test_a_seed_gives_a_text_and_another_seed_another(here: Model) -> None:
    def text(seed: int) -> list[int]:
        return list(generate(here, b"a", Sampling(temperature=1, top_p=1, seed=seed, length=30)))

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_a_prompt_longer_than_the_window_keeps_its_end(here: Model) -> None:
    greedy = Sampling(temperature=0, length=5)
    assert list(generate(here, b"x" * 100 + b"tail " * 6, greedy)) == list(
        generate(here, b"y" * 50 + b"tail " * 6, greedy)
    )


def test_top_p_keeps_only_the_likeliest() -> None:
    logs = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    random = torch.Generator().manual_seed(0)
    drawn = [choose(logs, Sampling(temperature=1, top_p=0.6), random) for _ in range(200)]
    assert set(drawn) == {0, 1}
    everything = [choose(logs, Sampling(temperature=1, top_p=1), random) for _ in range(400)]
    assert set(everything) == {0, 1, 2, 3}


def test_temperature_sharpens() -> None:
    logs = torch.tensor([0.5, 0.3, 0.2]).log()
    random = torch.Generator().manual_seed(0)

    def share(temperature: float) -> float:
        drawn = [choose(logs, Sampling(temperature, 1.0), random) for _ in range(500)]
        return drawn.count(0) / 500

    assert share(0.2) > 0.85 > share(1.0) > 0.4


def test_padding_rows_change_nothing(here: Model) -> None:
    with torch.no_grad():
        cache = new_cache(here)
        feed(here, cache, [START, 1, 2])
        step = feed(here, cache, [3])
        assert cache.filled == 4
        full = here.log_probabilities(torch.tensor([[START, 1, 2, 3]]))[0, -1]
    assert torch.allclose(step, full, atol=1e-4)


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"length": -1}])
def test_settings_that_make_no_sense(bad: dict[str, float]) -> None:
    with pytest.raises(BadConfig):
        Sampling(**bad)  # type: ignore[arg-type]
