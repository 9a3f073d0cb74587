"""Which blobs of a run are kept: a coordinator prunes all others, and a backup holds these."""

from blocktrain.aggregation import charter as charters
from blocktrain.aggregation import state as states
from blocktrain.aggregation.ledger import Reading
from blocktrain.aggregation.state import Open
from blocktrain.errors import BadRun
from blocktrain.terms import Digest

BEYOND = 2
"""Versions kept besides those that an update may build on: for who is still fetching one."""


def blobs_kept(r: Reading) -> set[Digest]:
    """What the run needs to go on from this moment, and what those who come late need of it."""
    run, kept = r.run(), r.state()
    if run is None or kept is None:
        raise BadRun("There is no run in this ledger yet; make one with blocktrain init.")
    rules = charters.decode(run.config).rules
    # A block that waits long may pin a steady copy that its own block has long since left behind;
    # until somebody is assigned to that round, only the state of the rounds names it.
    phases = [block.phase for block in states.decode(kept).blocks]
    pins = {pin for phase in phases if isinstance(phase, Open) for pin in phase.pins}
    return r.blobs_in_use(rules.memory + BEYOND) | pins
