"""A model directory on disk: a manifest and one safetensors file per block.

    manifest.json                      what the model is, and the size and digest of each block
    block-1-0f3a….safetensors          block 1; its name holds its digest

The manifest is replaced last and in one step, and block files are never overwritten: whenever a
save is cut off, the manifest still names a complete older model.
"""

import hashlib
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from blocktrain.config import fill
from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadConfig, BadModel
from blocktrain.learning.local import open_block, parameters_of
from blocktrain.learning.model import Block, Model, Shape, empty_block
from blocktrain.learning.noise import Noise
from blocktrain.terms import Digest, Parameters

FORMAT = 2
SINGLE_BYTES = 1  # the format of before runs of bytes had vectors
MAX_MANIFEST = 2**20
MAX_SIZE = 2**20  # of layers, width, window or vectors: checked before anything is built
MANIFEST = "manifest.json"
ALIGNED = 64  # bytes: a cache line, and torch's own memory


@dataclass(frozen=True)
class BlockFile:
    """One block's file: its name, size and digest."""

    file: str
    bytes: int
    digest: Digest


@dataclass(frozen=True)
class Manifest:
    """What a model directory says about itself."""

    format: int
    shape: Shape
    noise: Noise
    blocks: list[BlockFile]
    made: dict[str, Any] = field(default_factory=dict)
    """How the model was made: for people."""

    @property
    def digest(self) -> Digest:
        """Names the model: its shape and every block."""
        shape = asdict(self.shape)
        if self.shape.grams == 1:  # as models were named before runs of bytes had vectors
            del shape["grams"], shape["gram_rows"]
        body = msgspec.json.encode((shape, asdict(self.noise), self.blocks))
        return Digest(hashlib.sha256(body).hexdigest())


def save_model(model: Model, folder: Path, made: dict[str, Any] | None = None) -> Manifest:
    """Writes the model; the folder holds either the old model or the new one, never half."""
    with errors_are_clear(folder):
        folder.mkdir(parents=True, exist_ok=True)
        blocks = [
            write_block(folder, number, parameters_of(block))
            for number, block in enumerate(model.blocks, start=1)
        ]
        manifest = Manifest(FORMAT, model.shape, model.noise, blocks, made or {})
        write_atomically(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        for old in folder.glob("block-*.safetensors"):
            if old.name not in {block.file for block in blocks}:
                old.unlink()
        for pattern in (".block-*.part", f".{MANIFEST}.*.part"):  # left behind by kill -9
            for part in folder.glob(pattern):
                part.unlink(missing_ok=True)
    return manifest


def write_block(folder: Path, number: int, parameters: Parameters) -> BlockFile:
    """One block as a file named after its digest."""
    body = packed({name: torch.from_numpy(value) for name, value in parameters.items()})
    digest = Digest(hashlib.sha256(body).hexdigest())
    name = f"block-{number}-{digest[:16]}.safetensors"
    if not (folder / name).is_file() or (folder / name).read_bytes() != body:  # heals damage too
        write_atomically(folder / name, body)
    return BlockFile(name, len(body), digest)


def packed(tensors: dict[str, Tensor]) -> bytes:
    """A safetensors file whose values lie, once mapped, as torch's own memory does.

    Last bits of a product may depend on where its matrices begin; spaces may follow a header. All
    values so lie at multiples of 64 bytes if each tensor has a multiple of 16 of them.
    """
    body: bytes = save(tensors)
    header = int.from_bytes(body[:8], "little")
    spaces = -(8 + header) % ALIGNED
    size = (header + spaces).to_bytes(8, "little")
    return size + body[8 : 8 + header] + b" " * spaces + body[8 + header :]


def read_manifest(folder: Path) -> Manifest:
    """The manifest, checked; or a sentence that says what is wrong with it."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST:
            raise BadModel(f"{path} is too large for a manifest; assemble the model again.")
        table = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError:
        raise BadModel(
            f"{folder} is not a model directory (no {MANIFEST}); "
            "give the --out folder of a finished run."
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadModel(f"{path} is damaged ({error}); assemble the model again.") from None
    if table.get("format") == SINGLE_BYTES and isinstance(table.get("shape"), dict):
        table |= {"format": FORMAT, "shape": {"grams": 1} | table["shape"]}
    if table.get("format", FORMAT) != FORMAT:  # first: another format has other keys
        raise BadModel(
            f"{path} has format {table['format']}, this is for {FORMAT}; upgrade blocktrain."
        )
    try:
        manifest = fill(Manifest, table, where=str(path))
    except BadConfig as error:
        raise BadModel(str(error)) from None
    shape = manifest.shape
    if len(manifest.blocks) != shape.blocks:
        raise BadModel(
            f"{path} lists {len(manifest.blocks)} of {shape.blocks} blocks; "
            "copy the whole model directory again."
        )
    if not is_bounded(shape):
        raise BadModel(f"{path} tells of a model beyond {MAX_SIZE} in some way; copy it again.")
    return manifest


def is_bounded(shape: Shape) -> bool:
    """Whether a shape from elsewhere may be looked at any further."""
    return max(shape.layers, shape.width, shape.window, shape.gram_rows) <= MAX_SIZE


def load_model(folder: Path, device: torch.device | None = None) -> Model:
    """Opens a model directory for use. Weights are memory-mapped where they stay on the CPU."""
    manifest = read_manifest(folder)
    blocks = [load_block(folder, manifest, index) for index in range(manifest.shape.blocks)]
    return Model(manifest.shape, manifest.noise, [block.to(device) for block in blocks])


def load_block(folder: Path, manifest: Manifest, index: int) -> Block:
    """One block, memory-mapped, after its size, digest, names, shapes and values were checked."""
    entry = manifest.blocks[index]
    path = folder / Path(entry.file).name  # never outside the folder, whatever the manifest says
    if not os.path.isfile(path):  # Path.is_file raises for names too long to be
        raise BadModel(f"{path} is missing; copy the whole model directory again.")
    if path.stat().st_size != entry.bytes:
        raise BadModel(
            f"{path} has {path.stat().st_size} bytes instead of {entry.bytes}; copy it again."
        )
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != entry.digest:
            raise BadModel(f"{path} does not have the digest its manifest names; copy it again.")
    return map_block(path, manifest.shape, index)


def map_block(path: Path, shape: Shape, index: int) -> Block:
    """A block whose weights stay in the file until they are read; for use, not for training."""
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise BadModel(f"{path} is not a safetensors file ({error}); copy it again.") from None
    other = BadModel(f"{path} does not hold block {index + 1} of this shape; copy it again.")
    if shape.layers > len(tensors) or any(t.dtype != torch.float32 for t in tensors.values()):
        raise other
    refuse_not_finite(tensors, path)
    block = empty_block_without_memory(shape, index)
    try:
        block.load_state_dict(tensors, assign=True)
    except RuntimeError:
        raise other from None
    return block.requires_grad_(False)


def empty_block_without_memory(shape: Shape, index: int) -> Block:
    """The block's structure only: its values will be assigned."""
    with torch.device("meta"):
        return empty_block(shape, index)


def refuse_not_finite(tensors: dict[str, Tensor], path: Path) -> None:
    """A block with a NaN would poison every model it is part of."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BadModel(
                f"'{name}' in {path} holds a number that is not finite; go back to an older "
                "checkpoint or train with a lower rate."
            )


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Named tensors as one safetensors file, atomically."""
    with errors_are_clear(path):
        write_atomically(path, packed({k: v.contiguous() for k, v in tensors.items()}))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """What `save_tensors` wrote, in memory of its own."""
    try:
        return {name: value.clone() for name, value in load_file(path).items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise BadModel(f"{path} cannot be read ({error}); go back to an older state.") from None


def from_parameters(shape: Shape, noise: Noise, parameters: list[Parameters]) -> Model:
    """A model from the parameters of each block, copied."""
    blocks = [open_block(shape, index, values) for index, values in enumerate(parameters)]
    return Model(shape, noise, [block.requires_grad_(False) for block in blocks])
