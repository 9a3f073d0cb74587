"""docs/wire.md cannot rot: it names whatever is spoken, and a worker can be written from it."""

import base64
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from starlette.routing import Route
from tests.attacks.siege import Siege

from blocktrain.aggregation import charter, keeper, status
from blocktrain.aggregation.combine import Averaging
from blocktrain.aggregation.deadlines import Rules
from blocktrain.commands.listen import KEEP_ALIVE
from blocktrain.services.belonging import FOLLOW_EVERY
from blocktrain.services.coordinator import answers, door, watching, working
from blocktrain.services.coordinator.serving import DOUBT, LIFE
from blocktrain.wire import (
    codecs,
    messages,
    owner,
    registry,
    serving,
    signing,
    tensors,
)

DOCS = Path(__file__).parents[2] / "docs"
WIRE = (DOCS / "wire.md").read_text()
ASSUMPTIONS = (DOCS / "assumptions.md").read_text()
SECTIONS = dict(re.findall(r"^#### (\S+)\n(.*?)(?=^##|\Z)", WIRE, re.M | re.S))

STRUCTS = [
    *(serving.Announce, serving.Heard, serving.Stages, serving.Holding, serving.Place),
    *(serving.Banned, serving.Publish),
] + [
    kind
    for room in (messages, owner)
    for kind in vars(room).values()
    if isinstance(kind, type)
    and issubclass(kind, msgspec.Struct)
    and kind is not messages.Message
    and kind.__module__ == room.__name__
]


def test_every_route_is_named_with_its_method(siege: Siege) -> None:
    routes = siege.coordinator.app().routes
    assert len(routes) > 24
    for route in routes:
        assert isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}:
            assert f"| {method} `{route.path}` |" in WIRE, f"{method} {route.path}"
    told = re.findall(r"^\| [A-Z]+ `/", WIRE, re.M)
    assert len(told) == len(routes)  # nothing is named that is not there


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_message_is_named_with_all_of_its_fields(kind: type[msgspec.Struct]) -> None:
    tag = kind.__struct_config__.tag
    name = f"`{tag}`" if tag else kind.__name__
    assert name in SECTIONS, f"{name} has no section"
    section = SECTIONS[name]
    if tag:
        sentence = str(kind.__doc__).partition("\n")[0]
        assert f"*{sentence}*" in section.replace("\n", " "), "its sentence is another"
    named = {
        field
        for row in re.findall(r"^\| (`.*?`) \|", section, re.M)
        for field in re.findall("`([a-z_]+)`", row)
    }
    assert named == set(kind.__struct_encode_fields__)


def test_every_limit_and_code_is_the_one_that_holds() -> None:
    for number in (
        messages.MAX_MESSAGE,
        door.HEAD_AT_MOST,
        charter.MOST_BLOCKS,
        registry.MAX_KNOWN,
        serving.MAX_BANNED,
    ):
        assert f"{number:,}" in WIRE
    for sentence in (
        f"**Protocol version {messages.PROTOCOL}.**",
        f"within {door.HEAD_SECONDS:.0f} seconds",
        f"within {answers.STANDSTILL:.0f} seconds",
        f"{door.REQUESTS_PER_SECOND:.0f} a second, {door.BURST:.0f} at once",
        f"held for up to {working.LONGEST_WAIT:.0f} seconds",
        f"| {KEEP_ALIVE} seconds |",
        f"the next {working.MOST_VERSIONS} rounds",
        f"{status.MOST_WORKERS}, {status.LAST_EVENTS}, {status.MOST_POINTS}; fewer",
        f"changes for {watching.SSE_HEARTBEAT:.0f} seconds",
        signing.PREFIX.decode().encode("unicode_escape").decode(),
        f"belongs to {codecs.BLOCK} values",
        f"and {registry.MAX_OF_ONE} of one token, each for {registry.LEASE:.0f} seconds after",
        f"after {registry.LEASE:.0f} seconds of silence",
        f"for {LIFE.days} days. Ours get another one when half",
        f"in the last {(LIFE + DOUBT).days} days",
        f"ask for that every {FOLLOW_EVERY:.0f} seconds",
    ):
        assert sentence in WIRE, sentence
    for sentence in (f"{keeper.UNNAMED:.0f} seconds", f"{keeper.PRUNE_EVERY:.0f} seconds"):
        assert sentence in ASSUMPTIONS.replace("\n ", ""), sentence
    assert f"{keeper.UNNAMED:.0f} seconds after they came" in WIRE
    for _, code in answers.STATUS_OF:
        assert re.search(rf"^\| [\d, ]*{code}[\d, ]* \|", WIRE, re.M), code
    for codec in codecs.CODECS:
        assert f"| `{codec}` |" in WIRE
    for purpose in ("join", "update", "receipt", "closed", "announce"):
        assert re.search(rf"^\| `{purpose}` \| (worker|coordinator|stage) \|", WIRE, re.M)


def test_every_field_of_the_charter_is_named() -> None:
    part = WIRE[WIRE.index("## The charter") : WIRE.index("## Tensors")]
    kinds: list[Any] = [charter.Charter, Rules, Averaging]
    for kind in kinds:
        for field in kind.__annotations__:
            assert f"`{field}`" in part, field


def test_every_metric_is_named(siege: Siege) -> None:
    told = siege.client().get("/metrics").text
    names = set(re.findall(r"^# TYPE (\S+) (?:counter|gauge|histogram)", told, re.M))
    names = {name for name in names if not name.endswith("_created")}
    assert len(names) >= 9
    for name in names:
        assert f"`{name}" in WIRE, name


def test_links_between_sections_lead_somewhere() -> None:
    for text in (WIRE, ASSUMPTIONS):
        headings = re.findall(r"^#+ (.*)$", text, re.M)
        anchors = {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}
        for link in re.findall(r"\]\(#(.*?)\)", text):
            assert link in anchors, link
    for page in ("wire.md", "assumptions.md", "rounds.md"):
        for file in re.findall(r"\]\(([\w./]+)(?:#[\w-]*)?\)", (DOCS / page).read_text()):
            assert (DOCS / file).exists(), (page, file)


# --- another worker, from the document alone ------------------------------------------------------


class Foreigner:
    """Speaks protocol 3 with nothing of ours."""

    def __init__(self, http: httpx.Client, token: str) -> None:
        self.http, self.bearer = http, token
        self.key = Ed25519PrivateKey.generate()
        self.id = self.key.public_key().public_bytes_raw().hex()

    def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.bearer}"}
        answer = self.http.request(method, path, headers=headers, **more)
        assert answer.is_success, answer.text
        return answer

    def signed(self, purpose: str, **message: Any) -> tuple[bytes, dict[str, str]]:
        """The body's bytes, and the message that carries them."""
        body = json.dumps(message).encode()
        prefix = b"blocktrain signature 1\n" + bytes([len(purpose)]) + purpose.encode()
        return body, {
            "say": "signed",
            "body": base64.b64encode(body).decode(),
            "by": self.id,
            "signature": self.key.sign(prefix + body).hex(),
        }

    def join(self) -> None:
        self.hello = self.call("GET", "/v1/hello").json()
        assert self.hello["protocol"] == 3
        _, join = self.signed(
            "join", say="join", protocol=3, run=self.hello["run"], worker=self.id,
            name="from afar", memory=2**30, device="cpu",
            token=hashlib.sha256(self.bearer.encode()).hexdigest(),
        )  # fmt: skip
        joined = self.call("POST", "/v1/join", json=join).json()
        text = joined["charter"]
        assert hashlib.sha256(text.encode()).hexdigest() == self.hello["run"]
        self.charter, self.bearer = json.loads(text), joined["session"]

    def turn(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """One assignment, and the receipt for it."""
        task = {"say": "wait"}
        while task["say"] == "wait":
            task = self.call("POST", "/v1/ask", json={"say": "ask", "worker": self.id}).json()
        base: Any = task["base"]
        snapshot = self.call("GET", f"/v1/blobs/{base['snapshot']}").content
        assert hashlib.sha256(snapshot).hexdigest() == base["snapshot"]
        shapes = self.charter["blocks"][task["block"]]
        header, values = read_fp32(snapshot, shapes)
        changes = [np.full_like(value, 1e-3) for value in values]
        body = header + b"".join(change.tobytes() for change in changes)
        blob = hashlib.sha256(body).hexdigest()
        self.call("PUT", f"/v1/blobs/{blob}", content=body)
        where = {name: task[name] for name in ("block", "round", "slot", "steps")}
        trained = int(task["steps"]) * self.charter["rules"]["bytes_per_step"]
        nothing = "0" * 64
        said, update = self.signed(
            "update", say="update", worker=self.id, run=self.hello["run"], **where,
            base=base["snapshot"], blob=blob, bytes_trained=trained, seconds=0.5, loss=1.0,
            optimiser_before=nothing, optimiser_after=nothing,
        )  # fmt: skip
        answer = self.call("POST", "/v1/updates", json=update).json()
        receipt = base64.b64decode(answer["body"])
        prefix = b"blocktrain signature 1\n\x07receipt"
        coordinator = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.hello["coordinator"]))
        coordinator.verify(bytes.fromhex(answer["signature"]), prefix + receipt)
        told = json.loads(receipt)
        assert told["update"] == hashlib.sha256(said).hexdigest()
        return task, told


def read_fp32(body: bytes, shapes: dict[str, list[int]]) -> tuple[bytes, list[Any]]:
    """The one header that these shapes have, and the tensors in its order."""
    digest = hashlib.sha256(json.dumps(dict(sorted(shapes.items()))).encode()).hexdigest()[:16]
    header: dict[str, Any] = {"__metadata__": {"codec": "fp32", "shapes": digest}}
    values, end = [], 0
    for name, shape in sorted(shapes.items()):
        begin, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        values.append((shape, begin, end))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    assert body.startswith(head)
    assert len(body) == len(head) + end
    data = body[len(head) :]
    return head, [np.frombuffer(data[b:e], "<f4").reshape(s) for s, b, e in values]


def test_a_worker_can_be_written_from_the_document(siege: Siege) -> None:
    stranger = Foreigner(siege.client(), siege.worker_token())
    stranger.join()
    task, receipt = stranger.turn()
    assert (receipt["verdict"], receipt["round"], receipt["factor"]) == ("taken", task["round"], 1)
    while True:  # until its round is closed, and then by the delta
        told = stranger.call("GET", f"/v1/versions/{task['block']}/{task['base']['round']}").json()
        if told["versions"]:
            break
        time.sleep(0.05)
    after = told["versions"][0]
    bodies = {
        name: stranger.call("GET", f"/v1/blobs/{digest}").content
        for name, digest in (
            ("before", task["base"]["snapshot"]),
            ("kept", task["base"]["steady"]),
            ("delta", after["delta"]),
        )
    }
    shapes = stranger.charter["blocks"][task["block"]]
    steady = stranger.charter["averaging"]["steady"]
    keep, rest = np.float32(steady), np.float32(1 - steady)
    head, before = read_fp32(bodies["before"], shapes)
    kept, delta = (read_fp32(bodies[name], shapes)[1] for name in ("kept", "delta"))
    snapshot = [old + change for old, change in zip(before, delta, strict=True)]
    blended = [old * keep + new * rest for old, new in zip(kept, snapshot, strict=True)]
    for name, values in (("snapshot", snapshot), ("steady", blended)):
        body = head + b"".join(value.tobytes() for value in values)
        assert hashlib.sha256(body).hexdigest() == after[name], name
    stranger.call("POST", "/v1/leave", json={"say": "leave", "worker": stranger.id})


@pytest.mark.parametrize("codec", [*codecs.CODECS])
def test_a_body_of_every_codec_is_laid_out_as_told(codec: str) -> None:
    shapes = {"b.matrix": (3, 100), "a.vector": (5,), "c.größe": (2, 130)}
    random = np.random.default_rng(1)
    values = {n: random.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    body = tensors.encode(values, codec)
    size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + size])
    told = json.dumps({name: [*shapes[name]] for name in sorted(shapes)})
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    assert header.pop("__metadata__") == {"codec": codec, "shapes": digest}
    order = ["F32", "BF16", "F16", "I8", "U8"]
    assert [*header] == sorted(header, key=lambda name: (order.index(header[name]["dtype"]), name))
    data = body[8 + size :]
    parts = {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}
    assert b"".join(parts.values()) == data
    decoded = tensors.decode(body, codec, shapes)
    for name, shape in shapes.items():
        read = by_the_document(codec, header[name]["dtype"], parts, name)
        assert np.array_equal(read[: int(np.prod(shape))].reshape(shape), decoded[name])


def by_the_document(codec: str, dtype: str, parts: dict[str, bytes], name: str) -> Any:
    """The values of a tensor, by the table of codecs."""
    if dtype in ("F32", "F16"):
        return np.frombuffer(parts[name], {"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)
    bits = np.frombuffer(parts[f"{name}.scale"], "<u2").astype(np.uint32) << 16
    scales = np.repeat(bits.view(np.float32), 128)
    if dtype == "I8":
        codes = np.frombuffer(parts[name], "i1").astype(np.float32)
        return codes * scales[: codes.size]
    each = {"int4": 4, "int2": 2}[codec]
    packed = np.frombuffer(parts[name], "u1")
    codes = np.stack([(packed >> at) & (2**each - 1) for at in range(0, 8, each)], axis=1)
    levels = codes.reshape(-1).astype(np.float32) + np.float32(0.5 - 2 ** (each - 1))
    return levels[: scales.size] * scales[: levels.size]
