"""A whole run on one machine: a coordinator and workers as child processes, over real HTTP.

OUT/run/          the run's folder (aggregation/folder.py)
OUT/workers/N/    one worker each
OUT/logs/         what each child said
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from blocktrain import config
from blocktrain.aggregation.folder import owners_token
from blocktrain.errors import BadRun, Unreachable
from blocktrain.services import cores
from blocktrain.wire import owner
from blocktrain.wire.link import Link

START = 60.0  # seconds that a coordinator has to come up
GOOD_BYE = 20.0  # seconds that children have to finish a step and submit it
AGAIN = 1.0  # seconds before a dead child is started again


@dataclass
class Child:
    """A process that is started again when it dies."""

    name: str
    arguments: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    died: float = 0.0

    def start(self) -> None:
        """Starts it; what it says goes to its log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "blocktrain.services.embedded", *self.arguments],
                stdout=log,
                stderr=log,
                stdin=parent_alive(),
                env=config.environment(),
                start_new_session=True,  # Ctrl+C is for the parent, who tells its children
            )
        self.starts += 1

    def look(self) -> bool:
        """Starts it again if it died; whether it had. One that ended well has done its work."""
        if self.process is None or self.process.poll() in (None, 0):
            return False
        if not self.died:
            self.died = time.monotonic()
        if time.monotonic() - self.died < AGAIN:
            return False
        self.died = 0.0
        self.start()
        return True

    def stop(self, how: signal.Signals) -> None:
        """Tells it to stop, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)


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
        begin = child.log.stat().st_size if child.log.exists() else 0
        child.start()
        self.children.append(child)
        self.url = self.heard(child, begin)
        port = self.url.rpartition(":")[2]
        address.write_text(port)
        child.arguments[child.arguments.index("--port") + 1] = port

    def heard(self, child: Child, begin: int) -> str:
        """The URL that the coordinator tells on its first line."""
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            for line in child.log.read_bytes()[begin:].splitlines():
                if line.startswith(b'{"url"'):
                    return str(json.loads(line)["url"])
            if child.process is not None and child.process.poll() is not None:
                raise BadRun(f"The coordinator did not start; {child.log} says why.")
            time.sleep(0.05)
        raise Unreachable(f"The coordinator did not start within {START:.0f} s; see {child.log}.")

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
                self.end(child, deadline)
        self.children.clear()

    def end(self, child: Child, deadline: float) -> None:
        """Waits for a child, and does not wait for ever."""
        if child.process is None:
            return
        try:
            child.process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def status(link: Link) -> owner.Status:
    """How the run is doing."""
    return link.ask("v1/status", owner.Status)


@cache
def parent_alive() -> int:
    """The end of a pipe that ends when this process does, by kill -9 too: its other end is here."""
    return os.pipe()[0]


def child() -> None:
    """The command that a child was given, for as long as its parent lives.

    Else a killed parent leaves a coordinator behind, and nobody can go on with the run.
    """

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)  # at once: whatever has a receipt is on the disk

    threading.Thread(target=watch, name="parent", daemon=True).start()
    runpy.run_module("blocktrain", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    child()
