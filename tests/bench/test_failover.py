"""`bench failover` on a tiny network: real hosts, real deaths; and what its rows say."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from blocktrain.bench import failover
from blocktrain.bench.failover import Trial
from blocktrain.bench.failover_driver import Case, How, Hurt, Plain
from blocktrain.bench.wan_driver import Job
from blocktrain.commands import serving_bench
from blocktrain.console import Output
from blocktrain.errors import BadInput
from blocktrain.learning.files import save_model
from blocktrain.learning.model import Model, Shape
from blocktrain.terms import Digest

Sentence = Callable[[BaseException], str]
MakeModel = Callable[[Shape], Model]
SHAPE = Shape(blocks=3, layers=1, width=16, heads=2, window=64)


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need Linux and root"
)
def test_a_text_outlives_a_stage_on_another_host(
    tmp_path: Path, alive: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(alive(SHAPE), tmp_path / "model")
    (tmp_path / "text").write_bytes(b"The river rises in the hills and flows to the sea.\n" * 999)
    trial = Trial(rtt=8.0, mbit=50.0, length=24, modes=("exact",), hows=("killed",), stages=(2,))
    serving_bench.failover(
        model=tmp_path / "model", data=f"{tmp_path / 'text'}", trial=trial, output=Output(json=True)
    )
    found = json.loads(capsys.readouterr().out)
    (row,) = found["rows"]
    assert (row["mode"], row["how"], row["stage"]) == ("exact", "killed", 2)
    assert row["same_text"] is found["same_text"] is True
    assert row["replays"] >= 1
    assert row["stalled_s"] > 0.016  # as long as a traversal needs
    assert row["undisturbed_s"] > 4 * 0.016
    assert row["lost_s"] == row["wasted_s"] + row["again_s"]
    assert found["killed_extra_s"] == row["extra_s"] < 5
    assert "silent_extra_s" not in found


# --- the table ------------------------------------------------------------------------------------

JOB = Job("ar", 0.8, 0, 0, 4, Digest(""))


def hurt(how: How, stalled: float, text: bytes = b"abcd") -> Hurt:
    return Hurt(Case(JOB, how, 2), text, 10 + stalled, replays=1, wasted=0.25, stalled=stalled)


def test_extra_is_what_is_left_of_the_stalled_traversal() -> None:
    plain = Plain(JOB, b"abcd", 10.0, traversal=0.25, again=0.5)
    rows = [failover.row(plain, hurt("killed", 1.5)), failover.row(plain, hurt("silent", 3.25))]
    assert (rows[0]["stage"], rows[0]["same_text"], rows[0]["replays"]) == (3, True, 1)
    assert [row["delay_s"] for row in rows] == [1.5, 3.25]
    assert [row["lost_s"] for row in rows] == [0.75, 0.75]
    assert [row["extra_s"] for row in rows] == [0.5, 2.25]
    found = failover.summary(Trial(rtt=7), rows)
    assert (found["killed_extra_s"], found["silent_extra_s"], found["rtt_ms"]) == (0.5, 2.25, 7)
    assert found["same_text"] is True


def test_another_text_is_told() -> None:
    row = failover.row(Plain(JOB, b"abcd", 10.0, 1.0, 0.0), hurt("killed", 1.0, b"abce"))
    assert row["same_text"] is False
    assert failover.summary(Trial(), [row])["same_text"] is False


def test_what_cannot_be_is_refused(sentence: Sentence) -> None:
    for wrong in ({"length": 3}, {"traversals": 3}, {"stages": (4,)}, {"stages": ()}, {"hows": ()}):
        with pytest.raises(BadInput) as caught:
            Trial(**wrong)
        sentence(caught.value)
