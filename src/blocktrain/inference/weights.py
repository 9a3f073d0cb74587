"""How a stage holds weights: fp32, bf16 or int8, always computing in fp32.

Matrices lie input-major (one row per input) and inner sums are cut into pieces of 512 terms. So
held, a row of outputs has the same bits however many rows are computed with it, from 2 to 512
(measured: widths 128 to 4096, 1 and 2 threads); output-major, as torch trains them, it has not, and
16 rows cost 2 to 8 times more (LOG.md). A block is laid out once, into a file of the cache folder
that is memory-mapped: anonymous memory never holds it. Embeddings and norms stay fp32.

Letters: R rows, K inputs, N outputs.
"""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from blocktrain.config import cache_folder
from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadModel
from blocktrain.learning.files import Manifest, empty_block_without_memory, load_block, packed
from blocktrain.learning.model import EPSILON, Block, Norm, Shape, SwiGLU
from blocktrain.terms import Digest
from blocktrain.wire.serving import Weights

LAYOUT = 3
"""Changes when the same weights would be laid out or rounded otherwise."""
INNER = 512  # terms of one inner sum; with 1,024 MKL cuts it itself, otherwise for other rows
TILE = 2**20  # numbers made fp32 at once: 4 MiB, however large the matrix

KINDS: dict[Weights, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
}


class Matrix(nn.Module):
    """A matrix without bias, input-major; `scale` belongs to outputs, and only to integers."""

    weight: Tensor
    scale: Tensor | None

    def __init__(self, weight_KN: Tensor, scale_N: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight_KN)
        self.register_buffer("scale", scale_N)

    def forward(self, x: Tensor) -> Tensor:
        inputs, outputs = self.weight.shape
        x_RK = x.reshape(-1, inputs)
        if self.weight.dtype == x.dtype:
            out_RN = summed(x_RK, self.weight)
        else:
            tiles = torch.split(self.weight, TILE // min(INNER, inputs), dim=1)
            out_RN = torch.cat([summed(x_RK, tile_KN) for tile_KN in tiles], dim=1)
        if self.scale is not None:
            out_RN *= self.scale
        return out_RN.view(*x.shape[:-1], outputs)


def summed(x_RK: Tensor, weight_KN: Tensor) -> Tensor:
    """The product, in inner sums of at most INNER terms; weights become fp32 as they are used."""
    if len(weight_KN) <= INNER:
        return x_RK @ weight_KN.to(x_RK.dtype)
    out_RN = x_RK[:, :INNER] @ weight_KN[:INNER].to(x_RK.dtype)
    for top in range(INNER, len(weight_KN), INNER):
        out_RN.addmm_(x_RK[:, top : top + INNER], weight_KN[top : top + INNER].to(x_RK.dtype))
    return out_RN


class LeanNorm(nn.Module):
    """RMSNorm as x / hypot(|x|, sqrt(n epsilon)) times weight sqrt(n): half as many calls."""

    weight: Tensor
    floor: Tensor

    def __init__(self, weight_K: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight_K * len(weight_K) ** 0.5)
        floor = (len(weight_K) * EPSILON) ** 0.5
        self.register_buffer("floor", weight_K.new_full((16,), floor))  # 16: see files.packed

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / torch.hypot(length, self.floor[0])).mul_(self.weight)


class PlainSwiGLU(nn.Module):
    """SwiGLU in operations that round alike wherever a number lies in memory.

    torch's silu rounds otherwise at the end of each thread's part, so that 3 or 5 threads, which
    share rows unevenly, gave other bits for other numbers of rows.
    """

    def __init__(self, trained: SwiGLU) -> None:
        super().__init__()
        self.gate, self.up, self.down = trained.gate, trained.up, trained.down

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        out: Tensor = self.down(gate.div_(gate.neg().exp_().add_(1)).mul_(self.up(x)))
        return out


def open_block(folder: Path, manifest: Manifest, index: int, weights: Weights) -> Block:
    """One block of a model directory for serving, memory-mapped in its layout.

    The file is named after what it was made from and ends with its own digest; a damaged one is
    made again. Once it exists, the model directory needs no block file for it.
    """
    cache = cache_folder() / "weights"
    source = manifest.blocks[index].digest
    name = f"{source}-{weights}-{LAYOUT}"
    for path in cache.glob(f"{name}-*.safetensors"):
        if path.stem == f"{name}-{digest_of(path)[:16]}":
            return map_laid(path, manifest.shape, index, weights)
        path.unlink(missing_ok=True)
    body = packed(laid_out(load_block(folder, manifest, index), weights))
    path = cache / f"{name}-{hashlib.sha256(body).hexdigest()[:16]}.safetensors"
    with errors_are_clear(path):
        cache.mkdir(parents=True, exist_ok=True)
        write_atomically(path, body)
    return map_laid(path, manifest.shape, index, weights)


def digest_of(path: Path) -> Digest:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return Digest(hashlib.file_digest(file, "sha256").hexdigest())


def map_laid(path: Path, shape: Shape, index: int, weights: Weights) -> Block:
    """A block whose weights stay in the file until they are read."""
    try:
        return assembled(shape, index, weights, load_file(path))
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise BadModel(f"{path} cannot be used ({error}); delete it.") from None


def laid_out(block: Block, weights: Weights) -> dict[str, Tensor]:
    """A block's tensors as they are held for serving."""
    tensors = dict(block.state_dict())
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear | Norm):
            held = for_serving(module, weights).state_dict()
            tensors |= {f"{name}.{key}": value for key, value in held.items()}
    return tensors


def assembled(shape: Shape, index: int, weights: Weights, tensors: dict[str, Tensor]) -> Block:
    """The block that `laid_out` gave these tensors of; they are used, not copied."""
    block = empty_block_without_memory(shape, index)
    for_serving(block, weights)
    block.load_state_dict(tensors, assign=True)
    return block.requires_grad_(False)


def for_serving(module: nn.Module, weights: Weights) -> nn.Module:
    """What stands for a trained module where nothing is trained; what is inside it changes too."""
    for name, child in module.named_children():
        setattr(module, name, for_serving(child, weights))
    match module:
        case nn.Linear():
            return rounded(module.weight.detach(), weights)
        case Norm():
            return LeanNorm(module.weight.detach())
        case SwiGLU():
            return PlainSwiGLU(module)
    return module


def rounded(weight_NK: Tensor, weights: Weights) -> Matrix:
    """A trained matrix, turned and rounded: int8 is symmetric, with one scale for each output."""
    weight_KN = weight_NK.T.contiguous()
    if weights == "int8":
        scale_N = weight_KN.abs().amax(0).clamp(min=torch.finfo(torch.float32).tiny) / 127
        return Matrix((weight_KN / scale_N).round().to(torch.int8), scale_N)
    return Matrix(weight_KN.to(KINDS[weights]))
