"""The playground in a real browser: a real gateway, over stages that say what they are told."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.browser.conftest import Watcher
from tests.browser.test_dashboard import CONTRASTS, PHONE
from tests.services.gateways import Served, serving

from blocktrain.inference.pipeline import StageReport
from blocktrain.inference.session import Asked, Said, Watch
from blocktrain.learning.model import Objective, Shape
from blocktrain.playground import SHARED, files
from blocktrain.services.gateway.app import House
from blocktrain.services.gateway.keys import Keys
from blocktrain.wire.serving import Choice, Codec, Hop

BASE = "/models/small"
STORY = (
    "The history of the town begins with a bridge. Whoever wanted to cross the river had to pay a "
    "penny for each cow and two for each wagon, and so the first house on its bank was the one of "
    "the man who counted cows. It stands to this day — its door is green, and nobody lives there.\n"
    "The second house was an inn. It burned down in 1402, in 1511 and in 1687, and each time was "
    "built again with one storey more, until the mayor declared that three fires were enough. "
) * 3
PROMPT = "The history of the "
TEXT = STORY.removeprefix(PROMPT).encode()
MARKUP = """<img src=x onerror="document.title='pwned'"><script>document.title='pwned'</script>"""
IDS = [f"{n:02x}" * 32 for n in (0x5A, 0x3C, 0xE1, 0x77)]


@dataclass
class Scripted:
    """Four blocks on three hosts, the second of which has a replica; every third guess is wrong."""

    objective: Objective = "neighbours"
    text: bytes = TEXT
    pause: float = 0.002
    troubles: list[str] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    open: int = 0
    asked: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def shape(self) -> Shape:
        return Shape(self.objective, blocks=4, layers=1, width=128, heads=2, window=256)

    async def session(self, codec: Codec) -> "Text":
        self.open += 1
        return Text(self, codec)

    def report(self) -> list[StageReport]:
        places = [(0, 0, 1, 12.0), (1, 2, 2, 48.0), (2, 3, 3, 96.0), (3, 2, 2, 210.0)]
        return [
            StageReport(
                IDS[n], f"198.51.100.{n + 1}:7000", first, last, "fp32", rtt,
                sessions=self.open, room=8 - self.open, queued=0, step_ms=2.0, silent=0.1,
            )
            for n, first, last, rtt in places
            if n not in self.gone
        ]  # fmt: skip


class Text:
    """One text of the script."""

    def __init__(self, script: Scripted, codec: Codec) -> None:
        self.script, self.codec, self.step_number = script, codec, 0

    @property
    def shape(self) -> Shape:
        return self.script.shape

    async def step(self, asked: Asked) -> Said:
        await self.obey(asked.choice)
        assert asked.choice
        count = asked.wanted + asked.draft
        made = list(self.script.text[asked.choice.at :][:count])
        drafted = list(made[: asked.draft])
        self.step_number += 1
        right = 3 + 5 * (self.step_number % 3)
        drafted[right : right + 1] = [0] if len(drafted) > right else []
        return self.said(drafted, made)

    async def emit(
        self, tokens: list[int], span: tuple[int, int], choice: Choice, watch: Watch | None = None
    ) -> Said:
        count = span[1] - span[0]
        made = list(self.script.text[choice.at :][:count])
        for hop, sharp in ((0, 3), (1, 2), (2, 1)):
            await self.obey(choice)
            if watch:
                blurred = [95 if n % 4 < sharp and hop < 2 else b for n, b in enumerate(made)]
                watch(IDS[hop], blurred)
        return self.said([], made)

    def said(self, drafted: list[int], made: list[int]) -> Said:
        hops = [
            Hop(IDS[0], 6.5, 0.0, 420, 60.0),
            Hop(IDS[1], 2.0, 0.4, 2950, 80.0),
            Hop(IDS[2], 2.1, 0, 2950),
        ]
        logs = [-1.0] * len(made)
        return Said(drafted, made, logs, hops=hops, seconds=0.145, sent=6700)

    async def obey(self, choice: Choice | None) -> None:
        self.script.asked.append((self.codec, choice))
        await asyncio.sleep(self.script.pause)

    async def close(self) -> None:
        self.script.open -= 1


PAGES: list[Page] = []


@contextmanager
def playing(keys: Keys | None = None, **script: Any) -> Iterator[Served]:
    """A gateway; pages that were opened of it hang up before it does."""
    with serving(Scripted(**script), House("small-2026", keys=keys), base_path=BASE) as served:
        served.url += "/"
        yield served
        for page in PAGES:
            if not page.is_closed():
                page.goto("about:blank")
        PAGES.clear()


@pytest.fixture(scope="module")
def gateway() -> Iterator[Served]:
    with playing() as served:
        yield served


@pytest.fixture
def page(tab: Page, watch: Watcher, gateway: Served) -> Iterator[Page]:
    """Wide and light, in a tab that is kept for all tests."""
    gateway.source.pause = 0.002
    gateway.source.asked.clear()
    watch.listen(tab)
    tab.goto(gateway.url)
    expect(tab.locator("#state")).to_have_text("ready")
    yield tab
    tab.goto("about:blank")


def opened(watch: Watcher, served: Served, **options: Any) -> Page:
    page = watch(served.url, **options)
    PAGES.append(page)
    expect(page.locator("#state")).to_have_text("ready")
    return page


def write(page: Page) -> None:
    page.get_by_role("button", name="Write").click()


def done(page: Page) -> None:
    expect(page.locator("#written-sub")).to_have_text(re.compile(r"\d bytes, seed \d"))


# --- files ----------------------------------------------------------------------------------------


def test_every_file_that_the_page_names_is_there_and_every_file_is_named() -> None:
    page = files()["index.html"].body.decode()
    named = set(re.findall(r'(?:src|href)="static/([\w.]+)"', page))
    assert named == files().keys() - {"index.html"}
    assert set(SHARED) < named
    for name in named:
        for other in re.findall(r'from "\./([\w.]+)"', files()[name].body.decode()):
            assert other in named, f"{name} imports {other}"


@pytest.mark.parametrize("name", sorted(files().keys() - SHARED.keys()))
def test_no_address_is_absolute_and_no_text_becomes_markup(name: str) -> None:
    text = files()[name].body.decode()
    for address in map("".join, re.findall(r'(?:src|href)="([^"]*)"|fetch\("([^"]*)"', text)):
        assert re.match(r"static/|v1/|#", address), address
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.search(r"<[^>]* (style|on\w+)=|<script>|<style>", text), "forbidden by its policy"


# --- writing --------------------------------------------------------------------------------------


def test_a_prompt_becomes_a_text(page: Page, gateway: Served) -> None:
    expect(page.get_by_role("heading", level=1)).to_have_text("small-2026")
    expect(page).to_have_title("small-2026 · BlockTrain playground")
    page.get_by_label("Seed").fill("11")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Bytes", exact=True).fill("200")
    write(page)
    expect(page.locator("#written-sub")).to_have_text("200 bytes, seed 11")
    assert page.locator("#text").text_content() == STORY.encode()[: len(PROMPT) + 200].decode()
    codec, choice = gateway.source.asked[0]
    assert (codec, choice.temperature, choice.seed) == ("int8", 0.5, 11)
    expect(page.locator("#said")).to_have_text(re.compile(r"^Done: 200 bytes in \d+ traversals\.$"))
    expect(page.locator("#rate-sub")).to_have_text(re.compile("^200 in "))
    expect(page.locator("#first")).to_have_text(re.compile("ms$"))
    expect(page.locator("#wire")).to_have_text(re.compile("B$"))


def test_bytes_of_one_traversal_share_a_tint(page: Page) -> None:
    write(page)
    done(page)
    pieces = page.locator("#text > [class^=tint]")
    tints = pieces.evaluate_all("all => all.map((e) => e.className)")
    assert tints == [f"tint-{n % 2}" for n in range(1, len(tints) + 1)]
    assert len(tints) < 60  # of 256 bytes
    assert pieces.first.locator(".own").count() == 1
    title = pieces.nth(3).get_attribute("title") or ""
    assert re.match(r"traversal 4, 145 ms: \d+ of \d+ guesses were right, and one byte", title)
    colors = {
        each.evaluate("e => getComputedStyle(e).backgroundColor")
        for each in (pieces.nth(0), pieces.nth(1), pieces.nth(0).locator(".own"))
    }
    assert len(colors) == 3
    each = float(page.locator("#each").text_content() or "")
    assert each == pytest.approx(256 / len(tints), abs=0.01)


def test_one_byte_for_each_traversal_is_seen_too(page: Page) -> None:
    page.get_by_role("radio", name="byte by byte").check()
    expect(page.locator("#mode-note")).to_contain_text("One traversal for each byte")
    page.get_by_label("Bytes", exact=True).fill("30")
    write(page)
    done(page)
    expect(page.locator("#each")).to_have_text("1.00")
    expect(page.locator("#each-sub")).to_have_text("30 traversals")


def test_text_is_shown_while_it_comes_and_can_be_stopped(page: Page, gateway: Served) -> None:
    gateway.source.pause = 0.05
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    write(page)
    expect(page.locator("#text")).to_contain_text("town begins")
    expect(page.get_by_role("button", name="Write")).to_be_disabled()
    expect(page.locator("#text")).to_have_class(re.compile("writing"))
    assert gateway.source.open == 1
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#written-sub")).to_have_text(re.compile(r"^stopped after \d+ bytes$"))
    expect(page.get_by_role("button", name="Write")).to_be_enabled()
    expect(page.locator("#text")).not_to_have_class(re.compile("writing"))
    wait_until(page, lambda: gateway.source.open == 0)


def wait_until(page: Page, true: Any) -> None:
    for _ in range(200):
        if true():
            return
        page.wait_for_timeout(20)
    raise AssertionError("it did not become true in time")


def test_keys_alone_do_it(page: Page, gateway: Served) -> None:
    gateway.source.pause = 0.05
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the prompt")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("ControlOrMeta+Enter")
    expect(page.locator("#text")).to_contain_text("town")
    page.keyboard.press("Escape")
    expect(page.locator("#written-sub")).to_have_text(re.compile("^stopped"))
    page.keyboard.press("Tab")
    expect(page.get_by_role("radio", name="exact")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", name="speculative")).to_be_checked()


def test_everything_that_can_be_set_has_a_name(page: Page) -> None:
    for control in page.locator("input, select, textarea, button").all():
        if control.is_visible():
            named = control.evaluate("e => (e.labels?.[0] ?? e).textContent.trim()")
            assert named, control.evaluate("e => e.outerHTML")
    expect(page.get_by_role("group", name="How the text is found")).to_be_visible()
    expect(page.get_by_role("region", name="The text")).to_be_visible()


def test_what_cannot_be_asked_for_is_not_sent(page: Page, gateway: Served) -> None:
    page.get_by_label("Bytes", exact=True).fill("5000")
    write(page)
    expect(page.locator("#length:invalid")).to_have_count(1)
    assert gateway.source.asked == []


def test_hostile_text_is_text(watch: Watcher) -> None:
    with playing(text=MARKUP.encode() * 2, troubles=[MARKUP]) as served:
        page = opened(watch, served)
        page.get_by_label("Prompt").fill(MARKUP)
        page.get_by_label("Bytes", exact=True).fill(str(len(MARKUP)))
        write(page)
        done(page)
        assert page.locator("#text").text_content() == MARKUP * 2
        expect(page.locator("#route-empty")).to_have_text(MARKUP)
        assert page.locator("img, main script").count() == 0
        expect(page).to_have_title("small-2026 · BlockTrain playground")


# --- a whole text ---------------------------------------------------------------------------------


def test_a_whole_text_sharpens_hop_by_hop_and_can_be_looked_at_again(watch: Watcher) -> None:
    with playing(objective="denoise", pause=0.2) as served:
        page = opened(watch, served)
        expect(page.get_by_role("radio", name="whole")).to_be_checked()
        page.get_by_label("Traversals").fill("2")
        page.get_by_label("Bytes", exact=True).fill("80")
        write(page)
        expect(page.locator("#text")).to_contain_text("___")
        done(page)
        story = TEXT[:80].decode()
        expect(page.locator("#text")).to_have_text(PROMPT + story)
        frames = page.get_by_role("slider", name="Hop by hop")
        expect(page.locator("#frame-note")).to_have_text("finished by traversal 2")
        frames.focus()
        page.keyboard.press("Home")
        expect(page.locator("#frame-note")).to_have_text("traversal 1, after blocks 1–2")
        expect(page.locator("#text")).to_contain_text("___n___g")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#frame-note")).to_have_text("traversal 1, after block 3")
        assert page.locator("#text .changed").count() > 5
        page.keyboard.press("ArrowRight")
        expect(page.locator("#text")).to_have_text(PROMPT + story)
        assert page.get_by_role("slider").get_attribute("aria-valuetext")


def test_only_what_the_model_can_do_can_be_chosen(page: Page) -> None:
    expect(page.get_by_role("radio", name="whole")).to_be_disabled()
    expect(page.get_by_label("Traversals")).to_be_hidden()
    expect(page.get_by_label("Wire codec")).to_have_value("int8")


# --- the route ------------------------------------------------------------------------------------


def test_the_route_is_drawn_with_its_costs_and_its_slowest_part(page: Page) -> None:
    items = page.locator("#hops > li")
    expect(items).to_have_count(9)  # gateway, three stages, gateway, and four lines
    expect(items.nth(4)).to_contain_text("RTT 48 ms")
    expect(items.nth(1)).to_have_text(re.compile(r"RTT\s12"))
    expect(items.nth(2)).to_contain_text("Blocks 1–2")
    expect(items.nth(4)).to_contain_text("3c3c3c3c at 198.51.100.2:7000 · fp32 · RTT")
    expect(items.nth(4)).to_contain_text("replicas: 77777777 at 198.51.100.4:7000")
    expect(page.locator(".slowest")).to_have_count(0)
    write(page)
    done(page)
    expect(items.nth(2).locator(".took")).to_have_text("6.5 ms")
    expect(items.nth(1).locator(".took")).to_have_text("≈ 6.0 ms")  # half of its round trip
    expect(items.nth(3)).to_contain_text("2.95 kB")
    # 145 ms less 11 at the stages and 54 to the first and from the last: 80 on two lines, of which
    # stages have measured 30 and 40; what is left goes by bytes, which are the same.
    expect(items.nth(3).locator(".took")).to_have_text("≈ 35 ms")
    expect(items.nth(3)).to_contain_text("RTT 60 ms")
    expect(items.nth(5).locator(".took")).to_have_text("≈ 45 ms")
    expect(items.nth(5)).to_contain_text("RTT 80 ms")
    expect(items.nth(7).locator(".took")).to_have_text("≈ 48 ms")
    expect(page.locator(".slowest")).to_have_count(1)
    expect(items.nth(7).get_by_text("slowest")).to_be_visible()


def test_a_stage_that_goes_is_seen_to_go(watch: Watcher) -> None:
    with playing() as served:
        page = watch("about:blank")
        PAGES.append(page)
        page.clock.install()
        page.goto(served.url)
        expect(page.locator("#state")).to_have_text("ready")
        served.source.gone = {1}
        page.clock.fast_forward(2_100)
        expect(page.locator("#hops")).to_contain_text("77777777 at 198.51.100.4")
        served.source.gone = {1, 3}
        page.clock.fast_forward(2_100)
        expect(page.locator("#state")).to_have_text("no route")
        expect(page.locator("#hops .missing")).to_contain_text("no stage serves them")
        served.source.gone = set()
        page.clock.fast_forward(2_100)
        expect(page.locator("#state")).to_have_text("ready")


def test_it_says_that_the_gateway_is_gone(watch: Watcher) -> None:
    with ExitStack() as stack:
        served = stack.enter_context(playing(pause=0.05))
        page = opened(watch, served)
        write(page)
        expect(page.locator("#text")).to_contain_text("town")
        PAGES.clear()  # this one stays
        stack.close()
        expect(page.get_by_role("alert")).to_have_text(
            re.compile("The line to the gateway broke|The gateway does not answer"), timeout=8000
        )
        expect(page.get_by_role("button", name="Write")).to_be_enabled()
    watch.forgive("net::ERR_")


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_is_asked_for_and_kept_for_the_tab(watch: Watcher, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    with playing(keys=keys) as served:
        page = watch(served.url)
        PAGES.append(page)
        expect(page.locator("#state")).to_have_text("key needed")
        field = page.get_by_label("API key")
        field.fill("bt-wrong")
        field.press("Tab")
        expect(page.get_by_role("alert")).to_have_text("The gateway does not know this key.")
        field.fill(keys.issue("anna"))
        field.press("Tab")
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.get_by_role("alert")).to_be_hidden()
        page.reload()
        expect(page.locator("#state")).to_have_text("ready")
        write(page)
        done(page)
        assert page.evaluate("localStorage.length") == 0
        assert page.evaluate("sessionStorage.length") == 1
    watch.forgive("401")


# --- for everybody --------------------------------------------------------------------------------


def test_a_phone_scrolls_in_one_direction_only(watch: Watcher, gateway: Served) -> None:
    page = opened(watch, gateway, **PHONE)
    page.get_by_label("Prompt").fill("w" * 300)
    write(page)
    done(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    beyond = "[...document.querySelectorAll('main *')].filter(e => !e.closest('.hidden'))"
    beyond += ".filter(e => e.getBoundingClientRect().right > 390.5).map(e => e.className)"
    assert page.evaluate(beyond) == []
    for button in page.get_by_role("button").all():
        box = button.bounding_box()
        assert box
        assert box["height"] >= 44  # a finger's width


def test_light_and_dark_are_different_and_both_can_be_read(watch: Watcher, gateway: Served) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        page = opened(watch, gateway, color_scheme=scheme)
        write(page)
        done(page)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 50
        assert [each for each in contrasts if each[0] < 4.5] == []
    assert grounds[0] != grounds[1]


def test_the_policy_holds(page: Page, watch: Watcher) -> None:
    page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "document.title = 'pwned'";
          document.body.append(script);
        }"""
    )
    expect(page).to_have_title("small-2026 · BlockTrain playground")
    assert "Content Security Policy" in watch.complaints[0]
    watch.forgive("Content Security Policy")
