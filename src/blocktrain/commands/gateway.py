"""blocktrain gateway: a model over its stages, for people and programs."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from blocktrain.commands.listen import Listen, listening, serve
from blocktrain.commands.logs import log_as
from blocktrain.console import PLAIN, Out, Output, print_json
from blocktrain.errors import BadInput
from blocktrain.inference.pipeline import Pipeline, Source
from blocktrain.services.belonging import Belonging, Pass, belong, watch_banned, watch_served
from blocktrain.services.gateway.app import Gateway, House
from blocktrain.services.gateway.keys import Keys
from blocktrain.services.gateway.openai import Offer
from blocktrain.services.papers import keep_papers
from blocktrain.terms import Digest
from blocktrain.wire.registry import Registry
from blocktrain.wire.serving import Announce


@dataclass(frozen=True)
class At(Listen):
    """Where the gateway listens and where its stages are."""

    port: int = 8080
    """0 is any free one."""
    authority: Path | None = None
    """Folder of the network's authority, for --tls auto."""
    stages: str = ""
    """host:port,host:port: the stages; without, they announce themselves."""
    open: bool = False
    """Anybody may ask, without an API key."""
    log: Literal["text", "json"] = "text"
    """How to log: text for people, json for machines."""


BY, AT, OFFER = Pass(), At(), Offer()


def gateway(
    model: str,
    *,
    by: Annotated[Pass, Parameter(name="*")] = BY,
    name: str = "blocktrain",
    at: Annotated[At, Parameter(name="*")] = AT,
    offer: Annotated[Offer, Parameter(name="*")] = OFFER,
    output: Out = PLAIN,
) -> None:
    """Serve a model as OpenAI does, and a page to try it. Keys are made by: blocktrain keys issue.

    Parameters
    ----------
    model: str
        A model directory, or a run's URL; only its manifest is read.
    name: str
        What people call the model.
    """
    log_as(at.log)
    if at.tls == "auto" and at.authority is None:
        raise BadInput("--tls auto needs the authority's folder; give --authority FOLDER.")
    mine = belong(model, by, role="gateway")
    source, registry = stages_from(at, mine)
    manifest = mine.fetch([])[1]
    papers = mine.member.papers.certificate.parent
    keys = None if at.open else Keys(papers / "keys.json")
    pipeline = Pipeline(manifest.shape, manifest.digest, *mine.member, source)
    upkeep = upkeep_of(pipeline, mine, output)
    house = House(name, offer, keys=keys, registry=registry, upkeep=upkeep)
    shown, authority = at.papers(at.authority or papers)
    with listening(at) as (sock, url):
        tell(url, authority.fingerprint if authority else None, output)
        if keys and not keys.current():
            output.say(f"Nobody has an API key yet; make one: blocktrain keys issue {papers} NAME")
        serve(Gateway(pipeline, house).app(at.base_path), sock, shown)


def stages_from(at: At, mine: Belonging) -> tuple[Source, Registry | None]:
    """Where the pipeline hears of stages, and the list that this gateway keeps itself, if any."""
    if at.stages:
        return [place.strip() for place in at.stages.split(",")], None
    if (present := mine.present) is not None:
        return lambda: asyncio.to_thread(present), None
    registry = Registry()

    async def announced() -> Sequence[Announce]:
        return registry.present(time.monotonic())

    return announced, registry


def upkeep_of(
    pipeline: Pipeline, mine: Belonging, output: Output
) -> list[Callable[[], Coroutine[None, None, None]]]:
    """What a pipeline needs as long as it is up: lasting papers, the right model and members."""

    async def follow(model: Digest) -> None:
        pipeline.follow(model)

    work: list[Callable[[], Coroutine[None, None, None]]]
    work = [partial(keep_papers, mine.renew, pipeline.renew, output.say)]
    if mine.served:
        work.append(partial(watch_served, mine.served, follow))
    if mine.banned:
        work.append(partial(watch_banned, mine.banned, pipeline.ban))
    return work


def tell(url: str, fingerprint: str | None, output: Output) -> None:
    """Where people find it."""
    if output.json:
        print_json({"url": url, "fingerprint": fingerprint})
    output.say(f"playground at {url}, OpenAI's clients at {url}/v1")


def issue(papers: Path, name: str, *, output: Out = PLAIN) -> None:
    """Make an API key. It is shown this once.

    Parameters
    ----------
    papers: Path
        The gateway's --papers folder.
    name: str
        Whose it is.
    """
    output.result({"name": name, "key": Keys(papers / "keys.json").issue(name)}, "API key")


def revoke(papers: Path, name: str, *, output: Out = PLAIN) -> None:
    """Take an API key back; it counts from the next request.

    Parameters
    ----------
    papers: Path
        The gateway's --papers folder.
    name: str
        Whose it is.
    """
    Keys(papers / "keys.json").revoke(name)
    output.result({"revoked": name}, "API key")


def keys(papers: Path, *, output: Out = PLAIN) -> None:
    """Who has an API key.

    Parameters
    ----------
    papers: Path
        The gateway's --papers folder.
    """
    found = Keys(papers / "keys.json").current()
    output.rows([{"name": entry.name, "made": entry.made} for entry in found], "API keys")
