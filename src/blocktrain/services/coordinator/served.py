"""The checkpoint that all stages of a run serve: the same for all, whatever is trained meanwhile.

The first who asks brings the newest. It stays, and its blobs do, for as long as anybody asks again
within HELD, as all stages and gateways do that are up; or until the owner moves it to the newest.
In memory only: after a restart the newest is served.
"""

import asyncio
import threading

from blocktrain.aggregation.keeper import Keeper
from blocktrain.aggregation.words import spoken_version
from blocktrain.wire.messages import Version

HELD = 60.0  # seconds without a question; who is up asks every 5
RENEW_EVERY = 30.0  # seconds; the keeper prunes a blob that nobody has named for 120


class Served:
    """Which one it is."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._versions: list[Version] = []
        self._asked = float("-inf")
        self._turn = threading.Lock()

    def current(self, now: float) -> list[Version]:
        """The one that is served; the newest, if nobody has asked for a while."""
        with self._turn:
            if now - self._asked > HELD or not self._whole():
                self._versions = self._newest()
            self._asked = now
            return self._versions

    def move(self, now: float) -> list[Version]:
        """The newest is served from now on."""
        with self._turn:
            self._versions, self._asked = self._newest(), now
            return self._versions

    async def keep(self) -> None:
        """Keeps its blobs from being pruned, until it is cancelled."""
        while True:
            for version in self._versions:
                await asyncio.to_thread(self._keeper.store.renew, version.steady)
            await asyncio.sleep(RENEW_EVERY)

    def _whole(self) -> bool:
        """Whether every block of it can be fetched."""
        size = self._keeper.store.size
        return bool(self._versions) and all(size(v.steady) is not None for v in self._versions)

    def _newest(self) -> list[Version]:
        with self._keeper.ledger.reading() as r:
            newest = [r.newest(block) for block in range(len(self._keeper.charter.blocks))]
        return [spoken_version(version) for version in newest if version]
