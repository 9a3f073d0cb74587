"""Runs that are really trained, by workers with torch."""

import hashlib
from pathlib import Path

from tests.chaos.faults import Stage
from tests.chaos.light import state_of

from blocktrain.aggregation.folder import LEDGER
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.aggregation.state import State
from blocktrain.learning.data import Corpus, open_corpus
from blocktrain.services.begin import Settings, Timing, begin
from blocktrain.services.embedded import Embedded
from blocktrain.services.replay import replay
from blocktrain.services.run import Run

TIMING = Timing(lease=10.0, grace=1.0, first_allowance=60.0)


class Crew(Stage):
    """A run on this machine, as `blocktrain train` keeps it."""

    def __init__(self, embedded: Embedded) -> None:
        self.embedded, self.run = embedded, embedded.run

    def state(self) -> State:
        """Where the rounds are."""
        return state_of(self.run)

    def look_after(self) -> None:
        """Starts again what died, a second later."""
        self.embedded.look_after()

    def kill(self, worker: int) -> None:
        """kill -9."""
        process = self.embedded.children[worker].process
        assert process is not None
        process.kill()

    def kill_coordinator(self) -> None:
        """kill -9."""
        self.kill(0)


def begun(folder: Path, run: Run) -> Corpus:
    """A run on a little text that the coordinator serves."""
    text = folder / "text"
    text.write_bytes(hashlib.shake_128(b"text").hexdigest(10_000).encode())
    corpus = open_corpus(str(text))
    begin(folder / "run", Settings("chaos", run, TIMING, serve_corpus=True), corpus)
    return corpus


def same_again(run: Path, corpus: Corpus, folder: Path) -> None:
    """Whatever was trained comes out the same when it is trained again, digest by digest."""
    with SqliteLedger(run / LEDGER) as ledger:
        again = replay(ledger, corpus, folder)
    assert again.different == []
    assert again.snapshots > 0
