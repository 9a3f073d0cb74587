"""Where the time of a traversal went: line by line, stage by stage.

A gateway sees its own round trips, the time of a whole traversal, and what each stage says of
computing, waiting and the round trip to the next one. What is left over went by between the stages,
and is shared out by these round trips (inference/measures.py): right in sum, measured for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from blocktrain.inference.measures import trips_ms
from blocktrain.inference.pipeline import StageReport
from blocktrain.inference.session import Said


class Leg(Struct, frozen=True):
    """A line, and the stage at its end."""

    stage: str | None
    """Where it leads; None is back to the gateway."""
    line_ms: float
    computed_ms: float
    waited_ms: float
    """In the stage's queue."""
    bytes: int
    """That went over the line."""
    traversals: int = 1
    rtt_ms: float | None = None
    """Of the line, there and back, as last measured at its beginning (the way back: at its end)."""

    @property
    def at_stage_ms(self) -> float:
        """Computing and waiting."""
        return self.computed_ms + self.waited_ms

    def __add__(self, other: "Leg") -> "Leg":
        """The same leg of several traversals."""
        return Leg(
            self.stage,
            self.line_ms + other.line_ms,
            self.computed_ms + other.computed_ms,
            self.waited_ms + other.waited_ms,
            self.bytes + other.bytes,
            self.traversals + other.traversals,
            self.rtt_ms if other.rtt_ms is None else other.rtt_ms,
        )


def legs_of(said: Said, stages: Sequence[StageReport]) -> list[Leg]:
    """The whole way of one traversal. None of one that went wrong first: its time tells nothing."""
    hops = said.hops
    if not hops or said.replayed:
        return []
    own = {stage.stage: stage.rtt_ms for stage in stages}
    rtts = [own.get(hops[0].stage), *(hop.onward_ms for hop in hops[:-1])]
    there, back = (own.get(hop.stage, 0.0) / 2 for hop in (hops[0], hops[-1]))
    at_stages = sum(hop.computed_ms + hop.waited_ms for hop in hops)
    lines = [there, *trips_ms(hops, 1000 * said.seconds - at_stages - there - back)]
    way = [
        Leg(hop.stage, line, hop.computed_ms, hop.waited_ms, hop.received, rtt_ms=rtt)
        for hop, line, rtt in zip(hops, lines, rtts, strict=True)
    ]
    answer = max(0, said.sent - sum(hop.received for hop in hops))
    return [*way, Leg(None, back, 0.0, 0.0, answer, rtt_ms=own.get(hops[-1].stage))]


@dataclass
class Way:
    """All legs of a text, added up."""

    legs: dict[str | None, Leg] = field(default_factory=dict)

    def add(self, legs: Sequence[Leg]) -> None:
        """One traversal more."""
        for leg in legs:
            known = self.legs.get(leg.stage)
            self.legs[leg.stage] = leg if known is None else known + leg

    def told(self) -> list[dict[str, Any]]:
        """Milliseconds of a mean traversal, and all bytes; the way back comes last."""
        return [
            asdict(
                replace(
                    leg,
                    line_ms=leg.line_ms / leg.traversals,
                    computed_ms=leg.computed_ms / leg.traversals,
                    waited_ms=leg.waited_ms / leg.traversals,
                )
            )
            for leg in sorted(self.legs.values(), key=lambda leg: leg.stage is None)
        ]

    def slowest(self) -> dict[str, Any] | None:
        """What a mean traversal spends most of its time with: a line, or a stage."""
        costs = [("line", leg.stage, leg.line_ms / leg.traversals) for leg in self.legs.values()]
        costs += [
            ("stage", leg.stage, leg.at_stage_ms / leg.traversals) for leg in self.legs.values()
        ]
        if not costs:
            return None
        what, stage, ms = max(costs, key=lambda cost: cost[2])
        return {"what": what, "stage": stage, "ms": ms}

    def slowest_link(self) -> dict[str, Any] | None:
        """The line that a mean traversal spends most time on, whatever stages take."""
        costs = [(leg.line_ms / leg.traversals, leg) for leg in self.legs.values()]
        if not costs:
            return None
        ms, leg = max(costs, key=lambda cost: cost[0])
        return {"stage": leg.stage, "ms": ms, "rtt_ms": leg.rtt_ms}
