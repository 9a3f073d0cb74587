"""The gateway's routes, and who answers."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from blocktrain import metrics, playground
from blocktrain.errors import NotAllowed
from blocktrain.services.announcing import beside
from blocktrain.services.gateway import openai
from blocktrain.services.gateway.answers import (
    STREAM,
    Live,
    Nothing,
    event,
    guarded,
    nothing_here,
    read,
    refused_in_our_words,
    say,
)
from blocktrain.services.gateway.door import Door, address
from blocktrain.services.gateway.fair import Limits, Line
from blocktrain.services.gateway.forms import Form
from blocktrain.services.gateway.keys import Keys
from blocktrain.services.gateway.openai import Offer
from blocktrain.services.gateway.telling import Source, Teller
from blocktrain.services.gateway.watching import covered, picture, told
from blocktrain.wire import messages, signing
from blocktrain.wire.registry import Registry
from blocktrain.wire.serving import Announce, Stages

MAX_ANNOUNCEMENT = 16 * 1024  # bytes; ours have less than 1,500


@dataclass(frozen=True)
class House:
    """How the owner runs a gateway."""

    name: str
    """Of the model, as people ask for it."""
    offer: Offer = field(default_factory=Offer)
    limits: Limits = field(default_factory=Limits)
    keys: Keys | None = None
    """None: anybody may ask."""
    registry: Registry | None = None
    """Where stages announce themselves; None: they do so elsewhere, at a coordinator."""
    upkeep: Sequence[Callable[[], Coroutine[None, None, None]]] = ()
    """What is to be seen to for as long as the gateway is up."""
    made: float = field(default_factory=time.time)


class Gateway:
    """One model over HTTP."""

    def __init__(self, source: Source, house: House) -> None:
        self.source, self.house = source, house
        self.door, self.line = Door(house.keys), Line(house.limits)
        self.teller = Teller(source, self.line)

    def app(self, base_path: str = "") -> Starlette:
        """The application, at the root and, for proxies that keep it, under a base path."""
        routes = [
            Route("/", guarded(self.page)),
            Route("/static/{name:path}", guarded(self.page)),
            Route("/healthz", guarded(self.health)),
            Route("/metrics", guarded(self.metrics)),
            Route("/v1/models", guarded(self.models)),
            Route("/v1/models/{name:path}", guarded(self.model)),
            Route("/v1/completions", guarded(self.completions), methods=["POST"]),
            Route("/v1/watch", guarded(self.watch), methods=["POST"]),
            Route("/v1/route", guarded(self.route)),
            Route("/v1/stages", guarded(self.stages, refused_in_our_words)),
            Route("/v1/stages", guarded(self.announce, refused_in_our_words), methods=["POST"]),
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
        """Keeps the pipeline while the server is up."""
        async with AsyncExitStack() as stack:
            if isinstance(self.source, AbstractAsyncContextManager):
                await stack.enter_async_context(self.source)
            await stack.enter_async_context(beside(*(each() for each in self.house.upkeep)))
            yield

    # --- for everybody ----------------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        """The playground."""
        found = playground.files().get(request.path_params.get("name", "index.html"))
        if found is None:
            raise Nothing("There is no such page; the playground is at the root.")
        media_type, body = found
        return Response(body, media_type=media_type, headers={"Cache-Control": "no-cache"})

    async def health(self, request: Request) -> Response:
        """Whether a text could be written now: 200, or 503 while some block is not served."""
        stages = self.source.report()
        ready = covered(stages, self.source.shape.blocks)
        words = {"status": "ok" if ready else "no route", "stages": len(stages)}
        return say(words, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        metrics.SERVED.set(self.line.served.total())
        metrics.WAITING.set(self.line.length)
        metrics.STAGES.set(len(self.source.report()))
        return Response(metrics.render_serving(), media_type="text/plain; version=0.0.4")

    # --- for whoever has a key --------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """The list of models: one."""
        self.door.who(request)
        return say(openai.models(self.house.name, int(self.house.made)))

    async def model(self, request: Request) -> Response:
        """The one model."""
        self.door.who(request)
        if request.path_params["name"] != self.house.name:
            raise openai.no_model(request.path_params["name"], self.house.name)
        return say(openai.model(self.house.name, int(self.house.made)))

    async def route(self, request: Request) -> Response:
        """What is served, by whom, and how they are doing: what the playground draws."""
        self.door.who(request)
        doing = {"served": self.line.served.total(), "waiting": self.line.length}
        return say({**picture(self.source, self.house.name, self.house.offer), **doing})

    async def completions(self, request: Request) -> Response:
        """A text, as OpenAI's clients ask for one: at once, or piece by piece."""
        who, wanted = await self.asked(request)
        events = self.teller.tell(who, wanted)
        form = Form(wanted, self.house.name)
        if wanted.stream:
            return Live(form.stream(events), STREAM, "/v1/completions")
        return Live(form.whole(events), "application/json", "/v1/completions")

    async def watch(self, request: Request) -> Response:
        """The same, with all that happens on the way: for the playground."""
        who, wanted = await self.asked(request)
        events = self.teller.tell(who, wanted, watched=True)

        async def stream() -> AsyncGenerator[bytes, None]:
            async with aclosing(events):
                async for each in events:
                    yield event(told(each, wanted))

        return Live(stream(), STREAM, "/v1/watch")

    async def asked(self, request: Request) -> tuple[str, openai.Wanted]:
        """Who asks, and for what. The key is checked before a byte of the body is read."""
        who = self.door.who(request)
        body = await read(request, self.house.offer.max_body)
        objective = self.source.shape.objective
        return who, openai.parse(body, self.house.name, objective, self.house.offer)

    # --- for stages -------------------------------------------------------------------------------

    async def announce(self, request: Request) -> Response:
        """A stage says where it is. Who lies about that only costs the pipeline a handshake."""
        self.door.slow_down(request)
        registry = self.registry()
        signed = messages.decode(await read(request, MAX_ANNOUNCEMENT), messages.Signed)
        said = messages.decode(signed.body, Announce)
        signature = bytes.fromhex(signed.signature)
        right = signing.verify(signed.by, signed.body, "announce", signature)
        if signed.by != said.place.stage or not right:
            raise NotAllowed("An announcement must be signed by the stage that it is of.")
        heard = registry.hear(said, time.monotonic(), address(request))
        return Response(messages.encode(heard), media_type="application/json")

    async def stages(self, request: Request) -> Response:
        """Who has announced itself: for stages that look where they are needed."""
        self.door.slow_down(request)
        present = Stages(self.registry().present(time.monotonic()))
        return Response(messages.encode(present), media_type="application/json")

    def registry(self) -> Registry:
        """Where stages announce themselves."""
        if self.house.registry is None:
            raise Nothing("Stages announce themselves at the coordinator; this gateway asks it.")
        return self.house.registry
