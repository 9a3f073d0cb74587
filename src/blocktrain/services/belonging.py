"""How a stage or a gateway belongs to a network: by a run's token, or by papers from an owner.

Either way it has papers for its links, a model of which it may open some blocks, and, where
somebody keeps a list of stages, a way to read it and to stand on it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from blocktrain.aggregation.versions import signed_by
from blocktrain.errors import BadInput
from blocktrain.learning.files import Manifest, read_manifest
from blocktrain.services.follow import fetch_blocks
from blocktrain.services.membership import become_member
from blocktrain.services.papers import Member, member_in
from blocktrain.terms import Progress, silent
from blocktrain.wire.link import Link
from blocktrain.wire.messages import Done
from blocktrain.wire.serving import Announce, Stages
from blocktrain.wire.signing import Key, load_key
from blocktrain.wire.tls import client_context, trust_by_fingerprint

PATIENCE = 3.0  # seconds for one announcement or one look at a list; the next one follows
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


def belong(to: str, by: Pass, listed: str | None = None, progress: Progress = silent) -> Belonging:
    """Goes in: to a run by its URL, or to a model directory, where `listed` may keep the list."""
    if to.startswith(("http://", "https://")):
        return to_run(to, by, progress)
    if by.papers is None:
        raise BadInput("A model directory is served with --papers FOLDER; see: blocktrain admit.")
    member = member_in(by.papers)
    key, folder = load_key(member.papers.key), Path(to)

    def fetch(blocks: Collection[int]) -> tuple[Path, Manifest]:
        return folder, read_manifest(folder)

    if listed is None:
        return Belonging(member, key, fetch, None, None)
    trusted = client_context(member.authority_pem) if listed.startswith("https") else None
    link = Link(listed, verify=trusted, patience=PATIENCE)
    return Belonging(
        member,
        key,
        fetch,
        lambda said: link.say(PATH, signed_by(key, said, "announce"), Done),
        lambda: link.ask(PATH, Stages).stages,
    )


def to_run(url: str, by: Pass, progress: Progress) -> Belonging:
    """Joins a run, which has papers, blocks and a list."""
    if by.token is None:
        raise BadInput("A run lets in whoever has a token; ask its owner, and give --token.")
    home = by.folder or Path(platformdirs.user_data_dir("blocktrain")) / "stage"
    trusted = trust_by_fingerprint(url, by.fingerprint) if by.fingerprint else None
    joined = become_member(Link(url, verify=trusted, patience=PATIENCE), by.token, home)
    return Belonging(
        Member(joined.papers, joined.authority),
        joined.key,
        lambda blocks: fetch_blocks(joined, blocks, progress),
        joined.announce,
        joined.stages,
    )
