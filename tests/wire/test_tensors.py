"""Named arrays <-> bytes: whole, tensor by tensor, with error feedback; and refused lies."""

import hashlib
import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from blocktrain.errors import BadTensors, BlockTrainError
from blocktrain.terms import Array, Parameters
from blocktrain.wire.codecs import AT_ONCE, CODECS
from blocktrain.wire.tensors import (
    Body,
    Shapes,
    Writer,
    decode,
    encode,
    encode_with_residual,
    encoded,
    largest,
    order,
    shapes_of,
    stream,
)

LOSSY = [name for name, codec in CODECS.items() if not codec.exact]
BLOCKWISE = {"int8": 0.004, "int4": 0.067, "int2": 0.44}
"""The largest error in a matrix, as a share of the largest of its block of values: 1/254, 1/16 and
7/16, and a little for scales that are rounded."""

every_codec = pytest.mark.parametrize("codec", CODECS)
every_lossy_codec = pytest.mark.parametrize("codec", LOSSY)


def normal(*shape: int, seed: int = 0, size: float = 0.01) -> Array:
    return (size * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def array(*values: float) -> Array:
    return np.array(values, np.float32)


SAMPLES: Parameters = {
    "ordinary": normal(48, 64),
    "vector": normal(300),
    "odd": normal(7, 11, 13),
    "more than one cache-full": normal(AT_ONCE // 128 + 1, 129),
    "empty": normal(0),
    "empty matrix": normal(3, 0, 2),
    "scalar": np.full((), 0.3, np.float32),
    "a stranger's": normal(1, 1),
    "Zeros": np.zeros((20, 20), np.float32),
}


# --- whole bodies, by every codec ---------------------------------------------------------------


@every_codec
def test_many_tensors_share_a_body(codec: str) -> None:
    body = encode(SAMPLES, codec)
    found = decode(memoryview(body), codec, shapes_of(SAMPLES))
    assert list(found) == list(SAMPLES)
    for name, value in SAMPLES.items():
        alone = CODECS[codec].decode(CODECS[codec].encode(value), value.shape)
        assert found[name].tobytes() == alone.tobytes()
    assert decode(encode({}, codec), codec, {}) == {}


@every_codec
def test_a_body_is_a_function_of_its_values(codec: str) -> None:
    body = encode(SAMPLES, codec)
    assert encode(dict(reversed(SAMPLES.items())), codec) == body
    strided = {name: value.T.copy().T for name, value in SAMPLES.items()}
    assert encode(strided, codec) == body
    found = decode(body, codec, shapes_of(SAMPLES))
    again = decode(body, codec, shapes_of(SAMPLES))
    assert all(found[name].tobytes() == again[name].tobytes() for name in found)


@every_codec
def test_bytes_are_the_same_on_every_machine(codec: str) -> None:
    """Of values made by whole numbers only, so that they are the same everywhere too."""
    whole = ((np.arange(40_000) * 7919 + 12345) % 65521 - 32760).astype(np.float32)
    sent = {
        "a.weight": (whole[:39_300] / np.float32(2**20)).reshape(100, 393),
        "b.weight": whole[39_300:39_600] * whole[:300],
        "c": whole[39_600:].reshape(2, 200) * np.float32(2.0**-120),
    }
    body = encode(sent, codec)
    found = decode(body, codec, shapes_of(sent))
    total = hashlib.sha256(body)
    for value in found.values():
        total.update(value.astype("<f4").tobytes())
    assert total.hexdigest()[:16] == DIGESTS[codec]


DIGESTS = {
    "fp32": "a5f6464321f41884",
    "fp16": "716da794e169b842",
    "int8": "154f009f904174d0",
    "int4": "1eff45b89c922987",
    "int2": "2604706e169df2d4",
}


@every_codec
def test_the_size_is_known_in_advance(codec: str) -> None:
    for values in ({}, SAMPLES, *({name: value} for name, value in SAMPLES.items())):
        assert len(encode(values, codec)) == largest(codec, shapes_of(values))


@every_codec
def test_another_codec_is_refused_by_name(codec: str) -> None:
    values = {"w": normal(8, 8)}
    for other in CODECS.keys() - {codec}:
        padded = encode(values, other).ljust(largest(codec, shapes_of(values)), b"\0")
        body = padded[: largest(codec, shapes_of(values))]
        with pytest.raises(BadTensors, match=rf"by codec '{other}', not by {codec}"):
            decode(body, codec, shapes_of(values))


@every_codec
def test_the_library_reads_and_would_write_the_same_file(codec: str) -> None:
    values = {'ünïcode "name"\n': normal(5, 7), "b": normal(130), "a": normal(3, 2)}
    body = encode(values, codec)
    read = dict(safetensors.deserialize(body))  # type: ignore[no-untyped-call]
    specs = {
        name: safetensors.TensorSpec(
            dtype={"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8"}.get(
                entry["dtype"], "uint8"
            ),
            shape=entry["shape"],
            data_ptr=np.frombuffer(entry["data"], np.uint8).ctypes.data,
            data_len=len(entry["data"]),
        )
        for name, entry in read.items()
    }
    theirs = bytes(safetensors.serialize(specs))
    ours = header_of(body)
    assert ours.pop("__metadata__").keys() == {"codec", "shapes"}
    assert json.dumps(ours) == json.dumps(header_of(theirs))  # in the same order
    assert body.endswith(theirs[8 + int.from_bytes(theirs[:8], "little") :])


@every_codec
def test_what_is_decoded_has_memory_of_its_own(codec: str) -> None:
    sent = {"w": normal(20, 20)}
    body = bytearray(encode(sent, codec))
    found = decode(memoryview(body), codec, shapes_of(sent))
    before = found["w"].copy()
    body[-200:] = bytes(200)
    assert np.array_equal(found["w"], before)
    found["w"] += 1
    assert found["w"].flags.c_contiguous
    assert found["w"].flags.aligned


@every_codec
def test_encoding_leaves_its_values_alone(codec: str) -> None:
    value = SAMPLES["ordinary"].copy()
    residual = {"w": normal(48, 64, seed=1)}
    encode_with_residual({"w": value}, residual, codec)
    assert np.array_equal(value, SAMPLES["ordinary"])
    assert np.array_equal(residual["w"], normal(48, 64, seed=1))


@every_codec
def test_memory_is_that_of_the_result_and_one_tensor(codec: str) -> None:
    values = {f"{i}": normal(256, 256, seed=i) for i in range(16)}
    tensor = values["0"].nbytes
    like = shapes_of(values)
    with watched_memory() as peak:
        body = encode(values, codec)
    assert peak() < len(body) + 5 * tensor
    with watched_memory() as peak:
        decode(body, codec, like)
    assert peak() < 16 * tensor + 5 * tensor


class watched_memory:
    """Bytes taken at most, by numpy and Python, since the beginning."""

    def __enter__(self) -> Callable[[], int]:
        tracemalloc.start()
        return lambda: self.most

    def __exit__(self, *_: object) -> None:
        self.most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


# --- tensor by tensor ---------------------------------------------------------------------------


@every_codec
def test_one_tensor_is_read_without_the_others(codec: str) -> None:
    like, body = shapes_of(SAMPLES), encode(SAMPLES, codec)
    whole, lazy = decode(body, codec, like), Body(memoryview(body), codec, like)
    for name in reversed(SAMPLES):
        assert lazy.read(name).tobytes() == whole[name].tobytes()
        assert lazy.read(name).shape == whole[name].shape
    tensor = {f"{i}": normal(256, 256, seed=i) for i in range(16)}
    lazy = Body(encode(tensor, codec), codec, shapes_of(tensor))
    with watched_memory() as peak:
        lazy.read("7")
    assert peak() < 5 * tensor["7"].nbytes


@every_codec
def test_what_is_read_can_be_ones_own(codec: str) -> None:
    values = {"w": normal(30, 30)}
    body = bytearray(encode(values, codec))
    own = Body(body, codec, shapes_of(values)).read("w", own=True)
    before = own.copy()
    body[-200:] = bytes(200)
    assert np.array_equal(own, before)
    own += 1


def test_exact_tensors_stay_in_the_body_and_cannot_be_written_to() -> None:
    like, body = shapes_of(SAMPLES), bytearray(encode(SAMPLES, "fp32"))
    lazy = Body(body, "fp32", like)
    with watched_memory() as peak:
        seen = {name: lazy.read(name) for name in like}
    assert peak() < 20_000
    for name, value in seen.items():
        assert value.tobytes() == SAMPLES[name].tobytes()
        assert value.flags.aligned
        with pytest.raises(ValueError, match="read-only"):
            value += 1


@every_codec
def test_a_bad_scale_spoils_its_tensor_and_no_other(codec: str) -> None:
    body = bytearray(encode(VALUES, codec))
    lazy = Body(body, codec, LIKE)
    if codec in BLOCKWISE:
        begin = header_of(bytes(body))["w.scale"]["data_offsets"][0]
        at = 8 + int.from_bytes(body[:8], "little") + begin
        body[at : at + 2] = b"\xff\xff"
        with pytest.raises(BadTensors, match="'w' has a scale"):
            lazy.read("w")
    assert lazy.read("norm").shape == (3,)


@pytest.mark.parametrize(("codec", "part"), [("int8", 1), ("int4", 1), ("int2", (1.5 / 7.5) ** 2)])
def test_scales_bound_a_tensor_whatever_its_codes_are(codec: str, part: float) -> None:
    shapes, found = shapes_of(SAMPLES), dict.fromkeys(SAMPLES, 0.0)
    for code in (0x00, 0x7F, 0x80, 0xFF):
        body = bytearray(encode(SAMPLES, codec))
        for codes, _ in Body(body, codec, shapes).plan.places.values():
            body[codes.begin : codes.begin + codes.part.size] = bytes([code]) * codes.part.size
        whole = Body(body, codec, shapes)
        for name in shapes:
            square = float((whole.read(name).astype(np.float64) ** 2).sum())
            assert square <= whole.ceiling(name)
            found[name] = max(found[name], square)
    # as large as can be, where the last block is whole
    assert found["ordinary"] == pytest.approx(part * whole.ceiling("ordinary"))
    assert whole.ceiling("Zeros") == whole.ceiling("empty") == 0


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_without_scales_nothing_bounds_a_tensor(codec: str) -> None:
    assert Body(encode(SAMPLES, codec), codec, shapes_of(SAMPLES)).ceiling("Zeros") == np.inf


@pytest.mark.parametrize(
    "values", [SAMPLES, {}, {"ünï": normal(3), "Z": normal(2), "é": normal(1)}]
)
def test_a_stream_is_the_body(values: Parameters) -> None:
    like = shapes_of(values)
    chunks = list(stream(((name, values[name]) for name in order(like)), like))
    assert b"".join(chunks) == encode(values, "fp32")
    assert len(chunks) == 1 + len(values)
    assert sum(len(chunk) for chunk in chunks) == largest("fp32", like)  # each counts in bytes


def test_a_stream_is_made_as_its_values_come() -> None:
    asked: list[str] = []

    def values() -> Iterator[tuple[str, Array]]:
        for name in ("a", "b"):
            asked.append(name)
            yield name, normal(2, 2)

    chunks = stream(values(), {"b": (2, 2), "a": (2, 2)})
    next(chunks)
    assert asked == []
    next(chunks)
    assert asked == ["a"]


def test_a_stream_copies_nothing_that_lies_in_order() -> None:
    value, strided = normal(256, 256), normal(256, 512)[:, ::2]
    *_, chunk = stream([("w", value)], {"w": value.shape})
    assert np.shares_memory(np.frombuffer(chunk, np.float32), value)
    *_, chunk = stream([("w", strided)], {"w": strided.shape})
    assert bytes(chunk) == strided.tobytes()
    column = normal(8, 2)[:, 0]
    assert encode({"w": column}, "fp32") == encode({"w": column.copy()}, "fp32")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["b", "a"], "'b' is not what comes next"),
        (["a", "a"], "'a' is not what comes next"),
        (["a", "b", "b"], "'b' is not what comes next"),
        (["a", "c"], "'c' is not what comes next"),
        (["a"], "end before 'b'"),
        ([], "end before 'a'"),
    ],
)
def test_a_stream_has_every_tensor_in_order(
    given: list[str], told: str, sentence: Callable[[BaseException], str]
) -> None:
    with pytest.raises(BadTensors) as error:
        list(stream([(name, normal(2, 2)) for name in given], {"a": (2, 2), "b": (2, 2)}))
    assert told in sentence(error.value)


def test_a_stream_has_tensors_of_the_right_shape() -> None:
    with pytest.raises(BadTensors, match="'a' is not what comes next"):
        list(stream([("a", normal(4))], {"a": (2, 2)}))


@every_codec
def test_what_is_encoded_already_is_placed_in_any_order(codec: str) -> None:
    writer = Writer(codec, shapes_of(SAMPLES))
    for name, value in reversed(SAMPLES.items()):
        writer.place(name, encoded(name, value, codec))
    assert writer.body() == encode(SAMPLES, codec)


# --- what is not finite -------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_the_exact_codec_carries_what_is_not_finite(odd: float) -> None:
    sent = {"w": array(1, odd, -0.0)}
    body, residual = encode_with_residual(sent, None, "fp32")
    assert decode(body, "fp32", {"w": (3,)})["w"].tobytes() == sent["w"].tobytes()
    assert residual is None
    body, _ = encode_with_residual(sent, {"w": -sent["w"]}, "fp32")
    assert not np.isfinite(decode(body, "fp32", {"w": (3,)})["w"]).all()


@every_lossy_codec
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_lossy_codecs_do_not_encode_what_is_not_finite(codec: str, odd: float) -> None:
    with pytest.raises(BadTensors, match="'w' holds a number that is not finite"):
        encode({"w": array(1, odd)}, codec)
    large = {"w": array(3e38, 1)}
    with pytest.raises(BadTensors, match="not finite"):
        encode_with_residual(large, large, codec)


def test_what_is_not_finite_in_half_precision_is_left_to_the_receiver() -> None:
    every = np.arange(2**16, dtype="<u2")
    body = encode({"w": np.zeros(2**16, np.float32)}, "fp16")
    found = decode(body[: -2 * 2**16] + every.tobytes(), "fp16", {"w": (2**16,)})["w"]
    assert np.isnan(found).sum() == 2 * 1023
    assert np.isinf(found).sum() == 2


# --- error feedback -----------------------------------------------------------------------------


def send(rounds: list[Parameters], codec: str) -> tuple[Parameters, Parameters | None]:
    """What arrives of many rounds together, and what is still owed."""
    like = shapes_of(rounds[0])
    arrived = {name: np.zeros(shape, np.float32) for name, shape in like.items()}
    residual = None
    for values in rounds:
        body, residual = encode_with_residual(values, residual, codec)
        for name, value in decode(body, codec, like).items():
            arrived[name] += value
    return arrived, residual


def distance(a: Parameters, b: Parameters) -> float:
    """Relative L2 distance of b from a."""
    apart = sum(float(((a[name] - b[name]) ** 2).sum()) for name in a)
    return float(np.sqrt(apart / sum(float((a[name] ** 2).sum()) for name in a)))


def updates(rounds: int) -> list[Parameters]:
    """A direction that stays and noise that does not, as updates are."""
    return [
        {
            "matrix": normal(64, 96) + normal(64, 96, seed=1 + number),
            "norm": normal(96) + normal(96, seed=1000 + number),
        }
        for number in range(rounds)
    ]


def total(rounds: list[Parameters]) -> Parameters:
    return {name: np.sum([values[name] for values in rounds], axis=0) for name in rounds[0]}


@every_lossy_codec
def test_the_sum_of_what_arrives_approaches_the_sum_of_what_was_sent(codec: str) -> None:
    few, many = updates(4), updates(64)
    arrived_of_few, _ = send(few, codec)
    arrived_of_many, _ = send(many, codec)
    like = shapes_of(many[0])
    forgetful = total([decode(encode(values, codec), codec, like) for values in many])
    error = distance(total(many), arrived_of_many)
    assert error < 0.15 * distance(total(few), arrived_of_few)
    assert error < 0.2 * distance(total(many), forgetful)
    assert error < 0.02


@every_lossy_codec
def test_the_residual_is_exactly_what_was_lost(codec: str) -> None:
    values, residual = updates(1)[0], updates(2)[1]
    body, left = encode_with_residual(values, residual, codec)
    found = decode(body, codec, shapes_of(values))
    assert left is not None
    for name in values:
        assert np.array_equal(left[name], values[name] + residual[name] - found[name])
    assert encode_with_residual(values, None, codec)[0] == encode(values, codec)


def test_the_exact_codec_pays_an_old_residual_and_owes_nothing() -> None:
    values, residual = updates(1)[0], updates(2)[1]
    body, left = encode_with_residual(values, residual, "fp32")
    found = decode(body, "fp32", shapes_of(values))
    assert left is None
    assert all(np.array_equal(found[name], values[name] + residual[name]) for name in values)


@pytest.mark.parametrize("codec", BLOCKWISE)
@given(
    st.lists(
        arrays.arrays(np.float32, (2, 9), elements=st.floats(-1, 1, width=32)),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=50)
def test_what_is_owed_stays_bounded_whatever_is_sent(codec: str, rounds: list[Array]) -> None:
    """A codec that loses a share s of the largest value never owes more than s / (1 - s) of it."""
    _, residual = send([{"w": values} for values in rounds], codec)
    share = BLOCKWISE[codec]
    assert residual is not None
    most = max(float(np.abs(values).max()) for values in rounds)
    assert np.abs(residual["w"]).max() <= most * share / (1 - share) + 1e-6


@every_lossy_codec
def test_scalars_and_empty_tensors_have_residuals_too(codec: str) -> None:
    values = {name: SAMPLES[name] for name in ("scalar", "empty", "empty matrix")}
    _, residual = encode_with_residual(values, None, codec)
    assert residual is not None
    body, residual = encode_with_residual(values, residual, codec)
    assert residual is not None
    assert shapes_of(residual) == shapes_of(values)
    assert all(isinstance(value, np.ndarray) for value in residual.values())
    assert len(body) == largest(codec, shapes_of(values))


@pytest.mark.parametrize("residual", [{}, {"w": normal(1, 3)}, {"v": normal(2, 3)}])
def test_a_residual_of_another_block_is_refused(residual: Parameters) -> None:
    with pytest.raises(BadTensors, match="residual is of another block"):
        encode_with_residual({"w": normal(2, 3)}, residual, "int8")


# --- attacks: each refused lie is kept ----------------------------------------------------------

LIKE = {"norm": (3,), "w": (2, 130)}
VALUES = {"norm": normal(3), "w": normal(2, 130)}


def header_of(body: bytes) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    return table


def forged(header: object, codec: str = "int8", fill: bool = True) -> bytes:
    """A body with this header (text or JSON); its size as large as allowed."""
    text = header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))
    raw = text.encode()
    raw += b" " * (-len(raw) % 8)
    body = len(raw).to_bytes(8, "little") + raw
    return body.ljust(largest(codec, LIKE), b"\0") if fill else body


def changed(**entry: object) -> dict[str, Any]:
    """The true int8 header with something else said of 'w'."""
    header = header_of(encode(VALUES, "int8"))
    header["w"].update(entry)
    return header


def without(name: str) -> dict[str, Any]:
    header = header_of(encode(VALUES, "int8"))
    del header[name]
    return header


def respaced() -> str:
    return json.dumps(header_of(encode(VALUES, "int8")), separators=(",", " :"))


def doubled() -> str:
    text = json.dumps(header_of(encode(VALUES, "int8")), separators=(",", ":"))
    return text[:-1] + ',"w":' + json.dumps(changed()["w"]) + "}"


def nested(depth: int) -> str:
    return '{"__metadata__":' + "[" * depth + "]" * depth + "}"


LIES: dict[str, tuple[object, str]] = {
    "another dtype": (changed(dtype="F64"), "'w' is .*F64"),
    "another shape": (changed(shape=[130, 2]), r"'w' is .*\[130, 2\]"),
    "a negative shape": (changed(shape=[-1, -260]), "'w' is"),
    "a vast shape": (changed(shape=[2**62, 2**62]), "'w' is"),
    "offsets that overlap": (changed(data_offsets=[0, 260]), "'w' is"),
    "offsets backwards": (changed(data_offsets=[260, 0]), "'w' is"),
    "offsets out of range": (changed(data_offsets=[2**40, 2**40 + 260]), "'w' is"),
    "negative offsets": (changed(data_offsets=[-260, 0]), "'w' is"),
    "offsets that are no numbers": (changed(data_offsets=["a", None]), "'w' is"),
    "something said besides": (changed(more=1), "'w' is"),
    "an entry that is no object": (without("w") | {"w": 7}, "'w' is 7"),
    "a missing tensor": (without("w"), "lacks 'w'"),
    "a missing scale": (without("w.scale"), "lacks 'w.scale'"),
    "no codec": (without("__metadata__"), "by codec None, not by int8"),
    "more metadata": (
        without("__metadata__") | {"__metadata__": {"codec": "int8", "x": "y"}},
        "with other shapes",
    ),
    "an extra tensor": (changed() | {"evil": changed()["w"]}, "holds 'evil'"),
    "control characters": (changed() | {"\x1b[2J\n": 1}, r"holds '\\x1b\[2J\\n'"),
    "a long name": (changed() | {"n" * 3000: 1}, "holds 'n{79}\\.\\.\\., which"),
    "half a character": (json.dumps(changed())[:-1] + ',"\\ud800":1}', r"holds '\\ud800'"),
    "a key twice": (doubled(), "a key twice"),
    "other spaces": (respaced(), "one way"),
    "another order": (dict(reversed(changed().items())), "one way"),
    "true for 1": (changed(shape=[2.0, 130]), "one way"),
    "no object": ([1, 2, 3], "not a JSON object"),
    "no JSON": ("{" * 50, "not JSON"),
    "a long number": ('{"a":' + "9" * 4500 + "}", "not JSON"),
    "nesting": (nested(1200), "nested too deeply|by codec None"),
    "deep nesting": (nested(2200), "nested too deeply|by codec None"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie: str) -> None:
    header, reason = LIES[lie]
    body = forged(header, fill=False)
    like: Shapes = LIKE
    if len(body) > largest("int8", LIKE):  # room for a long lie: a larger block is expected
        like = LIKE | {"z": (1000, 10)}
        body = body.ljust(largest("int8", like), b"\0")
        reason += "|lacks 'z'"
    else:
        body = forged(header)
    with pytest.raises(BadTensors, match=reason) as refusal:
        decode(body, "int8", like)
    assert len(str(refusal.value)) < 400
    assert "\n" not in str(refusal.value)


@every_codec
def test_a_body_cut_anywhere_is_refused(codec: str) -> None:
    body = encode(VALUES, codec)
    for size in range(len(body)):
        with pytest.raises(BadTensors, match="cut short"):
            decode(body[:size], codec, LIKE)


@every_codec
def test_a_body_that_is_too_long_is_refused_unread(codec: str) -> None:
    with pytest.raises(BadTensors, match=rf"bytes; {codec} makes"):
        decode(encode(VALUES, codec) + b"\0", codec, LIKE)


@every_codec
def test_tensors_of_another_block_are_refused(codec: str) -> None:
    body = encode(VALUES, codec)
    for like, reason in [
        ({"norm": (3,), "w": (130, 2)}, "'w' is|with other shapes"),
        ({"norm": (3,), "w": (2, 130), "x": (0,)}, "lacks 'x"),
        ({"norm": (3,), "v": (4, 130)}, "lacks 'v"),
        ({"norm": (3,), "w": (2, 131)}, "'w' is|'w.scale' is"),
    ]:
        with pytest.raises(BadTensors, match=reason):
            decode(body, codec, like)


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 2**40])
def test_a_vast_header_is_refused_before_it_is_read(size: int) -> None:
    body = size.to_bytes(8, "little") + bytes(100)
    with pytest.raises(BadTensors, match="end before its header"):
        decode(body, "int8", LIKE)


def test_a_header_much_longer_than_expected_is_not_parsed() -> None:
    like = {"w": (1000, 1000)}
    text = b"[" + b"[]," * 200_000 + b"1]"
    body = (len(text).to_bytes(8, "little") + text).ljust(largest("fp32", like), b"\0")
    with watched_memory() as peak, pytest.raises(BadTensors, match="header has 600003 bytes"):
        decode(body, "fp32", like)
    assert peak() < 100_000


@every_codec
def test_a_refused_body_costs_no_memory(codec: str) -> None:
    like = {f"{i}.weight": (1000, 1000) for i in range(10)}
    body = bytearray(largest(codec, like))
    with watched_memory() as peak, pytest.raises(BadTensors):
        decode(body, codec, like)
    assert peak() < 200_000


@pytest.mark.parametrize("codec", BLOCKWISE)
@pytest.mark.parametrize("bits", [0x7FC0, 0x7F80, 0xFF80, 0x8000, 0xBF80, 0x0001, 0x7B01, 0x7F7F])
def test_scales_that_no_encoder_writes_are_refused(codec: str, bits: int) -> None:
    """NaN, infinity, below zero, minus zero, denormal, and so large that a product overflows."""
    body = encode(VALUES, codec)
    begin, _ = header_of(body)["w.scale"]["data_offsets"]
    at = 8 + int.from_bytes(body[:8], "little") + begin
    bad = body[:at] + bits.to_bytes(2, "little") + body[at + 2 :]
    with pytest.raises(BadTensors, match="'w' has a scale"):
        decode(bad, codec, LIKE)


def test_unknown_codecs_and_clashing_names_are_refused() -> None:
    with pytest.raises(BadTensors, match="no codec 'zip'; choose one of fp32"):
        largest("zip", LIKE)
    with pytest.raises(BadTensors, match=r"Two tensors would be called 'w\.scale'"):
        encode({"w": normal(3), "w.scale": normal(3)}, "int8")
    with pytest.raises(BadTensors, match="'__metadata__'"):
        encode({"__metadata__": normal(3)}, "fp32")
    assert issubclass(BadTensors, BlockTrainError)
    assert BadTensors.exit_code == 2


# --- fuzz ---------------------------------------------------------------------------------------

BODIES = {codec: encode(VALUES, codec) for codec in CODECS}
edits = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=8)


def assert_harmless(body: bytes, codec: str) -> None:
    """Either arrays of the expected shapes, or one sentence."""
    try:
        found = decode(body, codec, LIKE)
    except BadTensors:
        return
    assert shapes_of(found) == LIKE
    assert all(value.dtype == np.float32 for value in found.values())


@every_codec
@given(edits, st.integers(0, 2**16), st.binary(max_size=20))
@settings(max_examples=200)
def test_mutated_bodies_are_harmless(
    codec: str, edits: list[tuple[int, int]], cut: int, tail: bytes
) -> None:
    body = bytearray(BODIES[codec])
    for at, value in edits:
        body[at % len(body)] = value
    assert_harmless(bytes(body), codec)
    assert_harmless(bytes(body[: cut % len(body)]) + tail, codec)


@every_codec
@given(st.binary(max_size=2000))
def test_random_bytes_are_harmless(codec: str, body: bytes) -> None:
    assert_harmless(body, codec)
    sized = min(len(body), 500).to_bytes(8, "little") + body
    assert_harmless(sized[: largest(codec, LIKE)], codec)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@every_codec
@given(
    st.dictionaries(
        st.sampled_from(["__metadata__", "w", "w.scale", "norm", "norm.scale", "x"]),
        anything
        | st.fixed_dictionaries(
            {},
            optional={
                "dtype": st.sampled_from(["F32", "I8", "U8", "BF16", "BOOL"]) | anything,
                "shape": st.lists(st.integers(-(2**65), 2**65), max_size=3) | anything,
                "data_offsets": st.lists(st.integers(-(2**65), 2**65), max_size=3) | anything,
            },
        ),
        min_size=1,
    )
)
def test_headers_that_say_anything_are_refused(codec: str, said: dict[str, Any]) -> None:
    header = header_of(BODIES[codec]) | said
    body = forged(header, codec, fill=False)
    with pytest.raises(BadTensors) as refusal:
        decode(body[: largest(codec, LIKE)], codec, LIKE)
    assert str(refusal.value).endswith(".")
    assert len(str(refusal.value)) < 400
