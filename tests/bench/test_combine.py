"""The benchmark of combining, small: its promises hold, and it would notice if they did not."""

import numpy as np
import pytest

from blocktrain.bench import combine
from blocktrain.errors import BlockTrainError

MB = 2**20


@pytest.mark.parametrize(("codec", "slowest"), [("fp32", 0.2), ("int4", 0.05)])
def test_many_updates_need_the_memory_of_less_than_one(codec: str, slowest: float) -> None:
    """At 1/25 of the size that `bench combine` is for, where what does not shrink with the block
    still weighs: 0.3 and 0.4 updates, 0.7 and 0.2 of numpy's speed, on a busy machine. Twelve
    replicas, so that whoever holds them all is far beyond the bound."""
    found = combine.measure(parameters=4_000_000, replicas=12, codec=codec)
    assert found["parameters"] == pytest.approx(4_000_000, rel=0.02)
    assert found["update_mib"] * MB == 4 * found["parameters"]
    assert found["replicas"] == 12
    assert 0.02 < found["memory_in_updates"] <= 1.0
    assert slowest < found["speed_ratio"] < 20
    assert found["speed_ratio"] == found["numpy_seconds"] / found["combine_seconds"]
    assert 0 < found["combine_seconds"]
    assert 0 < found["seconds_with_writing"]


def test_memory_that_is_taken_is_seen() -> None:
    held: list[np.ndarray] = []

    def hold() -> None:
        for _ in range(8):
            held.append(np.ones(4 * MB // 8))

    peak = combine.peak_while(hold)
    assert peak >= 30 * MB
    assert len(held) == 8


def test_the_block_has_the_size_it_says() -> None:
    like = combine.block_of(1021)
    sizes = [int(np.prod(shape)) for shape in like.values()]
    assert sum(sizes) == pytest.approx(100e6, rel=0.01)
    assert max(sizes) / sum(sizes) == pytest.approx(1 / 36, rel=0.01)


def test_a_child_that_fails_is_told(sentence: object) -> None:
    with pytest.raises(BlockTrainError, match="no codec 'zip'"):
        combine.measure(parameters=10_000, replicas=1, codec="zip")
