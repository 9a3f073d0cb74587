"""For workers: join, ask, send, submit, leave."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.requests import Request
from starlette.responses import Response

from blocktrain import metrics
from blocktrain.aggregation.events import Asked
from blocktrain.aggregation.ledger import (
    Transaction,
    WorkerId,
)
from blocktrain.aggregation.store import checked
from blocktrain.aggregation.words import spoken_version
from blocktrain.errors import (
    BadInput,
    BlobTooLarge,
    NoBlob,
    NotAllowed,
    Unreachable,
)
from blocktrain.services.coordinator import answers
from blocktrain.services.coordinator.answers import (
    CHUNK,
    NoLength,
    file_chunks,
    number,
    partial_content,
    range_start,
    read,
    same,
    say,
    spool,
    verify,
)
from blocktrain.services.coordinator.office import Office
from blocktrain.terms import Digest
from blocktrain.wire import messages
from blocktrain.wire.messages import Message

IN_MEMORY = 4 * 2**20  # bytes of an upload kept in memory; longer ones go through a file
MOST_VERSIONS = 64  # told at once to a worker who was away; further back it fetches whole blocks
LONGEST_WAIT = 2.0  # seconds that a question for work is held: Ctrl+C waits for it, here and there


class Working:
    """Answers workers."""

    def __init__(self, office: Office) -> None:
        self.office, self.keeper, self.door = office, office.keeper, office.door
        self.uploads: dict[WorkerId, int] = {}
        """Blobs that each worker sent and has not named yet."""
        self.uploading: dict[WorkerId, asyncio.Timeout] = {}
        charter = office.keeper.charter
        self.largest = max(map(charter.update_size, range(len(charter.blocks))))

    async def join(self, request: Request) -> Response:
        """A worker comes in."""
        token = self.door.token(request, "worker")
        signed = await read(request, messages.Signed)
        join = messages.decode(signed.body, messages.Join)
        messages.refuse_other_protocol(join.protocol, "the worker")
        verify(signed, join.worker, "join")
        if join.run != self.keeper.run:
            raise BadInput("This is another run than the one you want to join; check the URL.")
        if join.token != Digest(token.hash):  # overheard, and said again with a token of one's own
            raise NotAllowed("These words were signed for another token; sign them for yours.")

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
            work = self.office.work
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

    async def manifest(self, request: Request) -> Response:
        """What a closed round was made of, signed."""
        self.office.member_or_owner(request)
        block, round = (number(request.path_params[name]) for name in ("block", "round"))

        def look() -> bytes:
            with self.keeper.ledger.reading() as r:
                version = r.version(block, round)
            if version is None or version.manifest is None:
                raise NoBlob(
                    f"Round {round} of block {block} was not closed; ask for a closed one."
                )
            return self.keeper.store.get(version.manifest)

        return Response(await asyncio.to_thread(look), media_type="application/json")

    async def give_blob(self, request: Request) -> Response:
        """A blob, or the rest of it."""
        self.office.member_or_owner(request)
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
        patience = asyncio.timeout(answers.STANDSTILL)
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
        self.office.member_or_owner(request)
        name = request.path_params["name"]
        path = None if self.office.corpus is None else self.office.corpus / name
        if path is None or name not in ("train", "valid", "test") or not path.is_file():
            raise NoBlob("This coordinator serves no such text.")
        size = path.stat().st_size
        start = range_start(request, size)
        return partial_content(file_chunks(path, start), start, size)
