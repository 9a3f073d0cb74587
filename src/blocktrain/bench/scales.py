"""How large a reproduction is: the runs that every question starts from, and their bytes."""

from dataclasses import dataclass, fields, replace
from typing import Any

from blocktrain.bench.steps import OUT, WIKITEXT, Notebook, Record
from blocktrain.services.lab import Watch
from blocktrain.services.run import Run


@dataclass(frozen=True)
class Scale:
    """One size of all rows."""

    name: str
    folder: str
    """Where it is kept, if not told otherwise."""
    headline: Run
    """Blocks with one worker each, before their rate is tuned: what the first rows are about."""
    base: Run
    """The same, not so large: what the tables are about."""
    budget: int
    """Bytes that each block sees, at least: the headline."""
    trial: int
    """The same for the tables."""
    grid: tuple[float, ...]
    """Muon's rates that both sides of the tables are tried with."""
    headline_grid: tuple[float, ...]
    """The same for the headline's reference."""
    seeds: tuple[int, ...]
    shared_batch: int = 12
    """Windows per step of all replicas of a block: 1, 2 and 6 of them have equal parts."""
    crew_steps: int = 5
    """Local steps of a round where a block has several workers."""
    depth: int = 8
    """Layers of the model that is cut into 2, 4 and 8 blocks."""
    deep: int = 4_096_000
    """Bytes that each of those blocks sees, at least: enough for so many layers to pay."""
    memory: tuple[str, ...] = ()
    """Flags of `bench memory`."""
    data: str = WIKITEXT
    """What is trained and measured on; OUT/text is a part of WikiText-2 as long as `cut`."""
    cut: int = 0
    reference_steps: int = 20
    """Steps of a reference's rounds, over the last of which its weights are averaged."""
    notes: int = Watch.notes
    """How many times CE of a sample is measured in each run."""
    judged: bool = True
    """Whether bars and goals are for this size."""

    @property
    def text(self) -> str:
        """What CE is of, in words."""
        if not self.cut:
            return "WikiText-2 raw's test split"
        return f"the last twentieth of the first {self.cut / 1e6:g} MB of WikiText-2 raw"


@dataclass(frozen=True)
class Sides:
    """The two that are compared, each at its best rate, not yet of any length."""

    blocks: Run
    reference: Run
    shallow: Run


def changed(run: Run, **settings: Any) -> Run:
    """The run with other values of some settings, whatever section they are in."""
    for section in fields(Run):
        old = getattr(run, section.name)
        ours = {one.name: settings.pop(one.name) for one in fields(old) if one.name in settings}
        run = replace(run, **{section.name: replace(old, **ours)})
    if settings:
        raise TypeError(f"A run has no {', '.join(settings)}; look at services/run.py.")
    return run


def sized(run: Run, budget: float) -> Run:
    """The run with as many rounds as it takes to see so many bytes."""
    steps = -int(-budget // run.bytes_per_step)
    return changed(run, rounds=run.pace.steps.rounds(steps))


def tuned(book: Notebook, scale: Scale) -> Sides:
    """The tables' sides, each at its best rate."""
    return sides(scale, scale.base, *best_rates(book, scale))


def alike(book: Notebook, scale: Scale) -> Sides:
    """The tables' sides, both at the rate that serves the reference best."""
    rate = best_rates(book, scale)[1]
    return sides(scale, scale.base, rate, rate)


def headline(book: Notebook, scale: Scale) -> Sides:
    """The headline's sides, both at the rate that serves the reference best where they are narrow:
    Muon's rates hold at any width."""
    rate = narrow(book, scale).reference.rates.matrix
    return sides(scale, scale.headline, rate, rate)


def narrow(book: Notebook, scale: Scale) -> Sides:
    """The headline's sides at the tables' width, both at the rate of the grid that serves the
    reference best in short runs."""
    tries = narrow_tries(scale)
    if len(tries) == 1:
        return tries[0]
    return tries[best(book.labs(*(sized(each.reference, scale.trial) for each in tries)))]


def narrow_tries(scale: Scale) -> list[Sides]:
    """The same at each rate of its grid."""
    small = scale.base.shape
    blocks = changed(scale.headline, width=small.width, heads=small.heads)
    return [sides(scale, blocks, rate, rate) for rate in scale.headline_grid]


def sides(scale: Scale, blocks: Run, ours: float, theirs: float) -> Sides:
    """Blocks and what they are compared with. One block's depth takes the reference's rate, and so
    does every end-to-end model of another depth."""
    # End to end has no neighbours that its rounds must be short for.
    rounds = {"first_steps": 0, "local_steps": scale.reference_steps}
    reference = changed(blocks, matrix=theirs, **rounds)
    layers = blocks.shape.layers
    return Sides(
        changed(blocks, matrix=ours),
        reference.end_to_end(blocks.shape.blocks * layers),
        reference.end_to_end(layers),
    )


def crew(run: Run, scale: Scale, count: int) -> Run:
    """So many workers per block, who share what one has for a step, and meet often."""
    shared = changed(run, replicas=count, batch=scale.shared_batch // count, first_steps=0)
    return with_rounds_of(scale.crew_steps, shared, scale)


def with_rounds_of(steps: int, run: Run, scale: Scale) -> Run:
    """The same with another number of local steps."""
    return sized(changed(run, local_steps=steps), scale.trial)


def cuts(book: Notebook, scale: Scale, *counts: int) -> tuple[list[Run], Run]:
    """One deep model cut into so many blocks, and whole."""
    sides = narrow(book, scale)
    runs = [
        sized(changed(sides.blocks, blocks=count, layers=scale.depth // count), scale.deep)
        for count in counts
    ]
    return runs, sized(changed(sides.reference, layers=scale.depth), scale.deep)


def half_way(run: Run) -> Run:
    """The same with a loss that is taken half of the blocks downstream."""
    return changed(run, lookahead=run.shape.blocks // 2)


def best_rates(book: Notebook, scale: Scale) -> tuple[float, float]:
    """The rate of the grid that serves blocks best, and the one that serves the reference best.

    Cheaper runs than the headline's (`scale.trial`), the first seed; what counts is CE of a sample
    of valid, so that nothing is chosen by the split that is reported.
    """
    if len(scale.grid) == 1:
        return scale.grid[0], scale.grid[0]
    tries = table_tries(scale)
    ours = [sized(each.blocks, scale.trial) for each in tries]
    theirs = [sized(each.reference, scale.trial) for each in tries]
    found = book.labs(*ours, *theirs)
    return scale.grid[best(found[: len(ours)])], scale.grid[best(found[len(ours) :])]


def table_tries(scale: Scale) -> list[Sides]:
    """The tables' sides at each rate of their grid."""
    return [sides(scale, scale.base, rate, rate) for rate in scale.grid]


def best(records: list[Record]) -> int:
    """Which one ended with the lowest CE of the valid sample."""
    return min(range(len(records)), key=lambda index: records[index].history[-1][1])


FULL = Scale(
    name="full",
    folder="runs/reproduce",
    # Vectors for runs of bytes pay in short runs. In long ones blocks stay behind end to end with
    # them, and pass it without. Chosen when test CE of both was known (LOG.md, 2026-11-18).
    headline=changed(Run(), local_steps=20, width=256, heads=4, grams=1),
    base=changed(Run(), local_steps=20),
    budget=12_288_000,
    trial=1_638_400,
    grid=(0.005, 0.01, 0.02),
    headline_grid=(0.01, 0.02, 0.04),
    seeds=(0, 1, 2),
)

SMALL = changed(Run(), local_steps=20, width=64, heads=1, window=128, gram_rows=512)
QUICK = Scale(
    name="quick",
    folder="runs/reproduce-quick",
    headline=changed(SMALL, grams=1),
    base=SMALL,
    budget=163_840,  # rounds are whole, and growing ones end a little later: up to 7 % more bytes
    trial=81_920,
    deep=81_920,
    grid=(0.01,),
    headline_grid=(0.01,),
    seeds=(0,),
    memory=("--width", "512", "--layers", "4", "--batch", "2", "--window", "64"),
    data=OUT + "text",
    cut=1_400_000,  # the whole test split takes longer to read than a model to train here
    reference_steps=5,  # else averages would lie far behind runs of 80 steps
    notes=2,
    judged=False,
)
