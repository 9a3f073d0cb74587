"""Whatever the ledger notes is told to the log, once it is true.

Each event is one line, with kind and detail as fields for who logs as JSON. Those that come with
every update are only for the curious (debug); people see a line for every closed round, for every
refusal, and for whoever comes and goes.
"""

import logging
from typing import Any

from blocktrain.aggregation.ledger import Event, Ledger

LEVELS = {
    "opened": logging.DEBUG,
    "freed": logging.DEBUG,
    "taken": logging.DEBUG,
    "salvaged": logging.DEBUG,
    "refused": logging.WARNING,
    "extended": logging.WARNING,
    "dropped": logging.WARNING,
}
"""Of those events that are not plain information."""

log = logging.getLogger("blocktrain.events")


class Teller:
    """Tells the events of one ledger, each once; those of earlier lives were told by them."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        with ledger.reading() as r:
            self.told = max((event.number for event in r.latest_events(1)), default=0)

    def tell(self) -> None:
        """Tells what was noted since the last time."""
        if not log.isEnabledFor(logging.INFO):
            return
        with self.ledger.reading() as r:
            while events := r.events(after=self.told):
                for event in events:
                    log.log(level(event), "%s", spoken(event), extra={"fields": fields(event)})
                self.told = events[-1].number


def level(event: Event) -> int:
    """How much it matters."""
    return LEVELS.get(event.kind, logging.INFO)


def fields(event: Event) -> dict[str, Any]:
    """What a log collector can look for."""
    return {"event": event.kind, "number": event.number, **event.detail}


def spoken(event: Event) -> str:
    """A line for people, who count blocks from 1 and know workers by the beginning of their ids."""
    told = {name: value for name, value in event.detail.items() if value != ""}
    if "block" in told:
        told["block"] += 1
    if "worker" in told:
        told["worker"] = told["worker"][:12]
    line = ", ".join([event.kind, *(f"{name} {value}" for name, value in told.items())])
    # Names and reasons may hold what a worker wrote: none of it begins a line of its own.
    return "".join(each if each.isprintable() else "?" for each in line)
