"""Choosing: the model's own distribution, cut by top_p, the same for the same seed and number."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from blocktrain.errors import BadConfig
from blocktrain.inference.choice import Sampling, chosen, gumbel
from blocktrain.wire.serving import Choice

SHARES = np.array([0.3, 0.25, 0.2, 0.1, 0.06, 0.05, 0.03, 0.01])
PINNED = [1.0948122073172224, 0.5665242659773281, -0.026167526526031482]
LIMIT = 24.3  # chi-square of 7 degrees of freedom is above this once in a thousand


def rows(shares: NDArray[np.float64], count: int) -> NDArray[np.float32]:
    """The same log-probabilities again and again; bytes without a share are all but impossible."""
    full = np.full(256, 1e-30)
    full[: len(shares)] = shares
    return np.tile(np.log(full), (count, 1)).astype(np.float32)


def chi_square(drawn: list[int], shares: NDArray[np.float64]) -> float:
    expected = shares * len(drawn)
    return float((((np.bincount(drawn, minlength=8)[:8] - expected) ** 2) / expected).sum())


def test_draws_follow_the_probabilities() -> None:
    along_a_text = chosen(rows(SHARES, 5000), Choice(1, 1, seed=7, at=0))
    across_seeds = [chosen(rows(SHARES, 1), Choice(1, 1, seed, at=3))[0] for seed in range(3000)]
    for drawn in (along_a_text, across_seeds):
        assert max(drawn) < 8
        assert chi_square(drawn, SHARES) < LIMIT
        assert chi_square(drawn, SHARES[::-1]) > LIMIT


def test_temperature_sharpens_as_it_says() -> None:
    drawn = chosen(rows(SHARES, 5000), Choice(0.5, 1, seed=1, at=0))
    sharp = SHARES**2 / (SHARES**2).sum()
    assert chi_square(drawn, sharp) < LIMIT
    assert chi_square(drawn, SHARES) > LIMIT


def test_top_p_keeps_the_likeliest_and_their_proportions() -> None:
    drawn = chosen(rows(SHARES, 4000), Choice(1, 0.6, seed=1, at=0))
    assert set(drawn) == {0, 1, 2}  # 0.55 is not yet 0.6, 0.75 is
    kept = np.array([0.3, 0.25, 0.2]) / 0.75
    counts = np.bincount(drawn)
    assert float(((counts - 4000 * kept) ** 2 / (4000 * kept)).sum()) < 13.8  # 2 degrees
    assert set(chosen(rows(SHARES, 100), Choice(1, 1e-9, seed=1, at=0))) == {0}


def test_top_p_looks_at_each_row_alone() -> None:
    mixed = rows(SHARES, 200)
    mixed[::2] = mixed[::2, ::-1]
    drawn = chosen(mixed, Choice(1, 0.5, seed=1, at=0))
    assert set(drawn[::2]) == {255, 254}
    assert set(drawn[1::2]) == {0, 1}


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-9])
def test_no_temperature_takes_the_likeliest(temperature: float) -> None:
    logs = torch.randn(20, 256, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    assert chosen(logs, Choice(temperature, 0.9, 0, 0)) == logs.argmax(-1).tolist()
    assert chosen(logs[:0], Choice(temperature, 0.9, 0, 0)) == []


def test_a_byte_depends_on_seed_and_number_and_not_on_who_asks_when() -> None:
    logs = torch.randn(30, 256, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    together = chosen(logs, Choice(1, 0.95, seed=5, at=100))
    one_by_one = [chosen(logs[n : n + 1], Choice(1, 0.95, 5, 100 + n))[0] for n in range(30)]
    assert together == one_by_one
    assert together != chosen(logs, Choice(1, 0.95, seed=6, at=100))
    assert together != chosen(logs, Choice(1, 0.95, seed=5, at=101))


def test_noise_is_standard_gumbel_and_pinned() -> None:
    noise = gumbel(seed=2**63 - 1, first=2**40, count=2000)
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.std() - np.pi / 6**0.5) < 0.01
    # the same on every machine and in every version, or seeds would lose their meaning
    assert gumbel(3, 7, 1)[0, :3] == pytest.approx(PINNED, abs=1e-12)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": 101},
        {"top_p": 0},
        {"top_p": 1.1},
        {"seed": -1},
        {"seed": 2**63},
        {"length": -1},
    ],
)
def test_settings_that_make_no_sense(bad: dict[str, float]) -> None:
    with pytest.raises(BadConfig):
        Sampling(**bad)  # type: ignore[arg-type]
