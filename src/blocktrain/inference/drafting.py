"""How far ahead to guess, and guesses from what the text has said before."""

from dataclasses import dataclass

from blocktrain.inference.session import Said

FADE = 0.95  # per traversal: what was seen twenty traversals ago counts a third
LONGEST_MATCH = 8  # bytes


def best_draft(acceptance: float, traversal_s: float, draft_s: float, longest: int) -> int:
    """How many bytes to draft so that most bytes come per second.

    Each is right with probability `acceptance` if those before it were, so k of them bring
    1 + a + ... + a^k bytes in traversal_s + k draft_s.
    """
    best, best_rate, expected = 0, 0.0, 0.0
    for count in range(longest + 1):
        expected += acceptance**count
        rate = expected / (traversal_s + count * draft_s)
        if rate > best_rate:
            best, best_rate = count, rate
    return best


@dataclass
class Pace:
    """What guessing has been worth lately. It begins with a guess of its own, soon forgotten."""

    right: float = 3.0
    tried: float = 4.0
    traversal_s: float = 0.1
    draft_s: float = 0.001
    weight: float = 0.1
    """How much the two times are worth; one traversal is worth 1."""

    def length(self, longest: int) -> int:
        """How many bytes to guess next."""
        return best_draft(self.right / self.tried, self.traversal_s, self.draft_s, longest)

    def learn(self, said: Said, tokens: int, guessed: int, right: int) -> None:
        """From one traversal over `tokens` positions, `guessed` of them guesses.

        Guesses after the first wrong one say nothing. What a guess costs is read off the first
        stage, which computes drafts one after another and everything else at once; a long context
        or a stage that was replaced would blur it.

        Time in queues argues for shorter drafts, not longer ones: while a traversal is on its way,
        stages compute for the others, so as far as it has to queue, the way costs nobody anything.
        """
        self.right = FADE * self.right + right
        self.tried = FADE * self.tried + min(right + 1, guessed)
        if said.replayed or not said.hops or tokens > guessed + 1:
            return
        draft_s = said.hops[0].computed_ms / 1000 / (guessed + 1)
        computed_s = sum(hop.computed_ms for hop in said.hops) / 1000
        waited_s = sum(hop.waited_ms for hop in said.hops) / 1000
        on_the_way_s = max(0.0, said.seconds - computed_s - waited_s)
        rest_s = computed_s - guessed * draft_s + max(0.0, on_the_way_s - waited_s)
        self.weight = FADE * self.weight + 1
        self.draft_s += (draft_s - self.draft_s) / self.weight
        self.traversal_s += (rest_s - self.traversal_s) / self.weight


class Lookup:
    """Guesses that a text goes on as it did where it last read the same (prompt lookup).

    The longest match of up to eight bytes counts, the latest one of that length; after each guessed
    byte it looks again. What is written meanwhile is learned too.
    """

    def __init__(self, text: bytes) -> None:
        self.text = bytearray()
        self.after: dict[bytes, int] = {}
        self.add(text)

    def add(self, some: bytes) -> None:
        """The text goes on so."""
        for byte in some:
            end = len(self.text)
            for length in range(1, min(LONGEST_MATCH, end) + 1):
                self.after[bytes(self.text[end - length :])] = end
            self.text.append(byte)

    def guess(self, count: int) -> list[int]:
        """Up to `count` bytes; fewer where nothing like it was ever read."""
        tail = self.text[-LONGEST_MATCH:]
        made: list[int] = []
        while len(made) < count:
            known = (self.after.get(bytes(tail[at:])) for at in range(len(tail)))
            place = next((place for place in known if place is not None), None)
            if place is None:
                break
            made.append(self.text[place])
            tail = tail[-(LONGEST_MATCH - 1) :] + self.text[place : place + 1]
        return made
