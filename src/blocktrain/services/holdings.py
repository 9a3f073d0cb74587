"""The blocks a worker has on its disk, and how it comes by newer ones with few bytes.

A version whose predecessor is here is followed by its delta, which is a fraction of the block;
round 0 follows from the run's seed and costs nothing; anything else is fetched whole. However it
came, a body counts only if its digest is the one that was asked for.

    FOLDER/BLOCK-ROUND-snapshot-DIGEST, FOLDER/BLOCK-ROUND-steady-DIGEST    fp32 bodies
"""

import hashlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from blocktrain.aggregation.charter import Charter
from blocktrain.aggregation.combine import follow
from blocktrain.disk import errors_are_clear
from blocktrain.errors import BadInput, NoBlob
from blocktrain.services.room import KEPT, Room
from blocktrain.terms import Digest, Parameters
from blocktrain.wire import tensors
from blocktrain.wire.link import Link
from blocktrain.wire.messages import Version, Versions

Kind = Literal["snapshot", "steady"]


@dataclass
class Holdings:
    """Whatever is here of the run's blocks."""

    folder: Path
    link: Link
    charter: Charter
    first: Callable[[int], Parameters]
    """Makes a block of round 0 as the run's seed does."""
    room: Room
    """Where everything of this run lies, and how much that may be."""
    trusted: set[Path] = field(default_factory=set)

    def snapshot(self, version: Version) -> Parameters:
        """What training begins from, in memory of its own."""
        path = self.bring(version, "snapshot")
        return tensors.decode(path.read_bytes(), "fp32", self.charter.shapes(version.block))

    def steady(self, version: Version) -> Path:
        """What is trained beside, as a file to be mapped."""
        return self.bring(version, "steady")

    def bring(self, version: Version, kind: Kind) -> Path:
        """The body of a version, made or fetched if it is not here."""
        path = self.path(version, kind)
        if not self.good(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self.make_first(version) and not self.follow_to(version):
                for each in ("snapshot", "steady"):  # with both, the next round is a delta away
                    self.fetch(version, each)
            self.forget_older(version)
        return path

    def path(self, version: Version, kind: Kind) -> Path:
        """Where a body lies."""
        digest = getattr(version, kind)
        return self.folder / f"{version.block}-{version.round}-{kind}-{digest}"

    def good(self, path: Path) -> bool:
        """Whether the body is here and is what its name says; looked at once in a life."""
        if path in self.trusted:
            return True
        if not path.is_file():
            return False
        with path.open("rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == path.name.rpartition("-")[2]
        if same:
            self.trusted.add(path)
        return same

    def make_first(self, version: Version) -> bool:
        """Makes a block of round 0 from the seed; False if that gives other bytes here."""
        if version.round != 0:
            return False
        body = tensors.encode(self.first(version.block), "fp32")
        if hashlib.sha256(body).hexdigest() != version.snapshot:
            return False
        return self.keep(version, body, body)

    def follow_to(self, version: Version) -> bool:
        """Goes from the newest version that is here to this one by deltas, if that is cheaper."""
        block = version.block
        first = self.charter.first[block]
        here = self.newest(block, before=version.round) or Version(block, 0, first, first, None)
        away = version.round - here.round
        if away * self.charter.update_size(block) > 2 * self.charter.snapshot_size(block):
            return False
        made = here.round > 0 or self.good(self.path(here, "steady")) or self.make_first(here)
        if not made:
            return False
        path = [version]
        if away > 1:
            told = self.link.ask(f"v1/versions/{block}/{here.round}", Versions).versions
            path = [each for each in told if each.round <= version.round]
        if [each.round for each in path] != list(range(here.round + 1, version.round + 1)):
            return False
        try:
            return path[-1] == version and all(map(self.take_delta, path))
        except NoBlob:  # too long ago
            return False

    def take_delta(self, version: Version) -> bool:
        """One version further; False if that does not lead where it should."""
        before = self.newest(version.block, before=version.round)
        if version.delta is None or before is None or before.round != version.round - 1:
            return False
        shapes, codec = self.charter.shapes(version.block), self.charter.codec
        part = self.folder / f"{version.block}-delta-{version.delta}"
        size = self.charter.update_size(version.block)
        self.room.claim(size, f"A delta of block {version.block + 1}")
        self.link.fetch(f"v1/blobs/{version.delta}", version.delta, part, size)
        try:
            delta = tensors.Body(part.read_bytes(), codec, shapes)
        finally:
            part.unlink()
        snapshot, steady = follow(
            self.read(before, "snapshot"),
            self.read(before, "steady"),
            delta.read,
            self.charter.averaging,
        )
        bodies = [tensors.encode(values, "fp32") for values in (snapshot, steady)]
        kept = self.keep(version, *bodies)
        self.forget_older(version)  # now: a long way must not fill the disk
        return kept

    def read(self, version: Version, kind: Kind) -> Parameters:
        """A body that is here, mapped."""
        with self.path(version, kind).open("rb") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return tensors.decode(view, "fp32", self.charter.shapes(version.block))

    def keep(self, version: Version, snapshot: bytes, steady: bytes) -> bool:
        """Writes both bodies if they are what the version names."""
        bodies: dict[Kind, bytes] = {"snapshot": snapshot, "steady": steady}
        for kind, body in bodies.items():
            if hashlib.sha256(body).hexdigest() != getattr(version, kind):
                return False
        self.room.claim(len(snapshot) + len(steady), f"Block {version.block + 1}")
        for kind, body in bodies.items():
            path = self.path(version, kind)
            part = path.with_name(f"{path.name}.part")
            with errors_are_clear(path):
                part.write_bytes(body)
                part.replace(path)  # not synced: after a crash the digest tells
            self.trusted.add(path)
        return True

    def fetch(self, version: Version, kind: Kind) -> None:
        """The whole body."""
        digest: Digest = getattr(version, kind)
        path = self.path(version, kind)
        size = self.charter.snapshot_size(version.block)
        part = path.with_name(f"{path.name}.part")
        there = part.stat().st_size if part.exists() else 0
        self.room.claim(size - there, f"Block {version.block + 1}")
        self.link.fetch(f"v1/blobs/{digest}", digest, path, size)
        self.trusted.add(path)

    def newest(self, block: int, before: int) -> Version | None:
        """The newest version of a block, older than a round, of which both bodies are here."""
        found: dict[int, dict[str, Digest]] = {}
        for path in self.folder.glob(f"{block}-*-s*-*"):
            _, round, kind, digest = path.name.split("-")
            if len(digest) == 64 and int(round) < before and self.good(path):
                found.setdefault(int(round), {})[kind] = Digest(digest)
        whole = [round for round, kinds in found.items() if len(kinds) == 2]
        if not whole:
            return None
        kinds = found[max(whole)]
        return Version(block, max(whole), kinds["snapshot"], kinds["steady"], None)

    def forget_older(self, version: Version) -> None:
        """Keeps the last few versions of a block."""
        for path in self.folder.glob(f"{version.block}-*-s*-*"):
            if int(path.name.split("-")[1]) <= version.round - KEPT:
                path.unlink(missing_ok=True)
                self.trusted.discard(path)


def refuse_unknown(blocks: list[int], charter: Charter) -> None:
    """Raises for a block that the run does not have."""
    for block in blocks:
        if not 0 <= block < charter.rules.blocks:
            raise BadInput(
                f"There is no block {block + 1}; choose one from 1 to {charter.rules.blocks}."
            )
