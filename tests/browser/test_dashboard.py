"""The page of a run, in a real browser, against a coordinator that says what it is told."""

import re
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from playwright.sync_api import Locator, Page, expect

from blocktrain.dashboard import files
from blocktrain.wire.owner import Happened

PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "is_mobile": True,
    "has_touch": True,
}
MARKUP = """<img src=x onerror="document.title='pwned'"><script>document.title='pwned'</script>"""


def row(page: Page, name: str) -> Locator:
    return page.locator("tr", has=page.get_by_role("rowheader", name=name))


# --- files ----------------------------------------------------------------------------------------


def test_every_file_that_the_page_names_is_there_and_every_file_is_named() -> None:
    assert files()["index.html"].media_type == "text/html; charset=utf-8"
    assert files()["app.js"].media_type == "text/javascript; charset=utf-8"
    page = files()["index.html"].body.decode()
    named = set(re.findall(r'(?:src|href)="static/([\w.]+)"', page))
    assert named == files().keys() - {"index.html"}
    for name in named:
        for other in re.findall(r'from "\./([\w.]+)"', files()[name].body.decode()):
            assert other in named, f"{name} imports {other}"


@pytest.mark.parametrize("name", sorted(files()))
def test_no_address_is_absolute_and_no_text_becomes_markup(name: str) -> None:
    text = files()[name].body.decode()
    addresses = re.findall(r'(?:src|href)="([^"]*)"|(?:EventSource|fetch)\("([^"]*)"', text)
    for address in map("".join, addresses):
        assert re.match(r"static/|v1/|#", address), address
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.search(r"<[^>]* (style|on\w+)=|<script>|<style>", text), "forbidden by its policy"


# --- what is shown --------------------------------------------------------------------------------


def test_the_top_says_how_the_run_is_doing(page: Page) -> None:
    expect(page.get_by_role("heading", level=1)).to_have_text("wikitext-evening")
    expect(page.locator("#state")).to_have_text("running")
    expect(page.locator("#round")).to_have_text("23 of 40")
    expect(page.locator("#left")).to_have_text("≈ 15 min")  # 18 rounds, one each 50 s
    expect(page.locator("#ce")).to_have_text("1.569")
    expect(page.locator("#ce-sub")).to_have_text("at 901 kB, +0.034 to reference")
    expect(page.locator("#moved")).to_have_text("48.8 MB")
    expect(page.locator("#parameters")).to_have_text("3.41 million")
    expect(page).to_have_title("wikitext-evening · round 23/40 · CE 1.569")


def points(page: Page, line: str) -> int:
    path = page.locator(f".curve.{line}").get_attribute("d")
    assert path
    assert "NaN" not in path
    return len(re.findall("[ML]", path))


def test_the_curve_is_drawn_beside_its_reference_and_can_be_read(page: Page) -> None:
    assert (points(page, "run"), points(page, "reference")) == (12, 21)
    expect(page.locator(".plot .label")).to_have_text(
        ["MB seen by each block", "CE, nats per byte"]
    )
    assert page.locator(".plot .tick").count() >= 6
    legend, plot = page.locator(".legend"), page.locator(".plot")
    expect(legend).to_contain_text("this run1.569reference1.536difference+0.034at 901 kB, 18 min")

    box = plot.bounding_box()
    assert box
    page.mouse.move(box["x"] + 60, box["y"] + 90)  # near the left end
    expect(legend).to_contain_text("this run5.550reference5.550difference+0.000at 0 B")
    page.mouse.move(10, 10)
    expect(legend).to_contain_text("this run1.569")


def test_the_curve_can_be_drawn_over_time_and_closer(page: Page) -> None:
    page.get_by_role("radio", name="time").check()
    expect(page.locator(".plot .label").first).to_have_text("time since the run was made")
    expect(page.locator(".legend")).to_contain_text("reference, at its end1.472")  # it has no times
    assert points(page, "reference") == 2
    top = page.locator(".plot .tick").first
    before = top.text_content()
    page.get_by_role("radio", name="last half").check()
    expect(top).not_to_have_text(before or "")


def test_the_curve_can_be_read_with_keys(page: Page) -> None:
    plot = page.get_by_role("slider", name="CE, point by point")
    plot.focus()
    page.keyboard.press("ArrowLeft")
    expect(plot).to_have_attribute(
        "aria-valuetext", re.compile("^at 819.kB, 17.min: this run 1.586")
    )
    page.keyboard.press("Home")
    expect(plot).to_have_attribute("aria-valuenow", "0")


def test_each_block_has_a_row(page: Page) -> None:
    rows = page.locator("#block-rows tr")
    expect(rows).to_have_count(4)
    expect(rows.first.get_by_role("rowheader")).to_contain_text("1")  # of block 0
    cells = rows.nth(1).get_by_role("cell")
    expect(cells.nth(0)).to_have_text("23 of 40")
    expect(cells.nth(1)).to_have_text("open")
    expect(cells.nth(3)).to_have_text("0 of 2")
    for place, text in enumerate(("2", "41", "2", "1"), start=4):
        expect(cells.nth(place)).to_have_text(text)
    expect(rows.nth(3).locator(".phase")).to_have_text("waiting")
    expect(rows.nth(3).locator(".deadline")).to_have_text("–")
    strip = rows.nth(2).get_by_role("img")
    expect(strip).to_have_attribute("aria-label", re.compile(r"^Last \d+ rounds: \d+ in time"))
    assert strip.locator("rect").count() >= 8


def test_a_deadline_is_counted_down_without_a_word_from_the_coordinator(page: Page) -> None:
    cell = page.locator("#block-rows tr").first.locator(".deadline")  # it has 31 s of 50.3
    expect(cell).to_have_text(re.compile(r"^(2\d|3[01])\ss of 51\ss$"))
    before = cell.text_content() or ""
    expect(cell).not_to_have_text(before)
    assert (cell.text_content() or "") < before
    part = cell.locator(".bar span").evaluate("e => Number(e.style.getPropertyValue('--part'))")
    assert 0.1 < part < 31 / 50.3


def test_the_workers_have_rows_with_what_they_gave(page: Page) -> None:
    headers = page.locator("#workers").get_by_role("columnheader")
    expect(headers).to_have_text(
        ["Worker", "State", "At", "Seconds a step", "Sent", "Received", "Updates", "Contribution"]
    )
    cells = row(page, "dora.example").get_by_role("cell")
    expect(cells).to_have_text(
        ["here", "block 2, round 23", "1.270", "1.80 MB", "4.49 MB", "20", "125 kB · 4 %"]
    )
    expect(row(page, "gpu-box@lab").locator(".here")).to_have_text("banned")
    expect(page.locator("#workers-sub")).to_have_text("6 of 8 here")


def test_it_says_who_was_late_and_what_was_refused_and_why(page: Page) -> None:
    listed = page.locator("#event-rows li")
    kinds = set(page.locator("#event-rows .badge").all_text_contents())
    assert kinds == {"late", "refused", "freed", "banned"}
    expect(listed.filter(has_text="refused").first).to_contain_text(
        "farid’s update for block 3, round 15 was refused: "
        "Its norm is 41 times the median of the last updates."
    )
    fewer = listed.count()
    page.get_by_role("radio", name="everything").check()
    expect(listed.first).to_contain_text("Block 4, round 23 opened")
    assert listed.count() > fewer


def test_a_run_that_has_just_begun_says_what_is_missing(watch: Any, coordinator: Any) -> None:
    blocks = [
        replace(each, round=1, phase="open", taken=0, late=0, refused=0)
        for each in coordinator.status.blocks
    ]
    coordinator.say(blocks=blocks, workers=[], curve=[], reference=[], events=[])
    page = watch(coordinator.url)
    expect(page.locator("#round")).to_have_text("1 of 40")
    expect(page.locator("#left-sub")).to_have_text("known after the first round")
    expect(page.locator("#chart")).to_contain_text("No CE has been measured yet.")
    expect(page.locator("#workers")).to_contain_text("Nobody works yet.")
    expect(page.locator("#events")).to_contain_text("Nothing was late, and nothing was refused.")


# --- what changes ---------------------------------------------------------------------------------


def test_a_worker_is_seen_to_go(page: Page, coordinator: Any) -> None:
    state = row(page, "chidi").locator(".here")
    expect(state).to_have_text("here")
    others = [*coordinator.status.workers]
    chidi = others.pop(2)
    coordinator.say(workers=[*others, replace(chidi, silent=45.0)])
    expect(state).to_have_text(re.compile(r"^silent (4[5-9]|5\d)\ss$"))
    before = state.text_content() or ""
    expect(state).not_to_have_text(before)  # though the coordinator says nothing
    expect(state).to_have_text(re.compile("^silent "))
    gone = replace(chidi, here=False, silent=None, block=None, round=None, seconds_per_step=None)
    coordinator.say(workers=[*others, gone])
    expect(state).to_have_text("gone")
    expect(page.locator("#workers-sub")).to_have_text("5 of 8 here")
    expect(page.locator("#said")).to_have_text("chidi is gone")


def test_what_is_new_appears_without_a_reload(page: Page, coordinator: Any) -> None:
    status = coordinator.status
    last = status.curve[-1]
    point = replace(last, bytes_seen=last.bytes_seen + 40_960, ce=1.5)
    coordinator.say(state="paused", curve=[*status.curve, point])
    expect(page.locator("#ce")).to_have_text("1.500")
    expect(page.locator("#state")).to_have_text("paused")
    expect(page.locator("#left")).to_have_text("paused")
    assert points(page, "run") == 13


def test_hostile_text_is_text(page: Page, coordinator: Any) -> None:
    status = coordinator.status
    number = status.events[-1].number
    detail: dict[str, str | int | float | None] = {"block": 0, "round": 23, "worker": MARKUP}
    events = [
        Happened(number + 1, 1e9, "refused", {**detail, "why": MARKUP}),
        Happened(number + 2, 1e9, "freed", {"block": MARKUP, "round": MARKUP, "slot": MARKUP}),
        Happened(number + 3, 1e9, "unheard of", {MARKUP: MARKUP}),
    ]
    coordinator.say(events=[*status.events, *events])
    refused = page.locator("#event-rows .sentence").nth(1)
    expect(refused).to_have_text(f"{MARKUP}’s update for block 1, round 23 was refused: {MARKUP}")
    page.get_by_role("radio", name="everything").check()
    expect(page.locator("#event-rows .sentence").first).to_have_text(f"{MARKUP} {MARKUP}")
    assert page.locator("img, main script").count() == 0
    expect(page).to_have_title("wikitext-evening · round 23/40 · CE 1.569")


def test_it_says_that_the_coordinator_is_gone_and_finds_it_again(
    page: Page, watch: Any, coordinator: Any
) -> None:
    notice = page.get_by_text("The coordinator has been gone since")
    expect(notice).to_be_hidden()
    coordinator.stop()
    expect(notice).to_have_text(re.compile(r"since \d\d:\d\d:\d\d$"))
    expect(page.locator("#gone-for")).to_have_text(re.compile(r"^·\s[1-9]\d*\ss$"))
    coordinator.say(rounds=44)
    coordinator.start()
    expect(page.locator("#round")).to_have_text("23 of 44")
    expect(notice).to_be_hidden()
    watch.forgive("net::ERR_")


def test_events_that_a_proxy_holds_back_are_asked_for(watch: Any, coordinator: Any) -> None:
    coordinator.held_back = True
    page = watch("about:blank")
    page.clock.install()
    page.goto(coordinator.url)
    expect(page.locator("#round")).to_have_text("23 of 40")
    coordinator.say(rounds=44)
    page.clock.fast_forward(16_000)
    expect(page.locator("#round")).to_have_text("23 of 44")
    expect(page.locator("#gone")).to_be_hidden()


# --- for everybody --------------------------------------------------------------------------------


def test_a_phone_scrolls_in_one_direction_only(watch: Any, coordinator: Any) -> None:
    status = coordinator.status
    event = replace(status.events[-1], number=10**6, kind="refused", detail={"why": "x" * 400})
    workers = [replace(each, name="w" * 64) for each in status.workers]
    coordinator.say(events=[*status.events, event], workers=workers, name="n" * 64)
    page = watch(coordinator.url, **PHONE)
    expect(page.locator("#worker-rows tr")).to_have_count(8)
    expect(page.locator("#event-rows li").first).to_contain_text("xxx")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    beyond = (
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.hidden, thead, svg')"
    )
    beyond += " && e.getBoundingClientRect().right > 390.5).map(e => e.outerHTML.slice(0, 80))"
    assert page.evaluate(beyond) == []


# Of every element with text of its own: the contrast (WCAG 2.2) with the nearest ground behind it.
CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (color) => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const clear = "rgba(0, 0, 0, 0)";
  const ground = (e) => {
    const own = getComputedStyle(e).backgroundColor;
    return own !== clear || !e.parentElement ? own : ground(e.parentElement);
  };
  return [...document.querySelectorAll("body *")]
    .filter((e) => e.checkVisibility())
    .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .map((e) => {
      const style = getComputedStyle(e);
      const ink = e instanceof SVGElement ? style.fill : style.color;
      const [a, b] = [light(ink), light(ground(e))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), e.className, e.textContent.slice(0, 30)];
    });
}"""


def test_light_and_dark_are_different_and_both_can_be_read(watch: Any, coordinator: Any) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        page = watch(coordinator.url, color_scheme=scheme)
        expect(page.locator("#worker-rows tr")).to_have_count(8)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 100
        assert [each for each in contrasts if each[0] < 4.5] == []
    assert grounds[0] != grounds[1]


def test_the_policy_holds(page: Page, watch: Any, coordinator: Any) -> None:
    answer = httpx.get(coordinator.url)
    assert answer.headers["Content-Security-Policy"] == "default-src 'self'"
    page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "document.title = 'pwned'";
          document.body.append(script);
        }"""
    )
    expect(page).to_have_title("wikitext-evening · round 23/40 · CE 1.569")
    assert "Content Security Policy" in watch.complaints[0]
    watch.forgive("Content Security Policy")
