"""Products with fp16 weights on a CPU that computes in fp32: up-cast a tile, multiply, next tile.

Letters: T positions, N outputs, K inputs. A tile is a few whole rows of the matrix. Its fp32 copy
is made and used by one thread and stays in that core's own cache; no larger copy ever exists.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

# Weights in a tile: 1 MiB as fp32, in an L2 of 1.25 MiB. Seconds that 75.8e9 weights took with
# tiles of 2^17, 2^18 and 2^20: 16.0, 15.6 and 18.9 for one position, 36.6, 35.3 and 34.5 for 32.
TILE = 2**18


class Matrix:
    """N x K weights as fp16, and the tiles they are cut into."""

    def __init__(self, outputs: int, inputs: int, gain: float = 1.0) -> None:
        self.weights_NK = torch.empty(outputs, inputs, dtype=torch.float16)
        self.rows = max(1, TILE // inputs)
        self.tiles = torch.split(self.weights_NK, self.rows)
        for tile in self.tiles:
            tile.copy_(torch.randn(tile.shape).mul_(gain * inputs**-0.5))


class Kernel:
    """Multiplies on every core: whichever thread is free takes the next tile.

    Each thread computes alone. Torch's own threads would share each tile and, as they must sleep
    when idle, wake twice for it: 58 s in place of 16 for one position, 83 in place of 35 for 32.
    """

    def __init__(self, threads: int, upcast: bool = True) -> None:
        torch.set_num_threads(1)
        self.threads = threads
        self.upcast = upcast
        """False: torch's own product of an fp16 matrix with one fp16 vector, without any copy."""
        self.spent = [0.0, 0.0]
        """Seconds of all threads that went into up-casting, and into products."""
        self.buffers = [torch.empty(TILE) for _ in range(threads)]
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def __call__(self, x_TK: Tensor, matrix: Matrix) -> Tensor:
        """T x N, as fp32."""
        kind = torch.float32 if self.upcast else torch.float16
        x_KT = x_TK.t().to(kind).contiguous()
        out_NT = torch.empty(len(matrix.weights_NK), len(x_TK), dtype=kind)
        x, out = (x_KT[:, 0], out_NT[:, 0]) if len(x_TK) == 1 else (x_KT, out_NT)
        if self.upcast:
            work = Work(x, zip(matrix.tiles, torch.split(out, matrix.rows), strict=True))
            size = (matrix.rows, len(x_KT))
            spaces = [buffer[: size[0] * size[1]].view(size) for buffer in self.buffers]
            done = self.pool.map(work.tiled, spaces)
        else:  # nothing has to fit a cache: one piece for each thread is faster
            pieces = matrix.weights_NK.chunk(self.threads)
            work = Work(x, zip(pieces, out.chunk(self.threads), strict=True))
            done = self.pool.map(work.direct, range(self.threads))
        for upcast, product in done:
            self.spent[0] += upcast
            self.spent[1] += product
        return out_NT.t().float().contiguous()


class Work:
    """One product, tile by tile, until there are none.

    As little Python as possible for each tile: threads wait for each other wherever it runs.
    """

    def __init__(self, x: Tensor, tiles: Iterator[tuple[Tensor, Tensor]]) -> None:
        self.x = x
        self.tiles = tiles
        """Weights, and where their outputs go; shared by all threads."""
        self.multiply = torch.mv if x.ndim == 1 else torch.mm

    def tiled(self, space: Tensor) -> tuple[float, float]:
        """Up-casts each tile into this thread's own space; the seconds of either half."""
        upcast = product = 0.0
        now = time.perf_counter()
        for tile, out in self.tiles:
            large = space if len(tile) == len(space) else space[: len(tile)]
            large.copy_(tile)
            ready = time.perf_counter()
            self.multiply(large, self.x, out=out)
            upcast, now = upcast + ready - now, time.perf_counter()
            product += now - ready
        return upcast, product

    def direct(self, _: int) -> tuple[float, float]:
        """Multiplies fp16 with fp16."""
        began = time.perf_counter()
        for tile, out in self.tiles:
            self.multiply(tile, self.x, out=out)
        return 0.0, time.perf_counter() - began
