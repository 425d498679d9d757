"""Grouped GEMM: one launch for all experts, each row of tokens times the weight of its own expert.

Rows come in segments (`segments`). Forward and input gradient give every row, zeros between the segments; the weight
gradient contracts the tokens of a segment, however many, and is zero for an expert without any.

Shape suffixes: P rows (tokens, with gaps between segments), E experts; N and K as in `gemm`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from greylag.numerics.kernels.gemm import Shape, check_scales, contract, is_square, place, shape_for, whole
from greylag.numerics.kernels.segments import segment_of, segment_table, table_size
from greylag.numerics.kernels.tile import EDGE
from greylag.spec.precision import BLOCK


def grouped_gemm(
    a_PK: Tensor,
    a_scale: Tensor,
    b_ENK: Tensor,
    b_scale: Tensor,
    segments: Sequence[tuple[int, int]] | Tensor,
    dtype: torch.dtype,
    shape: Shape | None = None,
) -> Tensor:
    """Rows of `a` times the transposed `b` of their segment: (P, N) in `dtype`, zero between segments.

    `a_scale` (P, ceil(K / 128)); `b_scale` (E, ceil(N / 128), ceil(K / 128)) for 128 x 128 tiles, of any strides. Codes
    and scales as in `gemm.block_scaled_gemm`; for the input gradient `b` is the transposed weights (E, K, N).
    """
    (P, K), (E, N, _) = a_PK.shape, b_ENK.shape
    check_scales(a_PK, a_scale)
    if not is_square(b_ENK, b_scale):
        raise ValueError("the weights of experts are in 128 x 128 tiles")
    table = segment_table(segments, a_PK.device)
    a_PK, b_ENK = whole(a_PK), whole(b_ENK.flatten(0, 1)).unflatten(0, (E, N))
    out = a_PK.new_empty((P, N), dtype=dtype)
    if out.numel() == 0:
        return out
    shape = shape or shape_for(a_PK.device, square=True)
    grid = (triton.cdiv(P, shape.rows) * triton.cdiv(N, shape.columns),)
    _grouped[grid](
        a_PK, a_PK.stride(0), a_scale, *a_scale.stride(), b_ENK, *b_ENK.stride()[:2], b_scale, *b_scale.stride(),
        table, E, out, P, N, K, RAGGED=bool(K % BLOCK), **table_size(table), **shape.options(),
    )  # fmt: skip
    return out


def grouped_weight_gradient(
    a_NP: Tensor,
    a_scale: Tensor,
    b_KP: Tensor,
    b_scale: Tensor,
    segments: Sequence[tuple[int, int]] | Tensor,
    dtype: torch.dtype,
    shape: Shape | None = None,
) -> Tensor:
    """`a` x `b` transposed over the tokens of each segment: (E, N, K) in `dtype`.

    `a` (N, P) are the codes of the transposed output gradient, `b` (K, P) of the transposed input, with `a_scale`
    (N, ceil(P / 128)) and `b_scale` (K, ceil(P / 128)): what `quantize_1x128` calls turned. Rows that belong to no
    segment are zero, or a tile that they share would not be its expert's alone; so blocks are contracted whole.
    """
    N, K = a_NP.shape[0], b_KP.shape[0]
    check_scales(a_NP, a_scale)
    check_scales(b_KP, b_scale)
    table = segment_table(segments, a_NP.device)
    a_NP, b_KP = whole(a_NP), whole(b_KP)
    out = a_NP.new_empty((table.shape[0], N, K), dtype=dtype)
    if out.numel() == 0:
        return out
    shape = shape or shape_for(a_NP.device, square=False)
    grid = (triton.cdiv(N, shape.rows) * triton.cdiv(K, shape.columns), table.shape[0])
    _weight_gradient[grid](
        a_NP, a_NP.stride(0), a_scale, *a_scale.stride(), b_KP, b_KP.stride(0), b_scale, *b_scale.stride(),
        table, out, N, K, **shape.options(),
    )  # fmt: skip
    return out


@triton.jit
def _grouped(
    a_ptr, a_stride, a_scale_ptr, a_scale_stride_m, a_scale_stride_k,
    b_ptr, b_stride_e, b_stride, b_scale_ptr, b_scale_stride_e, b_scale_stride_n, b_scale_stride_k,
    table_ptr, num_segments, out_ptr, P, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RAGGED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    row, column = place(tl.program_id(0), P, N, ROWS, COLUMNS)
    expert, end = segment_of(row * ROWS, table_ptr, num_segments, SEGMENTS)
    rows = row.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = column.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    length = tl.where(row * ROWS < end, K, 0)
    total = contract(
        a_ptr, tl.minimum(rows, P - 1), a_stride, a_scale_ptr, a_scale_stride_m, a_scale_stride_k,
        b_ptr + expert.to(tl.int64) * b_stride_e, tl.minimum(columns, N - 1), b_stride,
        b_scale_ptr + expert * b_scale_stride_e, column.to(tl.int64) * COLUMNS // EDGE,
        b_scale_stride_n, b_scale_stride_k, 0, length, ROWS, COLUMNS, True, RAGGED,
    )  # fmt: skip
    total = tl.where((rows < end)[:, None], total, 0.0)
    places = out_ptr + rows[:, None] * N + columns[None, :]
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=(rows < P)[:, None] & (columns < N)[None, :])


@triton.jit
def _weight_gradient(
    a_ptr, a_stride, a_scale_ptr, a_scale_stride_m, a_scale_stride_k,
    b_ptr, b_stride, b_scale_ptr, b_scale_stride_n, b_scale_stride_k,
    table_ptr, out_ptr, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    row, column = place(tl.program_id(0), N, K, ROWS, COLUMNS)
    rows = row.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = column.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.multiple_of(tl.load(table_ptr + 2 * expert), EDGE)
    a_rows, b_rows = tl.minimum(rows, N - 1), tl.minimum(columns, K - 1)
    total = contract(
        a_ptr, a_rows, a_stride, a_scale_ptr, a_scale_stride_m, a_scale_stride_k,
        b_ptr, b_rows, b_stride, b_scale_ptr, b_rows, b_scale_stride_n, b_scale_stride_k,
        start, tl.cdiv(tl.load(table_ptr + 2 * expert + 1), EDGE) * EDGE, ROWS, COLUMNS, False, False,
    )  # fmt: skip
    places = out_ptr + expert.to(tl.int64) * N * K + rows[:, None] * K + columns[None, :]
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=(rows < N)[:, None] & (columns < K)[None, :])
