"""Which stages a text goes through: those that cover every block in the least time. Pure.

The forecast of a route is half a round trip to its first stage, a trip from each stage to the next,
half a round trip back from its last, and at each stage the time of one step for every text that
shares it. So replicas share the load, and a far replica is used when the near one has much to do.
Who is quick or near by less than LEAST_SHARE is not preferred for it: that may be chance.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from blocktrain.errors import Unreachable
from blocktrain.wire.serving import Holding, Place

LEAST_SHARE = 0.005  # seconds that a text costs others at least; round trips vary by 1 or 2 ms
AVOIDED = 60.0  # seconds added for a stage that lately failed or is full: used if nobody else can


@dataclass(frozen=True)
class Candidate:
    """A stage that a gateway has a link to, as far as choosing is concerned."""

    place: Place
    holding: Holding
    rtt: float
    """Seconds to it and back."""
    seconds: float
    """It takes for one ordinary step."""
    load: int = 0
    """Texts that already share it."""
    avoided: bool = False

    @property
    def id(self) -> str:
        """Who it is."""
        return self.place.stage

    @property
    def cost(self) -> float:
        """Seconds at this stage."""
        shared = self.load * max(self.seconds, LEAST_SHARE)
        return self.seconds + shared + (AVOIDED if self.avoided else 0.0)


Trip = Callable[[Candidate, Candidate], float]
"""Seconds from one stage to the next."""


def best(
    candidates: Iterable[Candidate],
    blocks: int,
    trip: Trip,
    pinned: Sequence[Holding] | None = None,
) -> list[Candidate]:
    """The quickest route; with `pinned`, of stages that hold exactly that, one after another."""
    known = sorted(
        (c for c in candidates if pinned is None or c.holding in pinned),
        key=lambda c: (c.holding.first, c.id),
    )
    seconds: dict[Candidate, float] = {}
    """From the gateway to the end of each stage's work, by the best way there."""
    before: dict[Candidate, Candidate] = {}
    for stage in known:
        if stage.holding.first == 0:
            seconds[stage] = stage.rtt / 2 + stage.cost
            continue
        ways = [c for c in seconds if leads_to(c.holding, stage.holding)]
        if ways:
            before[stage] = min(ways, key=lambda c: seconds[c] + trip(c, stage))
            seconds[stage] = seconds[before[stage]] + trip(before[stage], stage) + stage.cost
    ends = [c for c in seconds if c.holding.last == blocks - 1]
    if not ends:
        raise Unreachable(what_is_missing(known, seconds, blocks, pinned))
    route = [min(ends, key=lambda c: seconds[c] + c.rtt / 2)]
    while route[0] in before:
        route.insert(0, before[route[0]])
    return route


def leads_to(before: Holding, after: Holding) -> bool:
    """Whether one goes on where the other ends, in the same model: checkpoints never mix."""
    return before.last + 1 == after.first and before.model == after.model


def what_is_missing(
    known: Sequence[Candidate],
    reached: Iterable[Candidate],
    blocks: int,
    pinned: Sequence[Holding] | None,
) -> str:
    """The sentence for a text that cannot go through, with what to start."""
    for holding in pinned or ():
        if all(c.holding != holding for c in known):
            return (
                f"No replica serves {shown(holding.first, holding.last)} as this text began "
                f"({holding.weights} on {holding.kind}); start one with: blocktrain stage MODEL "
                f"--blocks {holding.first + 1}-{holding.last + 1}, or begin the text again."
            )
    first = max((c.holding.last + 1 for c in reached), default=0)
    last = blocks - 1
    for stage in sorted(known, key=lambda c: -c.holding.first):  # what leads to the end from there
        if stage.holding.last == last and stage.holding.first > first:
            last = stage.holding.first - 1
    return (
        f"No stage serves {shown(first, last)}; start one with: blocktrain stage MODEL "
        f"--blocks {first + 1}-{last + 1}."
    )


def shown(first: int, last: int) -> str:
    """Blocks for people, who count from 1."""
    return f"block {first + 1}" if first == last else f"blocks {first + 1} to {last + 1}"
