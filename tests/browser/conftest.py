"""A real browser, and a small coordinator that says what a test wants it to say."""

import asyncio
import hashlib
import math
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn
from msgspec.structs import replace
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from blocktrain.dashboard import files
from blocktrain.wire.messages import Traffic, encode
from blocktrain.wire.owner import BlockStatus, Happened, Point, Status, WorkerStatus

BASE = "/runs/first"
"""As behind a reverse proxy: nothing in the page may assume that it lives at the root."""
POLICY = "default-src 'self'"
FLAGS = [
    "--no-sandbox",  # as root, which CI is, Chromium refuses its own
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


# --- a browser ------------------------------------------------------------------------------------


# Of the module, not of the session: while playwright runs, its event loop is this thread's running
# one, and no later test could call asyncio.run.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, without a screen."""
    path = shutil.which("chromium")
    if path is None:  # CI counts this as a failure
        pytest.skip("There is no Chromium; install Debian's package chromium.")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield launched
        launched.close()


class Watcher:
    """Opens pages, and remembers everything that a browser complained of."""

    def __init__(self, browser: Browser):
        self.browser = browser
        self.pages: list[Page] = []
        self.complaints: list[str] = []

    def __call__(self, url: str, **options: Any) -> Page:
        page = self.browser.new_page(**options)
        self.pages.append(page)
        self.listen(page)
        page.goto(url)
        return page

    def listen(self, page: Page) -> None:
        """Whatever this page has to complain of from now on counts."""
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def forgive(self, cause: str) -> None:
        """Complaints with this in them were meant to be."""
        self.complaints = [each for each in self.complaints if cause not in each]

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@pytest.fixture
def watch(browser: Browser) -> Iterator[Watcher]:
    """Opens a page; at the end of the test nothing may have been complained of."""
    watcher = Watcher(browser)
    yield watcher
    for page in watcher.pages:
        page.close()
    assert watcher.complaints == []


# --- a coordinator that says what it is told ------------------------------------------------------


class Scripted:
    """Serves the page, and the status that it was last given, as the coordinator does."""

    def __init__(self, status: Status):
        self.status = status
        self.held_back = False
        """Whether events stay on the way, as behind a proxy that waits for the end of an answer."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}{BASE}/"

    def start(self) -> None:
        """Answers from now on, at the same address as before."""
        routes = [
            Route(f"{BASE}/", self._file),
            Route(f"{BASE}/static/{{name}}", self._file),
            Route(f"{BASE}/v1/status", self._status),
            Route(f"{BASE}/v1/events", self._events),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), port=self.port, log_level="error", ws="none", lifespan="off"
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive(), "its port was taken meanwhile"
            time.sleep(0.01)

    def stop(self) -> None:
        """Is gone, and every connection with it."""
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()

    def say(self, **changes: Any) -> None:
        """The run is now like this."""
        self.status = replace(self.status, age=self.status.age + 1, **changes)

    async def _file(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files():
            return Response(status_code=404)
        media_type, body = files()[name]
        headers = {"Content-Security-Policy": POLICY}
        return Response(body, media_type=media_type, headers=headers)

    async def _status(self, request: Request) -> Response:
        return Response(encode(self.status), media_type="application/json")

    async def _events(self, request: Request) -> Response:
        async def told() -> AsyncIterator[bytes]:
            said = None
            while not self.server.should_exit:
                if said is not self.status and not self.held_back:
                    said = self.status
                    yield b"event: status\ndata: " + encode(said) + b"\n\n"
                await asyncio.sleep(0.02)

        return StreamingResponse(told(), media_type="text/event-stream")


@pytest.fixture
def coordinator() -> Iterator[Scripted]:
    """One that has a run of four blocks and eight workers."""
    scripted = Scripted(a_run())
    scripted.start()
    yield scripted
    scripted.stop()


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Page:
    """Kept for all tests, for a new one costs more than most tests do."""
    return browser.new_page(viewport={"width": 1360, "height": 900})


@pytest.fixture
def page(tab: Page, watch: Watcher, coordinator: Scripted) -> Iterator[Page]:
    """The page of the run, wide and light."""
    watch.listen(tab)
    tab.goto(coordinator.url)
    expect(tab.locator("#worker-rows tr")).to_have_count(8)
    yield tab
    tab.goto("about:blank")


# --- a run ----------------------------------------------------------------------------------------

NAMES = ["ann", "bela-laptop", "chidi", "dora.example", "eun-ji", "farid", "gpu-box@lab", "hana"]
NOW = time.time()


def worker_id(number: int) -> str:
    return hashlib.sha256(b"worker %d" % number).hexdigest()


def happenings(rounds: int) -> list[Happened]:
    """What happened in a run of four blocks and two replicas, up to its open round."""
    found: list[tuple[float, str, dict[str, Any]]] = []
    for number, name in enumerate(NAMES):
        found.append((NOW - 52.0 * rounds, "joined", {"worker": worker_id(number), "name": name}))
    for round in range(1, rounds + 1):
        for block in range(4):
            at = NOW - 50.0 * (rounds - round) - 26.0
            where = {"block": block, "round": round}
            found.append((at, "opened", {**where, "seconds": 58.0 - round / 3}))
            if round == rounds:
                continue
            for slot in range(2):
                by = {**where, "slot": slot, "worker": worker_id(2 * block + slot)}
                done = at + 31 + 3 * math.sin(7 * round + 5 * block + slot)
                kind, why = "taken", "In time."
                if (7 * round + 5 * block + slot) % 23 == 0:
                    kind, done = "salvaged", done + 21
                    why = f"It is one round late and counts half in round {round + 1}."
                elif (5 * round + 3 * block + slot) % 41 == 0:
                    kind, why = "refused", "Its norm is 41 times the median of the last updates."
                found.append((done, kind, {**by, "why": why}))
            if (round, block) == (9, 2):
                found.append((at + 44, "extended", {**where, "seconds": 55.0}))
            found.append((at + 46, "closed", {**where, "updates": 2}))
        if round % 2 == 0 and round < rounds:
            ce = curve_at(round * 40_960)
            detail = {"ce": ce, "bytes_seen": round * 40_960}
            found.append((NOW - 50.0 * (rounds - round) + 21, "evaluated", detail))
    found.append((NOW - 70, "freed", {"worker": worker_id(7), "block": 3, "round": rounds - 1}))
    found.append((NOW - 300, "banned", {"worker": worker_id(6)}))
    found.sort(key=lambda each: each[0])
    return [Happened(number, *each) for number, each in enumerate(found, start=1)][-200:]


def curve_at(seen: float) -> float:
    return 1.38 + 4.17 * math.pow(1 + seen / 30_000, -0.9)


def a_run() -> Status:
    """A run in its round 23 of 40, as the coordinator of wire/owner.py would tell it."""
    rounds, here = 23, [True] * 7 + [False]
    seen = 40_960
    blocks = [
        BlockStatus(0, 23, "open", 50.3, 31.0, 1, 2, 43, 1, 0),
        BlockStatus(1, 23, "open", 48.0, 29.0, 0, 2, 41, 2, 1),
        BlockStatus(2, 23, "open", 52.7, 5.2, 1, 1, 42, 2, 0),
        BlockStatus(3, 22, "waiting", 49.1, None, 0, 0, 40, 2, 2),
    ]
    workers = [
        WorkerStatus(
            worker=worker_id(number),
            name=name,
            here=here[number],
            silent=1.5 + number if here[number] else None,
            block=number // 2 if here[number] and number != 6 else None,
            round=23 if here[number] and number != 6 else None,
            seconds_per_step=(0.21, 0.34, 0.198, 1.27, 0.4, 0.55, 0.071, None)[number],
            updates=(22, 22, 21, 20, 22, 19, 13, 17)[number],
            bytes_trained=(450, 451, 430, 122, 449, 380, 240, 301)[number] * 1024,
            traffic=Traffic(2_310_000 - 170_000 * number, 5_120_000 - 210_000 * number),
            banned=number == 6,
        )
        for number, name in enumerate(NAMES)
    ]
    return Status(
        run=hashlib.sha256(b"charter").hexdigest(),  # type: ignore[arg-type]
        name="wikitext-evening",
        data="wikitext-2",
        codec="int8",
        parameters=3_412_992,
        rounds=40,
        replicas=2,
        state="running",
        age=1_234.0,
        bytes_seen=(rounds - 1) * seen,
        bytes_moved=sum(each.traffic.sent + each.traffic.received for each in workers),
        blocks=blocks,
        workers=workers,
        curve=[Point(50.0 * n, n * seen, curve_at(n * seen)) for n in range(0, rounds, 2)],
        reference=[Point(0.0, n * seen, curve_at(1.25 * n * seen)) for n in range(0, 41, 2)],
        events=happenings(rounds),
    )
