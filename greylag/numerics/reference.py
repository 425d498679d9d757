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
from greylag.spec.precision import BLOCK, Granularity, Operand, Precision, ScaleKind

LARGEST_SCALE = 2.0**127 * (2 - 2.0**-7)
"""The largest BF16."""


@functools.cache
def representable(fmt: Format) -> Tensor:
    """All values of `fmt` from 0 to its largest, ascending, FP64. Place in the table = code, sign aside."""
    steps = 2**fmt.mantissa
    values = [k / steps * 2.0**fmt.min_exponent for k in range(steps)]
    exponent = fmt.min_exponent
    while values[-1] < fmt.max:
        values += [(1 + k / steps) * 2.0**exponent for k in range(steps)]
        exponent += 1
    return torch.tensor([v for v in values if v <= fmt.max], dtype=torch.float64)


def nearest(x: Tensor, fmt: Format) -> Tensor:
    """The value of `fmt` nearest to each of `x`, FP64; between two, that of even code; saturated; NaN stays."""
    table = representable(fmt)
    magnitude = x.double().abs().clamp_max(fmt.max)
    above = torch.searchsorted(table, magnitude).clamp_max(len(table) - 1)
    below = (above - 1).clamp_min(0)
    up, down = table[above] - magnitude, magnitude - table[below]
    place = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return torch.where(x.isnan(), torch.nan, table[place].copysign(x.double()))


def scale_inv(amax: float, fmt: Format, kind: ScaleKind) -> float:
    """Factor from codes to values for the largest magnitude `amax`; 1 for 0, Inf and NaN.

    `pow2` is the least power of two that brings `amax` to `fmt.max` or below, but not below 2**-127; `fp32` is
    1 / (fmt.max / amax) with both quotients in FP32, LARGEST_SCALE in place of an infinite one.
    """
    if amax == 0 or not math.isfinite(amax):
        return 1.0
    if kind == "pow2":
        fraction, exponent = math.frexp(amax / fmt.max)
        return max(2.0 ** (exponent - 1 if fraction == 0.5 else exponent), 2.0**-127)
    scale = _fp32(fmt.max / amax)
    return _fp32(1 / (scale if math.isfinite(scale) else LARGEST_SCALE))


def round_trip(x_MK: Tensor, fmt: Format, tile: tuple[int, int], kind: ScaleKind) -> tuple[Tensor, Tensor]:
    """`x` quantized and dequantized tile by tile, (M, K) FP32, and `scale_inv` of the tiles."""
    x = x_MK.float()
    values, scales = torch.empty_like(x), []
    for row in _spans(x.shape[0], tile[0]):
        for column in _spans(x.shape[1], tile[1]):
            part = x[row, column]
            factor = scale_inv(part.abs().max().item(), fmt, kind)
            scaled = (part.double() * _fp32(1 / factor)).float()
            values[row, column] = (nearest(scaled, fmt) * factor).float()
            scales.append(factor)
    return values, torch.tensor(scales).view(len(_spans(x.shape[0], tile[0])), -1)


def linear(
    x_PK: Tensor, w_ENK: Tensor, g_PN: Tensor, precision: Precision, segments: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (P, N), input gradient (P, K) and weight gradient (E, N, K) for the output gradient `g`, FP64.

    Rows in segments (first row, number), each with its own weight; rows between segments give 0.
    """
    kind, how_x, how_w, how_g = precision.scale, precision.input, precision.weight, precision.grad
    x, g = operand(x_PK, how_x, kind), operand(g_PN, how_g, kind)
    x_columns = operand(x, how_x, kind, along_rows=False) if how_x.granularity == "1x128" else x
    g_columns = operand(g_PN, how_g, kind, along_rows=False) if how_g.granularity == "1x128" else g
    if how_w.granularity == "tensor":
        w = operand(w_ENK.flatten(0, 1), how_w, kind).view(w_ENK.shape)
    else:
        w = torch.stack([operand(w_NK, how_w, kind) for w_NK in w_ENK])
    y, dx, dw = (torch.zeros(t.shape, dtype=torch.float64) for t in (g, x, w))
    for expert, (start, count) in enumerate(segments):
        rows = slice(start, start + count)
        y[rows] = x[rows] @ w[expert].t()
        dx[rows] = g[rows] @ w[expert]
        dw[expert] = g_columns[rows].t() @ x_columns[rows]
    return y, dx, dw


def operand(x_MK: Tensor, how: Operand, kind: ScaleKind, along_rows: bool = True) -> Tensor:
    """`x` after its passage through an operand's format, FP64; scales from the tensor at hand."""
    if not how.is_fp8:
        return x_MK.to(torch.bfloat16 if how.format == "bf16" else torch.float32).double()
    tiles: dict[Granularity, tuple[int, int]] = {
        "tensor": (0, 0),
        "128x128": (BLOCK, BLOCK),
        "1x128": (1, BLOCK) if along_rows else (BLOCK, 1),
    }
    return round_trip(x_MK, FORMATS[how.format], tiles[how.granularity], kind)[0].double()


def _spans(size: int, edge: int) -> list[slice]:
    step = edge or max(size, 1)
    return [slice(start, start + step) for start in range(0, size, step)]


def _fp32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()
