"""OpenAI's completions, as far as they make sense for a model of bytes, and a little of our own.

A token is a byte here: `max_tokens`, `usage` and `logprobs` count bytes. What cannot be had is
refused by name, rather than left out in silence.
"""

import re
import secrets
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from blocktrain.errors import BadInput, BlockTrainError
from blocktrain.inference.decode import Sampling
from blocktrain.learning.model import Objective
from blocktrain.services.gateway.texts import Shown
from blocktrain.wire.serving import USUAL, Codec

Mode = Literal["ar", "exact", "speculative", "whole"]
MODES: tuple[Mode, ...] = get_args(Mode)
CODECS: tuple[Codec, ...] = get_args(Codec)
MAX_STOPS = 4
MAX_STOP = 256  # characters
MAX_TRAVERSALS = 64
DEFAULT_TOKENS = 256  # OpenAI's 16 are words' worth; 16 bytes would be two or three


@dataclass(frozen=True)
class Offer:
    """What the owner lets people ask for."""

    codec: Codec = USUAL
    """How activations travel where a request does not say."""
    max_prompt: int = 32 * 1024
    """Bytes of a prompt; the model sees the last of them, as many as its window has room for."""
    max_tokens: int = 4096
    """Bytes that one request may generate."""

    @property
    def max_body(self) -> int:
        """Bytes of a request: in JSON a byte may take six (\\u0001), and the rest needs room."""
        return 6 * self.max_prompt + 64 * 1024


class Wrong(BadInput):
    """A request that cannot be; `param` is where."""

    def __init__(self, words: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(words)
        self.param, self.code = param, code


class Options(Struct, frozen=True):
    """Of a stream."""

    include_usage: bool = False


class Ask(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may stand in a request. `null` is as good as nothing."""

    model: str | None = None
    prompt: str | list[str | int] | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: Options | None = None
    echo: bool | None = None
    logprobs: int | None = None
    user: str | None = None
    mode: Mode | None = None
    traversals: Annotated[int, Meta(ge=1, le=MAX_TRAVERSALS)] | None = None
    codec: Codec | None = None
    # What OpenAI has and we have not: allowed where it asks for nothing.
    n: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


ASK = msgspec.json.Decoder(Ask)


@dataclass(frozen=True)
class Wanted:
    """A request that can be served."""

    prompt: bytes
    sampling: Sampling
    mode: Mode
    codec: Codec
    traversals: int = 1
    """Of `whole`: more of them refine the text."""
    stops: list[bytes] = field(default_factory=list)
    stream: bool = False
    usage: bool = False
    echo: bool = False
    logs: bool = False


def parse(body: bytes, name: str, objective: Objective, offer: Offer) -> Wanted:
    """A stranger's JSON -> what is wanted, or a sentence that says what is wrong with it."""
    try:
        ask = ASK.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        where = re.search(r"\$\.(\w+)|unknown field `(\w+)`", str(error))
        param = (where[1] or where[2]) if where else None
        raise Wrong(f"The request is not understood: {str(error)[:200]}.", param) from None
    if ask.model and ask.model != name:
        raise no_model(ask.model, name)
    refuse_what_we_have_not(ask)
    length = DEFAULT_TOKENS if ask.max_tokens is None else ask.max_tokens
    if length > offer.max_tokens:
        raise Wrong(f"max_tokens is at most {offer.max_tokens} bytes; ask for less.", "max_tokens")
    mode = ask.mode or default_mode(objective)
    if mode not in modes_for(objective):
        why = "This model was not trained to find a whole text at once; use ar, exact, speculative."
        raise Wrong(why, "mode")
    return Wanted(
        prompt=prompt_of(ask, offer),
        sampling=Sampling(
            temperature=1.0 if ask.temperature is None else ask.temperature,
            top_p=1.0 if ask.top_p is None else ask.top_p,
            seed=secrets.randbelow(2**31) if ask.seed is None else ask.seed,
            length=length,
        ),
        mode=mode,
        codec=ask.codec or offer.codec,
        traversals=ask.traversals or 1,
        stops=stops_of(ask),
        stream=bool(ask.stream),
        usage=bool(ask.stream_options and ask.stream_options.include_usage),
        echo=bool(ask.echo),
        logs=ask.logprobs is not None,
    )


def default_mode(objective: Objective) -> Mode:
    """How a text is found where the request does not say."""
    return "exact" if objective == "neighbours" else "whole"


def modes_for(objective: Objective) -> tuple[Mode, ...]:
    """How texts can be found with such a model."""
    return tuple(mode for mode in MODES if mode != "whole" or objective == "denoise")


def no_model(asked: str, name: str) -> Wrong:
    """For a model that is not here."""
    told = f"There is no model {asked[:80]!r} here; ask for {name!r}."
    return Wrong(told, "model", "model_not_found")


def refuse_what_we_have_not(ask: Ask) -> None:
    """Raises for the first wish that would otherwise go unheard."""
    unheard = {
        "n": ask.n not in (None, 1),
        "best_of": ask.best_of not in (None, 1),
        "suffix": bool(ask.suffix),
        "presence_penalty": bool(ask.presence_penalty),
        "frequency_penalty": bool(ask.frequency_penalty),
        "logit_bias": bool(ask.logit_bias),
    }
    for param, there in unheard.items():
        if there:
            one = "One request gives one text" if param in ("n", "best_of") else "This is not here"
            raise Wrong(f"{one}; leave {param} out.", param)
    if ask.logprobs not in (None, 0):
        why = "Only the chosen bytes' own log-probabilities are kept; logprobs must be 0."
        raise Wrong(why, "logprobs")
    if ask.echo and ask.logprobs is not None:
        why = "The prompt's log-probabilities are not kept; leave out echo or logprobs."
        raise Wrong(why, "logprobs")


def prompt_of(ask: Ask, offer: Offer) -> bytes:
    """A text, a list of one text, or a list of bytes as numbers."""
    told = ask.prompt or ""
    if isinstance(told, list) and len(told) == 1 and isinstance(told[0], str):
        told = told[0]
    if isinstance(told, str):
        prompt = told.encode()
    elif any(not isinstance(each, int) or not 0 <= each < 256 for each in told):
        why = "A prompt is one text, or a list of bytes from 0 to 255; ask for each text by itself."
        raise Wrong(why, "prompt")
    else:
        prompt = bytes(each for each in told if isinstance(each, int))
    if len(prompt) > offer.max_prompt:
        why = f"The prompt has {len(prompt)} bytes; at most {offer.max_prompt} are taken."
        raise Wrong(why, "prompt", "context_length_exceeded")
    return prompt


def stops_of(ask: Ask) -> list[bytes]:
    """Where the text shall end."""
    told = [ask.stop] if isinstance(ask.stop, str) else ask.stop or []
    if len(told) > MAX_STOPS or any(not 1 <= len(each) <= MAX_STOP for each in told):
        why = f"There are at most {MAX_STOPS} stops of 1 to {MAX_STOP} characters; choose fewer."
        raise Wrong(why, "stop")
    return [each.encode() for each in told]


# --- answers --------------------------------------------------------------------------------------


class Logs(Struct, frozen=True):
    """Of each byte, the natural log of the model's own probability, before temperature."""

    tokens: list[str]
    token_logprobs: list[float]
    text_offset: list[int]
    top_logprobs: None = None


class Told(Struct, frozen=True):
    """The one choice of an answer, or a piece of it."""

    text: str
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: Logs | None = None
    index: int = 0


class Usage(Struct, frozen=True):
    """In bytes."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(Struct, frozen=True, omit_defaults=True):
    """An answer, or one event of a stream of them."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Told]
    usage: Usage | None = None
    blocktrain: dict[str, Any] | None = None
    """Our own report, on the last one that has a choice."""


def logs_of(shown: Shown, offset: int) -> Logs:
    """The log-probabilities of some bytes; those that are no character alone are written \\xNN."""
    tokens = [chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}" for byte in shown.bytes]
    offsets = [
        offset + len(shown.bytes[:n].decode(errors="ignore")) for n in range(len(shown.bytes))
    ]
    return Logs(tokens, shown.logs, offsets)


def models(name: str, made: int) -> dict[str, Any]:
    """The list of one model."""
    return {"object": "list", "data": [model(name, made)]}


def model(name: str, made: int) -> dict[str, Any]:
    """The model as OpenAI describes one."""
    return {"id": name, "object": "model", "created": made, "owned_by": "blocktrain"}


def error(status: int, problem: BlockTrainError) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    codes = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
    return {
        "error": {
            "message": str(problem)[:400],
            "type": kind,
            "param": getattr(problem, "param", None),
            "code": getattr(problem, "code", None) or codes.get(status),
        }
    }
