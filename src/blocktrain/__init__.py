"""BlockTrain: strangers with ordinary machines train and serve one model together.

The public Python surface. Everything else may change between versions.

    model = blocktrain.load("runs/first")          # a model directory
    blocktrain.evaluate(model, b"some text").ce    # nats per byte, honest readout
    "".join(blocktrain.generate(model, "The "))    # text, piece by piece
"""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blocktrain.learning.evaluate import Score
    from blocktrain.learning.model import Model

__all__ = ["evaluate", "generate", "load"]


def load(path: str | Path, device: str = "auto") -> "Model":
    """Opens a model directory: checks every digest, maps the weights, returns the model."""
    from blocktrain.learning import device as devices  # torch is heavy: only when it is needed
    from blocktrain.learning.files import load_model

    return load_model(Path(path), devices.choose(device))


def evaluate(model: "Model", text: bytes) -> "Score":
    """CE over every byte of the text by the honest readout: .ce, .bits_per_byte, .per_block."""
    import numpy as np

    from blocktrain.learning.evaluate import evaluate as measure

    return measure(model, np.frombuffer(text, np.uint8))


def generate(
    model: "Model",
    prompt: str,
    length: int = 512,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> Iterator[str]:
    """Continues the prompt by `length` bytes, yielding text as it comes."""
    from blocktrain.inference import decode

    sampling = decode.Sampling(temperature, top_p, seed, length)
    text = codecs.getincrementaldecoder("utf-8")("replace")
    for byte in decode.generate(model, prompt.encode(), sampling):
        if piece := text.decode(bytes([byte])):
            yield piece
    if rest := text.decode(b"", final=True):
        yield rest
