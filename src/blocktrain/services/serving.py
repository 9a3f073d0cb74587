"""A whole serving network on one machine: a gateway and stages as child processes.

FOLDER/authority/      who belongs to it
FOLDER/members/NAME/   one child's papers each; the gateway's also holds the API keys
FOLDER/logs/           what each child said
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from blocktrain.disk import errors_are_clear, lock
from blocktrain.errors import BadRun, Unreachable
from blocktrain.inference.layout import equal_parts
from blocktrain.services.children import Child
from blocktrain.services.papers import admit, authority_in
from blocktrain.wire.certificates import MEMBER_LIFE

READY = 60.0  # seconds until every block must be served
GOOD_BYE = 10.0  # seconds that children have to let texts end
RENEW_AFTER = MEMBER_LIFE.total_seconds() / 2


@dataclass(frozen=True)
class Cast:
    """Who serves what."""

    stages: int = 3
    """Into how many stages the model is cut, each a process of its own."""
    replicas: int = 1
    """Of every stage; with two, any one may die in the middle of a text."""
    threads: int = 1
    """CPU threads of a stage."""
    weights: str = "fp32"
    """How weights are held: fp32, bf16 or int8."""

    def spans(self, blocks: int) -> list[str]:
        """Blocks of each stage, as people write them."""
        return [f"{first + 1}-{last + 1}" for first, last in equal_parts(blocks, self.stages)]


@dataclass
class Serving:
    """The children of one serving network."""

    folder: Path
    model: Path
    cast: Cast = field(default_factory=Cast)
    url: str = ""
    children: list[Child] = field(default_factory=list)
    admitted: float = field(default_factory=time.monotonic)
    """When all children last got papers."""

    @contextmanager
    def up(self, blocks: int, gateway: list[str]) -> Iterator[None]:
        """Everything runs; at the end, however it comes, everything is told to stop."""
        with errors_are_clear(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            why = f"A model is served with {self.folder} already; stop that, or give --folder."
            alone = lock(self.folder / "lock", why)
        try:
            first = self.start("gateway", ["gateway", str(self.model), *gateway, "--json"])
            try:
                self.url = str(first.first_line("url")["url"])
            except BadRun:
                self.refuse_dead()
                raise
            for copy in range(self.cast.replicas):
                for span in self.cast.spans(blocks):
                    self.start_stage(span, copy)
            yield
        finally:
            self.stop()
            os.close(alone)

    def start_stage(self, span: str, copy: int) -> None:
        """One more stage, which announces itself to the gateway."""
        arguments = [
            "stage", str(self.model),
            "--blocks", span,
            "--threads", str(self.cast.threads),
            "--weights", self.cast.weights,
            "--announce", self.url,
            "--json",
        ]  # fmt: skip
        self.start(f"stage-{span}-{copy + 1}", arguments)

    def start(self, name: str, arguments: list[str]) -> Child:
        """One more child, with papers of its own."""
        papers = self.folder / "members" / name
        admit(authority_in(self.folder / "authority"), papers)
        child = Child(name, [*arguments, "--papers", str(papers)], self.folder / f"logs/{name}.log")
        child.start()
        self.children.append(child)
        return child

    def wait_until_ready(self) -> None:
        """Until every block is served, or a child has ended."""
        deadline = time.monotonic() + READY
        while time.monotonic() < deadline:
            self.refuse_dead()
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/healthz", trust_env=False).status_code == httpx.codes.OK:
                    return
            time.sleep(0.1)
        logs = self.folder / "logs"
        raise Unreachable(f"Not every block is served within {READY:.0f} s; see {logs}.")

    def refuse_dead(self) -> None:
        """Raises if a child has ended, in its own words."""
        for child in self.children:
            if child.process is not None and child.process.poll() is not None:
                lines = child.log.read_bytes()[child.said :].splitlines()
                raise BadRun(f"The {child.name} did not start: {last_words(lines)}")

    def look_after(self) -> list[str]:
        """Starts dead children again; returns their names. Papers that age are replaced."""
        if time.monotonic() - self.admitted > RENEW_AFTER:
            for child in self.children:
                admit(authority_in(self.folder / "authority"), self.folder / "members" / child.name)
            self.admitted = time.monotonic()
        return [child.name for child in self.children if child.look()]

    def stop(self) -> None:
        """The gateway first, so that nobody asks for a text whose stages are going."""
        deadline = time.monotonic() + GOOD_BYE
        for child in self.children:
            child.stop(signal.SIGTERM)
        for child in self.children:
            child.end(deadline)
        self.children.clear()


def last_words(lines: list[bytes]) -> str:
    """What a child that ended said in the end: an error as JSON, or a bug's last line."""
    last = lines[-1].decode(errors="replace") if lines else "it said nothing."
    with suppress(msgspec.DecodeError):
        return str(msgspec.json.decode(last, type=dict[str, Any]).get("error", last))
    return last
