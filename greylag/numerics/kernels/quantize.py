"""Quantize: the kernels that turn a matrix into FP8 codes and scales, in one reading of it.

`quantize_1x128` makes the operands of all three GEMMs of a linear layer from one pass: tiles along the rows for the
forward product and the input gradient, tiles down the columns, transposed, for the weight gradient; `turn_1x128`
makes the latter from codes that were kept. `quantize_128x128` does the weights, `quantize_tensor` a whole tensor.
All give the bits of `numerics.quantize` on the same device; what they make is described by `tile.Encoded`.

Shape suffixes: M rows, K columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from greylag.numerics.formats import E4M3, E5M2, Format
from greylag.numerics.kernels.tile import (
    EDGE,
    Encoded,
    blocks_of,
    codes_room,
    count,
    encode,
    launch,
    load_tile,
    magnitude,
    places,
    room,
    row_major,
    rule,
    scale_room,
    scales,
    store_codes,
    store_tile,
)
from greylag.numerics.scaling import scale_inv_from_amax
from greylag.spec.precision import BLOCK, ScaleKind

_FORMAT_OF = {fmt.dtype: fmt for fmt in (E4M3, E5M2)}


def quantize_1x128(
    x_MK: Tensor, fmt: Format, kind: ScaleKind, turned: bool = True, nonfinite: Tensor | None = None
) -> Encoded:
    """FP32 or BF16 `x` (M, K) in tiles of 128 along its rows, and with `turned` along its columns too.

    `nonfinite` (a scalar, int64) grows by the number of tiles with Inf or NaN, counted in each direction.
    """
    M, K = x_MK.shape
    x_MK = row_major(x_MK)
    out = room(x_MK, M, K, fmt, turned)
    _quantize_1x128[(blocks_of(K), blocks_of(M))](
        x_MK, M, K, x_MK.stride(0), *places(out), nonfinite, **rule(fmt, kind)
    )
    return out


def turn_1x128(
    codes_MK: Tensor, scale_inv: Tensor, kind: ScaleKind, nonfinite: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes (M, K) in 1x128 tiles to those of the transpose: codes (K, M) and scales (K, ceil(M / 128)).

    The values are quantized a second time: exact with powers of two, but for what is too small for the new tile.
    """
    M, K = codes_MK.shape
    fmt = _FORMAT_OF[codes_MK.dtype]
    codes_MK = row_major(codes_MK)
    turned, turned_scale_inv = codes_room(codes_MK, K, M, fmt), scale_room(codes_MK, K, M)
    _turn_1x128[(blocks_of(K), blocks_of(M))](
        codes_MK, codes_MK.stride(0), scale_inv, *scale_inv.stride(), M, K,
        turned, turned.stride(0), turned_scale_inv, nonfinite, **rule(fmt, kind),
    )  # fmt: skip
    return turned, turned_scale_inv


def quantize_128x128(
    x_MK: Tensor, fmt: Format, kind: ScaleKind, turned: bool = True, nonfinite: Tensor | None = None
) -> Encoded:
    """FP32 or BF16 `x` (M, K) in tiles of 128 x 128, and with `turned` the same codes transposed as well."""
    M, K = x_MK.shape
    x_MK = row_major(x_MK)
    codes, transpose = codes_room(x_MK, M, K, fmt), codes_room(x_MK, K, M, fmt) if turned else None
    scale_inv = x_MK.new_empty((blocks_of(M), blocks_of(K)), dtype=torch.float32)
    _quantize_128x128[(blocks_of(K), blocks_of(M))](
        x_MK, M, K, x_MK.stride(0), codes, codes.stride(0), transpose, blocks_of(M) * BLOCK, scale_inv,
        nonfinite, **rule(fmt, kind),
    )  # fmt: skip
    return Encoded(codes, scale_inv, transpose, scale_inv.t() if turned else None)


def quantize_tensor(
    x_MK: Tensor, fmt: Format, kind: ScaleKind, scale_inv: Tensor | None = None, turned: bool = True
) -> tuple[Encoded, Tensor]:
    """FP32 or BF16 `x` (M, K) under one scale, and the largest magnitude of `x` (a scalar, FP32; Inf and NaN show).

    With `scale_inv` (a scalar, from the amax of earlier steps) `x` is read once. Without, its own amax is taken first.
    """
    M, K = x_MK.shape
    x_MK = row_major(x_MK)
    amax = x_MK.new_zeros((), dtype=torch.int32)
    grid = (blocks_of(K), blocks_of(M))
    if scale_inv is None:
        _amax[grid](x_MK, M, K, x_MK.stride(0), amax, **launch())
        scale_inv = scale_inv_from_amax(amax.view(torch.float32), fmt, kind)
    codes, transpose = codes_room(x_MK, M, K, fmt), codes_room(x_MK, K, M, fmt) if turned else None
    _cast[grid](
        x_MK, M, K, x_MK.stride(0), codes, codes.stride(0), transpose, blocks_of(M) * BLOCK, scale_inv, amax,
        **launch(),
    )  # fmt: skip
    scale_inv = scale_inv.reshape(1, 1)
    return Encoded(codes, scale_inv, transpose, scale_inv if turned else None), amax.view(torch.float32)


@triton.jit
def _quantize_1x128(
    x_ptr, M, K, x_stride,
    codes_ptr, codes_stride, scale_ptr, turned_ptr, turned_stride, turned_scale_ptr, nonfinite_ptr,
    MAX: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    column, row = tl.program_id(0), tl.program_id(1)
    x = load_tile(x_ptr, row, column, M, K, x_stride)
    store_tile(
        x, row, column, M, K,
        codes_ptr, codes_stride, scale_ptr, turned_ptr, turned_stride, turned_scale_ptr, nonfinite_ptr, MAX, POW2,
    )  # fmt: skip


@triton.jit
def _turn_1x128(
    codes_ptr, codes_stride, scale_ptr, scale_stride_m, scale_stride_k, M, K,
    turned_ptr, turned_stride, turned_scale_ptr, nonfinite_ptr,
    MAX: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    column, row = tl.program_id(0), tl.program_id(1)
    x = load_tile(codes_ptr, row, column, M, K, codes_stride)
    rows = row.to(tl.int64) * EDGE + tl.arange(0, EDGE)
    scale_inv = tl.load(scale_ptr + rows * scale_stride_m + column * scale_stride_k, mask=rows < M, other=0.0)
    store_tile(
        x * scale_inv[:, None], row, column, M, K,
        None, 0, None, turned_ptr, turned_stride, turned_scale_ptr, nonfinite_ptr, MAX, POW2,
    )  # fmt: skip


@triton.jit
def _quantize_128x128(
    x_ptr, M, K, x_stride, codes_ptr, codes_stride, turned_ptr, turned_stride, scale_ptr, nonfinite_ptr,
    MAX: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    column, row = tl.program_id(0), tl.program_id(1)
    x = load_tile(x_ptr, row, column, M, K, x_stride)
    amax = tl.max(tl.reshape(magnitude(x), (1, EDGE * EDGE)), 1)
    scale_inv, factor = scales(amax, MAX, POW2)
    codes = encode(x * factor[:, None], codes_ptr.dtype.element_ty)
    store_codes(codes, row, column, M, codes_ptr, codes_stride)
    if turned_ptr is not None:
        store_codes(tl.trans(codes), column, row, K, turned_ptr, turned_stride)
    tl.store(scale_ptr + row * tl.cdiv(K, EDGE) + column + tl.arange(0, 1), scale_inv)
    count(amax, nonfinite_ptr)


@triton.jit
def _amax(x_ptr, M, K, x_stride, amax_ptr):
    x = load_tile(x_ptr, tl.program_id(1), tl.program_id(0), M, K, x_stride)
    tl.atomic_max(amax_ptr, tl.max(tl.max(magnitude(x), 1), 0))


@triton.jit
def _cast(x_ptr, M, K, x_stride, codes_ptr, codes_stride, turned_ptr, turned_stride, scale_ptr, amax_ptr):
    column, row = tl.program_id(0), tl.program_id(1)
    x = load_tile(x_ptr, row, column, M, K, x_stride)
    codes = encode(x * tl.div_rn(1.0, tl.load(scale_ptr)), codes_ptr.dtype.element_ty)
    store_codes(codes, row, column, M, codes_ptr, codes_stride)
    if turned_ptr is not None:
        store_codes(tl.trans(codes), column, row, K, turned_ptr, turned_stride)
    tl.atomic_max(amax_ptr, tl.max(tl.max(magnitude(x), 1), 0))
