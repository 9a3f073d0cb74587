"""Links to real servers: uvicorn where all is well, raw sockets where something goes wrong."""

import hashlib
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from blocktrain.errors import (
    BadInput,
    BlobTooLarge,
    BlockTrainError,
    CannotSave,
    NotAllowed,
    OtherProtocol,
    RefusedBlob,
    TrafficSpent,
    Unreachable,
)
from blocktrain.terms import Digest
from blocktrain.wire import link as links
from blocktrain.wire.link import Link
from blocktrain.wire.messages import MAX_MESSAGE, Alive, Done, Finished, Refused, encode
from blocktrain.wire.throttle import Limits, Moved

Sentence = Callable[[BaseException], str]
Script = Callable[[socket.socket, bytes], None]

BLOB = random.Random(1).randbytes(300_000)
DIGEST = Digest(hashlib.sha256(BLOB).hexdigest())
ALIVE = Alive(worker="ab" * 32)
DONE = encode(Done())


# What the links are tried against.


class Coordinator:
    """A real HTTP server that keeps what it was sent; a stranger may change what it answers."""

    def __init__(self, **options: Any) -> None:
        self.said: list[tuple[str, bytes, dict[str, str]]] = []
        self.blobs: dict[str, bytes] = {}
        self.authority = b""
        routes = [
            Route("/v1/authority", self.show),
            Route("/v1/alive", self.hear, methods=["POST"]),
            Route("/v1/hello", self.hear),
            Route("/v1/blobs/{name}", self.take, methods=["PUT"]),
            Route("/v1/blobs/{name}", self.give),
        ]
        app = Starlette(routes=[Mount("/some/path", routes=routes), *routes])
        settings = uvicorn.Config(
            app, port=0, log_level="error", http="h11", ws="none", lifespan="off", **options
        )
        self.server = uvicorn.Server(settings)
        self.thread = threading.Thread(target=self.server.run)

    async def hear(self, request: Request) -> Response:
        self.said.append((request.url.path, await request.body(), dict(request.headers)))
        return Response(DONE, headers={"Set-Cookie": "track=you"})

    async def show(self, request: Request) -> Response:
        return Response(self.authority)

    async def take(self, request: Request) -> Response:
        self.blobs[request.path_params["name"]] = await request.body()
        return Response(DONE)

    async def give(self, request: Request) -> Response:
        return Response(self.blobs[request.path_params["name"]])

    @property
    def port(self) -> int:
        port: int = self.server.servers[0].sockets[0].getsockname()[1]
        return port


@contextmanager
def serving(**options: Any) -> Iterator[Coordinator]:
    coordinator = Coordinator(**options)
    coordinator.thread.start()
    while not coordinator.server.started:
        time.sleep(0.01)
    try:
        yield coordinator
    finally:
        coordinator.server.should_exit = True
        coordinator.thread.join()


class Scripted:
    """A raw server: one script per connection, the last one for all further connections."""

    def __init__(self, *scripts: Script, port: int = 0) -> None:
        self.scripts = list(scripts)
        self.requests: list[bytes] = []
        self.listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
                thread = threading.Thread(target=self.serve, args=(connection, script))
                self.threads.append(thread)
                thread.start()

    def serve(self, connection: socket.socket, script: Script) -> None:
        with connection, suppress(OSError):
            connection.settimeout(10)
            head = b""
            while b"\r\n\r\n" not in head:
                chunk = connection.recv(65536)
                if not chunk:
                    return
                head += chunk
            self.requests.append(head)
            script(connection, head)

    def __enter__(self) -> "Scripted":
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join()


def answer(status: str, body: bytes = b"", *headers: str) -> Script:
    """A script that gives one whole answer and hangs up."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return lambda connection, head: connection.sendall(
        "\r\n".join([*lines, "", ""]).encode() + body
    )


def cut(body: bytes, length: int, *headers: str, status: str = "200 OK") -> Script:
    """A script that announces more than it gives."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {length}", *headers]
    return lambda connection, head: connection.sendall(
        "\r\n".join([*lines, "", ""]).encode() + body
    )


def endless(connection: socket.socket, head: bytes) -> None:
    """A body in chunks that does not end until the other side hangs up."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"1000\r\n" + bytes(4096) + b"\r\n")


def hang_up(connection: socket.socket, head: bytes) -> None:
    """No answer at all."""


class Relay:
    """Stands between a link and a server, and counts what passes."""

    def __init__(self, port: int) -> None:
        self.up = self.down = self.connections = 0
        self.target = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                self.connections += 1
                far = socket.create_connection(("127.0.0.1", self.target))
                for way in ((near, far, "up"), (far, near, "down")):
                    thread = threading.Thread(target=self.pass_on, args=way)
                    self.threads.append(thread)
                    thread.start()

    def pass_on(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with source, suppress(OSError):
            while chunk := source.recv(65536):
                setattr(self, way, getattr(self, way) + len(chunk))
                sink.sendall(chunk)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    @property
    def moved(self) -> Moved:
        return Moved(self.up, self.down)

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *error: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join()


@contextmanager
def linked(url: str | int, *args: Any, **settings: Any) -> Iterator[Link]:
    link = Link(url if isinstance(url, str) else f"http://127.0.0.1:{url}", *args, **settings)
    try:
        yield link
    finally:
        link.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Coordinator]:
    with serving() as coordinator:
        yield coordinator


@pytest.fixture
def coordinator(running: Coordinator) -> Coordinator:
    running.said.clear()
    running.blobs.clear()
    return running


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pauses are a tenth of what they are elsewhere."""
    monkeypatch.setattr(links, "FIRST_PAUSE", links.FIRST_PAUSE / 10)


# All is well.


@pytest.mark.parametrize("base", ["", "/", "/some/path", "/some/path/"])
def test_messages_go_under_the_base_path(coordinator: Coordinator, base: str) -> None:
    with linked(f"http://127.0.0.1:{coordinator.port}{base}") as link:
        assert link.say("/v1/alive", ALIVE, Finished, Done) == Done()
        link.bearer = "secret"
        assert link.ask("v1/hello", Done) == Done()
    (one, body, before), (two, nothing, after) = coordinator.said
    assert (one, two) == (f"{base.rstrip('/')}/v1/alive", f"{base.rstrip('/')}/v1/hello")
    assert (body, nothing) == (encode(ALIVE), b"")
    assert "authorization" not in before
    assert after["authorization"] == "Bearer secret"
    assert "cookie" not in after  # although it was given one
    assert after["accept-encoding"] == "identity"


def test_blobs_go_and_come(coordinator: Coordinator, tmp_path: Path) -> None:
    into, seen = tmp_path / "blob", []
    (tmp_path / "source").write_bytes(BLOB)
    with linked(coordinator.port) as link:
        link.send("/v1/blobs/bytes", BLOB)
        link.send("/v1/blobs/view", memoryview(BLOB).cast("I"))
        link.send("/v1/blobs/path", tmp_path / "source")
        link.send("/v1/blobs/empty", b"")
        link.fetch(
            "/v1/blobs/view", DIGEST, into, len(BLOB), lambda done, of: seen.append((done, of))
        )
        link.fetch("/v1/blobs/empty", Digest(hashlib.sha256().hexdigest()), tmp_path / "empty", 0)
    assert coordinator.blobs == {"bytes": BLOB, "view": BLOB, "path": BLOB, "empty": b""}
    assert into.read_bytes() == BLOB
    assert (tmp_path / "empty").read_bytes() == b""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blob", "empty", "source"]
    assert seen == sorted(seen)
    assert seen[-1] == (len(BLOB), len(BLOB))


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("localhost:7000", "http://HOST"),
        ("coordinator", "http://HOST"),
        ("ftp://coordinator", "http://HOST"),
        ("http:///path", "http://HOST"),
        ("http://h\n/", "http://HOST"),
        ("http://h:99999", "http://HOST"),
        ("http://h/?q=1", "without ?"),
        ("https://me:hidden@coordinator", "leave them out"),
    ],
)
def test_a_wrong_url_is_told_how_to_be_right(url: str, advice: str, sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        Link(url)
    assert advice in sentence(caught.value)
    assert "hidden" not in str(caught.value)


def test_a_limit_of_nothing_is_refused(sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        Limits(upload=0)
    assert "upload" in sentence(caught.value)


# Downloads that go wrong.


def test_a_cut_download_goes_on_where_it_ended(tmp_path: Path) -> None:
    rest = f"Content-Range: bytes 200000-{len(BLOB) - 1}/{len(BLOB)}"
    scripts = (
        cut(BLOB[:200_000], len(BLOB)),
        answer("206 Partial Content", BLOB[200_000:], rest),
    )
    notes: list[str] = []
    with Scripted(*scripts) as server, linked(server.url) as link:
        link.note = notes.append
        link.fetch("/b", DIGEST, tmp_path / "blob", len(BLOB))
        assert len(BLOB) < link.moved.received < len(BLOB) + 1000
    assert b"Range:" not in server.requests[0]
    assert b"\r\nRange: bytes=200000-\r\n" in server.requests[1]
    assert (tmp_path / "blob").read_bytes() == BLOB
    assert notes == []  # it gave something each time


def test_a_part_of_an_earlier_process_is_used(tmp_path: Path) -> None:
    (tmp_path / "blob.part").write_bytes(BLOB[:299_000])
    rest = f"Content-Range: bytes 299000-{len(BLOB) - 1}/*"
    script = answer("206 Partial Content", BLOB[299_000:], rest)
    with Scripted(script) as server, linked(server.url) as link:
        link.fetch("/b", DIGEST, tmp_path / "blob", len(BLOB))
        assert link.moved.received < 2000
    assert [path.name for path in tmp_path.iterdir()] == ["blob"]
    assert (tmp_path / "blob").read_bytes() == BLOB


def test_a_server_that_knows_no_ranges(tmp_path: Path) -> None:
    (tmp_path / "blob.part").write_bytes(BLOB[:1000])
    with Scripted(answer("200 OK", BLOB)) as server, linked(server.url) as link:
        link.fetch("/b", DIGEST, tmp_path / "blob", len(BLOB))
    assert b"Range: bytes=1000-" in server.requests[0]
    assert (tmp_path / "blob").read_bytes() == BLOB


def test_a_range_answered_in_two_parts(tmp_path: Path) -> None:
    (tmp_path / "blob.part").write_bytes(BLOB[:1000])
    scripts = (
        answer("206 OK", BLOB[1000:5000], f"Content-Range: bytes 1000-4999/{len(BLOB)}"),
        answer("206 OK", BLOB[5000:], f"Content-Range: bytes 5000-299999/{len(BLOB)}"),
    )
    with Scripted(*scripts) as server, linked(server.url) as link:
        link.fetch("/b", DIGEST, tmp_path / "blob", len(BLOB))
    assert len(server.requests) == 2
    assert (tmp_path / "blob").read_bytes() == BLOB


def test_a_whole_part_is_not_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "blob.part").write_bytes(BLOB)
    with Scripted(answer("416 Range Not Satisfiable")) as server, linked(server.url) as link:
        link.fetch("/b", DIGEST, tmp_path / "blob", len(BLOB))
    assert len(server.requests) == 1
    assert (tmp_path / "blob").read_bytes() == BLOB


def test_a_part_that_is_too_long_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "blob.part").write_bytes(BLOB + b"more")
    with Scripted(answer("200 OK", BLOB)) as server, linked(server.url) as link:
        link.fetch("/b", DIGEST, tmp_path / "blob", len(BLOB))
    assert b"Range:" not in server.requests[0]
    assert (tmp_path / "blob").read_bytes() == BLOB


def test_a_wrong_part_is_fetched_anew_once(tmp_path: Path) -> None:
    (tmp_path / "blob.part").write_bytes(b"x" * 1000)
    scripts = (
        answer("206 OK", BLOB[1000:], f"Content-Range: bytes 1000-299999/{len(BLOB)}"),
        answer("200 OK", BLOB),
    )
    with Scripted(*scripts) as server, linked(server.url) as link:
        link.fetch("/b", DIGEST, tmp_path / "blob", len(BLOB))
    assert b"Range:" not in server.requests[1]
    assert (tmp_path / "blob").read_bytes() == BLOB


def test_a_wrong_blob_is_refused_after_two_attempts(tmp_path: Path, sentence: Sentence) -> None:
    with (
        Scripted(answer("200 OK", b"x" * 1000)) as server,
        linked(server.url) as link,
        pytest.raises(RefusedBlob) as caught,
    ):
        link.fetch("/b", DIGEST, tmp_path / "blob", len(BLOB))
    assert DIGEST in sentence(caught.value)
    assert len(server.requests) == 2
    assert list(tmp_path.iterdir()) == []


def test_an_announced_excess_is_refused_unread(tmp_path: Path, sentence: Sentence) -> None:
    with Scripted(cut(BLOB[:10], len(BLOB))) as server, linked(server.url) as link:
        with pytest.raises(BlobTooLarge) as caught:
            link.fetch("/b", DIGEST, tmp_path / "blob", len(BLOB) - 1)
        assert link.moved.received < 500
    assert server.url in sentence(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_announced_excess_of_a_range_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blob.part").write_bytes(BLOB[:1000])
    script = answer("206 OK", BLOB[1000:1010], "Content-Range: bytes 1000-1009/300001")
    with Scripted(script) as server, linked(server.url) as link, pytest.raises(BlobTooLarge):
        link.fetch("/b", DIGEST, tmp_path / "blob", len(BLOB))


def test_an_endless_blob_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(links, "write_all", lambda file, chunk: written.append(len(chunk)))
    with Scripted(endless) as server, linked(server.url) as link:
        with pytest.raises(BlobTooLarge):
            link.fetch("/b", DIGEST, tmp_path / "blob", 100_000)
        assert link.moved.received < 300_000
    assert 0 < sum(written) <= 100_000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("extent", ["bytes 0-9/10", "bytes 1000-x/10", "nonsense", ""])
def test_another_range_is_refused(tmp_path: Path, extent: str, sentence: Sentence) -> None:
    (tmp_path / "blob.part").write_bytes(BLOB[:1000])
    script = answer("206 OK", b"0123456789", f"Content-Range: {extent}")
    with (
        Scripted(script) as server,
        linked(server.url) as link,
        pytest.raises(BadInput) as caught,
    ):
        link.fetch("/b", DIGEST, tmp_path / "blob", len(BLOB))
    assert "1000" in sentence(caught.value)


def test_nowhere_to_write(coordinator: Coordinator, tmp_path: Path, sentence: Sentence) -> None:
    coordinator.blobs["b"] = BLOB
    with linked(coordinator.port) as link, pytest.raises(CannotSave) as caught:
        link.fetch("/v1/blobs/b", DIGEST, tmp_path / "missing" / "blob", len(BLOB))
    assert "missing" in sentence(caught.value)


def test_nothing_to_send(coordinator: Coordinator, tmp_path: Path, sentence: Sentence) -> None:
    with linked(coordinator.port) as link, pytest.raises(BadInput) as caught:
        link.send("/v1/blobs/b", tmp_path / "missing")
    assert "missing" in sentence(caught.value)


def test_a_file_that_shrinks_while_it_is_sent(tmp_path: Path, sentence: Sentence) -> None:
    source = tmp_path / "blob"
    source.write_bytes(BLOB)

    def shrink(connection: socket.socket, head: bytes) -> None:
        source.write_bytes(b"")
        while connection.recv(65536):
            pass

    with (
        Scripted(shrink) as server,
        linked(server.url, Limits(upload=500_000)) as link,
        pytest.raises(BadInput) as caught,
    ):
        link.send("/b", source)
    assert str(source) in sentence(caught.value)


# Patience.


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_a_coordinator_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LONGEST_PAUSE", 0.5)
    port = free_port()
    notes: list[str] = []
    servers: list[Scripted] = []
    opening = threading.Timer(
        2, lambda: servers.append(Scripted(answer("200 OK", DONE), port=port))
    )
    opening.start()
    began = time.monotonic()
    with linked(port) as link:
        link.note = notes.append
        assert link.ask("/v1/hello", Done) == Done()
        assert link.ask("/v1/hello", Done) == Done()
    assert time.monotonic() - began >= 2
    assert [note.split("(")[0] for note in notes] == [
        f"http://127.0.0.1:{port} is gone ",
        f"http://127.0.0.1:{port} is back.",
    ]
    assert "refused" in notes[0]
    with servers[0]:
        pass


def test_a_connection_closed_in_the_meantime_is_no_trouble() -> None:
    notes: list[str] = []
    with Scripted(cut(DONE, len(DONE))) as server, linked(server.url) as link:
        link.note = notes.append
        for _ in range(3):
            assert link.ask("/v1/hello", Done) == Done()
            time.sleep(0.1)
    assert len(server.requests) == 3
    assert notes == []


def test_a_blob_is_sent_whole_after_a_lost_answer(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(BLOB)
    bodies: list[bytes] = []

    def take(connection: socket.socket, head: bytes, words: bytes = b"") -> None:
        body = head.split(b"\r\n\r\n", 1)[1]
        while len(body) < len(BLOB):
            body += connection.recv(65536)
        bodies.append(body)
        connection.sendall(words)

    last = b"HTTP/1.1 204 No Content\r\n\r\n"
    for source in (BLOB, tmp_path / "blob"):
        with (
            Scripted(take, lambda connection, head: take(connection, head, last)) as server,
            linked(server.url) as link,
        ):
            link.send("/b", source)
    assert bodies == [BLOB] * 4


@pytest.mark.parametrize("status", ["429 Slow", "500 Oh", "502 Bad", "503 Busy", "504 Late"])
def test_a_busy_coordinator_is_asked_again(status: str) -> None:
    scripts = (answer(status), answer("200 OK", DONE))
    with Scripted(*scripts) as server, linked(server.url) as link:
        assert link.say("/v1/alive", ALIVE, Done) == Done()
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("words", "longest", "least", "most"),
    [("1", 60, 1.0, 1.5), ("99999", 0.3, 0.3, 0.8), ("soon", 60, 0.0, 0.5)],
)
def test_retry_after_is_honoured_within_reason(
    words: str, longest: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "LONGEST_PAUSE", longest)
    scripts = (answer("503 Busy", b"", f"Retry-After: {words}"), answer("200 OK", DONE))
    began = time.monotonic()
    with Scripted(*scripts) as server, linked(server.url) as link:
        assert link.ask("/v1/hello", Done) == Done()
    assert least <= time.monotonic() - began < most + 1  # a second for a busy machine


def test_patience_ends(sentence: Sentence) -> None:
    began = time.monotonic()
    with linked(free_port(), patience=1) as link, pytest.raises(Unreachable) as caught:
        link.ask("/v1/hello", Done)
    assert 1 <= time.monotonic() - began < 3
    assert "refused" in sentence(caught.value)


def test_a_silent_coordinator_is_not_waited_for() -> None:
    with (
        Scripted(lambda connection, head: time.sleep(2)) as server,
        linked(server.url, patience=0) as link,
    ):
        link.read_timeout = 0.1
        began = time.monotonic()
        with pytest.raises(Unreachable, match="timed out"):
            link.ask("/v1/hello", Done)
        assert time.monotonic() - began < 1.5


def test_a_blob_that_gains_nothing_uses_up_patience(tmp_path: Path) -> None:
    with (
        Scripted(cut(b"", len(BLOB))) as server,
        linked(server.url, patience=0.5) as link,
        pytest.raises(Unreachable),
    ):
        link.fetch("/b", DIGEST, tmp_path / "blob", len(BLOB))


def test_stop_ends_the_waiting(monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: 30.0)
    with linked(free_port()) as link:
        began = time.monotonic()
        threading.Timer(0.3, link.stop.set).start()
        with pytest.raises(Unreachable) as caught:
            link.ask("/v1/hello", Done)
        assert 0.3 <= time.monotonic() - began < 10  # the waiting would be 30 s
        assert "stopped" in sentence(caught.value)


def test_a_stopped_link_still_tries_once(coordinator: Coordinator) -> None:
    with linked(coordinator.port) as link:
        link.stop.set()
        assert link.ask("/v1/hello", Done) == Done()


# What a coordinator may answer.


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("200 OK", BadInput),
        ("400 Bad", BadInput),
        ("401 Who", NotAllowed),
        ("403 No", NotAllowed),
        ("409 Conflict", BadInput),
        ("413 Much", BadInput),
        ("426 Upgrade", OtherProtocol),
    ],
)
def test_a_refusal_keeps_its_words(status: str, kind: type[BlockTrainError]) -> None:
    body = encode(Refused("This is \x1b[2J why; do that."))
    with Scripted(answer(status, body)) as server, linked(server.url) as link:
        with pytest.raises(kind) as caught:
            link.say("/v1/alive", ALIVE, Done)
        assert type(caught.value) is kind
        assert str(caught.value) == "This is  [2J why; do that."
    assert len(server.requests) == 1


def test_a_refused_blob_keeps_its_words() -> None:
    script = answer("413 Much", encode(Refused("Too much.")))
    with Scripted(script) as server, linked(server.url) as link:
        link.stop.set()
        with pytest.raises(BadInput, match=r"^Too much\.$"):
            link.send("/b", BLOB)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        ("200 OK", b"<html>It works!</html>"),
        ("200 OK", b""),
        ("200 OK", b"\xff\xfe"),
        ("200 OK", encode(Finished("The end."))),
        ("200 OK", b"[" * 100_000),
        ("404 Not Found", b"<html>nothing</html>"),
        ("403 Forbidden", b"<html>no</html>"),
        ("404 Not Found", DONE),
    ],
)
def test_garbage_is_named(status: str, body: bytes, sentence: Sentence) -> None:
    with (
        Scripted(answer(status, body)) as server,
        linked(server.url) as link,
        pytest.raises(BadInput) as caught,
    ):
        link.ask("/v1/hello", Done)
    assert f"{server.url}/v1/hello" in sentence(caught.value)


@pytest.mark.parametrize("script", [endless, cut(b"{}", MAX_MESSAGE + 1)])
def test_a_huge_answer_is_not_read(script: Script, sentence: Sentence) -> None:
    with Scripted(script) as server, linked(server.url) as link:
        with pytest.raises(BadInput) as caught:
            link.ask("/v1/hello", Done)
        assert str(MAX_MESSAGE) in sentence(caught.value)
        assert link.moved.received < MAX_MESSAGE + 3 * 65536


def test_redirects_are_not_followed(coordinator: Coordinator, sentence: Sentence) -> None:
    place = f"http://127.0.0.1:{coordinator.port}/v1/hello"
    script = answer("302 Found", b"", f"Location: {place}")
    with Scripted(script) as server, linked(server.url) as link:
        link.bearer = "secret"
        with pytest.raises(BadInput) as caught:
            link.ask("/v1/hello", Done)
    assert place in sentence(caught.value)
    assert "not followed" in str(caught.value)
    assert coordinator.said == []


@pytest.mark.parametrize("token", ["two\r\nlines", "tökén"])
def test_a_token_that_cannot_be_sent(
    coordinator: Coordinator, token: str, sentence: Sentence
) -> None:
    with linked(coordinator.port) as link:
        link.bearer = token
        with pytest.raises(BadInput) as caught:
            link.ask("/v1/hello", Done)
    assert "token" in sentence(caught.value)
    assert token[:3] not in str(caught.value)
    assert coordinator.said == []


# Counting and limits.


def talk(link: Link, folder: Path) -> None:
    """A bit of everything, on one connection."""
    link.bearer = "secret"
    assert link.say("/v1/alive", ALIVE, Done) == Done()
    link.send("/v1/blobs/b", BLOB)
    link.fetch("/v1/blobs/b", DIGEST, folder / "blob", len(BLOB))
    assert link.ask("/v1/hello", Done) == Done()


def test_every_byte_is_counted(coordinator: Coordinator, tmp_path: Path) -> None:
    with Relay(coordinator.port) as relay, linked(relay.port) as link:
        assert link.moved == Moved(0, 0)
        talk(link, tmp_path)
        assert link.moved == relay.moved
        assert relay.connections == 1
        assert min(relay.up, relay.down) > len(BLOB)


def test_uploads_keep_to_their_rate(coordinator: Coordinator) -> None:
    with linked(coordinator.port, Limits(upload=100_000)) as link:
        began = time.monotonic()
        link.send("/v1/blobs/b", BLOB[:200_000])
        assert 1.5 <= time.monotonic() - began < 4
    assert coordinator.blobs["b"] == BLOB[:200_000]


def test_downloads_keep_to_their_rate_smoothly(coordinator: Coordinator, tmp_path: Path) -> None:
    coordinator.blobs["b"] = BLOB[:75_000]
    digest = Digest(hashlib.sha256(BLOB[:75_000]).hexdigest())
    times: list[float] = []
    with linked(coordinator.port, Limits(download=50_000)) as link:
        began = time.monotonic()
        link.fetch(
            "/v1/blobs/b",
            digest,
            tmp_path / "blob",
            75_000,
            lambda done, of: times.append(time.monotonic()),
        )
        assert 1.2 <= time.monotonic() - began < 3
    assert max(b - a for a, b in pairwise(times)) < 0.4
    assert len(times) > 25


def test_two_threads_share_a_rate_and_neither_waits_for_the_other(
    coordinator: Coordinator,
) -> None:
    with Relay(coordinator.port) as relay, linked(relay.port, Limits(upload=100_000)) as link:
        upload = threading.Thread(target=link.send, args=("/v1/blobs/b", BLOB[:150_000]))
        began = time.monotonic()
        upload.start()
        beats: list[float] = []
        while upload.is_alive():
            start = time.monotonic()
            link.say("/v1/alive", ALIVE, Done)
            beats.append(time.monotonic() - start)
        upload.join()
        taken = time.monotonic() - began
        assert len(beats) > 5
        assert max(beats) < 1
        assert link.moved == relay.moved
        assert link.moved.sent <= 100_000 * (taken + 0.2)
    assert coordinator.blobs["b"] == BLOB[:150_000]


def test_traffic_ends_at_its_limit(
    coordinator: Coordinator, tmp_path: Path, sentence: Sentence
) -> None:
    coordinator.blobs["b"] = BLOB
    with Relay(coordinator.port) as relay, linked(relay.port, Limits(traffic=100_000)) as link:
        with pytest.raises(TrafficSpent):
            link.send("/v1/blobs/c", BLOB)
        assert link.moved == Moved(0, 0)  # not even begun
        with pytest.raises(TrafficSpent) as caught:
            link.fetch("/v1/blobs/b", DIGEST, tmp_path / "blob", len(BLOB))
        assert link.moved.sent + link.moved.received == 100_000
        with pytest.raises(TrafficSpent):
            link.ask("/v1/hello", Done)
        assert relay.up == link.moved.sent
    assert "100000" in sentence(caught.value)
    assert 0 < (tmp_path / "blob.part").stat().st_size < 100_000  # for when there is more


def test_many_threads_lose_no_byte(coordinator: Coordinator, tmp_path: Path) -> None:
    coordinator.blobs["b"] = BLOB
    failures: list[BaseException] = []
    with Relay(coordinator.port) as relay, linked(relay.port) as link:

        def work(number: int) -> None:
            try:
                for turn in range(5):
                    link.send(f"/v1/blobs/{number}", BLOB)
                    link.fetch("/v1/blobs/b", DIGEST, tmp_path / f"{number}-{turn}", len(BLOB))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert link.moved == relay.moved
    assert len(list(tmp_path.iterdir())) == 20


# TLS.


class Papers:
    """A certificate for 127.0.0.1 that vouches for itself, and contexts for both sides."""

    def __init__(self, folder: Path) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
        now = datetime.now(UTC)
        names = [x509.IPAddress(ip_address("127.0.0.1"))]
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(key, hashes.SHA256())
        )
        self.certificate, self.key = folder / "certificate.pem", folder / "key.pem"
        self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )

    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.certificate))


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def secure(papers: Papers) -> Iterator[Coordinator]:
    with serving(ssl_certfile=papers.certificate, ssl_keyfile=papers.key) as coordinator:
        yield coordinator


def test_every_encrypted_byte_is_counted(
    secure: Coordinator, papers: Papers, tmp_path: Path
) -> None:
    with (
        Relay(secure.port) as relay,
        linked(f"https://127.0.0.1:{relay.port}", verify=papers.trusting()) as link,
    ):
        talk(link, tmp_path)
        assert link.moved == relay.moved
        assert relay.connections == 1
        assert min(relay.up, relay.down) > len(BLOB) + 1000  # the handshake is in it


def test_encrypted_uploads_keep_to_their_rate(secure: Coordinator, papers: Papers) -> None:
    url = f"https://127.0.0.1:{secure.port}"
    with linked(url, Limits(upload=100_000), papers.trusting()) as link:
        began = time.monotonic()
        link.send("/v1/blobs/b", BLOB[:200_000])
        assert 1.5 <= time.monotonic() - began < 4


def test_a_cut_encrypted_download_goes_on(
    secure: Coordinator, papers: Papers, tmp_path: Path
) -> None:
    """uvicorn behind a relay that breaks the connection in the middle."""
    secure.blobs["b"] = BLOB
    with (
        Relay(secure.port) as relay,
        linked(f"https://127.0.0.1:{relay.port}", verify=papers.trusting()) as link,
    ):
        passed = relay.pass_on

        def break_once(source: socket.socket, sink: socket.socket, way: str) -> None:
            if way == "down" and relay.connections == 1:
                for _ in range(3):
                    sink.sendall(source.recv(65536))
                sink.shutdown(socket.SHUT_RDWR)
                source.close()
            else:
                passed(source, sink, way)

        relay.pass_on = break_once  # type: ignore[method-assign]
        link.fetch("/v1/blobs/b", DIGEST, tmp_path / "blob", len(BLOB))
        assert relay.connections == 2
    assert (tmp_path / "blob").read_bytes() == BLOB


def test_an_untrusted_certificate_is_refused_at_once(
    secure: Coordinator, sentence: Sentence
) -> None:
    with linked(f"https://127.0.0.1:{secure.port}") as link, pytest.raises(NotAllowed) as caught:
        link.ask("/v1/hello", Done)
    assert "fingerprint" in sentence(caught.value)


def test_a_certificate_for_another_name_is_refused(secure: Coordinator, papers: Papers) -> None:
    url = f"https://localhost:{secure.port}"
    with (
        linked(url, verify=papers.trusting()) as link,
        pytest.raises(NotAllowed, match="localhost"),
    ):
        link.ask("/v1/hello", Done)


def test_a_certificate_of_our_own_is_shown(papers: Papers) -> None:
    options = {"ssl_certfile": papers.certificate, "ssl_keyfile": papers.key}
    demand = {"ssl_ca_certs": str(papers.certificate), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    known, unknown = papers.trusting(), papers.trusting()
    known.load_cert_chain(papers.certificate, papers.key)
    with serving(**options, **demand) as strict:
        url = f"https://127.0.0.1:{strict.port}"
        with linked(url, verify=known) as link:
            assert link.ask("/v1/hello", Done) == Done()
        with linked(url, verify=unknown, patience=0) as link, pytest.raises(Unreachable):
            link.ask("/v1/hello", Done)  # uvicorn hangs up and does not say why


def test_no_tls_there(coordinator: Coordinator, sentence: Sentence) -> None:
    with (
        linked(f"https://127.0.0.1:{coordinator.port}", patience=0) as link,
        pytest.raises(Unreachable) as caught,
    ):
        link.ask("/v1/hello", Done)
    assert "SSL" in sentence(caught.value)
