"""The benchmark of combining, small: its promises hold, and it would notice if they did not."""

import mmap
import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from blocktrain.bench import combine
from blocktrain.commands.bench import combine as command
from blocktrain.console import Output
from blocktrain.errors import BadInput, BlockTrainError
from blocktrain.terms import Digest

MB = 2**20
pytestmark = pytest.mark.alone


def test_many_updates_need_the_memory_of_less_than_one(capfd: pytest.CaptureFixture[str]) -> None:
    """At 1/25 of the size that `bench combine` is for, where what does not shrink with the block
    still weighs: 0.26 and 0.57 updates, 0.72 and 0.19 of numpy's speed, on a busy machine.
    Twelve replicas, so that whoever holds them all is far beyond the bound."""
    command(parameters=4_000_000, replicas=12, output=Output(json=True))
    found = msgspec.json.decode(capfd.readouterr().out)
    fp32, int4 = found.pop("rows")
    assert found == fp32
    assert (fp32["codec"], int4["codec"]) == ("fp32", "int4")
    for row, slowest in ((fp32, 0.2), (int4, 0.05)):
        assert row["parameters"] == pytest.approx(4_000_000, rel=0.02)
        assert row["update_mib"] * MB == 4 * row["parameters"]
        assert row["replicas"] == 12
        assert 0.02 < row["memory_in_updates"] <= 1.0
        assert slowest < row["speed_ratio"] < 20
        assert row["speed_ratio"] == row["numpy_seconds"] / row["combine_seconds"]
        assert row["combine_seconds"] > 0
        assert row["speed_ratio_by_clock"] > 0
        assert row["seconds_with_writing"] > row["combine_seconds"] / 3


def test_nothing_beside_fp32_is_fp32_alone() -> None:
    (row,) = combine.measure(parameters=10_000, replicas=2, beside="fp32")["rows"]
    assert row["codec"] == "fp32"


def test_a_codec_that_is_not_there_is_told(sentence: Callable[[BaseException], str]) -> None:
    with pytest.raises(BadInput, match="no codec 'zip'") as error:
        combine.measure(beside="zip")
    assert "int4" in sentence(error.value)


def test_memory_that_is_taken_is_seen() -> None:
    held: list[mmap.mmap] = []

    def hold() -> None:
        # Its own memory, and not what malloc kept of other tests.
        held.append(mmap.mmap(-1, 64 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        for _ in range(64):
            held[-1].write(bytes(MB))

    def hold_and_let_go() -> None:
        hold()
        time.sleep(0.1)
        held.pop().close()

    assert 60 * MB < combine.peak_while(hold_and_let_go) < 200 * MB
    assert 60 * MB < combine.peak_while(hold) < 200 * MB


def test_the_block_has_the_size_it_says() -> None:
    like = combine.block_of(1021)
    sizes = [int(np.prod(shape)) for shape in like.values()]
    assert sum(sizes) == pytest.approx(100e6, rel=0.01)
    assert max(sizes) / sum(sizes) == pytest.approx(1 / 36, rel=0.01)


def test_a_child_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, sentence: Callable[[BaseException], str]
) -> None:
    nothing = Digest("0" * 64)
    case = combine.Case(8, "fp32", nothing, nothing, [], [])
    monkeypatch.setattr(combine, "prepare", lambda *_: case)
    with pytest.raises(BlockTrainError) as error:
        combine.measure(10_000, beside="fp32")
    assert "000 is not here" in sentence(error.value)
