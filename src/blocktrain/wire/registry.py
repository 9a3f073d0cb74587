"""Who serves which blocks, as far as anybody has said so lately. Pure: `now` is an argument.

A stage announces itself again and again. One that does not is gone after LEASE; one that says that
it is leaving is gone at once.
"""

from dataclasses import dataclass, field

from blocktrain.errors import BadInput
from blocktrain.wire.serving import Announce

LEASE = 5.0  # seconds; announce every second or two, so that one lost announcement changes nothing
MAX_KNOWN = 1024  # stages; a host that the authority admitted can announce one each


@dataclass
class Registry:
    """The stages that are there."""

    lease: float = LEASE
    most: int = MAX_KNOWN
    _heard: dict[str, tuple[Announce, float]] = field(default_factory=dict)
    """By stage: what it said, and when; whoever spoke last is at the end."""

    def hear(self, said: Announce, now: float) -> None:
        """Takes an announcement in place of the stage's one before."""
        self._drop_silent(now)
        before = self._heard.pop(said.place.stage, None)
        if said.leaving:
            return
        if before is None and len(self._heard) >= self.most:
            raise BadInput(f"{self.most} stages are known, which must be enough; try again later.")
        self._heard[said.place.stage] = (said, now)

    def present(self, now: float) -> list[Announce]:
        """Everybody who has announced itself within the lease, by blocks."""
        self._drop_silent(now)
        return sorted(
            (said for said, _ in self._heard.values()),
            key=lambda said: (said.holding.first, said.holding.last, said.place.stage),
        )

    def _drop_silent(self, now: float) -> None:
        """Forgets the ghosts."""
        silent = [stage for stage, (_, at) in self._heard.items() if now - at >= self.lease]
        for stage in silent:
            del self._heard[stage]
