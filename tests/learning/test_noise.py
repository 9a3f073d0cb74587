"""The noise of the paper's objective: who owns which sigma, and EDM's identities."""

from itertools import pairwise
from math import log, sqrt
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blocktrain.errors import BadConfig
from blocktrain.learning.noise import CODES, Noise, target_code

PLAIN = Noise()

sigma_ranges = st.tuples(st.floats(0.05, 5.0), st.floats(1.2, 50.0)).map(
    lambda pair: (pair[0], pair[0] * pair[1])
)


@st.composite
def noises(draw: st.DrawFn) -> Noise:
    """Any sensible noise: the law has its middle in the range."""
    low, high = draw(sigma_ranges)
    middle = log(low) + draw(st.floats(0.1, 0.9)) * (log(high) - log(low))
    return Noise(
        sigma_min=low,
        sigma_max=high,
        log_mean=middle,
        log_std=draw(st.floats(0.2, 2.0)),
        overlap=draw(st.floats(0.0, 0.5)),
    )


def mass(noise: Noise, low: float, high: float) -> float:
    law = NormalDist(noise.log_mean, noise.log_std)
    return law.cdf(log(high)) - law.cdf(log(low))


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


# --- the partition ------------------------------------------------------------------------------


def test_the_edges_of_one_to_ten() -> None:
    found = [round(sigma, 2) for sigma in reversed(PLAIN.chain(4))]
    assert found == [1, 2.16, 3.16, 4.62, 10]


@given(noises(), st.integers(1, 12))
def test_the_chain_falls_from_most_to_least_in_steps_of_equal_mass(
    noise: Noise, blocks: int
) -> None:
    chain = noise.chain(blocks)
    assert len(chain) == blocks + 1
    assert (chain[0], chain[-1]) == (noise.sigma_max, noise.sigma_min)
    whole = mass(noise, noise.sigma_min, noise.sigma_max)
    for high, low in pairwise(chain):
        assert low < high
        assert mass(noise, low, high) == pytest.approx(whole / blocks, rel=1e-6, abs=1e-9)


@given(noises(), st.integers(1, 12))
def test_high_sigma_belongs_to_the_first_block(noise: Noise, blocks: int) -> None:
    intervals = [noise.interval(block, blocks) for block in range(blocks)]
    assert intervals[0][1] == noise.sigma_max
    assert intervals[-1][0] == noise.sigma_min
    plain = [PLAIN.interval(block, blocks) for block in range(blocks)]
    assert plain == sorted(plain, reverse=True)


@given(noises(), st.integers(2, 12))
def test_intervals_overlap_by_the_setting_and_stay_in_range(noise: Noise, blocks: int) -> None:
    chain = noise.chain(blocks)
    for block in range(blocks):
        low, high = noise.interval(block, blocks)
        spread = (chain[block] / chain[block + 1]) ** noise.overlap
        assert noise.sigma_min <= low <= chain[block + 1] < chain[block] <= high <= noise.sigma_max
        assert low == pytest.approx(max(chain[block + 1] / spread, noise.sigma_min))
        assert high == pytest.approx(min(chain[block] * spread, noise.sigma_max))


def test_overlap_is_turned() -> None:
    bare = Noise(overlap=0.0)
    assert [bare.interval(b, 4)[0] for b in range(4)] == bare.chain(4)[1:]
    (first_low, _), (_, second_high) = PLAIN.interval(0, 4), PLAIN.interval(1, 4)
    assert first_low < PLAIN.chain(4)[1] < second_high


# --- draws --------------------------------------------------------------------------------------


@given(noises(), st.integers(1, 6), st.integers(0, 2**32))
def test_draws_lie_in_their_interval(noise: Noise, blocks: int, seed: int) -> None:
    for block in range(blocks):
        low, high = noise.interval(block, blocks)
        drawn = noise.draw(64, (low, high), torch.Generator().manual_seed(seed))
        assert drawn.dtype == torch.float32
        assert float(drawn.min()) >= low * (1 - 1e-7)
        assert float(drawn.max()) <= high * (1 + 1e-7)


def kolmogorov_smirnov(drawn: Tensor, noise: Noise, interval: tuple[float, float]) -> float:
    """Largest distance between what was drawn and the cut log-normal law, in units of chance."""
    whole = mass(noise, *interval)
    expected = torch.tensor(
        [mass(noise, interval[0], s) / whole for s in drawn.sort().values.tolist()]
    )
    count = len(drawn)
    above = torch.arange(1, count + 1) / count - expected
    return float(torch.maximum(above, 1 / count - above).max()) * sqrt(count)


@pytest.mark.parametrize("block", range(4))
def test_draws_follow_the_cut_log_normal_law(block: int) -> None:
    interval = PLAIN.interval(block, 4)
    drawn = PLAIN.draw(10_000, interval, torch.Generator().manual_seed(block))
    assert kolmogorov_smirnov(drawn, PLAIN, interval) < 1.63  # 1 % of honest draws are beyond
    low, high = interval
    uniform = low + (high - low) * torch.rand(10_000, generator=torch.Generator().manual_seed(1))
    assert kolmogorov_smirnov(uniform, PLAIN, interval) > 1.63  # the test can fail


# --- codes --------------------------------------------------------------------------------------


def test_code_rows_are_orthonormal() -> None:
    code = target_code(0)
    assert code.shape == (CODES, CODES)
    torch.testing.assert_close(code @ code.T, torch.eye(CODES), atol=1e-5, rtol=0)


def test_the_code_follows_from_its_seed() -> None:
    before = target_code(0).clone()
    target_code.cache_clear()
    assert torch.equal(target_code(0), before)
    assert not torch.equal(target_code(1), before)
    assert target_code(0).mean().abs() < 0.01  # rotated, not the identity


# --- EDM ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [PLAIN, Noise(sigma_data=0.5, code_seed=3)])
@pytest.mark.parametrize("sigma", [1.0, 3.16, 10.0])
def test_logits_are_edms_denoiser_read_by_the_code(noise: Noise, sigma: float) -> None:
    s, code = noise.sigma_data, target_code(noise.code_seed)
    raw, z = normal(2, 3, CODES, seed=1), 3 * normal(2, 3, CODES, seed=2)
    c_skip = s**2 / (sigma**2 + s**2)
    c_out = sigma * s / sqrt(sigma**2 + s**2)
    denoised = c_skip * z + c_out * (s * raw @ code)
    found = noise.logits(raw, z, torch.full((2,), sigma))
    torch.testing.assert_close(found, denoised @ code.T / s**2, atol=1e-3, rtol=1e-4)


def test_with_no_z_the_network_speaks_alone() -> None:
    raw, sigma = normal(2, 3, CODES), torch.tensor([1.0, 10.0])
    found = PLAIN.logits(raw, torch.zeros(2, 3, CODES), sigma)
    factor = sigma / (sigma**2 + PLAIN.sigma_data**2).sqrt()
    torch.testing.assert_close(found, raw * factor[:, None, None])
    assert float((1 - factor).abs().max()) < 0.01


def test_each_row_has_its_own_sigma() -> None:
    raw, z, sigma = normal(3, 2, CODES), normal(3, 2, CODES, seed=1), torch.tensor([1.0, 2.0, 9.0])
    for row in range(3):
        one = slice(row, row + 1)
        together, alone = (
            PLAIN.logits(raw, z, sigma)[one],
            PLAIN.logits(raw[one], z[one], sigma[one]),
        )
        torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-6)
        assert torch.equal(PLAIN.scale_in(z, sigma)[one], PLAIN.scale_in(z[one], sigma[one]))


@pytest.mark.parametrize("sigma", [1.0, 10.0])
def test_the_network_is_shown_unit_size_at_every_sigma(sigma: float) -> None:
    z = target_code(0)[torch.arange(256)][None] + sigma * normal(1, 256, CODES)
    shown = PLAIN.scale_in(z, torch.tensor([sigma]))
    assert float(shown.square().mean()) == pytest.approx(1.0, abs=0.02)


def test_an_euler_step_to_no_noise_with_a_perfect_denoiser_lands_on_the_code() -> None:
    targets = torch.tensor([[3, 200, 0]])
    code = target_code(0)[targets]
    certain = 100.0 * torch.nn.functional.one_hot(targets, CODES)
    z = code + 4.0 * normal(1, 3, CODES)
    torch.testing.assert_close(PLAIN.euler(z, certain, 4.0, 0.0), code, atol=1e-5, rtol=0)


def test_a_chain_of_perfect_denoisers_shrinks_the_noise_to_sigma_min() -> None:
    targets = torch.tensor([[3, 200, 0]])
    code, noise = target_code(0)[targets], normal(1, 3, CODES)
    certain = 100.0 * torch.nn.functional.one_hot(targets, CODES)
    z = code + PLAIN.sigma_max * noise
    for sigma, following in pairwise(PLAIN.chain(4)):
        z = PLAIN.euler(z, certain, sigma, following)
    torch.testing.assert_close(z, code + PLAIN.sigma_min * noise, atol=1e-5, rtol=0)


def test_an_euler_step_follows_the_formula() -> None:
    z, logits = normal(1, 2, CODES), normal(1, 2, CODES, seed=1)
    denoised = logits.softmax(-1) @ target_code(0)
    expected = z + (2.0 - 5.0) * (z - denoised) / 5.0
    torch.testing.assert_close(PLAIN.euler(z, logits, 5.0, 2.0), expected)


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"sigma_min": 0.0},
        {"sigma_min": -1.0},
        {"sigma_min": 10.0},
        {"sigma_max": 0.5},
        {"sigma_max": float("nan")},
        {"sigma_max": float("inf")},
        {"log_std": 0.0},
        {"log_std": -1.0},
        {"log_std": float("nan")},
        {"log_mean": 50.0},
        {"log_mean": float("nan")},
        {"overlap": -0.1},
        {"sigma_data": 0.0},
        {"code_seed": -1},
        {"sigma_min": 1e3, "sigma_max": 1e4},
    ],
    ids=str,
)
def test_noise_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(BadConfig):
        Noise(**wrong)  # type: ignore[arg-type]


def test_a_code_that_was_first_asked_for_while_serving_can_be_trained_with() -> None:
    target_code.cache_clear()
    with torch.inference_mode():
        target_code(5)
    logits = torch.zeros(2, 256, requires_grad=True)
    (logits @ target_code(5)).sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
