"""The gateway over a real pipeline: stages announce themselves, die within a text, and return."""

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.inference.network import CUTS, Network, Process, Processes, addresses, far, run, until
from tests.services.gateways import DENOISE, NAME, SHAPE, bytes_of, sampled, serving
from tests.services.gateways import until as until_true

from blocktrain.inference import pipeline as pipelines
from blocktrain.inference import reach
from blocktrain.inference.pipeline import Pipeline
from blocktrain.inference.session import Said
from blocktrain.services.announcing import Voice
from blocktrain.services.gateway.app import House
from blocktrain.services.gateway.fair import Limits, Line
from blocktrain.services.gateway.legs import Way, legs_of
from blocktrain.services.gateway.openai import Mode, Offer, Wanted, parse
from blocktrain.services.gateway.telling import Begun, Ended, Event, Glimpse, Piece, Teller
from blocktrain.wire import messages, signing
from blocktrain.wire.registry import Registry
from blocktrain.wire.serving import Announce, Heard, Holding, Hop, Place


def wanted(objective: Any, mode: Mode, **more: Any) -> Wanted:
    body = json.dumps(sampled(mode=mode, codec="fp32", **more)).encode()
    return parse(body, NAME, objective, Offer())


async def told(teller: Teller, asked: Wanted) -> list[Event]:
    return [event async for event in teller.tell("somebody", asked, watched=True)]


def text_of(events: Sequence[Event]) -> bytes:
    return b"".join(each.shown.bytes for each in events if isinstance(each, Piece | Ended))


def test_every_mode_over_stages_says_what_one_process_says(tmp_path: Path) -> None:
    network = Network(tmp_path / "network", SHAPE)
    modes: list[Mode] = ["ar", "exact", "speculative"]

    async def test() -> None:
        async with network.serving(*CUTS) as stages, network.pipeline(addresses(stages)) as source:
            teller = Teller(source, Line(Limits()))
            asked = [wanted("neighbours", mode) for mode in modes]
            texts = await asyncio.gather(*(told(teller, each) for each in asked))
            for begun, *pieces, ended in texts:
                assert isinstance(begun, Begun)
                assert isinstance(ended, Ended)
                assert text_of([*pieces, ended]) == bytes_of(SHAPE, 0.8, 5)[:24]
                assert ended.report["wire_bytes"] > 24 * 4 * SHAPE.width
                ids = [stage.id for stage in stages]
                assert [hop["stage"] for hop in ended.report["hops"]] == [*ids, None]
                assert all(hop["bytes"] > 0 for hop in ended.report["hops"])
            await until(lambda: all(stage.report().sessions == 0 for stage in stages))

    run(test)


@pytest.mark.parametrize("slow", [1, 2])
def test_the_report_tells_a_far_stage_from_near_ones(tmp_path: Path, slow: int) -> None:
    """100 ms and 10 ms there and back, to the second stage and to the third or the other way."""
    network = Network(tmp_path / "network", SHAPE)
    delays = [0.0, 0.005, 0.005]
    delays[slow] = 0.05
    truth = [0.0, delays[1], delays[2], delays[2]]  # the last one also answers from afar

    async def test() -> None:
        async with (
            network.serving(*CUTS) as stages,
            far(stages[1], delays[1]) as second,
            far(stages[2], delays[2]) as third,
            network.pipeline([*addresses(stages[:1]), second, third]) as source,
        ):
            # Before the first text the pipeline feels along the route, which opens its links.
            await until(lambda: sum(len(stage.onward_ms) for stage in source.report()) == 2)
            asked = wanted("neighbours", "ar", max_tokens=8)
            events = await told(Teller(source, Line(Limits())), asked)
            assert isinstance(events[-1], Ended)
            report = events[-1].report
            hops, ids = report["hops"], [stage.id for stage in stages]
            for hop, one_way in zip(hops, truth, strict=True):
                assert 1000 * one_way - 1 < hop["line_ms"] < 1000 * one_way + 20, hops
                assert 2000 * one_way <= hop["rtt_ms"] < 2000 * one_way + 20, hops
            link = report["slowest_link"]
            assert link["stage"] in ([ids[1]] if slow == 1 else [ids[2], None])
            assert link["ms"] == max(hop["line_ms"] for hop in hops)
            assert report["slowest"]["what"] == "line"
            # Bytes: a row of 16 numbers for each position, and all of it is on the wire.
            assert sum(hop["bytes"] for hop in hops) == report["wire_bytes"]
            rows = len("The river") + 1 + 7
            for hop in hops[1:3]:
                assert hop["bytes"] > 4 * SHAPE.width * rows
            # Whoever asks for the route sees the same, and plans with it.
            seen = {stage.stage: stage.onward_ms for stage in source.report()}
            assert seen[ids[0]] == pytest.approx({ids[1]: hops[1]["rtt_ms"]}, abs=20)
            assert seen[ids[1]] == pytest.approx({ids[2]: hops[2]["rtt_ms"]}, abs=20)
            assert seen[ids[2]] == {}

    run(test)


def test_the_slowest_link_is_told_though_a_stage_is_slower() -> None:
    hops = [Hop("a" * 64, 500.0, 0.0, 10, 6.0), Hop("b" * 64, 2.0, 0.0, 30)]
    way = Way()
    way.add(legs_of(Said([], [], [], hops=hops, seconds=0.506, sent=50), []))
    assert way.slowest() == {"what": "stage", "stage": "a" * 64, "ms": 500.0}
    assert way.slowest_link() == {"stage": "b" * 64, "ms": pytest.approx(4.0), "rtt_ms": 6.0}
    assert [leg["bytes"] for leg in way.told()] == [10, 30, 10]
    assert Way().slowest_link() is None


def test_a_text_given_up_is_forgotten_by_every_stage(tmp_path: Path) -> None:
    network = Network(tmp_path / "network", SHAPE)

    async def test() -> None:
        async with network.serving(*CUTS) as stages, network.pipeline(addresses(stages)) as source:
            teller = Teller(source, Line(Limits()))
            asked = wanted("neighbours", "ar", max_tokens=4000)
            async with aclosing(teller.tell("somebody", asked)) as events:
                async for event in events:
                    if isinstance(event, Piece):
                        break
                assert [stage.report().sessions for stage in stages] == [1, 1, 1]
            await until(lambda: all(stage.report().sessions == 0 for stage in stages))

    run(test)


def test_a_whole_text_is_seen_at_every_stage(tmp_path: Path) -> None:
    network = Network(tmp_path / "network", DENOISE)

    async def test() -> None:
        async with network.serving(*CUTS) as stages, network.pipeline(addresses(stages)) as source:
            asked = wanted("denoise", "whole", traversals=2)
            events = await told(Teller(source, Line(Limits())), asked)
            seen = [each.stage for each in events if isinstance(each, Glimpse)]
            assert set(seen) == {stage.id for stage in stages}
            assert isinstance(events[-1], Ended)
            assert events[-1].report["traversals"] == 2
            assert len(text_of(events)) == 24

    run(test)


# --- stages in processes of their own -------------------------------------------------------------


class Town:
    """Stages that announce themselves to a gateway by HTTP, for as long as they live."""

    def __init__(self, network: Network, processes: Processes, url: str) -> None:
        self.network, self.processes = network, processes
        self.url = url
        self.there: list[tuple[Process, signing.Key, tuple[int, int]]] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.announce)
        self.thread.start()

    def start(self, first: int, last: int) -> Process:
        papers = self.network.papers()
        process = self.processes.start(first, last, papers)
        self.there.append((process, signing.load_key(papers.key), (first, last)))
        return process

    def kill(self, process: Process) -> None:
        self.there = [each for each in self.there if each[0] is not process]
        process.end_by(signal.SIGKILL)

    def announce(self) -> None:
        with httpx.Client(base_url=self.url, trust_env=False) as http:
            while not self.over.wait(0.2):
                for process, key, (first, last) in self.there:
                    holding = Holding(self.network.digest, first, last, "fp32", "cpu 1")
                    place = Place(process.id, "127.0.0.1", process.port)

                    def say(said: Announce, key: signing.Key = key) -> Heard:
                        body = messages.encode(said)
                        signature = signing.sign(key, body, "announce").hex()
                        signed = messages.Signed(body, key.id, signature)
                        told = http.post("v1/stages", content=messages.encode(signed))
                        return messages.decode(told.raise_for_status().content, Heard)

                    Voice(say)(Announce(place, holding, 0, 8))

    def close(self) -> None:
        self.over.set()
        self.thread.join()


@contextmanager
def a_town(folder: Path) -> Iterator[tuple[Town, Any]]:
    network, registry = Network(folder / "network", SHAPE), Registry()
    for cut in CUTS:
        network.span(*cut)

    async def announced() -> list[Announce]:
        return registry.present(time.monotonic())

    processes = Processes(network)
    try:
        with serving(network.pipeline(announced), House(NAME, registry=registry)) as served:
            town = Town(network, processes, served.url)
            try:
                yield town, served
            finally:
                town.close()
    finally:
        processes.close()


def test_a_host_dies_in_the_middle_of_a_stream_and_the_text_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(pipelines, "PATIENCE", 0.5)
    with a_town(tmp_path) as (town, served):
        client = served.client()
        with served.http() as http:
            assert http.get("healthz").status_code == 503
            with pytest.raises(openai.InternalServerError, match="No stage serves") as caught:
                client.completions.create(**sampled())
            assert caught.value.status_code == 503

            twins = [town.start(1, 1), town.start(1, 1)]
            others = [town.start(0, 0), town.start(2, 2)]
            until_true(lambda: http.get("healthz").json() == {"status": "ok", "stages": 4})

            seen: list[str] = []
            report: dict[str, Any] = {}
            stream = client.completions.create(
                **sampled(max_tokens=40), stream=True, extra_body={"mode": "ar", "codec": "fp32"}
            )
            for number, chunk in enumerate(stream):
                seen.append(chunk.choices[0].text)
                if number == 5:
                    town.kill(in_use(served.source, twins))
                report = (chunk.model_extra or {}).get("blocktrain", report)
            assert "".join(seen) == bytes_of(SHAPE, 0.8, 5)[:40].decode(errors="replace")
            assert report["replays"] >= 1
            assert report["traversals"] == 40

            town.kill(others[1])
            until_true(lambda: http.get("healthz").status_code == 503)
            with pytest.raises(openai.InternalServerError, match="No stage serves block 3"):
                client.completions.create(**sampled())
            town.start(2, 2)
            until_true(lambda: http.get("healthz").status_code == 200)
            assert client.completions.create(**sampled()).choices[0].text


def in_use(source: Pipeline, twins: Sequence[Process]) -> Process:
    """The one of two replicas that a text goes through now."""
    return next(twin for twin in twins if source._reach.stages[twin.id].carries)
