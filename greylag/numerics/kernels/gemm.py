"""GEMM: FP8 tensor cores on codes with a scale per 128 of the contracted dimension.

A tensor core of Hopper keeps about 14 bits of a sum, too few for a long one. So each product over 128 starts from zero,
and is then scaled and added to an FP32 accumulator in ordinary registers (DeepSeek-V3, arXiv 2412.19437, section
3.3.2). Scaling and promotion are one FMA.

Operands are K-major and hold their contracted dimension last: forward multiplies (x, w), the input gradient (dy, w
transposed), the weight gradient (dy transposed, x transposed), each with the codes that `quantize` made for it.

Shape suffixes: M and N rows of the two operands, K contracted.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from greylag.numerics.kernels.tile import EDGE, blocks_of
from greylag.spec.precision import BLOCK

BAND = tl.constexpr(8)
"""Rows of tiles that are walked together, so that both operands of what runs at one time stay in the L2 cache."""


class Shape(NamedTuple):
    """How a product is cut: rows and columns of the output per program, its warps, and tiles loaded ahead."""

    rows: int = 128
    columns: int = 128
    warps: int = 8
    stages: int = 4

    def options(self) -> dict[str, Any]:
        """What a kernel is compiled for."""
        cut = {"ROWS": self.rows, "COLUMNS": self.columns}
        return {**cut, "num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


_K_MAJOR = "codes must lie K-major: rows of the contracted dimension in one piece"

LEAN = Shape(rows=64, warps=4, stages=3)
"""For 1x128 tiles on both sides: a scale per column as well, in larger tiles, would spill registers (ptxas, sm_90)."""


def block_scaled_gemm(
    a_MK: Tensor, a_scale: Tensor, b_NK: Tensor, b_scale: Tensor, dtype: torch.dtype, shape: Shape | None = None
) -> Tensor:
    """`a` x `b` transposed, (M, N) in `dtype` (BF16 or FP32), from E4M3 or E5M2 codes.

    `a_scale` (M, ceil(K / 128)) and `b_scale` (N, ceil(K / 128)), or (ceil(N / 128), ceil(K / 128)) for 128 x 128
    tiles, of any strides, are FP32 factors from codes to values. Fastest are column-major scales, and K a multiple
    of 128.
    """
    (M, K), N = a_MK.shape, b_NK.shape[0]
    check_scales(a_MK, a_scale)
    a_MK, b_NK = whole(a_MK), whole(b_NK)
    out = a_MK.new_empty((M, N), dtype=dtype)
    if out.numel() == 0:
        return out
    square = is_square(b_NK, b_scale)
    shape = shape or shape_for(a_MK.device, square)
    grid = (triton.cdiv(M, shape.rows) * triton.cdiv(N, shape.columns),)
    _product[grid](
        a_MK, a_MK.stride(0), a_scale, *a_scale.stride(), b_NK, b_NK.stride(0), b_scale, *b_scale.stride(),
        out, M, N, K, SQUARE=square, RAGGED=bool(K % BLOCK), **shape.options(),
    )  # fmt: skip
    return out


def shape_for(device: torch.device, square: bool) -> Shape:
    """The cut for a device, `square` if `b` is in 128 x 128 tiles.

    Compute capabilities 8.9 and 12.0 have 99 KB of shared memory for a program: three stages of tiles.
    """
    shape = Shape() if square else LEAN
    small = device.type == "cuda" and torch.cuda.get_device_capability(device) in ((8, 9), (12, 0))
    return shape._replace(stages=3) if small else shape


def whole(codes_MK: Tensor) -> Tensor:
    """`codes` (M, K), copied if memory ends before the last row's last block of 128: kernels read whole blocks."""
    M, K = codes_MK.shape
    end = codes_MK.storage_offset() + (M - 1) * codes_MK.stride(0) + blocks_of(K) * BLOCK
    if end <= codes_MK.untyped_storage().nbytes():
        return codes_MK
    return F.pad(codes_MK.view(torch.uint8), (0, -K % BLOCK)).view(codes_MK.dtype)[:, :K]


def check_scales(a_MK: Tensor, a_scale: Tensor) -> None:
    """ValueError unless codes are K-major and have a scale per row and 128 columns."""
    if a_MK.stride(1) != 1:
        raise ValueError(_K_MAJOR)
    if a_scale.shape != (a_MK.shape[0], blocks_of(a_MK.shape[1])):
        raise ValueError(f"scales {tuple(a_scale.shape)} do not fit codes {tuple(a_MK.shape)} in 1x128 tiles")


def is_square(b_NK: Tensor, b_scale: Tensor) -> bool:
    """Whether `b` is in 128 x 128 tiles. ValueError if its scales fit neither those nor 1x128 tiles."""
    square = b_scale.shape[-2:] == (blocks_of(b_NK.shape[-2]), blocks_of(b_NK.shape[-1]))
    if not square:
        check_scales(b_NK, b_scale)
    elif b_NK.stride(-1) != 1:
        raise ValueError(_K_MAJOR)
    return square


@triton.jit
def place(program, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(row, column) of tiles that a program works at: down a band of rows first, then along it."""
    rows, columns = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    band = program // (BAND * columns)
    height = tl.minimum(rows - band * BAND, BAND)
    inside = program % (BAND * columns)
    return band * BAND + inside % height, inside // height


@triton.jit
def promote(total, a, b, a_scale, b_scale, SQUARE: tl.constexpr):
    """`total` plus the product of one block of 128, summed from zero by the tensor core and scaled in FP32."""
    partial = tl.dot(a, tl.trans(b))
    if SQUARE:
        total += partial * (a_scale * b_scale)[:, None]
    else:
        total += partial * a_scale[:, None] * b_scale[None, :]
    return total


@triton.jit
def contract(
    a_ptr, a_rows, a_stride, a_scale_ptr, a_scale_stride_m, a_scale_stride_k,
    b_ptr, b_rows, b_stride, b_scale_ptr, b_scale_rows, b_scale_stride_n, b_scale_stride_k,
    start, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Sum over `length` of the contracted dimension from `start`, a multiple of 128: (ROWS, COLUMNS) FP32.

    `a_rows` and `b_rows` are the rows to read, all of them there; `b_scale_rows` is one row for 128 x 128 tiles.
    What is left of the last block is masked, outside the loop: a mask there would keep loads from running ahead.
    """
    inside = tl.arange(0, EDGE)
    first = start // EDGE
    a_ptrs = a_ptr + a_rows[:, None] * a_stride + (start + inside)[None, :]
    b_ptrs = b_ptr + b_rows[:, None] * b_stride + (start + inside)[None, :]
    a_scales = a_scale_ptr + a_rows * a_scale_stride_m + first * a_scale_stride_k
    b_scales = b_scale_ptr + b_scale_rows * b_scale_stride_n + first * b_scale_stride_k
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(length // EDGE):
        a_scale, b_scale = tl.load(a_scales), tl.load(b_scales)
        total = promote(total, tl.load(a_ptrs), tl.load(b_ptrs), a_scale, b_scale, SQUARE)
        a_ptrs += EDGE
        b_ptrs += EDGE
        a_scales += a_scale_stride_k
        b_scales += b_scale_stride_k
    if RAGGED:
        left = length % EDGE
        if left > 0:
            a = tl.where(inside[None, :] < left, tl.load(a_ptrs), 0.0)
            b = tl.where(inside[None, :] < left, tl.load(b_ptrs), 0.0)
            total = promote(total, a, b, tl.load(a_scales), tl.load(b_scales), SQUARE)
    return total


@triton.jit
def _product(
    a_ptr, a_stride, a_scale_ptr, a_scale_stride_m, a_scale_stride_k,
    b_ptr, b_stride, b_scale_ptr, b_scale_stride_n, b_scale_stride_k,
    out_ptr, M, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    row, column = place(tl.program_id(0), M, N, ROWS, COLUMNS)
    rows = row.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = column.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    # Rows past the edge read the last one: what they give is not stored.
    a_rows, b_rows = tl.minimum(rows, M - 1), tl.minimum(columns, N - 1)
    scale_rows = column.to(tl.int64) * COLUMNS // EDGE if SQUARE else b_rows
    total = contract(
        a_ptr, a_rows, a_stride, a_scale_ptr, a_scale_stride_m, a_scale_stride_k,
        b_ptr, b_rows, b_stride, b_scale_ptr, scale_rows, b_scale_stride_n, b_scale_stride_k,
        0, K, ROWS, COLUMNS, SQUARE, RAGGED,
    )  # fmt: skip
    places = out_ptr + rows[:, None] * N + columns[None, :]
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])
