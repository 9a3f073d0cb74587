"""The checkpoint that all stages of a run serve: the same for all, whatever is trained meanwhile.

The first who asks brings the newest. It stays, and its blobs do, for as long as anybody asks again
within HELD, as all stages and gateways do that are up; or until the owner moves it to the newest.
In memory only: after a restart the newest is served.
"""

import asyncio
import threading

from msgspec.structs import replace

from blocktrain.aggregation.keeper import Keeper
from blocktrain.aggregation.words import spoken_version
from blocktrain.wire.owner import Checkpoint

HELD = 60.0  # seconds without a question; who is up asks every 5
RENEW_EVERY = 30.0  # seconds; the keeper prunes a blob that nobody has named for 120


class Served:
    """Which one it is."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._kept: Checkpoint | None = None
        self._asked = float("-inf")
        self._turn = threading.Lock()

    def current(self, now: float) -> Checkpoint:
        """The one that is served; the newest, if nobody has asked for a while."""
        with self._turn:
            if self._kept is None or now - self._asked > HELD or not self._whole(self._kept):
                self._kept = newest(self._keeper)
            self._asked = now
            return replace(self._kept, ended=self._keeper.state.ended)

    def move(self, now: float) -> Checkpoint:
        """The newest is served from now on."""
        with self._turn:
            self._kept, self._asked = newest(self._keeper), now
            return self._kept

    async def keep(self) -> None:
        """Keeps its blobs from being pruned, until it is cancelled."""
        while True:
            for version in self._kept.versions if self._kept else []:
                await asyncio.to_thread(self._keeper.store.renew, version.steady)
            await asyncio.sleep(RENEW_EVERY)

    def _whole(self, kept: Checkpoint) -> bool:
        """Whether every block of it can be fetched."""
        return all(self._keeper.store.size(v.steady) is not None for v in kept.versions)


def newest(keeper: Keeper) -> Checkpoint:
    """The newest versions of all blocks: the model."""
    with keeper.ledger.reading() as r:
        found = [r.newest(block) for block in range(len(keeper.charter.blocks))]
    versions = [spoken_version(version) for version in found if version]
    return Checkpoint(keeper.run, keeper.charter_bytes.decode(), versions, keeper.state.ended)
