"""A WAN in one process: it owns a TUN device per host and carries packets between them, late.

For kernels without netem. Every packet waits its turn on the sender's uplink, flies for half a
round trip, then waits its turn on the receiver's downlink. A line that would make it wait longer
than the queue drops it, as a router does. Packets are what TCP makes for a line of 1,500 bytes, one
read and one write each: segmentation offload would be cheaper, but would lose and count many
packets as one.

What is counted against the rate is the IP packet: no Ethernet header, no preamble.
"""

import fcntl
import gc
import os
import random
import select
import struct
import sys
import time
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from socket import inet_aton

import msgspec

DEVICE = "/dev/net/tun"
MTU = 1500
TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000  # packets come bare, without a header of the driver's own

# After work the process sleeps this long, so that a stream is carried in batches: a packet is at
# most so much late at each end, and the rate stays exact because turns are computed, not timed.
TICK = 0.0005
POLL = 0.001  # epoll counts in whole milliseconds; the last one is slept in ticks
BATCH = 256  # packets read from one host before the others get their turn
NICE = -10  # ahead of whoever computes on these cores: a WAN does not slow down with its hosts


class Orders(msgspec.Struct, frozen=True):
    """How the WAN is, in seconds and bytes, and which open device carries which address."""

    delay: float
    rate: float
    queue: float
    loss: float
    devices: dict[str, int]


class Line:
    """One host's line: its device, and the instants at which each direction is free again."""

    __slots__ = ("cut", "device", "down_free", "up_free")

    def __init__(self, device: int) -> None:
        self.device = device
        self.up_free = 0.0
        self.down_free = 0.0
        self.cut = False


class Forwarder:
    """All lines, and the packets under way between them."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.lines = {inet_aton(name): Line(fd) for name, fd in orders.devices.items()}
        # (due, order, packet, from, to, is on the downlink): the earliest first
        self.flying: list[tuple[float, int, bytes, Line, Line, bool]] = []
        self.order = count()
        self.luck = random.Random(0)

    def take(self, line: Line, now: float) -> None:
        """Reads what a host has sent and queues it on the host's uplink."""
        orders, lines, order = self.orders, self.lines, self.order
        for _ in range(BATCH):
            try:
                packet = os.read(line.device, MTU)
            except BlockingIOError:
                return
            to = lines.get(packet[16:20])  # an IPv4 header's destination; IPv6 finds none
            start = max(line.up_free, now)
            if to is None or line.cut or start - now > orders.queue:
                continue
            line.up_free = start + len(packet) / orders.rate
            if orders.loss and self.luck.random() < orders.loss:
                continue
            heappush(
                self.flying, (line.up_free + orders.delay, next(order), packet, line, to, False)
            )

    def deliver(self, now: float) -> None:
        """Moves every packet whose time has come: onto the downlink, or off it to its host."""
        flying, orders, order = self.flying, self.orders, self.order
        while flying and flying[0][0] <= now:
            due, _, packet, line, to, arrived = heappop(flying)
            if line.cut or to.cut:
                continue
            if arrived:
                try:
                    os.write(to.device, packet)
                except OSError:  # a host that is full or down loses the packet
                    continue
            elif to.down_free - due <= orders.queue:
                to.down_free = max(to.down_free, due) + len(packet) / orders.rate
                heappush(flying, (to.down_free, next(order), packet, line, to, True))

    def obey(self, command: str) -> None:
        """`cut ADDRESS` or `heal ADDRESS`."""
        verb, address = command.split()
        self.lines[inet_aton(address)].cut = verb == "cut"

    def run(self) -> None:
        """Carries packets until standard input ends, as it does when whoever started it is gone."""
        devices = {line.device: line for line in self.lines.values()}
        poller = select.epoll()
        for device in (*devices, sys.stdin.fileno()):
            poller.register(device, select.EPOLLIN)
        while True:
            wait = max(0.0, self.flying[0][0] - time.monotonic() - POLL) if self.flying else None
            ready = [device for device, _ in poller.poll(wait)]
            now = time.monotonic()
            for device in ready:
                if device in devices:
                    self.take(devices[device], now)
                elif command := sys.stdin.readline():
                    self.obey(command)
                    print("done", flush=True)
                else:
                    return
            self.deliver(now)
            time.sleep(TICK)


def open_device(name: str) -> int:
    """A new TUN device of that name; it is gone as soon as nobody has it open."""
    device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(device)
        raise
    return device


def main() -> None:
    """The process: its orders are its only argument."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    gc.disable()  # nothing here refers to itself, and a collection would be a hiccup of the WAN
    forwarder = Forwarder(msgspec.json.decode(sys.argv[1], type=Orders))
    print("done", flush=True)
    forwarder.run()


if __name__ == "__main__":
    main()
