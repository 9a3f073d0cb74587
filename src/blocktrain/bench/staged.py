"""A model's stages as processes, on this machine or on hosts with a WAN between them."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from blocktrain import config
from blocktrain.inference.layout import equal_parts
from blocktrain.services import children
from blocktrain.services.papers import admit, authority_in

GOOD_BYE = 10.0  # seconds that stages have to end


class Post(NamedTuple):
    """Where a process runs: on this machine if nothing else is said."""

    address: str = "127.0.0.1"
    start: Callable[..., "subprocess.Popen[Any]"] = subprocess.Popen


HERE = Post()


@dataclass
class Posted(children.Child):
    """A child at a post."""

    post: Post = HERE

    def start(self) -> None:
        """Starts it there; what it says goes to its log."""
        with self.log.open("wb") as log:
            self.process = self.post.start(
                [sys.executable, "-m", children.__name__, *self.arguments],
                stdout=log,
                stderr=log,
                stdin=children.parent_alive(),
                env=config.environment(),
            )


@contextmanager
def staged(
    model: Path, blocks: int, folder: Path, posts: Sequence[Post], threads: int = 1
) -> Iterator[list[str]]:
    """One stage at each post; gives their addresses. `folder/authority` admits them."""
    crew = []
    for post, (first, last) in zip(posts, equal_parts(blocks, len(posts)), strict=True):
        papers = folder / f"{model.resolve().name}-stage-{first + 1}-{last + 1}"
        admit(authority_in(folder / "authority"), papers)
        crew.append(stage_at(post, model, (first, last), papers, threads=threads))
    with up(crew) as told:
        yield [f"{each['host']}:{each['port']}" for each in told]


def stage_at(
    post: Post, model: Path, span: tuple[int, int], papers: Path, port: int = 0, threads: int = 1
) -> Posted:
    """A stage that can be started at a post, with the papers of a member."""
    blocks = f"{span[0] + 1}-{span[1] + 1}"
    arguments = [
        "stage", str(model), "--papers", str(papers), "--blocks", blocks, "--host", post.address,
        "--port", str(port), "--threads", str(threads), "--json",
    ]  # fmt: skip
    return Posted(f"stage-{blocks}", arguments, papers / "log", post=post)


@contextmanager
def up(crew: Sequence[Posted]) -> Iterator[list[dict[str, Any]]]:
    """All of these stages run; gives what each told of itself. In the end all are told to stop."""
    try:
        for child in crew:
            child.start()
        yield [child.first_line("stage") for child in crew]
    finally:
        for child in crew:
            child.stop(signal.SIGTERM)
        deadline = time.monotonic() + GOOD_BYE
        for child in crew:
            child.end(deadline)
