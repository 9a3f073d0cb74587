"""The lab: one process, the network's rules."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from blocktrain.aggregation.combine import Averaging
from blocktrain.errors import BadConfig
from blocktrain.learning.data import Corpus, open_corpus
from blocktrain.learning.evaluate import evaluate
from blocktrain.learning.files import load_model
from blocktrain.learning.model import Shape
from blocktrain.learning.objective import Task
from blocktrain.learning.optimiser import Rates
from blocktrain.services.hardship import Hardship
from blocktrain.services.lab import Lab, Watch, experiment
from blocktrain.services.run import Pace, Run
from blocktrain.services.standings import Standings, save
from blocktrain.terms import Parameters

SMALL = Run(
    shape=Shape(blocks=3, layers=1, width=32, heads=2, window=32),
    pace=Pace(rounds=4, local_steps=3, batch=4),
    averaging=Averaging(steady=0.5),
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A text with something to learn: words in a fixed order with random gaps."""
    random = np.random.default_rng(0)
    words = ["one ", "two ", "three ", "four\n", "five, ", "six. "]
    text = "".join(words[i % 6] + " " * int(random.integers(0, 2)) for i in range(12_000))
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text(text)
    return open_corpus(str(path))


def lab(run: Run, corpus: Corpus, folder: Path, **more: object) -> Lab:
    return Lab(run, corpus, folder, CPU, **more)  # type: ignore[arg-type]


def same(a: Parameters, b: Parameters) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def equal(a: Standings, b: Standings) -> bool:
    return all(
        same(x.snapshot, y.snapshot) and same(x.steady, y.steady)
        for x, y in zip(a.blocks, b.blocks, strict=True)
    )


def test_a_run_is_a_function_of_its_settings(corpus: Corpus, tmp_path: Path) -> None:
    _, one = lab(SMALL, corpus, tmp_path / "1", at_once=1).train()
    _, two = lab(SMALL, corpus, tmp_path / "2", at_once=2).train()
    assert equal(one, two)
    _, other = lab(replace(SMALL, pace=replace(SMALL.pace, seed=1)), corpus, tmp_path / "3").train()
    assert not equal(one, other)


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_upstream_may_be_computed_once_for_all(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    run = replace(SMALL, pace=replace(SMALL.pace, replicas=replicas, rounds=2))
    assert lab(run, corpus, tmp_path / "shared").shares_streams(1)
    _, shared = lab(run, corpus, tmp_path / "shared").train()
    monkeypatch.setattr("blocktrain.services.lab.STREAMS_AT_ONCE", 0)
    assert not lab(run, corpus, tmp_path / "own").shares_streams(1)
    _, own = lab(run, corpus, tmp_path / "own").train()
    assert equal(shared, own)


def test_an_interrupted_run_goes_on_bit_for_bit(corpus: Corpus, tmp_path: Path) -> None:
    _, whole = lab(SMALL, corpus, tmp_path / "whole").train()

    def interrupt(done: int, total: int) -> None:
        if done == SMALL.pace.steps.before(3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab(SMALL, corpus, tmp_path / "cut", watch=Watch(steps=interrupt)).train()
    resumed = lab(SMALL, corpus, tmp_path / "cut")
    assert resumed.resume().round == 2
    _, rest = resumed.train()
    assert equal(whole, rest)
    assert rest.history[-1]["ce_sample"] == whole.history[-1]["ce_sample"]


def test_another_run_in_the_same_folder_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    lab(SMALL, corpus, tmp_path).train()
    other = replace(SMALL, rates=Rates(matrix=0.03))
    with pytest.raises(BadConfig, match="other settings"):
        lab(other, corpus, tmp_path).train()


def test_neighbours_are_the_steady_blocks_of_the_round_before(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Changing a neighbour's snapshot must not move a block; changing its steady must."""
    here = lab(SMALL, corpus, tmp_path)
    now = here.advance(here.beginning())
    plain = here.advance(now)
    shifted = {name: value + 0.1 for name, value in now.blocks[1].steady.items()}

    other_snapshot = replace_block(now, 1, snapshot=shifted)
    assert same(here.advance(other_snapshot).blocks[0].snapshot, plain.blocks[0].snapshot)
    assert same(here.advance(other_snapshot).blocks[2].snapshot, plain.blocks[2].snapshot)
    other_steady = replace_block(now, 1, steady=shifted)
    assert not same(here.advance(other_steady).blocks[0].snapshot, plain.blocks[0].snapshot)
    assert not same(here.advance(other_steady).blocks[2].snapshot, plain.blocks[2].snapshot)
    assert same(here.advance(other_steady).blocks[1].snapshot, plain.blocks[1].snapshot)


def replace_block(now: Standings, index: int, **parts: object) -> Standings:
    blocks = list(now.blocks)
    blocks[index] = replace(blocks[index], **parts)  # type: ignore[arg-type]
    return replace(now, blocks=blocks)


def test_replicas_go_further_each() -> None:
    four = replace(SMALL, pace=replace(SMALL.pace, replicas=4)).recipe.rates
    assert (
        four
        == SMALL.rates.shared_by(4)
        == replace(SMALL.rates, matrix=2 * SMALL.rates.matrix, other=2 * SMALL.rates.other)
    )


def test_replicas_share_one_round(corpus: Corpus, tmp_path: Path) -> None:
    """Two replicas with half the batch see the bytes of one, and end near it."""
    two = replace(SMALL, pace=replace(SMALL.pace, replicas=2, batch=2))
    here = lab(two, corpus, tmp_path)
    one = lab(SMALL, corpus, tmp_path)
    rows = [np.concatenate(pair) for pair in zip(*(
        [rows for rows, _ in here.batches(slot, 1)] for slot in range(2)
    ), strict=True)]  # fmt: skip
    assert all(np.array_equal(a, b) for a, (b, _) in zip(rows, one.batches(0, 1), strict=True))
    first = here.advance(here.beginning())
    assert set(first.optimisers) == {(block, slot) for block in range(3) for slot in range(2)}
    assert two.bytes_per_step == SMALL.bytes_per_step


def test_outer_momentum_survives_a_restart(corpus: Corpus, tmp_path: Path) -> None:
    run = replace(SMALL, averaging=Averaging(outer_rate=0.7, outer_momentum=0.9))
    here = lab(run, corpus, tmp_path)
    now = here.advance(here.advance(here.beginning()))
    save(now, here.folder, here.identity)
    assert equal(here.advance(here.resume()), here.advance(now))
    assert now.blocks[0].momentum is not None


def test_a_run_stopped_in_its_first_round_is_saved(corpus: Corpus, tmp_path: Path) -> None:
    here = lab(SMALL, corpus, tmp_path)
    save(here.beginning(), here.folder, here.identity)
    assert equal(here.advance(here.resume()), here.advance(here.beginning()))


def test_the_reference_is_the_same_code_with_one_deep_block(corpus: Corpus) -> None:
    deep = SMALL.end_to_end(3)
    assert (deep.shape.blocks, deep.shape.layers) == (1, 3)
    assert deep.bytes_after(4) == SMALL.bytes_after(4)
    two = replace(SMALL, pace=replace(SMALL.pace, replicas=2, batch=2)).end_to_end(3)
    assert (two.pace.replicas, two.pace.batch) == (1, 4)


@pytest.mark.parametrize("objective", ["neighbours", "denoise"])
def test_an_experiment_learns_and_reports(
    corpus: Corpus, tmp_path: Path, objective: Literal["neighbours", "denoise"]
) -> None:
    shape = replace(SMALL.shape, objective=objective, blocks=2)
    run = replace(
        SMALL,
        shape=shape,
        task=Task(lookahead=1, masked_share=0.2, span=8),
        pace=Pace(rounds=10, local_steps=3, first_steps=0, batch=8),
    )
    here = lab(run, corpus, tmp_path, at_once=1)  # else the reference's second thread only spins
    result = experiment(here, with_reference=True)
    assert result.ce < 2.5  # ln 256 = 5.5 at the start
    assert result.ce_reference is not None
    assert result.ce_shallow is not None
    assert result.gap == pytest.approx(result.ce - result.ce_reference)
    assert result.bytes_seen == 10 * 3 * 8 * 32
    assert len(result.per_block) == 2
    again = load_model(tmp_path)
    assert evaluate(again, corpus.test).ce == pytest.approx(result.ce, abs=1e-6)
    assert (tmp_path / "reference" / "history.jsonl").read_text().count("\n") == 10


FOR_EVER = """
# Trains for ever in a process of its own for every line; says its pid, its rounds, and its death.
import os, sys, torch, torch._dynamo
from pathlib import Path
from blocktrain.learning.data import open_corpus
from blocktrain.learning.model import Shape
from blocktrain.services import lab
from blocktrain.services.run import Pace, Run
from blocktrain.services.standings import Standings, save
from blocktrain.services.hardship import Hardship
lab.SAVE_EVERY = 0.0
shape = Shape(blocks=2, width=32, heads=2, window=32)
pace = Pace(rounds=100_000, local_steps=1, batch=1)
for line in sys.stdin:
    if child := os.fork():
        os.waitpid(child, 0)
        print("dead", flush=True)
        continue
    torch.set_num_threads(1)
    print(os.getpid(), flush=True)
    watch = lab.Watch(steps=lambda done, total: print(done, flush=True), notes=1)
    run, text = Run(shape=shape, pace=pace), open_corpus(sys.argv[1])
    lab.Lab(run, text, Path(sys.argv[2]), torch.device("cpu"), watch).train()
"""


def test_kill_minus_nine_loses_no_saved_round(corpus: Corpus, tmp_path: Path) -> None:
    """A real process, killed at several instants while it saves after every round."""
    text = tmp_path / "words.txt"
    text.write_bytes(bytes(np.concatenate([corpus.train, corpus.valid, corpus.test])))
    command = [sys.executable, "-c", FOR_EVER, str(text), str(tmp_path / "out")]
    reached = 0
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for delay in (0.05, 0.13, 0.21):
            print(file=parent.stdin, flush=True)
            child = int(parent.stdout.readline())
            began_at = int(parent.stdout.readline())
            assert began_at >= reached
            while (seen := int(parent.stdout.readline())) < began_at + 3:
                pass
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
            while (line := parent.stdout.readline()) != "dead\n":
                assert line
            saved = json.loads((tmp_path / "out" / "state.json").read_text())
            assert saved["round"] >= seen - 1
            reached = saved["round"]


# --- hardship ------------------------------------------------------------------------------------


def test_late_updates_are_lost_or_salvaged(corpus: Corpus, tmp_path: Path) -> None:
    run = replace(SMALL, pace=replace(SMALL.pace, replicas=2, batch=2))

    def after(rounds: int, name: str, **hardship: float) -> Standings:
        now = (one := lab(run, corpus, tmp_path / name, hardship=Hardship(**hardship))).resume()
        for _ in range(rounds):
            now = one.advance(now)
        return now

    first, plain = after(0, "first"), after(1, "plain")
    lost, salvaged = after(1, "lost", missed=1), after(1, "salvaged", missed=1, salvaged=0.5)
    assert equal(lost, first)
    assert equal(salvaged, first)
    assert not equal(plain, first)
    assert equal(after(2, "lost", missed=1), first)
    # Who is refused goes on from the optimiser and the residual of before.
    assert not any(lost.optimisers.values())
    assert not lost.residuals
    assert not lost.late
    assert plain.residuals
    assert all(salvaged.optimisers.values())
    # All of round 1 comes in round 2, at half its size.
    half, whole = after(2, "salvaged", missed=1, salvaged=0.5), plain
    for kept, begun, wanted in zip(half.blocks, first.blocks, whole.blocks, strict=True):
        for name, value in kept.snapshot.items():
            step = (wanted.snapshot[name] - begun.snapshot[name]) / 2
            np.testing.assert_allclose(value, begun.snapshot[name] + step, atol=1e-3)


def test_a_run_with_trouble_goes_on_bit_for_bit_and_is_another_run(
    corpus: Corpus, tmp_path: Path
) -> None:
    hardship = Hardship(missed=0.5, salvaged=0.5, slowest=3)
    run = replace(SMALL, pace=replace(SMALL.pace, replicas=2, batch=2))
    _, whole = lab(run, corpus, tmp_path / "whole", hardship=hardship).train()

    def interrupt(done: int, total: int) -> None:
        if done == run.pace.steps.before(3):
            raise KeyboardInterrupt

    cut = lab(run, corpus, tmp_path / "cut", hardship=hardship, watch=Watch(steps=interrupt))
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    resumed = replace(cut, watch=Watch())
    assert resumed.resume().late
    assert equal(resumed.train()[1], whole)
    with pytest.raises(BadConfig, match="other settings"):
        lab(run, corpus, tmp_path / "cut").train()


def test_a_stop_while_a_sample_is_measured_loses_no_point(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is done again: its CE is what rates are chosen by, and FLOPs counted to."""
    last = SMALL.pace.rounds
    cut = lab(SMALL, corpus, tmp_path / "cut")
    measured = Lab.measured

    def interrupted(self: Lab, now: Standings) -> Standings:
        if now.round == last:
            raise KeyboardInterrupt
        return measured(self, now)

    _, whole = lab(SMALL, corpus, tmp_path / "whole").train()
    with monkeypatch.context() as patch:
        patch.setattr(Lab, "measured", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cut.train()
    assert cut.resume().round == last - 1
    path = tmp_path / "cut" / "history.jsonl"  # as kill -9 between two files leaves it
    path.write_text(path.read_text() + json.dumps({"round": last}) + "\n")
    _, now = cut.train()
    assert equal(now, whole)
    told = [[(row["round"], row["ce_sample"]) for row in one.history] for one in (now, whole)]
    assert told[0] == told[1]


def test_a_round_is_kept_before_it_is_told(corpus: Corpus, tmp_path: Path) -> None:
    def interrupt(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    cut = lab(SMALL, corpus, tmp_path, watch=Watch(noted=interrupt))
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    kept = cut.resume()
    assert (kept.round, kept.history[-1]["round"]) == (2, 2)


def test_a_sample_is_measured_as_often_as_told(corpus: Corpus, tmp_path: Path) -> None:
    for notes, rounds in ((1, [4]), (2, [2, 4])):
        here = lab(SMALL, corpus, tmp_path / str(notes), watch=Watch(notes=notes))
        assert [row["round"] for row in here.train()[1].history] == rounds
    with pytest.raises(BadConfig, match="notes is 0; it must be at least 1"):
        Watch(notes=0)


def test_slow_workers_make_fewer_steps() -> None:
    hardship = Hardship(slowest=8)
    assert [hardship.steps(20, slot, 4) for slot in range(4)] == [20, 10, 5, 2]
    assert hardship.steps(20, 0, 1) == 20
    late = [Hardship(missed=0.3).is_late(0, number, 1, 2) for number in range(1000)]
    assert 250 < sum(late) < 350
    for bad in ({"missed": 1.1}, {"salvaged": -0.1}, {"slowest": 0.5}):
        with pytest.raises(BadConfig):
            Hardship(**bad)
