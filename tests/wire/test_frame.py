"""Frames over a real connection: what was said is heard, and nothing else is."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import BadInput, Unreachable
from blocktrain.wire import frame
from blocktrain.wire.messages import Message
from blocktrain.wire.serving import (
    MAX_HEADER,
    SAID,
    Choice,
    Forget,
    Hop,
    Ping,
    Place,
    Pong,
    Refusal,
    Step,
)

SECRET, STAGE = "0123456789abcdef" * 2, "ab" * 32
Heard = Callable[[asyncio.StreamReader], Awaitable[object]]
Says = Callable[[asyncio.StreamWriter], Coroutine[None, None, None]]


def over_a_socket(says: Says, hears: Heard) -> object:
    """One side says something over loopback, what the other makes of it is returned."""

    async def both() -> object:
        result: asyncio.Future[object] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                result.set_result(await hears(reader))
            except Exception as error:
                result.set_exception(error)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            speaking = asyncio.create_task(says(writer))
            try:
                return await result
            finally:
                speaking.cancel()
                with suppress(asyncio.CancelledError, ConnectionError):
                    await speaking
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()

    return asyncio.run(both())


def raw(data: bytes, pause: float = 0.0) -> Says:
    """Says bytes, slowly if so wished, and then waits."""

    async def says(writer: asyncio.StreamWriter) -> None:
        for piece in [data] if not pause else [data[i : i + 1] for i in range(len(data))]:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        await asyncio.sleep(60)

    return says


def step(tokens: list[int]) -> Step:
    """A message with everything in it."""
    return Step(
        session=SECRET,
        number=3,
        gateway=SECRET,
        route=[Place(STAGE, "stage.example", 4000)],
        start=5,
        tokens=tokens,
        wanted=1,
        draft=4,
        codec="fp16",
        choice=Choice(0.8, 0.95, 7, 20),
        hops=[Hop(STAGE, 1.5, 0.25, 1000)],
    )


@given(
    st.lists(
        st.tuples(
            st.one_of(
                st.builds(Ping, st.integers(0, 2**53)),
                st.builds(Refusal, st.text(max_size=400)),
                st.builds(step, st.lists(st.integers(0, 256), max_size=60)),
            ),
            st.binary(max_size=300) | st.integers(16_000, 400_000).map(bytes),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_said_is_heard(frames: list[tuple[SAID, bytes]]) -> None:
    async def says(writer: asyncio.StreamWriter) -> None:
        for said, body in frames:
            written.append(frame.write(writer, said, body))
            await writer.drain()
        writer.close()

    async def hears(reader: asyncio.StreamReader) -> object:
        heard = []
        while head := await frame.hear(reader):
            heard.append((head.said, await frame.body(reader, head, head.body), head.size))
        return heard

    written: list[int] = []
    heard = over_a_socket(says, hears)
    assert heard == [(*said, size) for said, size in zip(frames, written, strict=True)]


@given(st.binary(min_size=1, max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    """As a message, after a right prefix."""
    with pytest.raises(BadInput):
        frame.decode(b"\xff" + garbage)


@pytest.mark.parametrize(
    "message",
    [
        b"{}",
        b'{"say":"nothing"}',
        b'{"say":"ping"}',
        b'{"say":"ping","number":-1}',
        b'{"say":"ping","number":1,"more":2}',
        b'{"say":"greeting","protocol":1,"name":"0"}',
        b'{"say":"announce"}',
        b"[" * 60_000,
        b'{"say":"forget","session":"' + b"\xc3" * 32 + b'"}',
    ],
)
def test_a_message_that_cannot_be_is_refused_with_a_sentence(
    message: bytes, sentence: Callable[[BaseException], str]
) -> None:
    with pytest.raises(BadInput) as refused:
        frame.decode(message)
    assert len(sentence(refused.value)) < 400


@pytest.mark.parametrize("length", [0, MAX_HEADER + 1, 2**32 - 1])
def test_a_message_of_a_length_that_cannot_be_is_refused_before_it_comes(length: int) -> None:
    with pytest.raises(BadInput, match=f"{length} bytes"):
        over_a_socket(raw(frame.PREFIX.pack(length, 0)), frame.hear)


@pytest.mark.parametrize("claimed", [0, 7, 9, 2**32 - 1])
@pytest.mark.parametrize("read", [frame.body, frame.skip])
def test_a_body_that_nobody_expects_is_refused_before_it_comes(
    claimed: int, read: Callable[..., Awaitable[object]]
) -> None:
    async def hears(reader: asyncio.StreamReader) -> object:
        head = await frame.hear(reader)
        assert head
        return await read(reader, head, 8)

    message = b'{"say":"ping","number":1}'
    with pytest.raises(BadInput, match=f"body of {claimed} bytes came with 'ping'"):
        over_a_socket(raw(frame.PREFIX.pack(len(message), claimed) + message), hears)


def test_a_skipped_body_leaves_the_next_frame_whole() -> None:
    async def says(writer: asyncio.StreamWriter) -> None:
        frame.write(writer, Pong(1, 2, 3, 4), bytes(300_000))
        frame.write(writer, Forget(SECRET))

    async def hears(reader: asyncio.StreamReader) -> object:
        head = await frame.hear(reader)
        assert head
        await frame.skip(reader, head, 300_000)
        after = await frame.hear(reader)
        assert after
        return after.said

    assert over_a_socket(says, hears) == Forget(SECRET)


def test_a_frame_that_drips_in_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte after another: each is in time, all together are not."""
    monkeypatch.setattr(frame, "PATIENCE", 0.4)
    begun = time.monotonic()
    message = b'{"say":"ping","number":1}'
    with pytest.raises(BadInput, match="too long"):
        over_a_socket(raw(frame.PREFIX.pack(len(message), 0) + message, pause=0.05), frame.hear)
    assert time.monotonic() - begun < 1.5


def test_a_body_that_never_comes_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "PATIENCE", 0.3)
    message = b'{"say":"ping","number":1}'

    async def hears(reader: asyncio.StreamReader) -> object:
        head = await frame.hear(reader)
        assert head
        return await frame.body(reader, head, 10_000)

    with pytest.raises(BadInput, match="too long"):
        over_a_socket(raw(frame.PREFIX.pack(len(message), 10_000) + message + b"some"), hears)


def test_a_large_body_may_take_as_long_as_a_poor_link_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frame, "PATIENCE", 0.1)

    async def says(writer: asyncio.StreamWriter) -> None:
        frame.write(writer, Ping(1))
        message = b'{"say":"ping","number":2}'
        writer.write(frame.PREFIX.pack(len(message), 100_000) + message)
        await asyncio.sleep(0.5)  # longer than PATIENCE; at SLOWEST it has one second more
        writer.write(bytes(100_000))

    async def hears(reader: asyncio.StreamReader) -> object:
        await frame.hear(reader)
        head = await frame.hear(reader)
        assert head
        return len(await frame.body(reader, head, 100_000))

    assert over_a_socket(says, hears) == 100_000


@pytest.mark.parametrize("cut", [1, 7, 8, 20])
def test_hanging_up_within_a_frame_is_told_from_hanging_up_between_frames(cut: int) -> None:
    message = b'{"say":"ping","number":1}'
    whole = frame.PREFIX.pack(len(message), 0) + message

    def saying(data: bytes) -> Says:
        async def says(writer: asyncio.StreamWriter) -> None:
            writer.write(data)
            writer.close()

        return says

    assert over_a_socket(saying(b""), frame.hear) is None
    with pytest.raises(Unreachable, match="within a frame"):
        over_a_socket(saying(whole[:cut]), frame.hear)


def test_a_message_too_long_to_be_heard_is_not_said() -> None:
    class Long(Message, frozen=True, tag="long"):
        words: str

    async def says(writer: asyncio.StreamWriter) -> None:
        with pytest.raises(BadInput, match="at most"):
            frame.write(writer, Long("a" * MAX_HEADER))
        frame.write(writer, Ping(1))

    head = over_a_socket(says, frame.hear)
    assert isinstance(head, frame.Head)
    assert head.said == Ping(1)
