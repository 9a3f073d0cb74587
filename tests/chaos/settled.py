"""What must be true of a run when it is over, whatever happened to it on the way.

Every block reached its final round; every update with a receipt that says taken is in exactly one
snapshot, none twice; what is signed is signed by the coordinator; and every snapshot is what its
updates make, bit for bit.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from blocktrain.aggregation import charter as charters
from blocktrain.aggregation import state as states
from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.combine import Kept, Part, combine
from blocktrain.aggregation.folder import BLOBS, KEY, LEDGER
from blocktrain.aggregation.folder_store import FolderStore
from blocktrain.aggregation.ledger import Reading, Receipt, Version
from blocktrain.aggregation.sqlite import SqliteLedger
from blocktrain.terms import Digest
from blocktrain.wire import messages, signing, tensors
from blocktrain.wire.messages import Closed, Signed
from blocktrain.wire.signing import load_key


@dataclass(frozen=True)
class Settled:
    """What was found, for tests that want to know more."""

    receipts: list[Receipt]
    versions: list[Version]

    @property
    def taken(self) -> list[Receipt]:
        """Updates that are in a snapshot."""
        return [receipt for receipt in self.receipts if receipt.verdict == "taken"]

    @property
    def late(self) -> list[Receipt]:
        """Those that are in a later one than they were made for."""
        return [receipt for receipt in self.taken if receipt.into_round != receipt.round]

    @property
    def refused(self) -> list[Receipt]:
        """Updates that are in none."""
        return [receipt for receipt in self.receipts if receipt.verdict == "refused"]


def settled(run: Path, held: Iterable[Signed] = ()) -> Settled:
    """Raises unless the run in this folder is over and all is well with it.

    `held` are receipts as workers got them: what a worker was told must have become true.
    """
    store, coordinator = FolderStore(run / BLOBS), load_key(run / KEY).id
    with SqliteLedger(run / LEDGER) as ledger, ledger.reading() as r:
        record, kept = r.run(), r.state()
        assert record is not None
        assert kept is not None
        charter, run_id = charters.decode(record.config), charters.run_id(record.config)
        assert states.decode(kept).ended
        found = Settled(r.receipts(), r.versions())
        for block in range(charter.rules.blocks):
            assert r.outstanding(block) == [], "an update has a receipt and is in no snapshot"
            rounds = [version.round for version in r.versions(block)]
            assert rounds == [*range(charter.rules.rounds + 1)]
            newest = r.newest(block)
            assert newest is not None
            for digest in (newest.snapshot, newest.steady):
                assert len(store.get(digest)) == charter.snapshot_size(block)
        manifests = [
            closed_of(store, version, run_id, coordinator)
            for version in found.versions
            if version.round > 0
        ]
        each_in_exactly_one(found, manifests)
        made_of_their_updates(charter, store, r)
    receipts_are_true(found, held, coordinator)
    assert [*store.parts.glob("*.part")] == []
    return found


def closed_of(store: FolderStore, version: Version, run: Digest, coordinator: str) -> Closed:
    """A version's manifest: the coordinator's word on what it is made of."""
    assert version.manifest is not None
    signed = messages.decode(store.get(version.manifest), Signed)
    right = signing.verify(coordinator, signed.body, "closed", bytes.fromhex(signed.signature))
    assert right, "the manifest is not the coordinator's"
    closed = messages.decode(signed.body, Closed)
    assert (closed.run, closed.block, closed.round) == (run, version.block, version.round)
    named = (closed.snapshot, closed.steady, closed.delta)
    assert named == (version.snapshot, version.steady, version.delta)
    return closed


def each_in_exactly_one(found: Settled, manifests: list[Closed]) -> None:
    """The manifests list every taken update once, with the share that the ledger has."""
    taken = {receipt.update: receipt for receipt in found.taken if receipt.dropped is None}
    listed = Counter(share.update for closed in manifests for share in closed.shares)
    assert listed == dict.fromkeys(taken, 1)
    places = Counter((it.block, it.round, it.slot) for it in taken.values())
    assert set(places.values()) <= {1}, "a slot counts two updates"
    for closed in manifests:
        assert closed.shares, "a round was closed with nothing"
        total = sum(share.bytes_trained for share in closed.shares)
        for share in closed.shares:
            receipt = taken[share.update]
            assert (receipt.block, receipt.into_round) == (closed.block, closed.round)
            told = (receipt.worker, receipt.bytes_trained)
            assert told == (share.worker, share.bytes_trained)
            assert receipt.share is not None
            assert 0 < share.factor <= 1
            assert math.isclose(receipt.share, share.factor * share.bytes_trained / total)


def made_of_their_updates(charter: Charter, store: FolderStore, r: Reading) -> None:
    """Adds the updates up once more: every snapshot and steady copy has the digest it had."""
    for block in range(charter.rules.blocks):
        shapes = charter.shapes(block)
        first = tensors.decode(store.get(charter.first[block]), "fp32", shapes)
        kept = Kept(first, first)
        for version in r.versions(block)[1:]:
            assert version.manifest is not None
            signed = messages.decode(store.get(version.manifest), Signed)
            parts = []
            for share in messages.decode(signed.body, Closed).shares:
                receipt = r.receipt(share.update)
                assert receipt is not None
                change = tensors.decode(store.get(receipt.blob), charter.codec, shapes)
                parts.append(Part(change.__getitem__, share.bytes_trained, share.factor))
            kept = combine(kept, parts, charter.averaging, charter.codec)
            for values, digest in (
                (kept.snapshot, version.snapshot),
                (kept.steady, version.steady),
            ):
                assert hashlib.sha256(tensors.encode(values, "fp32")).hexdigest() == digest


def receipts_are_true(found: Settled, held: Iterable[Signed], coordinator: str) -> None:
    """Whatever a receipt says has become true."""
    known = {receipt.update: receipt for receipt in found.receipts}
    for answer in [*held, *(messages.decode(it.receipt, Signed) for it in found.receipts)]:
        signature = bytes.fromhex(answer.signature)
        assert signing.verify(coordinator, answer.body, "receipt", signature)
        told = messages.decode(answer.body, messages.Receipt)
        receipt = known[told.update]
        assert messages.encode(answer) == receipt.receipt
        if receipt.dropped is None:
            assert (told.round or None) == receipt.into_round
