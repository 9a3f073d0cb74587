"""A whole run on one machine: a coordinator and workers as child processes, over real HTTP.

OUT/run/          the run's folder (aggregation/folder.py)
OUT/workers/N/    one worker each
OUT/logs/         what each child said
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from blocktrain.aggregation.folder import owners_token
from blocktrain.services import cores
from blocktrain.services.children import START, Child
from blocktrain.wire import owner
from blocktrain.wire.link import Link

GOOD_BYE = 20.0  # seconds that children have to finish a step and submit it


@dataclass
class Embedded:
    """The children of one run."""

    folder: Path
    workers: int
    data: str
    """What its workers open as the run's text."""
    threads: int = 1
    reference_line: Path | None = None
    url: str = ""
    children: list[Child] = field(default_factory=list)

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    @property
    def turns(self) -> Path:
        """Where the workers take turns at computing."""
        return self.folder / "turns"

    @property
    def token(self) -> str:
        """The owner's."""
        return owners_token(self.run)

    @contextmanager
    def up(self) -> Iterator[Link]:
        """Everything runs; at the end, however it comes, everything is told to stop."""
        cores.make(self.turns, max(1, (os.cpu_count() or 1) // self.threads))
        try:
            self.start_coordinator()
            with closing(Link(self.url, patience=START)) as link:
                link.bearer = self.token
                for number in range(1, self.workers + 1):
                    self.start_worker(number)
                yield link
        finally:
            self.stop()

    def start_coordinator(self) -> None:
        """Starts it at a port that it keeps, so that workers find it again after a crash."""
        address = self.folder / "address"
        port = address.read_text().strip() if address.is_file() else "0"
        arguments = ["coordinator", str(self.run), "--port", port, "--json"]
        if self.reference_line:
            arguments += ["--reference-line", str(self.reference_line)]
        child = Child("coordinator", arguments, self.folder / "logs" / "coordinator.log")
        child.start()
        self.children.append(child)
        self.url = str(child.first_line("url")["url"])
        port = self.url.rpartition(":")[2]
        address.write_text(port)
        child.arguments[child.arguments.index("--port") + 1] = port

    def start_worker(self, number: int) -> None:
        """One more worker."""
        arguments = [
            "join", self.url,
            "--token", self.token,
            "--folder", str(self.folder / "workers" / str(number)),
            "--name", f"worker-{number}",
            "--threads", str(self.threads),
            "--data", self.data,
            "--turns", str(self.turns),
        ]  # fmt: skip
        child = Child(f"worker-{number}", arguments, self.folder / "logs" / f"worker-{number}.log")
        child.start()
        self.children.append(child)

    def look_after(self) -> list[str]:
        """Starts dead children again; returns their names."""
        return [child.name for child in self.children if child.look()]

    def stop(self) -> None:
        """Workers first, so that they can submit what they have."""
        workers, coordinator = self.children[1:], self.children[:1]
        deadline = time.monotonic() + GOOD_BYE
        for group in (workers, coordinator):
            for child in group:
                child.stop(signal.SIGTERM)
            for child in group:
                child.end(deadline)
        self.children.clear()


def status(link: Link) -> owner.Status:
    """How the run is doing."""
    return link.ask("v1/status", owner.Status)
