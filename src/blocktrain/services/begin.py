"""Makes a run: charter, first snapshots, keys, the owner's token. Needs torch; keeping it does not.

DIR/ledger.sqlite     what must survive kill -9
DIR/blobs/            snapshots, steady copies, updates
DIR/coordinator.key   signs receipts
DIR/owner.token       for the owner's eyes only
DIR/corpus/           the text, if the coordinator serves it
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from blocktrain.aggregation.beginning import write_first
from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.deadlines import Rules
from blocktrain.aggregation.folder import CORPUS, KEY, LEDGER, TOKEN, open_store
from blocktrain.aggregation.ledger import new_token
from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadRun
from blocktrain.learning.data import SPLITS, Corpus, split_digests
from blocktrain.learning.local import parameters_of
from blocktrain.learning.model import new_block
from blocktrain.services.run import Run
from blocktrain.wire import tensors
from blocktrain.wire.certificates import make_authority
from blocktrain.wire.signing import load_or_make_key


@dataclass(frozen=True)
class Timing:
    """How the rounds of a run wait for their workers. Times are in seconds."""

    quorum: int | None = None
    """Fewest updates that close a round before its deadline; all replicas if not given."""
    ahead: int = 0
    """Rounds a block may be ahead of the slowest one; 0 is lockstep."""
    grace: float = 5.0
    """How long a round waits for the others once it has its quorum."""
    first_allowance: float = 300.0
    """What a round may take while nobody knows how long one takes."""
    floor: float = 5.0
    """The least that a round may take, however fast the last ones were."""
    ceiling: float = 3600.0
    """The most that a round may take, however slow the last ones were."""
    lease: float = 60.0
    """A worker that is silent for this long loses its slot."""
    discount: float = 0.5
    """What a late update loses with each round it is late."""


@dataclass(frozen=True)
class Settings:
    """Everything a new run is made of."""

    name: str
    run: Run
    timing: Timing = field(default_factory=Timing)
    serve_corpus: bool = False
    """Whether the coordinator serves the text to its workers."""

    def rules(self) -> Rules:
        """The rules of its rounds."""
        pace, timing = self.run.pace, asdict(self.timing)
        timing["quorum"] = self.timing.quorum or pace.replicas
        return Rules(
            rounds=pace.rounds,
            blocks=self.run.shape.blocks,
            replicas=pace.replicas,
            local_steps=pace.local_steps,
            first_steps=pace.first_steps,
            bytes_per_step=pace.batch * self.run.shape.window,
            **timing,
        )


def begin(folder: Path, settings: Settings, corpus: Corpus) -> str:
    """Makes the run in a new folder; returns the owner's token, which is also kept there."""
    if (folder / LEDGER).exists():
        raise BadRun(f"{folder} holds a run already; choose another folder, or go on with it.")
    run = settings.run
    token = new_token()
    with errors_are_clear(folder):
        folder.mkdir(parents=True, exist_ok=True)
        load_or_make_key(folder / KEY)
        make_authority(folder, settings.name)
        if settings.serve_corpus:
            (folder / CORPUS).mkdir(exist_ok=True)
            for name in SPLITS:
                write_atomically(folder / CORPUS / name, corpus.split(name).tobytes())
        write_atomically(folder / TOKEN, token.encode() + b"\n", mode=0o600)
    store = open_store(folder)
    blocks, first = [], []
    for index in range(run.shape.blocks):
        values = parameters_of(new_block(run.shape, index, run.pace.seed))
        body = tensors.encode(values, "fp32")
        blocks.append({name: tuple(value.shape) for name, value in values.items()})
        first.append(store.put([body], limit=len(body)))
    charter = Charter(
        name=settings.name,
        data=corpus.name,
        corpus=corpus.digest,
        splits=tuple(split_digests(corpus)),
        corpus_served=settings.serve_corpus,
        codec=run.exchange.codec,
        rules=settings.rules(),
        averaging=run.averaging,
        blocks=tuple(blocks),
        first=tuple(first),
        learning=msgspec.json.encode(asdict(run)).decode(),
    )
    write_first(folder, charter, token)
    return token
