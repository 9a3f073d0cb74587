"""Workers of one machine compute in turns.

More processes than cores push each other out of the caches: four workers on two cores need about a
tenth more CPU-seconds for the same steps than two (LOG.md, 2026-11-16). A folder holds one file
for each that may compute at once, and whoever holds a lock on one of them computes; a dead
process holds none.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK = 0.02  # seconds between two looks for a free place; a round takes seconds


def make(folder: Path, places: int) -> None:
    """Lets so many compute at once."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for number in range(places):
        (folder / str(number)).touch()


@contextmanager
def turn(folder: Path | None, stop: Callable[[], bool]) -> Iterator[None]:
    """Waits for a place and keeps it meanwhile; without a folder, or when told to stop, at once."""
    held = None
    while folder is not None and held is None and not stop():
        held = take(folder)
        if held is None:
            time.sleep(LOOK)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def take(folder: Path) -> int | None:
    """A lock on a free place, if there is one."""
    for path in sorted(folder.iterdir()):
        place = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(place)
        else:
            return place
    return None
