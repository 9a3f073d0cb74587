"""A closed round becomes a version: blobs first, then what the ledger is to be told of them."""

import time
from dataclasses import dataclass
from typing import Any

from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.combine import Part, Standing, combined
from blocktrain.aggregation.events import Combine
from blocktrain.aggregation.ledger import Ledger, Receipt, Version
from blocktrain.aggregation.pour import Digests, pour
from blocktrain.aggregation.store import Store
from blocktrain.terms import Digest
from blocktrain.wire import messages
from blocktrain.wire.messages import MAX_MESSAGE, Signed
from blocktrain.wire.signing import Key, sign
from blocktrain.wire.tensors import Body


@dataclass(frozen=True)
class Maker:
    """Makes the versions of one run."""

    ledger: Ledger
    store: Store
    charter: Charter
    run: Digest
    key: Key

    def make(self, effect: Combine) -> tuple[Version, dict[Digest, float]]:
        """The version, whose blobs are durable, and the share of each update in it."""
        with self.ledger.reading() as r:
            before = r.newest(effect.block)
            receipts = [r.receipt(part.update) for part in effect.parts]
        assert before is not None
        taken = [receipt for receipt in receipts if receipt is not None]
        made = self._combine(effect, before, taken)
        version = Version(
            effect.block,
            effect.round,
            made.snapshot,
            made.steady,
            made.momentum,
            made.residual,
            made.delta,
            self._manifest(effect, taken, made),
            time.time(),
        )
        total = sum(part.bytes_trained for part in effect.parts)
        return version, {p.update: p.factor * p.bytes_trained / total for p in effect.parts}

    def _combine(self, effect: Combine, before: Version, taken: list[Receipt]) -> Digests:
        """Reads what is needed tensor by tensor, and writes what comes next."""
        shapes, codec = self.charter.shapes(effect.block), self.charter.codec

        def reader(digest: Digest | None, codec: str = "fp32") -> Any:
            return None if digest is None else Body(self.store.view(digest), codec, shapes).read

        parts = [
            Part(reader(receipt.blob, codec), part.bytes_trained, part.factor)
            for part, receipt in zip(effect.parts, taken, strict=True)
        ]
        standing = Standing(
            reader(before.snapshot),
            reader(before.steady),
            reader(before.momentum),
            reader(before.residual),
        )
        pieces = combined(shapes, standing, parts, self.charter.averaging, codec)
        return pour(self.store, shapes, pieces, codec)

    def _manifest(self, effect: Combine, taken: list[Receipt], made: Digests) -> Digest:
        """The signed list of shares, as a blob."""
        shares = [
            messages.Share(part.update, receipt.worker, part.bytes_trained, part.factor)
            for part, receipt in zip(effect.parts, taken, strict=True)
        ]
        digests = (made.snapshot, made.steady, made.delta)
        closed = messages.Closed(self.run, effect.block, effect.round, *digests, shares)
        body = messages.encode(signed_by(self.key, closed, "closed"))
        return self.store.put([body], limit=max(MAX_MESSAGE, len(body)))


def signed_by(key: Key, message: messages.Message, purpose: str) -> Signed:
    """A message by which the holder of the key stands."""
    body = messages.encode(message)
    return Signed(body, key.id, sign(key, body, purpose).hex())
