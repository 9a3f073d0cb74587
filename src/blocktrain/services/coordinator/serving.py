"""For members who serve the model: papers for their links, who serves what, which checkpoint."""

import asyncio
import time
from datetime import timedelta

from starlette.requests import Request
from starlette.responses import Response

from blocktrain.aggregation.ledger import WorkerId
from blocktrain.services.coordinator.answers import read, same, say, verify
from blocktrain.services.coordinator.office import Office
from blocktrain.services.coordinator.served import Served
from blocktrain.wire import messages
from blocktrain.wire.messages import MAX_MESSAGE
from blocktrain.wire.registry import Registry
from blocktrain.wire.serving import MAX_BANNED, Announce, Banned, Publish, Stages

LIFE = timedelta(days=7)  # of a certificate
DOUBT = timedelta(days=1)  # by which the clocks of members may differ


class Serving:
    """Answers stages and gateways.

    Who serves what is kept in memory only: after a restart they all say so again within seconds.
    """

    def __init__(self, office: Office) -> None:
        self.office, self.door = office, office.door
        self.registry = Registry()
        self.checkpoint = Served(office.keeper)

    async def certificate(self, request: Request) -> Response:
        """A member's papers: whoever holds the key of its id may show them to other members."""
        worker = self.door.worker(request)
        authority = self.office.certifies()
        made = await asyncio.to_thread(authority.issue_member, worker, LIFE)
        return say(messages.Certified(made.decode(), authority.pem.decode()))

    async def announce(self, request: Request) -> Response:
        """A member says what it serves, and where."""
        worker = self.door.worker(request)
        signed = await read(request, messages.Signed)
        announce = messages.decode(signed.body, Announce)
        same(worker, announce.place.stage)
        verify(signed, worker, "announce")
        of = self.door.tokens.get(worker, worker)  # one token may have so many stages and no more
        return say(self.registry.hear(announce, time.monotonic(), of))

    async def stages(self, request: Request) -> Response:
        """Who serves what, as far as it fits into a message."""
        self.office.member_or_owner(request)
        present = self.registry.present(time.monotonic())
        here = [each for each in present if self.welcome(each)]
        while len(messages.encode(Stages(here))) > MAX_MESSAGE:  # nobody would read it
            here = here[: len(here) * 9 // 10]
        return say(Stages(here))

    async def banned(self, request: Request) -> Response:
        """Who is a member no more but may have papers still; if they are many, the latest."""
        self.door.worker(request)

        def look() -> messages.Message:
            with self.office.keeper.ledger.reading() as r:
                revoked = {token.hash: token.revoked for token in r.tokens()}
                ends = [(w.banned or revoked.get(w.token), w.id) for w in r.workers()]
            since = time.time() - (LIFE + DOUBT).total_seconds()
            lately = sorted((end, id) for end, id in ends if end is not None and end > since)
            return Banned([id for _, id in lately[-MAX_BANNED:]])

        return say(await asyncio.to_thread(look))

    async def served(self, request: Request) -> Response:
        """The checkpoint that all of them serve."""
        self.door.worker(request)
        return say(await asyncio.to_thread(self.checkpoint.current, time.monotonic()))

    async def publish(self, request: Request) -> Response:
        """They shall all serve the newest one: the owner says so."""
        self.door.token(request, "owner")
        await read(request, Publish)
        return say(await asyncio.to_thread(self.checkpoint.move, time.monotonic()))

    def welcome(self, announce: Announce) -> bool:
        """Whether whoever said that is a member still, neither banned nor without a token."""
        return self.door.members.get(WorkerId(announce.place.stage), "unknown") is None
