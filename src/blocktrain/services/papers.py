"""Who belongs to a serving network that has no coordinator: an authority's folder, and members'.

authority's folder      authority.key  authority.pem       stays with the owner
a member's folder       authority.pem  member.pem  member.key     goes to a host

Papers end. Whoever serves for longer loads new ones while it does: a run's member gets them from
the coordinator, others find them in their folder, where the owner puts them.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadKey, BlockTrainError
from blocktrain.wire.certificates import Authority, end_of_member, load_or_make_authority, read
from blocktrain.wire.signing import load_key, load_or_make_key
from blocktrain.wire.tls import Papers

LOOK_EVERY = 60.0  # seconds between two looks whether there are, or must be, new papers
REMIND = timedelta(days=7)  # before papers end that only the owner can make anew


class Member(NamedTuple):
    """What a host needs to be let in, and to know others."""

    papers: Papers
    authority_pem: bytes


def authority_in(folder: Path) -> Authority:
    """The authority kept there; a new one if there is none."""
    with errors_are_clear(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return load_or_make_authority(folder, "serving")


def admit(authority: Authority, folder: Path) -> Member:
    """Makes a member of whoever holds that folder; its key is kept, its certificate is new."""
    papers = Papers(folder / "member.pem", folder / "member.key")
    with errors_are_clear(folder):
        folder.mkdir(parents=True, exist_ok=True)
    key = load_or_make_key(papers.key)
    with errors_are_clear(folder):
        write_atomically(folder / "authority.pem", authority.pem)
        write_atomically(papers.certificate, authority.issue_member(key.id))
    return Member(papers, authority.pem)


def member_in(folder: Path) -> Member:
    """The papers in a member's folder."""
    papers = Papers(folder / "member.pem", folder / "member.key")
    if not papers.certificate.is_file():
        raise BadKey(
            f"{folder} holds no member's papers; make them: blocktrain admit AUTHORITY {folder}"
        )
    member = Member(papers, read(folder / "authority.pem"))
    if (end := end_of(member)) <= datetime.now(UTC):
        raise BadKey(f"The papers in {folder} ended on {end:%Y-%m-%d}; {again(folder)}")
    return member


def end_of(member: Member) -> datetime:
    """When a member's papers end."""
    certificate, key = read(member.papers.certificate), load_key(member.papers.key)
    try:
        return end_of_member(certificate, member.authority_pem, key.id)
    except BadKey:
        folder = member.papers.certificate.parent
        why = f"What {folder} holds does not belong together"
        raise BadKey(f"{why}; {again(folder)}") from None


def again(folder: Path) -> str:
    """How to get new papers."""
    return f"make new ones: blocktrain admit AUTHORITY {folder}"


class Watched:
    """Papers in a folder where somebody may put new ones, any time."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._seen = read(member.papers.certificate)

    def renew(self) -> bool:
        """Whether there are new ones; raises when it is time for some."""
        found = read(self._member.papers.certificate)
        if found != self._seen:
            end_of(self._member)  # or they are no papers at all
            self._seen = found
            return True
        if (end := end_of(self._member)) < datetime.now(UTC) + REMIND:
            folder = self._member.papers.certificate.parent
            raise BadKey(f"The papers in {folder} end on {end:%Y-%m-%d}; {again(folder)}")
        return False


async def keep_papers(
    renew: Callable[[], bool], load: Callable[[], None], say: Callable[[str], None]
) -> None:
    """Loads new papers whenever there are some, until it is cancelled."""
    trouble = ""
    while True:
        await asyncio.sleep(LOOK_EVERY)
        try:
            if await asyncio.to_thread(renew):
                load()
            trouble = ""
        except BlockTrainError as error:
            if str(error) != trouble:  # once, not every minute
                say(str(error))
            trouble = str(error)
