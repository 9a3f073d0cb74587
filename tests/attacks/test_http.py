"""Lies in HTTP itself: lengths, headers, ranges, paths, methods, and patience as a weapon."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tests.attacks.conftest import HASTY, LONG
from tests.attacks.siege import Siege, answer, why

from blocktrain.aggregation.ledger import WorkerId
from blocktrain.learning.data import Corpus
from blocktrain.services.begin import Settings, begin
from blocktrain.services.coordinator import answers, door, working
from blocktrain.terms import Digest
from blocktrain.wire.messages import MAX_MESSAGE

HOST = b"Host: coordinator\r\n"


def head(method: str, path: str, *headers: str) -> bytes:
    """The beginning of a request, as bytes."""
    lines = [f"{method} {path} HTTP/1.1", "Host: coordinator", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def bearing(session: str) -> str:
    return f"Authorization: Bearer {session}"


# --- lengths --------------------------------------------------------------------------------------


def test_a_giant_message_is_refused_before_it_is_sent(siege: Siege) -> None:
    peer = siege.peer()
    for length in (MAX_MESSAGE + 1, 10**15):
        told = head("POST", "/v1/ask", bearing(peer.session), f"Content-Length: {length}")
        status, body = siege.raw(told)  # not one byte of it follows
        assert status == 413
        assert b"at most 262144 bytes" in body


def test_a_giant_message_without_a_length_is_refused_while_it_comes(siege: Siege) -> None:
    peer = siege.peer()
    pieces = (b"[" * 2**16 for _ in range(64))
    answered = peer.http.post("/v1/ask", content=pieces)
    assert answered.status_code == 413
    assert "at most" in why(answered)


def test_a_blob_of_an_impossible_length_is_refused_before_it_is_sent(siege: Siege) -> None:
    peer = siege.peer()
    for length in (0, 10**9, 10**15):
        path, told = f"/v1/blobs/{'0' * 64}", f"Content-Length: {length}"
        status, body = siege.raw(head("PUT", path, bearing(peer.session), told))
        assert status == 413
        assert str(siege.coordinator.working.largest).encode() in body


def test_what_is_no_length_is_no_request(siege: Siege) -> None:
    begin = b"PUT /v1/blobs/x HTTP/1.1\r\n" + HOST + b"Content-Length: "
    for length in ("9" * 30, "-5", "+5", "5_0", "0x10", "five", "١٢", "5, 6"):
        assert siege.raw(begin + length.encode() + b"\r\n\r\n")[0] == 400, length


def test_a_blob_must_say_its_length(siege: Siege) -> None:
    peer, body = siege.peer(), b"x" * 1000
    digest = hashlib.sha256(body).hexdigest()
    answered = peer.http.put(f"/v1/blobs/{digest}", content=iter([body]))  # chunked
    assert answered.status_code == 411
    assert "Content-Length" in why(answered)
    assert siege.keeper.store.size(Digest(digest)) is None


def test_a_message_has_either_a_length_or_chunks(siege: Siege) -> None:
    both = head("POST", "/v1/join", "Content-Length: 5", "Transfer-Encoding: chunked")
    assert siege.raw(both + b"0\r\n\r\n")[0] == 400


def test_what_follows_a_blob_is_not_part_of_it(siege: Siege) -> None:
    peer, body = siege.peer(), b"tensors, perhaps"
    digest = hashlib.sha256(body).hexdigest()
    told = head("PUT", f"/v1/blobs/{digest}", bearing(peer.session), f"Content-Length: {len(body)}")
    with siege.socket() as sock:
        sock.sendall(told + body + b"and a little more")
        assert answer(sock)[0] in (200, 400)  # the rest is no request, and ends the connection
    assert siege.keeper.store.size(Digest(digest)) in (None, len(body))


def test_a_blob_that_ends_early_is_not_kept_and_not_held_against_its_sender(siege: Siege) -> None:
    peer, body = siege.peer(), os.urandom(1000)
    digest = hashlib.sha256(body).hexdigest()
    told = head("PUT", f"/v1/blobs/{digest}", bearing(peer.session), "Content-Length: 1000")
    for _ in range(5):  # a bad line: more often than blobs may go unnamed
        with siege.socket() as sock:
            sock.sendall(told + body[:500])
            time.sleep(0.02)
    deadline = time.monotonic() + 5
    while siege.coordinator.working.uploads.get(WorkerId(peer.id)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert siege.keeper.store.size(Digest(digest)) is None
    assert peer.put(body) == digest


def test_an_upload_for_which_there_is_no_room_may_come_again(
    siege: Siege, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(working, "IN_MEMORY", 100)  # what is longer goes through a file
    peer, body = siege.peer(), os.urandom(1000)
    digest = hashlib.sha256(body).hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
        answered = peer.http.put(f"/v1/blobs/{digest}", content=body)
    assert (answered.status_code, answered.headers["Retry-After"]) == (503, "2")
    assert peer.put(body) == digest


def test_a_body_that_does_not_come_is_not_waited_for(
    siege: Siege, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "STANDSTILL", 0.3)
    peer = siege.peer()
    for method, path in (("POST", "/v1/ask"), ("PUT", f"/v1/blobs/{'0' * 64}")):
        told = head(method, path, bearing(peer.session), "Content-Length: 1000")
        status, body = siege.raw(told + b"{")
        assert status == 503
        assert b"send it again" in body or b"stands still" in body


def test_a_message_that_drips_is_not_waited_for(
    siege: Siege, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "STANDSTILL", 0.3)
    peer = siege.peer()
    told = head("POST", "/v1/alive", bearing(peer.session), "Content-Length: 1000")
    with siege.socket() as sock:
        sock.sendall(told)
        for _ in range(10):
            sock.sendall(b" ")
            time.sleep(0.1)
        assert answer(sock)[0] == 503


# --- heads ----------------------------------------------------------------------------------------


def test_a_head_without_an_end_is_cut_off(siege: Siege) -> None:
    with siege.socket() as sock:
        sock.sendall(b"GET /v1/hello HTTP/1.1\r\n" + HOST + b"X-Long: ")
        sent = 0
        try:
            while sent < 32 * door.HEAD_AT_MOST:
                sent += sock.send(b"x" * 4096)
                time.sleep(0.001)
        except ConnectionError:
            pass
        assert sent < 32 * door.HEAD_AT_MOST
    for path in ("/" + "x" * 10**6, "/v1/hello?" + "x" * 10**6):
        assert siege.raw(head("GET", path))[0] in (0, 431)


def test_a_long_head_is_refused_even_if_it_comes_at_once(siege: Siege) -> None:
    status, _ = siege.raw(head("GET", "/v1/hello", "X-Long: " + "x" * door.HEAD_AT_MOST))
    assert status == 431
    many = [f"X-{n}: {n}" for n in range(door.HEAD_AT_MOST // 8)]
    assert siege.raw(head("GET", "/v1/hello", *many))[0] == 431
    assert siege.raw(head("GET", "/v1/hello", "X-Long: " + "x" * 8000))[0] == 200


def test_the_command_bounds_heads_as_well(tmp_path: Path, corpus: Corpus) -> None:
    begin(tmp_path / "run", Settings("test", LONG, HASTY), corpus)
    command = [sys.executable, "-m", "blocktrain", "coordinator", str(tmp_path / "run")]
    child = subprocess.Popen(
        [*command, "--port", "0", "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert child.stdout
        port = int(json.loads(child.stdout.readline())["url"].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10.0) as sock:
            sock.sendall(head("GET", "/v1/hello", "X-Long: " + "x" * door.HEAD_AT_MOST))
            assert answer(sock)[0] == 431
    finally:
        child.terminate()
        child.communicate(timeout=20)


def test_a_head_that_does_not_come_is_not_waited_for(
    siege: Siege, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "HEAD_SECONDS", 0.5)
    with siege.socket() as silent, siege.socket() as slow:
        slow.sendall(b"GET /v1/hello HTTP/1.1\r\n")
        began = time.monotonic()
        for _ in range(8):  # a byte now and then buys no time
            time.sleep(0.1)
            try:
                slow.sendall(b"X")
            except ConnectionError:
                break
        assert answer(silent)[0] == answer(slow)[0] == 0
        assert time.monotonic() - began < 5


def test_a_connection_may_rest_between_requests(
    siege: Siege, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "HEAD_SECONDS", 0.2)
    with siege.socket() as sock:
        for _ in range(3):
            sock.sendall(head("GET", "/v1/hello"))
            assert answer(sock)[0] == 200
            time.sleep(0.4)


NOT_HTTP = [
    b"\0\0\0\0\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,  # TLS, knocking at HTTP
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /v1/hello HTTP/9.9\r\n\r\n",
    b"GET /v1/h\xc3\xa9llo HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET \xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n",
    b"CONNECT coordinator:443 HTTP/1.1\r\n" + HOST + b"\r\n",
    b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /v1/hello HTTP/1.1\r\n" + HOST + b"A\0B: c\r\n\r\n",
    b"GET /v1/hello HTTP/1.1\r\n" + HOST + b"Authorization: Bearer \0\r\n\r\n",
]


def test_what_is_not_http_is_no_trouble(siege: Siege) -> None:
    for data in NOT_HTTP:
        status, body = siege.raw(data)
        assert status in (0, 400, 404), data
        assert b"Traceback" not in body


def test_an_upgrade_is_not_followed(siege: Siege) -> None:
    wishes = ["Connection: Upgrade", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAA"]
    for kind in ("websocket", "h2c"):
        status, _ = siege.raw(head("GET", "/v1/hello", f"Upgrade: {kind}", *wishes))
        assert status == 200  # as if nobody had wished for anything


# --- ranges ---------------------------------------------------------------------------------------


OTHER_RANGES = [
    "bytes=0-1,5-6",
    "bytes=-5",
    "bytes=--5",
    "bytes=5-2",
    "bytes=0-0",
    "bytes=a-",
    "bytes=",
    "bytes",
    "items=0-",
    "bytes=١-",
    "bytes=²-",
    "bytes=1_0-",
    "bytes=+1-",
    "bytes= 1-",
    "bytes=1.0-",
]


def test_other_ranges_than_the_rest_are_refused(siege: Siege) -> None:
    client = siege.client(siege.token)
    for path in ("/v1/corpus/train", f"/v1/blobs/{siege.keeper.charter.first[0]}"):
        for range in OTHER_RANGES:
            response = client.get(path, headers={b"Range": range.encode()})
            assert response.status_code == 400, range
            assert "Only ranges" in why(response)


def test_nothing_begins_at_the_end_of_a_blob_or_beyond(siege: Siege) -> None:
    digest = siege.keeper.charter.first[0]
    size = siege.keeper.store.size(digest)
    assert size is not None
    client = siege.client(siege.token)
    for beyond in (0, 1, 10**9, 10**14):
        response = client.get(f"/v1/blobs/{digest}", headers={"Range": f"bytes={size + beyond}-"})
        assert response.status_code == 416
        assert response.headers["Content-Range"] == f"bytes */{size}"
    last = client.get(f"/v1/blobs/{digest}", headers={"Range": f"bytes={size - 1}-"})
    assert (last.status_code, len(last.content)) == (206, 1)
    assert last.headers["Content-Range"] == f"bytes {size - 1}-{size - 1}/{size}"


def test_numbers_of_many_digits_are_refused(siege: Siege) -> None:
    """int() of more than 4,300 digits raises where nobody expects it."""
    client, peer = siege.client(siege.token), siege.peer()
    blob = f"/v1/blobs/{siege.keeper.charter.first[0]}"
    for digits in ("1" * 16, "1" * 400, "1" * 5000):
        assert client.get(blob, headers={"Range": f"bytes={digits}-"}).status_code == 400
        for path in (f"/v1/versions/{digits}/0", f"/v1/versions/0/{digits}"):
            response = peer.http.get(path)
            assert response.status_code == 400
            assert "no number" in why(response)


# --- paths and methods ----------------------------------------------------------------------------

OUTSIDE = [
    "..",
    "../owner.token",
    "../../owner.token",
    "%2e%2e/owner.token",
    "..%2fowner.token",
    "%2e%2e%2fowner.token",
    "..%5cowner.token",
    "....//owner.token",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    "owner.token",
    "owner.token%00",
    "%00",
    "train%00",
    "train/",
    "train/../../owner.token",
    "%ff%fe",
    "%c0%ae%c0%ae",
    "A" * 64,
    "0" * 63,
    "0" * 65,
    "0" * 64 + "%0a",
    "٠" * 64,
    "a" * 5000,
]


@pytest.mark.parametrize("place", ["/v1/blobs/", "/v1/corpus/", "/static/", "/v1/versions/0/", "/"])
def test_no_path_leads_outside(siege: Siege, place: str) -> None:
    """Raw bytes: a client library would tidy the path up before it is sent."""
    peer = siege.peer()
    secrets = [siege.token.encode(), b"PRIVATE KEY", b"root:"]
    for name in OUTSIDE:
        for bearer in (siege.token, peer.session):
            path = place.encode() + name.encode()
            told = f" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{bearing(bearer)}\r\n\r\n"
            status, body = siege.raw(b"GET " + path + told.encode())
            assert status in (307, 400, 403, 404), (path, status)
            assert not any(secret in body for secret in secrets)


def test_nothing_can_be_put_outside(siege: Siege) -> None:
    peer = siege.peer()
    before = {path: path.read_bytes() for path in siege.folder.iterdir() if path.is_file()}
    del before[siege.folder / "ledger.sqlite-wal"], before[siege.folder / "ledger.sqlite-shm"]
    for name in OUTSIDE:
        told = f" HTTP/1.1\r\nHost: x\r\n{bearing(peer.session)}\r\nContent-Length: 1\r\n\r\nx"
        status, _ = siege.raw(b"PUT /v1/blobs/" + name.encode() + told.encode())
        assert status in (307, 400, 404), (name, status)
    assert all(path.read_bytes() == body for path, body in before.items())


def test_other_methods_mean_nothing(siege: Siege) -> None:
    allowed: dict[str, set[str]] = {}
    for route in siege.coordinator.app().routes:
        allowed.setdefault(route.path, set()).update(route.methods)  # type: ignore[attr-defined]
    assert len(allowed) >= 20
    client = siege.client(siege.token)
    for path, methods in allowed.items():
        real = path.replace("{digest}", "0" * 64).replace("{name}", "train")
        real = real.replace("{name:path}", "app.js").replace("{block}/{after}", "0/0")
        for method in {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"} - methods:
            response = client.request(method, real)
            assert response.status_code == 404, (method, path, response.status_code)
            assert why(response) == "There is nothing here; the dashboard is at the root."


# --- crowds ---------------------------------------------------------------------------------------


def test_strangers_are_not_remembered_for_ever(
    siege: Siege, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MOST_BUCKETS", 50)
    buckets = siege.coordinator.office.door.buckets
    buckets.clear()
    client = siege.client()
    for number in range(300):  # nobody with a made-up session is remembered at all
        bearer = {"Authorization": f"Bearer {number:064x}.{number:064x}"}
        assert client.post("/v1/ask", headers=bearer, content=b"{}").status_code == 403
    assert not buckets
    for number in range(300):
        where = {"X-Forwarded-For": f"10.9.{number // 250}.{number % 250 + 1}"}
        assert client.get("/v1/tokens", headers=where).status_code == 403
        assert len(buckets) <= 51
    assert buckets


@pytest.mark.parametrize("path", ["/v1/status", "/metrics", "/v1/tokens", "/v1/checkpoint"])
def test_whoever_asks_too_often_must_wait(
    siege: Siege, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guessing a token is slow, and so is what costs the coordinator a look at its ledger."""
    monkeypatch.setattr(door, "REQUESTS_PER_SECOND", 1.0)  # however slow this machine is
    client = siege.client("a-token-that-nobody-has")
    codes = [client.get(path).status_code for _ in range(int(door.BURST) + 30)]
    assert codes[0] in (200, 403)
    assert 429 in codes
    response = client.get(path)
    assert response.headers["Retry-After"] == "2"
    assert "requests a second" in why(response)


def test_a_crowd_that_watches_costs_one_look(siege: Siege, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    look = siege.coordinator.watching.look

    def counted() -> object:
        looks.append(time.monotonic())
        time.sleep(0.05)
        return look()

    monkeypatch.setattr(siege.coordinator.watching, "look", counted)
    began = time.monotonic()
    sockets = [siege.socket() for _ in range(100)]
    try:
        for number, sock in enumerate(sockets):
            sock.sendall(head("GET", "/v1/events", f"X-Forwarded-For: 10.8.0.{number + 1}"))
        for sock in sockets:
            told = b""
            while b"\n\n" not in told:
                told += (piece := sock.recv(65536))
                assert piece
            assert b"event: status\ndata: {" in told
    finally:
        for sock in sockets:
            sock.close()
    assert 1 <= len(looks) <= 2 + 2 * (time.monotonic() - began)
