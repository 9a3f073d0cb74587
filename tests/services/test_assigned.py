"""A charter's settings: old ones open as they were, impossible ones allocate nothing."""

import json
import resource
from typing import Any

import msgspec
import pytest

from blocktrain.aggregation.charter import Charter
from blocktrain.errors import BadInput
from blocktrain.services.assigned import refuse_other_blocks, run_of

from .conftest import TINY, Coordinate


@pytest.fixture
def charter(coordinate: Coordinate) -> Charter:
    return coordinate().keeper.charter


def told(charter: Charter, **shape: Any) -> Charter:
    """The same charter with another shape in its settings; None takes a setting away."""
    table = json.loads(charter.learning)
    kept = table["shape"] | shape
    table["shape"] = {name: value for name, value in kept.items() if value is not None}
    return msgspec.structs.replace(charter, learning=json.dumps(table))


def test_settings_that_make_the_blocks_pass(charter: Charter) -> None:
    assert run_of(charter).shape == TINY.shape
    refuse_other_blocks(charter, run_of(charter).shape)


def test_a_charter_of_before_runs_had_vectors_is_of_single_bytes(charter: Charter) -> None:
    assert run_of(told(charter, grams=None, gram_rows=None)).shape.grams == 1


@pytest.mark.parametrize(
    "lie",
    [
        {"gram_rows": 2**62},
        {"gram_rows": 2**20},
        {"width": 2**20, "heads": 2},
        {"layers": 2**40},
        {"layers": 5},
        {"blocks": 2**40},
        {"blocks": 1},
        {"objective": "denoise"},
        {"grams": 1},
    ],
    ids=str,
)
def test_other_blocks_are_refused_before_they_take_memory(
    charter: Charter, lie: dict[str, Any]
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadInput, match="do not make the blocks"):
        refuse_other_blocks(charter, run_of(told(charter, **lie)).shape)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB
