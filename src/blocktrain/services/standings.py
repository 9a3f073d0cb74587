"""Where a lab's run stands, and how that is kept between two starts.

FOLDER/state-N/       blocks, optimisers, residuals and late changes after round N
FOLDER/state.json     which state is the newest, and of which run: replaced last
FOLDER/history.jsonl  CE of a sample as the run went on
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from blocktrain.aggregation.combine import Kept
from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadConfig, BadModel
from blocktrain.learning.files import load_tensors, save_tensors
from blocktrain.terms import Parameters

PARTS = ("snapshot", "steady", "momentum", "residual")
BYTES = "bytes trained"  # beside the tensors of a late change

At = tuple[int, int]
"""A replica: its block and slot."""


@dataclass
class Standings:
    """All that changes while a run goes on."""

    blocks: list[Kept]
    optimisers: dict[At, dict[str, Tensor]] = field(default_factory=dict)
    residuals: dict[At, Parameters] = field(default_factory=dict)
    """What the codec lost of each replica's last update: it is added to the next one."""
    late: dict[At, tuple[Parameters, int]] = field(default_factory=dict)
    """Changes that came after their round, and how many bytes each was trained on."""
    round: int = 0
    core_seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Saved:
    """The pointer to the newest state."""

    identity: dict[str, Any]
    folder: str
    round: int
    core_seconds: float


def save(now: Standings, folder: Path, identity: dict[str, Any]) -> None:
    """Writes everything needed to go on; older states go when the new one is whole."""
    state = folder / f"state-{now.round}"
    with errors_are_clear(folder):
        state.mkdir(parents=True, exist_ok=True)
        for index, kept in enumerate(now.blocks):
            values = {
                f"{part}.{key}": value
                for part in PARTS
                for key, value in (getattr(kept, part) or {}).items()
            }
            save_tensors(state / f"block-{index}.safetensors", as_tensors(values))
        for at, optimiser in now.optimisers.items():
            save_tensors(file(state, "optimiser", at), copied(optimiser))
        for at, residual in now.residuals.items():
            save_tensors(file(state, "residual", at), as_tensors(residual))
        for at, (change, trained) in now.late.items():
            save_tensors(
                file(state, "late", at), as_tensors(change) | {BYTES: torch.tensor(trained)}
            )
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in now.history)
        write_atomically(folder / "history.jsonl", lines)
        body = Saved(identity, state.name, now.round, now.core_seconds)
        write_atomically(folder / "state.json", msgspec.json.encode(body))
        for old in folder.glob("state-*"):
            if old.name != state.name:
                shutil.rmtree(old)


def saved(folder: Path, identity: dict[str, Any]) -> Standings | None:
    """The state in the folder, if there is one; it must be of this very run."""
    pointer = folder / "state.json"
    if not pointer.exists():
        return None
    try:
        told = msgspec.json.decode(pointer.read_bytes(), type=Saved)
        if told.identity != msgspec.to_builtins(identity):
            raise BadConfig(
                f"{folder} holds a run with other settings; choose another --out, "
                "or repeat the command that made it."
            )
        return read(folder, told)
    except (msgspec.DecodeError, OSError) as error:
        raise BadModel(
            f"{pointer} is damaged ({error}); choose another --out or remove the folder."
        ) from None


def read(folder: Path, told: Saved) -> Standings:
    """What the pointer points to."""
    state = folder / told.folder
    run = told.identity["run"]
    kept = [
        kept_of(load_tensors(state / f"block-{index}.safetensors"))
        for index in range(run["shape"]["blocks"])
    ]
    replicas = run["pace"]["replicas"] if told.round else 0
    places = [(index, slot) for index in range(len(kept)) for slot in range(replicas)]
    residuals, late = {}, {}
    for at in places:
        if (path := file(state, "residual", at)).exists():
            residuals[at] = as_arrays(load_tensors(path))
        if (path := file(state, "late", at)).exists():
            found = load_tensors(path)
            trained_on = int(found.pop(BYTES))
            late[at] = (as_arrays(found), trained_on)
    lines = (folder / "history.jsonl").read_bytes().splitlines()  # may be of a round more
    history = [msgspec.json.decode(line) for line in lines]
    return Standings(
        kept,
        {at: load_tensors(file(state, "optimiser", at)) for at in places},
        residuals,
        late,
        told.round,
        told.core_seconds,
        [row for row in history if row["round"] <= told.round],
    )


def file(state: Path, kind: str, at: At) -> Path:
    """Where a replica's part of a state is kept."""
    return state / f"{kind}-{at[0]}-{at[1]}.safetensors"


def kept_of(found: dict[str, Tensor]) -> Kept:
    """What is kept of a block, from its file."""
    parts: dict[str, Parameters] = {}
    for key, tensor in found.items():
        part, name = key.split(".", 1)
        parts.setdefault(part, {})[name] = tensor.numpy()
    return Kept(**parts)


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of their own, so that nobody else's change with them."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def as_tensors(arrays: Parameters) -> dict[str, Tensor]:
    """Parameters as a file takes them."""
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


def as_arrays(tensors: dict[str, Tensor]) -> Parameters:
    """Parameters as a file gives them."""
    return {name: value.numpy() for name, value in tensors.items()}
