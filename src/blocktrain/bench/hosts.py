"""Hosts on one machine: Linux network namespaces with a WAN between them, and real TCP over it.

    with hosts(["coordinator", "anna", "ben"], Wan(rtt_ms=50, mbit=100)) as made:
        made["anna"].start(["blocktrain", "join", f"http://{made['coordinator'].address}:8000"])

Every host has a line to all others: its uplink and its downlink have the same rate, and the round
trip is the same between any two. Where the kernel has netem, a router in a namespace of its own
makes the WAN; elsewhere the process of `tun.py` does. Either way a host has one interface besides
loopback, `wan`, of 1,500 bytes a packet and without segmentation offload, and one congestion
control, cubic, whatever the machine's own default is.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from blocktrain.bench import spaces, tun
from blocktrain.errors import BadInput, BlockTrainError

INTERFACE = "wan"
CONGESTION = "cubic"
ETHERNET = 14  # bytes of header that a veth's counters see and a TUN's do not
BACKLOG = 10_000  # packets a TUN may hold unread, so that only the WAN's own queue ever drops
MOST = 200  # hosts; the addresses are 10.77.0.2 and on
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
PATIENCE = 10.0  # seconds for a killed process to be gone

Way = Literal["netem", "tun"]
numbers = itertools.count()


@dataclass(frozen=True)
class Wan:
    """The lines between hosts. Loss is the share of packets lost on the way, 0 to below 1."""

    rtt_ms: float = 50
    mbit: float = 100
    loss: float = 0.0
    queue_ms: float = 200

    def __post_init__(self) -> None:
        if not (self.rtt_ms >= 0 and self.mbit > 0 and self.queue_ms > 0 and 0 <= self.loss < 1):
            raise BadInput(f"{self} cannot be: times and rates must be positive, loss below 1.")


@dataclass(frozen=True)
class Traffic:
    """IP bytes through a host's interface since it was made, headers and repetitions included."""

    received: int
    sent: int


class Host:
    """One host: a process started here sees this host's network and no other."""

    def __init__(self, name: str, address: str, space: str, lines: "Lines") -> None:
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
        self._lines.cut(self)

    def heal(self) -> None:
        """Ends the partition."""
        self._lines.heal(self)

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
            lines = Netem(wan, _space(stack, f"{group}.wan"))
        else:
            lines = Forwarded(wan)
        made = {}
        for index, name in enumerate(names):
            space = _space(stack, f"{group}-{name}")
            made[name] = Host(name, f"10.77.0.{index + 2}", space, lines)
        stack.callback(lines.close)
        lines.connect(list(made.values()))
        for host in made.values():
            stack.callback(host.close)
            spaces.ip(host.space, f"address add {host.address}/24 dev {INTERFACE} noprefixroute")
            spaces.ip(host.space, f"link set dev {INTERFACE} up")
            # By route, since a namespace may not choose an algorithm the machine restricts.
            spaces.ip(host.space, f"route add 10.77.0.0/24 dev {INTERFACE} congctl {CONGESTION}")
        yield made


class Lines(Protocol):
    """What makes the WAN: netem or the forwarder."""

    def connect(self, hosts: Sequence[Host]) -> None:
        """Gives each host its interface, without an address yet."""
        ...

    def cut(self, host: Host) -> None:
        """From now on the host's packets get lost, both ways."""
        ...

    def heal(self, host: Host) -> None:
        """The host's packets get through again."""
        ...

    def close(self) -> None:
        """Ends what does not end with the namespaces."""
        ...


class Netem:
    """The WAN as a router: netem on each host's uplink and on each of the router's ports.

    Both ends of a line have one hardware address and ask for none: ARP would go over the WAN too,
    and a partitioned host would learn that its neighbour is gone, which no WAN tells.
    """

    def __init__(self, wan: Wan, space: str) -> None:
        self.wan = wan
        self.space = space
        self.apart: set[str] = set()

    def connect(self, hosts: Sequence[Host]) -> None:
        spaces.write(self.space, "/proc/sys/net/ipv4/ip_forward", 1)
        wan = self.wan
        # The rate's second word is its overhead: a packet counts without its Ethernet header.
        rate = f"rate {wan.mbit}mbit -{ETHERNET}"
        # netem's limit is in packets, and includes those in flight.
        flying, waiting = (
            max(1, round(ms * wan.mbit * 125 / tun.MTU)) for ms in (wan.rtt_ms / 2, wan.queue_ms)
        )
        up = f"delay {wan.rtt_ms / 2}ms loss {100 * wan.loss}% {rate} limit {flying + waiting}"
        for number, host in enumerate(hosts):
            port = self._port(host)
            end = f"mtu {tun.MTU} address 02:00:00:00:00:{number:02x}"
            link = f"{INTERFACE} {end} type veth peer name {port} {end} netns {self.space}"
            spaces.ip(host.space, f"link add name {link}")
            spaces.ip(host.space, f"link set dev {INTERFACE} arp off gso_max_segs 1")
            spaces.ip(self.space, f"link set dev {port} arp off gso_max_segs 1 up")
            spaces.ip(self.space, f"route add {host.address}/32 dev {port}")
            spaces.tc(host.space, f"qdisc add dev {INTERFACE} root netem {up}")
            spaces.tc(self.space, f"qdisc add dev {port} root netem {rate} limit {waiting}")

    def cut(self, host: Host) -> None:
        if host.address not in self.apart:
            self.apart.add(host.address)
            self._blackhole("add", host)

    def heal(self, host: Host) -> None:
        if host.address in self.apart:
            self.apart.remove(host.address)
            self._blackhole("del", host)

    def close(self) -> None:
        pass

    def _port(self, host: Host) -> str:
        return f"to.{host.address}"

    def _blackhole(self, verb: str, host: Host) -> None:
        for which in (f"iif {self._port(host)}", f"to {host.address}"):
            spaces.ip(self.space, f"rule {verb} pref 1 {which} type blackhole")


class Forwarded:
    """The WAN as the process of `tun.py`; this is the end that gives it orders."""

    def __init__(self, wan: Wan) -> None:
        self.wan = wan
        self.process: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()

    def connect(self, hosts: Sequence[Host]) -> None:
        with ExitStack() as stack:
            devices = {}
            for host in hosts:
                name = f"bt{os.getpid()}.{next(numbers)}"
                devices[host.address] = device = self._open(name)
                stack.callback(os.close, device)
                # Opened out here under a name nobody else has, then moved with the file open.
                where = f"netns {host.space} name {INTERFACE}"
                spaces.run("ip", "link", "set", "dev", name, *where.split())
                how = f"mtu {tun.MTU} txqueuelen {BACKLOG}"
                spaces.ip(host.space, f"link set dev {INTERFACE} {how}")
            orders = tun.Orders(
                delay=self.wan.rtt_ms / 2000,
                rate=self.wan.mbit * 125_000,
                queue=self.wan.queue_ms / 1000,
                loss=self.wan.loss,
                devices=devices,
            )
            self.process = subprocess.Popen(
                [sys.executable, "-m", tun.__name__, msgspec.json.encode(orders).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=tuple(devices.values()),
                start_new_session=True,  # Ctrl+C is for the hosts' programs: they need a WAN to end
                text=True,
            )
        self._hear()

    def cut(self, host: Host) -> None:
        self._order(f"cut {host.address}")

    def heal(self, host: Host) -> None:
        self._order(f"heal {host.address}")

    def close(self) -> None:
        if self.process:
            self.process.kill()
            self.process.communicate()

    def _open(self, name: str) -> int:
        try:
            return tun.open_device(name)
        except OSError as error:
            raise BadInput(
                f"A WAN needs netem in the kernel or {tun.DEVICE}, and neither is here "
                f"({error.strerror}); load sch_netem or tun, or give the container the device."
            ) from error

    def _order(self, command: str) -> None:
        assert self.process
        with self.lock:
            with suppress(BrokenPipeError):  # then it is dead, and does not answer either
                print(command, file=self.process.stdin, flush=True)
            self._hear()

    def _hear(self) -> None:
        assert self.process
        assert self.process.stdout
        if self.process.stdout.readline() != "done\n":
            raise BlockTrainError("The process that carries packets has died; start again.")


def has_netem() -> bool:
    """Whether this kernel has netem: tried, since a module may load on demand."""
    with ExitStack() as stack:
        try:
            spaces.require()
            space = _space(stack, spaces.name(f"{next(numbers)}.probe"))
            spaces.tc(space, "qdisc add dev lo root netem delay 1ms")
        except BadInput:
            return False
    return True


def _space(stack: ExitStack, name: str) -> str:
    """A new namespace that is removed with the stack, even if it was made only by half."""
    stack.callback(spaces.remove, name)
    spaces.make(name)
    return name


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
