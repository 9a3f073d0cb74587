"""The rules of a run's rounds, and the arithmetic of time: how long, and how many steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from blocktrain.errors import BadConfig
from blocktrain.lengths import Lengths

# The least spread assumed, as a part of the median. With one duration, or with equal ones, the
# MAD is 0: half of all updates would miss a deadline that lies on the median itself.
LEAST_SPREAD = 0.1
# Part of the time left that goes to local steps; the rest is for moving bytes.
HEADROOM = 0.9
# A worker's pace is the median of this many reports: one hiccup changes nothing.
PACES = 5


@dataclass(frozen=True)
class Rules:
    """How the rounds of a run go. Times are in seconds."""

    rounds: int
    """Rounds that every block goes through."""
    blocks: int
    """Blocks of the model."""
    replicas: int
    """Updates wanted for each block in each round: its slots."""
    quorum: int
    """Fewest updates that close a round before its deadline; late ones do not count."""
    local_steps: int
    """Steps that a full update is made of."""
    bytes_per_step: int
    """Bytes that one local step trains on."""
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
    k: float = 4.0
    """A deadline lies this many deviations (MAD) beyond the median duration."""
    history: int = 20
    """Durations that each block remembers to set its deadlines by."""
    discount: float = 0.5
    """What a late update loses with each round it is late: its factor is discount ** rounds."""
    lease: float = 60.0
    """A worker that is silent for this long loses its slot."""
    spare_slots: int = 0
    """Slots that each block may give out beyond `replicas`, when workers would be idle."""
    first_steps: int = 0
    """Steps of a full update in the first rounds, which grow from there; 0: all are alike."""

    def __post_init__(self) -> None:
        for name in ("rounds", "blocks", "replicas", "local_steps", "bytes_per_step", "history"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} is {getattr(self, name)}; set it to 1 or more.")
        for name in ("ahead", "spare_slots", "first_steps"):
            if getattr(self, name) < 0:
                raise BadConfig(f"{name} is {getattr(self, name)}; set it to 0 or more.")
        for name in ("grace", "first_allowance", "floor", "ceiling", "k", "discount", "lease"):
            # An int here would give other bytes before and after a trip through JSON.
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("grace", "k"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadConfig(f"{name} is {getattr(self, name)}; set it to 0 or more.")
        for name in ("floor", "lease"):
            if not 0 < getattr(self, name) < math.inf:
                raise BadConfig(f"{name} is {getattr(self, name)} s; set it above 0.")
        if not 1 <= self.quorum <= self.replicas:
            raise BadConfig(
                f"quorum is {self.quorum}; set it from 1 to replicas ({self.replicas})."
            )
        if not self.floor <= self.first_allowance <= self.ceiling < math.inf:
            raise BadConfig(
                f"floor, first_allowance and ceiling are {self.floor}, {self.first_allowance} and "
                f"{self.ceiling} s; give them in rising order."
            )
        if not 0 < self.discount <= 1:
            raise BadConfig(f"discount is {self.discount}; set it above 0 and at most 1.")

    @property
    def steps(self) -> Lengths:
        """Local steps of every round."""
        return Lengths(self.local_steps, self.first_steps)

    @property
    def memory(self) -> int:
        """Rounds that are remembered: snapshots to build on, and updates that may still come."""
        return self.ahead + 2


def allowance(durations: Sequence[float], rules: Rules) -> float:
    """Seconds that a round may take, from the durations of the block's last updates."""
    if not durations:
        return rules.first_allowance
    middle = median(durations)
    spread = max(median(abs(each - middle) for each in durations), LEAST_SPREAD * middle)
    return min(max(middle + rules.k * spread, rules.floor), rules.ceiling)


def full_duration(measured: float, trained: float, steps: int, rules: Rules) -> float:
    """How long all local steps would have taken: training grows with steps, moving bytes does not.

    All of the longest round, also where rounds are still short: while they grow, what the last ones
    took says too little about the next. So short rounds get more time than they need.

    `measured` is the coordinator's own time from assignment to submission; `trained` is the part
    of it that the worker says it trained for, so that it cannot claim more than was measured.
    """
    return measured + min(trained, measured) * (rules.local_steps / steps - 1)


def steps_within(seconds: float, pace: float | None, most: int) -> int:
    """Local steps, all if they fit, that a worker of this pace (seconds a step) has time for."""
    if not pace:  # unknown, or so little (5e-324 s for two steps) that it is 0
        return most
    return max(1, int(min(most, seconds * HEADROOM / pace)))
