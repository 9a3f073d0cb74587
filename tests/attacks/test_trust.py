"""Lies about who somebody is: tokens, sessions, signatures, and whose update it was."""

import hashlib

import httpx
from starlette.routing import Route
from tests.attacks.siege import Peer, Siege, sealed, why

from blocktrain.terms import Digest
from blocktrain.wire import messages, signing
from blocktrain.wire.messages import PROTOCOL, Signed
from blocktrain.wire.signing import new_key

PUBLIC = {
    "/",
    "/static/{name:path}",
    "/metrics",
    "/v1/hello",
    "/v1/authority",
    "/v1/status",
    "/v1/events",
}
FOR_WORKERS = {
    "/v1/ask",
    "/v1/alive",
    "/v1/leave",
    "/v1/updates",
    "/v1/versions/{block}/{after}",
    "/v1/certificate",
    "/v1/banned",
}
FOR_MEMBERS = {
    "/v1/blobs/{digest}",
    "/v1/corpus/{name}",
    "/v1/checkpoint",
    "/v1/manifests/{block}/{round}",
    "/v1/stages",
}
SERVED = "/v1/served"  # asked for by members who have joined, moved by the owner
FOR_OWNERS = {"/v1/command", "/v1/ban", "/v1/tokens", "/v1/tokens/revoke", "/v1/evaluations"}
JOIN = "/v1/join"


def doors(siege: Siege, *paths: str) -> list[tuple[str, str]]:
    """Method and address of every route with one of these paths."""
    found = []
    for route in siege.coordinator.app().routes:
        assert isinstance(route, Route)
        if route.path in paths:
            real = route.path.replace("{digest}", siege.keeper.charter.first[0])
            real = real.replace("{name}", "train").replace("{block}/{after}", "0/0")
            real = real.replace("{block}/{round}", "0/1")
            found += [(method, real) for method in sorted((route.methods or set()) - {"HEAD"})]
    assert len(found) >= len(paths)
    return found


def refuse(client: httpx.Client, method: str, path: str, sentence: str) -> None:
    response = client.request(method, path, content=b"{}" if method != "GET" else None)
    assert response.status_code == 403, (method, path, response.status_code)
    assert sentence in why(response), (method, path)


# --- tokens and sessions --------------------------------------------------------------------------


def test_every_route_is_of_a_kind(siege: Siege) -> None:
    """A new endpoint must be thought about here."""
    known = PUBLIC | FOR_WORKERS | FOR_MEMBERS | FOR_OWNERS | {JOIN, SERVED}
    assert {route.path for route in siege.coordinator.app().routes} == known  # type: ignore[attr-defined]


def test_nothing_but_the_public_opens_without_a_token(siege: Siege) -> None:
    closed = doors(siege, *FOR_WORKERS, *FOR_MEMBERS, *FOR_OWNERS, JOIN, SERVED)
    assert len(closed) == 23
    for method, path in closed:
        refuse(siege.client(), method, path, "Show a token")
        refuse(siege.client("a-guessed-token"), method, path, "")


def test_whatever_is_shown_instead_of_a_token_is_refused(siege: Siege) -> None:
    for shown in (
        b"Basic b3duZXI6b3duZXI=",
        b"Bearer",
        b"Bearer x",
        b"Bearer " + b"x" * 257,
        b"Bearer \xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8",
        b"Bearer ' OR 1=1 --",
        b"Bearer " + b"." * 64,
        b"Bearer " + b"\xd9\xa0" * 32,
    ):
        client = siege.client()
        for method, path in (("GET", "/v1/tokens"), ("POST", "/v1/ask"), ("GET", "/v1/checkpoint")):
            response = client.request(method, path, headers={b"Authorization": shown})
            assert response.status_code == 403, shown
            assert why(response)


def test_each_token_opens_its_own_doors_only(siege: Siege) -> None:
    token, peer = siege.worker_token(), siege.peer()
    for method, path in doors(siege, *FOR_OWNERS):
        refuse(siege.client(token), method, path, "This needs the owner's token")
        refuse(peer.http, method, path, "unknown or revoked")
    for method, path in doors(siege, *FOR_WORKERS):
        refuse(siege.client(token), method, path, "a worker's session; join first")
        refuse(siege.client(siege.token), method, path, "a worker's session; join first")
    for _, path in doors(siege, *FOR_MEMBERS):
        refuse(siege.client(token), "GET", path, "This needs the owner's token")
    refuse(siege.client(token), "GET", SERVED, "a worker's session; join first")
    refuse(siege.client(token), "POST", SERVED, "This needs the owner's token")
    refuse(peer.http, "POST", SERVED, "unknown or revoked")


def test_a_session_cannot_be_guessed_or_lent(siege: Siege) -> None:
    peer, other, unknown = siege.peer(), siege.peer(), new_key()
    id, _, secret = peer.session.partition(".")
    made_up = [
        f"{id}.{'0' * 64}",
        f"{id}.{other.session.partition('.')[2]}",
        f"{other.id}.{secret}",
        f"{id}.{secret[:-1]}{'0' if secret[-1] != '0' else '1'}",
        f"{id}.{secret.upper()}" if secret.upper() != secret else f"{id}.",
        f"{id}.{secret}.",
        f"{id}{secret}",
        f".{secret}",
        f"{unknown.id}.{secret}",
        id,
    ]
    for session in made_up:
        refuse(siege.client(session), "POST", "/v1/ask", "a worker's session; join first")
    right = siege.coordinator.office.door.session(unknown.id)  # as if the secret had leaked
    refuse(siege.client(right), "POST", "/v1/ask", "not known here")


def test_nobody_speaks_for_another(siege: Siege) -> None:
    peer, victim = siege.peer(), siege.peer()
    task = victim.assignment()
    for path, message in (
        ("ask", messages.Ask(victim.id)),
        ("alive", messages.Alive(victim.id)),
        ("leave", messages.Leave(victim.id)),
    ):
        response = peer.say(path, message)
        assert response.status_code == 403
        assert "another worker" in why(response)
    assert siege.keeper.state.held_by(victim.id)  # it was not sent away
    update = victim.update(task)
    response = peer.say("updates", sealed(victim.key, update, "update"))  # overheard
    assert response.status_code == 403
    assert "another worker" in why(response)
    assert victim.submit(update).verdict != "refused"


def test_a_revoked_token_and_a_banned_worker_open_nothing(siege: Siege) -> None:
    owner = siege.client(siege.token)
    token = siege.worker_token("soon gone")
    guest = Peer(siege, new_key())
    joined = siege.client(token).post(JOIN, content=guest.join_body(token=token))
    guest.session = joined.json()["session"]
    assert guest.say("alive", messages.Alive(guest.id)).status_code == 200
    hash = hashlib.sha256(token.encode()).hexdigest()
    assert owner.post("/v1/tokens/revoke", json={"say": "revoke", "token": hash}).status_code == 200
    refuse(guest.http, "POST", "/v1/alive", "Your token was revoked")
    refuse(siege.client(token), "POST", JOIN, "unknown or revoked")
    bad = siege.peer()
    assert owner.post("/v1/ban", json={"say": "ban", "worker": bad.id}).status_code == 200
    refuse(bad.http, "POST", "/v1/alive", "takes nothing more")
    again = siege.client(siege.token).post(JOIN, content=bad.join_body())
    assert again.status_code == 403
    assert "takes nothing more" in why(again)


# --- joining --------------------------------------------------------------------------------------


def joining(siege: Siege, body: bytes) -> httpx.Response:
    return siege.client(siege.token).post(JOIN, content=body)


def test_whoever_joins_must_hold_the_key(siege: Siege) -> None:
    peer, victim = Peer(siege, new_key()), siege.peer()
    join = messages.decode(peer.join_body(), Signed)
    theirs = messages.decode(victim.join_body(), Signed)
    lies = [
        Signed(theirs.body, peer.id, join.signature),  # another's words, my name
        Signed(theirs.body, victim.id, join.signature),
        Signed(join.body, victim.id, join.signature),
        Signed(join.body, peer.id, theirs.signature),
        Signed(join.body + b" ", peer.id, join.signature),  # the same message, other bytes
        Signed(join.body, peer.id, "0" * 128),
        sealed(peer.key, theirs.body, "join"),  # signed, but not by whom it names
        messages.decode(peer.join_body(purpose="update"), Signed),  # for another purpose
        messages.decode(peer.join_body(purpose="receipt"), Signed),
    ]
    for lie in lies:
        response = joining(siege, messages.encode(lie))
        assert response.status_code == 403
        assert "signature" in why(response)
    with siege.keeper.ledger.reading() as r:
        assert peer.id not in {worker.id for worker in r.workers()}


def test_a_key_for_which_anybody_can_sign_is_nobodys(siege: Siege) -> None:
    """Points of small order: with them the all-zero signature holds for some messages."""
    for y in (0, 1, 2**255 - 20):
        weak = y.to_bytes(32, "little").hex()
        hash = Digest(hashlib.sha256(siege.token.encode()).hexdigest())
        join = messages.Join(PROTOCOL, siege.keeper.run, weak, "weak", 1, "cpu", hash)
        lie = Signed(messages.encode(join), weak, (y.to_bytes(32, "little") + b"\0" * 32).hex())
        assert joining(siege, messages.encode(lie)).status_code == 403


def test_a_join_for_another_run_or_protocol_is_refused(siege: Siege) -> None:
    peer = Peer(siege, new_key())
    response = joining(siege, peer.join_body(run="0" * 64))
    assert response.status_code == 400
    assert "another run" in why(response)
    newer = PROTOCOL + 1
    for protocol, side in ((1, "the worker"), (newer, "this side"), (10**4000, "this side")):
        response = joining(siege, peer.join_body(protocol=protocol))
        assert response.status_code == 426
        assert response.json()["why"].startswith(f"Protocol {protocol}"[:100])
        assert side in why(response) or protocol > newer


def test_a_replayed_join_makes_nobody_twice(siege: Siege) -> None:
    peer = siege.peer()
    body = peer.join_body()
    for bearer in (None, "a-guessed-token", peer.session):  # overheard, but without a token
        assert siege.client(bearer).post(JOIN, content=body).status_code == 403
    again = joining(siege, body)
    assert again.json()["session"] == peer.session
    with siege.keeper.ledger.reading() as r:
        assert [worker.id for worker in r.workers()].count(peer.id) == 1  # type: ignore[arg-type]
        joined = [event for event in r.latest_events(1000) if event.kind == "joined"]
    assert sum(event.detail["worker"] == peer.id for event in joined) == 1


def test_an_overheard_join_is_worth_nothing_with_another_token(siege: Siege) -> None:
    """Else whoever overhears it could bind its worker to a token that is revoked soon."""
    peer = siege.peer()
    theirs = siege.worker_token("of somebody else")
    response = siege.client(theirs).post(JOIN, content=peer.join_body())
    assert response.status_code == 403
    assert "signed for another token" in why(response)
    hash = hashlib.sha256(theirs.encode()).hexdigest()
    owner = siege.client(siege.token)
    assert owner.post("/v1/tokens/revoke", json={"say": "revoke", "token": hash}).status_code == 200
    assert peer.say("alive", messages.Alive(peer.id)).status_code == 200
    mine = siege.worker_token("of its own")
    again = siege.client(mine).post(JOIN, content=peer.join_body(token=mine))
    assert again.json()["session"] == peer.session


def test_a_name_is_plain_words(siege: Siege) -> None:
    for name in (
        "a\nb",
        "a\n",  # which $ would let pass
        "\x1b[2J\x1b[31mroot",
        "a\0b",
        "\x7f",
        "\u202egnp.exe",  # right to left
        "\u200b",
        "\ufeff",
        "<script>alert(1)</script>",
        "'; DROP TABLE workers; --",
        "../../owner.token",
        "x" * 65,
    ):
        response = joining(siege, Peer(siege, new_key()).join_body(name=name))
        assert response.status_code == 400, name
        assert "not understood" in why(response)
        label = siege.client(siege.token).post("/v1/tokens", json={"say": "issue", "label": name})
        assert label.status_code == 400, name


# --- updates --------------------------------------------------------------------------------------


def test_an_update_must_be_signed_by_its_worker_for_this_run(siege: Siege) -> None:
    peer, other = siege.peer(), siege.peer()
    task = peer.assignment()
    update = peer.update(task)
    honest = sealed(peer.key, update, "update")
    forged = [
        sealed(other.key, update, "update"),
        Signed(honest.body, peer.id, sealed(other.key, update, "update").signature),
        sealed(peer.key, update, "join"),
        sealed(peer.key, update, "receipt"),
        Signed(honest.body, peer.id, signing.sign(peer.key, honest.body[:-1], "update").hex()),
        Signed(honest.body.replace(b'"loss":1.0', b'"loss":0.5'), peer.id, honest.signature),
        Signed(honest.body, other.id, honest.signature),
    ]
    for lie in forged:
        response = peer.say("updates", lie)
        assert response.status_code == 403
        assert "signature" in why(response)
    response = peer.say("updates", sealed(peer.key, peer.update(task, run="0" * 64), "update"))
    assert response.status_code == 400
    assert "another run" in why(response)
    with siege.keeper.ledger.reading() as r:
        assert not [each for each in r.receipts(task.block) if each.worker == peer.id]
    assert peer.submit(update).verdict != "refused"


def test_a_replayed_update_gets_its_old_receipt_and_counts_once(siege: Siege) -> None:
    peer = siege.peer()
    signed = sealed(peer.key, peer.update(peer.assignment()), "update")
    answers = {peer.say("updates", signed).content for _ in range(3)}
    assert len(answers) == 1
    with siege.keeper.ledger.reading() as r:
        assert len([each for each in r.receipts() if each.worker == peer.id]) == 1


def test_a_stranger_cannot_make_a_receipt(siege: Siege) -> None:
    """What the coordinator signs for one purpose is no signature for another."""
    peer = siege.peer()
    answer = peer.say("updates", sealed(peer.key, peer.update(peer.assignment()), "update"))
    receipt = messages.decode(answer.content, Signed)
    signature = bytes.fromhex(receipt.signature)
    assert signing.verify(siege.keeper.key.id, receipt.body, "receipt", signature)
    for purpose in ("closed", "update", "join"):
        assert not signing.verify(siege.keeper.key.id, receipt.body, purpose, signature)
    assert not signing.verify(siege.keeper.key.id, receipt.body + b" ", "receipt", signature)
