"""Processes that may be killed: coordinators, or workers with torch, forked by kill_points.py."""

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from blocktrain.config import environment


class Lives:
    """Starts coordinators, or workers with torch: a process that forks one for every life."""

    def __init__(self, kind: str) -> None:
        program = Path(__file__).with_name("kill_points.py")
        self.turn = threading.Lock()
        self.parent = subprocess.Popen(
            [sys.executable, str(program), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def start(self, log: Path, kill_at: int = 0, **told: Any) -> "Life":
        """A life that does what it is told, and dies at boundary `kill_at`."""
        line = json.dumps({"told": told, "log": str(log), "kill_at": kill_at})
        assert self.parent.stdin
        assert self.parent.stdout
        with self.turn:
            self.parent.stdin.write(line + "\n")
            self.parent.stdin.flush()
            return Life(int(self.parent.stdout.readline()))

    def close(self) -> None:
        """No life goes on."""
        assert self.parent.stdin
        assert self.parent.stdout
        self.parent.stdin.close()
        self.parent.wait()
        self.parent.stdout.close()


class Life:
    """One process that may be killed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self.handle: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self.handle = None  # it is dead already

    def over(self, within: float = 0.0) -> bool:
        """Whether it has ended, or does within so many seconds."""
        if self.handle is not None and select.select([self.handle], [], [], within)[0]:
            os.close(self.handle)
            self.handle = None
        return self.handle is None

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends it; kill -9 if nothing else is said."""
        if self.handle is not None:
            with suppress(ProcessLookupError):  # it was faster
                signal.pidfd_send_signal(self.handle, how)
        assert self.over(within=20), f"process {self.pid} does not end by {how.name}"


def free_port() -> int:
    """A port that nobody listens at, and that no outgoing connection gets while its owner is dead.

    Systems take ports from 32768 on for those.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")
