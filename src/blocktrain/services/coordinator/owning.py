"""For the owner: how the run goes on, who may come in, what was measured."""

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response

from blocktrain.aggregation.events import Event, Pause, Resume, Stop
from blocktrain.aggregation.ledger import (
    Evaluation,
    Role,
    Transaction,
    WorkerId,
    new_token,
)
from blocktrain.services.coordinator.answers import (
    only,
    read,
    say,
)
from blocktrain.services.coordinator.office import Office
from blocktrain.services.coordinator.served import newest
from blocktrain.terms import Digest
from blocktrain.wire import messages, owner


class Owning:
    """Answers the owner."""

    def __init__(self, office: Office) -> None:
        self.office, self.keeper, self.door = office, office.keeper, office.door

    async def checkpoint(self, request: Request) -> Response:
        """The newest versions of all blocks: the model."""
        self.office.member_or_owner(request)
        return say(await asyncio.to_thread(newest, self.keeper))

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
