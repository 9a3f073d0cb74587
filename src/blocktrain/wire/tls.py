"""Links that know who is at the other end: contexts for TLS, and how to trust by a fingerprint.

wire/certificates.py makes what is shown here.
"""

import hashlib
import re
import socket
import ssl
from base64 import b64encode
from contextlib import suppress
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from threading import Timer
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httpx

from blocktrain.errors import BadInput, BadKey, NotAllowed, Unreachable
from blocktrain.wire.signing import PublicId, is_id
from blocktrain.wire.transport import proxy_for

MAX_PEM = 16 * 1024  # bytes of a file or an answer; an authority's certificate has about 600
AUTHORITY_PATH = "/v1/authority"  # where the coordinator shows Authority.pem to everybody
MEMBER_URI = "blocktrain:worker:"


class Papers(NamedTuple):
    """What one shows to prove who one is: a certificate's file and its key's file."""

    certificate: Path
    key: Path


def server_context(
    certificate: Path, key: Path, authority_pem: bytes | None = None, require_clients: bool = False
) -> ssl.SSLContext:
    """How to serve with these papers, ours or brought along: TLS 1.2 or 1.3, as for browsers.

    With an authority, members may show who they are. With `require_clients` they must: both ends
    are ours then, and it is TLS 1.3. A client without the right papers learns it when it first
    reads; its handshake is over before ours.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3 if require_clients else ssl.TLSVersion.TLSv1_2
    show(context, Papers(certificate, key))
    if authority_pem is not None:
        trust(context, authority_pem)
        context.verify_mode = ssl.CERT_REQUIRED if require_clients else ssl.CERT_OPTIONAL
        context.num_tickets = 0  # papers are checked on every link, not remembered from an old one
    elif require_clients:
        raise ValueError("clients are checked against an authority: give its certificate")
    return context


def client_context(authority_pem: bytes, member: Papers | None = None) -> ssl.SSLContext:
    """How to reach whoever has papers from this authority, and nobody else; TLS 1.3.

    The name is always checked: the coordinator's host, or a stage's `member_host`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # this checks certificate and name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    trust(context, authority_pem)
    if member:
        show(context, member)
    return context


def show(context: ssl.SSLContext, papers: Papers) -> None:
    """Lets a context prove who we are."""
    try:
        # No password: without this, OpenSSL would ask for one on the terminal and wait.
        context.load_cert_chain(*papers, password="")
    except OSError as error:  # ssl.SSLError is one
        raise BadKey(
            f"{papers.certificate} with {papers.key} cannot be used ({error.strerror}); give a "
            "certificate and its own key, in PEM and without a password."
        ) from None


def trust(context: ssl.SSLContext, authority_pem: bytes) -> None:
    """Makes one authority's certificate the context's sole anchor."""
    try:
        context.load_verify_locations(cadata=der_of(authority_pem))
    except (ValueError, ssl.SSLError):
        raise BadKey("The authority's certificate is damaged; fetch it again.") from None


def der_of(pem: bytes) -> bytes:
    """The one certificate in there, or ValueError."""
    return ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))


def member_host(worker: str) -> str:
    """The name to expect of a stage instead of its host's, so that the handshake checks its id.

    A part of a host's name has at most 63 letters, one fewer than an id.
    """
    return f"{worker[:32]}.{worker[32:]}.blocktrain.internal"


def peer_id(link: ssl.SSLSocket | ssl.SSLObject) -> PublicId | None:
    """Who the other side has proved to be; None if it showed nothing, or is no member."""
    seen = link.getpeercert() or {}  # None: showed nothing; empty: showed what was not checked
    names = cast(tuple[tuple[str, str], ...], seen.get("subjectAltName", ()))
    uris = [name for kind, name in names if kind == "URI" and name.startswith(MEMBER_URI)]
    id = uris[0].removeprefix(MEMBER_URI) if len(uris) == 1 else ""
    return PublicId(id) if is_id(id) else None


def parse_fingerprint(text: str) -> str:
    """What people make of a fingerprint: in groups or not, in capitals or not."""
    bare = re.sub("[: ]", "", text.strip()).lower()
    if not re.fullmatch("[0-9a-f]{64}", bare):
        raise BadInput("A fingerprint must be 64 hex digits, as the coordinator prints it.")
    return bare


def anchor_from(pem: bytes, fingerprint: str) -> ssl.SSLContext:
    """How to reach the authority with this fingerprint, if this is its certificate."""
    expected = parse_fingerprint(fingerprint)
    with suppress(ValueError):
        if hashlib.sha256(der_of(pem)).hexdigest() == expected:
            return client_context(pem)
    raise NotAllowed(
        "The coordinator's fingerprint is another one, so this may be somebody else; compare it "
        "with the one that the run's owner gives you."
    )


def trust_by_fingerprint(url: str, fingerprint: str, timeout: float = 10.0) -> ssl.SSLContext:
    """How to reach the coordinator at this address, knowing only its authority's fingerprint.

    The authority's certificate is fetched from the coordinator without any trust, compared, and
    becomes the sole anchor. It is in the handshake too, but only Python 3.13 shows it there. The
    links made with this context then fail unless the certificate of whoever answers is from this
    authority and for this host.
    """
    parse_fingerprint(fingerprint)  # a typing error needs no connection
    return anchor_from(fetch_authority(url, timeout), fingerprint)


def fetch_authority(url: str, timeout: float) -> bytes:
    """What somebody at this address says is the authority's certificate. Nothing is checked."""
    try:
        parts = urlsplit(url)
        host, port, path = parts.hostname, parts.port, parts.path.rstrip("/") + AUTHORITY_PATH
    except ValueError:
        host = None
    if not host or parts.scheme != "https" or not re.fullmatch("[!-~]+", url):
        raise BadInput(f"{url!r} shows no fingerprint; give an address that starts with https://.")
    blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    blind.check_hostname = False
    blind.verify_mode = ssl.CERT_NONE
    proxy = proxy_for(url)
    place = (proxy.url.host, proxy.url.port or 80) if proxy else (host, port or 443)
    connection = HTTPSConnection(*place, timeout=timeout, context=blind)
    if proxy:
        connection.set_tunnel(host, port or 443, passage(proxy))
    try:
        connection.connect()
        clock = Timer(timeout, hang_up, [connection.sock])
        clock.start()
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read(MAX_PEM)
        finally:
            clock.cancel()
    except (OSError, HTTPException, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no proper answer"  # never the stranger's words
        raise Unreachable(f"{url} does not answer ({why}); check the address.") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise NotAllowed(
            f"{url} shows no authority; join without a fingerprint, or check the address."
        )
    return body


def passage(proxy: httpx.Proxy) -> dict[str, str]:
    """What a proxy wants to see before it opens a way."""
    if proxy.raw_auth is None:
        return {}
    return {"Proxy-Authorization": "Basic " + b64encode(b":".join(proxy.raw_auth)).decode()}


def hang_up(link: socket.socket) -> None:
    """Ends a connection. Its own timeout is for each read: a byte now and then would hold us."""
    with suppress(OSError):  # the other side was faster
        socket.socket.shutdown(link, socket.SHUT_RDWR)
