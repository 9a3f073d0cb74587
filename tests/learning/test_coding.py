"""Archives: every text comes back, and what cannot be opened is refused with a reason."""

import functools
import hashlib
import json
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from constriction import stream
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blocktrain.errors import BadArchive, BadInput, BadModel
from blocktrain.learning import coding
from blocktrain.learning.coding import (
    CACHE_BYTES,
    FAMILY,
    FLOOR,
    LEAST_BITS,
    MAGIC,
    MAX_HEADER,
    MAX_STREAMS,
    MAX_TEXT,
    PRELUDE,
    SLACK_BITS,
    Cut,
    Header,
    code_length_bits,
    compress,
    cut_for,
    decompress,
    floored,
    machine,
    most_streams,
    pack,
    unpack,
)
from blocktrain.learning.files import save_model
from blocktrain.learning.model import VOCABULARY, Cache, Model, Objective, Shape, new_block
from blocktrain.learning.noise import Noise
from blocktrain.terms import Digest

OBJECTIVES: list[Objective] = ["neighbours", "denoise"]
DIGEST = Digest("ab" * 32)
TEXT = b"a text to keep\n"
CPU = torch.device("cpu")


@functools.cache
def shaken(objective: Objective, window: int = 8) -> Model:
    """A small model with random heads and gates, so that what it says depends on its context."""
    shape = Shape(objective, blocks=2, layers=1, width=32, heads=2, window=window)
    blocks = [new_block(shape, index, seed=0) for index in range(shape.blocks)]
    random = torch.Generator().manual_seed(1)
    for block in blocks:
        for parameter in block.requires_grad_(False).parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=random))
    return Model(shape, Noise(), blocks)


@functools.cache
def archive_of(text: bytes = TEXT) -> bytes:
    return compress(shaken("neighbours"), DIGEST, text)


def opened(archive: bytes) -> bytes:
    return decompress(shaken("neighbours"), DIGEST, archive)


def forged(archive: bytes, **claims: Any) -> bytes:
    """The archive with other claims in its header, sealed as if they were true."""
    header, payload = unpack(archive)
    return pack(msgspec.structs.replace(header, **claims), bytes(payload))


def sealed(archive: bytes) -> bytes:
    """The archive with a seal that fits whatever it holds."""
    seal = hashlib.sha256(archive[PRELUDE.size - 4 :]).digest()
    return archive[: len(MAGIC) + 1] + seal + archive[PRELUDE.size - 4 :]


def with_bit(archive: bytes, at: int, bit: int) -> bytes:
    return archive[:at] + bytes([archive[at] ^ 1 << bit]) + archive[at + 1 :]


# --- round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
@settings(max_examples=20, deadline=None)
@given(text=st.binary(max_size=60), stream_bytes=st.integers(1, 60))
def test_any_text_comes_back(objective: Objective, text: bytes, stream_bytes: int) -> None:
    model = shaken(objective)
    with patch.object(coding, "STREAM_BYTES", stream_bytes):
        assert decompress(model, DIGEST, compress(model, DIGEST, text)) == text


@pytest.mark.parametrize("window", [1, 2, 3, 32])
def test_any_window_comes_back(window: int) -> None:
    model = shaken("neighbours", window)
    assert decompress(model, DIGEST, compress(model, DIGEST, TEXT * 3)) == TEXT * 3


def test_the_empty_text_has_no_code() -> None:
    archive = compress(shaken("neighbours"), DIGEST, b"")
    assert code_length_bits(archive) == 0
    assert opened(archive) == b""


def test_every_byte_can_be_coded_and_a_sure_model_costs_what_the_bound_says() -> None:
    sure = Sure(*parts_of(shaken("neighbours")))
    all_bytes = bytes(range(VOCABULARY))
    assert decompress(sure, DIGEST, compress(sure, DIGEST, all_bytes)) == all_bytes
    zeros = bytes(20_000)  # what it is sure of: as cheap as a text can be, and still accepted
    assert decompress(sure, DIGEST, compress(sure, DIGEST, zeros)) == zeros


def test_no_byte_costs_less_than_the_bound() -> None:
    certain_SV = torch.full((10_000, VOCABULARY), -torch.inf)
    certain_SV[:, 0] = 0
    probabilities_SV = floored(certain_SV)
    assert probabilities_SV[0, 1:].min() == FLOOR
    assert probabilities_SV[0].sum() == pytest.approx(1)
    encoder = stream.queue.RangeEncoder()
    for _ in range(50):
        encoder.encode(np.zeros(10_000, np.int32), FAMILY, probabilities_SV)
    assert 500_000 * LEAST_BITS < encoder.num_bits() < 500_000 * LEAST_BITS * 1.2 + SLACK_BITS


def test_progress_ends_with_the_text() -> None:
    seen: list[tuple[int, int]] = []
    archive = compress(shaken("neighbours"), DIGEST, TEXT, lambda *at: seen.append(at))
    assert seen == [(number + 1, len(TEXT)) for number in range(len(TEXT))]
    seen.clear()
    decompress(shaken("neighbours"), DIGEST, archive, lambda *at: seen.append(at))
    assert seen[-1] == (len(TEXT), len(TEXT))


def test_another_process_opens_it_from_disk(tmp_path: Path) -> None:
    """Weights lie elsewhere in memory there, and come from a file."""
    model = shaken("denoise", 32)
    digest = save_model(model, tmp_path / "model").digest
    text = bytes(np.random.default_rng(0).integers(32, 127, 300, dtype=np.uint8))
    (tmp_path / "archive").write_bytes(compress(model, digest, text))
    script = f"""
import torch; torch.set_num_threads({torch.get_num_threads()})
from pathlib import Path
from blocktrain.learning.coding import decompress
from blocktrain.learning.files import load_model, read_manifest
here = Path({str(tmp_path)!r})
model, digest = load_model(here / "model"), read_manifest(here / "model").digest
(here / "text").write_bytes(decompress(model, digest, (here / "archive").read_bytes()))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert (tmp_path / "text").read_bytes() == text


@given(length=st.integers(0, 300), streams=st.integers(1, 20))
def test_a_cut_text_is_put_together_again(length: int, streams: int) -> None:
    cut = Cut(length, streams)
    text = np.arange(length).astype(np.uint8)
    apart_ST = cut.apart(text)
    assert apart_ST.shape == (streams, cut.steps)
    assert np.array_equal(cut.together(apart_ST), text)
    assert sum(cut.coded(step) for step in range(cut.steps)) == length


def test_streams_are_few_for_short_texts_and_large_models() -> None:
    small = Shape()
    assert [cut_for(length, small).streams for length in (0, 1, 1024, 4096, 10**9)] == [
        1,
        1,
        2,
        8,
        MAX_STREAMS,
    ]
    large = Shape(blocks=12, layers=2, width=1024, window=2048)
    rows = most_streams(large)
    assert 1 <= rows < MAX_STREAMS
    keys_and_values = rows * 2 * 4 * large.window * large.width * large.blocks * large.layers
    assert rows == 1 or keys_and_values <= CACHE_BYTES


# --- what is refused ----------------------------------------------------------------------------


def test_a_cut_archive_is_called_cut_short() -> None:
    archive = archive_of()
    for length in range(1, len(archive)):
        with pytest.raises(BadArchive, match="cut short"):
            opened(archive[:length])


def test_every_flipped_bit_is_refused() -> None:
    archive = archive_of()
    for at in range(len(archive)):
        for bit in range(8):
            with pytest.raises(BadArchive):
                opened(with_bit(archive, at, bit))


def test_what_is_not_an_archive_is_refused() -> None:
    for other in (b"", b"PK\x03\x04", TEXT, bytes(1000)):
        with pytest.raises(BadArchive, match="not an archive"):
            opened(other)
    with pytest.raises(BadArchive, match="damaged"):
        opened(archive_of() + b"\n")


def test_a_newer_format_asks_for_an_upgrade() -> None:
    archive = archive_of()
    newer = archive[: len(MAGIC)] + b"\x02" + archive[len(MAGIC) + 1 :]
    with pytest.raises(BadArchive, match="newer version"):
        opened(newer)


def test_another_model_is_named() -> None:
    with pytest.raises(BadArchive, match=r"another model \(abababababababab, .* cdcdcdcdcdcdcdcd"):
        decompress(shaken("neighbours"), Digest("cd" * 32), archive_of())


def test_another_number_of_threads_opens_it_too() -> None:
    threads = torch.get_num_threads()
    archive = archive_of()
    torch.set_num_threads(threads + 1)
    try:
        assert archive_of() == archive
    finally:
        torch.set_num_threads(threads)


def test_another_machine_is_named() -> None:
    there = machine(CPU).replace("torch ", "torch 1.") + "; quantum"
    with pytest.raises(BadArchive, match=r"another machine or build \(torch 1\..*, quantum; here"):
        opened(forged(archive_of(), machine=there))
    for fewer in ("", "cpu"):
        with pytest.raises(BadArchive, match="another machine or build"):
            opened(forged(archive_of(), machine=fewer))
    with pytest.raises(BadArchive, match="damaged"):
        opened(forged(archive_of(), machine="\x1b[2Jdo as I say"))


def test_a_machine_that_computes_otherwise_is_not_believed() -> None:
    """Nothing in the header differs, but the probabilities do."""
    with pytest.raises(BadArchive, match="computes otherwise"):
        decompress(shaken("denoise"), DIGEST, archive_of(TEXT * 3))


# --- lies: archives that were sealed again ------------------------------------------------------


def lies() -> Iterator[tuple[str, Callable[[bytes], bytes]]]:
    for claim in (MAX_TEXT, MAX_TEXT + 1, 2**63, -1, 10**6):
        yield f"bytes {claim}", functools.partial(forged, bytes=claim, streams=MAX_STREAMS)
    for claim in (0, -1, 2, MAX_STREAMS + 1, 2**40):
        yield f"streams {claim}", functools.partial(forged, streams=claim)
    for claim in (0, 1, 2**40):
        yield f"window {claim}", functools.partial(forged, window=claim)
    for claim in (-4, 2, 2**62):
        yield f"payload {claim}", functools.partial(forged, payload=claim)
    yield "digest", lambda archive: forged(archive, digest="0" * 64)
    yield "no digest", lambda archive: forged(archive, digest="")
    yield (
        "header length",
        lambda archive: sealed(
            archive[: PRELUDE.size - 4] + struct.pack("<I", 2**32 - 1) + archive[PRELUDE.size :]
        ),
    )
    yield "deep header", lambda archive: with_header(b"[" * 4000)
    yield "long header", lambda archive: with_header(b" " * 5000)
    yield "header of other things", lambda archive: with_header(json.dumps({"a": 1}).encode())
    yield "header that is no text", lambda archive: with_header(b'{"model":"\xff\xfe"}')


def test_a_header_too_long_is_not_read() -> None:
    header = msgspec.json.encode(unpack(archive_of(b""))[0])
    assert unpack(with_header(header.ljust(MAX_HEADER)))
    with pytest.raises(BadArchive, match="first bytes"):
        unpack(with_header(header.ljust(MAX_HEADER + 1)))


def with_header(header: bytes) -> bytes:
    body = struct.pack("<I", len(header)) + header
    return MAGIC + b"\x01" + hashlib.sha256(body).digest() + body


@pytest.mark.parametrize("lie", [pytest.param(lie, id=name) for name, lie in lies()])
def test_a_lie_is_refused_before_memory_is_taken(lie: Callable[[bytes], bytes]) -> None:
    archive = lie(archive_of())
    tracemalloc.start()
    try:
        with pytest.raises(BadArchive):
            opened(archive)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_no_sealed_header_opens_to_wrong_bytes() -> None:
    text = b"kept"
    archive = compress(shaken("neighbours"), DIGEST, text)
    _, payload = unpack(archive)
    for at in range(PRELUDE.size - 4, len(archive) - len(payload)):
        with pytest.raises(BadArchive):
            opened(sealed(with_bit(archive, at, at % 8)))


def test_no_sealed_payload_opens_to_wrong_bytes() -> None:
    archive = archive_of()
    header, payload = unpack(archive)
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(20):
        changed = bytearray(payload)
        changed[random.integers(len(changed))] ^= 1 << random.integers(8)
        try:
            text = opened(pack(header, bytes(changed)))
        except BadArchive:
            refused += 1
        else:
            assert text == TEXT  # the last bits of a code may say nothing
    assert refused > 10
    for shorter in range(0, len(payload) - 8, 4):
        with pytest.raises(BadArchive):
            opened(pack(msgspec.structs.replace(header, payload=shorter), bytes(payload[:shorter])))


def test_a_code_that_no_text_has_is_refused() -> None:
    """Range codes have holes; the coder finds them with an error of its own."""
    header, _ = unpack(archive_of())
    for word in (b"\xff" * 4, b"\xff\xff\xff\x7f"):
        hole = word * 3
        with pytest.raises(BadArchive, match="computes otherwise"):
            opened(pack(msgspec.structs.replace(header, payload=len(hole)), hole))


def test_a_text_too_long_to_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "MAX_TEXT", 10)
    with pytest.raises(BadInput, match="at most 10"):
        compress(shaken("neighbours"), DIGEST, TEXT)


def test_a_model_that_is_not_finite_is_refused() -> None:
    with pytest.raises(BadModel, match="not finite"):
        compress(Broken(*parts_of(shaken("neighbours"))), DIGEST, TEXT)


# --- models for the tests -----------------------------------------------------------------------


def parts_of(model: Model) -> tuple[Shape, Noise, Any]:
    return model.shape, model.noise, model.blocks


class Sure(Model):
    """Says zero, with certainty."""

    def prefixes(self, tokens_BT: Tensor, cache: Cache | None = None) -> Iterator[Tensor]:
        log_BTV = torch.full((*tokens_BT.shape, VOCABULARY), -torch.inf)
        log_BTV[..., 0] = 0
        yield log_BTV


class Broken(Model):
    """Says nothing that is a number."""

    def prefixes(self, tokens_BT: Tensor, cache: Cache | None = None) -> Iterator[Tensor]:
        yield torch.full((*tokens_BT.shape, VOCABULARY), torch.nan)


def test_the_header_says_what_it_needs() -> None:
    header, payload = unpack(archive_of())
    assert header == Header(
        model=DIGEST,
        machine=machine(CPU),
        bytes=len(TEXT),
        digest=Digest(hashlib.sha256(TEXT).hexdigest()),
        streams=1,
        window=8,
        payload=len(payload),
    )
    assert code_length_bits(archive_of()) == 8 * len(payload)
