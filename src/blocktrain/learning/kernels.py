"""RMSNorm and RoPE with fewer trips through memory than torch makes on a CPU.

Both are memory-bound, and torch's own forms make several passes (LOG.md, 2026-11-15). Other devices
use torch's own.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm(torch.autograd.Function):
    """x / rms(x) * weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Keeps x and one number per row."""
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return torch.mul(x, inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """d/dx = (g w - n mean(g w n)) / rms, with n = x / rms."""
        x, weight, inverse = ctx.saved_tensors
        normed = x * inverse
        product = grads[0] * normed
        mean = (product @ weight).unsqueeze(-1).div_(x.shape[-1])
        # a frozen neighbour's weight needs no gradient
        of_weight = product.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        of_x = torch.mul(grads[0], weight, out=product).sub_(normed.mul_(mean)).mul_(inverse)
        return of_x, of_weight, None


class Rotation(torch.autograd.Function):
    """RoPE: each pair (one number of either half) turned by its angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Keeps only the angles."""
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Turning back."""
        cos, sin = ctx.saved_tensors
        return turn(grads[0], cos, sin, -1), None, None


def turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin), the sine's sign as given."""
    out = torch.empty_like(x)
    (a, b), (turned_a, turned_b) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(a, cos, out=turned_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=turned_b).addcmul_(a, sin, value=sign)
    return out


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last axis."""
    if not x.is_cpu:
        return F.rms_norm(x, (x.shape[-1],), weight, epsilon)
    normed: Tensor = RMSNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return normed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE, halves convention (as Qwen and Llama have it in `transformers`)."""
    if not x.is_cpu:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    rotated: Tensor = Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated
