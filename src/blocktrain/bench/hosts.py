"""Hosts on one machine: Linux network namespaces with a WAN between them, and real TCP over it.

    with hosts(["coordinator", "anna", "ben"], Wan(rtt_ms=50, mbit=100)) as made:
        made["anna"].start(["blocktrain", "join", f"http://{made['coordinator'].address}:8000"])

A process on a host sees loopback and the WAN of `lines.py`, nothing else. TCP's congestion control
is cubic, whatever the machine's own default is.
"""

import itertools
import json
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from blocktrain.bench import spaces
from blocktrain.bench.lines import ETHERNET, INTERFACE, Forwarded, Lines, Netem, Wan, has_netem
from blocktrain.errors import BadInput

__all__ = ["Host", "Traffic", "Wan", "Way", "hosts"]

CONGESTION = "cubic"
MOST = 200  # hosts; the addresses are 10.77.0.2 and on
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
PATIENCE = 10.0  # seconds for a killed process to be gone

Way = Literal["netem", "tun"]
numbers = itertools.count()


@dataclass(frozen=True)
class Traffic:
    """IP bytes through a host's interface since it was made, headers and repetitions included."""

    received: int
    sent: int


class Host:
    """One host: a process started here sees this host's network and no other."""

    def __init__(self, name: str, address: str, space: str, lines: Lines) -> None:
        self.name = name
        self.address = address
        self.space = space
        self._lines = lines
        self._started: list[subprocess.Popen[Any]] = []

    def start(self, arguments: list[str], **popen: Any) -> subprocess.Popen[Any]:
        """A process on this host; its pid is the program's own. It ends with the host."""
        process = subprocess.Popen(spaces.entering(self.space, arguments), **popen)
        self._started.append(process)
        return process

    def run(self, arguments: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
        """Runs a program on this host to its end and takes its output, whatever its exit code."""
        command = spaces.entering(self.space, arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)

    def partition(self) -> None:
        """Cuts this host off: whatever goes to or from it gets lost without a word."""
        self._lines.cut(self.address)

    def heal(self) -> None:
        """Ends the partition."""
        self._lines.heal(self.address)

    def traffic(self) -> Traffic:
        """What has gone through the interface so far."""
        link = json.loads(spaces.ip(self.space, f"-json -statistics link show {INTERFACE}"))[0]
        header = ETHERNET if link["link_type"] == "ether" else 0
        received, sent = (
            counted["bytes"] - header * counted["packets"]
            for counted in (link["stats64"]["rx"], link["stats64"]["tx"])
        )
        return Traffic(received, sent)

    def close(self) -> None:
        """Kills what still runs here, grandchildren too."""
        for process in self._started:
            process.kill()
        spaces.kill(self.space)
        for process in self._started:
            process.wait(PATIENCE)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe:
                    with suppress(OSError):  # what nobody reads any more cannot be flushed
                        pipe.close()


@contextmanager
def hosts(names: Sequence[str], wan: Wan, by: Way | None = None) -> Iterator[dict[str, Host]]:
    """Makes the hosts and their WAN; takes everything down at the end, whatever that end is.

    SIGTERM of this process is such an end too, where it had its default effect. After kill -9 the
    next call, of any process, sweeps up what was left. `by` is for tests: the default is netem
    where the kernel has it.
    """
    if len(set(names)) != len(names) or not 1 <= len(names) <= MOST:
        raise BadInput(f"{len(names)} hosts cannot be: they must have different names, at most "
                       f"{MOST} of them.")  # fmt: skip
    if wrong := [name for name in names if not NAME.fullmatch(name)]:
        raise BadInput(f"{wrong[0]!r} cannot name a host; use up to 32 of a-z, 0-9 and hyphen.")
    spaces.require()
    spaces.sweep()
    group = spaces.name(str(next(numbers)))
    with _terminated_in_order(), ExitStack() as stack:
        lines: Lines
        if by == "netem" or (by is None and has_netem()):
            lines = Netem(wan, stack.enter_context(spaces.made(f"{group}.wan")))
        else:
            lines = Forwarded(wan)
        made = {}
        for index, name in enumerate(names):
            space = stack.enter_context(spaces.made(f"{group}-{name}"))
            made[name] = Host(name, f"10.77.0.{index + 2}", space, lines)
        stack.callback(lines.close)
        lines.connect({host.address: host.space for host in made.values()})
        for host in made.values():
            stack.callback(host.close)
            spaces.ip(host.space, f"address add {host.address}/24 dev {INTERFACE} noprefixroute")
            spaces.ip(host.space, f"link set dev {INTERFACE} up")
            # By route, since a namespace may not choose an algorithm the machine restricts.
            spaces.ip(host.space, f"route add 10.77.0.0/24 dev {INTERFACE} congctl {CONGESTION}")
        yield made


@contextmanager
def _terminated_in_order() -> Iterator[None]:
    """SIGTERM ends this process as an error would: through every `finally`."""

    def leave(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough: a second would stop the tidying
        raise SystemExit(128 + number)

    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
