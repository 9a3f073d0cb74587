"""`bench wan` on one tiny network: real hosts, real stages, every mode; and its table."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blocktrain.bench import wan, wan_quality, wan_rows
from blocktrain.bench.wan import Models, Text, Trial
from blocktrain.bench.wan_driver import Job, Made
from blocktrain.commands import serving_bench
from blocktrain.commands.serving_bench import Who
from blocktrain.console import Output
from blocktrain.errors import BadInput, BadRun
from blocktrain.inference import layout
from blocktrain.inference.plan import Forecast, Mode, Speed
from blocktrain.learning.files import save_model
from blocktrain.learning.model import Model, Shape
from blocktrain.terms import Digest

Sentence = Callable[[BaseException], str]
MakeModel = Callable[[Shape], Model]
SMALL = Shape(blocks=4, layers=1, width=16, heads=2, window=64)
WHOLE = Shape("denoise", blocks=3, layers=1, width=16, heads=2, window=64)
JUDGE = Shape(blocks=1, layers=2, width=16, heads=2, window=64)
NO_MODEL = Digest("")


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need Linux and root"
)
def test_every_mode_over_one_network(
    tmp_path: Path, alive: MakeModel, capsys: pytest.CaptureFixture[str], sentence: Sentence
) -> None:
    digests = {
        name: save_model(alive(shape), tmp_path / name).digest
        for name, shape in (("small", SMALL), ("whole", WHOLE), ("judge", JUDGE))
    }
    (tmp_path / "text").write_bytes(b"The river rises in the hills and flows to the sea.\n" * 999)
    trial = Trial(
        rtt=(8.0,), mbit=(50.0,), temperature=(0.8,), length=24, prompts=1, traversals=(1, 2)
    )
    who = Who(tmp_path / "small", tmp_path / "whole", tmp_path / "judge", 2, f"{tmp_path / 'text'}")
    out = tmp_path / "out"

    def run() -> dict[str, Any]:
        serving_bench.wan(out=out, trial=trial, who=who, output=Output(json=True))
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    found = run()
    assert [row["mode"] for row in found["rows"]] == [
        "ar", "speculative", "exact", "whole", "whole"
    ]  # fmt: skip
    rows = {row["mode"]: row for row in found["rows"]}
    for row in found["rows"]:
        assert (row["rtt_ms"], row["mbit"], row["temperature"]) == (8, 50, 0.8)
        assert 0 < row["bytes_per_s"] < 2 * row["planned_bytes_per_s"]
        assert row["first_byte_ms"] > 1.5 * 8
        assert row["wire_bytes_per_byte"] > 100
    assert rows["ar"]["traversals"] == 24
    assert rows["ar"]["bytes_per_s"] < 1000 / (1.5 * 8)
    assert rows["exact"]["identical"] is True
    assert rows["speculative"]["identical"] is True
    assert [row["traversals"] for row in found["rows"][3:]] == [1, 2]
    judged = [(row["mode"], row["traversals"]) for row in found["quality"]]
    assert judged == [("ar", 24), ("whole", 1), ("whole", 2)]
    assert found["verdict"].endswith(".")
    assert (out / "wan.png").stat().st_size > 10_000

    # What was made is not made again, and no host is started for it.
    before = (out / wan.TEXTS).stat()
    assert [row["bytes_per_s"] for row in run()["rows"]] == [
        row["bytes_per_s"] for row in found["rows"]
    ]
    assert (out / wan.TEXTS).stat().st_mtime_ns == before.st_mtime_ns

    # What was seen of the lines is a file for `plan`.
    seen = layout.read(out / f"links-8-50-{digests['small'][:8]}.json")
    way = layout.way(seen, SMALL.blocks, lambda *_: Speed(0, 0))
    assert [(seat.first, seat.last) for seat in way.seats] == [(0, 1), (2, 2), (3, 3)]
    assert sum(line.rtt for line in way.lines) / 2 > 0.012


# --- the table ------------------------------------------------------------------------------------


def text(
    mode: Mode, prompt: int, seconds: float, said: bytes = b"abcd", traversals: int = 0
) -> Text:
    """One of a table."""
    job = Job(mode, 0.8, prompt, traversals, len(said), NO_MODEL)
    made = Made(job, said, seconds, seconds / 2, 2, guessed=4, right=1, sent=100 * len(said))
    return Text(100.0, 20.0, made)


def planned(texts: list[Text]) -> dict[wan_rows.Kind, Forecast]:
    """Nothing but rates: 7 for exact, 1 for others."""
    return {
        kind: Forecast(kind[3], 7.0 if kind[3] == "exact" else 1.0, 0, 0, 0, 0, 0, 0, "", 0, "")
        for kind in map(wan_rows.kind_of, texts)
    }


def test_rows_are_medians_over_prompts() -> None:
    texts = [text("exact", n, seconds) for n, seconds in enumerate((1.0, 4.0, 2.0))]
    texts += [text("ar", n, seconds) for n, seconds in enumerate((8.0, 8.0, 10.0))]
    ar, exact = wan_rows.rows(texts, planned(texts))
    assert (ar["mode"], exact["mode"]) == ("ar", "exact")
    assert exact["bytes_per_s"] == 2.0
    assert exact["times_ar"] == 5.0
    assert exact["planned_bytes_per_s"] == 7.0
    assert exact["accepted"] == 0.25
    assert exact["bytes_per_traversal"] == 2.0
    assert exact["wire_bytes_per_byte"] == 100
    assert exact["first_byte_ms"] == 1000
    assert exact["identical"] is True
    assert ar["identical"] is None
    assert ar["times_ar"] == 1.0


def test_another_text_than_ar_is_told() -> None:
    texts = [text("ar", 0, 1.0), text("exact", 0, 1.0, b"abce"), text("whole", 0, 1.0, b"xxxx", 4)]
    _, exact, whole = wan_rows.rows(texts, planned(texts))
    assert exact["identical"] is False
    assert (whole["mode"], whole["traversals"], whole["identical"]) == ("whole", 4, None)


def test_the_verdict_names_the_fewest_or_none() -> None:
    rows = [
        {"mode": "whole", "traversals": n, "bytes_per_s": 100 / n, "times_ar": 64 / n}
        | {"rtt_ms": 50, "mbit": 20}
        for n in (1, 8, 16)
    ]
    quality: list[dict[str, Any]] = [
        {"mode": "ar", "beside_ar": None, "traversals": 256},
        {"mode": "whole", "beside_ar": False, "traversals": 1},
        {"mode": "whole", "beside_ar": True, "traversals": 8},
        {"mode": "whole", "beside_ar": True, "traversals": 16},
    ]
    said = wan_quality.verdict(quality, rows)
    assert said.startswith("whole in 8 traversals is the fewest")
    assert "12.5 bytes/s at 50 ms and 20 Mbit/s (8.0 x ar)" in said
    said = wan_quality.verdict(quality[:2], rows)
    assert said.startswith("With 1 to 1 traversals, whole never had judge CE within 0.3")


def test_jobs_go_by_turns(tmp_path: Path, alive: MakeModel) -> None:
    save_model(alive(SMALL), tmp_path)
    models = Models(tmp_path, None, [b"a", b"b"])
    jobs = models.jobs(Trial(prompts=2))
    assert [job.mode for job in jobs[:4]] == ["ar", "speculative", "exact", "ar"]
    assert [job.temperature for job in jobs[:4]] == [0.0, 0.0, 0.0, 0.8]
    assert len(jobs) == len(set(jobs)) == 2 * 2 * 3


def test_what_cannot_be_is_refused(tmp_path: Path, sentence: Sentence) -> None:
    for wrong in ({"rtt": ()}, {"length": 0}, {"traversals": (0,)}):
        with pytest.raises(BadInput) as caught:
            Trial(**wrong)
        sentence(caught.value)
    (tmp_path / wan.TEXTS).write_bytes(b'{"rtt_ms": 1}\n')
    with pytest.raises(BadRun) as damaged:
        wan.read(tmp_path)
    sentence(damaged.value)
