"""How fast text comes over a WAN, by every mode: three stages on three hosts.

Network namespaces with the same round trip between any two (bench/hosts.py). The stages are
`blocktrain stage` processes; whoever asks is one process beside the first stage
(bench/wan_driver.py), over a pipeline as a gateway has it. Every text that was made is a line of
OUT/texts.jsonl and is not made again: a table that was cut off goes on where it was. What was seen
of hosts and lines is in OUT/links-*.json, for `blocktrain plan`.

The forecast beside each rate (inference/plan.py) knows the round trip and rate that the network was
made with, and what a survey of the model in one process gave on other text (inference/survey.py).
"""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from blocktrain import config
from blocktrain.bench.hosts import Host, Wan, hosts
from blocktrain.bench.staged import Post, staged
from blocktrain.bench.wan_driver import Job, Made, Order, Seen, Served
from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadInput, BadRun
from blocktrain.inference.plan import Mode
from blocktrain.learning.files import read_manifest
from blocktrain.services.papers import admit, authority_in
from blocktrain.terms import Digest

HOSTS = ("one", "two", "three")
TEXTS = "texts.jsonl"
DRIVER = "blocktrain.bench.wan_driver"
STEPWISE: tuple[Mode, ...] = ("ar", "speculative", "exact")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """What is tried."""

    rtt: tuple[float, ...] = (10.0, 50.0, 100.0)
    """Milliseconds from any host to any other and back."""
    mbit: tuple[float, ...] = (20.0, 100.0)
    """Megabits a second, up and down, of each host."""
    temperature: tuple[float, ...] = (0.0, 0.8)
    """0 is greedy."""
    length: int = 256
    """Bytes of each text."""
    prompts: int = 3
    """Texts of each kind; the median counts."""
    traversals: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """That `whole` takes."""

    def __post_init__(self) -> None:
        if not (self.rtt and self.mbit and self.temperature and self.traversals):
            raise BadInput("There is nothing to try; give at least one of each.")
        if min(self.length, self.prompts, *self.traversals) < 1:
            raise BadInput("Length, prompts and traversals must be 1 or more; choose more.")

    @property
    def networks(self) -> list[Wan]:
        """Every round trip by every rate."""
        return [Wan(rtt, mbit) for rtt, mbit in itertools.product(self.rtt, self.mbit)]


@dataclass(frozen=True)
class Models:
    """Who generates, and from what."""

    model: Path
    whole: Path | None
    """Trained with `denoise` on masked spans; without, there are no rows for `whole`."""
    prompts: Sequence[bytes]

    def jobs(self, trial: Trial) -> list[Job]:
        """Every text, the modes by turns."""
        kinds: list[tuple[Mode, int]] = [(mode, 0) for mode in STEPWISE]
        if self.whole:
            kinds += [("whole", count) for count in trial.traversals]
        return [
            Job(mode, temperature, number, count, trial.length, self.digest_for(mode))
            for number in range(trial.prompts)
            for temperature in trial.temperature
            for mode, count in kinds
        ]

    @property
    def folders(self) -> list[Path]:
        """All models."""
        return [self.model, *([self.whole] if self.whole else [])]

    def folder_for(self, mode: Mode) -> Path | None:
        """The model that texts of this mode are made with, if there is one."""
        return self.whole if mode == "whole" else self.model

    def digest_for(self, mode: Mode) -> Digest:
        """Of that model."""
        folder = self.folder_for(mode)
        assert folder is not None
        return read_manifest(folder).digest


class Text(msgspec.Struct, frozen=True):
    """A text that was made over a network."""

    rtt_ms: float
    mbit: float
    made: Made


def measure(trial: Trial, models: Models, out: Path, say: Say) -> list[Text]:
    """Makes every text that is not there yet; returns all that were asked for."""
    with errors_are_clear(out):
        out.mkdir(parents=True, exist_ok=True)
    kept, jobs = read(out), models.jobs(trial)
    for wan in trial.networks:
        there = {
            text.made.job for text in kept if (text.rtt_ms, text.mbit) == (wan.rtt_ms, wan.mbit)
        }
        missing = [job for job in jobs if job not in there]
        if not missing:
            continue
        say(f"{wan.rtt_ms:g} ms, {wan.mbit:g} Mbit/s: {len(missing)} texts")
        for told in over(wan, models, missing, out):
            if isinstance(told, Seen):
                name = f"links-{wan.rtt_ms:g}-{wan.mbit:g}-{told.model[:8]}.json"
                write_atomically(out / name, msgspec.json.encode(told.layout))
                continue
            kept.append(Text(wan.rtt_ms, wan.mbit, told))
            say(f"  {told.shown}")
            with errors_are_clear(out):
                lines = (msgspec.json.encode(text) + b"\n" for text in kept)
                write_atomically(out / TEXTS, b"".join(lines))
    asked = {(wan.rtt_ms, wan.mbit, job) for wan in trial.networks for job in jobs}
    return [text for text in kept if (text.rtt_ms, text.mbit, text.made.job) in asked]


def read(out: Path) -> list[Text]:
    """All texts that were made before."""
    if not (out / TEXTS).is_file():
        return []
    try:
        lines = (out / TEXTS).read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Text) for line in lines]
    except (OSError, msgspec.DecodeError) as error:
        raise BadRun(
            f"{out / TEXTS} is damaged ({error}); remove it, or give another --out."
        ) from None


def over(wan: Wan, models: Models, jobs: list[Job], out: Path) -> Iterator[Made | Seen]:
    """Starts stages and whoever asks them on hosts of their own; gives each text as it is made."""
    papers = out / "papers"
    admit(authority_in(papers / "authority"), papers / "gateway")
    with ExitStack() as stack:
        made = stack.enter_context(hosts(HOSTS, wan))
        posts = [Post(host.address, host.start) for host in made.values()]

        served = []
        for model in models.folders:
            blocks = read_manifest(model).shape.blocks
            places = stack.enter_context(staged(model, blocks, papers, posts))
            served.append(Served(str(model), places))
        order = Order(str(papers / "gateway"), served, list(models.prompts), jobs)
        yield from driven(made[HOSTS[0]], order, papers / "driver.log")


def driven(host: Host, order: Order, log: Path) -> Iterator[Made | Seen]:
    """Whoever asks the stages, on its host, from its first text to its last."""
    with asking(host, DRIVER, log) as (hears, says):
        hears.write(msgspec.json.encode(order))
        hears.close()
        for line in says:
            yield msgspec.json.decode(line, type=Made | Seen)


@contextmanager
def asking(host: Host, driver: str, log: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Starts whoever asks on its host: what it hears and what it says. An error if it fails."""
    with log.open("wb") as errors:
        process = host.start(
            [sys.executable, "-m", driver],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=config.environment(),
        )
    assert process.stdin
    assert process.stdout
    yield process.stdin, process.stdout
    if process.wait() != 0:
        words = log.read_text(errors="replace").strip().splitlines() or ["without a word"]
        raise BadRun(f"Asking over the WAN ended ({words[-1][:300]}); run the same command again.")
