"""Certificates, by real handshakes: the right ones meet, all others are refused on the right side.

Every link goes over a loopback socket; `meet` tells how each side fared.
"""

import asyncio
import errno
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import PolicyBuilder, Store
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.disk import write_atomically
from blocktrain.errors import BadInput, BadKey, CannotSave, NotAllowed, Unreachable
from blocktrain.wire import certificates
from blocktrain.wire.certificates import (
    MEMBER_LIFE,
    RENEW_BEFORE,
    SERVER_LIFE,
    Authority,
    end_of_member,
    load_authority,
    load_or_make_authority,
    make_authority,
)
from blocktrain.wire.signing import WEAK, Key, PublicId, new_key, save_key
from blocktrain.wire.tls import (
    MAX_PEM,
    MEMBER_URI,
    Papers,
    anchor_from,
    client_context,
    member_host,
    parse_fingerprint,
    peer_id,
    server_context,
    trust_by_fingerprint,
)

Sentence = Callable[[BaseException], str]
NOW = datetime.now(UTC)
PATIENCE = 10.0  # seconds; a link on loopback needs some milliseconds


@dataclass(frozen=True)
class House:
    """One run's folder, its authority, and one member of it."""

    folder: Path
    authority: Authority
    member: Key

    def server(self, *hosts: str, now: datetime | None = None) -> Papers:
        return self.authority.server_certificate(
            hosts or ("localhost", "127.0.0.1"), self.folder, now
        )

    def papers(self, key: Key, pem: bytes) -> Papers:
        """The files of a member that keeps its key where this house keeps everything."""
        papers = Papers(self.folder / f"{key.id}.pem", self.folder / f"{key.id}.key")
        if not papers.key.exists():
            save_key(key, papers.key)
        papers.certificate.write_bytes(pem)
        return papers

    def of_member(self, key: Key | None = None, now: datetime | None = None) -> Papers:
        key = key or self.member
        return self.papers(key, self.authority.issue_member(key.id, now=now))


@pytest.fixture
def house(tmp_path: Path) -> House:
    (tmp_path / "ours").mkdir()
    return House(tmp_path / "ours", make_authority(tmp_path / "ours", "first run"), new_key())


@pytest.fixture
def stranger(tmp_path: Path) -> House:
    """Another run: of the same name, but with its own authority."""
    (tmp_path / "theirs").mkdir()
    return House(tmp_path / "theirs", make_authority(tmp_path / "theirs", "first run"), new_key())


@dataclass(frozen=True)
class Outcome:
    """What one side of a link got: who the other is, or why there was no link."""

    peer: PublicId | None = None
    version: str | None = None
    error: OSError | None = None
    tickets: bool = False

    @property
    def why(self) -> str:
        assert self.error is not None, "there was a link"
        return str(self.error)


def talk(raw: socket.socket, wrap: Callable[[socket.socket], ssl.SSLSocket]) -> Outcome:
    """Both sides say and hear a word: with TLS 1.3 a handshake alone proves nothing to a client."""
    raw.settimeout(PATIENCE)
    try:
        with wrap(raw) as link:
            link.sendall(b"hello")
            if link.recv(5) != b"hello":
                raise ConnectionResetError("hung up")
            ticket = link.session is not None and link.session.has_ticket
            return Outcome(peer_id(link), link.version(), None, ticket)
    except OSError as error:
        return Outcome(error=error)
    finally:
        raw.close()


def meet(
    server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost"
) -> tuple[Outcome, Outcome]:
    """A link over loopback, to whom the client thinks is `host`: (server's, client's) outcome."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(PATIENCE)
        serving = pool.submit(
            lambda: talk(
                listener.accept()[0], lambda raw: server.wrap_socket(raw, server_side=True)
            )
        )
        calling = socket.create_connection(listener.getsockname(), PATIENCE)
        asked = talk(calling, lambda raw: client.wrap_socket(raw, server_hostname=host))
        return serving.result(), asked


def mutual(house: House, papers: Papers | None = None) -> ssl.SSLContext:
    """How a stage of this house serves: only to members."""
    papers = papers or house.of_member()
    return server_context(*papers, house.authority.pem, require_clients=True)


# Who is let in


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "run_1.example.org"])
def test_a_client_reaches_its_coordinator(house: House, host: str) -> None:
    papers = house.server("localhost", "127.0.0.1", "::1", "Run_1.Example.org")
    served, asked = meet(server_context(*papers), client_context(house.authority.pem), host)
    assert (served.error, asked.error) == (None, None)
    assert (served.peer, asked.peer) == (None, None)  # a worker shows nothing; a host is no member
    assert asked.version == "TLSv1.3"


@pytest.mark.parametrize(
    "host", ["example.org", "127.0.0.2", "sub.localhost", "localhost.evil.org"]
)
def test_a_wrong_host(house: House, host: str) -> None:
    _, asked = meet(server_context(*house.server()), client_context(house.authority.pem), host)
    assert isinstance(asked.error, ssl.SSLCertVerificationError)
    assert "mismatch" in asked.why


def test_a_coordinator_of_another_authority(house: House, stranger: House) -> None:
    served, asked = meet(
        server_context(*stranger.server()), client_context(house.authority.pem), "localhost"
    )
    assert isinstance(asked.error, ssl.SSLCertVerificationError)
    assert served.error is not None


def test_browsers_may_come_with_tls_1_2_but_members_with_1_3_only(house: House) -> None:
    old = client_context(house.authority.pem, house.of_member())
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    plain = server_context(*house.server())
    assert meet(plain, old)[1].version == "TLSv1.2"
    strict = server_context(*house.server(), house.authority.pem, require_clients=True)
    assert "PROTOCOL" in meet(strict, old)[1].why.upper()
    plain.maximum_version = ssl.TLSVersion.TLSv1_2
    assert "PROTOCOL" in meet(plain, client_context(house.authority.pem))[1].why.upper()


def test_members_know_each_other(house: House) -> None:
    other = new_key()
    asking = client_context(house.authority.pem, house.of_member(other))
    served, asked = meet(mutual(house), asking, member_host(house.member.id))
    assert served.peer == other.id
    assert asked.peer == house.member.id
    assert (served.version, asked.version) == ("TLSv1.3", "TLSv1.3")
    assert not asked.tickets


def test_a_plain_server_hands_out_tickets(house: House) -> None:
    """So the test above would see one."""
    _, asked = meet(server_context(*house.server()), client_context(house.authority.pem))
    assert asked.tickets


def test_members_know_each_other_in_asyncio(house: House) -> None:
    asking = client_context(house.authority.pem, house.of_member())

    async def link() -> tuple[PublicId | None, PublicId | None]:
        seen: asyncio.Queue[PublicId | None] = asyncio.Queue()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.put_nowait(peer_id(writer.get_extra_info("ssl_object")))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=mutual(house))
        async with server:
            port = server.sockets[0].getsockname()[1]
            _, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=asking, server_hostname=member_host(house.member.id)
            )
            there = peer_id(writer.get_extra_info("ssl_object"))
            writer.close()
            with suppress(ssl.SSLError):
                await writer.wait_closed()
            return await asyncio.wait_for(seen.get(), PATIENCE), there

    assert asyncio.run(link()) == (house.member.id, house.member.id)


def test_members_may_show_who_they_are_to_a_server_that_takes_others_too(house: House) -> None:
    open_to_all = server_context(*house.server(), house.authority.pem)
    served, asked = meet(open_to_all, client_context(house.authority.pem, house.of_member()))
    assert served.peer == house.member.id
    assert asked.error is None
    served, asked = meet(open_to_all, client_context(house.authority.pem))
    assert (served.peer, served.error, asked.error) == (None, None, None)


def test_what_was_not_checked_is_nobody(house: House) -> None:
    blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    _, asked = meet(server_context(*house.of_member()), blind, member_host(house.member.id))
    assert asked.error is None
    assert asked.peer is None


@pytest.mark.parametrize(
    "uris", ["", "{0}", "worker:{0}", "{1}x", "{1}{0} {1}{0}", "{1}" + "0" * 64]
)
def test_only_one_id_in_its_place_is_an_id(house: House, uris: str) -> None:
    """Our authority issues nothing like these."""
    id, other = house.member.id, member_host(house.member.id)
    blank = house.authority.blank("odd", house.member.private.public_key(), NOW)
    names: list[x509.GeneralName] = [x509.DNSName(other)]
    for uri in uris.format(id, MEMBER_URI).split():
        names.append(x509.UniformResourceIdentifier(uri))
    odd = house.authority.sign(blank, names, [certificates.SERVES], NOW + timedelta(days=1))
    papers = house.papers(house.member, odd)
    _, asked = meet(server_context(*papers), client_context(house.authority.pem), other)
    assert (asked.peer, asked.error) == (None, None)


# Who is not


def test_a_member_is_required_and_none_comes(house: House) -> None:
    served, asked = meet(
        mutual(house), client_context(house.authority.pem), member_host(house.member.id)
    )
    assert "did not return a certificate" in served.why
    assert asked.error is not None


def test_a_member_of_another_authority(house: House, stranger: House) -> None:
    """Refused by whoever serves, and, if it serves itself, by whoever asks."""
    spy = client_context(house.authority.pem, stranger.of_member())
    served, asked = meet(mutual(house), spy, member_host(house.member.id))
    assert isinstance(served.error, ssl.SSLCertVerificationError)
    assert asked.error is not None
    asking = client_context(house.authority.pem, house.of_member())
    served, asked = meet(mutual(stranger), asking, member_host(stranger.member.id))
    assert isinstance(asked.error, ssl.SSLCertVerificationError)
    assert served.error is not None
    optional = server_context(*house.server(), house.authority.pem)
    assert isinstance(meet(optional, spy)[0].error, ssl.SSLCertVerificationError)


def test_a_member_is_nobody_else(house: House) -> None:
    """Neither another member nor the coordinator, though its certificate is in order."""
    asking = client_context(house.authority.pem, house.of_member())
    for host in (member_host(new_key().id), "localhost"):
        assert "mismatch" in meet(mutual(house), asking, host)[1].why


def test_the_coordinators_papers_make_no_member(house: House) -> None:
    asking = client_context(house.authority.pem, house.server())
    served, _ = meet(mutual(house), asking, member_host(house.member.id))
    assert "purpose" in served.why


def test_a_member_issues_nothing(house: House, tmp_path: Path) -> None:
    """It signs a certificate for somebody else and shows its own above that."""
    parent = x509.load_pem_x509_certificate(house.authority.issue_member(house.member.id))
    victim = new_key()
    forged = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, victim.id)]))
        .issuer_name(parent.subject)
        .public_key(victim.private.public_key())
        .serial_number(1)
        .not_valid_before(NOW - timedelta(days=1))
        .not_valid_after(NOW + timedelta(days=1))
    )
    for extension in x509.load_pem_x509_certificate(
        house.authority.issue_member(victim.id)
    ).extensions:
        if not isinstance(extension.value, x509.AuthorityKeyIdentifier):
            forged = forged.add_extension(extension.value, extension.critical)
    forged = forged.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(parent.public_key()),  # type: ignore[arg-type]
        critical=False,
    )
    chain = forged.sign(house.member.private, None).public_bytes(Encoding.PEM)
    papers = house.papers(victim, chain + parent.public_bytes(Encoding.PEM))
    served, _ = meet(
        mutual(house), client_context(house.authority.pem, papers), member_host(house.member.id)
    )
    assert "invalid CA certificate" in served.why


def test_a_certificate_without_its_key(house: House, sentence: Sentence) -> None:
    thief = new_key()
    papers = house.papers(thief, house.authority.issue_member(house.member.id))
    with pytest.raises(BadKey) as error:
        client_context(house.authority.pem, papers)
    sentence(error.value)


def test_what_has_expired_or_not_begun(house: House) -> None:
    trusting = client_context(house.authority.pem, house.of_member())
    long_ago = NOW - SERVER_LIFE - timedelta(minutes=1)
    soon = NOW + timedelta(hours=15)
    for now, why in ((long_ago, "expired"), (soon, "not yet valid")):
        late = house.authority.issue_server(["localhost"], house.folder, now)
        assert why in meet(server_context(*late), trusting)[1].why
    gone = client_context(
        house.authority.pem, house.of_member(now=NOW - MEMBER_LIFE - timedelta(minutes=1))
    )
    served, asked = meet(server_context(*house.server(), house.authority.pem, True), gone)
    assert "expired" in served.why
    assert asked.error is not None


def test_a_clock_that_is_slow_by_its_time_zone_is_no_reason(house: House) -> None:
    papers = house.authority.issue_server(["localhost"], house.folder, NOW + timedelta(hours=13))
    assert meet(server_context(*papers), client_context(house.authority.pem))[1].error is None


# What certificates say


def test_another_library_finds_the_servers_chain_in_order(house: House) -> None:
    """The cryptography package checks by the web's rules, without OpenSSL."""
    leaf, root = x509.load_pem_x509_certificates(
        house.server("example.org").certificate.read_bytes()
    )
    assert root == house.authority.certificate
    builder = PolicyBuilder().store(Store([root])).time(NOW)
    verifier = builder.build_server_verifier(x509.DNSName("example.org"))
    assert verifier.verify(leaf, []) == [leaf, root]
    assert timedelta(days=397) <= leaf.not_valid_after_utc - leaf.not_valid_before_utc
    assert leaf.not_valid_after_utc - leaf.not_valid_before_utc < timedelta(days=398)


def test_a_members_certificate_names_its_id(house: House) -> None:
    worker = house.member.id
    made = x509.load_pem_x509_certificate(house.authority.issue_member(worker, now=NOW))
    assert made.subject.rfc4514_string() == f"CN={worker}"
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [
        f"blocktrain:worker:{worker}"
    ]
    assert made.public_key() == house.member.private.public_key()
    assert abs(made.not_valid_after_utc - NOW - timedelta(days=30)) <= timedelta(seconds=1)
    short = house.authority.issue_member(worker, timedelta(hours=1), NOW)
    ends = x509.load_pem_x509_certificate(short).not_valid_after_utc
    assert abs(ends - NOW - timedelta(hours=1)) <= timedelta(seconds=1)


@pytest.mark.parametrize(
    "worker", ["", "x" * 64, "ab" * 31, "AB" * 32, *(y.to_bytes(32, "little").hex() for y in WEAK)]
)
def test_no_certificate_for_what_is_no_id(house: House, worker: str, sentence: Sentence) -> None:
    with pytest.raises(BadInput) as error:
        house.authority.issue_member(worker)
    sentence(error.value)


def test_a_member_knows_when_its_certificate_ends(
    house: House, stranger: House, sentence: Sentence
) -> None:
    id, pem = house.member.id, house.authority.pem
    good = house.authority.issue_member(id, now=NOW)
    assert end_of_member(good, pem, id) == NOW.replace(microsecond=0) + MEMBER_LIFE
    server = house.server().certificate.read_bytes()
    for certificate, authority, whose in [
        (good, pem, new_key().id),
        (good, stranger.authority.pem, id),
        (stranger.authority.issue_member(id), pem, id),
        (server, pem, id),
        (b"", pem, id),
        (good, b"garbage", id),
    ]:
        with pytest.raises(BadKey) as error:
            end_of_member(certificate, authority, whose)
        sentence(error.value)


def test_nothing_outlives_its_authority(house: House, sentence: Sentence) -> None:
    end = house.authority.certificate.not_valid_after_utc
    made = house.authority.issue_member(house.member.id, now=end - timedelta(days=1))
    assert x509.load_pem_x509_certificate(made).not_valid_after_utc == end
    for issue in (
        lambda: house.authority.issue_member(house.member.id, now=end),
        lambda: house.server(now=end),
    ):
        with pytest.raises(BadKey, match="expired") as error:
            issue()
        sentence(error.value)


@pytest.mark.parametrize(
    "host",
    ["", "a b", "host:80", "-a.org", "a-.org", "a..org", ".org", "*.org", "bücher.de", "[::1]",
     "10.0.0.300", "1.2.3", "a" * 64, "a." * 127 + "a", "https://a.org", "a\n", "a.org."],
)  # fmt: skip
def test_what_is_no_host(house: House, host: str, sentence: Sentence) -> None:
    with pytest.raises(BadInput) as error:
        house.server("localhost", host)
    sentence(error.value)


def test_a_server_has_a_host(house: House, sentence: Sentence) -> None:
    with pytest.raises(BadInput) as error:
        house.authority.server_certificate([], house.folder)
    sentence(error.value)


# When the coordinator gets new papers


def test_good_papers_are_kept(house: House) -> None:
    first = house.server("a.org", "10.0.0.1")
    body, key = first.certificate.read_bytes(), first.key.read_bytes()
    assert house.server("10.0.0.1", "A.org", now=NOW + SERVER_LIFE - timedelta(days=31)) == first
    assert (first.certificate.read_bytes(), first.key.read_bytes()) == (body, key)


def test_papers_that_end_soon_or_name_others_are_renewed(house: House, stranger: House) -> None:
    seen = {house.server("a.org").certificate.read_bytes()}
    later = NOW + SERVER_LIFE - RENEW_BEFORE + timedelta(days=1)  # NOW is when the tests began
    for hosts, now in [(["a.org"], later), (["a.org", "b.org"], later), (["b.org"], later),
                       (["b.org"], NOW)]:  # fmt: skip
        body = house.server(*hosts, now=now).certificate.read_bytes()
        assert body not in seen
        assert house.server(*hosts, now=now).certificate.read_bytes() == body
        seen.add(body)
    alien = stranger.authority.server_certificate(["b.org"], house.folder, NOW).certificate
    leaf = alien.read_bytes().removesuffix(stranger.authority.pem)
    for chain in (leaf + stranger.authority.pem, leaf + house.authority.pem):
        alien.write_bytes(chain)
        assert not house.server("b.org", now=NOW).certificate.read_bytes().startswith(leaf)


def test_damaged_papers_are_renewed(house: House) -> None:
    papers = house.server()
    whole = papers.certificate.read_bytes()
    leaf = whole.removesuffix(house.authority.pem)
    for body in (b"", b"garbage", whole[:100], leaf, whole):
        if body == whole:
            papers.key.unlink()  # a new one is made, and the old certificate is not for that
        papers.certificate.write_bytes(body)
        context = server_context(*house.server())
        assert meet(context, client_context(house.authority.pem))[1].error is None
        assert papers.certificate.read_bytes() != body


def test_processes_that_issue_at_once_end_with_papers_that_match(house: House) -> None:
    script = (
        "import sys; from pathlib import Path; from blocktrain.wire.certificates import *;"
        "from blocktrain.wire.tls import server_context;"
        "folder = Path(sys.argv[1]); authority = load_authority(folder); sys.stdin.readline();"
        "server_context(*authority.server_certificate(['localhost'], folder))"
    )
    command = [sys.executable, "-c", script, str(house.folder)]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for _ in range(3)]
    for child in children:
        child.communicate("go\n")
    assert [child.returncode for child in children] == [0, 0, 0]
    context = server_context(*house.server("localhost"))
    assert meet(context, client_context(house.authority.pem))[1].error is None


# Files


def test_keys_are_for_one_pair_of_eyes(house: House) -> None:
    house.server()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in house.folder.iterdir()}
    mask = os.umask(0o022)
    os.umask(mask)
    assert modes == {
        "authority.key": 0o600,
        "server.key": 0o600,
        "authority.pem": 0o644 & ~mask,
        "server.pem": 0o644 & ~mask,
    }


def test_an_authority_is_loaded_as_it_was_made(house: House) -> None:
    loaded = load_authority(house.folder)
    assert loaded.fingerprint == house.authority.fingerprint
    assert loaded.pem == (house.folder / "authority.pem").read_bytes()
    made = house.folder / "later"
    made.write_bytes(loaded.issue_member(house.member.id))
    papers = house.papers(house.member, made.read_bytes())
    served, _ = meet(
        mutual(house), client_context(loaded.pem, papers), member_host(house.member.id)
    )
    assert served.peer == house.member.id


def test_an_authority_is_never_overwritten(house: House, sentence: Sentence) -> None:
    before = {path: path.read_bytes() for path in house.folder.iterdir()}
    for left in (["authority.key", "authority.pem"], ["authority.key"], ["authority.pem"]):
        for path, body in before.items():
            path.unlink(missing_ok=True)
            if path.name in left:
                write_atomically(path, body, 0o600)
        with pytest.raises(BadKey) as error:
            make_authority(house.folder, "second run")
        sentence(error.value)
        kept = {path: path.read_bytes() for path in house.folder.iterdir()}
        assert kept == {path: body for path, body in before.items() if path.name in left}


def test_an_authority_is_made_where_there_is_none(tmp_path: Path, sentence: Sentence) -> None:
    made = load_or_make_authority(tmp_path, "run")
    assert load_or_make_authority(tmp_path, "another name").fingerprint == made.fingerprint
    (tmp_path / "authority.pem").unlink()  # killed between the two files
    whole = load_or_make_authority(tmp_path, "run")
    assert whole.key.public_key() == made.key.public_key()
    assert load_authority(tmp_path).pem == whole.pem
    (tmp_path / "authority.key").unlink()
    with pytest.raises(BadKey) as error:  # somebody may trust it: no reason for another one
        load_or_make_authority(tmp_path, "run")
    sentence(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["authority.pem"]


@pytest.mark.parametrize("name", ["", "x" * 200, "🙂" * 60, "\udcff", "CN=a,O=b\n"])
def test_a_run_may_have_any_name(tmp_path: Path, name: str) -> None:
    authority = make_authority(tmp_path, name)
    papers = authority.issue_server(["localhost"], tmp_path)
    assert meet(server_context(*papers), client_context(authority.pem))[1].error is None


def test_half_an_authority_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    def full_after_the_key(
        path: Path, body: bytes, mode: int = 0o644, replace: bool = True
    ) -> None:
        if path.suffix == ".pem":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(path, body, mode, replace)

    with monkeypatch.context() as patch:
        patch.setattr(certificates, "write_atomically", full_after_the_key)
        with pytest.raises(CannotSave) as error:
            make_authority(tmp_path, "run")
        sentence(error.value)
    assert list(tmp_path.iterdir()) == []
    make_authority(tmp_path, "run")


def test_a_folder_that_is_not_there(house: House, sentence: Sentence) -> None:
    nowhere = house.folder / "nowhere"
    with pytest.raises(CannotSave) as unsaved:
        make_authority(nowhere, "run")
    sentence(unsaved.value)
    with pytest.raises(CannotSave) as unsaved:
        house.authority.server_certificate(["localhost"], nowhere)
    sentence(unsaved.value)
    with pytest.raises(BadKey) as error:
        load_authority(nowhere)
    sentence(error.value)


def damages(house: House, stranger: House) -> Iterator[tuple[str, bytes | None, int]]:
    """(file, its new content or None for no file, its mode), each of which is an end."""
    ed25519 = house.folder / "ed25519"
    save_key(new_key(), ed25519)
    locked = house.authority.key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    key, pem = (house.folder / "authority.key").read_bytes(), house.authority.pem
    for body in (None, b"", b"garbage", key[:80], ed25519.read_bytes(), locked, pem, bytes(2**20)):
        yield "authority.key", body, 0o600
    yield "authority.key", (stranger.folder / "authority.key").read_bytes(), 0o600
    for mode in (0o640, 0o604, 0o620):
        yield "authority.key", key, mode
    leaf = house.authority.issue_member(house.member.id)
    der = bytearray(ssl.PEM_cert_to_DER_cert(pem.decode()))
    der[-1] ^= 1
    yield "authority.pem", ssl.DER_cert_to_PEM_cert(bytes(der)).encode(), 0o644
    for body in (None, b"", b"garbage", pem[:200], stranger.authority.pem, leaf, key, bytes(2**20)):
        yield "authority.pem", body, 0o644


def test_an_authority_that_cannot_be_used(
    house: House, stranger: House, sentence: Sentence
) -> None:
    for name, body, mode in damages(house, stranger):
        path = house.folder / name
        whole = path.read_bytes()
        path.unlink()
        if body is not None:
            path.write_bytes(body)
            path.chmod(mode)
        with pytest.raises(BadKey) as error:
            load_authority(house.folder)
        assert str(house.folder) in sentence(error.value)
        path.unlink(missing_ok=True)
        write_atomically(path, whole, 0o600)
    assert load_authority(house.folder).fingerprint == house.authority.fingerprint


def test_the_coordinators_key_cannot_be_used(house: House, sentence: Sentence) -> None:
    papers = house.server()
    papers.key.chmod(0o644)
    with pytest.raises(BadKey, match="chmod 600") as error:
        house.server()
    sentence(error.value)
    papers.key.chmod(0o600)
    of_another_kind = house.of_member().key.read_bytes()
    for body in (b"garbage", of_another_kind):
        papers.key.write_bytes(body)
        with pytest.raises(BadKey) as error:
            house.server()
        sentence(error.value)


def test_papers_brought_along_that_cannot_be_used(
    house: House, stranger: House, sentence: Sentence
) -> None:
    """A key with a password is refused: OpenSSL would ask for it on the terminal, and wait."""
    good = house.server()
    locked, nothing = house.folder / "locked.key", house.folder / "nothing"
    key = certificates.read_key(good.key)
    locked.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    for papers in (
        (good.certificate, locked),
        (good.certificate, stranger.server().key),
        (nothing, good.key),
        (good.certificate, nothing),
        (good.key, good.key),
    ):
        with pytest.raises(BadKey) as error:
            server_context(*papers)
        sentence(error.value)


def test_clients_are_checked_against_something(house: House) -> None:
    with pytest.raises(ValueError, match="authority"):
        server_context(*house.server(), require_clients=True)


@pytest.mark.parametrize(
    "pem", [b"", b"garbage", b"\xff" * 99, b"-----BEGIN CERTIFICATE-----\nAAAA"]
)
def test_an_anchor_that_is_none(pem: bytes, sentence: Sentence) -> None:
    with pytest.raises(BadKey) as error:
        client_context(pem)
    sentence(error.value)


# Fingerprints


def test_a_fingerprint_is_what_openssl_would_print(house: House) -> None:
    der = house.authority.certificate.fingerprint(hashes.SHA256())
    assert house.authority.fingerprint == der.hex()


@given(st.binary(min_size=32, max_size=32), st.sampled_from(["", ":", " "]), st.integers(1, 8))
def test_people_write_fingerprints_as_they_like(digest: bytes, between: str, group: int) -> None:
    parts = [digest.hex()[start : start + group] for start in range(0, 64, group)]
    text = between.join(parts)
    assert parse_fingerprint(text) == digest.hex()
    assert parse_fingerprint(f" {text.upper()}\n") == digest.hex()


@given(st.one_of(st.text(max_size=70), st.text("0123456789abcdef: ", max_size=63)))
def test_what_is_no_fingerprint(text: str) -> None:
    with pytest.raises(BadInput, match="64 hex digits"):
        parse_fingerprint(text)


@contextmanager
def coordinator(papers: Papers, answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Something that speaks HTTPS, under a base path, and answers as it is told."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that hangs up is no news."""

    context = server_context(*papers)
    with Server(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"https://localhost:{server.server_address[1]}/base"
        finally:
            server.shutdown()
            thread.join()


def showing(pem: bytes, status: int = 200) -> Callable[[BaseHTTPRequestHandler], None]:
    """Answers with this body at the authority's path, else not at all."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status if request.path == "/base/v1/authority" else 404)
        request.send_header("Content-Length", str(len(pem)))
        request.end_headers()
        request.wfile.write(pem)

    return answer


def read_from(url: str, context: ssl.SSLContext, host: str = "localhost") -> bytes:
    """The first bytes of an answer over a link made with this context."""
    port = int(url.split(":")[2].split("/")[0])
    with (
        socket.create_connection(("127.0.0.1", port), PATIENCE) as raw,
        context.wrap_socket(raw, server_hostname=host) as link,
    ):
        link.sendall(b"GET /base/v1/authority HTTP/1.0\r\n\r\n")
        return link.recv(12)


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_stranger_needs_only_the_fingerprint(house: House, slash: str) -> None:
    with coordinator(house.server(), showing(house.authority.pem)) as url:
        context = trust_by_fingerprint(url + slash, house.authority.fingerprint.upper())
        assert read_from(url, context) == b"HTTP/1.0 200"
        assert len(context.get_ca_certs()) == 1
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            read_from(url, context, "example.org")


def test_a_wrong_fingerprint(house: House, stranger: House, sentence: Sentence) -> None:
    with coordinator(house.server(), showing(house.authority.pem)) as url:
        with pytest.raises(NotAllowed) as error:
            trust_by_fingerprint(url, stranger.authority.fingerprint)
        sentence(error.value)


def test_garbage_for_a_fingerprint_is_not_even_asked_about(sentence: Sentence) -> None:
    with pytest.raises(BadInput) as error:
        trust_by_fingerprint("https://nowhere.invalid", "garbage")
    sentence(error.value)


def test_an_impostor_that_shows_the_true_authority(house: House, stranger: House) -> None:
    """Whoever is in between may pass the true certificate on; the link itself then fails."""
    with coordinator(stranger.server(), showing(house.authority.pem)) as url:
        context = trust_by_fingerprint(url, house.authority.fingerprint)
        with pytest.raises(ssl.SSLCertVerificationError):
            read_from(url, context)


def test_an_authority_smuggled_in_beside_the_true_one(house: House, stranger: House) -> None:
    """Whatever else is in the answer, nothing but what the fingerprint names is trusted.

    Refused or not depends on whether base64 ends the first certificate with a sign for padding.
    """
    ours, theirs = house.authority.pem, stranger.authority.pem
    true = house.authority.certificate.public_bytes(Encoding.DER)
    assert anchor_from(ours, house.authority.fingerprint).get_ca_certs(binary_form=True) == [true]
    for pem in (ours + theirs, ours + b"\n" + theirs):
        with suppress(NotAllowed):
            context = anchor_from(pem, house.authority.fingerprint)
            assert context.get_ca_certs(binary_form=True) == [true]
    with pytest.raises(NotAllowed):
        anchor_from(theirs + ours, house.authority.fingerprint)


@pytest.mark.parametrize("body", [b"", b"garbage", b"\xff" * 50, b"x" * (MAX_PEM + 1)])
def test_a_coordinator_that_shows_garbage(house: House, body: bytes, sentence: Sentence) -> None:
    with coordinator(house.server(), showing(body)) as url:
        with pytest.raises(NotAllowed) as error:
            trust_by_fingerprint(url, house.authority.fingerprint)
        sentence(error.value)


def test_a_coordinator_that_shows_nothing(house: House, sentence: Sentence) -> None:
    with coordinator(house.server(), showing(house.authority.pem, 404)) as url:
        with pytest.raises(NotAllowed) as error:
            trust_by_fingerprint(url, house.authority.fingerprint)
        sentence(error.value)
        with pytest.raises(NotAllowed):
            trust_by_fingerprint(url + "/elsewhere", house.authority.fingerprint)


def test_a_body_without_end_is_not_read(house: House) -> None:
    sent = 0

    def answer(request: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        request.send_response(200)
        request.send_header("Content-Length", str(2**40))
        request.end_headers()
        while sent < 2**30:
            request.wfile.write(bytes(2**16))
            sent += 2**16

    with coordinator(house.server(), answer) as url, pytest.raises(NotAllowed):
        trust_by_fingerprint(url, house.authority.fingerprint)
    assert sent < 2**26  # what fits into the sockets' buffers


@pytest.mark.parametrize("in_header", [True, False])
def test_a_byte_now_and_then_does_not_hold_us(
    house: House, in_header: bool, sentence: Sentence
) -> None:
    over = threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: 700\r\n")
        request.wfile.write(b"X: " if in_header else b"\r\n")
        while not over.wait(0.05):
            request.wfile.write(b"x")

    with coordinator(house.server(), answer) as url:
        start = time.monotonic()
        with pytest.raises((Unreachable, NotAllowed)) as error:
            trust_by_fingerprint(url, house.authority.fingerprint, timeout=0.5)
        over.set()
        sentence(error.value)
        assert time.monotonic() - start < 5


def test_a_stranger_that_speaks_no_http(house: House, sentence: Sentence) -> None:
    """Its words are not shown: they might be a terminal's commands."""
    with coordinator(house.server(), bad_words) as url:
        with pytest.raises(Unreachable) as error:
            trust_by_fingerprint(url, house.authority.fingerprint)
        assert sentence(error.value).isprintable()


def bad_words(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"\x1b[31m boo\r\n\r\n")


def test_a_stranger_that_speaks_no_tls_or_does_not_speak(sentence: Sentence) -> None:
    said: list[bytes | None] = [b"HTTP/1.0 200 OK\r\n\r\n\x1b[31m", b"", None]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            for words in said:
                with listener.accept()[0] as link:
                    link.recv(2000)
                    if words is None:
                        link.recv(2000)  # silent until the other side gives up
                    else:
                        link.sendall(words)

        thread = threading.Thread(target=serve)
        thread.start()
        for _ in said:
            with pytest.raises(Unreachable) as error:
                trust_by_fingerprint(url, "0" * 64, timeout=0.5)
            assert sentence(error.value).isprintable()
        thread.join()
    with pytest.raises(Unreachable) as error:
        trust_by_fingerprint(url, "0" * 64, timeout=0.5)
    sentence(error.value)


@pytest.mark.parametrize(
    "url",
    ["", "localhost", "http://localhost", "https://", "https://localhost:port", "https://[::1",
     "https://localhost:99999", "https://local host", "https://localhost/a\r\nX: y", "ftp://a",
     "https://localhost/ü"],
)  # fmt: skip
def test_what_is_no_address_of_a_coordinator(url: str, sentence: Sentence) -> None:
    with pytest.raises(BadInput) as error:
        trust_by_fingerprint(url, "0" * 64)
    sentence(error.value)


@pytest.mark.parametrize("host", ["nowhere.invalid", "a" * 64, "a..b"])
def test_a_host_that_nobody_knows(host: str, sentence: Sentence) -> None:
    with pytest.raises(Unreachable) as error:
        trust_by_fingerprint(f"https://{host}", "0" * 64, timeout=0.5)
    sentence(error.value)


def test_an_address_of_version_6_without_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], *_: object, **__: object) -> socket.socket:
        tried.append(address)
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(Unreachable):
        trust_by_fingerprint("https://[::1]/base", "0" * 64)
    assert tried == [("::1", 443)]
