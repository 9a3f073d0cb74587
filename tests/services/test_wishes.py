"""Which blocks a volunteer's machine and link can train."""

import pytest
from msgspec.structs import replace
from tests.services.conftest import Coordinate

from blocktrain.aggregation.charter import Charter
from blocktrain.errors import BadInput
from blocktrain.learning.objective import Recipe
from blocktrain.services.assigned import run_of
from blocktrain.services.wishes import SPARE, Wishes, downloads, fitting, needs

LARGE, SMALL = {"w": (1000, 1000)}, {"w": (100, 1000)}


@pytest.fixture
def charter(coordinate: Coordinate) -> Charter:
    """Of a run with a large block and a small one."""
    return replace(coordinate().keeper.charter, blocks=(LARGE, SMALL))


@pytest.fixture
def recipe(charter: Charter) -> Recipe:
    return run_of(charter).recipe


def test_any_block_where_all_fit(charter: Charter, recipe: Recipe) -> None:
    assert fitting(Wishes(), charter, recipe, memory=2**40) is None


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
    assert fitting(Wishes(max_download=large), charter, recipe, 2**40) is None
    with pytest.raises(BadInput, match="--max-download is too little"):
        fitting(Wishes(max_download=small / 60), charter, recipe, 2**40)


def test_a_block_that_was_chosen_is_not_doubted(charter: Charter, recipe: Recipe) -> None:
    assert fitting(Wishes(block=2), charter, recipe, memory=0) == [1]
    with pytest.raises(BadInput, match="There is no block 3; choose one from 1 to 2"):
        fitting(Wishes(block=3), charter, recipe, 2**40)
