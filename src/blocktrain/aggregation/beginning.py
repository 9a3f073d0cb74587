"""The ledger of a run that has just begun."""

import time
from pathlib import Path

from blocktrain.aggregation import charter as charters
from blocktrain.aggregation import rounds, state
from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.folder import LEDGER, open_ledger
from blocktrain.aggregation.ledger import RunRecord, Version
from blocktrain.aggregation.state import Version as FirstVersion


def write_first(folder: Path, charter: Charter, token: str) -> None:
    """Writes it; it appears whole or not at all. The first snapshots are in the store already."""
    now = time.time()
    part = folder / f"{LEDGER}.part"
    part.unlink(missing_ok=True)
    versions = [FirstVersion(0, digest, digest) for digest in charter.first]
    beginning, _ = rounds.begin(charter.rules, versions, time.monotonic())
    with open_ledger(part, create=True) as ledger:
        with ledger.transaction() as t:
            t.begin_run(RunRecord(charters.encode(charter), charter.corpus, now))
            t.issue_token(token, "owner", "owner", now)
            for block, digest in enumerate(charter.first):
                t.begin_block(Version(block, 0, digest, digest, None, None, None, None, now))
            t.keep_state(state.encode(beginning))
        ledger.backup(folder / LEDGER)
    for leftover in folder.glob(f"{LEDGER}.part*"):
        leftover.unlink()
