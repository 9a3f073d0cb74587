"""The links to next stages that a stage opens for one of its guests.

Every guest has its own: what two gateways say never meets on one link, so that neither can speak in
the other's sessions, each has its fair turn at every stage, and all that a gateway has caused along
a route ends with its link.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from blocktrain.errors import Unreachable
from blocktrain.inference.links import (
    BROKEN,
    Link,
    Trust,
    dial,
    new_name,
    refuse_other_protocol,
)
from blocktrain.wire.messages import Message
from blocktrain.wire.serving import Place, Trouble, Welcome

MAX_ONWARD = 16  # next stages of one guest; the one unused for longest is let go


class Onward:
    """One guest's links, opened when first needed."""

    def __init__(
        self, trust: Trust, troubled: Callable[[Trouble], None], lost: Callable[[Place], None]
    ) -> None:
        self._trust, self._troubled, self._lost = trust, troubled, lost
        self._links: dict[Place, asyncio.Task[Link]] = {}
        self._closed = False
        self._hearing: set[asyncio.Task[None]] = set()

    async def carry(self, place: Place, said: Message, body: bytes) -> None:
        """Passes something on, or raises Unreachable."""
        link = await self._link(place)
        try:
            await link.carry(said, body)
        except OSError as error:
            raise Unreachable(f"The next stage hung up ({error}); try another one.") from None

    def tell(self, place: Place, said: Message) -> None:
        """Says something short, if the link is open."""
        task = self._links.get(place)
        if task and task.done() and not task.cancelled() and not task.exception():
            task.result().say(said)

    async def close(self) -> None:
        """Ends all links; what comes over them is heard no more."""
        self._closed = True
        tasks = [*self._links.values(), *self._hearing]
        self._links.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _link(self, place: Place) -> Link:
        """The open link to that place; a new one if there is none."""
        task = self._links.pop(place, None)
        if self._closed:
            raise Unreachable("Whoever asked has hung up; nothing goes on for him.")
        if task is None:
            task = asyncio.create_task(self._open(place))
            if len(self._links) >= MAX_ONWARD:
                self._let_go(next(iter(self._links)))
        self._links[place] = task  # the newest is at the end
        return await asyncio.shield(task)  # several may wait for it

    async def _open(self, place: Place) -> Link:
        try:
            name = new_name(self._trust.id)
            link = await dial(self._trust, name, place.host, place.port, place.stage)
        except BROKEN:
            self._links.pop(place, None)
            raise
        hearing = asyncio.create_task(self._hear(place, link))
        self._hearing.add(hearing)
        hearing.add_done_callback(self._hearing.discard)
        return link

    def _let_go(self, place: Place) -> None:
        task = self._links.pop(place)
        if task.done() and not task.cancelled() and not task.exception():
            task.result().close()
        task.cancel()

    async def _hear(self, place: Place, link: Link) -> None:
        """Until the link ends: nothing but a welcome and troubles should come."""
        try:
            with suppress(*BROKEN):
                while head := await link.hear():
                    await link.skip(head, 0)
                    match head.said:
                        case Welcome(protocol=protocol):
                            refuse_other_protocol(protocol, "stage")
                        case Trouble():
                            self._troubled(head.said)
                        case _:
                            break
        finally:
            link.abort()  # with all that it is for: nothing is left to be said
            if (task := self._links.get(place)) and task.done() and task.result() is link:
                del self._links[place]
            await link.closed()
        self._lost(place)
