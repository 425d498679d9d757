"""Norms: RMSNorm and LayerNorm with FP32 statistics."""

from typing import Any

import torch
from torch import Tensor, nn

from greylag.spec.model import Model


class _RMSNorm(torch.autograd.Function):
    """Keeps the input and one number per row; the normalized rows are computed again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.float()
        inverse = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_().div_(rows.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (rows * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        g = grads[0].float()
        normalized = x.float() * inverse
        scaled = g * normalized
        d_weight = scaled.flatten(0, -2).sum(0)
        along = (scaled @ weight.float()).unsqueeze(-1).div_(x.shape[-1])
        dx = (g * weight).sub_(normalized.mul_(along)).mul_(inverse)
        return dx.to(x.dtype), d_weight.to(weight.dtype), None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (arXiv 1910.07467), statistics in FP32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`x` (..., width) normalized."""
        y: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return y

    def extra_repr(self) -> str:
        """Width and precision."""
        return f"{self.weight.shape[0]}, statistics FP32"


def norm(model: Model, width: int) -> nn.Module:
    """The norm that a model uses."""
    return RMSNorm(width, model.norm_eps) if model.norm == "rmsnorm" else nn.LayerNorm(width, model.norm_eps)
