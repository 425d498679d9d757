"""Linear: y = x w^T whose three GEMMs take quantized operands.

    forward          y  = Q(x)     Q(w)^T
    input gradient   dx = Q(dy)    Q(w)
    weight gradient  dw = Qc(dy)^T Qc(x)

Q tiles along the contracted dimension: a 1x128 tile lies along a row in the first two GEMMs and down a column (Qc)
in the third, where tokens are contracted (DeepSeek-V3, arXiv 2412.19437, section 3.3). Of the input only its
codes are kept for the weight gradient, re-tiled there; power-of-two scales make that exact but for underflow.
The weights stay in FP32 (the master copy) and are quantized at each use.

One function serves dense layers and experts: rows of `x` come in segments, each multiplied by its own weight.

Shape suffixes: P rows (tokens, with gaps between segments), K in features, N out features, E weights (experts).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from greylag.numerics.formats import FORMATS
from greylag.numerics.gemm import matmul
from greylag.numerics.quantize import Quantized, cast, quantize, tile_of
from greylag.numerics.scaling import DelayedScale
from greylag.spec.precision import BLOCK, Operand, Precision

Segments = list[tuple[int, int]]
"""(first row, number of rows) for each weight; first rows are multiples of 128 where scales are blocks."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Recipe(nn.Module):
    """How one layer quantizes its three operands; holds delayed scales, if any, and counts Inf and NaN."""

    nonfinite: Tensor
    """Tiles seen with Inf or NaN, before a saturating cast could hide them. Reset by whoever reads it."""

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self.precision = precision
        self.register_buffer("nonfinite", torch.zeros((), dtype=torch.int64), persistent=False)
        for role in ("input", "weight", "grad"):
            operand: Operand = getattr(precision, role)
            if operand.is_fp8 and operand.timing == "delayed":
                self.add_module(f"{role}_scale", DelayedScale(FORMATS[operand.format], precision))

    def quantize(self, role: str, x_MK: Tensor, along_rows: bool = True, turn: bool = False) -> Quantized:
        """`x` (M, K) as the operand of a role: input, weight or grad; `turn` as in `quantize.quantize`."""
        operand: Operand = getattr(self.precision, role)
        if not operand.is_fp8:
            return cast(x_MK, _DTYPES[operand.format])
        tile = tile_of(operand.granularity, along_rows)
        delayed = getattr(self, f"{role}_scale", None)
        return quantize(x_MK, FORMATS[operand.format], tile, self.precision.scale, delayed, self.nonfinite, turn)

    def columns(self, role: str, rows: Quantized, source: Tensor | None = None) -> Quantized:
        """The same operand tiled down columns: from its high-precision source, or from what was kept of it."""
        if rows.tile != (1, BLOCK):
            return rows
        if source is None:
            return self.quantize(role, rows.dequantize(), along_rows=False, turn=self.precision.scale == "pow2")
        return self.quantize(role, source, along_rows=False)

    def extra_repr(self) -> str:
        """The precision of each role."""
        p = self.precision
        return f"input {p.input}, weight {p.weight}, grad {p.grad}; product {p.high.upper()}, weight grad FP32"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PK: Tensor, w: Tensor, recipe: Recipe, segments: Segments) -> Tensor:
        qx, qw = recipe.quantize("input", x_PK), _quantize_weight(recipe, w)
        y_PN = x_PK.new_empty(x_PK.shape[0], w.shape[-2])
        for (start, count), w_NK in zip(segments, qw, strict=True):
            if count:
                matmul(qx.rows(start, count), w_NK.t(), y_PN.dtype, y_PN[start : start + count])
        _clear_gaps(y_PN, segments)
        ctx.recipe, ctx.segments, ctx.kept = recipe, segments, (qx.shape, qx.tile, qx.fmt)
        ctx.save_for_backward(qx.encoded(), qx.scale_inv, w)
        return y_PN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        g_PN, recipe, segments = grads[0], ctx.recipe, ctx.segments
        codes, scale_inv, w = ctx.saved_tensors
        shape, tile, fmt = ctx.kept
        qg = recipe.quantize("grad", g_PN)
        dx_PK = _input_gradient(qg, w, recipe, segments, g_PN) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx_PK, None, None, None
        qg = recipe.columns("grad", qg, g_PN)
        qx = recipe.columns("input", Quantized(shape, tile, scale_inv, codes, fmt=fmt))
        dw_ENK = torch.empty_like(w).view(-1, *w.shape[-2:])
        for dw_NK, (start, count) in zip(dw_ENK, segments, strict=True):
            if count:
                matmul(qg.rows(start, count).t(), qx.rows(start, count), dw_NK.dtype, dw_NK)
            else:
                dw_NK.zero_()
        return dx_PK, dw_ENK.view_as(w), None, None


def _input_gradient(qg: Quantized, w: Tensor, recipe: Recipe, segments: Segments, g_PN: Tensor) -> Tensor:
    dx_PK = g_PN.new_empty(g_PN.shape[0], w.shape[-1])
    for (start, count), w_NK in zip(segments, _quantize_weight(recipe, w), strict=True):
        if count:
            matmul(qg.rows(start, count), w_NK, dx_PK.dtype, dx_PK[start : start + count])
    _clear_gaps(dx_PK, segments)
    return dx_PK


def _quantize_weight(recipe: Recipe, w: Tensor) -> list[Quantized]:
    """One Quantized (N, K) per weight of `w` (N, K) or (E, N, K); blocks never reach into the next expert."""
    N, K = w.shape[-2:]
    if w.dim() == 3 and N % BLOCK:
        w = F.pad(w, (0, 0, 0, -N % BLOCK))
    rows = recipe.quantize("weight", w.reshape(-1, K))
    return [rows.rows(start, N) for start in range(0, rows.shape[0], w.shape[-2])]


def _clear_gaps(x: Tensor, segments: Segments) -> None:
    """Zero the rows that belong to no segment, so that they add nothing to any tile."""
    ends = [start for start, _ in segments[1:]] + [x.shape[0]]
    for (start, count), end in zip(segments, ends, strict=True):
        if start + count < end:
            x[start + count : end].zero_()


class Linear(nn.Module):
    """A linear layer, `weight` (out_features, in_features) in FP32, at a recipe's precision.

    Takes (..., in_features), gives (..., out_features) in the input's dtype. A drop-in for `torch.nn.Linear`.
    """

    def __init__(self, in_features: int, out_features: int, precision: Precision, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        nn.init.normal_(self.weight, std=in_features**-0.5)
        self.recipe = Recipe(precision)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (..., K) times the transposed weight, plus bias."""
        x_PK = x.reshape(-1, self.in_features)
        y_PN = grouped_linear(x_PK, self.weight, self.recipe, [(0, x_PK.shape[0])])
        if self.bias is not None:
            y_PN = y_PN + self.bias.to(y_PN.dtype)
        return y_PN.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Shape; the precision is printed by `recipe`."""
        return f"{self.in_features} -> {self.out_features}{', bias' if self.bias is not None else ''}"


def grouped_linear(x_PK: Tensor, w_ENK: Tensor, recipe: Recipe, segments: Segments) -> Tensor:
    """Rows of `x` in segments, each times the transpose of its own weight: (P, N), zero between segments."""
    y: Tensor = _Linear.apply(x_PK, w_ENK, recipe, segments)  # type: ignore[no-untyped-call]
    return y
