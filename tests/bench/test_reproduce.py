"""A reproduction: rows from steps, steps done once, pages from results.json alone."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import psutil
import pytest
from torch.utils.flop_counter import FlopCounterMode

from blocktrain.bench.comparing import reached
from blocktrain.bench.costs import fetched_per_round, flops_of, moved_per_round
from blocktrain.bench.questions import ROWS, Row
from blocktrain.bench.reproduce import Measuring, adopt, chosen, keep, look, together
from blocktrain.bench.results import Results, read, result
from blocktrain.bench.results_page import BEGIN, END, NOT_YET, publish, whole_page, with_section
from blocktrain.bench.results_picture import CREWS, CURVES, CUTS, EACH, FRONTIER, STALENESS, drawn
from blocktrain.bench.scales import FULL, QUICK, Scale, changed, sized
from blocktrain.bench.steps import Doing, Missing, Notebook, Record, Step, flags_of, lab
from blocktrain.cli import build
from blocktrain.commands.reproduce import told
from blocktrain.disk import lock, write_atomically
from blocktrain.errors import BadInput, BadRun, BlockTrainError
from blocktrain.learning.files import MANIFEST
from blocktrain.learning.local import Start, Work, parameters_of, train_locally
from blocktrain.learning.model import new_block
from blocktrain.learning.objective import Loader, objective_for
from blocktrain.services.hardship import NONE, Hardship
from blocktrain.services.run import Run

ROOT = Path(__file__).parents[2]
SMALLEST = changed(Run(), width=16, heads=1, window=16, batch=4, local_steps=2)
TINY = replace(
    QUICK,
    headline=SMALLEST,
    base=SMALLEST,
    budget=1280,
    trial=640,
    grid=(0.005, 0.01),
    headline_grid=(0.005, 0.01),
    reference_steps=2,
    cut=0,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("the cat sat on the mat. " * 400)
    return path


def measured(folder: Path, ce: Callable[[Step], float]) -> Callable[[Step], Record]:
    """Writes the record of a step without training: CE as given, falling along the run."""

    def carry_out(step: Step) -> Record:
        end = ce(step)
        result = {
            "ce": end, "bytes_seen": 1280, "core_seconds": 36.0, "bytes_moved_to_1.811": 42_000_000,
            "bytes_moved": 60_000_000, "neighbours_ratio": 0.35, "parameters_per_block": 10**8,
            "neighbours_resident_ratio": 0.45, "denoise_ratio": 0.3, "parameters": 10**6,
            "bytes_per_parameter_and_round": 2.5,
            "LEAKY: true target at sigma 1.00 (64 KiB sample)": end - 0.25,
            "chain from noise, 1 draw (64 KiB sample)": end + 0.28,
        }  # fmt: skip
        history = [(seen, end + (1280 - seen) / 1280) for seen in range(128, 1281, 128)]
        record = Record(step.name, result, history, 36.0, 2, "abc", "2026-11-16", "float32")
        write_atomically(folder / f"{step.name}.json", msgspec.json.encode(record))
        (folder / step.name).mkdir(exist_ok=True)
        (folder / step.name / MANIFEST).touch()
        return record

    return carry_out


@dataclass
class Trained:
    """A step that ends at once."""

    step: Step
    carry_out: Callable[[Step], Record]

    def ended(self) -> Record:
        return self.carry_out(self.step)

    def rounds(self) -> int:
        return 0

    def stop(self) -> None:
        pass

    def wait(self) -> None:
        pass


def measure(
    rows: Sequence[Row], scale: Scale, folder: Path, carry_out: Callable[[Step], Record]
) -> dict[str, str]:
    def begin(step: Step, folder: Path, cores: int) -> Doing:
        return cast(Doing, Trained(step, carry_out))

    return Measuring(rows, scale, folder, begin).run()


def do(step: Step, folder: Path) -> Record:
    doing = Doing(step, folder)
    while (record := doing.ended()) is None:
        time.sleep(0.05)
    return record


def by_kind(step: Step) -> float:
    """Blocks 1.40, a reference 1.38; the rate 0.04 is the best for blocks, 0.005 for references."""
    reference = "blocks-1-" in step.name
    best = ("matrix-0.005-" if reference else "matrix-0.04-") in step.name
    return (1.38 if reference else 1.40) - (0.01 if best else 0.0)


def published(scale: Scale, folder: Path, place: Path) -> Results:
    results = told(scale, keep(folder, place / "records"))
    publish(results, place, None)
    return results


# --- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [FULL, QUICK], ids=lambda scale: scale.name)
def test_a_command_says_exactly_the_run_it_stands_for(scale: Scale) -> None:
    """Parsed by the real command line, the flags of every step give back its run."""
    runs = [scale.base, scale.base.end_to_end(4), changed(scale.base, seed=3, objective="denoise")]
    runs.append(changed(scale.base, replicas=6, batch=2, outer_rate=0.7, codec="int2"))
    for run in (sized(each, scale.budget) for each in runs):
        command = lab(run).command(Path("runs"))
        _, bound, _ = build().parse_args(command)
        given = bound.arguments.get("run")
        assert (given.plain if given else Run()) == run
    assert flags_of(Run()) == []
    hardship = Hardship(missed=0.3, salvaged=0.5, slowest=8)
    _, bound, _ = build().parse_args(lab(scale.base, hardship=hardship).command(Path("runs")))
    assert bound.arguments["place"].hardship == hardship


def test_names_are_by_all_settings() -> None:
    runs = [Run(), changed(Run(), seed=1), changed(Run(), steady=0.5), changed(Run(), codec="fp32")]
    assert len({lab(run).name for run in runs}) == 4
    kinds = [NONE, Hardship(missed=0.3), Hardship(missed=0.3, salvaged=0.5), Hardship(slowest=8)]
    assert len({lab(Run(), hardship=kind).name for kind in kinds}) == 4
    assert lab(Run()) == lab(changed(Run(), seed=0))


def test_rounds_are_as_many_as_the_bytes_take() -> None:
    for steps in (5, 20, 80):
        run = sized(changed(FULL.headline, local_steps=steps), FULL.budget)
        assert run.bytes_after(run.pace.rounds) == FULL.budget >= 12_000_000
    with pytest.raises(TypeError, match="no width_of"):
        changed(Run(), width_of=3)


def test_a_step_is_a_real_command_done_once(text: Path, tmp_path: Path) -> None:
    step = lab(sized(TINY.base, TINY.trial), str(text))
    record = do(step, tmp_path)
    assert 2.0 < record.result["ce"] < 5.6
    assert record.history[-1][0] == record.result["bytes_seen"] == TINY.trial
    assert record.core_seconds == record.result["core_seconds"] > 0
    assert (tmp_path / step.name / "manifest.json").exists()
    assert Notebook(tmp_path).read(step) == [record]


def test_a_step_that_fails_says_why(tmp_path: Path) -> None:
    bad = Step("bad", ("data", "fetch", "OUT/nothing", "--json"))
    with pytest.raises(
        BlockTrainError, match=r"fetch .*nothing --json` failed \(There is no .*8\); "
    ):
        do(bad, tmp_path)
    with pytest.raises(Missing):
        Notebook(tmp_path).read(bad)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"{")
    with pytest.raises(BadRun, match=r"x\.json is damaged"):
        Notebook(tmp_path).read(Step("x", ()))


# --- rows ----------------------------------------------------------------------------------------


def test_every_row_is_told_from_steps_done_once(tmp_path: Path) -> None:
    done: list[str] = []
    carry_out = measured(tmp_path, by_kind)

    def once(step: Step) -> Record:
        done.append(step.name)
        return carry_out(step)

    wider = changed(SMALLEST, width=32, grams=1)
    scale = replace(TINY, headline=wider, grid=(0.005, 0.01, 0.04), seeds=(0, 1), judged=True)
    assert measure(ROWS, scale, tmp_path, once) == {}
    assert len(done) == len(set(done))
    found = {row.key: look(row, scale, tmp_path).found for row in ROWS}
    assert all(found.values())
    values = {key: each.values for key, each in found.items() if each and each.values}
    assert values["ce"] == pytest.approx([1.4, 1.4])  # at the rate that serves the reference best
    assert values["gap"] == pytest.approx([0.03, 0.03])
    assert values["gap_h80"] == pytest.approx([0.03])
    assert values["gap_k8"] == pytest.approx([0.03])
    assert values["six_workers_extra"] == pytest.approx([0.0])
    assert values["wan_bytes"] == [42_000_000]
    assert set(values) == {row.key for row in ROWS if row.unit} - {"flops_ratio"}
    assert all(each.table for key, each in found.items() if each and key not in values
               and key != "flops_ratio")  # fmt: skip
    # Each side is trained at its own best rate; others have the grid's runs, of 5 rounds, those of
    # the headline, about vectors and about the number of blocks, where both sides have the
    # reference's, and those with DiLoCo's outer step, who do not make up for averaging by longer
    # local steps.
    theirs = [name for name in done if "outer-momentum" in name]
    assert theirs
    for name in theirs:
        rate = 0.005 if "blocks-1-" in name else 0.04
        assert f"matrix-{rate / 6**0.5}" in name
    long = {name for name in done if name.startswith("lab") and "rounds-5-" not in name}
    long -= set(theirs)
    [again] = [name for name in long if "layers-4-width-32" in name and "matrix-0.005" not in name]
    long.remove(again)  # the headline's reference at the other rate of its grid
    assert len(long) > 20
    for name in long:
        slow = any(word in name for word in ("blocks-", "layers-", "width-32", "grams"))
        assert ("matrix-0.005" if slow else "matrix-0.04") in name
    assert measure(ROWS, scale, tmp_path, once) == {}
    assert len(done) == len(set(done))


def test_flops_to_the_references_ce_are_looked_for_in_longer_runs(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.key == "flops_ratio")
    scale = replace(TINY, grid=(0.02,), headline_grid=(0.02,))
    blocks = sized(scale.base, scale.budget)
    reference = blocks.end_to_end(4)
    measure([row], scale, tmp_path / "equal", measured(tmp_path / "equal", lambda step: 1.4))
    equal = look(row, scale, tmp_path / "equal")
    assert equal.found is not None
    assert equal.found.values == pytest.approx([flops_of(blocks) / flops_of(reference)])
    assert len(equal.steps) == 2

    worse = measured(tmp_path / "worse", lambda step: 1.3 if "blocks-1-" in step.name else 1.4)
    measure([row], scale, tmp_path / "worse", worse)
    never = look(row, scale, tmp_path / "worse")
    assert never.found is not None
    assert never.found.values == []
    assert "not reached with 1.25 times" in never.found.note
    assert result(never, replace(scale, judged=True), tmp_path / "worse").met == "neither"
    assert len(never.steps) == 4


def test_reached_draws_a_straight_line_between_measurements() -> None:
    history = [(100, 2.0), (200, 1.6), (400, 1.4)]
    assert reached(history, 1.5) == pytest.approx(300 / 400)
    assert reached(history, 2.5) == pytest.approx(100 / 400)
    assert reached(history, 1.4) == 1.0
    assert reached(history, 1.3) is None


def test_a_failed_step_costs_only_its_own_rows(tmp_path: Path) -> None:
    carry_out = measured(tmp_path, by_kind)

    def no_hosts(step: Step) -> Record:
        if "three-hosts" in step.name:
            raise BlockTrainError("No root here; become root.")
        return carry_out(step)

    rows = [row for row in ROWS if row.key in ("wan_bytes", "memory_ratio")]
    failed = measure(rows, replace(TINY, judged=True), tmp_path, no_hosts)
    assert list(failed.values()) == ["No root here; become root."]
    assert look(rows[0], TINY, tmp_path).found is None
    assert look(rows[1], TINY, tmp_path).found is not None


def test_what_must_be_alone_is() -> None:
    one, two, three = (Step(name, ()) for name in "abc")
    hosts = Step("hosts", (), alone=True)
    assert together([hosts, one, two, three], [], 2) == [one, two]
    assert together([hosts, two, three], [one], 2) == [two]
    assert together([hosts], [one], 2) == []
    assert together([hosts], [], 2) == [hosts]
    assert together([one], [hosts], 2) == []
    assert together([one], [two, three], 2) == []


def test_steps_are_done_side_by_side(text: Path, tmp_path: Path) -> None:
    """Each with its share of the cores: two for the one that is left alone."""
    begun: list[tuple[Doing, int]] = []

    def begin(step: Step, folder: Path, cores: int) -> Doing:
        begun.append((Doing(step, folder, cores), cores))
        return begun[-1][0]

    scale = replace(TINY, grid=(0.02,), headline_grid=(0.02,), data=str(text))
    row = next(row for row in ROWS if row.key == "composition")
    assert Measuring([row], scale, tmp_path, begin, cores=2).run() == {}
    assert [cores for _, cores in begun] == [2, 2]  # its lab run, then the readouts of it
    row = next(row for row in ROWS if row.key == "lookahead")
    begun.clear()
    assert Measuring([row], scale, tmp_path, begin, cores=2).run() == {}
    assert [cores for _, cores in begun] == [1, 1, 1, 1, 1]
    assert look(row, scale, tmp_path).found is not None


def test_a_stop_lets_every_step_save(text: Path, tmp_path: Path) -> None:
    """As after Ctrl+C; nobody is left behind."""
    begun: list[Doing] = []

    def begin(step: Step, folder: Path, cores: int) -> Doing:
        begun.append(Doing(step, folder, cores))
        return begun[-1]

    def interrupt(done: int, total: int) -> None:
        if begun and all(each.log.read_text() for each in begun):  # CE of a sample: they train
            raise KeyboardInterrupt

    scale = replace(
        TINY, grid=(0.02,), headline_grid=(0.02,), data=str(text), trial=10**8, notes=10**5
    )
    row = next(row for row in ROWS if row.key == "lookahead")
    measuring = Measuring([row], scale, tmp_path, begin, cores=2, rounds=interrupt)
    with pytest.raises(KeyboardInterrupt):
        measuring.run()
    assert len(begun) == 2
    assert all(each.child.returncode not in (None, 0, -signal.SIGKILL) for each in begun)
    assert all(each.rounds() > 0 for each in begun)


def test_two_cannot_measure_into_one_folder(tmp_path: Path) -> None:
    held = lock(tmp_path / "lock", "")
    with pytest.raises(BadRun, match=r"Another process measures into .*; wait for it"):
        measure(ROWS, TINY, tmp_path, measured(tmp_path, by_kind))
    os.close(held)
    assert measure(ROWS[:1], TINY, tmp_path, measured(tmp_path, by_kind)) == {}


def test_only_known_rows_are_chosen() -> None:
    assert [row.key for row in chosen(["gap", "ce"], FULL)] == ["gap", "ce"]
    assert {row.key for row in ROWS} - {row.key for row in chosen([], QUICK)} == {
        "wan_bytes", "rates", "wide_rates", "depth", "steady", "per_flop", "own_share", "grams",
        "codecs", "denoise_deep", "unreliable",
    }  # fmt: skip
    with pytest.raises(BadInput, match=r"no row 'gab'.*choose among ce, gap"):
        chosen(["gab"], FULL)


# --- costs ---------------------------------------------------------------------------------------


def test_flops_are_what_torch_counts() -> None:
    """A step of every block, end to end too; only attention is not among torch's products here."""
    for cut in ({"blocks": 3, "layers": 2, "lookahead": 1}, {"blocks": 1, "layers": 4}):
        run = changed(TINY.base, rounds=1, local_steps=1, **cut)
        with FlopCounterMode(display=False) as counter:
            one_step_of_each_block(run)
        counts = counter.get_flop_counts()["Global"]
        products = sum(count for name, count in counts.items() if "mm" in str(name))
        shape, last = run.shape, run.shape.blocks - 1
        passes = sum(3 + at + 2 * min(run.task.lookahead, last - at) for at in range(last + 1))
        attention = 2 * run.pace.batch * shape.window**2 * shape.width * shape.layers
        assert products == flops_of(run) - passes * attention
        many = changed(run, replicas=2, local_steps=3, first_steps=0, rounds=5)
        assert flops_of(many) == 30 * flops_of(run)


def one_step_of_each_block(run: Run) -> None:
    made = [new_block(run.shape, at, 0).requires_grad_(False) for at in range(run.shape.blocks)]
    loaders: list[Loader] = [lambda block=block: block for block in made]  # type: ignore[misc]
    rows = np.zeros((run.pace.batch, run.shape.window + 1), np.int64)
    for at, block in enumerate(made):
        work = Work(run.recipe, at, 0, 1, 0, 0, bytes_per_step=1, bytes_planned=9)
        objective = objective_for(at, run.recipe, loaders)
        train_locally(Start(parameters_of(block)), iter([rows]), objective, work)


def test_denoise_has_no_count_of_flops() -> None:
    with pytest.raises(BadInput, match="neighbours only"):
        flops_of(changed(Run(), objective="denoise"))
    assert lab(changed(Run(), objective="denoise")).flops == 0


def test_bytes_moved_are_bodies_to_and_from_every_worker() -> None:
    """fp32: four bytes a value, and what safetensors says about them."""
    run = changed(Run(), codec="fp32")
    sizes = [sum(p.numel() for p in new_block(run.shape, at, 0).parameters()) for at in range(4)]
    watched_too = [sum(sizes[:3]), sum(sizes), sum(sizes), sum(sizes)]
    assert fetched_per_round(run, 0) == pytest.approx(4 * watched_too[0], rel=0.01)
    total = 4 * (sum(sizes) + sum(watched_too))
    assert moved_per_round(run) == pytest.approx(total, rel=0.01)
    assert moved_per_round(changed(run, replicas=6)) == 6 * moved_per_round(run)
    whole = run.end_to_end(4)
    assert moved_per_round(whole) == 2 * fetched_per_round(whole, 0)
    # `bench three-hosts` counted 2.46 bytes a parameter and round at the sockets (LOG.md).
    single = changed(Run(), grams=1)
    values = sum(p.numel() for at in range(4) for p in new_block(single.shape, at, 0).parameters())
    assert moved_per_round(single) / values == pytest.approx(2.46, rel=0.03)


# --- pages ---------------------------------------------------------------------------------------


def test_pages_tell_what_is_measured_and_what_is_not(tmp_path: Path) -> None:
    scale = replace(TINY, judged=True, seeds=(0, 1))
    rows = [row for row in ROWS if row.key in ("ce", "staleness")]
    measure(rows, scale, tmp_path, measured(tmp_path, by_kind))
    results = published(scale, tmp_path, tmp_path / "docs")
    ce, gap = results.rows[0], results.rows[1]
    assert ce.value == pytest.approx(1.40)
    assert (ce.met, ce.spread, ce.seeds, ce.cores) == ("neither", 0.0, [0, 1], 2)
    assert ce.core_hours == pytest.approx(0.01 * len(ce.commands))
    assert not gap.measured
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "| **1.400**, spread 0.000 | neither |" in page
    assert "- `ce`: 1.0 M parameters, 0.0 MB seen, audits passed. The model of" in page
    left = [f"`{row.key}`" for row in results.rows if not row.measured]
    assert f"Not measured yet: {', '.join(left)}." in page
    assert page.count(f"| {NOT_YET} |") == sum(bool(row.unit) for row in results.rows) - 1
    line = r"\| 80 \| 2 \| 0.7\d* \| 2 \| \d+ \| 0.001\d* \| 1.400 \| 0.030 \| \S+ \| \d+ \|"
    assert re.search(line, page)
    assert "blocktrain lab --width 16" in page
    assert str(tmp_path) not in page
    assert read(tmp_path / "docs" / "results.json") == results


def test_pictures_are_drawn_from_what_is_measured_only(tmp_path: Path) -> None:
    def names() -> set[str]:
        return {path.name for path in tmp_path.glob("docs/*.png")}

    assert drawn(published(TINY, tmp_path, tmp_path / "docs")) == {}
    assert names() == set()
    shown = {"gap": CURVES, "diloco": FRONTIER, "staleness": STALENESS, "blocks": CUTS}
    for key, name in shown.items():
        row = next(row for row in ROWS if row.key == key)
        assert name not in drawn(told(TINY, tmp_path))
        measure([row], TINY, tmp_path, measured(tmp_path, by_kind))
        assert name in drawn(told(TINY, tmp_path))
    published(TINY, tmp_path, tmp_path / "docs")
    assert names() == {CURVES, CREWS, FRONTIER, EACH, STALENESS, CUTS}
    published(replace(TINY, trial=1), tmp_path, tmp_path / "docs")
    assert names() == set()  # other settings: nothing of this is measured


def test_what_was_published_stays_while_settings_do(tmp_path: Path) -> None:
    """A fresh clone has docs and no runs: one row measured there must not forget the others."""
    row = next(row for row in ROWS if row.key == "lookahead")
    measure([row], TINY, tmp_path / "runs", measured(tmp_path / "runs", by_kind))
    first = published(TINY, tmp_path / "runs", tmp_path / "docs")
    assert first.row("lookahead") is not None
    again = published(TINY, tmp_path / "elsewhere", tmp_path / "docs")
    assert again == first
    other = published(replace(TINY, trial=9999), tmp_path / "elsewhere", tmp_path / "docs")
    assert other.row("lookahead") is None


def test_a_row_is_told_seed_by_seed(tmp_path: Path) -> None:
    """The first seed's model is audited before the second one is trained."""
    row = next(row for row in ROWS if row.key == "ce")
    one, all_three = replace(TINY, judged=True), replace(TINY, judged=True, seeds=(0, 1, 2))
    done: list[str] = []
    carry_out = measured(tmp_path, by_kind)

    def noted(step: Step) -> Record:
        done.append(step.name)
        return carry_out(step)

    measure([row], one, tmp_path, noted)
    so_far = look(row, all_three, tmp_path)
    assert so_far.found is not None
    assert [step.name.split("seed-")[1][0] for step in so_far.missing] == ["1", "2"]
    first = published(all_three, tmp_path, tmp_path / "docs").rows[0]
    assert (first.values, first.spread, first.seeds, first.seeds_left) == ([1.4], None, [0], 2)
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "| **1.400** (1 of 3 seeds so far) | neither so far |" in page
    measure([row], all_three, tmp_path, noted)
    assert ["seed" in name for name in done] == [False] * (len(done) - 4) + [True] * 4
    last = published(all_three, tmp_path, tmp_path / "docs").rows[0]
    assert (last.values, last.seeds, last.seeds_left) == ([1.4] * 3, [0, 1, 2], 0)
    elsewhere = published(all_three, tmp_path / "elsewhere", tmp_path / "docs").rows[0]
    assert elsewhere == last
    at_once = tmp_path / "at once"
    carry_out = measured(at_once, by_kind)
    done.clear()
    measure([row], all_three, at_once, noted)
    audits = [name.startswith("audit") for name in done]
    assert audits.index(True) < next(at for at, name in enumerate(done) if "seed-2" in name)


def test_records_of_another_machine_are_gone_on_from(tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.key == "memory_ratio")
    measure([row], TINY, tmp_path / "runs", measured(tmp_path / "runs", by_kind))
    keep(tmp_path / "runs", tmp_path / "docs" / "records")
    there = look(row, TINY, tmp_path / "runs")
    adopt(tmp_path / "docs" / "records", tmp_path / "elsewhere")
    assert look(row, TINY, tmp_path / "elsewhere") == there
    assert there.found is not None
    with pytest.raises(BadInput, match="has no records; without --known"):
        adopt(tmp_path, tmp_path / "elsewhere")
    (tmp_path / "docs" / "records" / "x.json").write_bytes(b"{")
    with pytest.raises(BadRun, match=r"x\.json is damaged"):
        adopt(tmp_path / "docs" / "records", tmp_path / "another")


def test_a_model_that_is_gone_is_made_again_for_its_audit(tmp_path: Path) -> None:
    """A fresh clone has records and no models; a record alone is enough where nothing else is."""
    row = next(row for row in ROWS if row.key == "gap_k8")
    done: list[str] = []
    carry_out = measured(tmp_path / "elsewhere", by_kind)

    def noted(step: Step) -> Record:
        done.append(step.name)
        return carry_out(step)

    measure([row], TINY, tmp_path / "runs", measured(tmp_path / "runs", by_kind))
    [audit] = (tmp_path / "runs").glob("audit-*.json")
    keep(tmp_path / "runs", tmp_path / "records")
    adopt(tmp_path / "records", tmp_path / "whole")
    assert look(row, TINY, tmp_path / "whole").found is not None
    (tmp_path / "records" / audit.name).unlink()
    adopt(tmp_path / "records", tmp_path / "elsewhere")
    assert measure([row], TINY, tmp_path / "elsewhere", noted) == {}
    assert done == [audit.stem.removeprefix("audit-"), audit.stem]


def test_readme_and_page_are_what_results_json_says() -> None:
    """`blocktrain reproduce --report-only` writes both."""
    results = read(ROOT / "docs" / "results.json")
    assert results is not None
    assert [row.key for row in results.rows] == [row.key for row in ROWS]
    readme = (ROOT / "README.md").read_text()
    assert with_section(readme, results) == readme
    assert (ROOT / "docs" / "results.md").read_text() == whole_page(results)
    for name in drawn(results):
        assert (ROOT / "docs" / name).read_bytes().startswith(b"\x89PNG")


def test_a_readme_without_a_place_is_refused() -> None:
    results = Results("full", "a text", 1, 1, 1, {}, {"pace": {}}, [])
    for text in ("", BEGIN, f"{END}\n{BEGIN}", BEGIN + BEGIN + END):
        with pytest.raises(BadInput, match=r"README.md needs one line"):
            with_section(text, results)


# --- the command ---------------------------------------------------------------------------------


def test_nothing_is_measured_when_only_a_report_is_asked_for(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "blocktrain", "reproduce", "--quick", "--report-only",
         "--rows", "gap, ce", "--out", str(tmp_path / "quick"), "--json"],
        capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path,
    )  # fmt: skip
    told = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(row["row"], row["state"]) for row in told] == [("gap", NOT_YET), ("ce", NOT_YET)]
    assert {path.name for path in (tmp_path / "quick").iterdir()} == {"results.json", "results.md"}
    assert {path.name for path in tmp_path.iterdir()} == {"quick"}  # never over docs/


def trainers(parent: psutil.Process) -> list[psutil.Process]:
    """Its children that are what they will be: between fork and exec one has another name."""
    found = []
    for child in parent.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "blocktrain.services.children" in child.cmdline():
                found.append(child)
    return found


def test_a_killed_reproduction_leaves_nobody_training(tmp_path: Path) -> None:
    """kill -9 of the parent ends its child, so the same command can go on in that folder."""
    step = Step("sleeper", ("lab", "--out", "OUT/never", "--data", "OUT/pipe", "--json"))
    os.mkfifo(tmp_path / "pipe")  # opening the text waits for ever
    script = (
        "from pathlib import Path; from blocktrain.bench.steps import Doing, Step;"
        f"Doing(Step({step.name!r}, {step.arguments!r}), Path({str(tmp_path)!r})).child.wait()"
    )
    parent = psutil.Popen([sys.executable, "-c", script])
    try:
        deadline = time.monotonic() + 60
        while not (children := trainers(parent)) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    [child] = children
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running()
