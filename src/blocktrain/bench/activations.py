"""What the codec of activations costs in CE: rows go through it wherever stages would meet."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blocktrain.inference.choice import logs_of
from blocktrain.inference.layout import equal_parts
from blocktrain.inference.span import Span
from blocktrain.learning.data import Text
from blocktrain.learning.evaluate import windows
from blocktrain.learning.files import read_manifest
from blocktrain.learning.model import START
from blocktrain.terms import Progress, silent
from blocktrain.wire import activations
from blocktrain.wire.serving import Codec

CODECS: tuple[Codec, ...] = ("fp32", "fp16", "int8")


def measure(
    folder: Path, text: Text, stages: int, progress: Progress = silent
) -> list[dict[str, Any]]:
    """CE of a text by each codec, over spans as stages would hold them."""
    blocks = read_manifest(folder).shape.blocks
    spans = [Span.open(folder, *cut) for cut in equal_parts(blocks, min(stages, blocks))]
    rows: list[dict[str, Any]] = []
    for number, codec in enumerate(CODECS):
        nats = 0.0
        for done, cost in through(spans, text, codec):
            nats += cost
            progress(number * len(text) + done, len(CODECS) * len(text))
        ce = nats / len(text)
        size = activations.size(1, spans[0].stream, codec)
        base = rows[0]["ce"] if rows else ce
        rows.append({"codec": codec, "bytes_per_position": size, "ce": ce, "cost": ce - base})
    return rows


def through(spans: Sequence[Span], text: Text, codec: Codec) -> Iterator[tuple[int, float]]:
    """Bytes read so far, and what the next ones cost, in nats."""
    whole = torch.from_numpy(np.concatenate(([START], text)).astype(np.int64))
    done = 0
    for tokens_BT, targets_BT, counted_BT in windows(whole, spans[0].shape.window):
        for tokens_T, targets_T, counted_T in zip(tokens_BT, targets_BT, counted_BT, strict=True):
            tokens = tokens_T.tolist()
            rows = spans[0].step(spans[0].memory(), 0, tokens)
            for span in spans[1:]:
                came = activations.decode(
                    activations.encode(rows, codec), len(tokens), span.stream, codec
                )
                rows = span.step(span.memory(), 0, tokens, came)
            logs = spans[-1].read(rows[counted_T.numpy()])
            done += len(logs)
            yield done, -sum(logs_of(logs, targets_T[counted_T].tolist()))
