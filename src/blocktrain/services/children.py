"""Child processes of one command: started again when they die, and gone when their parent is."""

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from blocktrain import config
from blocktrain.errors import BadRun, Unreachable

START = 60.0  # seconds that a child has to come up
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
    said: int = 0
    """Bytes of the log that are of earlier starts."""

    def start(self) -> None:
        """Starts it; what it says goes to its log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.said = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "blocktrain.services.children", *self.arguments],
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

    def first_line(self, key: str) -> dict[str, Any]:
        """The line of JSON, with this key first, by which it tells that it is up."""
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            for line in self.log.read_bytes()[self.said :].splitlines():
                if line.startswith(b'{"' + key.encode()):
                    return dict(json.loads(line))
            if self.process is not None and self.process.poll() is not None:
                raise BadRun(f"The {self.name} did not start; {self.log} says why.")
            time.sleep(0.05)
        raise Unreachable(f"The {self.name} did not start within {START:.0f} s; see {self.log}.")

    def end(self, deadline: float) -> None:
        """Waits for it, and does not wait for ever."""
        if self.process is None:
            return
        try:
            self.process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


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
