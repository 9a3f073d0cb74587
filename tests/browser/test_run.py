"""A real run is watched in a real browser, and a killed worker is seen to go."""

import re
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import expect
from tests.browser.conftest import Watcher
from tests.services.conftest import QUICK, TINY, corpus, serving, words

from blocktrain.commands.listen import Listen
from blocktrain.learning.data import Corpus
from blocktrain.services.begin import Settings, begin

__all__ = ["corpus", "words"]


def test_a_run_is_watched_and_a_killed_worker_is_seen_to_go(
    watch: Watcher, tmp_path: Path, corpus: Corpus, words: Path
) -> None:
    run = replace(TINY, pace=replace(TINY.pace, rounds=100_000))
    begin(tmp_path / "run", Settings("watched", run, replace(QUICK, lease=3.0)), corpus)
    with serving(tmp_path / "run", words, Listen(port=0)) as place, ExitStack() as crew:
        children = []
        for name in ("anna", "ben"):
            command = [sys.executable, "-m", "blocktrain", "join", place.url]
            command += ["--token", place.token, "--folder", str(tmp_path / name), "--name", name]
            with (tmp_path / f"{name}.log").open("wb") as log:
                child = subprocess.Popen(
                    [*command, "--data", str(words), "--threads", "1"], stderr=log, stdout=log
                )
            crew.callback(child.wait)
            crew.callback(child.kill)
            children.append(child)
        page = watch(place.url)
        expect(page.get_by_role("heading", name="watched")).to_be_visible()
        for name in ("anna", "ben"):
            row = page.locator("tr", has_text=name)
            expect(row).to_contain_text("here", timeout=60_000)
            expect(row).to_contain_text(re.compile(r"block [12], round \d+"), timeout=30_000)
        children[0].kill()
        expect(page.locator("tr", has_text="anna")).to_contain_text("gone", timeout=30_000)
        expect(page.locator("tr", has_text="ben")).to_contain_text("here")
        page.goto("about:blank")  # hang up before the coordinator does
