"""Linear: y = x w^T whose three GEMMs take quantized operands.

    forward          y  = Q(x)     Q(w)^T
    input gradient   dx = Q(dy)    Qc(w)
    weight gradient  dw = Qc(dy)^T Qc(x)

Q tiles along the contracted dimension: a 1x128 tile lies along a row where columns are contracted, and down a column
(Qc) in the weight gradient, where tokens are (DeepSeek-V3, arXiv 2412.19437, section 3.3), and for weights in the
input gradient; 128x128 blocks serve both. Of the input only its codes are kept for the weight gradient, re-tiled
there where scales are powers of two, which is exact but for underflow. The weights stay in FP32 (the master copy) and
are quantized at each use.

One function serves dense layers and experts: rows of `x` come in segments, each multiplied by its own weight. With
`smooth` factors s per channel the GEMMs take Q(x s) and Q(w / s): the same product, other numbers to quantize.

Shape suffixes: P rows (tokens, with gaps between segments), K in features, N out features, E weights (experts).
"""

from typing import Any

import torch
from torch import Tensor, nn

from greylag.numerics.cache import Kept
from greylag.numerics.gemm import Segments, matmul_columns, matmul_segments
from greylag.numerics.quantize import Quantized
from greylag.numerics.quantizer import Quantizer
from greylag.spec.precision import Gemms, Recipe


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_PK: Tensor,
        w: Tensor,
        quantizer: Quantizer,
        segments: Segments,
        kept: Kept | None,
        smooth_EK: Tensor | None,
        ready: Quantized | None,
    ) -> Tensor:
        w_ = w if smooth_EK is None else _over_smooth(w, smooth_EK)
        if smooth_EK is not None and ready is None:
            x_PK = scale_rows(x_PK, smooth_EK, segments)
        qx = ready or quantizer.quantize("forward", "input", x_PK)
        y_PN = x_PK.new_empty(x_PK.shape[0], w.shape[-2])
        qw = [w_NK.t() for w_NK in quantizer.weights("forward", w_)]
        matmul_segments(qx, qw, segments, y_PN)
        quantizer.tell("forward", qx, qw[0], y_PN)
        if ctx.needs_input_grad[1]:
            kept = kept or quantizer.keep(x_PK, qx, segments)
            ctx.restore = kept.restore
        ctx.quantizer, ctx.segments = quantizer, segments
        ctx.save_for_backward(w, smooth_EK, *(kept.tensors if kept and ctx.needs_input_grad[1] else ()))
        return y_PN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g_PN, quantizer, segments = grads[0], ctx.quantizer, ctx.segments
        w, smooth_EK, *kept = ctx.saved_tensors
        wants_x, wants_w = ctx.needs_input_grad[:2]
        qg, qg_down = quantizer.gradients(g_PN, segments, wants_w)
        dx_PK = dw = None
        if wants_x:
            w_ = w if smooth_EK is None else _over_smooth(w, smooth_EK)
            qw = quantizer.weights("input-gradient", w_)
            dx_PK = g_PN.new_empty(g_PN.shape[0], w.shape[-1])
            matmul_segments(qg, qw, segments, dx_PK)
            quantizer.tell("input-gradient", qg, qw[0], dx_PK)
            if smooth_EK is not None:
                dx_PK = scale_rows(dx_PK, smooth_EK, segments)
        if wants_w:
            qx = quantizer.restored(ctx.restore(*kept), segments)
            dw = torch.empty_like(w)
            matmul_columns(qg_down, qx, segments, dw.view(-1, *w.shape[-2:]))
            quantizer.tell("weight-gradient", qg_down.t(), qx, dw)
            if smooth_EK is not None:
                dw = _over_smooth(dw, smooth_EK)
        return dx_PK, dw, None, None, None, None, None


def scale_rows(x_PK: Tensor, factor_EK: Tensor, segments: Segments) -> Tensor:
    """Rows of each segment times its factors per channel; powers of two keep it exact."""
    out = torch.zeros_like(x_PK)
    for factor_K, (start, count) in zip(factor_EK, segments, strict=True):
        torch.mul(x_PK[start : start + count], factor_K.to(x_PK.dtype), out=out[start : start + count])
    return out


def _over_smooth(w: Tensor, factor_EK: Tensor) -> Tensor:
    return w / (factor_EK.unsqueeze(1) if w.dim() == 3 else factor_EK)


class Linear(nn.Module):
    """A linear layer, `weight` (out_features, in_features) in FP32, at a recipe's precision.

    Takes (..., in_features), gives (..., out_features) in the input's dtype. A drop-in for `torch.nn.Linear`.
    """

    def __init__(self, in_features: int, out_features: int, recipe: Recipe | Gemms, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        nn.init.normal_(self.weight, std=in_features**-0.5)
        self.quantizer = Quantizer(recipe)

    def forward(
        self,
        x: Tensor,
        kept: Kept | None = None,
        smooth_EK: Tensor | None = None,
        ready: Quantized | None = None,
    ) -> Tensor:
        """`x` (..., K) times the transposed weight, plus bias.

        `kept`, `smooth_EK` (1, K) and `ready` as in `grouped_linear`.
        """
        x_PK = x.reshape(-1, self.in_features)
        y_PN = grouped_linear(x_PK, self.weight, self.quantizer, [(0, x_PK.shape[0])], kept, smooth_EK, ready)
        if self.bias is not None:
            y_PN = y_PN + self.bias.to(y_PN.dtype)
        return y_PN.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Shape; the precision is printed by `quantizer`."""
        return f"{self.in_features} -> {self.out_features}{', bias' if self.bias is not None else ''}"


def grouped_linear(
    x_PK: Tensor,
    w_ENK: Tensor,
    quantizer: Quantizer,
    segments: Segments,
    kept: Kept | None = None,
    smooth_EK: Tensor | None = None,
    ready: Quantized | None = None,
) -> Tensor:
    """Rows of `x` in segments, each times the transpose of its own weight: (P, N), zero between segments.

    `kept` stands for the input (already smoothed) in the weight gradient, instead of a cache of its own. `smooth_EK`
    are powers of two that multiply the channels of `x` and divide those of the weights before quantization.
    `ready` is the (smoothed) input as the forward GEMM takes it, from who made `x`; with it comes `kept`, and of `x`
    only shape and dtype are read.
    """
    assert ready is None or kept
    y: Tensor = _Linear.apply(x_PK, w_ENK, quantizer, segments, kept, smooth_EK, ready)
    return y
