"""Reference: quantization and the three GEMMs written as the papers say them, slowly. The rest is held against it.

Values are sought in the table of all that a format holds, tiles are walked one by one, and sums are in FP64: nothing
here shares a line with the code that trains (tests/numerics).

Shape suffixes: M rows, K columns; P tokens, K in features, N out features, E weights (experts).
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from greylag.numerics.formats import FORMATS, Format
from greylag.spec.precision import BLOCK, MX_BLOCK, Granularity, Operand, Recipe, ScaleKind

LARGEST = 2.0**127 * (2 - 2.0**-23)
"""The largest FP32."""
LARGEST_SCALE = 2.0**127 * (2 - 2.0**-7)
"""The largest BF16."""


@functools.cache
def representable(fmt: Format) -> Tensor:
    """All values of `fmt` from 0 to its largest, ascending, FP64. Place in the table = code, sign aside.

    The table ends at `fmt.max`, short of the codes of Inf and NaN: E4M3, which has no Inf, holds 448 where its largest
    exponent would reach 480; E5M2 and E5M6 have an exponent for both; the others use every code.
    """
    steps = 2**fmt.mantissa
    values = [k / steps * 2.0**fmt.min_exponent for k in range(steps)]
    exponent = fmt.min_exponent
    while values[-1] < fmt.max:
        values += [(1 + k / steps) * 2.0**exponent for k in range(steps)]
        exponent += 1
    return torch.tensor([v for v in values if v <= fmt.max], dtype=torch.float64)


def nearest(x: Tensor, fmt: Format) -> Tensor:
    """The value of `fmt` nearest to each of `x`, FP64; between two, that of even code; saturated.

    NaN stays, or is the largest value where `fmt` has none.
    """
    table = representable(fmt)
    magnitude = x.double().abs().clamp_max(fmt.max)
    above = torch.searchsorted(table, magnitude).clamp_max(len(table) - 1)
    below = (above - 1).clamp_min(0)
    up, down = table[above] - magnitude, magnitude - table[below]
    place = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return torch.where(x.isnan(), torch.nan if fmt.has_nan else fmt.max, table[place].copysign(x.double()))


def scale_inv(amax: float, fmt: Format, kind: ScaleKind) -> float:
    """Factor from codes to values for the largest magnitude `amax`, an FP32; 1 for 0, Inf and NaN, but see MX.

    `pow2` is the least power of two that brings `amax` to `fmt.max` or below, but not below 2**-127; `fp32` is
    1 / (fmt.max / amax) with both quotients in FP32, LARGEST_SCALE in place of an infinite one.
    `mx-floor` brings `amax` to the largest power of two in `fmt` or above, and below the next one (OCP MX 1.0, section
    6.3); `mx-ceil` is `pow2` of `amax` * (1 / fmt.max), both in FP32. Both are 2**-127 for 0, NaN for Inf and NaN.
    """
    if kind in ("mx-floor", "mx-ceil"):
        return _mx_scale_inv(amax, fmt, kind)
    if amax == 0 or not math.isfinite(amax):
        return 1.0
    if kind == "pow2":
        fraction, exponent = math.frexp(amax / fmt.max)
        return max(2.0 ** (exponent - 1 if fraction == 0.5 else exponent), 2.0**-127)
    scale = _fp32(fmt.max / amax)
    return _fp32(1 / (scale if math.isfinite(scale) else LARGEST_SCALE))


def _mx_scale_inv(amax: float, fmt: Format, kind: ScaleKind) -> float:
    if not math.isfinite(amax):
        return math.nan
    if kind == "mx-floor":
        (_, exponent), (_, largest) = math.frexp(amax), math.frexp(fmt.max)
        exponent -= largest
    else:
        amax = _fp32(amax * _fp32(1 / fmt.max))
        fraction, exponent = math.frexp(amax)
        exponent -= fraction == 0.5
    return 2.0 ** min(max(exponent, -127), 127) if amax else 2.0**-127


def round_trip(x_MK: Tensor, fmt: Format, tile: tuple[int, int], kind: ScaleKind) -> tuple[Tensor, Tensor]:
    """`x` quantized and dequantized tile by tile, (M, K) FP32, and `scale_inv` of the tiles."""
    x = x_MK.float()
    values, scales = torch.empty_like(x), []
    rows, columns = _spans(x.shape[0], tile[0]), _spans(x.shape[1], tile[1])
    for row in rows:
        for column in columns:
            part = x[row, column]
            factor = scale_inv(part.abs().max().item(), fmt, kind)
            scaled = (part.double() * min(_fp32(1 / factor), LARGEST)).float()
            values[row, column] = (nearest(scaled, fmt) * factor).float()
            scales.append(factor)
    return values, torch.tensor(scales).view(len(rows), len(columns))


def linear(
    x_PK: Tensor, w_ENK: Tensor, g_PN: Tensor, precision: Recipe, segments: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (P, N), input gradient (P, K) and weight gradient (E, N, K) for the output gradient `g`, FP64.

    Rows in segments (first row, number), each with its own weight; rows between segments give 0.
    """
    kind, how_x, how_w, how_g = precision.scale, precision.input, precision.weight, precision.grad
    y, dx, dw = (torch.zeros(t.shape, dtype=torch.float64) for t in (g_PN, x_PK, w_ENK))
    x, g = operand(x_PK, how_x, kind), operand(g_PN, how_g, kind)
    x_columns = x if precision.retiles else x_PK
    whole_w = operand(w_ENK.flatten(0, 1), how_w, kind).view(w_ENK.shape) if how_w.granularity == "tensor" else None
    for expert, (start, count) in enumerate(segments):
        rows = slice(start, start + count)
        w, w_columns = (
            operand(w_ENK[expert], how_w, kind, along_rows=along) if whole_w is None else whole_w[expert]
            for along in (True, False)
        )
        y[rows] = x[rows] @ w.t()
        dx[rows] = g[rows] @ w_columns
        # Down the columns, experts are quantized apart, and in whole tiles; a tensor's scale is for all of them.
        g_down = operand(g_PN[rows], how_g, kind, along_rows=False) if how_g.granularity != "tensor" else g[rows]
        x_down = operand(x_columns[rows], how_x, kind, along_rows=False) if how_x.granularity != "tensor" else x[rows]
        dw[expert] = g_down.t() @ x_down
    return y, dx, dw


def promoted(a_codes_MK: Tensor, a_scale: Tensor, b_codes_NK: Tensor, b_scale: Tensor) -> Tensor:
    """`a` x `b`^T as a Hopper kernel with promotion adds it up (DeepSeek-V3, arXiv 2412.19437, section 3.3.2), FP32.

    The codes of 128 columns at a time are multiplied and summed in FP32, that partial sum is multiplied by its scales,
    `a_scale` (M, K / 128) and `b_scale` (ceil(N / 128), K / 128) or (N, K / 128), and added in FP32 to those before.
    """
    a, b = a_codes_MK.float(), b_codes_NK.float()
    if b_scale.shape[0] != b.shape[0]:
        b_scale = b_scale.repeat_interleave(BLOCK, 0)[: b.shape[0]]
    total = torch.zeros(a.shape[0], b.shape[0])
    for number, columns in enumerate(_spans(a.shape[1], BLOCK)):
        partial = a[:, columns] @ b[:, columns].t()
        total += partial * a_scale[:, number, None] * b_scale[None, :, number]
    return total


def operand(x_MK: Tensor, how: Operand, kind: ScaleKind, along_rows: bool = True) -> Tensor:
    """`x` after its passage through an operand's format, FP64; scales from the tensor at hand."""
    if not how.is_scaled:
        return x_MK.to(torch.bfloat16 if how.format == "bf16" else torch.float32).double()
    along: dict[Granularity, tuple[int, int]] = {"row": (1, 0), "1x128": (1, BLOCK), "1x32": (1, MX_BLOCK)}
    tile = {"tensor": (0, 0), "128x128": (BLOCK, BLOCK), **along}[how.granularity]
    if how.granularity in along and not along_rows:
        tile = (tile[1], tile[0])
    return round_trip(x_MK, FORMATS[how.format], tile, kind)[0].double()


def _spans(size: int, edge: int) -> list[slice]:
    step = edge or max(size, 1)
    return [slice(start, start + step) for start in range(0, size, step)]


def _fp32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()
