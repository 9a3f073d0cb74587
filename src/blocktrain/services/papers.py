"""Who belongs to a serving network that has no coordinator: an authority's folder, and members'.

authority's folder      authority.key  authority.pem       stays with the owner
a member's folder       authority.pem  member.pem  member.key     goes to a host
"""

from pathlib import Path
from typing import NamedTuple

from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadKey
from blocktrain.wire.certificates import Authority, load_or_make_authority, read
from blocktrain.wire.signing import load_or_make_key
from blocktrain.wire.tls import Papers


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
    return Member(papers, read(folder / "authority.pem"))
