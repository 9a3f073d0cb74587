"""The coordinator's routes, and who answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from blocktrain import metrics
from blocktrain.aggregation.keeper import Keeper
from blocktrain.errors import (
    BlockTrainError,
)
from blocktrain.services.coordinator.answers import (
    HEADERS,
    nothing_here,
    refused,
)
from blocktrain.services.coordinator.office import Office
from blocktrain.services.coordinator.owning import Owning
from blocktrain.services.coordinator.serving import Serving
from blocktrain.services.coordinator.watching import Watching
from blocktrain.services.coordinator.working import Working
from blocktrain.wire import owner
from blocktrain.wire.certificates import Authority

Handler = Callable[[Request], Awaitable[Response]]


class Coordinator:
    """One run over HTTP."""

    def __init__(
        self,
        keeper: Keeper,
        corpus: Path | None = None,
        reference: list[owner.Point] | None = None,
        authority: Authority | None = None,
    ) -> None:
        self.keeper = keeper
        self.office = Office(keeper, corpus, authority)
        self.watching = Watching(self.office, reference or [])
        self.working, self.owning = Working(self.office), Owning(self.office)
        self.serving = Serving(self.office)

    def app(self, base_path: str = "") -> Starlette:
        """The application, at the root and, for proxies that keep it, under a base path."""
        watching, working, owning = self.watching, self.working, self.owning
        serving = self.serving
        routes = [
            Route("/", guarded(watching.page)),
            Route("/static/{name:path}", guarded(watching.page)),
            Route("/metrics", guarded(watching.metrics)),
            Route("/v1/hello", guarded(watching.hello)),
            Route("/v1/authority", guarded(watching.show_authority)),
            Route("/v1/join", guarded(working.join), methods=["POST"]),
            Route("/v1/ask", guarded(working.ask), methods=["POST"]),
            Route("/v1/alive", guarded(working.alive), methods=["POST"]),
            Route("/v1/leave", guarded(working.leave), methods=["POST"]),
            Route("/v1/updates", guarded(working.update), methods=["POST"]),
            Route("/v1/versions/{block}/{after}", guarded(working.versions)),
            Route("/v1/blobs/{digest}", guarded(working.give_blob)),
            Route("/v1/blobs/{digest}", guarded(working.take_blob), methods=["PUT"]),
            Route("/v1/corpus/{name}", guarded(working.give_corpus)),
            Route("/v1/manifests/{block}/{round}", guarded(working.manifest)),
            Route("/v1/certificate", guarded(serving.certificate)),
            Route("/v1/stages", guarded(serving.stages)),
            Route("/v1/stages", guarded(serving.announce), methods=["POST"]),
            Route("/v1/banned", guarded(serving.banned)),
            Route("/v1/served", guarded(serving.served)),
            Route("/v1/served", guarded(serving.publish), methods=["POST"]),
            Route("/v1/status", guarded(watching.status)),
            Route("/v1/events", guarded(watching.events)),
            Route("/v1/checkpoint", guarded(owning.checkpoint)),
            Route("/v1/command", guarded(owning.command), methods=["POST"]),
            Route("/v1/ban", guarded(owning.ban), methods=["POST"]),
            Route("/v1/tokens", guarded(owning.tokens)),
            Route("/v1/tokens", guarded(owning.issue), methods=["POST"]),
            Route("/v1/tokens/revoke", guarded(owning.revoke), methods=["POST"]),
            Route("/v1/evaluations", guarded(owning.evaluated), methods=["POST"]),
        ]
        base = "/" + base_path.strip("/")
        mounted = [Mount(base, routes=routes)] if base != "/" else []
        return Starlette(
            routes=[*mounted, *routes],
            lifespan=self.lifespan,
            exception_handlers={404: nothing_here, 405: nothing_here},
        )

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Keeps the run while the coordinator is up."""
        loop = asyncio.get_running_loop()

        def changed(work: bool) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.office.announce, work)

        self.keeper.changed = changed
        self.keeper.start()
        keeping = asyncio.create_task(self.serving.checkpoint.keep())
        yield
        keeping.cancel()
        self.office.announce(True)
        await asyncio.to_thread(self.keeper.close)


def guarded(handler: Handler) -> Handler:
    """A handler whose errors are sentences."""

    async def answer(request: Request) -> Response:
        try:
            response = await handler(request)
        except ClientDisconnect:
            response = Response(status_code=400)
        except BlockTrainError as error:
            response = refused(error)
        response.headers.update(HEADERS)
        route = request.scope["route"].path if "route" in request.scope else "?"
        metrics.REQUESTS.labels(route, response.status_code).inc()
        return response

    return answer
