"""A new stage goes where it is needed."""

import pytest

from blocktrain.errors import BadInput
from blocktrain.inference.coverage import least_covered, parse
from blocktrain.terms import Digest
from blocktrain.wire.serving import Holding


def holding(first: int, last: int) -> Holding:
    return Holding(Digest("0" * 64), first, last, "fp32", "cpu")


@pytest.mark.parametrize(
    ("held", "room", "span"),
    [
        ([], 100, (0, 3)),  # all fits: all of it
        ([], 20, (0, 1)),
        ([(0, 1)], 20, (2, 3)),
        ([(0, 1), (2, 3)], 20, (0, 1)),  # everything once: begin again
        ([(0, 2)], 20, (3, 3)),  # one alone is missing: not a neighbour that somebody has
        ([(0, 0), (3, 3)], 30, (1, 2)),
        ([(0, 3), (0, 3), (1, 3)], 10, (0, 0)),
    ],
)
def test_the_rarest_blocks_come_first(
    held: list[tuple[int, int]], room: int, span: tuple[int, int]
) -> None:
    assert least_covered([holding(*each) for each in held], [10] * 4, room) == span


def test_no_room_is_said() -> None:
    with pytest.raises(BadInput, match="close something"):
        least_covered([], [2**20], 10)


def test_blocks_are_counted_from_one() -> None:
    assert parse("2", 4) == (1, 1)
    assert parse("1-4", 4) == (0, 3)


@pytest.mark.parametrize("text", ["0", "3-2", "1-5", "", "a", "1-2-3", "-1"])
def test_what_names_no_blocks_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="names no blocks"):
        parse(text, 4)
