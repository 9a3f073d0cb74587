"""The words of the project as types; the README says what each one means to people."""

from collections.abc import Callable
from typing import NewType

import numpy as np
from numpy.typing import NDArray

Digest = NewType("Digest", str)
"""sha256 of some bytes, as 64 hex digits. Two things with one digest are the same thing."""

Array = NDArray[np.float32]
Parameters = dict[str, Array]
"""One block's parameters (or their change) by name."""

Progress = Callable[[int, int], None]
"""Called as (done, total) while something long is under way."""


def silent(done: int, total: int) -> None:
    """A Progress that shows nothing."""
