"""From a prompt to text, byte by byte, on one machine."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from blocktrain.errors import BadConfig
from blocktrain.learning.model import START, Cache, Model


@dataclass(frozen=True)
class Sampling:
    """How the next byte is chosen."""

    temperature: float = 0.8
    """0 always takes the likeliest byte; 1 draws from the model as it is."""
    top_p: float = 0.95
    """Draw only from the likeliest bytes that together have this probability."""
    seed: int = 0
    """The same seed gives the same text."""
    length: int = 512
    """Bytes to generate."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise BadConfig(f"temperature is {self.temperature}; it must be 0 or more.")
        if not 0 < self.top_p <= 1:
            raise BadConfig(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if self.length < 0:
            raise BadConfig(f"length is {self.length}; it must be 0 or more.")


@torch.no_grad()
def generate(model: Model, prompt: bytes, sampling: Sampling) -> Iterator[int]:
    """Yields one byte after another, as the assembled model continues the prompt."""
    random = torch.Generator().manual_seed(sampling.seed)
    window = model.shape.window
    text = [START, *prompt][-window:]
    cache, unread = new_cache(model), text
    for _ in range(sampling.length):
        byte = choose(feed(model, cache, unread), sampling, random)
        yield byte
        text.append(byte)
        unread = [byte]
        if cache.filled == window:  # full: begin again from the newer half
            text = text[-max(1, window // 2) :]
            cache, unread = new_cache(model), text


def rows_at_once() -> int:
    """Query rows come in multiples of this: fewer give other last bits (method.md, section 5)."""
    return 4 * torch.get_num_threads()


def new_cache(model: Model) -> Cache:
    """Room for a window and for the padding of its last rows."""
    return Cache(1, model.shape.window + rows_at_once())


def feed(model: Model, cache: Cache, unread: list[int]) -> Tensor:
    """Log-probabilities of the byte after `unread`, which is added to the cache."""
    before, padding = cache.filled, -len(unread) % rows_at_once()
    tokens = torch.tensor([unread + [START] * padding], device=model.device)
    logs_BTV = model.log_probabilities(tokens, cache)
    cache.filled = before + len(unread)  # the padding will be written over, and nobody sees it
    return logs_BTV[0, len(unread) - 1].cpu()


def choose(logs_V: Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """One byte from log-probabilities."""
    if sampling.temperature == 0:
        return int(logs_V.argmax())
    likely, order = (logs_V / sampling.temperature).softmax(-1).sort(descending=True)
    likely[likely.cumsum(-1) - likely >= sampling.top_p] = 0
    return int(order[torch.multinomial(likely, 1, generator=random)])
