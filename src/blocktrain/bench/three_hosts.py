"""Three hosts with a WAN between them train one model: what CE, for how many bytes moved?

Network namespaces, real TCP with delay and rate (bench/hosts.py), HTTPS by the run's own authority.
The first host has the coordinator, the owner who measures, and one worker; the others have the rest
of the workers. Whoever dies is started again. Bytes moved are counted at the workers' sockets, TLS
and headers included.

CE is over the whole test split, of the model that the seed gives (round 0) and of the last one.

OUT/run/             the run's folder (aggregation/folder.py)
OUT/worker-N/        one worker each
OUT/NAME.log         what each process said
OUT/history.jsonl    CE of a sample as the owner measured it, and the bytes moved by then
OUT/manifest.json, block-*    the model of the last round
"""

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blocktrain import config
from blocktrain.aggregation import charter as charters
from blocktrain.aggregation.folder import LEDGER, open_ledger, owners_token
from blocktrain.aggregation.ledger import Ledger
from blocktrain.bench.hosts import Host, Wan, hosts
from blocktrain.disk import write_atomically
from blocktrain.errors import BadRun
from blocktrain.learning.data import Corpus
from blocktrain.learning.evaluate import evaluate
from blocktrain.learning.files import from_parameters, save_model
from blocktrain.learning.local import parameters_of
from blocktrain.learning.model import Model, new_block
from blocktrain.services import children
from blocktrain.services.begin import Settings, begin
from blocktrain.services.children import Child, parent_alive
from blocktrain.services.follow import from_folder
from blocktrain.services.run import Run

HOSTS = ("one", "two", "three")
PAPER_CE = 1.811  # where the paper's run over three hosts ended, after 15.22 GB
PORT = 8765
LOOK = 0.5  # seconds between two looks at the crew
LIVES = 5  # of one process: whoever has died so often will die again
GOOD_BYE = 60.0  # seconds that workers have to leave when the run has ended


@dataclass(frozen=True)
class Trial:
    """What is tried."""

    settings: Settings
    wan: Wan
    data: str
    every: float = 20.0
    """Seconds between two measurements of CE, at the least."""


@dataclass(kw_only=True)
class Resident(Child):
    """A child that lives on one of the hosts."""

    host: Host

    def start(self) -> None:
        """Starts it there; what it says goes to its log."""
        self.said = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = self.host.start(
                [sys.executable, "-m", children.__name__, *self.arguments],
                stdout=log,
                stderr=log,
                stdin=parent_alive(),
                env=config.environment(),
                start_new_session=True,
            )
        self.starts += 1


@dataclass
class Site:
    """The hosts of one trial, and where what runs on them keeps its things."""

    hosts: dict[str, Host]
    folder: Path

    def start(self, host: str, name: str, *arguments: str) -> Resident:
        """A blocktrain command on a host."""
        log = self.folder / f"{name}.log"
        child = Resident(name, [*arguments], log, host=self.hosts[host])
        child.start()
        return child


def measure(
    trial: Trial, corpus: Corpus, folder: Path, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Trains across the hosts to the last round; returns what it came to.

    A folder that holds a run already is gone on with; `seconds` and `restarts` are then those of
    this sitting alone.
    """
    run = folder / "run"
    if not (run / LEDGER).exists():
        begin(run, trial.settings, corpus)
    began = time.monotonic()
    with hosts(HOSTS, trial.wan) as made, open_ledger(run) as ledger:
        restarts = train(Site(made, folder), trial, ledger, say)
        history, moved = noted(ledger, folder), moved_by_workers(ledger)
    seconds = time.monotonic() - began
    settings, model = from_folder(run)
    save_model(model, folder, {"run": asdict(settings), "data": trial.data})
    ce_start, ce = (evaluate(each, corpus.test).ce for each in (untrained(settings), model))
    rounds = settings.pace.rounds
    return {
        "ce_start": ce_start,
        "ce": ce,
        "bytes_moved": moved,
        "parameters": model.parameters,
        "rounds": rounds,
        "bytes_per_parameter_and_round": moved / model.parameters / rounds,
        "bytes_seen": settings.bytes_after(rounds),
        f"bytes_moved_to_{PAPER_CE}": first_below(history, PAPER_CE),
        "rtt_ms": trial.wan.rtt_ms,
        "mbit": trial.wan.mbit,
        "codec": settings.exchange.codec,
        "seconds": seconds,
        "restarts": restarts,
    }


def untrained(settings: Run) -> Model:
    """The model of round 0, as the seed gives it."""
    shape, seed = settings.shape, settings.pace.seed
    blocks = [parameters_of(new_block(shape, index, seed)) for index in range(shape.blocks)]
    return from_parameters(shape, settings.noise, blocks)


# --- the trial ------------------------------------------------------------------------------------


def train(site: Site, trial: Trial, ledger: Ledger, say: Callable[[str], None]) -> int:
    """Starts everything and looks after it until the owner's measurements end with the run.

    Returns how often somebody had to be started again.
    """
    run, heard = site.folder / "run", len(noted(ledger, site.folder, late=True))
    address = site.hosts[HOSTS[0]].address
    coordinator = site.start(
        HOSTS[0], "coordinator", "coordinator", str(run), "--host", address, "--port", str(PORT),
        "--tls", "auto", "--json",
    )  # fmt: skip
    told = coordinator.first_line("url")
    url, asking = told["url"], ["--token", owners_token(run), "--fingerprint", told["fingerprint"]]
    count = trial.settings.run.shape.blocks * trial.settings.run.pace.replicas
    workers = [
        site.start(
            host, f"worker-{number}", "join", url, *asking,
            "--folder", str(site.folder / f"worker-{number}"), "--name", f"{host}-{number}",
            "--threads", "1", "--data", trial.data,
        )
        for number, host in zip(range(1, count + 1), itertools.cycle(HOSTS), strict=False)
    ]  # fmt: skip
    say(f"{count} workers on {len(HOSTS)} hosts, coordinator at {url}")
    owner = site.start(
        HOSTS[0], "owner", "evaluate", "--follow", url, *asking,
        "--data", trial.data, "--every", str(trial.every),
    )  # fmt: skip
    crew, measuring = [coordinator, *workers], True
    while measuring:
        time.sleep(LOOK)
        measuring = code_of(owner) is None  # asked first: its last measurement is noted, too
        look_after(crew, ledger, say)
        history = noted(ledger, site.folder)
        for row in history[heard:]:
            say("round {round}: CE {ce_sample:.4f} (64 KiB sample)".format(**row))
        heard = len(history)
    if code_of(owner) != 0:
        raise BadRun(f"The owner's measuring ended early; {owner.log} says why.")
    let_go(workers)
    return sum(child.starts - 1 for child in crew)


def look_after(crew: Sequence[Child], ledger: Ledger, say: Callable[[str], None]) -> None:
    """Starts again whoever died; an error if that does not help, or if somebody left early."""
    for child in crew:
        if child.look():
            if child.starts > LIVES:
                raise BadRun(f"The {child.name} died {LIVES} times; {child.log} says why.")
            say(f"{child.name} died, and was started again")
        if code_of(child) == 0 and not ended(ledger):
            raise BadRun(
                f"The {child.name} left before the last round ({child.log} may say why); "
                "give the same command again to go on."
            )


def let_go(workers: Sequence[Child]) -> None:
    """Waits until all have said good-bye: only then is every byte counted."""
    deadline = time.monotonic() + GOOD_BYE
    for worker in workers:
        worker.end(deadline)
        if code_of(worker) != 0:
            raise BadRun(
                f"The {worker.name} did not say good-bye, so that its bytes are not all counted; "
                "give the same command again."
            )


def code_of(child: Child) -> int | None:
    """With which it ended; None while it runs."""
    return child.process.poll() if child.process else None


# --- what the ledger tells ------------------------------------------------------------------------


def ended(ledger: Ledger) -> bool:
    """Whether every block has its last round."""
    with ledger.reading() as r:
        record = r.run()
        rules = charters.decode(record.config).rules if record else None
        newest = [r.newest(block) for block in range(rules.blocks)] if rules else []
    return rules is not None and all(each and each.round >= rules.rounds for each in newest)


def moved_by_workers(ledger: Ledger) -> int:
    """Bytes at the workers' sockets, both directions, as they have told so far.

    Who leaves tells all; who is killed forgets what it moved since its last receipt.
    """
    with ledger.reading() as r:
        return sum(worker.bytes_sent + worker.bytes_received for worker in r.workers())


def noted(ledger: Ledger, folder: Path, late: bool = False) -> list[dict[str, Any]]:
    """What the owner has measured so far, in all sittings; what is new is added to the history.

    If that is `late`, nobody knows how many bytes had been moved by then.
    """
    path = folder / "history.jsonl"
    rows = [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    with ledger.reading() as r:
        measured = r.evaluations()[len(rows) :]
    if measured:
        moved = None if late else moved_by_workers(ledger)
        rows += [
            {
                "round": min(each.rounds),
                "bytes_seen": each.bytes_seen,
                "bytes_moved": moved,
                "ce_sample": each.ce,
            }
            for each in measured
        ]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return rows


def first_below(rows: list[dict[str, Any]], ce: float) -> int | None:
    """Bytes moved when the CE of a sample was first seen to be no more than this."""
    return next((row["bytes_moved"] for row in rows if row["ce_sample"] <= ce), None)
