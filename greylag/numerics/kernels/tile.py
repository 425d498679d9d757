"""Tile: the part that every quantizing kernel ends with, from a tile of 128 x 128 FP32 numbers to codes and scales.

The rules are those of `scaling.scale_inv_from_amax` and `formats.encode`, bit for bit, by correctly rounded divisions
(or, for powers of two, by subtracting exponents) and one direct conversion. The largest magnitude is sought among the
*bits*: without their sign, FP32 numbers are ordered as integers are, Inf above all that is finite and NaN above Inf,
so that neither can hide in a maximum. Tiles along the rows and down the columns are made of the same registers: `x` is
read once for both.

Everything here is a device function or the memory that kernels write to; the launches are in the modules beside.

Shape suffixes: M rows, K columns.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from greylag.numerics.formats import Format
from greylag.spec.precision import BLOCK, ScaleKind

EDGE = tl.constexpr(BLOCK)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
"""Bits of Inf; as a mask, the exponent."""
LARGEST_SCALE = tl.constexpr(0x7F7F0000)
"""Bits of the largest BF16, which stands in for fmt.max / amax where that overflows (`scaling`)."""
LARGEST = tl.constexpr(2.0**127 * (2 - 2.0**-23))
"""The largest FP32."""
BIAS = tl.constexpr(127)
MANTISSA = tl.constexpr(23)
"""Bits of FP32's exponent start here."""
SMALLEST = tl.constexpr(0x00400000)
"""Bits of 2**-127, the inverse of the largest power of two."""


class Encoded(NamedTuple):
    """Codes and scales of `x` (M, K), and of its transpose where that was asked for.

    Codes are K-major, as FP8 tensor cores want both operands: rows of `codes` (M, K) and of `turned` (K, M) are views
    into rows padded with zero codes to a multiple of 128. `scale_inv` (M, ceil(K / 128)) and `turned_scale_inv`
    (K, ceil(M / 128)) are FP32 and column-major, as GEMMs load them; of 128 x 128 tiles, (ceil(M / 128), ceil(K / 128))
    and its transpose; of a whole tensor, (1, 1).
    """

    codes: Tensor
    scale_inv: Tensor
    turned: Tensor | None = None
    turned_scale_inv: Tensor | None = None

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Codes and scales of `x`, contracted along its rows."""
        return self.codes, self.scale_inv

    @property
    def columns(self) -> tuple[Tensor, Tensor]:
        """Codes and scales of the transpose, which was asked for: contracted along the columns of `x`."""
        assert self.turned is not None
        assert self.turned_scale_inv is not None
        return self.turned, self.turned_scale_inv


def blocks_of(length: int) -> int:
    """Blocks of 128 that hold `length`."""
    return -(-length // BLOCK)


def room(like: Tensor, M: int, K: int, fmt: Format, turned: bool) -> Encoded:
    """Memory on the device of `like` for an (M, K) matrix in 1x128 tiles, and for its transpose if `turned`."""
    along_rows = codes_room(like, M, K, fmt), scale_room(like, M, K)
    if not turned:
        return Encoded(*along_rows)
    return Encoded(*along_rows, codes_room(like, K, M, fmt), scale_room(like, K, M))


def codes_room(like: Tensor, M: int, K: int, fmt: Format) -> Tensor:
    """Memory for codes (M, K), in rows of whole blocks. ValueError for a format that triton has no type for."""
    if fmt.dtype is None:
        raise ValueError(f"no kernel encodes {fmt.name}")
    return like.new_empty((M, blocks_of(K) * BLOCK), dtype=fmt.dtype)[:, :K]


def scale_room(like: Tensor, M: int, K: int) -> Tensor:
    """Memory for one scale per row and block of columns, (M, ceil(K / 128)), column-major."""
    return like.new_empty((blocks_of(K), M), dtype=torch.float32).t()


def places(out: Encoded) -> tuple[Any, ...]:
    """The arguments of `store_tile` that say where codes and scales go."""
    turned_stride = 0 if out.turned is None else out.turned.stride(0)
    return out.codes, out.codes.stride(0), out.scale_inv, out.turned, turned_stride, out.turned_scale_inv


def row_major(x_MK: Tensor) -> Tensor:
    """`x` with each row in one piece; a transposed matrix is copied."""
    x_MK = x_MK.detach()
    return x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()


def launch() -> dict[str, Any]:
    """How quantizing kernels are compiled.

    With 128 registers a thread two programs fit on a multiprocessor, and one loads while the other computes.
    Contraction into FMA stays off: it would change bits.
    """
    return {"num_warps": 8, "maxnreg": 128, "enable_fp_fusion": False}


def rule(fmt: Format, kind: ScaleKind) -> dict[str, Any]:
    """`launch`, and the rule of the scales. ValueError for a kind of scale that no kernel makes."""
    if kind not in ("pow2", "fp32"):
        raise ValueError(f"no kernel makes scales of the kind {kind}")
    return {"MAX": fmt.max, "POW2": kind == "pow2", **launch()}


@triton.jit
def magnitude(x):
    """Bits of |x|, int32, which order as the numbers do."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def scales(amax, MAX: tl.constexpr, POW2: tl.constexpr):
    """(scale_inv, factor to quantize by) for the bits of the largest magnitude of tiles."""
    usable = (amax > 0) & (amax < INFINITE)
    one = tl.full(amax.shape, 1.0, tl.float32)
    largest = tl.full(amax.shape, MAX, tl.float32)
    if POW2:
        # The difference of the bits, shifted, is floor(log2(MAX / amax)): a smaller mantissa borrows from the exponent.
        exponent = BIAS + ((largest.to(tl.int32, bitcast=True) - amax) >> MANTISSA)
        exponent = tl.where(usable, tl.minimum(exponent, 2 * BIAS), BIAS)
        inverse = tl.where(exponent == 2 * BIAS, SMALLEST, (2 * BIAS - exponent) << MANTISSA)
        scale_inv = inverse.to(tl.float32, bitcast=True)
        factor = (exponent << MANTISSA).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(largest, tl.where(usable, amax.to(tl.float32, bitcast=True), largest))
        bits = scale.to(tl.int32, bitcast=True)
        scale = tl.where(bits == INFINITE, LARGEST_SCALE, bits).to(tl.float32, bitcast=True)
        scale_inv = tl.div_rn(one, scale)
        # The inverse of a subnormal may overflow by a hair, and would make a NaN of each zero.
        factor = tl.minimum(tl.div_rn(one, scale_inv), LARGEST)
    return scale_inv, factor


@triton.jit
def encode(x, dtype: tl.constexpr):
    """Codes of FP32 `x`: nearest even, NaN stays NaN. It is the conversion itself that saturates (cvt...satfinite)."""
    return x.to(dtype)


@triton.jit
def count(amax, nonfinite_ptr):
    """Add the number of tiles whose largest magnitude is Inf or NaN, where someone counts."""
    if nonfinite_ptr is not None:
        bad = tl.sum((amax >= INFINITE).to(tl.int64), 0)
        tl.atomic_add(nonfinite_ptr, bad, mask=bad > 0)


@triton.jit
def spans(row, column):
    """Indices (128, 1) of the rows and (1, 128) of the columns of the tile (row, column), int64."""
    inside = tl.arange(0, EDGE)
    return row.to(tl.int64) * EDGE + inside[:, None], column.to(tl.int64) * EDGE + inside[None, :]


@triton.jit
def load_tile(x_ptr, row, column, M, K, stride):
    """The tile (row, column) of `x` (M, K), 128 x 128, as FP32; zero past the edge."""
    rows, columns = spans(row, column)
    return tl.load(x_ptr + rows * stride + columns, mask=(rows < M) & (columns < K), other=0.0).to(tl.float32)


@triton.jit
def store_codes(codes, row, column, M, codes_ptr, stride):
    """Write the tile (row, column) of codes with `M` rows. Past the last column is a row's padding: zeros."""
    rows, columns = spans(row, column)
    tl.store(codes_ptr + rows * stride + columns, codes, mask=rows < M)


@triton.jit
def store_tile(
    x, row, column, M, K,
    codes_ptr, codes_stride, scale_ptr, turned_ptr, turned_stride, turned_scale_ptr, nonfinite_ptr,
    MAX: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    """Quantize the tile (row, column) of `x`, 128 x 128 FP32 with zeros past the edge.

    Along its rows into `codes`, along its columns into `turned`; a pointer that is None leaves that out.
    """
    bits = magnitude(x)
    if codes_ptr is not None:
        amax = tl.max(bits, 1)
        scale_inv, factor = scales(amax, MAX, POW2)
        codes = encode(x * factor[:, None], codes_ptr.dtype.element_ty)
        store_codes(codes, row, column, M, codes_ptr, codes_stride)
        rows = row.to(tl.int64) * EDGE + tl.arange(0, EDGE)
        tl.store(scale_ptr + column.to(tl.int64) * M + rows, scale_inv, mask=rows < M)
        count(amax, nonfinite_ptr)
    if turned_ptr is not None:
        amax = tl.max(bits, 0)
        scale_inv, factor = scales(amax, MAX, POW2)
        codes = encode(x * factor[None, :], turned_ptr.dtype.element_ty)
        store_codes(tl.trans(codes), column, row, K, turned_ptr, turned_stride)
        columns = column.to(tl.int64) * EDGE + tl.arange(0, EDGE)
        tl.store(turned_scale_ptr + row.to(tl.int64) * K + columns, scale_inv, mask=columns < K)
        count(amax, nonfinite_ptr)
