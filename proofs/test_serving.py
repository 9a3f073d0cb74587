"""What the serving network promises, at full size. Slow and for root: `make proofs`."""

import subprocess

import pytest
from proofs.test_reach import RUNS, last_line

from blocktrain.wire.serving import USUAL


@pytest.fixture(scope="module", autouse=True)
def whole() -> None:
    """The model for `whole`, if it is not there: 13 core-minutes."""
    if not (RUNS / "whole" / "manifest.json").exists():
        subprocess.run(["make", "whole"], cwd=RUNS.parent, check=True)


def test_exact_beats_its_baselines_over_a_wan() -> None:
    """In runs/wan, which goes on where it was stopped."""
    found = last_line("bench", "wan", "--json")
    far = [row for row in found["rows"] if (row["rtt_ms"], row["mbit"]) == (100, 100)]
    sampled = {row["mode"]: row for row in far if row["temperature"] == 0.8}
    exact, speculative = sampled["exact"], sampled["speculative"]
    assert exact["times_ar"] >= 3.5
    assert exact["bytes_per_s"] >= 1.3 * speculative["bytes_per_s"]
    [at_once] = [
        row
        for row in far
        if (row["mode"], row["temperature"], row["traversals"]) == ("whole", 0.8, 1)
    ]
    assert at_once["times_ar"] >= 50
    for row in found["rows"]:
        assert row["identical"] in (True, None)
        assert 0.5 < row["bytes_per_s"] / row["planned_bytes_per_s"] < 2
    assert found["verdict"]


def test_a_killed_stage_costs_little_beyond_the_lost_work() -> None:
    found = last_line("bench", "failover", "--json")
    assert (found["rtt_ms"], found["same_text"]) == (100, True)
    killed = {(row["mode"], row["stage"]): row for row in found["rows"] if row["how"] == "killed"}
    assert {*killed} == {(mode, n) for mode in ("ar", "exact", "whole") for n in (1, 2, 3)}
    for row in killed.values():
        assert row["replays"] >= 1
        assert row["extra_s"] <= 2.0


def test_stages_cost_little_over_one_process() -> None:
    assert last_line("bench", "stages", "--json")["ratio"] <= 1.15


def test_sixty_four_streams_are_served_alike() -> None:
    found = last_line("bench", "serve", "--json")
    assert (found["streams"], found["dropped"]) == (64, 0)
    assert found["jain"] >= 0.95
    assert found["same_text_alone"]
    assert found["bytes_per_s"] >= 0.9 * found["alone_bytes_per_s"]


def test_activations_lose_nothing() -> None:
    for model in ([], ["--model", str(RUNS / "whole"), "--sample", "16384"]):
        rows = last_line("bench", "activations", *model, "--json")["rows"]
        assert {row["codec"]: row["cost"] for row in rows}[USUAL] <= 0.002


def test_many_logical_parameters_in_one_traversal() -> None:
    found = last_line("bench", "logical", "--parameters", "75.8e9", "--json")
    assert found["parameters"] >= 75.7e9
    assert found["ratio"] >= 4
    assert found["aliased"]
    assert found["peak_memory_bytes"] <= 24 * 2**30
