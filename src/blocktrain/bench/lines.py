"""The WAN between hosts, made in one of two ways: by netem, or by the process of `tun.py`.

Either way a host gets one interface, `wan`, of 1,500 bytes a packet and without segmentation
offload; its uplink and its downlink have the same rate, and the round trip is the same between any
two. Hosts are known here by their addresses; each lives in a namespace.
"""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec

from blocktrain.bench import spaces, tun
from blocktrain.errors import BadInput, BlockTrainError

INTERFACE = "wan"
ETHERNET = 14  # bytes of header that a veth's counters see and a TUN's do not
BACKLOG = 10_000  # packets a TUN may hold unread, so that only the WAN's own queue ever drops

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


class Lines(Protocol):
    """What makes the WAN."""

    def connect(self, hosts: Mapping[str, str]) -> None:
        """Gives each host, an address and its namespace, an interface without an address yet."""
        ...

    def cut(self, address: str) -> None:
        """From now on the host's packets get lost, both ways."""
        ...

    def heal(self, address: str) -> None:
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

    def connect(self, hosts: Mapping[str, str]) -> None:
        spaces.write(self.space, "/proc/sys/net/ipv4/ip_forward", 1)
        wan = self.wan
        # The rate's second word is its overhead: a packet counts without its Ethernet header.
        rate = f"rate {wan.mbit}mbit -{ETHERNET}"
        # netem's limit is in packets, and includes those in flight.
        flying, waiting = (
            max(1, round(ms * wan.mbit * 125 / tun.MTU)) for ms in (wan.rtt_ms / 2, wan.queue_ms)
        )
        up = f"delay {wan.rtt_ms / 2}ms loss {100 * wan.loss}% {rate} limit {flying + waiting}"
        for number, (address, space) in enumerate(hosts.items()):
            port = self._port(address)
            end = f"mtu {tun.MTU} address 02:00:00:00:00:{number:02x}"
            link = f"{INTERFACE} {end} type veth peer name {port} {end} netns {self.space}"
            spaces.ip(space, f"link add name {link}")
            spaces.ip(space, f"link set dev {INTERFACE} arp off gso_max_segs 1")
            spaces.ip(self.space, f"link set dev {port} arp off gso_max_segs 1 up")
            spaces.ip(self.space, f"route add {address}/32 dev {port}")
            spaces.tc(space, f"qdisc add dev {INTERFACE} root netem {up}")
            spaces.tc(self.space, f"qdisc add dev {port} root netem {rate} limit {waiting}")

    def cut(self, address: str) -> None:
        if address not in self.apart:
            self.apart.add(address)
            self._blackhole("add", address)

    def heal(self, address: str) -> None:
        if address in self.apart:
            self.apart.remove(address)
            self._blackhole("del", address)

    def close(self) -> None:
        pass

    def _port(self, address: str) -> str:
        return f"to.{address}"

    def _blackhole(self, verb: str, address: str) -> None:
        for which in (f"iif {self._port(address)}", f"to {address}"):
            spaces.ip(self.space, f"rule {verb} pref 1 {which} type blackhole")


class Forwarded:
    """The WAN as the process of `tun.py`; this is the end that gives it orders."""

    def __init__(self, wan: Wan) -> None:
        self.wan = wan
        self.process: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()

    def connect(self, hosts: Mapping[str, str]) -> None:
        with ExitStack() as stack:
            devices = {}
            for address, space in hosts.items():
                name = f"bt{os.getpid()}.{next(numbers)}"
                devices[address] = device = self._open(name)
                stack.callback(os.close, device)
                # Opened out here under a name nobody else has, then moved with the file open.
                where = f"netns {space} name {INTERFACE}"
                spaces.run("ip", "link", "set", "dev", name, *where.split())
                how = f"mtu {tun.MTU} txqueuelen {BACKLOG}"
                spaces.ip(space, f"link set dev {INTERFACE} {how}")
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

    def cut(self, address: str) -> None:
        self._order(f"cut {address}")

    def heal(self, address: str) -> None:
        self._order(f"heal {address}")

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
    space = spaces.name(f"{next(numbers)}.probe")
    try:
        spaces.require()
        with spaces.made(space):
            spaces.tc(space, "qdisc add dev lo root netem delay 1ms")
    except BadInput:
        return False
    return True
