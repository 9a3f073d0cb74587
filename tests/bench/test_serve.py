"""`bench serve` through a real gateway with real stages, and what it calls fair."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from blocktrain.bench import serve
from blocktrain.bench.serve import Stream, Trial
from blocktrain.errors import BadInput
from blocktrain.learning.files import save_model
from blocktrain.learning.model import Model, Shape

Sentence = Callable[[BaseException], str]
MakeModel = Callable[[Shape], Model]
TINY = Shape(blocks=3, layers=1, width=16, heads=2, window=64)
TEXT = np.frombuffer(b"The river rises in the hills and flows north to the sea. " * 40, np.uint8)


def test_many_streams_and_none_is_dropped(tmp_path: Path, alive: MakeModel) -> None:
    save_model(alive(TINY), tmp_path / "model")
    trial = Trial(streams=8, length=32)
    found = serve.measure(trial, tmp_path / "model", TEXT, tmp_path / "serving")
    assert found["troubles"] == []
    assert found["dropped"] == 0
    assert found["same_text_alone"] is True
    assert 0 < found["slowest_over_median"] <= 1
    assert 0.125 < found["jain"] <= 1
    assert found["first_byte_ms"] > 0
    assert found["bytes_per_s"] > found["stream_bytes_per_s"]


def test_what_does_not_come_is_told() -> None:
    whole = Stream(0.0, "abcd", [(1.0, 2), (2.0, 4)], generated=4, ended=2.0)
    slow = Stream(0.0, "abcd", [(2.0, 1), (8.0, 4)], generated=4, ended=8.0)
    short = Stream(0.0, "ab", [(1.0, 2)], generated=2, ended=1.0)
    lost = Stream(0.0, trouble="HTTP 503: no route")
    found = serve.summary(Trial(streams=4, length=4), [whole, slow, short, lost], whole)
    assert found["dropped"] == 2
    assert found["troubles"] == ["HTTP 503: no route"]
    assert found["bytes_per_s"] == 1.0
    assert found["slowest_over_median"] == pytest.approx(0.5 / 1.25)
    assert found["least_over_median_at_first_end"] == pytest.approx(1 / 2.5)
    assert found["first_byte_ms"] == 1500
    nothing = serve.summary(Trial(streams=1, length=4), [lost], lost)
    assert nothing["dropped"] == 1
    assert "jain" not in nothing


def test_jains_index() -> None:
    assert serve.jain([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert serve.jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert serve.jain([0.0, 0.0]) == 0


def test_a_trial_that_cannot_be_is_refused(sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        Trial(streams=0)
    sentence(caught.value)
