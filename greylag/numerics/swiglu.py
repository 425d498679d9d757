"""SwiGLU: silu(gate) * up, keeping only its input for backward (the output is kept by the next linear, in FP8)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        g = grads[0]
        gate, up = x.chunk(2, dim=-1)
        dx = torch.empty_like(x)
        d_gate, d_up = dx.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        torch.mul(g, silu, out=d_up)
        # silu'(a) = sigmoid(a) + silu(a) (1 - sigmoid(a))
        slope = silu.sub_(silu * sigmoid).add_(sigmoid)
        torch.mul(slope.mul_(up), g, out=d_gate)
        return dx


def swiglu(x: Tensor) -> Tensor:
    """`x` (..., 2F), gate and up side by side, to silu(gate) * up (..., F) (GLU variants, arXiv 2002.05202)."""
    y: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
    return y
