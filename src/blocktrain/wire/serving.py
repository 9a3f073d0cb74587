"""Every message between a gateway and stages, written as a spoken sentence.

One frame (wire/frame.py) carries one message, as JSON tagged by `say`, and a body of activations
(wire/activations.py). The gateway holds a link to every stage of its routes. It gives a step to the
first stage; each stage works on it and passes it to the next over a link of its own; the last
one answers the gateway on the link that the gateway holds to *it*. So one traversal of n stages
takes n half round trips and nobody needs to reach the gateway.

Positions count from the beginning of a context (at most the model's window). A step says where it
starts: a stage drops whatever it remembers of the session from there on, so rejected drafts, a new
context (start 0) and a replay after a failure need no message of their own.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from blocktrain.wire.messages import Count, Message, Name, Seconds, Sentence, Sha256, WorkerId

SERVING_PROTOCOL = 2
"""Changes when an old stage and a new gateway would misunderstand each other."""
MAX_HEADER = 64 * 1024  # bytes of one message; the largest names 64 hops and 4,096 tokens
MAX_STAGES = 64  # on one route
MAX_TOKENS = 4096  # in one step
MAX_DRAFT = 64
MAX_BANNED = 3840  # ids that fit into a message of 256 KiB

Secret = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Token = Annotated[int, Meta(ge=0, le=256)]  # 256 is MASK
Byte = Annotated[int, Meta(ge=0, le=255)]
Tokens = Annotated[list[Token], Meta(max_length=MAX_TOKENS)]
Bytes = Annotated[list[Byte], Meta(max_length=MAX_TOKENS)]
Host = Annotated[str, Meta(min_length=1, max_length=253, pattern=r"^[\w.:-]+\Z")]
Port = Annotated[int, Meta(ge=1, le=65535)]
Codec = Literal["fp32", "fp16", "int8"]
USUAL: Codec = "int8"
"""How activations travel if nobody says: the smallest that costs at most 0.002 of CE. Measured by
`bench activations`: 0.0001 with `neighbours` (models/small), 0.0011 with `denoise`; fp16 0.0000."""
Weights = Literal["fp32", "bf16", "int8"]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Anything inside a message."""


class Holding(Part, frozen=True):
    """What a stage computes. Two stages with equal holdings are replicas of each other."""

    model: Sha256
    """The model's digest (Manifest.digest)."""
    first: Count
    """The first block held, from 0."""
    last: Count
    """The last block held, itself included."""
    weights: Weights
    kind: Name
    """What else decides last bits: device class, threads and build, in a few words."""


class Place(Part, frozen=True):
    """Where a stage is reached, and whose certificate it must show."""

    stage: WorkerId
    host: Host
    port: Port


class Hop(Part, frozen=True):
    """What one stage did for one traversal."""

    stage: WorkerId
    computed_ms: Seconds
    waited_ms: Seconds
    """In the stage's queue."""
    received: Count
    """Bytes of the frame that brought the step."""
    onward_ms: Seconds | None = None
    """To the next stage and back, as pings on that very link say; None at the last stage, and where
    the link was only opened for this."""


class Choice(Part, frozen=True):
    """How bytes are chosen: the same one whoever chooses, given the same probabilities."""

    temperature: Annotated[float, Meta(ge=0, le=100)]
    top_p: Annotated[float, Meta(gt=0, le=1)]
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    at: Count
    """Which byte of the generated text the first wanted row chooses, from 0."""


class Greeting(Message, frozen=True, tag="greeting"):
    """I am a gateway or a stage, this is how I speak, and under this name I wait for answers."""

    protocol: int
    name: Secret


class Welcome(Message, frozen=True, tag="welcome"):
    """This is what I hold, and so much is going on here."""

    protocol: int
    holding: Holding
    sessions: Count
    room: Count
    """Sessions that still fit."""


class Ping(Message, frozen=True, tag="ping"):
    """Are you there?"""

    number: Count


class Pong(Message, frozen=True, tag="pong"):
    """I am, and so much is going on here."""

    number: Count
    sessions: Count
    room: Count
    queued: Count
    """Steps that wait."""


class Step(Message, frozen=True, tag="step"):
    """Take this text further: from these tokens at this place, and pass it on.

    The body holds what the blocks before made of `tokens`, one row each; the first stage gets none.
    With `draft`, the first stage appends so many bytes of its own choosing, by its last block's
    head, to `tokens`; everyone after it sees them as given and `draft` = 0.
    """

    session: Secret
    number: Count
    """Which traversal of this session; answers name it."""
    gateway: Secret
    """The name under which the gateway greeted the last stage."""
    route: Annotated[list[Place], Meta(max_length=MAX_STAGES)]
    """The stages still to come, in order; empty for the last one."""
    start: Count
    tokens: Tokens
    wanted: Count
    """How many of the last rows are asked for, not counting what the first stage drafts."""
    draft: Annotated[int, Meta(ge=0, le=MAX_DRAFT)]
    codec: Codec
    choice: Choice | None
    """None: log-probabilities are asked for instead of bytes."""
    hops: Annotated[list[Hop], Meta(max_length=MAX_STAGES)]


class Emit(Message, frozen=True, tag="emit"):
    """Find all hidden bytes of this text at once, each block a little more (denoise models).

    The body holds z, the noisy code of the next byte at every position; the first stage gets none
    and draws it from `seed` where `hidden` says so. Nothing is remembered.
    """

    session: Secret
    number: Count
    gateway: Secret
    route: Annotated[list[Place], Meta(max_length=MAX_STAGES)]
    tokens: Tokens
    """Known bytes, and MASK where nobody knows yet."""
    span: tuple[Count, Count]
    """Positions [start, end) that see each other and predict the bytes after them."""
    choice: Choice
    codec: Codec
    watch: bool
    """Whether every stage should also tell the gateway what it would say now (Sight)."""
    hops: Annotated[list[Hop], Meta(max_length=MAX_STAGES)]


class Sight(Message, frozen=True, tag="sight"):
    """So the text looks after my blocks, though it is not finished."""

    session: Secret
    number: Count
    stage: WorkerId
    bytes: Bytes


class Answer(Message, frozen=True, tag="answer"):
    """This is what comes next.

    For a Step with a choice: `bytes` has one byte for each wanted row and each drafted one. Without
    a choice the body holds the log-probabilities of these rows, as fp32. For an Emit: one byte
    and one log-probability for every position of the span.
    """

    session: Secret
    number: Count
    drafted: Bytes
    bytes: Bytes
    logs: Annotated[list[float], Meta(max_length=MAX_TOKENS)]
    """Natural log of the model's own probability (before temperature) of each of `bytes`."""
    hops: Annotated[list[Hop], Meta(max_length=MAX_STAGES)]


class Trouble(Message, frozen=True, tag="trouble"):
    """I cannot take this traversal further, and this is why."""

    session: Secret
    number: Count
    reason: Literal["forgotten", "unreachable", "busy", "wrong"]
    """forgotten: I miss the history before `start`. unreachable: the next stage does not answer.
    busy: there is no room for one more session. wrong: this step cannot be."""
    stage: WorkerId
    """The stage that is to blame: for `unreachable` the next one, else myself."""
    words: Sentence


class Forget(Message, frozen=True, tag="forget"):
    """This text is done; you need not remember it."""

    session: Secret


class Refusal(Message, frozen=True, tag="refusal"):
    """I will not talk to you, and this is why."""

    words: Sentence


class Announce(Message, frozen=True, tag="announce"):
    """I serve these blocks here, and I will say so again soon.

    Said over HTTP to a coordinator or a gateway (POST {base}/v1/stages), signed by the stage's key.
    """

    place: Place
    holding: Holding
    sessions: Count
    room: Count
    leaving: bool = False
    word: Secret | None = None
    """The one that this list gave me last; each is good once, so that nobody can say this again."""


class Heard(Message, frozen=True, tag="heard"):
    """I have heard your announcement; say this word with the next one."""

    word: Secret
    taken: bool
    """False: your word was an old one and nothing has changed; say it again with this one."""


class Stages(Message, frozen=True, tag="stages"):
    """These stages announced themselves and have not gone (GET {base}/v1/stages)."""

    stages: Annotated[list[Announce], Meta(max_length=4096)]


class Banned(Message, frozen=True, tag="banned"):
    """These may have papers still, but are members no more (GET {base}/v1/banned)."""

    members: Annotated[list[WorkerId], Meta(max_length=MAX_BANNED)]


class Publish(Message, frozen=True, tag="publish"):
    """All stages shall serve this checkpoint: I am the owner (POST {base}/v1/served)."""

    which: Literal["newest"]


SAID = Greeting | Welcome | Ping | Pong | Step | Emit | Sight | Answer | Trouble | Forget | Refusal
"""What may come in a frame."""
