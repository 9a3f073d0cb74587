"""What the training network promises, at full size. Slow: `make proofs`, on a quiet machine."""

import pytest
from proofs.test_reach import RUNS, last_line

from blocktrain.learning.model import Shape, new_block


def test_combining_needs_little_memory_and_is_fast() -> None:
    found = last_line("bench", "combine", "--json")
    assert found["memory_in_updates"] <= 2
    assert found["speed_ratio"] >= 0.5
    fp32, int4 = found["rows"]
    assert (fp32["speed_ratio"], int4["codec"]) == (found["speed_ratio"], "int4")
    assert int4["memory_in_updates"] <= 2


@pytest.mark.parametrize("codec", ["int4", "fp32"])  # the default one, and as many bytes of fewer
def test_two_hundred_workers_get_their_receipts(codec: str) -> None:
    found = last_line("bench", "coordinator", "--codec", codec, "--json")
    assert (found["workers"], found["codec"]) == (200, codec)
    assert found["update_bytes"] >= 1e6
    assert found["p99_ms"] <= 1000
    assert found["burst_seconds"] <= 5
    assert found["refused"] == found["burst_refused"] == 0


def test_the_network_costs_little_more_than_the_lab() -> None:
    found = last_line("bench", "network", "--json")
    assert found["ratio"] <= 1.15
    assert found["join_seconds"] <= 10


def test_a_small_codec_costs_next_to_nothing() -> None:
    """In runs/codec-*, which go on where they were stopped."""
    fp32, chosen = (
        last_line("lab", "--codec", name, "--out", str(RUNS / f"codec-{name}"), "--json")["ce"]
        for name in ("fp32", "int4")
    )
    assert chosen - fp32 <= 0.005


def test_six_replicas_learn_nearly_what_one_learns() -> None:
    """By the network: 24 workers. In runs/one and runs/six, which go on where they were stopped;
    the lab's six are a row of docs/results.md."""
    settings = ("--rounds", "107", "--local-steps", "5", "--first-steps", "0", "--json")
    one = last_line("lab", "--batch", "12", "--out", str(RUNS / "one"), *settings)
    six = ("--replicas", "6", "--batch", "2", "--out", str(RUNS / "six"))
    by_network = last_line("train", *six, *settings)
    assert by_network["ce"] - one["ce"] <= 0.026


def test_three_hosts_move_little() -> None:
    """In runs/three-hosts, as `make three-hosts`."""
    shape = Shape(grams=4, gram_rows=1024)
    flags = ["--rounds", "24", "--first-steps", "0", "--grams", "4", "--gram-rows", "1024"]
    found = last_line("bench", "three-hosts", *flags, "--out", str(RUNS / "three-hosts"), "--json")
    assert 5.5 < found["ce_start"] < 5.6
    assert found["ce"] <= 1.811
    assert found["bytes_moved"] <= 152e6
    assert found["rounds"] == 24
    assert found["parameters"] == sum(
        parameter.numel()
        for index in range(shape.blocks)
        for parameter in new_block(shape, index, seed=0).parameters()
    )
    each = found["bytes_moved"] / found["parameters"] / 24
    assert found["bytes_per_parameter_and_round"] == pytest.approx(each)
    # An update up, and at least two deltas down, of half a byte a value: nothing is left out.
    assert 1.5 <= each <= 4
