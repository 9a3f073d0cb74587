"""What a run's rounds are told (events), and what they answer (effects). All of it is data."""

from enum import StrEnum

from msgspec import Struct

from blocktrain.terms import Digest


class Said(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Something that is said to the rounds or by them; in JSON its "type" is its name."""


# --- events: what the rounds are told ------------------------------------------------------------


class Asked(Said, frozen=True):
    """I am free: what shall I train?"""

    worker: str
    blocks: tuple[int, ...] | None = None
    """The blocks it can train; None is any."""
    seconds_per_step: float | None = None
    """Its own guess, used until its updates have shown its pace."""


class Submitted(Said, frozen=True):
    """Here is my update; its content has been checked, and the digest covers these fields."""

    worker: str
    block: int
    round: int
    slot: int
    update: Digest
    bytes_trained: int
    seconds: float
    """How long it trained."""
    steps: int


class Spoiled(Said, frozen=True):
    """What this worker sent for its slot cannot be used: let someone else have the slot."""

    worker: str
    block: int
    round: int
    slot: int


class Heard(Said, frozen=True):
    """I am still at it."""

    worker: str


class Left(Said, frozen=True):
    """I am leaving: give my slot to someone else."""

    worker: str


class Banned(Said, frozen=True):
    """The owner wants nothing more from this worker."""

    worker: str


class Combined(Said, frozen=True):
    """The snapshot of this round is made and stored."""

    block: int
    round: int
    snapshot: Digest
    steady: Digest


class Tick(Said, frozen=True):
    """Time has passed."""


class Pause(Said, frozen=True):
    """Hold everything: close no round and open none until I say so."""


class Resume(Said, frozen=True):
    """Go on from where you were; the pause does not count."""


class Stop(Said, frozen=True):
    """Finish what is under way, begin nothing new, and end."""


Event = (
    Asked | Submitted | Spoiled | Heard | Left | Banned | Combined | Tick | Pause | Resume | Stop
)

# --- verdicts: what became of an update ----------------------------------------------------------


class Reason(StrEnum):
    """Why an update is refused."""

    UNKNOWN_BLOCK = "unknown block"
    NOT_OPEN = "not open"
    NOT_ASSIGNED = "not assigned"
    DUPLICATE_SLOT = "duplicate slot"
    OTHER_UPDATE = "other update"
    TOO_OLD = "too old"
    IMPLAUSIBLE = "implausible"
    BANNED = "banned"
    ENDED = "ended"


class Taken(Said, frozen=True):
    """Your update is in time and counts in full."""

    round: int
    factor: float = 1.0


class Salvaged(Said, frozen=True):
    """Your update came late: it counts for this later round, by this factor."""

    round: int
    factor: float


class Refused(Said, frozen=True):
    """I will not take your update, and this is why."""

    reason: Reason
    sentence: str


Verdict = Taken | Salvaged | Refused

# --- effects: what the rounds answer -------------------------------------------------------------


class Why(StrEnum):
    """Why there is nothing to do."""

    NOTHING_FREE = "nothing free"
    PAUSED = "paused"
    ENDED = "ended"
    BANNED = "banned"


class Part(Struct, frozen=True):
    """One update's part in a snapshot: its share goes by bytes trained times factor."""

    update: Digest
    bytes_trained: int
    factor: float


class Assigned(Said, frozen=True):
    """Train this block for this round, this many steps; you have these seconds."""

    worker: str
    block: int
    round: int
    slot: int
    seconds_left: float
    steps: int


class Idle(Said, frozen=True):
    """There is nothing for you now; ask again in so many seconds."""

    worker: str
    retry_in: float
    why: Why


class Receipt(Said, frozen=True):
    """This is what became of your update."""

    update: Digest
    verdict: Verdict


class Opened(Said, frozen=True):
    """Updates for this round are welcome from now on."""

    block: int
    round: int
    seconds_left: float


class Extended(Said, frozen=True):
    """Nothing has come by the deadline, so there is a new one."""

    block: int
    round: int
    seconds_left: float


class Freed(Said, frozen=True):
    """This worker no longer holds its slot; someone else may have it."""

    worker: str
    block: int
    round: int
    slot: int


class Dropped(Said, frozen=True):
    """This update had a receipt, but its worker was banned before it was combined."""

    update: Digest
    block: int
    round: int


class Combine(Said, frozen=True):
    """The round is closed: make its snapshot of these updates, in this order."""

    block: int
    round: int
    parts: tuple[Part, ...]


class Ended(Said, frozen=True):
    """Every block is finished: the run is over."""


Effect = Assigned | Idle | Receipt | Opened | Extended | Freed | Dropped | Combine | Ended
Effects = tuple[Effect, ...]
