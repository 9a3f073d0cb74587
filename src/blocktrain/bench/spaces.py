"""Network namespaces by way of iproute2: made, entered, and always removed again.

A namespace carries its maker's process id in its name, so that whoever comes next can sweep up
after one that was killed.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blocktrain.errors import BadInput

FOLDER = Path("/run/netns")
NAME = re.compile(r"blocktrain-(\d+)-.+")
PATIENCE = 10.0  # seconds for one command, or for all processes of a namespace to be gone
PAUSE = 0.01


def require() -> None:
    """Says what is missing, if anything is, before anything is made."""
    if os.geteuid():
        raise BadInput("Hosts are network namespaces, which only root may make; run this as root.")
    if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        raise BadInput(f"There is no `{missing[0]}` here; install iproute2 (Debian's name for it).")


def name(rest: str) -> str:
    """A name of this process's own, if the rest is."""
    return f"blocktrain-{os.getpid()}-{rest}"


@contextmanager
def made(space: str) -> Iterator[str]:
    """A namespace with nothing but loopback. What is added to it has no IPv6."""
    try:
        run("ip", "netns", "add", space)
        ip(space, "link set dev lo up")
        # Else a new interface speaks of itself, and is counted, before anybody has said a word.
        write(space, "/proc/sys/net/ipv6/conf/default/disable_ipv6", 1)
        yield space
    finally:
        remove(space)


def remove(space: str) -> None:
    """Kills what runs in the namespace and removes it, if it is there."""
    if (FOLDER / space).exists():
        kill(space)
        run("ip", "netns", "delete", space)


def kill(space: str) -> None:
    """Kills every process in the namespace, and those they start meanwhile."""
    end = time.monotonic() + PATIENCE
    while (pids := run("ip", "netns", "pids", space).split()) and time.monotonic() < end:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(PAUSE)


def sweep() -> None:
    """Removes every namespace whose maker is dead."""
    for path in FOLDER.glob("blocktrain-*"):
        found = NAME.fullmatch(path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            with suppress(BadInput):  # somebody else sweeps too
                remove(path.name)


def entering(space: str, arguments: list[str]) -> list[str]:
    """The command that runs a program in a namespace, under the command's own pid."""
    return ["ip", "netns", "exec", space, *arguments]


def write(space: str, path: str, value: int) -> None:
    """Sets a kernel setting of the namespace, if this kernel has it."""
    if Path(path).exists():
        run(*entering(space, ["sh", "-c", f"echo {value} > {path}"]))


def ip(space: str, command: str) -> str:
    """Runs `ip` on the namespace."""
    return run("ip", "-n", space, *command.split())


def tc(space: str, command: str) -> str:
    """Runs `tc` on the namespace."""
    return run("tc", "-n", space, *command.split())


def run(*command: str) -> str:
    """Runs a command and returns what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        said = (done.stderr.strip() or "no word").splitlines()[-1]
        raise BadInput(
            f"`{' '.join(command)}` failed ({said}); network namespaces need root with "
            "CAP_NET_ADMIN and CAP_SYS_ADMIN, which containers often lack."
        )
    return done.stdout
