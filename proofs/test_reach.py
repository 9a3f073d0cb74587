"""What the learning core promises, at full size. Slow: `make proofs`, on a quiet machine.

Each proof is the command anyone would type; its last line is checked.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RUNS = Path(__file__).parents[1] / "runs"


def last_line(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "blocktrain", *arguments],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(os.cpu_count(), "cores:", "blocktrain", *arguments, found)
    return found


def test_a_block_step_reaches_most_of_the_gemm_peak() -> None:
    assert last_line("bench", "compute", "--json")["share_of_peak"] >= 0.60


def test_a_worker_needs_less_than_half_of_the_memory() -> None:
    found = last_line("bench", "memory", "--json")
    assert found["parameters_per_block"] >= 100e6
    assert found["neighbours_ratio"] <= 0.45
    assert found["denoise_ratio"] <= 0.34


def test_blocks_learn_nearly_what_the_whole_learns() -> None:
    """In runs/bar, which goes on where it was stopped."""
    found = last_line("lab", "--rounds", "127", "--reference", "--out", str(RUNS / "bar"))
    assert found["ce"] <= 1.45
    assert found["gap"] <= 0.06
    assert found["core_seconds"] <= 40 * 60
    assert found["ce"] < found["ce_shallow"]


def test_the_audit_passes_on_that_model() -> None:
    assert last_line("audit", str(RUNS / "bar"), "--json")["passed"]
