"""Which blocks a new stage should hold: the least-covered span that fits. Pure."""

from collections.abc import Sequence

from blocktrain.errors import BadInput
from blocktrain.wire.serving import Holding


def least_covered(present: Sequence[Holding], sizes: Sequence[int], room: int) -> tuple[int, int]:
    """The first and last block to hold, with `room` bytes of memory for blocks of these sizes.

    As many consecutive blocks as fit, where the rarest of them is held by the fewest others; among
    equals where the sum of holders is least, then the longest, then the first.
    """
    holders = [sum(h.first <= block <= h.last for h in present) for block in range(len(sizes))]
    spans = [
        (first, last)
        for first in range(len(sizes))
        for last in range(first, len(sizes))
        if sum(sizes[first : last + 1]) <= room
    ]
    if not spans:
        raise BadInput(
            f"The smallest block takes {min(sizes) >> 20} MiB, and {room >> 20} are free; "
            "close something, or hold it as int8."
        )

    def worth(span: tuple[int, int]) -> tuple[int, int, float, int]:
        held = holders[span[0] : span[1] + 1]
        needed = min(held)
        return needed, -held.count(needed), sum(held) / len(held), span[0]

    return min(spans, key=worth)


def parse(text: str, blocks: int) -> tuple[int, int]:
    """'2' or '2-3', counted from 1, as people write it -> indices from 0."""
    first, _, last = text.partition("-")
    try:
        found = int(first) - 1, int(last or first) - 1
    except ValueError:
        found = -1, -1
    if not 0 <= found[0] <= found[1] < blocks:
        raise BadInput(f"'{text}' names no blocks; write 1-{blocks}, a part of it, or auto.")
    return found
