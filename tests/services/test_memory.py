"""What a worker remembers on its disk, whenever it is killed."""

from pathlib import Path

import numpy as np
import torch

from blocktrain.services.memory import Memory, Notebook
from blocktrain.wire.messages import Signed, Traffic

NOTHING: dict[str, torch.Tensor] = {}


def update(number: int) -> Signed:
    return Signed(b"update %d" % number, "a" * 64, "b" * 128)


def memory(number: float) -> Memory:
    return Memory({"w": torch.full((3,), number)}, {"w": np.full(3, -number, np.float32)})


def remembers(found: Memory, number: float) -> bool:
    assert found.residual is not None
    return bool((found.optimiser["w"] == number).all() and (found.residual["w"] == -number).all())


def test_what_was_taken_is_remembered_for_its_block(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    assert notebook.waiting() is None
    for number in (1, 2):  # the second takes the place of the first
        notebook.keep(update(number), b"tensors", memory(number))
        again = Notebook(tmp_path)  # another life
        assert again.waiting() == update(number)
        assert again.blob.read_bytes() == b"tensors"
        again.taken(block=3)
        assert again.waiting() is None
        assert remembers(Notebook(tmp_path).recall(3), number)
    assert notebook.recall(2).optimiser == NOTHING
    notebook.forget(3)
    assert notebook.recall(3) == Memory()


def test_what_was_refused_leaves_what_was_before(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    notebook.keep(update(1), b"tensors", memory(1))
    notebook.taken(block=0)
    notebook.keep(update(2), b"other tensors", memory(2))
    notebook.refused()
    assert notebook.waiting() is None
    assert remembers(notebook.recall(0), 1)
    assert not notebook.pending.exists()


def test_what_a_kill_left_half_written_is_no_update(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    half = tmp_path / "pending.part"
    half.mkdir()
    (half / "blob").write_bytes(b"half of ")
    assert notebook.waiting() is None
    notebook.keep(update(1), b"tensors", Memory(memory(1).optimiser))
    assert notebook.waiting() == update(1)
    assert notebook.blob.read_bytes() == b"tensors"
    notebook.pending.joinpath("update.json").unlink()  # a refusal that was cut short
    assert notebook.waiting() is None
    notebook.keep(update(2), b"tensors", Memory(memory(2).optimiser))
    notebook.taken(block=0)
    assert notebook.recall(0).residual is None


def test_traffic_of_former_lives(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    assert notebook.traffic() == Traffic()
    notebook.keep_traffic(Traffic(3, 4))
    assert Notebook(tmp_path).traffic() == Traffic(3, 4)
    (tmp_path / "traffic.json").write_bytes(b'{"sent":')
    assert notebook.traffic() == Traffic()
