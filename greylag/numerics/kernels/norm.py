"""Norm: RMSNorm and the quantization of what it gives; the normalized rows never reach memory.

Along the rows alone one kernel does both, a row in registers. Tiles down the columns need 128 rows at once, which do
not fit: there the first kernel leaves its statistics (backward wants them anyway) and a second one reads `x` again.
Rounding is that of the unfused operator (RMSNorm in FP32, rounded to the dtype of `x`); the mean of the squares is
summed in the device's order. The model does not call it: most of its norms have several readers, some in high
precision.

Shape suffixes: M rows, D columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from greylag.numerics.formats import Format
from greylag.numerics.kernels.tile import (
    EDGE,
    Encoded,
    blocks_of,
    count,
    encode,
    load_tile,
    magnitude,
    places,
    room,
    row_major,
    rule,
    scales,
    store_tile,
)
from greylag.spec.precision import ScaleKind


def rmsnorm_quantize(
    x_MD: Tensor,
    weight_D: Tensor,
    eps: float,
    fmt: Format,
    kind: ScaleKind,
    turned: bool = False,
    nonfinite: Tensor | None = None,
) -> tuple[Encoded, Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight of FP32 or BF16 `x` (M, D) in 1x128 tiles, and 1 / sqrt(...) (M) for backward.

    `turned` and `nonfinite` as in `quantize_1x128`.
    """
    M, D = x_MD.shape
    x_MD = row_major(x_MD)
    inverse_M = x_MD.new_empty(M, dtype=torch.float32)
    out = room(x_MD, M, D, fmt, turned)
    where = None if turned else out.codes, out.codes.stride(0), out.scale_inv
    _by_row[(M,)](
        x_MD, weight_D, inverse_M, M, D, x_MD.stride(0), eps, *where, None if turned else nonfinite,
        **rule(fmt, kind), BLOCKS=triton.next_power_of_2(blocks_of(D)),
    )  # fmt: skip
    if turned:
        _by_tile[(blocks_of(D), blocks_of(M))](
            x_MD, weight_D, inverse_M, M, D, x_MD.stride(0), *places(out), nonfinite, **rule(fmt, kind)
        )
    return out, inverse_M


@triton.jit
def _by_row(
    x_ptr, weight_ptr, inverse_ptr, M, D, x_stride, eps, codes_ptr, codes_stride, scale_ptr, nonfinite_ptr,
    MAX: tl.constexpr, POW2: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    columns = blocks[:, None] * EDGE + tl.arange(0, EDGE)[None, :]
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < D, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / D + eps)
    tl.store(inverse_ptr + row, inverse)
    if codes_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
        y = (x * inverse * weight).to(x_ptr.dtype.element_ty).to(tl.float32)
        y = tl.where(columns < D, y, 0.0)  # zero times an inverse that is NaN
        amax = tl.max(magnitude(y), 1)
        scale_inv, factor = scales(amax, MAX, POW2)
        codes = encode(y * factor[:, None], codes_ptr.dtype.element_ty)
        tl.store(codes_ptr + row * codes_stride + columns, codes, mask=columns < codes_stride)
        tl.store(scale_ptr + blocks.to(tl.int64) * M + row, scale_inv, mask=blocks < tl.cdiv(D, EDGE))
        count(amax, nonfinite_ptr)


@triton.jit
def _by_tile(
    x_ptr, weight_ptr, inverse_ptr, M, D, x_stride,
    codes_ptr, codes_stride, scale_ptr, turned_ptr, turned_stride, turned_scale_ptr, nonfinite_ptr,
    MAX: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    column, row = tl.program_id(0), tl.program_id(1)
    x = load_tile(x_ptr, row, column, M, D, x_stride)
    rows = row.to(tl.int64) * EDGE + tl.arange(0, EDGE)
    columns = column.to(tl.int64) * EDGE + tl.arange(0, EDGE)
    inverse = tl.load(inverse_ptr + rows, mask=rows < M, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    y = (x * inverse[:, None] * weight[None, :]).to(x_ptr.dtype.element_ty).to(tl.float32)
    y = tl.where((columns < D)[None, :], y, 0.0)  # zero times an inverse that is NaN
    store_tile(
        y, row, column, M, D,
        codes_ptr, codes_stride, scale_ptr, turned_ptr, turned_stride, turned_scale_ptr, nonfinite_ptr, MAX, POW2,
    )  # fmt: skip
