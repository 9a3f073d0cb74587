"""blocktrain serve: a model with stages on this machine, the same ones that run across hosts."""

import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import platformdirs
from cyclopts import Parameter

from blocktrain.console import PLAIN, Out, Output, print_json
from blocktrain.learning.files import read_manifest
from blocktrain.services.serving import Cast, Serving

LOOK = 0.5  # seconds between two looks at the children


@dataclass(frozen=True)
class Front:
    """Where people find it."""

    host: str = "127.0.0.1"
    """Address to listen at."""
    port: int = 8080
    """0 is any free one."""
    keys: bool = False
    """Ask for API keys (blocktrain keys issue); without, anybody who can connect may ask."""


FRONT, CAST = Front(), Cast()


def serve(
    model: Path,
    *,
    folder: Path | None = None,
    front: Annotated[Front, Parameter(name="*")] = FRONT,
    cast: Annotated[Cast, Parameter(name="*")] = CAST,
    output: Out = PLAIN,
) -> None:
    """Serve a model: OpenAI's API and a playground page. Ctrl+C ends it.

    Parameters
    ----------
    model: Path
        A model directory.
    folder: Path
        For papers, API keys and logs; one of its own in the user's data folder if not given.
    """
    manifest = read_manifest(model)
    home = folder or Path(platformdirs.user_data_dir("blocktrain")) / "serving"
    crew = Serving(home / manifest.digest[:16] if folder is None else home, model, cast)
    gateway = ["--host", front.host, "--port", str(front.port)]
    gateway += [] if front.keys else ["--open"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # children are told to stop too
    with suppress(KeyboardInterrupt), crew.up(manifest.shape.blocks, gateway):
        crew.wait_until_ready()
        tell(crew, output)
        while True:
            for name in crew.look_after():
                output.say(f"{name} died and was started again; see {crew.folder / 'logs'}.")
            time.sleep(LOOK)


def tell(crew: Serving, output: Output) -> None:
    """Where people find it."""
    if output.json:
        print_json({"url": crew.url, "folder": str(crew.folder)})
    output.say(f"playground at {crew.url}, OpenAI's clients at {crew.url}/v1")
    if not crew.children[0].arguments.count("--open"):
        papers = crew.folder / "members" / "gateway"
        output.say(f"API keys: blocktrain keys issue {papers} NAME")
