"""Who serves which blocks, as far as anybody has said so lately. Pure: `now` is an argument.

A stage announces itself again and again. One that does not is gone after LEASE; one that says that
it is leaving is gone at once.

An announcement carries the word that this registry gave to its stage last. A word is good once, and
for two leases at most, so that an announcement that somebody overheard and says again, sooner or
later, changes nothing. Whoever comes without a word, or with an old one, is given one and speaks
once more. No clock but the registry's own is asked.
"""

import hashlib
import secrets
from dataclasses import dataclass, field

from msgspec.structs import replace

from blocktrain.errors import BadInput
from blocktrain.wire.serving import Announce, Heard

LEASE = 5.0  # seconds; announce every second or two, so that one lost announcement changes nothing
MAX_KNOWN = 1024  # stages
MAX_OF_ONE = 64  # stages of one token, or of one address where no tokens are asked for


@dataclass(frozen=True)
class Known:
    """What is remembered of a stage: longer than it is there, so that its words stay used."""

    said: Announce | None
    """None: it has left."""
    at: float
    """When it last spoke."""
    count: int
    """How many words it has used."""
    of: str
    """Who answers for it."""


@dataclass
class Registry:
    """The stages that are there."""

    lease: float = LEASE
    most: int = MAX_KNOWN
    most_of_one: int = MAX_OF_ONE
    _secret: str = field(default_factory=lambda: secrets.token_hex(16))
    _known: dict[str, Known] = field(default_factory=dict)
    """By stage."""

    def hear(self, said: Announce, now: float, of: str = "") -> Heard:
        """Takes an announcement in place of the stage's one before, if its word is right.

        `of` is whoever answers for the stage, and may have so many and no more.
        """
        season, stage = self._season(now), said.place.stage
        self._forget(season)
        known = self._known.get(stage)
        count = known.count if known else 0
        if said.word not in [self._word(stage, count, s) for s in (season, season - 1)]:
            return Heard(self._word(stage, count, season), taken=False)
        if known is None:
            self._refuse_crowd(of)
        kept = None if said.leaving else replace(said, word=None)
        self._known[stage] = Known(kept, now, count + 1, of)
        return Heard(self._word(stage, count + 1, season), taken=True)

    def present(self, now: float) -> list[Announce]:
        """Everybody who has announced itself within the lease, by blocks."""
        self._forget(self._season(now))
        return sorted(
            (
                each.said
                for each in self._known.values()
                if each.said and now - each.at < self.lease
            ),
            key=lambda said: (said.holding.first, said.holding.last, said.place.stage),
        )

    def _season(self, now: float) -> int:
        """Words are good for the season in which they are given, and for the next one."""
        return int(now // self.lease)

    def _word(self, stage: str, count: int, season: int) -> str:
        """What a stage has to say with its next announcement."""
        told = f"blocktrain word\n{self._secret}\n{stage}\n{count}\n{season}"
        return hashlib.sha256(told.encode()).hexdigest()[:32]

    def _forget(self, season: int) -> None:
        """Forgets those of whom no word is good any more."""
        over = [s for s, known in self._known.items() if season - self._season(known.at) >= 2]
        for stage in over:
            del self._known[stage]

    def _refuse_crowd(self, of: str) -> None:
        """Raises where one more is too many."""
        if len(self._known) >= self.most:
            raise BadInput(f"{self.most} stages are known, which must be enough; try again later.")
        if sum(known.of == of for known in self._known.values()) >= self.most_of_one:
            raise BadInput(
                f"{self.most_of_one} stages of this token or address are known, which must be "
                "enough; let some leave, or come with another one."
            )
