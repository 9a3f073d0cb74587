"""A stage says where it is, again and again, to a coordinator or a gateway that keeps a list."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from blocktrain.errors import BlockTrainError
from blocktrain.wire.serving import Announce

EVERY = 1.5  # seconds; a list forgets after 5

Tell = Callable[[Announce], object]


@asynccontextmanager
async def announced(
    tell: Tell | None, now: Callable[[], Announce], say: Callable[[str], None]
) -> AsyncIterator[None]:
    """On the list meanwhile, and off it in the end: `now` says then that it leaves."""
    if tell is None:
        yield
        return
    telling = asyncio.create_task(announce(tell, now, say))
    try:
        yield
    finally:
        telling.cancel()
        with suppress(BlockTrainError):  # the list forgets by itself
            await asyncio.to_thread(tell, now())


async def announce(tell: Tell, now: Callable[[], Announce], say: Callable[[str], None]) -> None:
    """Announces until it is cancelled. A list that is gone for a while is told again later."""
    trouble = ""
    while True:
        try:
            await asyncio.to_thread(tell, now())
            trouble = ""
        except BlockTrainError as error:
            if str(error) != trouble:  # once, not every second
                say(str(error))
            trouble = str(error)
        await asyncio.sleep(EVERY)
