"""For everybody who watches: the dashboard, the status, the metrics."""

import asyncio
import time
from collections.abc import AsyncIterator

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from blocktrain import metrics
from blocktrain.aggregation import status as statuses
from blocktrain.dashboard import files
from blocktrain.errors import (
    NoBlob,
)
from blocktrain.services.coordinator.answers import (
    say,
)
from blocktrain.services.coordinator.door import address
from blocktrain.services.coordinator.office import Office
from blocktrain.wire import messages, owner
from blocktrain.wire.messages import MAX_MESSAGE, PROTOCOL

MOST = 2**53  # bytes moved that can be told (messages.Count)
SSE_EVERY = 1.0  # seconds between two events at the least
SSE_HEARTBEAT = 10.0
SOFTWARE = "blocktrain"


class Watching:
    """Answers anybody."""

    def __init__(self, office: Office, reference: list[owner.Point]) -> None:
        self.office, self.reference = office, reference
        self.keeper, self.door = office.keeper, office.door
        self.said: tuple[float, bytes] = (0.0, b"")
        self.looking = asyncio.Lock()

    async def page(self, request: Request) -> Response:
        """The dashboard."""
        found = files().get(request.path_params.get("name", "index.html"))
        if found is None:
            raise NoBlob("There is no such page; the dashboard is at the root.")
        media_type, body = found
        return Response(body, media_type=media_type, headers={"Cache-Control": "no-cache"})

    async def hello(self, request: Request) -> Response:
        """Says which run this is, before anybody shows a token."""
        return say(messages.Hello(PROTOCOL, self.keeper.run, self.keeper.key.id, SOFTWARE))

    async def show_authority(self, request: Request) -> Response:
        """The certificate of the run's authority, to be compared with its fingerprint."""
        return Response(self.office.certifies().pem, media_type="application/x-pem-file")

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        self.door.slow_down(address(request))
        now = await asyncio.to_thread(self.look)
        return Response(metrics.render(now), media_type="text/plain; version=0.0.4")

    def look(self) -> owner.Status:
        """How the run is doing."""
        keeper = self.keeper
        with keeper.ledger.reading() as r:
            now = statuses.status(keeper.run, keeper.charter, keeper.state, time.monotonic(), r)
        moved = min(now.bytes_moved, MOST)  # workers say what they moved, and may say anything
        workers = [each for each in now.workers if works(each)]
        now = replace(now, reference=self.reference, bytes_moved=moved, workers=workers)
        while len(messages.encode(now)) > MAX_MESSAGE and now.workers:  # nobody would read it
            workers, events = now.workers, now.events
            shown, last = workers[: len(workers) // 2], events[len(events) // 2 :]
            now = replace(now, workers=shown, events=last)
        return now

    async def status(self, request: Request) -> Response:
        """How the run is doing, as JSON."""
        self.door.slow_down(address(request))
        return say(await asyncio.to_thread(self.look))

    async def status_bytes(self) -> bytes:
        """For those who watch: made at most once in half a second, however many they are."""
        async with self.looking:  # they all wake at once
            made, body = self.said
            if time.monotonic() - made > SSE_EVERY / 2:
                body = messages.encode(await asyncio.to_thread(self.look))
                self.said = (time.monotonic(), body)
            return body

    async def events(self, request: Request) -> Response:
        """How the run is doing, whenever that changes."""
        self.door.slow_down(address(request))

        async def stream() -> AsyncIterator[bytes]:
            while not self.keeper.closing:
                news = self.office.news
                yield b"event: status\ndata: " + await self.status_bytes() + b"\n\n"
                await asyncio.sleep(SSE_EVERY)
                while not self.keeper.closing:
                    try:
                        await asyncio.wait_for(news.wait(), SSE_HEARTBEAT)
                        break
                    except TimeoutError:
                        yield b": still here\n\n"

        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


def works(who: owner.WorkerStatus) -> bool:
    """Whether it ever asked for work. Stages and gateways join as workers do, but never ask."""
    asked = who.traffic.sent or who.traffic.received
    return bool(who.here or who.updates or asked or who.banned)
