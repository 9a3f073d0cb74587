"""The page that shows a run to anybody who watches: plain files, no build step, nothing vendored.

The coordinator serves index.html at its root and everything else below static/. The page asks for
v1/status and v1/events, both relative to its own address, and shows what they say
(wire/owner.py: Status). Nothing of this package needs more than the standard library.
"""

from functools import cache
from importlib import resources
from typing import NamedTuple

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Of what is served; a file with another ending stays at home."""


class File(NamedTuple):
    """One file as a browser gets it."""

    media_type: str
    body: bytes


@cache
def files() -> dict[str, File]:
    """Every file of the page by its name, index.html among them."""
    found = {}
    for each in resources.files(__name__).iterdir():
        ending = "." + each.name.rpartition(".")[2]
        if ending in MEDIA_TYPES:
            found[each.name] = File(MEDIA_TYPES[ending], each.read_bytes())
    return found
