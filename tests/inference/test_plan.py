"""The forecast follows its law, files of hosts are read strictly, and nothing needs a network."""

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from blocktrain.errors import BadConfig, BadInput, Unreachable
from blocktrain.inference import layout, plan
from blocktrain.inference.layout import Host, Layout, Link
from blocktrain.inference.plan import Line, Mode, Seat, Speed, Task, Way
from blocktrain.learning.model import Shape

Sentence = Callable[[BaseException], str]
SHAPE = Shape(blocks=4, layers=1, width=128, heads=2, window=256)
TASK = Task(SHAPE)
FAST = 1e9  # bytes per second: no time goes into rates
STILL = Speed(0.0, 0.0)


def way(rtt: float = 0.1, rate: float = FAST, speed: Speed = STILL) -> Way:
    """Three stages; the gateway is beside the first, all others as far from each other."""
    hosts = ["one", "two", "three"]
    seats = [
        Seat(host, *span, speed) for host, span in zip(hosts, [(0, 1), (2, 2), (3, 3)], strict=True)
    ]
    stops = ["one", *hosts, "one"]
    lines = [Line(a, b, 0.0 if a == b else rtt, rate) for a, b in pairwise(stops)]
    return Way(seats, lines)


def test_ar_over_a_distance_takes_three_half_round_trips_a_byte() -> None:
    found = plan.forecast(way(), TASK, "ar")
    assert found.bytes_per_s == pytest.approx(1 / 0.153, rel=0.02)
    assert found.traversals == 256
    assert found.draft == 0
    assert found.traversal_ms == pytest.approx(150 + 3, rel=0.001)
    assert found.limited_by == "round trips"


def test_a_silent_line_begins_slowly() -> None:
    """10 packets, then 20 after a round trip, then 40: 70 packets are there after two more."""
    line = Line("a", "b", rtt=0.1, rate=FAST)
    packet = plan.PAYLOAD
    for packets, waits in ((1, 0), (10, 0), (11, 1), (30, 1), (31, 2), (70, 2), (71, 3)):
        assert line.seconds(packets * packet) == pytest.approx(0.05, abs=0.001)
        took = line.seconds(packets * packet, silent=True)
        assert took == pytest.approx(0.05 + 0.1 * waits, abs=0.001)
    slow = Line("a", "b", rtt=0.1, rate=100_000)  # full with less than 10 packets
    assert slow.seconds(1e6, silent=True) == slow.seconds(1e6)


def test_a_draft_yields_what_its_acceptance_says() -> None:
    yields = plan.from_acceptance(0.75)
    assert yields[0] == 1
    assert yields[2] == pytest.approx(1 + 0.75 + 0.75**2)
    assert plan.from_acceptance(1.0)[7] == 8
    assert plan.from_acceptance(0.0)[7] == 1
    tried, luck = 20_000, random.Random(1)
    total = 0
    for _ in range(tried):
        total += 1
        for _ in range(6):
            if luck.random() > 0.75:
                break
            total += 1
    assert total / tried == pytest.approx(yields[6], rel=0.02)


def test_the_draft_grows_with_the_distance_and_shrinks_with_its_cost() -> None:
    yields = plan.from_acceptance(0.77)

    def draft(rtt: float, speed: Speed) -> int:
        return plan.forecast(way(rtt, speed=speed), TASK, "exact", yields).draft

    slow, fast = Speed(0.02, 0.002), Speed(0.001, 0.0001)
    assert draft(0.01, fast) < draft(0.1, fast)
    assert draft(0.1, slow) < draft(0.1, fast)
    assert draft(0.0, slow) <= 2


def test_exact_pays_for_drafting_one_byte_after_another_and_speculative_does_not() -> None:
    here, speed = way(0.1), Speed(0.01, 0.0001)
    here = Way([Seat(seat.host, seat.first, seat.last, speed) for seat in here.seats], here.lines)
    exact, speculative = (
        plan.by_draft(here, TASK, mode, 8, 4.0) for mode in ("exact", "speculative")
    )
    extra = exact.traversal_ms - speculative.traversal_ms
    assert extra == pytest.approx(8 * 10, rel=0.02)


@pytest.mark.parametrize("mode", ["ar", "exact", "speculative"])
def test_the_limiting_link_is_the_slowest_one(mode: Mode) -> None:
    here = way(0.02)
    lines = [*here.lines[:2], Line("two", "three", 0.5, FAST), here.lines[3]]
    found = plan.forecast(Way(here.seats, lines), TASK, mode, plan.from_acceptance(0.5))
    assert found.limiting_link == "two -> three"
    assert found.link_ms == pytest.approx(250, rel=0.01)
    lines[2] = Line("two", "three", 0.02, 2_000)  # a modem
    found = plan.forecast(Way(here.seats, lines), TASK, mode, plan.from_acceptance(0.5))
    assert found.limiting_link == "two -> three"
    assert found.limited_by == "rates"


def test_a_slow_host_is_named() -> None:
    here = way(0.001)
    seats = [here.seats[0], Seat("two", 2, 2, Speed(0.5, 0.1)), here.seats[2]]
    found = plan.forecast(Way(seats, here.lines), TASK, "ar")
    assert found.limited_by == "computing, most on two"


def test_whole_is_one_traversal_however_long_the_text() -> None:
    shape = Shape("denoise", blocks=4, window=512)
    one, eight = (plan.whole(way(), Task(shape, codec="fp16"), traversals=n) for n in (1, 8))
    assert one.traversals == 1
    assert one.bytes_per_s > 30 * plan.forecast(way(), TASK, "ar").bytes_per_s
    assert one.bytes_per_s > eight.bytes_per_s
    # Two lines carry 385 rows of 256 codes each, as fp16.
    assert one.wire_bytes_per_byte * 256 == pytest.approx(2 * 385 * 512, rel=0.05)


def test_a_full_window_is_read_again() -> None:
    assert Task(SHAPE, prompt=128, length=127).renewals == 0
    assert Task(SHAPE, prompt=128, length=256).renewals == 1
    assert Task(SHAPE, prompt=10_000, length=129).renewals == 1
    assert Task(SHAPE, prompt=10_000, length=130).renewals == 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: plan.from_acceptance(1.2),
        lambda: plan.from_acceptance(float("nan")),
        lambda: Task(SHAPE, length=0),
        lambda: plan.whole(way(), TASK, traversals=0),
        lambda: Way([], way().lines),
    ],
)
def test_what_cannot_be_is_refused(wrong: Callable[[], object], sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        wrong()
    sentence(caught.value)


# --- files of hosts -------------------------------------------------------------------------------

FILE = """
rtt_ms = 50
mbit = 100
gateway = "anna"

[[hosts]]
name = "anna"
blocks = "1-2"
step_ms = 2.0
position_ms = 0.1

[[hosts]]
name = "ben"
blocks = "3-4"

[[links]]
between = ["ben", "anna"]
rtt_ms = 20
"""
OURS = Speed(0.003, 0.0002)


def test_a_file_of_hosts_becomes_a_way(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text(FILE)
    asked = []

    def speed_of(first: int, last: int) -> Speed:
        asked.append((first, last))
        return OURS

    found = layout.way(layout.read(tmp_path / "hosts.toml"), 4, speed_of)
    assert [seat.host for seat in found.seats] == ["anna", "ben"]
    assert found.seats[0].speed == Speed(0.002, 0.0001)
    assert found.seats[1].speed == OURS
    assert asked == [(2, 3)]  # what the file says is not measured
    assert [line.name for line in found.lines] == ["anna -> anna", "anna -> ben", "ben -> anna"]
    assert [line.rtt for line in found.lines] == [0, 0.02, 0.02]
    assert found.lines[1].rate == 12.5e6


def test_the_same_keys_in_json(tmp_path: Path) -> None:
    wanted = Layout([Host("anna", "1-4")], rtt_ms=1, mbit=1)
    (tmp_path / "hosts.json").write_bytes(msgspec.json.encode(wanted))
    assert layout.read(tmp_path / "hosts.json") == wanted


def test_hosts_without_blocks_get_equal_parts() -> None:
    hosts = [Host("a"), Host("b"), Host("c")]
    found = layout.way(Layout(hosts, rtt_ms=1, mbit=1), 8, lambda *_: OURS)
    assert [(seat.first, seat.last) for seat in found.seats] == [(0, 2), (3, 5), (6, 7)]


def test_of_replicas_the_nearer_is_taken() -> None:
    hosts = [Host("a", "1-2"), Host("far", "3-4"), Host("near", "3-4")]
    here = Layout(hosts, [Link(("a", "near"), 5)], rtt_ms=100, mbit=10)
    found = layout.way(here, 4, lambda *_: OURS)
    assert [seat.host for seat in found.seats] == ["a", "near"]


def test_a_route_as_a_gateway_tells_it(tmp_path: Path) -> None:
    route: dict[str, Any] = {
        "model": "small",
        "stages": [
            {"stage": "a" * 64, "first": 0, "last": 1, "rtt_ms": 10.0, "step_ms": 3.2, "room": 5},
            {"stage": "b" * 64, "first": 2, "last": 3, "rtt_ms": 30.0, "step_ms": None},
        ],
    }
    (tmp_path / "route.json").write_text(json.dumps(route))
    found = layout.way(layout.read(tmp_path / "route.json"), 4, lambda *_: OURS)
    assert [line.rtt for line in found.lines] == pytest.approx([0.01, 0.03, 0.03])
    assert [seat.speed.step for seat in found.seats] == pytest.approx([0.0032, 0.003])
    assert found.lines[0].name == f"gateway -> {'a' * 12}"
    route["stages"][0]["onward_ms"] = {"b" * 64: 70.0}  # as the first stage has measured it
    (tmp_path / "route.json").write_text(json.dumps(route))
    found = layout.way(layout.read(tmp_path / "route.json"), 4, lambda *_: OURS)
    assert [line.rtt for line in found.lines] == pytest.approx([0.01, 0.07, 0.03])


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (("rtt_ms = 50", "rtt_ms = -1"), BadConfig, "rtt_ms is -1"),
        (("rtt_ms = 50", "rtt_ms = nan"), BadConfig, "rtt_ms is nan"),
        (("mbit = 100", "mbits = 100"), BadConfig, "'mbit'"),
        (("mbit = 100", 'mbit = "fast"'), BadConfig, "mbit"),
        (("mbit = 100", ""), BadConfig, "no mbit"),
        (('name = "ben"', 'name = "anna"'), BadConfig, "no two of one name"),
        (('"ben", "anna"', '"bert", "anna"'), BadConfig, "'bert'"),
        (("step_ms", "steps_ms"), BadConfig, "'step_ms'"),
        (('blocks = "3-4"', ""), BadConfig, "all or none"),
        (('blocks = "3-4"', 'blocks = "3-9"'), BadInput, "'3-9'"),
        (('blocks = "3-4"', 'blocks = "4"'), Unreachable, "block 3"),
        (("[[hosts]]", "[[host]]"), BadConfig, "'hosts'"),
        (("rtt_ms = 50", "rtt_ms = ="), BadConfig, "not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(
    tmp_path: Path,
    change: tuple[str, str],
    kind: type[Exception],
    words: str,
    sentence: Sentence,
) -> None:
    assert change[0] in FILE
    (tmp_path / "hosts.toml").write_text(FILE.replace(*change))
    with pytest.raises(kind) as caught:
        layout.way(layout.read(tmp_path / "hosts.toml"), 4, lambda *_: OURS)
    assert words in sentence(caught.value)


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"stages": 3}', b'{"stages": [{}]}', b"\xff", b"{}"]
)
def test_wrong_json_is_refused(tmp_path: Path, body: bytes, sentence: Sentence) -> None:
    (tmp_path / "links.json").write_bytes(body)
    with pytest.raises(BadConfig) as caught:
        layout.read(tmp_path / "links.json")
    sentence(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path, sentence: Sentence) -> None:
    for name in ("a.json", "a.toml"):
        with pytest.raises(BadConfig) as caught:
            layout.read(tmp_path / name)
        assert "check the path" in sentence(caught.value)
