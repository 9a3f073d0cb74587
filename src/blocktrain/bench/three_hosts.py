"""Three hosts with a WAN between them train one model: what CE, for how many bytes moved?

Network namespaces, real TCP with delay and rate (bench/hosts.py), HTTPS by the run's own authority.
The first host has the coordinator, the owner who measures, and one worker; the others have the rest
of the workers. Bytes moved are counted at the workers' sockets, TLS and headers included.
"""

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.aggregation.folder import LEDGER, open_ledger, owners_token
from blocktrain.bench.hosts import Host, Wan, hosts
from blocktrain.errors import BadRun
from blocktrain.learning.data import Corpus
from blocktrain.learning.evaluate import evaluate
from blocktrain.services.begin import Settings, begin
from blocktrain.services.follow import from_folder

HOSTS = ("one", "two", "three")
PAPER_CE = 1.811  # where the paper's run over three hosts ended, after 15.22 GB
START = 60.0  # seconds that a coordinator has to come up
PORT = 8765


@dataclass(frozen=True)
class Trial:
    """What is tried."""

    settings: Settings
    wan: Wan
    data: str
    every: float = 20.0
    """Seconds between two measurements of CE, at the least."""


@dataclass
class Site:
    """The hosts of one trial, and what runs on them."""

    hosts: dict[str, Host]
    folder: Path

    def start(self, host: str, log: str, *arguments: str) -> "subprocess.Popen[Any]":
        """A blocktrain command on a host; what it says goes to its log."""
        with (self.folder / f"{log}.log").open("ab") as file:
            return self.hosts[host].start(
                [sys.executable, "-m", "blocktrain", *arguments],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
            )

    def first_line(self, log: str) -> dict[str, Any]:
        """The first JSON line that a command says."""
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            for line in (self.folder / f"{log}.log").read_bytes().splitlines():
                if line.startswith(b"{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
            time.sleep(0.1)
        raise BadRun(f"{self.folder / log}.log does not tell that it has started; look there.")


def measure(
    trial: Trial, corpus: Corpus, folder: Path, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Trains across the hosts to the last round; returns what it came to."""
    run = folder / "run"
    if not (run / LEDGER).exists():
        begin(run, trial.settings, corpus)
    began = time.monotonic()
    with hosts(HOSTS, trial.wan) as made:
        site = Site(made, folder)
        rows = train(site, trial, run, say)
    settings, model = from_folder(run)
    score = evaluate(model, corpus.test)
    moved = moved_by_workers(run)
    rounds = settings.pace.rounds
    return {
        "ce_start": rows[0]["ce_sample"],
        "ce": score.ce,
        "bytes_moved": moved,
        "parameters": model.parameters,
        "rounds": rounds,
        "bytes_per_parameter_and_round": moved / model.parameters / rounds,
        "bytes_seen": settings.bytes_after(rounds),
        f"bytes_moved_to_{PAPER_CE}": first_below(rows, PAPER_CE),
        "rtt_ms": trial.wan.rtt_ms,
        "mbit": trial.wan.mbit,
        "codec": settings.exchange.codec,
        "seconds": time.monotonic() - began,
    }


def train(site: Site, trial: Trial, run: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Starts everything, and waits for the owner's measurements to end with the run."""
    address = site.hosts[HOSTS[0]].address
    site.start(
        HOSTS[0], "coordinator", "coordinator", str(run), "--host", address, "--port", str(PORT),
        "--tls", "auto", "--json",
    )  # fmt: skip
    told = site.first_line("coordinator")
    url, trust = told["url"], ["--fingerprint", told["fingerprint"]]
    token = owners_token(run)
    pace = trial.settings.run.pace
    count = trial.settings.run.shape.blocks * pace.replicas
    crew = []
    for number, host in zip(range(1, count + 1), itertools.cycle(HOSTS), strict=False):
        crew.append(
            site.start(
                host, f"worker-{number}", "join", url, "--token", token, *trust,
                "--folder", str(site.folder / f"worker-{number}"), "--name", f"{host}-{number}",
                "--threads", "1", "--data", trial.data,
            )
        )  # fmt: skip
    say(f"{count} workers on {len(HOSTS)} hosts, coordinator at {url}")
    owner = site.start(
        HOSTS[0], "owner", "evaluate", "--follow", url, "--token", token, *trust,
        "--data", trial.data, "--every", str(trial.every), "--json",
    )  # fmt: skip
    heard = 0
    while owner.poll() is None:
        time.sleep(0.5)
        lines = (site.folder / "owner.log").read_text().splitlines()
        for line in lines[heard:]:
            if line.startswith("round"):
                say(line)
        heard = len(lines)
    if owner.returncode != 0:
        raise BadRun(f"The owner's measuring ended early; {site.folder / 'owner.log'} says why.")
    for worker in crew:  # the run has ended: they say good-bye
        worker.wait(60)
    rows: list[dict[str, Any]] = json.loads(
        (site.folder / "owner.log").read_text().splitlines()[-1]
    )["rows"]
    return rows


def moved_by_workers(run: Path) -> int:
    """Bytes at the workers' sockets, both directions, as they told when they left."""
    with open_ledger(run) as ledger, ledger.reading() as r:
        return sum(worker.bytes_sent + worker.bytes_received for worker in r.workers())


def first_below(rows: list[dict[str, Any]], ce: float) -> int | None:
    """Bytes moved when the CE of a sample was first seen to be no more than this."""
    return next((row["bytes_moved"] for row in rows if row["ce_sample"] <= ce), None)
