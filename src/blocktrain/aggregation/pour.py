"""What comes next of a block, tensor by tensor, into blobs that become durable together.

One maker, a writing thread per blob, and between them queues of one tensor each: memory stays that
of a few tensors, and hashing one blob does not wait for another.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Queue
from typing import cast

from blocktrain.aggregation.combine import Next
from blocktrain.aggregation.store import Group, Store
from blocktrain.errors import BadTensors
from blocktrain.terms import Array, Digest
from blocktrain.wire.codecs import CODECS
from blocktrain.wire.tensors import Shapes, Writer, largest, stream

BLOBS = 5  # of one version at most: the fields of Digests


@dataclass(frozen=True)
class Digests:
    """The blobs of one version of a block; None where nothing is kept."""

    snapshot: Digest
    steady: Digest
    momentum: Digest | None
    residual: Digest | None
    delta: Digest


def pour(store: Store, like: Shapes, pieces: Iterable[tuple[str, Next]], codec: str) -> Digests:
    """Writes what `combined` makes by this codec: all blobs are seen and durable, or none.

    A lossy delta is gathered in memory, since its parts do not lie in the order of tensors.
    """
    writer = None if CODECS[codec].exact else Writer(codec, like)
    feeds: dict[str, Feed] = {}
    with store.group() as group, ThreadPoolExecutor(BLOBS) as pool:
        try:
            for name, piece in pieces:
                values = fp32_values(piece)
                if writer:
                    writer.place(name, piece.delta)
                else:
                    values["delta"] = piece.delta[0]
                for blob, value in values.items():
                    if blob not in feeds:
                        feeds[blob] = Feed(group, like, pool)
                    feeds[blob].give(name, value)
        finally:
            for feed in feeds.values():
                feed.end()
        if not feeds:
            raise BadTensors("The maker of the next version made nothing; give every tensor.")
        found = {blob: feed.digest.result() for blob, feed in feeds.items()}
        if writer:
            found["delta"] = group.put([writer.body()], limit=writer.plan.size)
    return Digests(
        found["snapshot"],
        found["steady"],
        found.get("momentum"),
        found.get("residual"),
        found["delta"],
    )


def fp32_values(piece: Next) -> dict[str, Array]:
    """What there is of one tensor, by the blob it goes to."""
    values = {"snapshot": piece.snapshot, "steady": piece.steady}
    if piece.momentum is not None:
        values["momentum"] = piece.momentum
    if piece.residual is not None:
        values["residual"] = piece.residual
    return values


class Feed:
    """One fp32 blob, written by a thread from tensors that are given one by one."""

    def __init__(self, group: Group, like: Shapes, pool: ThreadPoolExecutor) -> None:
        self.group, self.like = group, like
        self.queue: Queue[tuple[str, Array] | None] = Queue(maxsize=1)
        self.error: BaseException | None = None
        self.digest = pool.submit(self._write)

    def give(self, name: str, value: Array) -> None:
        """Hands over a tensor once the one before is taken, unless writing has failed."""
        if self.error:
            raise self.error
        self.queue.put((name, value))

    def end(self) -> None:
        """Nothing more comes; if something is missing, there is no blob."""
        self.queue.put(None)

    def _write(self) -> Digest:
        values = iter(self.queue.get, None)
        try:
            return self.group.put(self._bytes(values), limit=largest("fp32", self.like))
        except BaseException as error:
            self.error = error
            for _ in values:  # so that whoever gives does not wait in vain
                pass
            raise

    def _bytes(self, values: Iterator[tuple[str, Array] | None]) -> Iterable[bytes]:
        # a store hashes and writes whatever is like bytes; making bytes of it would be a copy
        given = cast("Iterator[tuple[str, Array]]", values)
        return cast("Iterable[bytes]", stream(given, self.like))
