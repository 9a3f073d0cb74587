"""blocktrain plan as people and programs run it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blocktrain.commands.plan import Known, Wish, plan
from blocktrain.console import Output
from blocktrain.errors import BadConfig, BadInput, BadModel
from blocktrain.inference import layout
from blocktrain.inference.measures import UNSEEN_RATE
from blocktrain.learning.files import save_model
from blocktrain.learning.model import Model, Shape
from blocktrain.wire.certificates import RENEW_BEFORE, SERVER_LIFE

Sentence = Callable[[BaseException], str]
MakeModel = Callable[[Shape], Model]
HOSTS = """
rtt_ms = 40
mbit = 10
[[hosts]]
name = "anna"
[[hosts]]
name = "ben"
[[links]]
between = ["anna", "ben"]
rtt_ms = 80
"""
GIVEN = Known(acceptance=0.7, lookup_acceptance=0.2)
JSON = Output(json=True)


@pytest.fixture
def folder(tmp_path: Path, alive: MakeModel, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKTRAIN_CACHE", str(tmp_path / "cache"))
    for objective in ("neighbours", "denoise"):
        shape = Shape(objective, blocks=2, layers=1, width=16, heads=2, window=64)
        save_model(alive(shape), tmp_path / objective)
    (tmp_path / "hosts.toml").write_text(HOSTS)
    return tmp_path


def rows(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    return {row["mode"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def test_forecasts_for_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(folder / "neighbours", hosts=folder / "hosts.toml", known=GIVEN, output=JSON)
    found = rows(capsys)
    assert list(found) == ["ar", "speculative", "exact"]
    assert found["ar"]["bytes_per_s"] == pytest.approx(1 / 0.08, rel=0.2)
    assert found["ar"]["bytes_per_s"] < found["speculative"]["bytes_per_s"]
    assert found["speculative"]["bytes_per_s"] < found["exact"]["bytes_per_s"]
    assert found["exact"]["draft"] > found["speculative"]["draft"] > 0
    assert {row["limited_by"] for row in found.values()} == {"round trips"}
    assert found["ar"]["limiting_link"] in ("anna -> ben", "ben -> anna")


def test_whole_is_forecast_for_denoise(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wish = Wish(traversals=2, length=32, prompt=16)
    plan(folder / "denoise", hosts=folder / "hosts.toml", wish=wish, known=GIVEN, output=JSON)
    found = rows(capsys)
    assert list(found) == ["ar", "speculative", "exact", "whole"]
    assert found["whole"]["traversals"] == 2


def test_what_is_not_given_is_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "text").write_bytes(b"The river rises in the hills and flows to the sea.\n" * 999)
    known = Known(data=str(folder / "text"))
    plan(folder / "neighbours", hosts=folder / "hosts.toml", known=known, output=JSON)
    assert rows(capsys)["exact"]["bytes_per_traversal"] >= 1
    assert len(list((folder / "cache" / "surveys").iterdir())) == 1


def test_a_table_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(folder / "neighbours", hosts=folder / "hosts.toml", known=GIVEN)
    told = capsys.readouterr().out
    assert "exact" in told
    assert "anna" in told


def test_a_rate_for_lines_that_have_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [
        {"stage": "a" * 64, "first": 0, "last": 0, "rtt_ms": 1.0, "step_ms": 1.0},
        {"stage": "b" * 64, "first": 1, "last": 1, "rtt_ms": 2.0, "step_ms": 1.0},
    ]
    (folder / "route.json").write_text(json.dumps({"stages": stages}))
    found = []
    for mbit in (0.1, 100.0):
        known = Known(acceptance=0.7, lookup_acceptance=0.2, mbit=mbit)
        plan(folder / "neighbours", links=folder / "route.json", known=known, output=JSON)
        found.append(rows(capsys)["ar"])
    assert found[0]["limited_by"] == "rates"
    assert found[0]["bytes_per_s"] < found[1]["bytes_per_s"]


def test_the_document_s_own_files_are_understood(
    folder: Path, alive: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    document = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (example,) = re.findall(r"^```toml\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    (folder / "example.toml").write_text(example)
    save_model(alive(Shape(blocks=4, layers=1, width=16, heads=2, window=64)), folder / "four")
    plan(folder / "four", hosts=folder / "example.toml", known=GIVEN, output=JSON)
    found = rows(capsys)["ar"]
    assert found["limiting_link"] in ("anna -> ben", "ben -> anna")  # Ben is nearer than Clara
    assert 1000 / found["bytes_per_s"] == pytest.approx(20, abs=10)
    here = layout.read(folder / "example.toml")
    assert (here.rtt_ms, here.mbit, here.gateway) == (50, 100, "anna")
    assert (here.hosts[0].step_ms, here.hosts[0].position_ms, here.hosts[1].step_ms) == (
        1.5, 0.1, None,
    )  # fmt: skip
    assert f"its rate for {UNSEEN_RATE / layout.MBIT:g} Mbit/s" in document
    words = " ".join(document.split())
    told = f"for {SERVER_LIFE.days} days, and a gateway that is started in the last"
    assert f"{told} {RENEW_BEFORE.days} of them makes another" in words


def test_bad_input_is_told(folder: Path, sentence: Sentence) -> None:
    model, hosts = folder / "neighbours", folder / "hosts.toml"
    wrong: list[tuple[type[Exception], Callable[[], None]]] = [
        (BadInput, lambda: plan(model)),
        (BadInput, lambda: plan(model, hosts=hosts, links=hosts)),
        (BadInput, lambda: plan(model, hosts=hosts, known=Known(2.0, 0.1))),
        (BadInput, lambda: plan(model, hosts=hosts, wish=Wish(length=0), known=GIVEN)),
        (BadConfig, lambda: plan(model, hosts=folder / "nowhere.toml")),
        (BadModel, lambda: plan(folder, hosts=hosts)),
    ]
    for kind, call in wrong:
        with pytest.raises(kind) as caught:
            call()
        sentence(caught.value)
