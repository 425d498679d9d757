"""SwiGLU: silu(gate) * up and its quantization in one kernel; the activation itself never reaches memory.

Rounding is that of the unfused operators (`numerics.swiglu`): silu and the product are each rounded to the dtype of
`x`, so that turning the fusion on changes no curve. The exponential is the device's own, a few units in the last place
of FP32 from another's. Smoothing wants each channel's largest magnitude first: `swiglu_amax` reads `x` once more for
it, and writes nothing but that.

Shape suffixes: P rows, F features of gate and of up, E segments of rows (experts).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from greylag.numerics.formats import Format
from greylag.numerics.kernels.segments import segment_of, segment_table, table_size
from greylag.numerics.kernels.tile import (
    EDGE,
    Encoded,
    blocks_of,
    launch,
    load_tile,
    magnitude,
    places,
    room,
    row_major,
    rule,
    spans,
    store_tile,
)
from greylag.spec.precision import ScaleKind


def swiglu_quantize(
    x: Tensor,
    fmt: Format,
    kind: ScaleKind,
    factors_EF: Tensor | None = None,
    segments: Sequence[tuple[int, int]] | Tensor | None = None,
    turned: bool = False,
    nonfinite: Tensor | None = None,
    source: Tensor | None = None,
) -> Encoded:
    """FP32 or BF16 `x` (P, 2F), gate and up side by side, to silu(gate) * up (P, F) in 1x128 tiles.

    `factors_EF` (FP32, powers of two) multiply each channel of a segment's rows before it is quantized (Smooth-SwiGLU,
    arXiv 2409.12517); without `segments` all rows are one. `turned` and `nonfinite` as in `quantize_1x128`.
    `source` (P, F), contiguous and of the dtype of `x`, is filled with what is quantized, for who looks on.
    """
    P, F = x.shape[0], x.shape[1] // 2
    x = row_major(x)
    out = room(x, P, F, fmt, turned)
    table = segment_table([(0, P)] if segments is None else segments, x.device) if factors_EF is not None else None
    size = {"SEGMENTS": 1} if table is None else table_size(table)
    num_segments = 0 if table is None else table.shape[0]
    _swiglu_quantize[(blocks_of(F), blocks_of(P))](
        x, factors_EF, table, num_segments, P, F, x.stride(0), source, *places(out), nonfinite,
        **rule(fmt, kind), **size,
    )  # fmt: skip
    return out


def swiglu_amax(x: Tensor, segments: Sequence[tuple[int, int]] | Tensor) -> Tensor:
    """The largest magnitude of silu(gate) * up for each channel and segment of rows, (E, F) FP32; NaN and Inf show."""
    P, F = x.shape[0], x.shape[1] // 2
    x, table = row_major(x), segment_table(segments, x.device)
    amax_EF = x.new_zeros((table.shape[0], F), dtype=torch.int32)
    _swiglu_amax[(blocks_of(F), blocks_of(P))](
        x, table, table.shape[0], P, F, x.stride(0), amax_EF, **table_size(table), **launch()
    )
    return amax_EF.view(torch.float32)


@triton.jit
def _gated(x_ptr, row, column, P, F, stride):
    """The tile (row, column) of silu(gate) * up, FP32, rounded as if it had been stored."""
    dtype = x_ptr.dtype.element_ty
    gate = load_tile(x_ptr, row, column, P, F, stride)
    up = load_tile(x_ptr + F, row, column, P, F, stride)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up).to(dtype).to(tl.float32)


@triton.jit
def _swiglu_quantize(
    x_ptr, factors_ptr, table_ptr, num_segments, P, F, x_stride, source_ptr,
    codes_ptr, codes_stride, scale_ptr, turned_ptr, turned_stride, turned_scale_ptr, nonfinite_ptr,
    MAX: tl.constexpr, POW2: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    column, row = tl.program_id(0), tl.program_id(1)
    y = _gated(x_ptr, row, column, P, F, x_stride)
    if factors_ptr is not None:
        expert, _ = segment_of(row * EDGE, table_ptr, num_segments, SEGMENTS)
        columns = column.to(tl.int64) * EDGE + tl.arange(0, EDGE)
        factors = tl.load(factors_ptr + expert.to(tl.int64) * F + columns, mask=columns < F, other=1.0)
        y = (y * factors[None, :]).to(x_ptr.dtype.element_ty).to(tl.float32)
    if source_ptr is not None:
        rows, columns = spans(row, column)
        tl.store(source_ptr + rows * F + columns, y.to(x_ptr.dtype.element_ty), mask=(rows < P) & (columns < F))
    store_tile(
        y, row, column, P, F,
        codes_ptr, codes_stride, scale_ptr, turned_ptr, turned_stride, turned_scale_ptr, nonfinite_ptr, MAX, POW2,
    )  # fmt: skip


@triton.jit
def _swiglu_amax(x_ptr, table_ptr, num_segments, P, F, x_stride, amax_ptr, SEGMENTS: tl.constexpr):
    column, row = tl.program_id(0), tl.program_id(1)
    expert, end = segment_of(row * EDGE, table_ptr, num_segments, SEGMENTS)
    y = _gated(x_ptr, row, column, P, F, x_stride)
    rows = row * EDGE + tl.arange(0, EDGE)
    columns = column.to(tl.int64) * EDGE + tl.arange(0, EDGE)
    amax = tl.max(tl.where((rows < end)[:, None], magnitude(y), 0), 0)
    tl.atomic_max(amax_ptr + expert.to(tl.int64) * F + columns, amax, mask=columns < F)
