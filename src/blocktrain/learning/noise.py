"""The noise of the paper's objective: which block owns which sigma, and how codes are noised.

Letters: V vocabulary, M code width (both 256), s sigma_data. High sigma belongs to the first block.
"""

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from blocktrain.errors import BadConfig

CODES = 256
LEAST_MASS = 1e-6  # of the log-normal law within the range; with less, edges cannot be computed


@dataclass(frozen=True)
class Noise:
    """The noise range, its log-normal partition and EDM preconditioning."""

    sigma_min: float = 1.0
    """Least noise; below 1 the noised target gives the answer away."""
    sigma_max: float = 10.0
    """Most noise."""
    log_mean: float = 1.15
    """Mean of ln sigma."""
    log_std: float = 0.6
    """Spread of ln sigma."""
    overlap: float = 0.1
    """Neighbouring intervals are widened by (hi/lo)^overlap."""
    sigma_data: float = CODES**-0.5
    """Size of one coordinate of a unit code."""
    code_seed: int = 0
    """The frozen target code is made from this."""

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < self.sigma_max < np.inf:
            raise BadConfig(
                f"sigma_min {self.sigma_min} and sigma_max {self.sigma_max} leave no range; "
                "choose 0 < sigma_min < sigma_max."
            )
        if not (self.log_std > 0 and self.sigma_data > 0):
            raise BadConfig("log_std and sigma_data must be above 0.")
        if not (self.overlap >= 0 and self.code_seed >= 0):
            raise BadConfig("overlap and code_seed must be 0 or more.")
        law = NormalDist(self.log_mean, self.log_std)
        if not law.cdf(np.log(self.sigma_max)) - law.cdf(np.log(self.sigma_min)) > LEAST_MASS:
            raise BadConfig(
                f"ln sigma around {self.log_mean} +- {self.log_std} almost never falls between "
                f"sigma_min and sigma_max; choose a log_mean in their range."
            )

    def chain(self, blocks: int) -> list[float]:
        """blocks + 1 sigmas, falling from sigma_max to sigma_min, with equal mass between them."""
        law = NormalDist(self.log_mean, self.log_std)
        low, high = law.cdf(np.log(self.sigma_min)), law.cdf(np.log(self.sigma_max))
        inner = [high + (low - high) * b / blocks for b in range(1, blocks)]
        middle = [float(np.exp(law.inv_cdf(q))) for q in inner]
        return [self.sigma_max, *middle, self.sigma_min]

    def interval(self, block: int, blocks: int) -> tuple[float, float]:
        """The sigmas (low, high) that `block` (from 0) trains on."""
        high, low = self.chain(blocks)[block : block + 2]
        spread = (high / low) ** self.overlap
        return max(low / spread, self.sigma_min), min(high * spread, self.sigma_max)

    def draw(self, count: int, interval: tuple[float, float], random: torch.Generator) -> Tensor:
        """`count` sigmas from the log-normal law cut to the interval."""
        law = NormalDist(self.log_mean, self.log_std)
        low, high = (law.cdf(float(np.log(edge))) for edge in interval)
        q = low + (high - low) * torch.rand(count, generator=random, dtype=torch.float64)
        normal = torch.special.ndtri(q)
        drawn: Tensor = (self.log_mean + self.log_std * normal).exp().clamp(*interval)
        return drawn.float()

    def scale_in(self, z_BTM: Tensor, sigma_B: Tensor) -> Tensor:
        """c_in * z: what the network is shown, of unit size at every sigma."""
        return z_BTM * ((sigma_B**2 + self.sigma_data**2).rsqrt())[:, None, None]

    def logits(self, raw_BTV: Tensor, z_BTM: Tensor, sigma_B: Tensor) -> Tensor:
        """EDM's D = c_skip z + c_out F, read as logits D.E / s^2, where F = s raw E.

        With orthonormal codes c_skip/s^2 is Bayes' factor 1/(sigma^2 + s^2) for what z says alone,
        so z = 0 removes exactly that, and c_out/s is nearly 1 on [1, 10].
        """
        s = self.sigma_data
        variance = (sigma_B**2 + s**2)[:, None, None]
        own = raw_BTV * (sigma_B[:, None, None] * variance.rsqrt())
        return own + z_BTM @ target_code(self.code_seed).to(z_BTM.device).T / variance

    def euler(self, z_BTM: Tensor, logits_BTV: Tensor, sigma: float, sigma_next: float) -> Tensor:
        """One step of the chain towards less noise."""
        denoised_BTM = logits_BTV.softmax(-1) @ target_code(self.code_seed).to(z_BTM.device)
        return z_BTM + (sigma_next - sigma) * (z_BTM - denoised_BTM) / sigma


@lru_cache(maxsize=4)
def target_code(seed: int) -> Tensor:
    """E: 256 orthonormal rows, frozen; nothing to synchronise, and a leak that can be computed."""
    normal = np.random.default_rng(seed).standard_normal((CODES, CODES))
    q, r = np.linalg.qr(normal)
    with torch.inference_mode(False):  # whoever asks first: training uses it too
        return torch.from_numpy((q * np.sign(np.diag(r))).astype(np.float32))


def seed_of(*parts: int) -> int:
    """One seed from several numbers, the same on every machine."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)
