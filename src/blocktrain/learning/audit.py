"""Proofs that nothing leaked: perturbation, scrambling, round trip.

A model that sees its targets looks better than it is. Three independent proofs that this one does
not, each with the means to notice that it proved nothing:

    perturbation   later bytes are changed; what was said before them stays the same to the last
                   bit. Control: with a mask loosened by one the same check must fail, and for
                   `denoise` with the true targets' noisy codes too.
    scrambling     a context out of order must cost.
    round trip     held-out bytes are compressed and opened again, and their code is as long as the
                   CE says. A decoder has no targets to leak.

Letters: B rows, T positions, S streams, V vocabulary. A row is T + 1 bytes: position t has seen
bytes 0 .. t and predicts byte t + 1.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.errors import BadArchive
from blocktrain.learning.coding import code_length_bits, compress, cut_for, decompress, refed
from blocktrain.learning.evaluate import (
    SAMPLE,
    Readout,
    cross_entropies,
    evaluate,
    honest,
    windows,
)
from blocktrain.learning.model import START, VOCABULARY, Model, Sight
from blocktrain.learning.readouts import leaky_logs, other_honest
from blocktrain.terms import Digest, Progress, silent

ROUND_TRIP = 4096  # bytes; a leak of 0.02 bits a byte shows
PASSES = 3  # changed copies of a batch; every row of each is cut at another position
CLEARLY = 0.1  # nats that a scrambled context must cost; small models of the tests lose 5
AGREE_BITS = 64  # a range code ends with up to two words that say nothing
AGREE_SHARE = 0.005

PARTS = 5  # of the audit, for its progress

UNNAMED = Digest("0" * 64)  # of a model that is its own witness

Text = NDArray[np.uint8]
Said = Callable[[Tensor], Sequence[Tensor]]
"""Rows (B, T + 1) -> what is said at each position, (B, T, anything), one per readout."""


@dataclass(frozen=True)
class Audit:
    """What the audit found."""

    causal: bool
    """No readout moved when bytes after its position changed."""
    positive_control: bool
    """The same check caught the model when it was made to leak."""
    scrambled_ce: float
    """CE when each window's context is out of order."""
    ce: float
    unigram_ce: float
    """Entropy of the text's byte frequencies."""
    code_bits: float
    """Length of the round trip's code."""
    ce_bits: float
    """What an ordinary teacher-forced pass says that length is."""
    round_trip: bool
    """The code was opened to the same bytes."""

    @property
    def passed(self) -> bool:
        """Whether nothing leaked and the audit could have seen it."""
        return not self.failures()

    @property
    def must_cost(self) -> float:
        """What scrambling must cost, less for a model that context has hardly helped so far."""
        return min(CLEARLY, (self.unigram_ce - self.ce) / 2)

    def failures(self) -> list[str]:
        """One sentence for each thing that is wrong."""
        found = []
        if not self.causal:
            found.append("What is said at a position depends on bytes after it: a target leaks.")
        if not self.positive_control:
            found.append(
                "The audit did not catch a model that was made to leak, so it proves nothing here; "
                "train the model first."
            )
        if self.ce < self.unigram_ce and not self.scrambled_ce > self.ce + self.must_cost:
            found.append(
                f"A scrambled context costs nothing (CE {self.scrambled_ce:.3f} instead of "
                f"{self.ce:.3f}): what is said does not come from the context."
            )
        if not self.round_trip:
            found.append("Compressed bytes did not open to themselves again.")
        if not abs(self.code_bits - self.ce_bits) <= max(AGREE_BITS, AGREE_SHARE * self.ce_bits):
            found.append(
                f"The code has {self.code_bits:.0f} bits where the CE promises {self.ce_bits:.0f}: "
                "the CE was not measured on what a decoder knows."
            )
        return found


def audit(model: Model, text: Text, seed: int = 0, progress: Progress = silent) -> Audit:
    """Every proof on held-out text; `seed` draws what is changed and the noise of readouts."""
    sample, some = text[:SAMPLE], text[:ROUND_TRIP]
    score = evaluate(model, sample, part(progress, 0))
    batches = first_and_last_rows(model, sample)
    causal = is_causal(model, batches, seed)
    progress(2, PARTS)
    control = catches_leaks(model, batches[0], seed)
    progress(3, PARTS)
    code_bits, round_trip = there_and_back(model, some.tobytes(), part(progress, 3))
    [scrambled_ce] = cross_entropies(
        scrambled(model, seed), sample, model.shape.window, model.device, part(progress, 4)
    )
    return Audit(
        causal=causal,
        positive_control=control,
        scrambled_ce=scrambled_ce,
        ce=score.ce,
        unigram_ce=unigram_ce(sample),
        code_bits=code_bits,
        ce_bits=teacher_forced_bits(model, some),
        round_trip=round_trip,
    )


# --- perturbation -------------------------------------------------------------------------------


def is_causal(model: Model, batches: Sequence[Tensor], seed: int) -> bool:
    """Whether no readout moves with what comes after: every prefix of the stack in every shape.

    The other readouts of `denoise` take 17 passes, so one shape is enough for them.
    """
    checks = [unmoved(from_context(honest(model)), rows_BT1, seed) for rows_BT1 in batches]
    if model.shape.objective == "denoise":
        others = from_context(lambda tokens_BT: other_honest(model, tokens_BT, seed))
        checks.append(unmoved(others, batches[0], seed))
    return all(held for check in checks for held in check)


def catches_leaks(model: Model, rows_BT1: Tensor, seed: int) -> bool:
    """Whether the check fails, as it must, on readouts that do see ahead.

    Of the loosened stack the last head must be caught. Those before it may say nothing at all: in a
    model trained end to end they still are what they began as.
    """
    loosened = Loosened(model.shape, model.noise, model.blocks)
    *_, held = unmoved(from_context(honest(loosened)), rows_BT1, seed)
    if model.shape.objective == "neighbours":
        return not held
    return not held and not any(unmoved(lambda rows: leaky(model, rows, seed), rows_BT1, seed))


@torch.no_grad()
def unmoved(said: Said, rows_BT1: Tensor, seed: int) -> list[bool]:
    """For each readout: is all that is said up to t the same when every byte after t is another?"""
    random = torch.Generator().manual_seed(seed)
    rows, positions = rows_BT1.shape[0], rows_BT1.shape[1] - 1
    at = torch.arange(positions + 1, device=rows_BT1.device)
    before = said(rows_BT1)
    held = [True] * len(before)
    for cuts_B in torch.linspace(0, positions - 1, PASSES * rows).round().long().chunk(PASSES):
        later_BT1 = at > cuts_B.to(at.device)[:, None]
        shift_BT1 = torch.randint(1, VOCABULARY, rows_BT1.shape, generator=random).to(at.device)
        after = said(torch.where(later_BT1, (rows_BT1 + shift_BT1) % VOCABULARY, rows_BT1))
        kept_BT = ~later_BT1[:, :-1]
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            held[number] &= torch.equal(one[kept_BT], other[kept_BT])
    return held


def from_context(readout: Readout) -> Said:
    """A readout is shown a row without its last byte, as in evaluation."""
    return lambda rows_BT1: readout(rows_BT1[:, :-1])


class Loosened(Model):
    """A model made to leak: every position may also see the one after it."""

    def decoder_prefixes(self, tokens_BT: Tensor, sight: Sight) -> Iterator[Tensor]:
        """The residual stream under the loosened mask."""
        return super().decoder_prefixes(tokens_BT, loosen(sight, tokens_BT))

    def denoise_chain(self, tokens_BT: Tensor, z_BTM: Tensor, sight: Sight) -> Iterator[Tensor]:
        """The Euler chain under the loosened mask."""
        return super().denoise_chain(tokens_BT, z_BTM, loosen(sight, tokens_BT))


def loosen(sight: Sight, tokens_BT: Tensor) -> Sight:
    """The same sight, each position seeing one more."""
    mask = sight.mask
    if mask is None:
        at = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        mask = at[None, :] <= at[:, None]
    mask = mask.clone()
    mask[..., 1:] |= mask[..., :-1].clone()
    return replace(sight, mask=mask)


def leaky(model: Model, rows_BT1: Tensor, seed: int) -> list[Tensor]:
    """LEAKY: what the model says when z holds the true targets."""
    return leaky_logs(model, rows_BT1[:, :-1], rows_BT1[:, 1:], seed)


# --- scrambling ---------------------------------------------------------------------------------


def scrambled(model: Model, seed: int) -> Readout:
    """The whole stack, shown each window's bytes in another order."""
    random = torch.Generator().manual_seed(seed)

    def readout(tokens_BT: Tensor) -> list[Tensor]:
        order_BT = torch.rand(tokens_BT.shape, generator=random).argsort(1).to(tokens_BT.device)
        return [model.log_probabilities(tokens_BT.gather(1, order_BT))]

    return readout


def unigram_ce(text: Text) -> float:
    """What knowing only the text's byte frequencies would cost, in nats per byte."""
    share = np.bincount(text, minlength=VOCABULARY) / len(text)
    share = share[share > 0]
    return float(-(share * np.log(share)).sum())


# --- round trip ---------------------------------------------------------------------------------


def there_and_back(model: Model, text: bytes, progress: Progress = silent) -> tuple[int, bool]:
    """Bits of the text's code, and whether it opened to the same text."""
    archive = compress(model, UNNAMED, text, lambda done, total: progress(done, 2 * total))
    try:
        again = decompress(
            model, UNNAMED, archive, lambda done, total: progress(total + done, 2 * total)
        )
    except BadArchive:
        return code_length_bits(archive), False
    return code_length_bits(archive), again == text


@torch.no_grad()
def teacher_forced_bits(model: Model, text: Text) -> float:
    """What the same bytes cost with the same contexts, in ordinary passes over known text."""
    cut = cut_for(len(text), model.shape)
    window = model.shape.window
    targets_ST = torch.from_numpy(cut.apart(text).astype(np.int64)).to(model.device)
    known_ST1 = torch.nn.functional.pad(targets_ST, (1, 0), value=START)
    coded_ST = torch.from_numpy(cut.apart(np.ones_like(text)) > 0).to(model.device)
    nats, start, done = 0.0, 0, 0
    while done < cut.steps:
        end = min(start + window, cut.steps)
        log_STV = model.log_probabilities(known_ST1[:, start:end])[:, done - start :]
        log_ST = log_STV.gather(2, targets_ST[:, done:end, None])[..., 0]
        nats -= float(log_ST[coded_ST[:, done:end]].double().sum())
        start, done = end + 1 - refed(window), end
    return nats / log(2)


# --- pieces -------------------------------------------------------------------------------------


def first_and_last_rows(model: Model, text: Text) -> list[Tensor]:
    """The first batch of evaluation, and the last one where it has another shape."""
    whole = torch.from_numpy(np.concatenate(([START], text)).astype(np.int64))
    batches = [tokens_and_targets for *tokens_and_targets, _ in windows(whole, model.shape.window)]
    chosen = [
        torch.cat((tokens_BT, targets_BT[:, -1:]), 1).to(model.device)
        for tokens_BT, targets_BT in (batches[0], batches[-1])
    ]
    return chosen[:1] if chosen[0].shape == chosen[1].shape else chosen


def part(progress: Progress, number: int) -> Progress:
    """Progress of one part of the audit, as progress of the whole."""
    return lambda done, total: progress(number * total + done, PARTS * total)
