"""Where a stage works: from a traversal that was heard to what becomes of it.

    heard -> admitted or trouble -> its turn -> one computing thread -> the next stage
                                                                     or the gateway's own link

An answer goes to the link that the gateway holds to this stage; troubles go back the way the
traversal came, so that whoever gets one knows it is about a traversal of his own.
"""

import asyncio
import logging
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

from blocktrain.errors import BlockTrainError, Unreachable
from blocktrain.inference import work
from blocktrain.inference.links import BROKEN, Link, Trust, is_name_of
from blocktrain.inference.onward import Onward
from blocktrain.inference.rooms import Room, Rooms
from blocktrain.inference.turns import Path, Turns
from blocktrain.inference.work import Blocks
from blocktrain.wire.frame import Head
from blocktrain.wire.serving import (
    MAX_STAGES,
    Answer,
    Emit,
    Forget,
    Hop,
    Place,
    Sight,
    Step,
    Trouble,
)

LOG = logging.getLogger(__name__)
IN_HAND = 2  # steps of one session: the next may come before the last one's end is noticed
Reason = Literal["forgotten", "unreachable", "busy", "wrong"]


@dataclass(frozen=True)
class Limits:
    """What all guests of a stage may use together."""

    sessions: int = 256
    """Texts remembered at once."""
    memory: int = 4 * 2**30
    """Bytes of what is remembered."""
    bodies: int = 256 * 2**20
    """Bytes of activations that wait or are passed on; one step always fits."""
    links: int = 256
    """Half a megabyte each, at most."""
    links_per_peer: int = 64
    """A stage before this one opens a link for each gateway that it serves."""
    idle: float = 120.0
    """Seconds without a step after which a text is forgotten."""


NO_MORE_THAN = Limits()


class Guest:
    """Whoever has opened a link to this stage: a gateway, or the stage before."""

    def __init__(self, link: Link, path: Path, trust: Trust, desk: "Desk") -> None:
        self.link, self.path = link, path
        self.onward = Onward(trust, self._back, lambda place: desk.lost(self, place))

    def _back(self, said: Trouble) -> None:
        """A trouble goes back the way its traversal came."""
        self.link.say(said)


@dataclass
class Job:
    """A traversal while it is here."""

    guest: Guest
    said: Step | Emit
    room: Room[Any] | None
    received: int
    """Bytes of its frame."""
    held: int
    """Bytes counted against Limits.bodies."""
    since: float = 0.0
    """When it was all there."""
    body: bytes = b""

    @property
    def path(self) -> Path:
        """Whose turn it takes."""
        return (*self.guest.path, self.said.session)


@dataclass
class Outcome:
    """What became of a job."""

    said: Step | Emit | Answer | Trouble
    body: bytes = b""
    seen: list[int] | None = None
    """How an unfinished span looks now."""


class Desk:
    """Takes traversals from guests and sees to them until they are gone."""

    def __init__(self, id: str, blocks: Blocks, limits: Limits) -> None:
        self._id, self._blocks, self._limits = id, blocks, limits
        fitting = limits.memory // max(1, blocks.memory().bytes)
        self.rooms: Rooms[Any] = Rooms(max(1, min(limits.sessions, fitting)))
        self.guests: dict[str, Guest] = {}
        """By the name under which they greeted."""
        self.leaving = False
        """Whether no new texts are taken."""
        self.shut = False
        """Whether nothing is."""
        self.steps = 0
        self.computed = 0.0
        self.refused: Counter[str] = Counter()
        self._turns: Turns[Job] = Turns()
        self._bodies = 0
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "blocktrain-compute")
        self._in_hand: set[asyncio.Task[None]] = set()
        self._tasks = [asyncio.create_task(self._compute()), asyncio.create_task(self._sweep())]
        self._computing = False

    @property
    def queued(self) -> int:
        """Traversals that wait for their turn."""
        return len(self._turns)

    @property
    def idle(self) -> bool:
        """Whether nothing waits, is computed or is passed on."""
        return not (self._turns or self._computing or self._in_hand)

    async def close(self) -> None:
        """Stops at once, but for what the thread is computing."""
        tasks = [*self._tasks, *self._in_hand]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)

    async def part(self, guest: Guest, last: bool) -> None:
        """Forgets a guest whose link has ended, and all that was for it."""
        if self.guests.get(guest.link.name) is guest:
            del self.guests[guest.link.name]
        for job in self._turns.end(guest.path):
            self._let_go(job)
        if last:  # of its peer's links
            self._turns.end(guest.path[:1])
        self.rooms.end(guest.path)
        await guest.onward.close()

    # A traversal comes.

    async def take(self, guest: Guest, head: Head, said: Step | Emit) -> None:
        """Lets a traversal wait for its turn, or says why not."""
        expected = work.body_size(self._blocks, said)
        held = expected + work.next_size(self._blocks, said)
        room = self._admit(guest, said, held)
        if isinstance(room, Trouble):
            await guest.link.skip(head, expected)
            self.refused[room.reason] += 1
            guest.link.say(room)
            return
        job = Job(guest, said, room, head.size, held)
        self._bodies += held
        if room:
            room.in_hand += 1
        try:
            job.body = await guest.link.body(head, expected)
        except BaseException:
            self._let_go(job)
            raise
        job.since = time.monotonic()
        if said.tokens:
            self._turns.push(job.path, job)
            self._wake.set()
        else:  # there is nothing to compute: it only feels its way along the route
            self._pass(job, untouched(said), 0.0, 0.0)

    def _admit(self, guest: Guest, said: Step | Emit, held: int) -> Room[Any] | Trouble | None:
        """The room that a traversal needs (None: none), or why it cannot go on."""
        trouble = partial(self._trouble, said)
        peer = guest.link.peer
        if not (said.hops[-1].stage == peer if said.hops else is_name_of(said.gateway, peer)):
            return trouble("wrong", "This is asked in somebody else's name; use your own.")
        if len(said.hops) + len(said.route) >= MAX_STAGES:
            return trouble("wrong", f"A route must have at most {MAX_STAGES} stages.")
        if words := work.why_not(self._blocks, said):
            return trouble("wrong", words)
        if self.shut:
            return trouble("busy", "This stage is leaving; try another one.")
        if self._bodies and self._bodies + held > self._limits.bodies:
            return trouble("busy", "Too much waits here; try another stage or try later.")
        if isinstance(said, Emit) or not said.tokens:
            return None
        now, path = time.monotonic(), (*guest.path, said.session)
        room = self.rooms.use(path, now)
        if room is None and said.start == 0 and not (room := self._open(path, now)):
            return trouble("busy", "There is no room for one more text; try another stage.")
        if room is None or (said.start > room.memory.filled and not room.in_hand):
            return trouble("forgotten", f"What came before {said.start} is not remembered here.")
        if room.in_hand >= IN_HAND or room.leaving:
            return trouble("busy", "A step of this text is still in hand; wait for its answer.")
        return room

    def _trouble(self, said: Step | Emit, reason: Reason, words: str) -> Trouble:
        """A sentence about something that is this stage's own fault or decision."""
        return Trouble(said.session, said.number, reason, self._id, words[:400])

    def _open(self, path: Path, now: float) -> Room[Any] | None:
        """Room for one more text, if need be in place of another."""
        if self.leaving:
            return None
        if not self.rooms.free and (other := self.rooms.give_way(path, now)):
            self.refused["given way"] += 1
            self._end(other)
        return self.rooms.open(path, self._blocks.memory, now)

    # It is computed.

    async def _compute(self) -> None:
        """Takes one job after another, as it is their turn."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._turns:
                self._wake.clear()
                await self._wake.wait()
            job = self._turns.pop()
            begun = time.monotonic()
            self._computing = True
            outcome = await loop.run_in_executor(self._thread, self._work, job)
            self._computing = False
            seconds = time.monotonic() - begun
            self._turns.spend(job.path, seconds)
            self.steps += 1
            self.computed += seconds
            self._pass(job, outcome, seconds, begun - job.since)

    def _work(self, job: Job) -> Outcome:
        """What the thread does."""
        said = job.said
        try:
            if isinstance(said, Emit):
                return Outcome(*work.take_emit(self._blocks, said, job.body))
            assert job.room
            if said.start <= job.room.memory.filled:
                return Outcome(*work.take_step(self._blocks, job.room.memory, said, job.body))
            trouble = self._trouble(said, "forgotten", "The step before this one failed here.")
        except BlockTrainError as error:
            trouble = self._trouble(said, "wrong", str(error))
        except Exception:  # the others' texts must go on, and this one at another stage
            LOG.exception("a step failed")
            words = "The stage failed at this step; look into its log."
            trouble = self._trouble(said, "unreachable", words)
        return Outcome(trouble)

    # It goes on.

    def _pass(self, job: Job, outcome: Outcome, computed: float, waited: float) -> None:
        """Sends what became of a job to where it belongs."""
        onward = job.guest.onward.round_trip_ms(job.said.route[0]) if job.said.route else None
        hop = Hop(self._id, 1000 * computed, 1000 * waited, job.received, onward)
        if not isinstance(outcome.said, Trouble):
            outcome.said = msgspec.structs.replace(outcome.said, hops=[*job.said.hops, hop])
        task = asyncio.create_task(self._deliver(job, outcome))
        self._in_hand.add(task)
        task.add_done_callback(self._in_hand.discard)

    async def _deliver(self, job: Job, outcome: Outcome) -> None:
        said, guest = job.said, job.guest
        gateway = self.guests.get(said.gateway)
        try:
            match outcome.said:
                case Trouble():
                    if job.room:
                        job.room.leaving = True  # whatever it remembers may be half of something
                    guest.link.say(outcome.said)
                case Answer():
                    if gateway is None:
                        raise Unreachable("The gateway has no link to its last stage; open one.")
                    await gateway.link.carry(outcome.said, outcome.body)
                case _:
                    if gateway and isinstance(said, Emit) and said.watch and outcome.seen:
                        seen = Sight(said.session, said.number, self._id, outcome.seen)
                        gateway.link.say(seen)
                    if job.room and isinstance(said, Step):
                        job.room.passed = said
                    await guest.onward.carry(said.route[0], outcome.said, outcome.body)
        except BROKEN as error:
            blamed = said.route[0].stage if said.route else self._id
            guest.link.say(unreachable(said, blamed, str(error)))
        finally:
            self._let_go(job)

    def lost(self, guest: Guest, place: Place) -> None:
        """A link to a next stage has ended: what was last passed on over it may never arrive."""
        for room in self.rooms.under(guest.path):
            if room.passed and room.passed.route[0] == place:
                words = "The next stage hung up; try another one."
                guest.link.say(unreachable(room.passed, place.stage, words))

    # It is over.

    def forget(self, guest: Guest, secret: str) -> None:
        """A guest's text is done."""
        if room := self.rooms.use((*guest.path, secret), time.monotonic()):
            self._forget(guest, room)

    def _let_go(self, job: Job) -> None:
        """A job is over, one way or another."""
        self._bodies -= job.held
        if job.room:
            job.room.in_hand -= 1
            if job.room.leaving:
                self._forget(job.guest, job.room)

    def _forget(self, guest: Guest, room: Room[Any]) -> None:
        """Forgets a text, here and at the stages after this one, once nothing of it is in hand."""
        room.leaving = True
        if room.in_hand:
            return
        self._turns.end(room.path)
        self.rooms.end(room.path)
        if room.passed:
            guest.onward.tell(room.passed.route[0], Forget(room.path[-1]))

    def _end(self, room: Room[Any]) -> None:
        """Forgets a text that has to go."""
        for guest in self.guests.values():
            if guest.path == room.path[:2]:
                self._forget(guest, room)
                return

    async def _sweep(self) -> None:
        """Forgets texts that nobody goes on with."""
        while True:
            await asyncio.sleep(min(5.0, self._limits.idle / 4))
            for room in self.rooms.unused(time.monotonic(), self._limits.idle):
                self._end(room)


def untouched(said: Step | Emit) -> Outcome:
    """A traversal without tokens, one stage further."""
    if said.route:
        return Outcome(msgspec.structs.replace(said, route=said.route[1:]))
    return Outcome(Answer(said.session, said.number, [], [], [], said.hops))


def unreachable(said: Step | Emit, blamed: str, words: str) -> Trouble:
    """The sentence about a next stage that does not answer."""
    return Trouble(said.session, said.number, "unreachable", blamed, words[:400])
