"""The run's own certificate authority: who is who on the run's links, with nobody else's help.

The authority and the coordinator's certificate use ECDSA P-256, not Ed25519, because people open
the dashboard with browsers. Tried with Chromium 155: an Ed25519 server ends in
ERR_SSL_VERSION_OR_CIPHER_MISMATCH, a P-256 server below an Ed25519 authority in ERR_CERT_INVALID,
and neither can be clicked away; P-256 for both gives the usual warning, and then the page opens.

Members (workers and stages) meet no browser: theirs carry the Ed25519 key of wire/signing.py, so
whoever signs an update as X is the only one who can open a link as X. Nothing is ever revoked:
certificates end, and who is banned gets no other one (services/membership.py).

wire/tls.py opens links with these certificates.
"""

import hashlib
import ipaddress
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadInput, BadKey
from blocktrain.wire.signing import is_id
from blocktrain.wire.tls import MAX_PEM, MEMBER_URI, Papers, member_host

AUTHORITY_LIFE = timedelta(days=3653)  # longer than a run: a new one has a new fingerprint
SERVER_LIFE = timedelta(days=397)
MEMBER_LIFE = timedelta(days=30)
RENEW_BEFORE = timedelta(days=30)  # of the server's
BACKDATED = timedelta(hours=14)  # a clock that takes local time for UTC is off by up to 14 hours
LABEL = "(?!-)[a-z0-9_-]{1,63}(?<!-)"
HOST = re.compile(rf"(?=.{{1,253}}\Z)({LABEL}\.)*(?!\d+\Z){LABEL}")
SERVES, ASKS = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
# A key proves who its holder is (the first flag) or signs certificates and their lists (6, 7).
PROVES = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
CERTIFIES = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
UNUSABLE = (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm)

Public = ec.EllipticCurvePublicKey | Ed25519PublicKey


@dataclass(frozen=True)
class Authority:
    """Whoever holds this says who belongs to the run."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def pem(self) -> bytes:
        """The certificate, for everybody to see."""
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def fingerprint(self) -> str:
        """The sha256 by which a stranger knows this authority."""
        return hashlib.sha256(self.certificate.public_bytes(Encoding.DER)).hexdigest()

    def server_certificate(
        self, hosts: Sequence[str], folder: Path, now: datetime | None = None
    ) -> Papers:
        """The coordinator's papers in that folder; new ones if these end soon or name others."""
        now = now or datetime.now(UTC)
        papers = server_papers(folder)
        with suppress(BadKey, *UNUSABLE):  # whatever is wrong, new ones are right
            body = read(papers.certificate)
            old = x509.load_pem_x509_certificate(body)
            old.verify_directly_issued_by(self.certificate)
            named = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            if (
                old.public_key() == read_key(papers.key).public_key()
                and set(named) == set(names_of(hosts))
                and old.not_valid_before_utc <= now < old.not_valid_after_utc - RENEW_BEFORE
                and body == old.public_bytes(Encoding.PEM) + self.pem
            ):
                return papers
        return self.issue_server(hosts, folder, now)

    def issue_server(
        self, hosts: Sequence[str], folder: Path, now: datetime | None = None
    ) -> Papers:
        """New papers for a server that is reached under these names and addresses.

        The key is made once and kept, so that key and certificate match even after kill -9.
        """
        names = names_of(hosts)
        papers = server_papers(folder)
        with suppress(BadKey):  # there is one already
            write_key(ec.generate_private_key(ec.SECP256R1()), papers.key)
        now = now or datetime.now(UTC)
        blank = self.blank("BlockTrain coordinator", read_key(papers.key).public_key(), now)
        leaf = self.sign(blank, names, [SERVES], now + SERVER_LIFE)
        with errors_are_clear(papers.certificate):
            write_atomically(papers.certificate, leaf + self.pem)
        return papers

    def issue_member(
        self, worker: str, life: timedelta = MEMBER_LIFE, now: datetime | None = None
    ) -> bytes:
        """A certificate, as PEM, for the holder of this id's key: it may ask and it may serve.

        An id is a public key, so no request is needed: to anybody else the certificate is useless.
        """
        if not is_id(worker):
            raise BadInput("A worker's id must be the 64 lower-case hex digits of its public key.")
        now = now or datetime.now(UTC)
        blank = self.blank(worker, Ed25519PublicKey.from_public_bytes(bytes.fromhex(worker)), now)
        uri = x509.UniformResourceIdentifier(MEMBER_URI + worker)
        return self.sign(
            blank, [uri, x509.DNSName(member_host(worker))], [ASKS, SERVES], now + life
        )

    def blank(self, name: str, public: Public, now: datetime) -> x509.CertificateBuilder:
        """A certificate that names its holder and this authority."""
        if now >= self.certificate.not_valid_after_utc:
            raise BadKey(
                "This run's certificate authority has expired; check the clock, or move "
                "authority.key and authority.pem away for a new one with a new fingerprint."
            )
        key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        return (
            certificate_of(name, public, now)
            .issuer_name(self.certificate.subject)
            .add_extension(key_id, critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(PROVES, critical=True)
        )

    def sign(
        self,
        blank: x509.CertificateBuilder,
        names: Sequence[x509.GeneralName],
        uses: Sequence[x509.ObjectIdentifier],
        until: datetime,
    ) -> bytes:
        """The certificate as PEM, for these names and uses. It does not outlive its authority."""
        signed = (
            blank.add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .not_valid_after(min(until, self.certificate.not_valid_after_utc))
            .sign(self.key, hashes.SHA256())
        )
        return signed.public_bytes(Encoding.PEM)


def make_authority(folder: Path, run_name: str, now: datetime | None = None) -> Authority:
    """A new authority, kept in that folder. One that is there is never overwritten."""
    key_path, path = folder / "authority.key", folder / "authority.pem"
    made = authority_of(ec.generate_private_key(ec.SECP256R1()), run_name, now)
    write_key(made.key, key_path)
    try:
        write_new(path, made.pem, 0o644)
    except BaseException:
        key_path.unlink()  # half an authority would be in the way of a whole one
        raise
    return made


def load_or_make_authority(folder: Path, run_name: str) -> Authority:
    """The authority kept in that folder; a new one, kept from now on, if there is none.

    A key alone was left by kill -9, and nobody has seen its certificate: it gets another one.
    """
    key_path, path = folder / "authority.key", folder / "authority.pem"
    if not path.exists():
        with suppress(BadKey):  # there is one already
            write_key(ec.generate_private_key(ec.SECP256R1()), key_path)
        write_new(path, authority_of(read_key(key_path), run_name).pem, 0o644)
    return load_authority(folder)


def authority_of(
    key: ec.EllipticCurvePrivateKey, run_name: str, now: datetime | None = None
) -> Authority:
    """The authority that a key makes: it says itself who it is."""
    now = now or datetime.now(UTC)
    name = f"BlockTrain {run_name}".encode(errors="replace")[:64].decode(errors="ignore")
    certificate = (
        certificate_of(name, key.public_key(), now)
        .issuer_name(common_name(name))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(CERTIFIES, critical=True)
        .not_valid_after(now + AUTHORITY_LIFE)
        .sign(key, hashes.SHA256())
    )
    return Authority(key, certificate)


def load_authority(folder: Path) -> Authority:
    """The authority kept in that folder."""
    key, path = read_key(folder / "authority.key"), folder / "authority.pem"
    body = read(path)
    try:
        certificate = x509.load_pem_x509_certificate(body)
        certificate.verify_directly_issued_by(certificate)
        if certificate.public_key() != key.public_key():
            raise ValueError("of another key")
    except UNUSABLE:
        raise BadKey(
            f"{path} is not the certificate of the authority.key beside it; restore them both."
        ) from None
    return Authority(key, certificate)


def end_of_member(certificate: bytes, authority: bytes, id: str) -> datetime:
    """When a member's certificate ends, if it is one: of this authority, for the key of this id."""
    try:
        leaf = x509.load_pem_x509_certificate(certificate)
        leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
        key = leaf.public_key()
        if not isinstance(key, Ed25519PublicKey) or key.public_bytes_raw().hex() != id:
            raise ValueError("of another key")
    except UNUSABLE:
        raise BadKey(
            "The coordinator's certificate for this member is not one; tell the run's owner."
        ) from None
    return leaf.not_valid_after_utc


def certificate_of(name: str, public: Public, now: datetime) -> x509.CertificateBuilder:
    """What all certificates have in common."""
    return (
        x509.CertificateBuilder()
        .subject_name(common_name(name))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def common_name(name: str) -> x509.Name:
    """The whole subject of a certificate; a name has at most 64 bytes."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def names_of(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Names and addresses as a certificate carries them."""
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(host.lower() for host in hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if not HOST.fullmatch(host):
                raise BadInput(
                    f"{host!r} is no host; write a name in ASCII or an address, without a port."
                ) from None
            names.append(x509.DNSName(host))
    if not names:
        raise BadInput("A server's certificate must name at least one host.")
    return names


def server_papers(folder: Path) -> Papers:
    """Where the coordinator's papers are kept."""
    return Papers(folder / "server.pem", folder / "server.key")


def write_key(key: ec.EllipticCurvePrivateKey, path: Path) -> None:
    """Writes the key, for its owner's eyes only."""
    write_new(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)


def write_new(path: Path, body: bytes, mode: int) -> None:
    """Writes a file that is not there yet: of several writers one wins."""
    with errors_are_clear(path):
        try:
            write_atomically(path, body, mode, replace=False)
        except FileExistsError:
            raise BadKey(f"There is {path} already; use it, or move it away.") from None


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key in a file that nobody else can read."""
    body = read(path, secret=True)
    key = None
    with suppress(*UNUSABLE):
        key = load_pem_private_key(body, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadKey(f"{path} holds no ECDSA key; restore it, or move it away for a new one.")
    return key


def read(path: Path, secret: bool = False) -> bytes:
    """A small file; a secret one must be closed to others."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            body = file.read(MAX_PEM)
    except OSError as error:
        raise BadKey(f"{path} cannot be read ({error.strerror}); restore it.") from None
    if secret and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadKey(f"The key {path} is open to others; close it with: chmod 600 {path}.")
    return body
