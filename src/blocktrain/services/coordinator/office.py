"""What all who answer share: the keeper, the door, and news."""

import asyncio
from pathlib import Path

from starlette.requests import Request

from blocktrain.aggregation.keeper import Keeper
from blocktrain.errors import (
    NoBlob,
    NotAllowed,
)
from blocktrain.services.coordinator.door import Door, TooOften
from blocktrain.wire.certificates import Authority


class Office:
    """One run, and whoever waits for news of it."""

    def __init__(self, keeper: Keeper, corpus: Path | None, authority: Authority | None) -> None:
        self.keeper, self.corpus, self.authority = keeper, corpus, authority
        self.door = Door(keeper)
        self.news = asyncio.Event()
        """Set when anything has changed; then there is another one."""
        self.work = asyncio.Event()
        """Set when those who wait for work should ask again; then there is another one."""

    def announce(self, work: bool) -> None:
        """Wakes everybody who watches, and those who wait for work if there may be some."""
        self.news.set()
        self.news = asyncio.Event()
        if work:
            self.work.set()
            self.work = asyncio.Event()

    def member_or_owner(self, request: Request) -> None:
        """Lets in whoever has a session or an owner's token."""
        try:
            self.door.worker(request)
        except TooOften:
            raise
        except NotAllowed:
            self.door.token(request, "owner")

    def certifies(self) -> Authority:
        """Whoever says who belongs to this run."""
        if self.authority is None:
            raise NoBlob("This coordinator has no certificate authority; ask the run's owner.")
        return self.authority
