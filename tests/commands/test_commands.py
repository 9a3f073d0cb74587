"""The command line as people and programs use it: real processes, exit codes, last-line JSON."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from tests.commands.forked import Done, Forked

from blocktrain.aggregation import charter
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.learning.fetch import known


def started(*arguments: str) -> Done:
    """The command as people start it, from nothing."""
    return subprocess.run(
        [sys.executable, "-m", "blocktrain", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


class Blocktrain(Protocol):
    """The same in a process that has torch already; see forked.py."""

    def __call__(self, *arguments: str | bytes, cwd: Path | None = None) -> Done: ...


@pytest.fixture(scope="module")
def blocktrain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blocktrain]:
    forked, notes = Forked(), tmp_path_factory.mktemp("notes")

    def run(*arguments: str | bytes, cwd: Path | None = None) -> Done:
        return forked.run([os.fsdecode(each) for each in arguments], cwd or Path.cwd(), notes)

    yield run
    forked.close()


def last_line(done: Done) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("the cat sat on the mat. " * 1000)
    return path


@pytest.fixture(scope="module")
def made(
    blocktrain: Blocktrain, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A small trained model of each objective."""
    folders = {}
    for objective in ("neighbours", "denoise"):
        out = tmp_path_factory.mktemp("model") / objective
        size = ["--width", "32", "--heads", "2", "--window", "32", "--blocks", "2"]
        pace = ["--rounds", "8", "--local-steps", "8", "--first-steps", "0", "--batch", "8"]
        done = blocktrain(
            "lab", "--objective", objective, *size, *pace, "--data", str(text), "--out", str(out)
        )
        result = last_line(done)
        assert {"ce", "ce_reference", "ce_shallow", "gap", "bytes_seen", "core_seconds"} < set(
            result
        )
        assert "sample" in done.stderr
        assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
        folders[objective] = out
    return folders


def test_evaluate_names_every_prefix(
    blocktrain: Blocktrain, made: dict[str, Path], text: Path
) -> None:
    found = last_line(
        blocktrain("evaluate", str(made["neighbours"]), "--data", str(text), "--json")
    )
    assert set(found) == {"ce", "bits_per_byte", "bytes", "per_block"}
    per_block = found["per_block"]
    assert isinstance(per_block, list)
    assert found["ce"] == per_block[-1]
    assert found["bytes"] == text.stat().st_size - text.stat().st_size * 95 // 100


def test_other_readouts_stand_beside_the_headline(
    blocktrain: Blocktrain, made: dict[str, Path], text: Path
) -> None:
    found = last_line(
        blocktrain("evaluate", str(made["denoise"]), "--data", str(text), "--readouts", "--json")
    )
    leaky = [key for key in found if "LEAKY" in key]
    assert len(leaky) == 3  # one for each edge of two intervals
    honest = last_line(
        blocktrain("evaluate", str(made["neighbours"]), "--data", str(text), "--readouts", "--json")
    )
    assert "mean of the last 2 heads (64 KiB sample)" in honest
    assert not any("LEAKY" in key for key in honest)


@pytest.mark.parametrize("objective", ["neighbours", "denoise"])
def test_audit_passes_on_an_honest_model(
    blocktrain: Blocktrain, made: dict[str, Path], text: Path, objective: str
) -> None:
    found = last_line(blocktrain("audit", str(made[objective]), "--data", str(text), "--json"))
    assert found["causal"] is True
    assert found["positive_control"] is True
    assert found["round_trip"] is True
    code_bits, ce_bits = found["code_bits"], found["ce_bits"]
    assert isinstance(code_bits, float | int)
    assert isinstance(ce_bits, float)
    assert code_bits == pytest.approx(ce_bits, rel=0.005, abs=64)


def test_generate_streams_and_reports(blocktrain: Blocktrain, made: dict[str, Path]) -> None:
    asked = ["generate", str(made["neighbours"]), "the cat", "--length", "20", "--seed", "3"]
    spoken = blocktrain(*asked)
    found = last_line(blocktrain(*asked, "--json"))
    assert found["bytes"] == 20
    assert spoken.stdout == f"the cat{found['text']}\n"


def test_export_opens_elsewhere_only_for_neighbours(
    blocktrain: Blocktrain, made: dict[str, Path], tmp_path: Path
) -> None:
    found = last_line(
        blocktrain("export", str(made["neighbours"]), "--to", "hf", str(tmp_path / "hf"), "--json")
    )
    assert (tmp_path / "hf" / "config.json").exists()
    assert found["out"] == str(tmp_path / "hf")
    refused = blocktrain("export", str(made["denoise"]), "--to", "hf", str(tmp_path / "no"))
    assert refused.returncode == 4
    assert not (tmp_path / "no").exists()


def test_compress_and_decompress_give_the_file_back(
    blocktrain: Blocktrain, made: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    source = tmp_path / "note.txt"
    source.write_bytes(text.read_bytes()[:3000] + bytes(range(256)))
    model = ["--model", str(made["neighbours"])]
    packed = last_line(blocktrain("compress", str(source), *model, "--json"))
    assert packed["bytes"] == 3256
    back = tmp_path / "back.txt"
    blocktrain("decompress", str(source) + ".bt", *model, "--out", str(back), "--json")
    assert back.read_bytes() == source.read_bytes()
    other = blocktrain("decompress", str(source) + ".bt", "--model", str(made["denoise"]))
    assert other.returncode == 5


def test_doctor_tells_what_this_machine_can_do(blocktrain: Blocktrain) -> None:
    found = last_line(blocktrain("doctor", "--url", "http://127.0.0.1:9", "--json"))
    assert {"torch", "device", "memory_gib", "gemm_fp32_gflops", "reaches"} < set(found)
    assert "no (" in str(found["reaches"])


def test_data_list_names_the_licence() -> None:
    rows = last_line(started("data", "list", "--json"))["rows"]
    assert isinstance(rows, list)
    assert {row["name"] for row in rows} == {each.name for each in known()}
    assert any("CC BY-SA" in row["licence"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["lab", "--out", "x", "--widht", "8"], 2, "--width"),
        (["lab", "--out", "x", "--width", "30", "--heads", "4"], 2, "multiple of 8"),
        (["lab", "--out", "x", "--rounds", "0"], 2, "at least 1"),
        (["lab", "--out", "x", "--device", "abacus"], 2, "--device cpu"),
        (["lab", "--out", "x", "--data", "wikitext2"], 3, "wikitext-2"),
        (["lab", "--out", "x", "--config", "none.toml"], 2, "check the path"),
        (["evaluate", "nowhere"], 4, "not a model directory"),
        (["audit", "nowhere"], 4, "not a model directory"),
        (["compress", "nothing.txt", "--model", "nowhere"], 2, "cannot be read"),
        (["decompress", "nothing.txt", "--model", "nowhere"], 2, "--out"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_bad_input_is_one_sentence_and_a_code(
    blocktrain: Blocktrain, arguments: list[str], code: int, says: str, tmp_path: Path
) -> None:
    done = blocktrain(*arguments, "--json", cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["exit_code"] == code
    assert not list(tmp_path.iterdir())


def test_a_prompt_that_is_not_utf8(blocktrain: Blocktrain, made: dict[str, Path]) -> None:
    done = blocktrain("generate", str(made["neighbours"]), b"\xff\xfe")
    assert done.returncode == 2
    assert "UTF-8" in done.stderr


def test_a_config_file_gives_defaults_and_flags_win(
    blocktrain: Blocktrain, text: Path, tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        "[shape]\nblocks = 2\nwidth = 32\nheads = 2\nwindow = 32\n"
        "[pace]\nrounds = 9\nlocal_steps = 2\nbatch = 2\n"
    )
    asked = ["lab", "--config", str(config), "--data", str(text), "--rounds", "2"]
    found = last_line(blocktrain(*asked, "--out", str(tmp_path / "out")))
    assert found["bytes_seen"] == 2 * 2 * 2 * 32
    config.write_text("[shape]\nwitdh = 32\n")
    refused = blocktrain(*asked, "--out", str(tmp_path / "out"))
    assert refused.returncode == 2
    assert "did you mean 'width'" in refused.stderr


def test_one_config_file_serves_init_too_with_its_timing(
    blocktrain: Blocktrain, text: Path, tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        "[shape]\nblocks = 2\nlayers = 1\nwidth = 32\nheads = 2\nwindow = 32\n"
        "[pace]\nrounds = 9\nlocal_steps = 1\nbatch = 1\n[timing]\ngrace = 0.5\nlease = 7.0\n"
    )
    last_line(
        blocktrain("init", str(tmp_path / "run"), f"--config={config}", "--data", str(text),
                   "--lease", "8", "--json")
    )  # fmt: skip
    with SqliteLedger(tmp_path / "run" / "ledger.sqlite") as ledger, ledger.reading() as r:
        record = r.run()
    assert record is not None
    rules = charter.decode(record.config).rules
    assert (rules.blocks, rules.rounds, rules.grace, rules.lease) == (2, 9, 0.5, 8.0)
    lab = blocktrain("lab", "--config", str(config), "--data", str(text), "--rounds", "1",
                     "--out", str(tmp_path / "lab"))  # fmt: skip
    assert last_line(lab)["bytes_seen"] == 32  # it waits for nobody, and needs no timing
    config.write_text("[timing]\ngrase = 1.0\n")
    refused = blocktrain("init", str(tmp_path / "no"), "--config", str(config))
    assert refused.returncode == 2
    assert "did you mean 'grace'" in refused.stderr


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl+C", "shutdown"])
def test_a_stop_keeps_what_was_done(told: signal.Signals, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = [sys.executable, "-m", "blocktrain", "lab", "--blocks", "2", "--width", "32"]
    asked += ["--heads", "2", "--window", "32", "--rounds", "500", "--local-steps", "1"]
    asked += ["--batch", "1", "--data", str(text), "--out", str(out)]
    child = subprocess.Popen(asked, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    assert "round    50" in child.stderr.readline()
    child.send_signal(told)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "same command" in said
    assert 50 <= json.loads((out / "state.json").read_text())["round"] < 500


def test_a_terminal_sees_a_progress_bar(text: Path, tmp_path: Path) -> None:
    """A real terminal device; elsewhere no bar is drawn (see `made`, whose stderr is a pipe)."""
    ours, theirs = pty.openpty()
    asked = [sys.executable, "-m", "blocktrain", "lab", "--blocks", "2", "--width", "32"]
    asked += ["--heads", "2", "--window", "32", "--rounds", "5", "--local-steps", "2"]
    asked += ["--batch", "2", "--data", str(text), "--out", str(tmp_path / "out")]
    terminal = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    child = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=theirs, env=terminal)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # the terminal is gone when the child is
        while piece := os.read(ours, 65536):
            seen += piece
    os.close(ours)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    assert "\u2501".encode() in seen
    assert b"8/10" in seen
    assert json.loads(out.splitlines()[-1])["ce"] > 0


def test_help_needs_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "blocktrain", "--help"],
        capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "120"},
    )  # fmt: skip
    assert "lab" in done.stdout
    assert not any(line.rstrip().endswith("| torch") for line in done.stderr.splitlines())
