"""From a prompt to text, over a Session: `ar`, `exact`, `speculative` and `whole`.

The first three give the same bytes. They differ in who guesses ahead, and so in how many bytes one
traversal brings: nobody (`ar`), the first stage with its own head (`exact`), or we from what the
text has said before (`speculative`). The model's choice is what counts; guesses only save time.

The context is [START, *prompt], its last `window` tokens; when the window is full, the newer half
of it becomes a new context. So what a byte is chosen from depends on its number alone.
"""

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from blocktrain.errors import BadInput
from blocktrain.inference.choice import Sampling as Sampling
from blocktrain.inference.choice import gumbel
from blocktrain.inference.drafting import Lookup, Pace
from blocktrain.inference.local import LocalSession
from blocktrain.inference.session import Asked, Said, Session, Watch
from blocktrain.inference.span import Span
from blocktrain.learning.model import MASK, START, Model
from blocktrain.learning.noise import seed_of
from blocktrain.wire.serving import MAX_DRAFT, MAX_TOKENS

LUCK = 3.0  # nats; without it spaces and e's crowd out the rest of a `whole` text (LOG.md)


@dataclass(frozen=True)
class Piece:
    """What one traversal brought; no bytes, where it only read a long prompt or refined."""

    bytes: bytes
    logs: list[float]
    """Natural log of the model's own probability of each byte."""
    said: Said
    guessed: int = 0
    """Bytes that were guessed ahead, rightly or not."""


Pieces = AsyncGenerator[Piece, None]


@dataclass
class Context:
    """What the model sees of a text, and how much of it its stages remember."""

    window: int
    tokens: list[int]
    fed: int = 0

    @property
    def unread(self) -> list[int]:
        """What no stage has seen yet."""
        return self.tokens[self.fed :]

    @property
    def room(self) -> int:
        """How many guesses may follow."""
        return self.window - len(self.tokens)

    def add(self, some: list[int]) -> None:
        """The text goes on so; all but the last of these were guessed and so are remembered."""
        self.tokens += some
        self.fed = len(self.tokens) - 1
        if self.fed == self.window:  # full: begin again from the newer half
            self.tokens = self.tokens[-max(1, self.window // 2) :]
            self.fed = 0


class Guesser(Protocol):
    """Whoever looks ahead."""

    def ask(self, longest: int) -> tuple[list[int], int]:
        """Bytes to try, and how many more the first stage should draft behind them."""

    def learn(self, said: Said, tokens: int, guessed: int, made: list[int]) -> None:
        """The model took all but the last of `made` from the guesses."""


class Nobody:
    """Does not look ahead."""

    def ask(self, longest: int) -> tuple[list[int], int]:
        """Nothing."""
        return [], 0

    def learn(self, said: Said, tokens: int, guessed: int, made: list[int]) -> None:
        """Nothing."""


@dataclass
class FirstStage:
    """The first stage drafts with its own head."""

    pace: Pace = field(default_factory=Pace)

    def ask(self, longest: int) -> tuple[list[int], int]:
        """As many as pay."""
        return [], self.pace.length(longest)

    def learn(self, said: Said, tokens: int, guessed: int, made: list[int]) -> None:
        """How often it was right."""
        self.pace.learn(said, tokens, guessed, len(made) - 1)


@dataclass
class Before:
    """What the text said before is tried again."""

    lookup: Lookup
    pace: Pace = field(default_factory=Pace)

    def ask(self, longest: int) -> tuple[list[int], int]:
        """As many as pay."""
        return self.lookup.guess(self.pace.length(longest)), 0

    def learn(self, said: Said, tokens: int, guessed: int, made: list[int]) -> None:
        """How often it was right, and how the text went on."""
        self.pace.learn(said, tokens, guessed, len(made) - 1)
        self.lookup.add(bytes(made))


def ar(session: Session, prompt: bytes, sampling: Sampling) -> Pieces:
    """One byte for each traversal: the plain way."""
    return verified(session, prompt, sampling, Nobody())


def exact(session: Session, prompt: bytes, sampling: Sampling) -> Pieces:
    """The first stage drafts, one traversal verifies all of it and adds a byte."""
    return verified(session, prompt, sampling, FirstStage())


def speculative(session: Session, prompt: bytes, sampling: Sampling) -> Pieces:
    """The same with guesses from the text so far, as others do it without a draft model."""
    return verified(session, prompt, sampling, Before(Lookup(prompt)))


async def verified(
    session: Session, prompt: bytes, sampling: Sampling, guesser: Guesser
) -> AsyncGenerator[Piece, None]:
    """The model's own text, traversal by traversal, whatever is guessed."""
    window = session.shape.window
    context = Context(window, [START, *prompt][-window:])
    made = 0
    while made < sampling.length:
        choice = sampling.choice(made)
        while len(context.unread) > MAX_TOKENS - MAX_DRAFT:  # longer than a message may be
            part = context.unread[: MAX_TOKENS - MAX_DRAFT]
            said = await session.step(Asked(context.fed, part, wanted=0, choice=choice))
            context.fed += len(part)
            yield Piece(b"", [], said)
        longest = min(context.room, MAX_DRAFT, sampling.length - made - 1)
        guesses, draft = guesser.ask(longest)
        tokens = context.unread + guesses
        said = await session.step(Asked(context.fed, tokens, 1 + len(guesses), draft, choice))
        guesses = guesses + said.drafted
        found = said.bytes[: 1 + agreed(guesses, said.bytes)]
        guesser.learn(said, len(tokens) + len(said.drafted), len(guesses), found)
        context.add(found)
        made += len(found)
        yield Piece(bytes(found), said.logs[: len(found)], said, len(guesses))


def agreed(guesses: list[int], chosen: list[int]) -> int:
    """How many guesses the model would have chosen itself, up to the first that it would not."""
    pairs = zip(guesses, chosen, strict=False)  # one more is chosen than guessed
    return next((n for n, (guess, byte) in enumerate(pairs) if guess != byte), len(guesses))


async def whole(
    session: Session,
    prompt: bytes,
    length: int,
    sampling: Sampling,
    traversals: int = 1,
    watch: Watch | None = None,
) -> AsyncGenerator[Piece, None]:
    """All `length` bytes at once (denoise models), or after `traversals` that refine them.

    After traversal n of N, n/N of the bytes are kept as they are, the surest first but for some
    luck that gets less, and the others are hidden and found again from new noise. What does not fit
    in a window with what it goes on from comes span by span, each behind the finished ones: at
    least a quarter of the window, or the whole prompt if that is shorter, stays in sight.
    Sampling's own length is not used.
    """
    if traversals < 1:
        raise BadInput(f"traversals is {traversals}; it must be at least 1.")
    window, known, made = session.shape.window, [START, *prompt], 0
    while made < length:
        count = min(length - made, window + 1 - min(len(known), max(1, window // 4)))
        before = known[-(window + 1 - count) :]
        span = (len(before) - 1, len(before) - 1 + count)
        kept: dict[int, tuple[float, int]] = {}  # by place in the span: how sure, and which byte
        for number in range(1, traversals + 1):
            inputs = [kept[n][1] if n in kept else MASK for n in range(count - 1)]
            choice = sampling.choice(made)
            if number > 1:  # new noise, or the same bytes would come again
                choice = msgspec.structs.replace(choice, seed=seed_of(sampling.seed, number))
            said = await session.emit(before + inputs, span, choice, watch)
            found = dict(enumerate(zip(said.logs, said.bytes, strict=True)))
            noise_N = gumbel(seed_of(choice.seed, number), made, count)[:, 0]
            luck = LUCK * (1 - number / traversals) * noise_N
            surest = sorted(found.keys() - kept.keys(), key=lambda n: (-found[n][0] - luck[n], n))
            kept |= {n: found[n] for n in surest[: count * number // traversals - len(kept)]}
            if number < traversals:
                yield Piece(b"", [], said)
        logs, some = zip(*(kept[n] for n in range(count)), strict=True)
        known += some
        made += count
        yield Piece(bytes(some), list(logs), said)


@dataclass
class Report:
    """How a text came to be, added up over its traversals."""

    traversals: int = 0
    bytes: int = 0
    guessed: int = 0
    right: int = 0
    """Guesses that the model would have chosen itself."""
    seconds: float = 0.0
    """Spent waiting for answers."""
    first_byte_s: float | None = None
    sent: int = 0
    """Bytes on the wire, all hops and answers together."""
    replays: int = 0

    def add(self, piece: Piece) -> None:
        """One traversal more."""
        said = piece.said
        self.traversals += 1
        self.bytes += len(piece.bytes)
        self.guessed += piece.guessed
        self.right += max(0, len(piece.bytes) - 1) if piece.guessed else 0
        self.seconds += said.seconds
        if piece.bytes and self.first_byte_s is None:
            self.first_byte_s = self.seconds
        self.sent += said.sent
        self.replays += said.replayed

    @property
    def bytes_per_traversal(self) -> float:
        """What one traversal brought on average."""
        return self.bytes / self.traversals if self.traversals else 0.0


def generate(model: Model, prompt: bytes, sampling: Sampling) -> Iterator[int]:
    """Yields one byte after another, as the assembled model continues the prompt: `ar`, here."""
    for piece in at_once(ar(LocalSession(Span.of(model)), prompt, sampling)):
        yield from piece.bytes


def at_once(pieces: Pieces) -> Iterator[Piece]:
    """What comes from a session that never waits, without an event loop: one may run already."""
    while True:
        try:
            pieces.asend(None).send(None)
        except StopIteration as done:
            yield done.value
        except StopAsyncIteration:
            return
        else:
            raise AssertionError("a local session does not wait")
