"""Hosts and the lines between them, as people write them down or a gateway has measured them.

A file of hosts, in TOML or with the same keys in JSON (as `bench wan` writes it):

    rtt_ms = 50              # between any two hosts of which no link says otherwise
    mbit = 100
    gateway = "anna"         # on which host; without: beside the first stage

    [[hosts]]
    name = "anna"
    blocks = "1-2"           # without, on all: equal parts, in this order
    step_ms = 1.5            # computing for one position ...
    position_ms = 0.1        # ... and for each of many; without: as this machine does

    [[links]]
    between = ["anna", "ben"]
    rtt_ms = 20
    mbit = 50

Or what a gateway answers at /v1/route, with the stages as it has measured them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from blocktrain import config
from blocktrain.errors import BadConfig, BadInput
from blocktrain.inference import coverage, routes
from blocktrain.inference.measures import SMALL_ROWS, UNSEEN_RATE
from blocktrain.inference.plan import Line, Seat, Speed, Way
from blocktrain.inference.routes import Candidate
from blocktrain.terms import Digest
from blocktrain.wire.serving import Holding, Place

HERE = 1e9  # bytes per second within one host
MBIT = 1e6 / 8  # bytes per second
GATEWAY = "gateway"

SpeedOf = Callable[[int, int], Speed]
"""How fast an ordinary host computes blocks `first` to `last`."""


@dataclass(frozen=True)
class Host:
    """One host of the file."""

    name: str
    blocks: str = ""
    step_ms: float | None = None
    position_ms: float | None = None

    def __post_init__(self) -> None:
        refuse_negative(self, "step_ms", "position_ms")


@dataclass(frozen=True)
class Link:
    """One line of the file, the same in both directions."""

    between: tuple[str, str]
    rtt_ms: float | None = None
    mbit: float | None = None

    def __post_init__(self) -> None:
        refuse_negative(self, "rtt_ms", "mbit")


@dataclass(frozen=True)
class Layout:
    """The whole file."""

    hosts: list[Host]
    links: list[Link] = field(default_factory=list)
    gateway: str = ""
    rtt_ms: float | None = None
    mbit: float | None = None

    def __post_init__(self) -> None:
        refuse_negative(self, "rtt_ms", "mbit")
        names = [host.name for host in self.hosts]
        if not names or len(set(names)) != len(names):
            raise BadConfig("There must be at least one host, and no two of one name.")
        known = {*names, self.gateway}
        for name in (name for link in self.links for name in link.between):
            if name not in known:
                raise BadConfig(f"A link leads to '{name}', which is no host; add or rename it.")
        if len({bool(host.blocks) for host in self.hosts}) > 1:
            raise BadConfig("Some hosts have blocks and some have not; give them to all or none.")


def read(path: Path) -> Layout:
    """A file of hosts or a gateway's route, or a sentence that says what is wrong with it."""
    if path.suffix != ".json":
        return filled(config.read(path), str(path))
    try:
        table = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise BadConfig(f"{path} cannot be read ({error.strerror}); check the path.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadConfig(f"{path} is not JSON ({error}); write it again.") from None
    return from_route(table, str(path)) if "stages" in table else filled(table, str(path))


def filled(table: dict[str, Any], where: str) -> Layout:
    """A plain table as a layout; keys that nobody knows are refused in hosts and links too."""
    for key, kind in (("hosts", Host), ("links", Link)):
        entries = table.get(key, [])
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict):
                config.refuse_unknown(kind, entry, f"{where} [{key}]")
    return config.fill(Layout, table, where)


@dataclass(frozen=True)
class Measured:
    """A stage, of what a gateway says at /v1/route; the rest is not looked at."""

    stage: str
    first: int
    last: int
    rtt_ms: float
    step_ms: float | None = None
    onward_ms: dict[str, float] = field(default_factory=dict)


def from_route(table: dict[str, Any], where: str) -> Layout:
    """The stages that a gateway sees, with the lines between them as far as it can know them.

    Where no text went from one stage to another, neither has measured the round trip: it is taken
    for the longer one of the gateway's to the two (inference/measures.py), and the rate for what
    nobody has seen yet.
    """
    try:
        stages = msgspec.convert(table["stages"], list[Measured])
    except msgspec.ValidationError as error:
        raise BadConfig(f"{where}: {error}; save what /v1/route answers once more.") from None
    hosts = [
        Host(stage.stage[:12], f"{stage.first + 1}-{stage.last + 1}", stage.step_ms)
        for stage in stages
    ]
    rtts = {stage.stage[:12]: stage.rtt_ms for stage in stages}
    links = [Link((GATEWAY, name), rtt) for name, rtt in rtts.items()]
    measured = {
        frozenset((stage.stage[:12], other[:12])): rtt
        for stage in stages
        for other, rtt in stage.onward_ms.items()
    }
    links += [
        Link((one, two), measured.get(frozenset((one, two)), max(rtts[one], rtts[two])))
        for one in rtts
        for two in rtts
        if one < two
    ]
    return Layout(hosts, links, GATEWAY, mbit=UNSEEN_RATE / MBIT)


def way(layout: Layout, blocks: int, speed_of: SpeedOf) -> Way:
    """The quickest way through every block; Unreachable if there is none."""
    spans = spans_of(layout, blocks)
    seats = {
        host.name: Seat(host.name, *span, speed(host, span, speed_of))
        for host, span in zip(layout.hosts, spans, strict=True)
    }
    starts = [host.name for host, (first, _) in zip(layout.hosts, spans, strict=True) if first == 0]
    gateway = layout.gateway or (starts or [layout.hosts[0].name])[0]
    candidates = [
        Candidate(
            Place(seat.host, seat.host, 1),
            Holding(Digest(""), seat.first, seat.last, "fp32", "any"),
            rtt=line(layout, gateway, seat.host).rtt if touches_gateway(seat, blocks) else 0.0,
            seconds=seat.speed.seconds(1),
        )
        for seat in seats.values()
    ]

    def trip(source: Candidate, target: Candidate) -> float:
        return line(layout, source.id, target.id).rtt / 2

    names = [stage.id for stage in routes.best(candidates, blocks, trip)]
    stops = [gateway, *names, gateway]
    lines = [line(layout, a, b) for a, b in pairwise(stops)]
    return Way([seats[name] for name in names], lines)


def touches_gateway(seat: Seat, blocks: int) -> bool:
    """Whether it may begin or end a way: lines to others are never asked for."""
    return seat.first == 0 or seat.last == blocks - 1


def spans_of(layout: Layout, blocks: int) -> list[tuple[int, int]]:
    """The blocks of each host."""
    if layout.hosts[0].blocks:
        return [coverage.parse(host.blocks, blocks) for host in layout.hosts]
    return equal_parts(blocks, len(layout.hosts))


def equal_parts(blocks: int, count: int) -> list[tuple[int, int]]:
    """Spans as equal as can be, the longer ones first.

    The first stage drafts: the more blocks it holds, the more of its drafts are accepted.
    """
    if not 0 < count <= blocks:
        raise BadInput(f"{blocks} blocks cannot be cut into {count} parts; choose 1 to {blocks}.")
    sizes = [blocks // count + (number < blocks % count) for number in range(count)]
    ends = [sum(sizes[: number + 1]) for number in range(count)]
    return [(end - size, end - 1) for size, end in zip(sizes, ends, strict=True)]


def speed(host: Host, span: tuple[int, int], speed_of: SpeedOf) -> Speed:
    """As the file says; what it leaves open, as this machine does it."""
    if host.step_ms is not None and host.position_ms is not None:
        return Speed(host.step_ms / 1000, host.position_ms / 1000)
    if host.step_ms is None and host.position_ms is None:
        return speed_of(*span)
    if host.step_ms is not None:
        return Speed(host.step_ms / 1000, host.step_ms / 1000 / SMALL_ROWS)
    assert host.position_ms is not None
    return Speed(host.position_ms / 1000, host.position_ms / 1000)


def line(layout: Layout, source: str, target: str) -> Line:
    """From one host to another, as the file says."""
    if source == target:
        return Line(source, target, 0.0, HERE)
    rtt, mbit = layout.rtt_ms, layout.mbit
    for link in layout.links:
        if {*link.between} == {source, target}:
            rtt = rtt if link.rtt_ms is None else link.rtt_ms
            mbit = mbit if link.mbit is None else link.mbit
    if rtt is None or not mbit:
        lacking = "rtt_ms" if rtt is None else "mbit"
        raise BadConfig(f"Between {source} and {target} there is no {lacking}; add it.")
    return Line(source, target, rtt / 1000, mbit * MBIT)


def refuse_negative(entry: object, *names: str) -> None:
    """Raises for a number that cannot be."""
    for name in names:
        value = getattr(entry, name)
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise BadConfig(f"{name} is {value}; it must be 0 or more.")
