"""The coordinator: an HTTP shell around aggregation. No torch; docs/wire.md names every endpoint.

Workers come from outside, owners with their token, and anybody may watch. What is read from the
network is bounded before it is read; what takes long happens in threads.
"""

import asyncio
import re
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route

from blocktrain import metrics
from blocktrain.aggregation import status as statuses
from blocktrain.aggregation.events import Asked, Event, Pause, Resume, Stop
from blocktrain.aggregation.keeper import Keeper, spoken_version
from blocktrain.aggregation.ledger import (
    Evaluation,
    Role,
    Transaction,
    WorkerId,
    new_token,
)
from blocktrain.aggregation.store import checked
from blocktrain.dashboard import files
from blocktrain.disk import errors_are_clear
from blocktrain.errors import (
    BadInput,
    BadRun,
    BlobTooLarge,
    BlockTrainError,
    CannotSave,
    NoBlob,
    NotAllowed,
    OtherProtocol,
    Unreachable,
)
from blocktrain.services.door import Door, TooOften, address
from blocktrain.terms import Digest
from blocktrain.wire import messages, owner, signing
from blocktrain.wire.messages import MAX_MESSAGE, PROTOCOL, Message

IN_MEMORY = 4 * 2**20  # bytes of an upload kept in memory; longer ones go through a file
CHUNK = 2**20
MOST_VERSIONS = 64  # told at once to a worker who was away; further back it fetches whole blocks
STANDSTILL = 30.0  # seconds without a byte (a message: in all) after which an upload is given up
MOST = 2**53  # bytes moved that can be told (messages.Count)
LONGEST_WAIT = 2.0  # seconds that a question for work is held: Ctrl+C waits for it, here and there
SSE_EVERY = 1.0  # seconds between two events at the least
SSE_HEARTBEAT = 10.0
SOFTWARE = "blocktrain"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

NUMBER = re.compile("[0-9]{1,15}")
RANGE = re.compile("bytes=([0-9]{1,15})-")


class NoLength(BadInput):
    """A blob that does not say how long it is."""


class BeyondEnd(BadInput):
    """A range that begins where nothing is."""

    def __init__(self, size: int) -> None:
        super().__init__(f"There are only {size} bytes.")
        self.size = size


STATUS_OF: list[tuple[type[BlockTrainError], int]] = [
    (TooOften, 429),
    (NotAllowed, 403),
    (OtherProtocol, 426),
    (BlobTooLarge, 413),
    (NoBlob, 404),
    (NoLength, 411),
    (BeyondEnd, 416),
    (BadInput, 400),
    (CannotSave, 503),
    (Unreachable, 503),
    (BadRun, 503),
]

Handler = Callable[[Request], Awaitable[Response]]


class Coordinator:
    """One run over HTTP."""

    def __init__(
        self,
        keeper: Keeper,
        corpus: Path | None = None,
        reference: list[owner.Point] | None = None,
        authority: bytes | None = None,
    ) -> None:
        self.keeper, self.corpus, self.reference = keeper, corpus, reference or []
        self.authority = authority
        self.door = Door(keeper)
        self.news = asyncio.Event()
        self.work = asyncio.Event()
        self.said: tuple[float, bytes] = (0.0, b"")
        self.looking = asyncio.Lock()
        self.uploads: dict[WorkerId, int] = {}
        """Blobs that each worker sent and has not named yet."""
        self.uploading: dict[WorkerId, asyncio.Timeout] = {}
        self.largest = max(map(keeper.charter.update_size, range(len(keeper.charter.blocks))))

    def app(self, base_path: str = "") -> Starlette:
        """The application, at the root and, for proxies that keep it, under a base path."""
        routes = [
            Route("/", self.guarded(self.page)),
            Route("/static/{name:path}", self.guarded(self.page)),
            Route("/metrics", self.guarded(self.metrics)),
            Route("/v1/hello", self.guarded(self.hello)),
            Route("/v1/authority", self.guarded(self.show_authority)),
            Route("/v1/join", self.guarded(self.join), methods=["POST"]),
            Route("/v1/ask", self.guarded(self.ask), methods=["POST"]),
            Route("/v1/alive", self.guarded(self.alive), methods=["POST"]),
            Route("/v1/leave", self.guarded(self.leave), methods=["POST"]),
            Route("/v1/updates", self.guarded(self.update), methods=["POST"]),
            Route("/v1/versions/{block}/{after}", self.guarded(self.versions)),
            Route("/v1/blobs/{digest}", self.guarded(self.give_blob)),
            Route("/v1/blobs/{digest}", self.guarded(self.take_blob), methods=["PUT"]),
            Route("/v1/corpus/{name}", self.guarded(self.give_corpus)),
            Route("/v1/status", self.guarded(self.status)),
            Route("/v1/events", self.guarded(self.events)),
            Route("/v1/checkpoint", self.guarded(self.checkpoint)),
            Route("/v1/command", self.guarded(self.command), methods=["POST"]),
            Route("/v1/ban", self.guarded(self.ban), methods=["POST"]),
            Route("/v1/tokens", self.guarded(self.tokens)),
            Route("/v1/tokens", self.guarded(self.issue), methods=["POST"]),
            Route("/v1/tokens/revoke", self.guarded(self.revoke), methods=["POST"]),
            Route("/v1/evaluations", self.guarded(self.evaluated), methods=["POST"]),
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
        """Keeps the run while the server is up."""
        loop = asyncio.get_running_loop()

        def changed(work: bool) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.announce, work)

        self.keeper.changed = changed
        self.keeper.start()
        yield
        self.announce(True)
        await asyncio.to_thread(self.keeper.close)

    def announce(self, work: bool) -> None:
        """Wakes everybody who watches, and those who wait for work if there may be some."""
        self.news.set()
        self.news = asyncio.Event()
        if work:
            self.work.set()
            self.work = asyncio.Event()

    def guarded(self, handler: Handler) -> Handler:
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

    # --- for everybody ----------------------------------------------------------------------------

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
        if self.authority is None:
            raise NoBlob("This coordinator has no certificate authority of its own.")
        return Response(self.authority, media_type="application/x-pem-file")

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
        now = replace(now, reference=self.reference, bytes_moved=moved)
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
                news = self.news
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

    # --- for workers ------------------------------------------------------------------------------

    async def join(self, request: Request) -> Response:
        """A worker comes in."""
        token = self.door.token(request, "worker")
        signed = await read(request, messages.Signed)
        join = messages.decode(signed.body, messages.Join)
        messages.refuse_other_protocol(join.protocol, "the worker")
        verify(signed, join.worker, "join")
        if join.run != self.keeper.run:
            raise BadInput("This is another run than the one you want to join; check the URL.")

        def work(t: Transaction) -> None:
            known = t.worker(WorkerId(join.worker))
            t.join(WorkerId(join.worker), join.name, token.hash, time.time())
            if known is None or known.name != join.name:
                t.note("joined", {"worker": join.worker, "name": join.name}, time.time())

        await asyncio.wrap_future(self.keeper.write(work))
        self.door.refresh()
        if why := self.door.members.get(WorkerId(join.worker)):
            raise NotAllowed(why)
        charter = self.keeper.charter_bytes.decode()
        return say(messages.Joined(charter, self.door.session(join.worker)))

    async def ask(self, request: Request) -> Response:
        """What a worker shall do next."""
        worker = self.door.worker(request)
        ask = await read(request, messages.Ask)
        same(worker, ask.worker)
        blocks = None if ask.blocks is None else tuple(ask.blocks)
        asked = Asked(worker, blocks, ask.seconds_per_step)
        until = time.monotonic() + LONGEST_WAIT
        while True:
            work = self.work
            answer: Message = await asyncio.wrap_future(self.keeper.ask(asked, ask.traffic))
            left = until - time.monotonic()
            if not isinstance(answer, messages.Wait) or left < 0 or self.keeper.closing:
                return say(answer)
            with suppress(TimeoutError):  # so that a worker begins when its round does
                await asyncio.wait_for(work.wait(), min(answer.seconds, left))
            if await request.is_disconnected():
                return say(answer)

    async def alive(self, request: Request) -> Response:
        """A worker is still at it."""
        worker = self.door.worker(request)
        alive = await read(request, messages.Alive)
        same(worker, alive.worker)
        await asyncio.wrap_future(self.keeper.hear(worker, alive.traffic))
        return say(messages.Done())

    async def leave(self, request: Request) -> Response:
        """A worker goes."""
        worker = self.door.worker(request)
        leave = await read(request, messages.Leave)
        same(worker, leave.worker)
        await asyncio.wrap_future(self.keeper.leave(worker, leave.traffic))
        return say(messages.Done())

    async def update(self, request: Request) -> Response:
        """A worker's update, and its receipt."""
        worker = self.door.worker(request)
        signed = await read(request, messages.Signed)
        began = time.monotonic()
        update = messages.decode(signed.body, messages.Update)
        same(worker, update.worker)
        verify(signed, worker, "update")
        if update.run != self.keeper.run:
            raise BadInput("This update is of another run; ask for an assignment.")
        done = await asyncio.to_thread(self.keeper.submit, signed, update)
        body = await asyncio.wrap_future(done)
        self.uploads.pop(worker, None)
        metrics.RECEIPTS.observe(time.monotonic() - began)
        return Response(body, media_type="application/json")

    async def versions(self, request: Request) -> Response:
        """The versions of a block after a round, for whoever follows it by deltas."""
        self.door.worker(request)
        block, after = (number(request.path_params[name]) for name in ("block", "after"))

        def look() -> list[messages.Version]:
            with self.keeper.ledger.reading() as r:
                found = (r.version(block, after + 1 + n) for n in range(MOST_VERSIONS))
                return [spoken_version(version) for version in found if version]

        return say(messages.Versions(await asyncio.to_thread(look)))

    async def give_blob(self, request: Request) -> Response:
        """A blob, or the rest of it."""
        self.member_or_owner(request)
        digest = checked(request.path_params["digest"])
        size = self.keeper.store.size(digest)
        if size is None:
            raise NoBlob(f"Blob {digest} is not here; ask for a new assignment.")
        start = range_start(request, size)
        chunks = self.keeper.store.open_range(digest, start)
        return partial_content(chunks, start, size)

    async def take_blob(self, request: Request) -> Response:
        """An update's tensors; named by an update afterwards."""
        worker = self.door.worker(request)
        digest = checked(request.path_params["digest"])
        if not (told := request.headers.get("content-length")):
            raise NoLength("Say how long the blob is: send Content-Length.")
        if not 0 < (length := int(told)) <= self.largest:
            raise BlobTooLarge(f"{length} bytes; an update of this run has {self.largest} at most.")
        new = self.keeper.store.size(digest) is None
        if new and self.uploads.get(worker, 0) >= 3:
            raise NotAllowed("You have sent blobs without naming them in an update; do so first.")
        with tempfile.SpooledTemporaryFile(IN_MEMORY) as file:
            async with self.only_upload(worker) as patience:
                await spool(request, file, length, patience)
            file.seek(0)
            chunks = iter(lambda: file.read(CHUNK), b"")
            put = self.keeper.store.put
            await asyncio.to_thread(put, chunks, limit=length, expected=digest)
        if new:  # a line that was cut may deliver the same one again, or half of it, any time later
            self.uploads[worker] = self.uploads.get(worker, 0) + 1
        return say(messages.Done())

    @asynccontextmanager
    async def only_upload(self, worker: WorkerId) -> AsyncIterator[asyncio.Timeout]:
        """A worker sends one blob at a time: whatever it left hanging before is given up."""
        older = self.uploading.get(worker)
        if older is not None and not older.expired():
            older.reschedule(0.0)
        patience = asyncio.timeout(STANDSTILL)
        try:
            async with patience:
                self.uploading[worker] = patience
                yield patience
        except TimeoutError:
            raise Unreachable("The upload stands still, or you began another; go on.") from None
        finally:
            if self.uploading.get(worker) is patience:
                del self.uploading[worker]

    async def give_corpus(self, request: Request) -> Response:
        """The run's own text, for its members only."""
        self.member_or_owner(request)
        name = request.path_params["name"]
        path = None if self.corpus is None else self.corpus / name
        if path is None or name not in ("train", "valid", "test") or not path.is_file():
            raise NoBlob("This coordinator serves no such text.")
        size = path.stat().st_size
        start = range_start(request, size)
        return partial_content(file_chunks(path, start), start, size)

    def member_or_owner(self, request: Request) -> None:
        """Lets in whoever has a session or an owner's token."""
        try:
            self.door.worker(request)
        except TooOften:
            raise
        except NotAllowed:
            self.door.token(request, "owner")

    # --- for the owner ----------------------------------------------------------------------------

    async def checkpoint(self, request: Request) -> Response:
        """The newest versions of all blocks: the model."""
        self.member_or_owner(request)

        def look() -> messages.Message:
            with self.keeper.ledger.reading() as r:
                newest = [r.newest(block) for block in range(len(self.keeper.charter.blocks))]
            versions = [spoken_version(version) for version in newest if version]
            charter, ended = self.keeper.charter_bytes.decode(), self.keeper.state.ended
            return owner.Checkpoint(self.keeper.run, charter, versions, ended)

        return say(await asyncio.to_thread(look))

    async def command(self, request: Request) -> Response:
        """Pause, resume or stop."""
        self.door.token(request, "owner")
        command = await read(request, owner.Command)
        events: dict[str, Event] = {"pause": Pause(), "resume": Resume(), "stop": Stop()}
        kind = {"pause": "paused", "resume": "resumed", "stop": "stopping"}[command.do]
        await asyncio.wrap_future(self.keeper.tell(events[command.do], kind))
        return say(messages.Done())

    async def ban(self, request: Request) -> Response:
        """Nothing more is taken from a worker."""
        self.door.token(request, "owner")
        ban = await read(request, owner.Ban)
        with self.keeper.ledger.reading() as r:
            found = [worker.id for worker in r.workers() if worker.id.startswith(ban.worker)]
        await asyncio.wrap_future(self.keeper.ban(WorkerId(only(found, "worker", ban.worker))))
        self.door.refresh()
        return say(messages.Done())

    async def tokens(self, request: Request) -> Response:
        """All tokens, by their hashes."""
        self.door.token(request, "owner")
        with self.keeper.ledger.reading() as r:
            known = [
                owner.Token(Digest(t.hash), t.role, t.label, t.issued, t.revoked)
                for t in r.tokens()
            ]
        return say(owner.Tokens(known))

    async def issue(self, request: Request) -> Response:
        """A new token."""
        self.door.token(request, "owner")
        wanted = await read(request, owner.Issue)
        token = new_token()
        role: Role = "owner" if wanted.role == "owner" else "worker"

        def work(t: Transaction) -> Digest:
            return Digest(t.issue_token(token, role, wanted.label, time.time()).hash)

        return say(owner.Issued(token, await asyncio.wrap_future(self.keeper.write(work))))

    async def revoke(self, request: Request) -> Response:
        """A token opens nothing any more."""
        self.door.token(request, "owner")
        wanted = await read(request, owner.Revoke)
        with self.keeper.ledger.reading() as r:
            found = [each.hash for each in r.tokens() if each.hash.startswith(wanted.token)]
        hash = only(found, "token", wanted.token)
        await asyncio.wrap_future(
            self.keeper.write(lambda t: t.revoke_token(type(found[0])(hash), time.time()))
        )
        self.door.refresh()
        return say(messages.Done())

    async def evaluated(self, request: Request) -> Response:
        """What the owner measured, for everybody to see."""
        token = self.door.token(request, "owner")
        told = await read(request, owner.Evaluated)
        now = time.time()
        row = Evaluation(now, tuple(told.rounds), told.ce, told.bytes_seen, token.hash)

        def work(t: Transaction) -> None:
            t.evaluated(row)
            t.note("evaluated", {"ce": told.ce, "bytes_seen": told.bytes_seen}, now)

        await asyncio.wrap_future(self.keeper.write(work))
        return say(messages.Done())


# --- small things ---------------------------------------------------------------------------------


def say(message: Message) -> Response:
    """A message as an answer."""
    return Response(messages.encode(message), media_type="application/json")


def refused(error: BlockTrainError) -> Response:
    """An error as an answer."""
    code = next((code for kind, code in STATUS_OF if isinstance(error, kind)), 500)
    response = say(messages.Refused(str(error)[:400]))
    response.status_code = code
    if code in (429, 503):
        response.headers["Retry-After"] = "2"
    if isinstance(error, BeyondEnd):
        response.headers["Content-Range"] = f"bytes */{error.size}"
    return response


async def nothing_here(request: Request, error: Exception) -> Response:
    """For paths and methods that mean nothing."""
    return refused(NoBlob("There is nothing here; the dashboard is at the root."))


async def read(request: Request, kind: type[messages.M]) -> messages.M:
    """A message from a stranger: its length is checked before and while it is read."""
    body = bytearray()
    if int(request.headers.get("content-length") or 0) > MAX_MESSAGE:
        raise BlobTooLarge(f"A message has at most {MAX_MESSAGE} bytes.")
    try:
        async with asyncio.timeout(STANDSTILL):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_MESSAGE:
                    raise BlobTooLarge(f"A message has at most {MAX_MESSAGE} bytes.")
    except TimeoutError:
        raise Unreachable("The message did not come in time; send it again.") from None
    return messages.decode(bytes(body), kind)


async def spool(request: Request, file: Any, length: int, patience: asyncio.Timeout) -> None:
    """An upload into a file, no longer than it said, as long as it goes on."""
    got, clock = 0, asyncio.get_running_loop().time
    async for chunk in request.stream():
        patience.reschedule(clock() + STANDSTILL)
        got += len(chunk)
        if got > length:
            raise BlobTooLarge("The upload is longer than its Content-Length.")
        with errors_are_clear(Path(tempfile.gettempdir())):
            file.write(chunk)


def verify(signed: messages.Signed, who: str, purpose: str) -> None:
    """Raises unless `who` signed this."""
    right = signing.verify(who, signed.body, purpose, bytes.fromhex(signed.signature))
    if signed.by != who or not right:
        raise NotAllowed("The signature is not that of this worker.")


def same(session: WorkerId, told: str) -> None:
    """Raises unless a worker speaks for itself."""
    if session != told:
        raise NotAllowed("You speak for another worker than the one who joined.")


def only(found: list[Any], kind: str, told: str) -> str:
    """The one that was meant."""
    if len(found) != 1:
        raise BadInput(f"{len(found)} {kind}s begin with {told}; give more of it.")
    return str(found[0])


def number(text: str) -> int:
    """A number in a path; int() itself fails beyond 4,300 digits."""
    if not NUMBER.fullmatch(text):
        raise BadInput(f"{text[:80]!r} is no number of a block or a round; ask for an assignment.")
    return int(text)


def range_start(request: Request, size: int) -> int:
    """Where the answer begins: `Range: bytes=N-`, or 0."""
    header = request.headers.get("range", "bytes=0-")
    if not (wanted := RANGE.fullmatch(header)):
        raise BadInput("Only ranges like bytes=1000- are served.")
    start = int(wanted[1])
    if start and start >= size:
        raise BeyondEnd(size)
    return start


def partial_content(chunks: Iterator[bytes], start: int, size: int) -> Response:
    """A body from `start` on."""
    headers = {"Content-Length": str(size - start), "Accept-Ranges": "bytes"}
    if start:
        headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
    return StreamingResponse(
        chunks, 206 if start else 200, headers, media_type="application/octet-stream"
    )


def file_chunks(path: Path, start: int) -> Iterator[bytes]:
    """A file from `start` on."""
    with path.open("rb") as file:
        file.seek(start)
        while chunk := file.read(CHUNK):
            yield chunk
