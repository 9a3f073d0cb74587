"""What a run is: every setting, in the sections of its config."""

from dataclasses import dataclass, field, replace

from blocktrain.aggregation.combine import Averaging
from blocktrain.errors import BadConfig
from blocktrain.learning.data import Plan
from blocktrain.learning.model import Shape
from blocktrain.learning.noise import Noise
from blocktrain.learning.objective import Recipe, Task
from blocktrain.learning.optimiser import Rates
from blocktrain.lengths import Lengths
from blocktrain.wire.codecs import CODECS


@dataclass(frozen=True)
class Pace:
    """How much is trained, in which portions."""

    rounds: int = 67
    """Rounds; each block gets one new snapshot per round."""
    local_steps: int = 20
    """Steps a replica makes on its own in one round."""
    first_steps: int = 2
    """The same in the first rounds, which grow from there; 0: all rounds are alike."""
    replicas: int = 1
    """Workers per block."""
    batch: int = 8
    """Windows per step and replica."""
    micro: int = 2048
    """Positions computed at once; the rest of a batch follows."""
    seed: int = 0
    """What is drawn at random follows from it."""

    def __post_init__(self) -> None:
        for name in ("rounds", "local_steps", "replicas", "batch", "micro"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.first_steps < 0:
            raise BadConfig(f"first_steps is {self.first_steps}; it must be 0 or more.")
        if self.seed < 0:
            raise BadConfig(f"seed is {self.seed}; it must be 0 or more.")

    @property
    def steps(self) -> Lengths:
        """Local steps of every round."""
        return Lengths(self.local_steps, self.first_steps)


@dataclass(frozen=True)
class Exchange:
    """What moves between replicas and whoever combines their updates."""

    codec: str = "int4"
    """Of updates and deltas: fp32, fp16, int8, int4 or int2. What was lost is made up for later."""

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise BadConfig(f"There is no codec '{self.codec}'; choose one of {', '.join(CODECS)}.")


@dataclass(frozen=True)
class Run:
    """One training effort: the sections of its config."""

    shape: Shape = field(default_factory=Shape)
    task: Task = field(default_factory=Task)
    noise: Noise = field(default_factory=Noise)
    rates: Rates = field(default_factory=Rates)
    averaging: Averaging = field(default_factory=Averaging)
    pace: Pace = field(default_factory=Pace)
    exchange: Exchange = field(default_factory=Exchange)

    @property
    def recipe(self) -> Recipe:
        """What every replica must agree on."""
        rates = self.rates.shared_by(self.pace.replicas)
        return Recipe(self.shape, self.task, self.noise, rates, self.pace.micro)

    @property
    def plan(self) -> Plan:
        """What data each replica sees."""
        pace = self.pace
        return Plan(pace.seed, pace.replicas, pace.steps, pace.batch, self.shape.window)

    @property
    def bytes_per_step(self) -> int:
        """Bytes that all replicas of a block train on in one step."""
        return self.pace.replicas * self.pace.batch * self.shape.window

    def bytes_after(self, rounds: int) -> int:
        """Bytes each block has been trained on after so many rounds."""
        return self.pace.steps.before(rounds + 1) * self.bytes_per_step

    def end_to_end(self, layers: int) -> "Run":
        """The ordinary model of this depth, on the same bytes in the same order."""
        shape = replace(self.shape, objective="neighbours", blocks=1, layers=layers)
        averaging = replace(self.averaging, outer_rate=1.0, outer_momentum=0.0)
        pace = replace(self.pace, replicas=1, batch=self.pace.batch * self.pace.replicas)
        plain = Exchange("fp32")
        return replace(self, shape=shape, averaging=averaging, pace=pace, exchange=plain)
