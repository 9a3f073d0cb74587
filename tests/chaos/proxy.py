"""A line between a worker and its coordinator that can be cut, and heals."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress


class Line:
    """Forwards TCP; while a direction is held, its bytes wait, as they do in the network."""

    def __init__(self, port: int) -> None:
        self.there = port
        self.cut_behind: bytes | None = None
        """Cuts the line by itself, once, behind the piece that holds these bytes."""
        self.begun: Future[str] = Future()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="line")
        self.thread.start()
        self.url = self.begun.result(10)
        """Where it begins."""

    def cut(self) -> None:
        """Nothing passes."""
        self.loop.call_soon_threadsafe(self._let, False, False)

    def deafen(self) -> None:
        """Questions pass, answers do not."""
        self.loop.call_soon_threadsafe(self._let, True, False)

    def heal(self) -> None:
        """All passes, also what waited."""
        self.loop.call_soon_threadsafe(self._let, True, True)

    @property
    def open(self) -> bool:
        """Whether all passes."""
        return self.up.is_set() and self.down.is_set()

    def close(self) -> None:
        """Hangs up."""
        self.loop.call_soon_threadsafe(self.closing.set)
        self.thread.join()

    def _let(self, up: bool, down: bool) -> None:
        for event, passes in ((self.up, up), (self.down, down)):
            event.set() if passes else event.clear()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.up, self.down, self.closing = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._let(True, True)
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        async with server:
            self.begun.set_result(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            await self.closing.wait()

    async def _carry(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """One connection, both ways, until one side hangs up."""
        forth = None
        try:
            await self.up.wait()
            far, forth = await asyncio.open_connection("127.0.0.1", self.there)
            ways = (self._pass(near, forth, self.up), self._pass(far, back, self.down))
            await asyncio.gather(*ways)
        except OSError:
            pass  # the coordinator is away: the worker sees its connection end
        finally:
            for writer in (back, forth):
                if writer is not None:
                    writer.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while piece := await reader.read(65536):
                await may.wait()
                writer.write(piece)
                await writer.drain()
                if self.cut_behind is not None and self.cut_behind in piece:
                    self.cut_behind = None
                    self._let(False, False)
        await may.wait()
        writer.close()


@contextmanager
def line(port: int) -> Iterator[Line]:
    """A line to a port of this machine."""
    made = Line(port)
    try:
        yield made
    finally:
        made.close()
