"""The logical model: its count is exact, its layers are the project's own, its stages real."""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.bench import logical, logical_kernel, logical_stage
from blocktrain.bench.hosts import Host
from blocktrain.bench.logical_kernel import Kernel, Matrix
from blocktrain.bench.logical_shape import HEAD_WIDTH, STAGES, Post, Shape, fitted
from blocktrain.bench.logical_stage import Stage
from blocktrain.commands.logical import logical as command
from blocktrain.console import Output
from blocktrain.errors import BadInput, BlockTrainError
from blocktrain.learning import model
from blocktrain.terms import Progress

Sentence = Callable[[BaseException], str]
SMALL = Shape(width=256, hidden=704, layers=6)  # what learning/model.py makes of width 256
POSITIONS = 5
TRIAL = logical.Trial(parameters=2e6, positions=8, rtt_ms=40, mbit=50)
needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need Linux and root"
)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that every matrix here has several, and the last one is shorter."""
    monkeypatch.setattr(logical_kernel, "TILE", 5000)


@pytest.fixture
def stages(small_tiles: None) -> list[Stage]:
    """All three, in this process, without links."""
    return [Stage(Post(SMALL, index, ["-"] * STAGES, POSITIONS, 1)) for index in range(STAGES)]


@pytest.fixture
def reference(stages: list[Stage]) -> list[model.Layer]:
    """Each stage's physical layer as learning/model.py computes it, in fp32."""
    shape = model.Shape(width=SMALL.width, heads=SMALL.width // HEAD_WIDTH)
    assert shape.hidden == SMALL.hidden
    layers = []
    for stage in stages:
        layer, span = model.Layer(shape), stage.span
        q, k, v = span.qkv.weights_NK.chunk(3)
        gate, up = span.gate_up.weights_NK.chunk(2)
        tensors = {
            "attention_norm.weight": span.attention_norm,
            "mlp_norm.weight": span.mlp_norm,
            "attention.q_norm.weight": span.q_norm,
            "attention.k_norm.weight": span.k_norm,
            "attention.q.weight": q,
            "attention.k.weight": k,
            "attention.v.weight": v,
            "attention.o.weight": span.o.weights_NK,
            "mlp.gate.weight": gate,
            "mlp.up.weight": up,
            "mlp.down.weight": span.down.weights_NK,
        }
        layer.load_state_dict(tensors)
        layers.append(layer.requires_grad_(False))
    return layers


def logits(stages: list[Stage], layers: list[model.Layer], tokens: list[int], both: bool) -> Tensor:
    """What the whole model says, by the reference: each physical layer as often as it is read."""
    x_BTD = stages[0].embedding_VD[tokens].float()[None]
    positions = torch.arange(len(tokens))
    seen = torch.ones(len(tokens), len(tokens), dtype=torch.bool)
    sight = model.Sight(
        model.rope_angles(positions, HEAD_WIDTH), mask=seen if both else seen.tril()
    )
    for layer in layers:
        for _ in range(SMALL.layers // STAGES):
            x_BTD = layer(x_BTD, sight)
        x_BTD = x_BTD.half().float()  # as it goes over the wire
    normed = F.rms_norm(x_BTD[0], (SMALL.width,), eps=model.EPSILON)
    return normed @ stages[-1].head.weights_NK.float().t()


def traversal(stages: list[Stage], mode: str, start: int, tokens: list[int]) -> bytes:
    body = stages[0].embed(tokens)
    for stage in stages:
        body = stage.work(mode, start, body)
    return body


def short_of_best(logits_TV: Tensor, chosen: bytes) -> float:
    """How far the chosen bytes are below the best ones, at the most; their spread is about 1."""
    of_chosen_T = logits_TV[range(len(chosen)), list(chosen)]
    return float((logits_TV.max(-1).values - of_chosen_T).max())


@pytest.mark.parametrize("parameters", [1e6, 2e6, 3.3e7, 1e9, 75.8e9, 1e12])
def test_the_shape_has_the_parameters_asked_for(parameters: float) -> None:
    shape = fitted(parameters)
    assert shape.layers % STAGES == 0
    assert abs(shape.parameters / parameters - 1) < (0.06 if parameters < 1e9 else 0.003)
    assert 2 * shape.width <= shape.hidden <= 4 * shape.width


def test_the_papers_shape() -> None:
    shape = fitted(75.8e9)
    assert round(shape.parameters / 1e9, 2) == 75.80
    assert 2 * shape.physical < 3 * 2**30
    assert 2 * shape.layer > 2**29  # no cache holds a layer


def test_the_count_is_what_the_stages_hold(stages: list[Stage]) -> None:
    def held(thing: object) -> int:
        """Parameters of every tensor and matrix, keys and values aside."""
        total = 0
        for name, value in vars(thing).items():
            if isinstance(value, Matrix):
                total += value.weights_NK.numel()
            elif isinstance(value, Tensor) and name != "kept":
                assert value.dtype == torch.float16
                total += value.numel()
        return total

    assert [held(stage.span) for stage in stages] == [SMALL.layer] * STAGES
    assert sum(held(stage) + held(stage.span) for stage in stages) == SMALL.physical
    assert sum(len(stage.span.kept) for stage in stages) == SMALL.layers
    ends = sum(held(stage) for stage in stages)
    assert SMALL.layers * held(stages[0].span) + ends == SMALL.parameters


@pytest.mark.parametrize("positions", [1, 2, 32])
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 300), (1, 17), (256, 4999), (3, 5000)])
def test_a_product_by_tiles_is_the_product(
    small_tiles: None, outputs: int, inputs: int, positions: int
) -> None:
    matrix, x_TK = Matrix(outputs, inputs), torch.randn(positions, inputs)
    expected = x_TK.double() @ matrix.weights_NK.double().t()
    kernel = Kernel(threads=2)
    assert (kernel(x_TK, matrix) - expected).abs().max() < 5e-5  # 5,000 products, float32
    assert min(kernel.spent) > 0


def test_the_direct_product_is_the_product(small_tiles: None) -> None:
    matrix, x_TK = Matrix(70, 300), torch.randn(1, 300)
    expected = x_TK.double() @ matrix.weights_NK.double().t()
    kernel = Kernel(threads=2, upcast=False)
    assert (kernel(x_TK, matrix) - expected).abs().max() < 1e-2
    assert kernel.spent[0] == 0


def test_whole_is_the_projects_own_layers_seeing_both_ways(
    stages: list[Stage], reference: list[model.Layer]
) -> None:
    tokens = [7, model.MASK, 200, model.MASK, 31]
    chosen = traversal(stages, "whole", 0, tokens)
    assert short_of_best(logits(stages, reference, tokens, both=True), chosen) < 0.01
    assert short_of_best(logits(stages, reference, tokens, both=False), chosen) > 0.2


@pytest.mark.parametrize("mode", ["ar", "direct"])
def test_ar_gives_what_a_causal_pass_over_all_positions_gives(
    stages: list[Stage], reference: list[model.Layer], mode: str
) -> None:
    tokens = [model.START]
    for position in range(POSITIONS):
        tokens += traversal(stages, mode, position, tokens[-1:])
    chosen = bytes(tokens[1:])
    assert short_of_best(logits(stages, reference, tokens[:-1], both=False), chosen) < 0.03
    assert short_of_best(logits(stages, reference, tokens[:-1], both=True), chosen) > 0.2


def test_a_stage_refuses_rows_that_cannot_be(stages: list[Stage], sentence: Sentence) -> None:
    row = 2 * SMALL.width
    for start, length in ((0, 0), (0, row - 1), (0, row * (POSITIONS + 1)), (POSITIONS, row)):
        with pytest.raises(BadInput) as caught:
            stages[1].work("ar", start, bytes(length))
        assert "whole rows" in sentence(caught.value)


@needs_root
def test_the_bench_measures_three_hosts_across_a_wan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its progress reaches every layer of every traversal."""
    steps: list[tuple[int, int]] = []
    measure = logical.measure

    def watched(trial: logical.Trial, progress: Progress) -> dict[str, Any]:
        def note(done: int, total: int) -> None:
            steps.append((done, total))
            progress(done, total)

        return measure(trial, note)

    monkeypatch.setattr(logical, "measure", watched)
    command(trial=TRIAL, output=Output(json=True))
    (line,) = capsys.readouterr().out.splitlines()
    found = msgspec.json.decode(line)
    shape = fitted(TRIAL.parameters)
    assert found["parameters"] == shape.parameters
    assert found["parameters_physical"] == shape.physical
    assert found["aliased"] is True
    assert f"its {shape.layers // STAGES} layers" in found["aliasing"]
    head, row = logical_stage.HEAD.size, 2 * shape.width
    assert found["whole_bytes_moved"] == 3 * head + 2 * 8 * row + 8
    assert found["ar_bytes_per_position"] == 3 * head + 2 * row + 1
    way = 3 * TRIAL.rtt_ms / 2000  # three hops of half a round trip
    for seconds in ("whole_seconds", "ar_seconds_per_position", "direct_seconds_per_position"):
        assert way < found[seconds] < way + 2
    assert found["ar_positions_measured"] == 2
    assert found["ar_seconds"] == pytest.approx(8 * found["ar_seconds_per_position"])
    assert found["ratio"] == pytest.approx(found["ar_seconds"] / found["whole_seconds"])
    assert found["ratio"] > 2
    assert 0 < found["ar_upcast_share"] < 1
    assert 100 * 2**20 < found["peak_memory_bytes"] < 4 * 2**30
    assert (found["rtt_ms"], found["mbit"]) == (40, 50)
    total = 5 * shape.layers  # whole, twice ar, twice direct
    assert steps == [(done, total) for done in range(total + 1)]


@needs_root
def test_a_killed_stage_is_told(monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    started: list[psutil.Process] = []

    def start(host: Host, arguments: list[str], **popen: object) -> object:
        process = real(host, arguments, **popen)
        started.append(psutil.Process(process.pid))
        return process

    def strike(done: int, total: int) -> None:
        if done == 1:
            started[1].send_signal(signal.SIGKILL)

    real = Host.start
    monkeypatch.setattr(Host, "start", start)
    # Positions enough that the others cannot be done before the blow.
    trial = replace(TRIAL, positions=200, ar_positions=200)
    with pytest.raises(BlockTrainError) as caught:
        logical.measure(trial, strike)
    assert "Stage" in sentence(caught.value)
    assert not any(process.is_running() for process in started)


def test_what_cannot_be_is_refused(sentence: Sentence, monkeypatch: pytest.MonkeyPatch) -> None:
    for parameters in (0.0, 999.0, 1e14, float("nan"), float("inf")):
        with pytest.raises(BadInput) as caught:
            logical.measure(logical.Trial(parameters))
        assert "choose between" in sentence(caught.value)
    for positions, by_ar in ((0, 0), (8, 0), (8, 9), (5000, 1)):
        with pytest.raises(BadInput) as caught:
            logical.Trial(positions=positions, ar_positions=by_ar)
        assert "cannot be" in sentence(caught.value)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 2**30}))
    with pytest.raises(BadInput) as caught:
        logical.measure(logical.Trial())
    assert "fewer --parameters" in sentence(caught.value)
