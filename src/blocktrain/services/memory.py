"""What a worker remembers of a run, on its disk: kill -9 loses nothing that was trained.

FOLDER/memory-B/     optimiser and codec residual of block B, after its last taken update
FOLDER/pending/      an update that has no receipt yet, and what its replica will remember
FOLDER/traffic.json  bytes moved so far
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.learning.files import load_tensors, save_tensors
from blocktrain.terms import Parameters
from blocktrain.wire import messages
from blocktrain.wire.messages import Signed, Traffic


@dataclass
class Memory:
    """What a replica remembers between rounds."""

    optimiser: dict[str, Tensor] = field(default_factory=dict)
    residual: Parameters | None = None


@dataclass(frozen=True)
class Notebook:
    """What one worker remembers of one run."""

    folder: Path

    @property
    def pending(self) -> Path:
        """Where an update waits for its receipt."""
        return self.folder / "pending"

    @property
    def blob(self) -> Path:
        """The tensors of the update that waits."""
        return self.pending / "blob"

    def keep(self, update: Signed, body: bytes, memory: Memory) -> None:
        """Writes an update and what the replica will remember, before anybody hears of it."""
        folder = self.folder / "pending.part"
        shutil.rmtree(folder, ignore_errors=True)
        with errors_are_clear(folder):
            folder.mkdir()
            write_atomically(folder / "blob", body)  # before update.json, which names it
            save_memory(folder, memory)
            write_atomically(folder / "update.json", messages.encode(update))
            shutil.rmtree(self.pending, ignore_errors=True)
            folder.rename(self.pending)

    def waiting(self) -> Signed | None:
        """The update that has no receipt yet."""
        if not (self.pending / "update.json").is_file():
            return None
        return messages.decode((self.pending / "update.json").read_bytes(), Signed)

    def taken(self, block: int) -> None:
        """The update of this block has its receipt: what came with it is remembered.

        Until the last of this, a kill means to send it again and get the same receipt.
        """
        self.forget(block)
        self.pending.rename(self.of(block))

    def refused(self) -> None:
        """The update is sent no more."""
        (self.pending / "update.json").unlink()  # first: what has none is sent no more
        shutil.rmtree(self.pending)

    def of(self, block: int) -> Path:
        """Where the memory of a block's replica lies."""
        return self.folder / f"memory-{block}"

    def recall(self, block: int) -> Memory:
        """What the replica remembers of its last taken update of this block."""
        return load_memory(self.of(block))

    def forget(self, block: int) -> None:
        """The replica begins anew."""
        shutil.rmtree(self.of(block), ignore_errors=True)

    def traffic(self) -> Traffic:
        """Bytes moved in former lives."""
        try:
            return msgspec.json.decode((self.folder / "traffic.json").read_bytes(), type=Traffic)
        except (OSError, msgspec.DecodeError):
            return Traffic()

    def keep_traffic(self, traffic: Traffic) -> None:
        """For the next life."""
        path = self.folder / "traffic.json"
        with errors_are_clear(path):
            write_atomically(path, msgspec.json.encode(traffic))


def spent(folder: Path) -> int:
    """Bytes that the worker of this folder moved in former lives, in whichever runs, or in none."""
    books = [Notebook(path.parent).traffic() for path in folder.rglob("traffic.json")]
    return sum(each.sent + each.received for each in books)


def save_memory(folder: Path, memory: Memory) -> None:
    """What a replica remembers, as files."""
    save_tensors(folder / "optimiser", memory.optimiser)
    if memory.residual is not None:
        residual = {name: torch.from_numpy(value) for name, value in memory.residual.items()}
        save_tensors(folder / "residual", residual)


def load_memory(folder: Path) -> Memory:
    """What `save_memory` wrote, or nothing."""
    if not (folder / "optimiser").is_file():
        return Memory()
    optimiser = load_tensors(folder / "optimiser")
    if not (folder / "residual").is_file():
        return Memory(optimiser)
    residual = load_tensors(folder / "residual")
    return Memory(optimiser, {name: value.numpy() for name, value in residual.items()})
