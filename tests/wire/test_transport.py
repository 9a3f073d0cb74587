"""Links through real proxies: what they see, what is counted, and who needs none."""

import hashlib
import random
import socket
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.wire.test_link import ALIVE, Coordinator, serving

from blocktrain.config import proxy_for
from blocktrain.errors import BadConfig, NotAllowed, Unreachable
from blocktrain.terms import Digest
from blocktrain.wire.certificates import make_authority
from blocktrain.wire.link import Link
from blocktrain.wire.messages import Done
from blocktrain.wire.throttle import Moved
from blocktrain.wire.tls import client_context, trust_by_fingerprint

Sentence = Callable[[BaseException], str]
NAME = "coordinator.test"  # which only the proxy can find
BLOB = random.Random(1).randbytes(200_000)
DIGEST = Digest(hashlib.sha256(BLOB).hexdigest())
NAMES = [f"{each}_PROXY" for each in ("HTTP", "HTTPS", "ALL", "NO")]


class Proxy:
    """Opens ways for CONNECT and passes other requests on, to this machine whatever they name."""

    def __init__(self, wants: str | None = None) -> None:
        self.wants = wants
        self.asked: list[str] = []
        """First lines of requests."""
        self.lock = threading.Lock()
        self.moved = Moved()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                thread = threading.Thread(target=self.serve, args=(client,))
                self.threads.append(thread)
                thread.start()

    def serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            client.settimeout(10)
            head = b""
            while b"\r\n\r\n" not in head:
                chunk = client.recv(65536)
                if not chunk:
                    return
                self.count(sent=len(chunk))
                head += chunk
            first, _, rest = head.partition(b"\r\n")
            method, target, version = first.decode().split(" ")
            self.asked.append(f"{method} {target}")
            if self.wants and f"Proxy-Authorization: {self.wants}".encode() not in rest:
                refusal = b"HTTP/1.1 407 Name and password\r\nContent-Length: 0\r\n\r\n"
                client.sendall(refusal)
                return
            place = target.removeprefix("http://").partition("/")[0]
            with socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2]))) as server:
                if method == "CONNECT":
                    opened = b"HTTP/1.1 200 Opened\r\n\r\n"
                    self.count(received=len(opened))
                    client.sendall(opened)
                else:
                    path = target.removeprefix(f"http://{place}")
                    server.sendall(f"{method} {path} {version}\r\n".encode())
                    server.sendall(b"Connection: close\r\n" + rest)
                back = threading.Thread(target=self.pour, args=(server, client, "received"))
                back.start()
                self.pour(client, server, "sent")
                back.join()

    def pour(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with suppress(OSError):
            while chunk := source.recv(65536):
                self.count(**{way: len(chunk)})
                sink.sendall(chunk)
        for end in (source, sink):  # either side's goodbye ends it
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def count(self, sent: int = 0, received: int = 0) -> None:
        with self.lock:
            self.moved = Moved(self.moved.sent + sent, self.moved.received + received)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join()


@contextmanager
def proxy(wants: str | None = None) -> Iterator[Proxy]:
    made = Proxy(wants)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def reaching(url: str, verify: ssl.SSLContext | None = None) -> Iterator[Link]:
    link = Link(url, verify=verify, patience=0.5)
    try:
        yield link
    finally:
        link.close()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this machine are in nobody's way."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def converse(link: Link, coordinator: Coordinator, tmp_path: Path) -> None:
    """All that a link can do."""
    assert link.say("v1/alive", ALIVE, Done) == Done()
    assert link.ask("v1/hello", Done) == Done()
    link.send("v1/blobs/mine", BLOB)
    assert coordinator.blobs["mine"] == BLOB
    link.fetch("v1/blobs/mine", DIGEST, tmp_path / "mine", len(BLOB))
    assert (tmp_path / "mine").read_bytes() == BLOB


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[tuple[bytes, str, Coordinator]]:
    """A coordinator with TLS, under a name; its authority's certificate and fingerprint."""
    made = make_authority(tmp_path, "run")
    papers = made.issue_server([NAME], tmp_path)
    with serving(ssl_certfile=papers.certificate, ssl_keyfile=papers.key) as coordinator:
        yield made.pem, made.fingerprint, coordinator


def test_tls_goes_through_and_every_byte_is_counted(
    authority: tuple[bytes, str, Coordinator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem, _, coordinator = authority
    with proxy() as between:
        monkeypatch.setenv("HTTPS_PROXY", f"http://{between.address}")
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # for others
        url = f"https://{NAME}:{coordinator.port}"
        with reaching(url, client_context(pem)) as link:
            converse(link, coordinator, tmp_path)
            moved = link.moved
        assert between.asked == [f"CONNECT {NAME}:{coordinator.port}"]  # one way for all of it
    assert moved.sent == between.moved.sent > len(BLOB)
    # What the server says last (its goodbye) nobody reads.
    assert len(BLOB) < moved.received <= between.moved.received < moved.received + 100


def test_without_tls_requests_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as coordinator, proxy() as between:
        monkeypatch.setenv("http_proxy", between.address)  # as some write it
        place = f"http://{NAME}:{coordinator.port}/some/path"
        with reaching(place) as link:
            converse(link, coordinator, tmp_path)
        words = ["POST", "GET", "PUT", "GET"]
        paths = ["alive", "hello", "blobs/mine", "blobs/mine"]
        wanted = [f"{w} {place}/v1/{p}" for w, p in zip(words, paths, strict=True)]
        assert between.asked == wanted
        assert [path for path, _, _ in coordinator.said] == [
            "/some/path/v1/alive",
            "/some/path/v1/hello",
        ]


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_may_want_a_name_and_a_password(
    authority: tuple[bytes, str, Coordinator],
    monkeypatch: pytest.MonkeyPatch,
    sentence: Sentence,
    scheme: str,
) -> None:
    pem, _, coordinator = authority
    wanted = "Basic " + b64encode(b"ann:p@ss").decode()
    url = f"{scheme}://{NAME}:{coordinator.port}"
    trusted = client_context(pem) if scheme == "https" else None
    with proxy(wanted) as between, serving() as plain:
        if scheme == "http":
            url = f"http://{NAME}:{plain.port}"
        monkeypatch.setenv("ALL_PROXY", f"http://{between.address}")
        with reaching(url, trusted) as link, pytest.raises(NotAllowed) as error:
            link.ask("v1/hello", Done)
        assert "NAME:PASSWORD" in sentence(error.value)
        assert len(between.asked) == 1  # it is not tried again for hours
        monkeypatch.setenv("ALL_PROXY", f"http://ann:p%40ss@{between.address}")
        with reaching(url, trusted) as link:
            assert link.ask("v1/hello", Done) == Done()
            assert "p@ss" not in link.through
            assert "p%40ss" not in link.through


def test_a_fingerprint_is_looked_at_through_the_proxy_too(
    authority: tuple[bytes, str, Coordinator], monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    pem, fingerprint, coordinator = authority
    coordinator.authority = pem
    wanted = "Basic " + b64encode(b"ann:secret").decode()
    url = f"https://{NAME}:{coordinator.port}"
    with proxy(wanted) as between:
        monkeypatch.setenv("HTTPS_PROXY", f"http://ann:secret@{between.address}")
        with reaching(url, trust_by_fingerprint(url, fingerprint)) as link:
            assert link.ask("v1/hello", Done) == Done()
        assert between.asked == [f"CONNECT {NAME}:{coordinator.port}"] * 2
        monkeypatch.setenv("HTTPS_PROXY", f"http://{between.address}")
        with pytest.raises(Unreachable) as error:
            trust_by_fingerprint(url, fingerprint)
        sentence(error.value)


def test_a_proxy_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
    with reaching(f"http://{NAME}") as link, pytest.raises(Unreachable) as error:
        link.ask("v1/hello", Done)
    assert f"through 127.0.0.1:{port}" in sentence(error.value)


@pytest.mark.parametrize(
    "named", ["socks5://127.0.0.1:1080", "https://proxy:443", "http://", "ftp://x", "http://[::"]
)
def test_a_proxy_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, sentence: Sentence, named: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", named)
    with pytest.raises(BadConfig) as error:
        Link(f"http://{NAME}")
    assert "NO_PROXY" in sentence(error.value)
    Link("http://127.0.0.1:9").close()  # here it is not needed


@pytest.mark.parametrize(
    ("spared", "url", "straight"),
    [
        ("", "http://example.org", False),
        ("other.org", "http://example.org", False),
        ("ample.org", "http://example.org", False),
        ("example.org", "http://example.org:8765/base", True),
        (" other.org , Example.ORG ", "http://a.b.example.org", True),
        (".example.org", "http://a.example.org", True),
        ("*", "http://example.org", True),
        ("10.0.0.0/8", "http://10.1.2.3:80", True),
        ("10.0.0.0/8", "http://11.1.2.3:80", False),
        ("10.1.2.3", "http://10.1.2.3:80", True),
        ("10.0.0.0/8", "http://10.example.org", False),
        ("fd00::/8", "http://[fd00::1]:80", True),
        ("", "http://localhost:8765", True),
        ("", "http://run.localhost", True),
        ("", "http://127.8.9.10:8765", True),
        ("", "http://[::1]:8765", True),
        ("", "http://127.example.org", False),
        ("", "https://example.org", None),
    ],
)
def test_who_is_reached_straight(
    monkeypatch: pytest.MonkeyPatch, spared: str, url: str, straight: bool | None
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", spared)
    assert proxy_for(url) == (None if straight in (True, None) else "http://proxy:3128")
    if straight is None:  # no proxy is for everything unless it says so
        monkeypatch.setenv("ALL_PROXY", "http://all:3128")
        assert proxy_for(url) == "http://all:3128"
