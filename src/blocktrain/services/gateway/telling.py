"""One text, from being asked for to its last byte: in line, then traversal by traversal."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from blocktrain import metrics
from blocktrain.errors import BlockTrainError
from blocktrain.inference import decode
from blocktrain.inference.decode import Pieces
from blocktrain.inference.pipeline import StageReport
from blocktrain.inference.session import Said, Session
from blocktrain.learning.model import Shape
from blocktrain.services.gateway.fair import Line
from blocktrain.services.gateway.legs import Leg, Way, legs_of
from blocktrain.services.gateway.openai import Mode, Wanted
from blocktrain.services.gateway.texts import Shown, Text
from blocktrain.wire.serving import Codec

log = logging.getLogger(__name__)

FAREWELL = 5.0  # seconds that may pass until the stages know that they may forget a text
MOST_GLIMPSES = 256  # not yet read by whoever watches; further ones are left out
DECODERS: dict[Mode, Callable[[Session, bytes, decode.Sampling], Pieces]] = {
    "ar": decode.ar,
    "exact": decode.exact,
    "speculative": decode.speculative,
}


class Source(Protocol):
    """Where texts come from: a pipeline, or a model in this process."""

    @property
    def shape(self) -> Shape:
        """Of the model."""

    async def session(self, codec: Codec) -> Session:
        """Begins a text."""

    def report(self) -> Sequence[StageReport]:
        """Which stages there are, in the order of blocks, and how they are doing."""

    @property
    def troubles(self) -> Sequence[str]:
        """Why stages that were named cannot be used, one sentence each."""


@dataclass(frozen=True)
class Waiting:
    """There is no place yet."""

    count: int
    """Requests in line, this one among them."""


@dataclass(frozen=True)
class Begun:
    """It is this request's turn."""


@dataclass(frozen=True)
class Glimpse:
    """How a whole text looks after one stage of one traversal: all of it, though unfinished."""

    stage: str
    text: str


@dataclass(frozen=True)
class Piece:
    """What one traversal gave."""

    bytes: int
    """How many; what is shown may be fewer, for half a character waits, or more."""
    guessed: int
    shown: Shown
    said: Said
    legs: list[Leg]


@dataclass(frozen=True)
class Ended:
    """There is no more."""

    shown: Shown
    """What was held back until now."""
    reason: Literal["stop", "length"]
    generated: int
    report: dict[str, Any]


Event = Waiting | Begun | Glimpse | Piece | Ended


class Teller:
    """Tells texts: as many at once as the line lets through."""

    def __init__(self, source: Source, line: Line) -> None:
        self.source, self.line = source, line

    async def tell(
        self, who: str, wanted: Wanted, watched: bool = False
    ) -> AsyncGenerator[Event, None]:
        """One text, event by event. To close the generator early is to give the text up."""
        text = Text(wanted.stops)
        with accounted(who, wanted) as account, self.line.place(who) as turn:
            if not turn.done():
                yield Waiting(self.line.length)
            await turn
            account.turn = time.monotonic()
            yield Begun()
            async with (
                self.session(wanted) as session,
                aclosing(traversals(session, wanted, watched)) as coming,
            ):
                async for each in coming:
                    if isinstance(each, Glimpse):
                        yield each
                        continue
                    legs = account.add(each, self.source.report())
                    shown = text.add(each.bytes, each.logs)
                    yield Piece(len(each.bytes), each.guessed, shown, each.said, legs)
                    if text.stopped:
                        break
                    await asyncio.sleep(0)  # a session that never waits must not hold up others
            reason: Literal["stop", "length"] = "stop" if text.stopped else "length"
            account.end = reason
            yield Ended(text.end(), reason, text.generated, account.told())

    @asynccontextmanager
    async def session(self, wanted: Wanted) -> AsyncIterator[Session]:
        """A text in the making; at its end, however that comes, every stage forgets it."""
        session = await self.source.session(wanted.codec)
        try:
            yield session
        finally:
            with suppress(TimeoutError):  # stages forget by themselves what nobody asks about
                async with asyncio.timeout(FAREWELL):
                    await session.close()


def traversals(
    session: Session, wanted: Wanted, watched: bool
) -> AsyncGenerator[decode.Piece | Glimpse, None]:
    """The text as it comes, and, where somebody watches, a whole one on its way through stages."""
    if wanted.mode in DECODERS:
        return DECODERS[wanted.mode](session, wanted.prompt, wanted.sampling)
    length, times = wanted.sampling.length, wanted.traversals
    if watched:
        return sharpening(session, wanted)
    return decode.whole(session, wanted.prompt, length, wanted.sampling, times)


async def sharpening(
    session: Session, wanted: Wanted
) -> AsyncGenerator[decode.Piece | Glimpse, None]:
    """A whole text with every stage's view of it. Who reads too slowly misses some of these."""
    queue: asyncio.Queue[decode.Piece | Glimpse | Exception | None] = asyncio.Queue(MOST_GLIMPSES)
    done = bytearray()

    def watch(stage: str, found: list[int]) -> None:
        with suppress(asyncio.QueueFull):
            text = bytes(done) + bytes(found)
            queue.put_nowait(Glimpse(stage, text.decode(errors="replace")))

    async def find() -> None:
        length, times = wanted.sampling.length, wanted.traversals
        pieces = decode.whole(session, wanted.prompt, length, wanted.sampling, times, watch)
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    done.extend(piece.bytes)
                    await queue.put(piece)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    finding = asyncio.create_task(find())
    try:
        while (each := await queue.get()) is not None:
            if isinstance(each, Exception):
                raise each
            yield each
    finally:
        finding.cancel()
        await asyncio.gather(finding, return_exceptions=True)


@dataclass
class Account:
    """What one text cost."""

    wanted: Wanted
    asked: float = field(default_factory=time.monotonic)
    turn: float | None = None
    """When it came."""
    first: float | None = None
    """Seconds from asking to the first byte."""
    end: str = "gone"
    report: decode.Report = field(default_factory=decode.Report)
    way: Way = field(default_factory=Way)

    def add(self, piece: decode.Piece, stages: Sequence[StageReport]) -> list[Leg]:
        """One traversal more; returns where its time went."""
        if piece.bytes and self.first is None:
            self.first = time.monotonic() - self.asked
        self.report.add(piece)
        legs = legs_of(piece.said, stages)
        self.way.add(legs)
        return legs

    def told(self) -> dict[str, Any]:
        """For whoever asked."""
        report, wanted = self.report, self.wanted
        return {
            "mode": wanted.mode,
            "codec": wanted.codec,
            "seed": wanted.sampling.seed,
            "traversals": report.traversals,
            "bytes": report.bytes,
            "bytes_per_traversal": report.bytes_per_traversal,
            "guessed": report.guessed,
            "accepted": report.right,
            "in_line_s": (self.turn or time.monotonic()) - self.asked,
            "first_byte_s": self.first,
            "seconds": time.monotonic() - self.asked,
            "wire_bytes": report.sent,
            "replays": report.replays,
            "hops": self.way.told(),
            "slowest": self.way.slowest(),
            "slowest_link": self.way.slowest_link(),
        }

    def close(self, who: str) -> None:
        """For the owner: numbers and a line in the log, but nothing of the text."""
        report, mode = self.report, self.wanted.mode
        metrics.TEXTS.labels(mode, self.end).inc()
        metrics.TRAVERSALS.inc(report.traversals)
        metrics.TEXT_BYTES.inc(report.bytes)
        metrics.WIRE_BYTES.inc(report.sent)
        metrics.REPLAYS.inc(report.replays)
        if self.first is not None:
            metrics.FIRST_BYTE.observe(self.first)
        log.info(
            "text for %s by %s: %s after %d bytes, %d traversals, %d replays, %.2f s",
            who, mode, self.end, report.bytes, report.traversals, report.replays,
            time.monotonic() - self.asked,
        )  # fmt: skip


@contextmanager
def accounted(who: str, wanted: Wanted) -> Iterator[Account]:
    """Keeps account of a text to its end, whatever that is."""
    account = Account(wanted)
    try:
        yield account
    except BlockTrainError:
        account.end = "failed"
        raise
    finally:
        account.close(who)
