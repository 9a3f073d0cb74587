"""One stage of a logical model: a span of layers that all read one physical layer, and its links.

Letters as in learning/model.py: T positions, D width, H heads, E head width, F hidden width. Three
stages make a ring: each sends to the next, and the last one answers the first, which gives the next
traversal. `whole`: all positions at once, unknown, seeing each other both ways. `ar`: one after
another, each the byte that the last stage chose before, with the keys and values of all before it
kept. `direct` is `ar` with torch's own fp16 product in place of tiles.
"""

import contextlib
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blocktrain.bench.logical_kernel import Kernel, Matrix
from blocktrain.bench.logical_shape import (
    HEAD_WIDTH,
    OUTPUTS,
    SAID,
    TOKENS,
    Ended,
    Failed,
    Layer,
    Post,
    Shape,
    Spent,
    Traversed,
    peak_memory,
)
from blocktrain.errors import BadInput, BlockTrainError, Unreachable
from blocktrain.learning.kernels import rms_norm, rotate
from blocktrain.learning.model import EPSILON, MASK, START, rope_angles

PORT = 8766
PATIENCE = 120.0  # seconds for the others to start; drawing 100e6 weights took 1.1
HEAD = struct.Struct("!BIQI")  # mode, first position, bytes moved so far, length of the body
MODES = ("ready", "whole", "ar", "direct", "end")


@dataclass(frozen=True)
class Sight:
    """Which positions are computed and what each may attend to."""

    angles: tuple[Tensor, Tensor]
    mask: Tensor | None = None
    new: slice | None = None
    """Where their keys and values are kept; None: they are not."""


class Span:
    """Consecutive layers, all of them the same one in memory."""

    def __init__(self, shape: Shape, layers: int, positions: int) -> None:
        self.heads = shape.width // HEAD_WIDTH
        self.attention_norm, self.mlp_norm = (torch.ones(shape.width).half() for _ in range(2))
        self.q_norm, self.k_norm = (torch.ones(HEAD_WIDTH).half() for _ in range(2))
        self.qkv = Matrix(3 * shape.width, shape.width)
        self.o = Matrix(shape.width, shape.width, gain=0.5)
        self.gate_up = Matrix(2 * shape.hidden, shape.width)
        self.down = Matrix(shape.width, shape.hidden, gain=0.5)
        # Keys and values are each layer's own. Their length is fixed and masked: so every position
        # costs the same, whichever is measured.
        self.kept = torch.zeros(layers, 2, self.heads, positions, HEAD_WIDTH)

    def sight(self, positions: int, start: int | None) -> Sight:
        """`start` None: nothing is kept, and all positions see each other."""
        positions_T = torch.arange(positions) + (start or 0)
        angles = rope_angles(positions_T, HEAD_WIDTH)
        if start is None:
            return Sight(angles)
        mask = torch.arange(self.kept.shape[3])[None, :] <= positions_T[:, None]
        return Sight(angles, mask, slice(start, start + positions))

    def layer(self, x_TD: Tensor, kept: Tensor, sight: Sight, kernel: Kernel) -> Tensor:
        """The residual stream after one more layer, whose keys and values are `kept`."""
        q_HTE, k_HTE, v_HTE = self.looks(x_TD, sight.angles, kernel)
        if sight.new is not None:
            kept[0, :, sight.new] = k_HTE
            kept[1, :, sight.new] = v_HTE
            k_HTE, v_HTE = kept
        seen_HTE = F.scaled_dot_product_attention(
            q_HTE[None], k_HTE[None], v_HTE[None], attn_mask=sight.mask
        )[0]
        x_TD = x_TD + kernel(seen_HTE.transpose(0, 1).flatten(1), self.o)
        gate_TF, up_TF = kernel(norm(x_TD, self.mlp_norm), self.gate_up).chunk(2, dim=-1)
        return x_TD + kernel(F.silu(gate_TF) * up_TF, self.down)

    def looks(
        self, x_TD: Tensor, angles: tuple[Tensor, Tensor], kernel: Kernel
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        all_TD = kernel(norm(x_TD, self.attention_norm), self.qkv)
        q, k, v_HTE = all_TD.view(len(x_TD), 3, self.heads, HEAD_WIDTH).permute(1, 2, 0, 3)
        q_HTE, k_HTE = (
            rotate(norm(x, weight), *angles) for x, weight in ((q, self.q_norm), (k, self.k_norm))
        )
        return q_HTE, k_HTE, v_HTE


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm."""
    return rms_norm(x, weight.float(), EPSILON)


class Stage:
    """A span, the embedding if it is the first, the head if it is the last."""

    def __init__(self, post: Post) -> None:
        torch.manual_seed(post.index)
        shape, threads = post.shape, torch.get_num_threads()
        self.kernels = {
            "whole": Kernel(threads),
            "ar": Kernel(threads),
            "direct": Kernel(threads, upcast=False),
        }
        self.positions, self.width = post.positions, shape.width
        self.last = post.index == len(post.addresses) - 1
        self.span = Span(shape, shape.layers // len(post.addresses), post.positions)
        if post.index == 0:
            self.embedding_VD = torch.randn(TOKENS, shape.width).half()
        if self.last:
            self.norm = torch.ones(shape.width).half()
            self.head = Matrix(OUTPUTS, shape.width)

    def embed(self, tokens: list[int]) -> bytes:
        """Rows for the first span."""
        return packed(self.embedding_VD[tokens])

    def work(self, mode: str, start: int, body: bytes) -> bytes:
        """Takes rows through the span: what goes to the next stage, or the bytes chosen."""
        rows = len(body) // (2 * self.width)
        if rows * 2 * self.width != len(body) or not 0 < rows <= self.positions - start:
            raise BadInput(f"{len(body)} bytes from position {start} on cannot be; send whole rows "
                           f"of at most {self.positions} positions.")  # fmt: skip
        kernel = self.kernels[mode]
        values = np.frombuffer(body, np.float16).reshape(rows, self.width)
        x_TD = torch.from_numpy(values.astype(np.float32))
        sight = self.span.sight(rows, None if mode == "whole" else start)
        for kept in self.span.kept:
            x_TD = self.span.layer(x_TD, kept, sight, kernel)
            say(Layer())
        if not self.last:
            return packed(x_TD)
        logits_TV = kernel(norm(x_TD, self.norm), self.head)
        if not bool(logits_TV.isfinite().all()):
            raise BlockTrainError("The outputs are not finite; report this as a bug.")
        return bytes(logits_TV.argmax(-1).tolist())


def packed(x_TD: Tensor) -> bytes:
    """Rows as fp16 bytes."""
    return x_TD.half().numpy().tobytes()


@dataclass(frozen=True)
class Frame:
    """What goes from stage to stage: rows as fp16, or in the end the chosen bytes."""

    mode: str
    start: int = 0
    moved: int = 0
    """Bytes of all frames of this traversal so far."""
    body: bytes = b""


@dataclass
class Links:
    """A stage's place in the ring."""

    before: BinaryIO
    after: socket.socket
    longest: int
    """Bytes that a body may have."""

    def send(self, frame: Frame) -> None:
        """To the next stage."""
        moved = frame.moved + HEAD.size + len(frame.body)
        head = HEAD.pack(MODES.index(frame.mode), frame.start, moved, len(frame.body))
        self.after.sendall(head + frame.body)

    def take(self) -> Frame:
        """From the stage before."""
        mode, start, moved, length = HEAD.unpack(self.exactly(HEAD.size))
        if mode >= len(MODES) or length > self.longest:
            raise BadInput(f"Mode {mode} with {length} bytes cannot be; send at most "
                           f"{self.longest}.")  # fmt: skip
        return Frame(MODES[mode], start, moved, self.exactly(length))

    def exactly(self, length: int) -> bytes:
        """So many bytes."""
        data = self.before.read(length)
        if len(data) < length:
            raise Unreachable("The stage before has gone; start again.")
        return data


@contextlib.contextmanager
def ring(post: Post, door: socket.socket) -> Iterator[Links]:
    """Links to the next stage and from the one before."""
    after = connected(post.addresses[(post.index + 1) % len(post.addresses)])
    door.settimeout(PATIENCE)
    with after, door.accept()[0] as before:
        for line in (after, before):
            line.settimeout(None)  # a traversal takes as long as it takes; a death closes the link
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with before.makefile("rb") as file:
            yield Links(file, after, 2 * post.positions * post.shape.width)


def connected(address: str) -> socket.socket:
    """A connection to a stage that may still be starting."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=PATIENCE)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise Unreachable(f"Nobody answers at {address}; start again.") from None
            time.sleep(0.1)


def lead(stage: Stage, links: Links, post: Post) -> None:
    """The first stage gives every traversal and times it, from the tokens to the answer."""
    links.send(Frame("ready"))
    links.take()
    traverse(stage, links, Frame("whole"), [MASK] * post.positions)
    for mode in ("ar", "direct"):
        token = START
        for position in range(post.ar_positions):
            (token,) = traverse(stage, links, Frame(mode, position), [token])
    links.send(Frame("end"))


def traverse(stage: Stage, links: Links, frame: Frame, tokens: list[int]) -> bytes:
    """One traversal; the bytes that the last stage chose."""
    began = time.perf_counter()
    body = stage.work(frame.mode, frame.start, stage.embed(tokens))
    links.send(Frame(frame.mode, frame.start, 0, body))
    answer = links.take()
    say(Traversed(frame.mode, time.perf_counter() - began, answer.moved))
    return answer.body


def follow(stage: Stage, links: Links) -> None:
    """Any other stage works on what comes, and passes it on, until the end."""
    while (frame := links.take()).mode != "end":
        body = frame.body
        if frame.mode != "ready":
            body = stage.work(frame.mode, frame.start, body)
        links.send(Frame(frame.mode, frame.start, frame.moved, body))
    if not stage.last:
        links.send(frame)


def say(line: SAID) -> None:
    """One short line to whoever started this; it reaches the pipe in one piece."""
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


def main(post: Post) -> None:
    """Serves until the first stage says that it is over."""
    try:
        with socket.create_server((post.addresses[post.index], PORT)) as door:
            stage = Stage(post)
            with ring(post, door) as links:
                if post.index == 0:
                    lead(stage, links, post)
                else:
                    follow(stage, links)
        spent = {mode: Spent(*kernel.spent) for mode, kernel in stage.kernels.items()}
        say(Ended(peak_memory(), stage.kernels["ar"].threads, spent))
    except (BlockTrainError, OSError, RuntimeError) as error:
        say(Failed(post.index, str(error).splitlines()[0]))
        sys.exit(1)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Post))
