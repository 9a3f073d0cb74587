"""Rows that are one number each, with a bar and a goal."""

from blocktrain.bench.comparing import Found, curve, less, mb, reached, times, two
from blocktrain.bench.costs import flops_of
from blocktrain.bench.scales import (
    Scale,
    changed,
    crew,
    cuts,
    half_way,
    headline,
    narrow,
    sized,
    tuned,
)
from blocktrain.bench.steps import Notebook, Record, bench, three_hosts
from blocktrain.bench.three_hosts import PAPER_CE
from blocktrain.services.run import Run

STRETCHES = (1.0, 1.1, 1.25)  # of the budget: how much longer blocks may take to the reference's CE
WAN = {"rounds": 24, "first_steps": 0, "grams": 4, "gram_rows": 1024}
"""Where bytes count: no short rounds, and few vectors for runs of bytes."""


def audited(book: Notebook, *runs: Run) -> list[Record]:
    """What runs came to; there is no record of an audit that did not pass."""
    found = book.labs(*runs)
    for run in runs:
        book.of_model("audit", book.lab(run))
    return found


def ce(book: Notebook, scale: Scale) -> Found:
    """Blocks with one worker each."""
    blocks = sized(headline(book, scale).blocks, scale.budget)
    found = audited(book, *(changed(blocks, seed=seed) for seed in scale.seeds))
    millions = found[0].result["parameters"] / 1e6
    note = f"{millions:.1f} M parameters, {mb(found[0])} seen, audits passed"
    curves = {"blocks": curve(found[0])}
    return Found([each.result["ce"] for each in found], curves=curves, note=note)


def gap(book: Notebook, scale: Scale) -> Found:
    """The headline against the reference, seed by seed."""
    sides = headline(book, scale)
    blocks, reference = (sized(run, scale.budget) for run in (sides.blocks, sides.reference))
    ours = [changed(blocks, seed=seed) for seed in scale.seeds]
    theirs = [changed(reference, seed=seed) for seed in scale.seeds]
    found = book.labs(*ours, *theirs)
    pairs = list(zip(found[: len(ours)], found[len(ours) :], strict=True))
    table = [
        {"seed": seed, "blocks": one.result["ce"], "reference": other.result["ce"]}
        for seed, (one, other) in zip(scale.seeds, pairs, strict=True)
    ]
    told = [f"seed {seed}: {two(*pair)}" for seed, pair in zip(scale.seeds, pairs, strict=True)]
    note = f"{'; '.join(told)}. Blocks have {times(blocks, reference)}: for equal FLOPs end to end "
    note += "is ahead (`flops_ratio`)"
    curves = {"reference": curve(pairs[0][1])}
    return Found([less(one, other) for one, other in pairs], table, curves, note)


def gap_h80(book: Notebook, scale: Scale) -> Found:
    """The headline with rounds that grow four times as long."""
    sides = headline(book, scale)
    long = changed(sides.blocks, local_steps=80)
    runs = [sized(run, scale.budget) for run in (long, sides.reference)]
    blocks, reference = book.labs(*runs)
    audited(book, runs[0])
    note = f"{two(blocks, reference)}, {times(*runs)}, {runs[0].pace.rounds} rounds, "
    note += "audit passed"
    return Found([less(blocks, reference)], note=note)


def six_workers_extra(book: Notebook, scale: Scale) -> Found:
    """Two lines of the table about replicas, for which the others need not be there."""
    blocks = tuned(book, scale).blocks
    one, six = audited(book, *(crew(blocks, scale, count) for count in (1, 6)))
    note = f"six {two(six, one, 'one')}, audits passed; rates were tuned at a batch of "
    note += f"{scale.base.pace.batch}, not again at {scale.shared_batch}"
    return Found([less(six, one)], note=note)


def wan_bytes(book: Notebook, scale: Scale) -> Found:
    """Bytes at the workers' sockets until CE of a sample was 1.811."""
    step = three_hosts(changed(scale.base, **WAN))
    [found] = book.read(step)
    book.of_model("audit", step)
    moved = found.result[f"bytes_moved_to_{PAPER_CE}"]
    note = f"CE {found.result['ce']:.3f} of the test split in the end, for "
    note += f"{found.result['bytes_moved'] / 1e6:.1f} MB ("
    note += f"{found.result['bytes_per_parameter_and_round']:.2f} bytes per parameter and round); "
    note += f"{WAN['grams'] - 1} x "
    note += f"{WAN['gram_rows']:,} vectors for runs of bytes, "
    note += f"{found.result['parameters'] / 1e6:.1f} M parameters, audit passed"
    return Found([] if moved is None else [moved], note=note)


def memory_ratio(book: Notebook, scale: Scale) -> Found:
    """Anonymous memory of a worker against the end-to-end trainer's."""
    [found] = book.read(bench("memory", *scale.memory))
    millions = found.result["parameters_per_block"] / 1e6
    resident = found.result["neighbours_resident_ratio"]
    note = f"the second of four blocks of {millions:.0f} M parameters each. Mapped files, which "
    note += "the kernel may drop and read again, are not counted; with those of both sides it is "
    note += f"{resident:.3f}. `denoise`: {found.result['denoise_ratio']:.3f}"
    return Found([found.result["neighbours_ratio"]], note=note)


def flops_ratio(book: Notebook, scale: Scale) -> Found:
    """FLOPs until the blocks' CE of a sample is what the reference's is in the end."""
    sides = headline(book, scale)
    reference = sized(sides.reference, scale.budget)
    [aim] = book.labs(reference)
    for stretch in STRETCHES:
        run = sized(sides.blocks, stretch * scale.budget)
        [found] = book.labs(run)
        if share := reached(found.history, aim.history[-1][1]):
            value = share * flops_of(run) / flops_of(reference)
            plain = share * flops_of(run, muon=False) / flops_of(reference, muon=False)
            note = "seed 0: blocks have the reference's last CE (a sample of valid) after "
            note += f"{share:.0%} of {mb(found)}. All matrix products count, on both sides; "
            return Found([value], note=f"{note}without those of Muon it is {plain:.2f}")
    return Found(note=f"not reached with {STRETCHES[-1]:g} times the bytes")


def gap_k8(book: Notebook, scale: Scale) -> Found:
    """Eight blocks that look half of the way ahead, as four do by default. Beside it what the
    default's lookahead comes to, and one layer without any blocks: what depth is worth."""
    [near], reference = cuts(book, scale, 8)
    run = half_way(near)
    shallow = sized(narrow(book, scale).shallow, scale.deep)
    ours, theirs, default, one = book.labs(run, reference, near, shallow)
    audited(book, run)
    far, usual = run.task.lookahead, near.task.lookahead
    note = f"{two(ours, theirs)}, audit passed, {times(run, reference)}. The loss is taken {far} "
    note += f"blocks downstream; {usual}, the default, give {less(default, theirs):+.3f} for "
    note += f"{flops_of(near) / flops_of(reference):.2f} times the FLOPs. One layer end to end is "
    return Found([less(ours, theirs)], note=note + f"{less(one, theirs):.3f} behind")
