"""Rows that are tables: what each setting is worth, one seed each."""

from blocktrain.aggregation.deadlines import Rules
from blocktrain.bench.comparing import Found, Table, against, less, moving
from blocktrain.bench.costs import fetched_per_round, flops_of, moved_per_round
from blocktrain.bench.scales import (
    Scale,
    Sides,
    alike,
    best,
    changed,
    crew,
    cuts,
    half_way,
    headline,
    narrow,
    narrow_tries,
    sized,
    table_tries,
    tuned,
    with_rounds_of,
)
from blocktrain.bench.steps import Notebook, Record, lab
from blocktrain.services.hardship import NONE, Hardship
from blocktrain.services.run import Run

DILOCO = {"outer_rate": 0.7, "outer_momentum": 0.9}  # its authors' outer optimiser
MANY_GRAMS = (8, 8192)  # the longest run, and vectors of each length
SALVAGED = Rules.discount  # what a coordinator takes a late update by
EMPTY = (0.5, 1.0)  # shares of the samples that are as the honest readout is; all: no denoising
HEADLINE = "denoise, chain from 0, mean of the blocks (headline)"
SHALLOW = "end to end, one block's layers"

# --- rates, 1, staleness, and 2, lookahead -------------------------------------------------------


def rates(book: Notebook, scale: Scale) -> Found:
    """What each side came to at each rate of its grid."""
    tables, wide = table_tries(scale), narrow_tries(scale)
    grids = {
        "the tables' blocks": [each.blocks for each in tables],
        "the tables' reference": [each.reference for each in tables],
        "the headline's reference, narrow": [each.reference for each in wide],
    }
    runs = [sized(run, scale.trial) for each in grids.values() for run in each]
    found = iter(book.labs(*runs))
    table: Table = []
    for name, tries in grids.items():
        records = [next(found) for _ in tries]
        for run, record in zip(tries, records, strict=True):
            table.append({"model": name, "Muon's rate": run.rates.matrix})
            table[-1] |= {"sample of valid": record.history[-1][1], "ce": record.result["ce"]}
            table[-1]["chosen"] = "yes" if record is records[best(records)] else ""
    note = "chosen by the sample of valid. Where another rate has a lower CE of the test split, "
    return Found(table=table, note=note + "gaps to the chosen one are too small by the difference")


def wide_rates(book: Notebook, scale: Scale) -> Found:
    """Whether the rate that serves the reference best in short runs does so at full size."""
    sides = headline(book, scale)
    tries = [changed(sides.reference, matrix=rate) for rate in scale.headline_grid]
    runs = [sized(run, scale.budget) for run in (sides.blocks, *tries)]
    blocks, *found = book.labs(*runs)
    table: Table = [
        {
            "Muon's rate": run.rates.matrix,
            "sample of valid": record.history[-1][1],
            "ce": record.result["ce"],
            "gap of the blocks": less(blocks, record),
        }
        for run, record in zip(tries, found, strict=True)
    ]
    return Found(table=table, note=f"blocks at {sides.blocks.rates.matrix:g}, seed 0")


def staleness(book: Notebook, scale: Scale) -> Found:
    """Neighbours that are fresh at every step, rounds of other lengths, and rounds that grow."""
    sides = tuned(book, scale)
    short = sides.blocks.pace.first_steps
    lengths = [(5, 0), (20, 0), (80, 0), (20, short), (80, short)]
    runs = [changed(sides.blocks, local_steps=full, first_steps=first) for full, first in lengths]
    return beside_fresh(book, sides, runs, scale.trial)


def depth(book: Notebook, scale: Scale) -> Found:
    """The same where depth pays, without vectors and longer; and what lookahead is worth there."""
    sides = narrow(book, scale)
    runs = [sides.blocks, changed(sides.blocks, local_steps=80)]
    runs += [changed(sides.blocks, first_steps=0), changed(sides.blocks, lookahead=0)]
    return beside_fresh(book, sides, runs, scale.deep)


def beside_fresh(book: Notebook, sides: Sides, stale: list[Run], budget: int) -> Found:
    """Rounds of some lengths, below neighbours that are fresh at every step."""
    new = changed(sides.blocks, local_steps=1, first_steps=0, steady=0.0, codec="fp32")
    runs = [sized(run, budget) for run in (new, *stale)]
    settings = ("local_steps", "first_steps", "steady", "lookahead", "rounds")
    table = against(book, runs, sized(sides.reference, budget), *settings, flops=True)
    for line, run in zip(table, runs, strict=True):
        line["longest round"] = run.pace.steps.of(run.pace.rounds)
    return Found(table=table, note="first line: neighbours are exchanged after every step, in fp32")


def steady(book: Notebook, scale: Scale) -> Found:
    """How fast neighbours follow snapshots (0: at once), a damped outer step, a long warm-up."""
    sides = tuned(book, scale)
    runs = [changed(sides.blocks, steady=kept) for kept in (0.0, 0.5, 0.7, 0.9)]
    runs += [changed(sides.blocks, outer_rate=0.7), changed(sides.blocks, warmup=0.1)]
    runs = [sized(run, scale.trial) for run in runs]
    reference = sized(sides.reference, scale.trial)
    return Found(table=against(book, runs, reference, "steady", "outer_rate", "warmup"))


def lookahead(book: Notebook, scale: Scale) -> Found:
    """How far downstream the loss is taken, and what that costs."""
    sides = tuned(book, scale)
    runs = [sized(changed(sides.blocks, lookahead=blocks), scale.trial) for blocks in (0, 1, 2, 3)]
    reference = sized(sides.reference, scale.trial)
    return Found(table=against(book, runs, reference, "lookahead", flops=True))


def per_flop(book: Notebook, scale: Scale) -> Found:
    """The same for equal FLOPs: who looks less far sees more bytes."""
    usual = sized(tuned(book, scale).blocks, scale.trial)
    tries = [changed(usual, lookahead=blocks) for blocks in (0, 1, usual.task.lookahead)]
    runs = [sized(run, scale.trial * flops_of(usual) / flops_of(run)) for run in tries]
    table: Table = [
        {
            "lookahead": run.task.lookahead,
            "MB seen": found.result["bytes_seen"] / 1e6,
            "FLOPs / the default's": flops_of(run) / flops_of(usual),
            "ce": found.result["ce"],
        }
        for run, found in zip(runs, book.labs(*runs), strict=True)
    ]
    return Found(table=table)


def own_share(book: Notebook, scale: Scale) -> Found:
    """How much of the loss is taken at the block's own head; with none of it nobody would train
    heads that others look through."""
    sides = tuned(book, scale)
    runs = [
        sized(changed(sides.blocks, own_share=share), scale.trial) for share in (0.03, 0.1, 0.3)
    ]
    return Found(table=against(book, runs, sized(sides.reference, scale.trial), "own_share"))


def grams(book: Notebook, scale: Scale) -> Found:
    """Vectors for runs of bytes: none, as many as the tables' model has, and far more. Both sides
    are at the reference's rate: the blocks' own is for the second line."""
    sides, few = alike(book, scale), scale.base.shape
    table: Table = []
    for longest, vectors in ((1, few.gram_rows), (few.grams, few.gram_rows), MANY_GRAMS):
        run, reference = (
            sized(changed(side, grams=longest, gram_rows=vectors), scale.trial)
            for side in (sides.blocks, sides.reference)
        )
        table += against(book, [run], reference, "grams", "gram_rows")
        table[-1]["MB moved a round"] = moved_per_round(run) / 1e6
    rate = f"Muon's rate is {sides.blocks.rates.matrix:g} in all"
    return Found(table=table, note=f"grams 1: single bytes only; {rate}")


# --- 3, composition ------------------------------------------------------------------------------


def composition(book: Notebook, scale: Scale) -> Found:
    """The last head against the mean of heads, on one sample."""
    run = sized(headline(book, scale).blocks, scale.budget)
    book.labs(run)
    found = samples(book.of_model("evaluate", book.lab(run), "--readouts"))
    return Found(table=[{"readout": name, "ce": ce} for name, ce in found])


def samples(readouts: Record) -> list[tuple[str, float]]:
    """What `evaluate --readouts` measured on its sample."""
    return [(name, ce) for name, ce in readouts.result.items() if name.endswith("sample)")]


# --- 4, replicas, and what they move -------------------------------------------------------------


def replicas(book: Notebook, scale: Scale) -> Found:
    """Several workers per block."""
    return moving(book, "blocks", crews(tuned(book, scale).blocks, scale))


def diloco(book: Notebook, scale: Scale) -> Found:
    """Workers that hold the whole model. One worker is end to end."""
    sides = tuned(book, scale)
    whole = changed(
        sides.blocks, blocks=1, layers=sides.reference.shape.layers,
        matrix=sides.reference.rates.matrix,
    )  # fmt: skip
    return moving(book, "DiLoCo", crews(whole, scale))


def crews(run: Run, scale: Scale) -> list[Run]:
    """1, 2 and 6 workers: the same bytes and steps, each with its part of a batch. Then six who
    meet less often, averaged plainly and by DiLoCo's step, and one who does."""
    often = [crew(run, scale, count) for count in (1, 2, 6)]
    steps = (scale.base.pace.local_steps, 80)
    seldom = [with_rounds_of(each, often[-1], scale) for each in steps]
    six = [each for far in seldom for each in (far, with_outer_step(far))]
    return [*often, *six, with_rounds_of(steps[0], often[0], scale)]


def with_outer_step(run: Run) -> Run:
    """The same with DiLoCo's own step, which has no use for the longer local steps of averaging."""
    rates, longer = run.rates, run.pace.replicas**0.5
    return changed(run, **DILOCO, matrix=rates.matrix / longer, other=rates.other / longer)


def codecs(book: Notebook, scale: Scale) -> Found:
    """Coarser updates and deltas, made up for by what is kept back."""
    blocks = tuned(book, scale).blocks
    one, six = (crew(blocks, scale, count) for count in (1, 6))
    runs = [changed(one, codec=name) for name in ("fp32", "int8", "int4", "int2")]
    return moving(book, "blocks", [*runs, changed(six, codec="fp32"), six])


# --- 5, blocks, and 6, denoise -------------------------------------------------------------------


def blocks(book: Notebook, scale: Scale) -> Found:
    """The same layers cut into 2, 4 and 8 blocks, and into 8 that look half of the way ahead."""
    runs, reference = cuts(book, scale, 2, 4, 8)
    runs.append(half_way(runs[-1]))
    table = against(book, runs, reference, "blocks", "lookahead", flops=True)
    for line, run in zip(table, runs, strict=True):
        last = run.shape.blocks - 1
        line["MB moved a round"] = moved_per_round(run) / 1e6
        line["MB fetched a round by the last block"] = fetched_per_round(run, last) / 1e6
    return Found(table=table, note=f"{scale.depth} layers in all")


def denoise(book: Notebook, scale: Scale) -> Found:
    """The paper's objective at its best rate by every readout, beside what needs no noise."""
    sides = tuned(book, scale)
    noisy = noisiest(book, scale, sides, scale.grid)
    table = beside_noise(book, scale, sides, noisy)
    readouts = book.of_model("evaluate", book.lab(noisy), "--readouts")
    table += [
        {"readout": f"denoise, {name}", "M parameters": None, "ce": ce, "gap": None}
        for name, ce in samples(readouts)
    ]
    note = f"denoise at Muon's rate {noisy.rates.matrix:g}; every block of it has vectors of its "
    note += "own. Lines of a sample have no gap, because the reference was measured on the whole "
    return Found(table=table, note=note + "split")


def denoise_deep(book: Notebook, scale: Scale) -> Found:
    """The same where depth pays sooner, without vectors; honest readouts only."""
    sides = narrow(book, scale)
    noisy = noisiest(book, scale, sides, scale.headline_grid)
    note = f"denoise at Muon's rate {noisy.rates.matrix:g}"
    return Found(table=beside_noise(book, scale, sides, noisy), note=note)


def noisiest(book: Notebook, scale: Scale, sides: Sides, grid: tuple[float, ...]) -> Run:
    """Denoising blocks at the best rate of a grid."""
    # All samples are for the readout of the next byte, and no neighbour asks for short rounds.
    alone = changed(sides.blocks, objective="denoise", masked_share=0.0, first_steps=0)
    tries = [sized(changed(alone, matrix=rate), scale.trial) for rate in grid]
    return tries[best(book.labs(*tries))]


def beside_noise(book: Notebook, scale: Scale, sides: Sides, noisy: Run) -> Table:
    """Denoising blocks below what needs no noise, honest readouts all."""
    runs = [sized(run, scale.trial) for run in (sides.reference, sides.shallow, sides.blocks)]
    runs += [noisy, *(changed(noisy, empty_share=share) for share in EMPTY)]
    names = ["end to end, all layers", SHALLOW, "neighbours", HEADLINE, *map(without_code, EMPTY)]
    found = book.labs(*runs)
    return [
        {
            "readout": name,
            "M parameters": each.result["parameters"] / 1e6,
            "ce": each.result["ce"],
            "gap": less(each, found[0]),
        }
        for name, each in zip(names, found, strict=True)
    ]


def without_code(share: float) -> str:
    """The name of a line: so many samples are as the honest readout is."""
    return f"the same, {share:.0%} of the samples without a noisy code"


AVERAGED = without_code(1.0)  # no denoising at all: shallow models, averaged

# --- 7, hardship ---------------------------------------------------------------------------------


def unreliable(book: Notebook, scale: Scale) -> Found:
    """Four workers per block: slow ones, late ones, and late ones that are salvaged."""
    run = with_rounds_of(8, crew(tuned(book, scale).blocks, scale, 4), scale)  # slowest: 1 of 8
    kinds = (
        NONE,
        Hardship(slowest=8),
        Hardship(missed=0.3),
        Hardship(missed=0.3, salvaged=SALVAGED),
        Hardship(missed=0.3, salvaged=SALVAGED, slowest=8),
    )
    found = book.read(*(lab(run, book.data, kind, book.notes) for kind in kinds))
    table: Table = [
        {
            "slowest": f"{kind.slowest:g} x",
            "late": f"{kind.missed:.0%}",
            "salvaged by": kind.salvaged,
            "ce": each.result["ce"],
            "costs": less(each, found[0]),
        }
        for kind, each in zip(kinds, found, strict=True)
    ]
    note = "four workers per block, equal rounds: slow workers and lost updates see fewer bytes. "
    note += "Unlike in a network, who is late makes all steps of the next round"
    return Found(table=table, note=note)
