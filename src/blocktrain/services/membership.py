"""Being a member of a run: a token once, a key for ever, and papers for links to other members.

Workers, stages and gateways all join in this way. What must be reached by others, or reach them,
also gets a certificate of the run's authority (wire/certificates.py).

FOLDER/key.pem         who this member is
FOLDER/RUN/member.pem  its certificate, and that of the authority
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import psutil

from blocktrain.aggregation import charter as charters
from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.ledger import hash_of_token
from blocktrain.aggregation.versions import signed_by
from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadInput, NotAllowed
from blocktrain.services.announcing import Voice
from blocktrain.terms import Digest
from blocktrain.wire import messages
from blocktrain.wire.certificates import end_of_member
from blocktrain.wire.link import Link
from blocktrain.wire.owner import Checkpoint
from blocktrain.wire.serving import Announce, Banned, Heard, Stages
from blocktrain.wire.signing import Key, load_or_make_key
from blocktrain.wire.tls import Papers

T = TypeVar("T")


@dataclass(frozen=True)
class Visitor:
    """Who comes, in the words of a join."""

    key: Key
    token: str
    name: str = ""
    """What people call it."""
    device: str = "cpu"
    memory: int = field(default_factory=lambda: int(psutil.virtual_memory().available))
    """Bytes that are free."""


@dataclass(frozen=True)
class Admitted:
    """What a run says to whoever it lets in."""

    run: Digest
    coordinator: str
    """Whose signature receipts and closed rounds have."""
    charter: Charter

    def folder(self, root: Path) -> Path:
        """Where a member keeps what it has of this run."""
        return root / self.run[:16]


def join(link: Link, visitor: Visitor) -> Admitted:
    """Shows the token, and learns what everyone agrees on; from then on the link is a member's."""
    hello = link.ask("v1/hello", messages.Hello)
    messages.refuse_other_protocol(hello.protocol, "the coordinator")
    said = messages.Join(
        protocol=messages.PROTOCOL,
        run=hello.run,
        worker=visitor.key.id,
        name=visitor.name,
        memory=visitor.memory,
        device=visitor.device,
        token=Digest(hash_of_token(visitor.token)),
    )
    link.bearer = visitor.token
    joined = link.say("v1/join", signed_by(visitor.key, said, "join"), messages.Joined)
    if charters.run_id(joined.charter.encode()) != hello.run:
        raise BadInput("The coordinator's charter is not that of its run; do not trust it.")
    link.bearer = joined.session
    return Admitted(hello.run, hello.coordinator, charters.decode(joined.charter))


@dataclass
class Membership:
    """One member of one run, with papers."""

    link: Link
    visitor: Visitor
    admitted: Admitted
    folder: Path
    """For what this member keeps of the run."""
    papers: Papers
    authority: bytes
    """The certificate (PEM) of the run's authority."""
    aged: datetime
    """When half of the papers' life is over."""

    def __post_init__(self) -> None:
        self.voice = Voice(self._announce)

    @property
    def key(self) -> Key:
        """By which this member signs."""
        return self.visitor.key

    @property
    def id(self) -> str:
        """By which other members know this one."""
        return self.key.id

    @property
    def charter(self) -> Charter:
        """What everyone in the run agrees on."""
        return self.admitted.charter

    def renew(self, now: datetime | None = None) -> bool:
        """Gets new papers if these are half over; True if a context must load them again."""
        now = now or datetime.now(UTC)
        if now < self.aged:
            return False
        self.certify(now)
        return True

    def certify(self, now: datetime) -> None:
        """New papers, in the same files."""
        told = self.known(lambda: self.link.ask("v1/certificate", messages.Certified))
        certificate, authority = told.certificate.encode(), told.authority.encode()
        ends = end_of_member(certificate, authority, self.id)
        with errors_are_clear(self.papers.certificate):
            write_atomically(self.papers.certificate, certificate + authority)
        self.authority, self.aged = authority, now + (ends - now) / 2

    def announce(self, announce: Announce) -> None:
        """Tells the coordinator what this member serves; to be said every second or two.

        A link of little patience is better for it: after hours of absence a patient one tries only
        once a minute, and a coordinator that is back knows of nobody until then.
        """
        self.voice(announce)

    def _announce(self, announce: Announce) -> Heard:
        said = signed_by(self.key, announce, "announce")
        return self.known(lambda: self.link.say("v1/stages", said, Heard))

    def stages(self) -> list[Announce]:
        """Who serves what, as the coordinator has heard."""
        return self.known(lambda: self.link.ask("v1/stages", Stages)).stages

    def banned(self) -> list[str]:
        """Who may have papers but is no member any more; who serves asks every few seconds."""
        return self.known(lambda: self.link.ask("v1/banned", Banned)).members

    def checkpoint(self) -> Checkpoint:
        """The one that all who serve this run serve now; who does asks again every few seconds."""
        found = self.known(lambda: self.link.ask("v1/served", Checkpoint))
        blocks = [version.block for version in found.versions]
        if found.run != self.admitted.run or blocks != [*range(len(self.charter.blocks))]:
            raise BadInput("The coordinator's checkpoint is not that of its run; do not trust it.")
        return found

    def known(self, ask: Callable[[], T]) -> T:
        """What is asked; a coordinator restored from a backup may have to be joined again."""
        try:
            return ask()
        except NotAllowed:
            self.admitted = join(self.link, self.visitor)
            return ask()


def become_member(link: Link, token: str, folder: Path, name: str = "") -> Membership:
    """Joins the run behind the link as whoever lives in this folder, and gets papers."""
    with errors_are_clear(folder):
        folder.mkdir(parents=True, exist_ok=True)
    visitor = Visitor(load_or_make_key(folder / "key.pem"), token, name)
    admitted = join(link, visitor)
    home = admitted.folder(folder)
    with errors_are_clear(home):
        home.mkdir(exist_ok=True)
    papers = Papers(home / "member.pem", folder / "key.pem")
    now = datetime.now(UTC)
    member = Membership(link, visitor, admitted, home, papers, b"", now)
    member.certify(now)
    return member
