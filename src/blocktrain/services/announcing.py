"""A stage says where it is, again and again, to a coordinator or a gateway that keeps a list."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress

from msgspec.structs import replace

from blocktrain.errors import BlockTrainError, Unreachable
from blocktrain.wire.serving import Announce, Heard

LOG = logging.getLogger(__name__)
EVERY = 1.5  # seconds; a list forgets after 5

Tell = Callable[[Announce], object]


class Voice:
    """Announces with the word that the list gave last; who has said good-bye is silent."""

    def __init__(self, say: Callable[[Announce], Heard]) -> None:
        self._say = say
        self._word: str | None = None
        self._left = False
        self._turn = threading.Lock()  # the last word may be said while another is under way

    def __call__(self, said: Announce) -> None:
        with self._turn:
            if self._left:
                return
            self._left = said.leaving
            for _ in range(2):  # the first time, and after a silence, the word is an old one
                heard = self._say(replace(said, word=self._word))
                self._word = heard.word
                if heard.taken:
                    return
        raise Unreachable("The list of stages takes no word of ours; try again later.")


@asynccontextmanager
async def beside(*work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """All of this goes on meanwhile, and ends in the end."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for end in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(end, Exception):
                LOG.error("a bug: this should have gone on", exc_info=end)


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
            if trouble:
                say("On the list of stages again.")
            trouble = ""
        except BlockTrainError as error:
            if not trouble:  # once, not every second
                say(f"Not on the list of stages now, but trying again and again: {error}")
            trouble = str(error)
        await asyncio.sleep(EVERY)
