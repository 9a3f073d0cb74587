"""How a stage or a gateway belongs to a network: by a run's token, or by papers from an owner.

Either way it has papers for its links, a model of which it may open some blocks, and, where
somebody keeps a list of stages, a way to read it and to stand on it.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import platformdirs

from blocktrain.aggregation.versions import signed_by
from blocktrain.disk import errors_are_clear, lock
from blocktrain.errors import BadInput, BlockTrainError
from blocktrain.learning.files import Manifest, read_manifest
from blocktrain.services.announcing import Voice
from blocktrain.services.follow import fetch_blocks, manifest_of
from blocktrain.services.membership import become_member
from blocktrain.services.papers import Member, Watched, member_in
from blocktrain.terms import Digest, Progress, silent
from blocktrain.wire.link import Link
from blocktrain.wire.serving import Announce, Heard, Stages
from blocktrain.wire.signing import Key, load_key
from blocktrain.wire.tls import client_context, trust_by_fingerprint

PATIENCE = 3.0  # seconds for one announcement or one look at a list; the next one follows
FOLLOW_EVERY = 5.0  # seconds between two questions which checkpoint is served, and who is banned
PATH = "v1/stages"


@dataclass(frozen=True)
class Pass:
    """What lets a host in: papers with a model directory, a token with a run's URL."""

    papers: Path | None = None
    """A member's folder (see admit), for a model directory."""
    token: str | None = None
    """What the run's owner gave you, for a run's URL."""
    fingerprint: str | None = None
    """Of the run's certificate authority, as its coordinator prints it (--tls auto)."""
    folder: Path | None = None
    """Where a run's member keeps its identity and its blocks; one folder is one member."""


@dataclass(frozen=True)
class Belonging:
    """A host that has been let in."""

    member: Member
    key: Key
    fetch: Callable[[Collection[int]], tuple[Path, Manifest]]
    """A model directory that holds at least these blocks, and what it says about itself."""
    announce: Callable[[Announce], object] | None
    """Stands on the list for some seconds; None: nobody keeps one."""
    present: Callable[[], Sequence[Announce]] | None
    """Who stands on the list."""
    served: Callable[[], Digest] | None
    """Which model all of them serve now; None: always the same."""
    banned: Callable[[], Collection[str]] | None
    """Who is a member no more, though his papers live on; None: nobody says."""
    renew: Callable[[], bool]
    """Sees to it that its papers do not end; True if there are new ones, which are to be loaded."""
    close: Callable[[], None]
    """Hangs up, and lets others live in its folder."""


def belong(
    to: str,
    by: Pass,
    listed: str | None = None,
    progress: Progress = silent,
    role: Literal["stage", "gateway"] = "stage",
) -> Belonging:
    """Goes in: to a run by its URL, or to a model directory, where `listed` may keep the list."""
    if to.startswith(("http://", "https://")):
        home = Path(platformdirs.user_data_dir("blocktrain")) / role
        return to_run(to, replace(by, folder=by.folder or home), progress)
    if by.papers is None:
        raise BadInput("A model directory is served with --papers FOLDER; see: blocktrain admit.")
    member = member_in(by.papers)
    alone = live_alone(by.papers, "--papers")
    key, folder = load_key(member.papers.key), Path(to)

    def fetch(blocks: Collection[int]) -> tuple[Path, Manifest]:
        return folder, read_manifest(folder)

    announce = present = None
    if listed is not None:
        trusted = client_context(member.authority_pem) if listed.startswith("https") else None
        link = Link(listed, verify=trusted, patience=PATIENCE)
        alone.callback(link.close)
        announce = Voice(lambda said: link.say(PATH, signed_by(key, said, "announce"), Heard))
        present = lambda: link.ask(PATH, Stages).stages  # noqa: E731
    return Belonging(
        member,
        key,
        fetch,
        announce=announce,
        present=present,
        served=None,
        banned=None,
        renew=Watched(member).renew,
        close=alone.close,
    )


def to_run(url: str, by: Pass, progress: Progress) -> Belonging:
    """Joins a run, which has papers, blocks and a list."""
    if by.token is None:
        raise BadInput("A run lets in whoever has a token; ask its owner, and give --token.")
    assert by.folder
    with errors_are_clear(by.folder):
        by.folder.mkdir(parents=True, exist_ok=True)
    alone = live_alone(by.folder, "--folder")
    trusted = trust_by_fingerprint(url, by.fingerprint) if by.fingerprint else None
    link = Link(url, verify=trusted, patience=PATIENCE)
    alone.callback(link.close)
    joined = become_member(link, by.token, by.folder)
    return Belonging(
        Member(joined.papers, joined.authority),
        joined.key,
        lambda blocks: fetch_blocks(joined, blocks, progress),
        announce=joined.announce,
        present=joined.stages,
        served=lambda: manifest_of(joined.charter, joined.checkpoint()).digest,
        banned=joined.banned,
        renew=joined.renew,
        close=alone.close,
    )


def live_alone(folder: Path, option: str) -> ExitStack:
    """Keeps others out until the end: two with one key would look like one that jumps about."""
    ends, why = ExitStack(), f"Another stage or gateway runs with {folder}; give another {option}."
    with suppress(OSError):  # papers may lie where nothing can be written
        ends.callback(os.close, lock(folder / "in-use.lock", why))
    return ends


async def watch_served(
    served: Callable[[], Digest], moved: Callable[[Digest], Awaitable[None]]
) -> None:
    """Tells which model all of them serve, whenever that has changed, until it is cancelled."""
    last: Digest | None = None
    while True:
        with suppress(BlockTrainError):  # whoever says so is gone for a while: nothing changes
            now = await asyncio.to_thread(served)
            if now != last:
                await moved(now)
            last = now
        await asyncio.sleep(FOLLOW_EVERY)


async def watch_banned(
    banned: Callable[[], Collection[str]], ban: Callable[[Collection[str]], None]
) -> None:
    """Tells who is a member no more, again and again, until it is cancelled."""
    while True:
        with suppress(BlockTrainError):  # whoever says so is gone for a while: nothing changes
            ban(await asyncio.to_thread(banned))
        await asyncio.sleep(FOLLOW_EVERY)
