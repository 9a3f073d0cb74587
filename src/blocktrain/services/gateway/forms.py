"""A text's events as the answers that OpenAI's clients expect: one object, or a stream of them."""

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

import msgspec

from blocktrain.services.gateway.answers import event
from blocktrain.services.gateway.openai import Completion, Told, Usage, Wanted, logs_of
from blocktrain.services.gateway.telling import Ended, Event, Piece
from blocktrain.services.gateway.texts import Shown

DONE = b"data: [DONE]\n\n"


class Form:
    """How one request is answered: everything that its objects have in common."""

    def __init__(self, wanted: Wanted, model: str) -> None:
        self.wanted, self.model = wanted, model
        self.id, self.created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        prompt = wanted.prompt.decode(errors="replace")
        self.echo = prompt if wanted.echo else ""
        """What comes before the text; then nothing."""
        self.offset = len(prompt)
        """Characters of the prompt and of the text so far."""

    async def stream(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
        """Piece by piece, each as soon as there is something to show."""
        async with aclosing(events):
            async for each in events:
                if isinstance(each, Piece) and each.shown.bytes:
                    yield event(self.say([self.choice(each.shown)]))
                if isinstance(each, Ended):
                    last = self.choice(each.shown, each.reason)
                    yield event(self.say([last], report=each.report))
                    if self.wanted.usage:
                        yield event(self.say([], usage=self.usage(each.generated)))
                    yield DONE

    async def whole(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
        """All at once, at the end."""
        shown: list[Shown] = []
        async with aclosing(events):
            async for each in events:
                if isinstance(each, Piece | Ended):
                    shown.append(each.shown)
                if isinstance(each, Ended):
                    choice = self.choice(joined(shown), each.reason)
                    usage = self.usage(each.generated)
                    yield msgspec.json.encode(self.say([choice], usage, each.report))

    def choice(self, shown: Shown, reason: Literal["stop", "length"] | None = None) -> Told:
        """Some text as OpenAI writes it."""
        text, self.echo = self.echo + shown.text, ""
        logs = logs_of(shown, self.offset) if self.wanted.logs else None
        self.offset += len(shown.text)
        return Told(text, reason, logs)

    def say(
        self,
        choices: list[Told],
        usage: Usage | None = None,
        report: dict[str, Any] | None = None,
    ) -> Completion:
        """One object of the answer."""
        kind = "text_completion"
        return Completion(self.id, kind, self.created, self.model, choices, usage, report)

    def usage(self, generated: int) -> Usage:
        """What it took, in bytes."""
        given = len(self.wanted.prompt)
        return Usage(given, generated, given + generated)


def joined(parts: list[Shown]) -> Shown:
    """Everything that was shown, in order."""
    return Shown(
        "".join(part.text for part in parts),
        b"".join(part.bytes for part in parts),
        [log for part in parts for log in part.logs],
    )
