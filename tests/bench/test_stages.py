"""Stages against one process, and codecs of activations, at tiny shapes; the judge's arithmetic."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.bench import activations, judge, stages
from blocktrain.bench.judge import Quality, Sample
from blocktrain.errors import BadInput
from blocktrain.inference.layout import equal_parts
from blocktrain.inference.survey import prompts
from blocktrain.learning.evaluate import evaluate
from blocktrain.learning.files import save_model
from blocktrain.learning.model import Model, Shape

Sentence = Callable[[BaseException], str]
MakeModel = Callable[[Shape], Model]
TINY = Shape(blocks=4, layers=1, width=16, heads=2, window=32)
TEXT = np.frombuffer(b"The river rises in the hills and flows north to the sea. " * 9, np.uint8)


def test_three_stages_and_one_process_do_the_same_work(tmp_path: Path) -> None:
    """With fp32 rows the last log-probability is compared to the last bit on the way."""
    trial = stages.Trial(width=32, layers=4, positions=24, repeats=3, codec="fp32")
    found = stages.measure(trial, tmp_path)
    assert found["stages"] == 3
    assert 0 < found["one_process_ms"] < found["stages_ms"] < 5000
    assert found["ratio"] > 1


def test_a_trial_that_cannot_be_is_refused(sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        stages.Trial(layers=2)
    sentence(caught.value)
    with pytest.raises(BadInput):
        stages.Trial(repeats=0)


def test_codecs_cost_what_their_rounding_does(tmp_path: Path, alive: MakeModel) -> None:
    model = alive(TINY)
    save_model(model, tmp_path)
    rows = activations.measure(tmp_path, TEXT[:200], stages=3)
    assert [row["codec"] for row in rows] == ["fp32", "fp16", "int8"]
    assert [row["bytes_per_position"] for row in rows] == [64, 32, 20]
    assert rows[0]["ce"] == pytest.approx(evaluate(model, TEXT[:200]).ce, abs=1e-5)
    assert rows[0]["cost"] == 0
    assert 0 < abs(rows[1]["cost"]) < 0.002
    assert abs(rows[1]["cost"]) < abs(rows[2]["cost"]) < 0.1


def test_parts_are_equal_and_the_longer_ones_come_first() -> None:
    assert equal_parts(4, 3) == [(0, 1), (2, 2), (3, 3)]
    assert equal_parts(8, 3) == [(0, 2), (3, 5), (6, 7)]
    assert equal_parts(3, 3) == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(BadInput):
        equal_parts(2, 3)


def test_prompts_are_spread_over_a_text(sentence: Sentence) -> None:
    found = prompts(TEXT, 4, 20)
    assert len(set(found)) == 4
    places = [TEXT.tobytes().index(each) for each in found]
    assert all(len(each) == 20 for each in found)
    assert places[0] > 0
    for count, size in ((0, 5), (4, 0), (4, len(TEXT) // 4 + 1)):
        with pytest.raises(BadInput) as caught:
            prompts(TEXT, count, size)
        sentence(caught.value)


# --- the judge ------------------------------------------------------------------------------------


def test_the_judge_counts_generated_bytes_only_and_each_once(alive: MakeModel) -> None:
    model = alive(TINY)
    prompt, text = TEXT[:20].tobytes(), TEXT[20:100].tobytes()
    everything = judge.quality(model, [Sample(b"", prompt + text)])
    whole_ce = evaluate(model, TEXT[:100]).ce
    assert everything.judge_ce == pytest.approx(whole_ce, abs=1e-5)
    # Short enough for one window: each byte's cost by hand.
    short = Sample(b"The ri", b"ver rises")
    tokens = torch.tensor([[10, *short.prompt, *short.text]])
    with torch.no_grad():
        logs = model.log_probabilities(tokens[:, :-1])[0]
    nats = -sum(float(logs[6 + n, byte]) for n, byte in enumerate(short.text))
    assert judge.quality(model, [short]).judge_ce == pytest.approx(nats / 9, abs=1e-5)
    both = judge.quality(model, [short, Sample(prompt, text)])
    parts = judge.nats_by(model, short) + judge.nats_by(model, Sample(prompt, text))
    assert both.judge_ce == pytest.approx(parts / 89, abs=1e-6)
    assert both.bytes == 89


def test_distinct_and_entropy() -> None:
    assert judge.distinct([b"aaaa"], 2) == pytest.approx(1 / 3)
    assert judge.distinct([b"abcd"], 2) == 1
    assert judge.distinct([b"abab", b"ab"], 2) == pytest.approx(2 / 4)
    assert judge.distinct([b"a"], 2) == 0
    assert judge.entropy([b"abab"]) == pytest.approx(1)
    assert judge.entropy([b"aaaa"]) == 0
    assert judge.entropy([bytes(range(256))]) == pytest.approx(math.log2(256))


def test_a_text_stands_beside_another_if_it_is_as_good_and_as_varied() -> None:
    ar = Quality(1.0, [0.2, 0.4, 0.6], 4.0, 1000)
    assert Quality(1.29, [0.19, 0.37, 0.55], 4.0, 1000).stands_beside(ar)
    assert not Quality(1.31, [0.19, 0.37, 0.55], 4.0, 1000).stands_beside(ar)
    assert not Quality(0.5, [0.19, 0.35, 0.55], 4.0, 1000).stands_beside(ar)


def test_nothing_cannot_be_judged(alive: MakeModel, sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        judge.quality(alive(TINY), [Sample(b"prompt", b"")])
    sentence(caught.value)
