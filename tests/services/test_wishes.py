"""Which blocks a volunteer's machine and link can train."""

import dataclasses
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.services.conftest import Coordinate

from blocktrain.aggregation.charter import Charter
from blocktrain.errors import BadInput, CannotSave
from blocktrain.learning.model import Shape
from blocktrain.learning.objective import Recipe, Task
from blocktrain.services.assigned import run_of
from blocktrain.services.room import Room, takes
from blocktrain.services.wishes import PATIENT, SPARE, Wishes, downloads, fitting, needs

LARGE, SMALL = {"w": (1000, 1000)}, {"w": (100, 1000)}
PLENTY = 2**40


@pytest.fixture
def charter(coordinate: Coordinate) -> Charter:
    """Of a run with a large block and a small one."""
    return replace(coordinate().keeper.charter, blocks=(LARGE, SMALL))


@pytest.fixture
def recipe(charter: Charter) -> Recipe:
    return run_of(charter).recipe


@pytest.fixture
def four(charter: Charter) -> Charter:
    """Of a run with four blocks, the third of which is large."""
    rules = dataclasses.replace(charter.rules, blocks=4)
    return replace(charter, rules=rules, blocks=(SMALL, SMALL, LARGE, SMALL))


BLIND = Recipe(Shape(blocks=4), Task(lookahead=0))
"""Each block looks at those before it, and at no other."""


def test_any_block_where_all_fit(charter: Charter, recipe: Recipe) -> None:
    assert fitting(Wishes(), charter, recipe, memory=PLENTY) is None


def test_only_blocks_that_fit_into_memory(charter: Charter, recipe: Recipe) -> None:
    large, small = needs(0, charter), needs(1, charter)
    assert small > SPARE + 6 * 400_000
    assert fitting(Wishes(), charter, recipe, large + 1) is None
    assert fitting(Wishes(), charter, recipe, large) == [1]
    with pytest.raises(BadInput, match=r"needs 32\d MiB of memory, and 30\d are free"):
        fitting(Wishes(), charter, recipe, small)


def test_only_blocks_whose_rounds_fit_through_the_link(charter: Charter, recipe: Recipe) -> None:
    large, small = (downloads(block, charter, recipe) for block in (0, 1))
    assert large == small == sum(map(charter.update_size, (0, 1)))  # each looks at the other
    assert fitting(Wishes(max_download=large), charter, recipe, PLENTY) is None
    with pytest.raises(BadInput, match="--max-download is too little"):
        fitting(Wishes(max_download=small / 60), charter, recipe, PLENTY)


def test_a_slow_link_gets_early_blocks_for_they_look_at_less(four: Charter) -> None:
    each = [downloads(block, four, BLIND) for block in range(4)]
    assert each == sorted(each)
    assert each[3] == sum(map(four.update_size, range(4)))
    for count in (1, 2, 3):
        between = (each[count - 1] + each[count]) / 2 / PATIENT
        few = list(range(count))
        assert fitting(Wishes(max_download=between), four, BLIND, PLENTY) == few
        assert fitting(Wishes(), four, BLIND, PLENTY, rate=between) == few
    assert fitting(Wishes(max_download=each[3]), four, BLIND, PLENTY, rate=1.0) is None  # as told
    assert fitting(Wishes(), four, BLIND, PLENTY, rate=each[3]) is None
    assert fitting(Wishes(), four, BLIND, PLENTY, rate=1.0) == [0]  # better than nothing


def test_only_blocks_whose_update_can_be_sent(four: Charter) -> None:
    small, large = four.update_size(0), four.update_size(2)
    between = (small + large) / 2 / PATIENT
    assert fitting(Wishes(max_upload=between), four, BLIND, PLENTY) == [0, 1, 3]
    assert fitting(Wishes(max_upload=large), four, BLIND, PLENTY) is None
    down = (downloads(1, four, BLIND) + downloads(2, four, BLIND)) / 2 / PATIENT
    both = Wishes(max_upload=between, max_download=down)
    assert fitting(both, four, BLIND, PLENTY) == [0, 1]
    with pytest.raises(BadInput, match="--max-upload is too little"):
        fitting(Wishes(max_upload=small / PATIENT), four, BLIND, PLENTY)


def test_only_blocks_that_fit_on_the_disk_together(four: Charter) -> None:
    one, two, all_of_them = (takes(range(count), four, BLIND) for count in (1, 2, 4))
    assert fitting(Wishes(max_disk=one), four, BLIND, PLENTY) == [0]
    assert fitting(Wishes(max_disk=two), four, BLIND, PLENTY) == [0, 1]
    assert fitting(Wishes(max_disk=all_of_them), four, BLIND, PLENTY) is None
    with pytest.raises(CannotSave, match="--max-disk"):
        fitting(Wishes(max_disk=one - 1), four, BLIND, PLENTY)
    served = replace(four, corpus_served=True)
    text = sum(length for length, _ in four.splits)
    with pytest.raises(CannotSave, match="--max-disk"):
        fitting(Wishes(max_disk=one), served, BLIND, PLENTY)
    assert fitting(Wishes(max_disk=one + text), served, BLIND, PLENTY) == [0]
    assert fitting(Wishes(max_disk=one, data="mine.txt"), served, BLIND, PLENTY) == [0]


def test_room_is_refused_before_it_is_taken(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(bytes(600))
    Room(tmp_path).claim(2**60, "A block")  # no limit
    Room(tmp_path, 1000).claim(400, "A block")
    with pytest.raises(CannotSave, match="A block needs 401 bytes more, and 600 of the 1,000"):
        Room(tmp_path, 1000).claim(401, "A block")


def test_a_block_that_was_chosen_is_not_doubted(charter: Charter, recipe: Recipe) -> None:
    assert fitting(Wishes(block=2), charter, recipe, memory=0) == [1]
    with pytest.raises(BadInput, match="There is no block 3; choose one from 1 to 2"):
        fitting(Wishes(block=3), charter, recipe, PLENTY)
