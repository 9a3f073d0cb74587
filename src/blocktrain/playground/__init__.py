"""The page where people try a served model: plain files, no build step, nothing vendored.

The gateway serves index.html at its root and everything else below static/. The page is of one
house with the dashboard: its style, its icon and its words are the dashboard's own, and only what
is different is written here. It asks for v1/route and v1/watch, both relative to its own address.
"""

from functools import cache
from importlib import resources

from blocktrain import dashboard
from blocktrain.dashboard import MEDIA_TYPES, File

SHARED = {"house.css": "style.css", "icon.svg": "icon.svg", "words.js": "words.js"}
"""What the page takes from the dashboard, under which name."""


@cache
def files() -> dict[str, File]:
    """Every file of the page by its name, index.html among them."""
    found = {name: dashboard.files()[theirs] for name, theirs in SHARED.items()}
    for each in resources.files(__name__).iterdir():
        ending = "." + each.name.rpartition(".")[2]
        if ending in MEDIA_TYPES:
            found[each.name] = File(MEDIA_TYPES[ending], each.read_bytes())
    return found
