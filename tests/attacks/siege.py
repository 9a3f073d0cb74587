"""A coordinator under attack, and those who come to it: honest ones, liars and raw sockets."""

import hashlib
import itertools
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn

from blocktrain.aggregation.folder import RunFolder, owners_token
from blocktrain.aggregation.keeper import Keeper
from blocktrain.commands.listen import Listen, listening
from blocktrain.services.coordinator import Coordinator
from blocktrain.services.coordinator.door import Head
from blocktrain.terms import Digest, Parameters
from blocktrain.wire import messages, signing, tensors
from blocktrain.wire.certificates import load_authority
from blocktrain.wire.messages import Assignment, Message, Receipt, Signed, Update
from blocktrain.wire.signing import Key, new_key

NOTHING = Digest(hashlib.sha256(b"").hexdigest())
SOON = 10.0  # seconds within which an honest worker must have had its turn
PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never used; a client of its own loads 0.03 s
addresses = itertools.count(1)


@dataclass
class Siege:
    """A coordinator that is up, with ways to speak to it."""

    url: str
    folder: Path
    coordinator: Coordinator
    clients: list[httpx.Client] = field(default_factory=list)

    @property
    def keeper(self) -> Keeper:
        return self.coordinator.keeper

    @property
    def token(self) -> str:
        """The owner's."""
        return owners_token(self.folder)

    def client(self, bearer: str | None = None) -> httpx.Client:
        """Somebody from an address of their own, as a proxy on this machine would tell it."""
        number = next(addresses)
        headers = {"X-Forwarded-For": f"10.1.{number // 250}.{number % 250 + 1}"}
        if bearer is not None:
            headers["Authorization"] = f"Bearer {bearer}"
        made = httpx.Client(
            base_url=self.url, headers=headers, timeout=20.0, verify=PLAIN, trust_env=False
        )
        self.clients.append(made)
        return made

    def worker_token(self, label: str = "") -> str:
        """A new token for a worker, from the owner."""
        body = {"say": "issue", "label": label}
        return str(self.client(self.token).post("/v1/tokens", json=body).json()["token"])

    def peer(self, key: Key | None = None) -> "Peer":
        """Somebody who has joined."""
        peer = Peer(self, key or new_key())
        joined = self.client(self.token).post("/v1/join", content=peer.join_body())
        assert joined.status_code == 200, joined.text
        peer.session = joined.json()["session"]
        return peer

    def raw(self, data: bytes, *more: bytes, pause: float = 0.0) -> tuple[int, bytes]:
        """Status and body of the answer to these very bytes; 0 if the connection just ends."""
        with self.socket() as sock:
            sock.sendall(data)
            for piece in more:
                time.sleep(pause)
                sock.sendall(piece)
            return answer(sock)

    def socket(self) -> socket.socket:
        """A connection."""
        address = httpx.URL(self.url)
        return socket.create_connection((address.host, address.port or 80), timeout=10.0)

    def serves_honest_workers(self) -> None:
        """Somebody comes, trains, and gets a signed receipt that says taken."""
        honest = self.peer()
        receipt = honest.submit(honest.update(honest.assignment()))
        assert receipt.verdict != "refused", receipt.why
        assert honest.say("leave", messages.Leave(honest.id)).status_code == 200

    def close(self) -> None:
        for client in self.clients:
            client.close()


@dataclass
class Peer:
    """Somebody with a key: honest unless told otherwise."""

    siege: Siege
    key: Key
    session: str = ""

    @cached_property
    def http(self) -> httpx.Client:
        return self.siege.client(self.session)

    @property
    def id(self) -> str:
        return self.key.id

    def join_body(self, purpose: str = "join", token: str | None = None, **lies: Any) -> bytes:
        """The message by which it comes in, with this token or the owner's."""
        told: dict[str, Any] = {
            "protocol": messages.PROTOCOL,
            "run": self.siege.keeper.run,
            "worker": self.id,
            "name": "somebody",
            "memory": 2**30,
            "device": "cpu",
            "token": hashlib.sha256((token or self.siege.token).encode()).hexdigest(),
        }
        return messages.encode(sealed(self.key, messages.Join(**{**told, **lies}), purpose))

    def say(self, path: str, message: Message | bytes) -> httpx.Response:
        """Posts a message, or whatever it is."""
        body = message if isinstance(message, bytes) else messages.encode(message)
        return self.http.post(f"/v1/{path}", content=body)

    def assignment(self, blocks: list[int] | None = None) -> Assignment:
        """Asks until there is one."""
        deadline = time.monotonic() + SOON
        while time.monotonic() < deadline:
            answer = self.say("ask", messages.Ask(self.id, blocks))
            assert answer.status_code == 200, answer.text
            if answer.json()["say"] == "assignment":
                return messages.decode(answer.content, Assignment)
            time.sleep(0.05)
        raise AssertionError(f"nothing to do within {SOON} s: {answer.text}")

    def change(self, task: Assignment) -> Parameters:
        """What training might have given: small numbers of the right shapes."""
        numbers = np.random.default_rng([task.block, task.round, task.slot])
        return {
            name: numbers.normal(size=shape, scale=1e-3).astype(np.float32)
            for name, shape in self.siege.keeper.charter.shapes(task.block).items()
        }

    def update(self, task: Assignment, body: bytes | None = None, **lies: Any) -> Update:
        """Sends tensors; returns the message that names them. Lies replace its fields."""
        charter = self.siege.keeper.charter
        body = tensors.encode(self.change(task), charter.codec) if body is None else body
        told: dict[str, Any] = {
            "worker": self.id,
            "run": self.siege.keeper.run,
            "block": task.block,
            "round": task.round,
            "slot": task.slot,
            "base": task.base.snapshot,
            "blob": self.put(body),
            "steps": task.steps,
            "bytes_trained": task.steps * charter.rules.bytes_per_step,
            "seconds": 0.1,
            "loss": 1.0,
            "optimiser_before": NOTHING,
            "optimiser_after": NOTHING,
        }
        return Update(**{**told, **lies})

    def put(self, body: bytes) -> Digest:
        """Sends a blob; returns its digest."""
        digest = Digest(hashlib.sha256(body).hexdigest())
        answer = self.http.put(f"/v1/blobs/{digest}", content=body)
        assert answer.status_code == 200, answer.text
        return digest

    def submit(self, update: Update) -> Receipt:
        """The receipt, which must be the coordinator's."""
        answer = self.say("updates", sealed(self.key, update, "update"))
        assert answer.status_code == 200, answer.text
        signed = messages.decode(answer.content, Signed)
        assert signed.by == self.siege.keeper.key.id
        assert signing.verify(signed.by, signed.body, "receipt", bytes.fromhex(signed.signature))
        return messages.decode(signed.body, Receipt)


def sealed(key: Key, message: Message | bytes, purpose: str) -> Signed:
    """A message by which the holder of a key stands."""
    body = message if isinstance(message, bytes) else messages.encode(message)
    return Signed(body, key.id, signing.sign(key, body, purpose).hex())


def answer(sock: socket.socket) -> tuple[int, bytes]:
    """What comes back on a connection; 0 if nothing does."""
    with HTTPResponse(sock) as response:
        try:
            response.begin()
        except (ConnectionError, OSError):
            return 0, b""
        return response.status, response.read()


def why(response: httpx.Response) -> str:
    """The sentence of a refusal."""
    return messages.decode(response.content, messages.Refused).why


@contextmanager
def besieged(folder: Path) -> Iterator[Siege]:
    """Keeps the run as `blocktrain coordinator` does, in a thread of this process."""
    with RunFolder(folder) as run, listening(Listen(port=0)) as (sock, url):
        served = run.corpus if run.charter.corpus_served else None
        coordinator = Coordinator(run.keeper(), served, [], load_authority(folder))
        server = uvicorn.Server(
            uvicorn.Config(
                coordinator.app(), log_config=None, timeout_graceful_shutdown=1, http=Head
            )
        )
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        siege = Siege(url, folder, coordinator)
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield siege
        finally:
            siege.close()
            server.should_exit = True
            thread.join()
