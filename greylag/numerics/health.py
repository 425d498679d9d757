"""Health: what a tensor's numbers look like, and what a representation does to them. Measured, not remembered.

Everything is a function of one matrix. What needs the whole of it is one pass (`channel_amax`); the rest is meant for
a sample, whole runs of 128 rows spread evenly over the matrix (`sample`), in which rows, columns of 128 and blocks of
128x128 are what they are in the whole.

Shape suffixes: M rows, K columns (channels), S sampled rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from greylag.numerics.formats import Format, round_values
from greylag.numerics.quantize import Quantized, Tile, over_tiles, tile_amax, tiled, untiled, within
from greylag.numerics.scaling import scale_inv_from_amax
from greylag.spec.precision import BLOCK, ScaleKind

BEYOND = 1 + 2.0**-20
"""A scale is a rounded quotient: amax may end a few units in the last place past the format's largest value."""
SMALLEST = 0.001
"""Share of the numbers other than 0 that the dynamic range leaves out at its lower end."""
_EXPONENTS = 150
"""frexp's smallest exponent of an FP32, -148, and a little."""

Run = tuple[int, int]
"""First row and number of rows."""


def sample(shape: tuple[int, int], limit: int) -> list[Run]:
    """Runs of 128 rows, evenly spread, that hold at most `limit` elements (M, K), but one at least; all if that few."""
    M, K = shape
    if M * K <= limit or M <= BLOCK:
        return [(0, M)]
    count = min(max(1, limit // (BLOCK * K)), M // BLOCK)
    return [(i * (M // BLOCK) // count * BLOCK, BLOCK) for i in range(count)]


def take(x_MK: Tensor, runs: Sequence[Run]) -> Tensor:
    """The rows of `runs` in FP32, (S, K)."""
    x = x_MK.detach()
    return torch.cat([x[start : start + count] for start, count in runs]).float() if len(runs) > 1 else (
        x[runs[0][0] : sum(runs[0])].float()
    )  # fmt: skip


def channel_amax(x_MK: Tensor) -> Tensor:
    """Largest magnitude of each column, (K,) FP32."""
    return x_MK.detach().abs().amax(0).float()


def outliers(amax_K: Tensor, times: float, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """(number of channels whose amax is over `times` the median's, the `most` largest, their ratio to the median).

    The median is that of channels that are not all 0.
    """
    alive = torch.where(amax_K > 0, amax_K, torch.nan)
    ratio = (amax_K / alive.nanmedian()).nan_to_num_(0.0)
    top = ratio.topk(min(most, ratio.numel()))
    return (ratio > times).sum(), top.indices, top.values


def dynamic_range(x_SK: Tensor, amax: Tensor) -> Tensor:
    """Octaves between `amax` and the smallest numbers, of which a share of `SMALLEST` is left out; zeros do not count.

    To the accuracy of the numbers' exponents, a scalar; 0 where all are 0.
    """
    exponents = torch.frexp(x_SK)[1].flatten()[x_SK.flatten() != 0] + _EXPONENTS
    counts = torch.bincount(exponents, minlength=2 * _EXPONENTS).cumsum(0)
    low = (counts <= SMALLEST * counts[-1]).sum() - _EXPONENTS
    return torch.where(counts[-1] > 0, torch.log2(amax.clamp_min(torch.finfo(torch.float32).tiny)) - (low - 1), 0.0)


def block_amax(x_SK: Tensor, quantiles: Sequence[float]) -> Tensor:
    """Quantiles of the amax of 1x128 blocks; blocks of zeros do not count; NaN where there are no others."""
    amax = tile_amax(tiled(x_SK, (1, BLOCK)).abs()).flatten()
    return torch.nanquantile(torch.where(amax > 0, amax, torch.nan), torch.tensor(quantiles, device=amax.device))


def scale_exponents(scale_inv: Tensor) -> dict[int, int]:
    """How many scales have which exponent, floor(log2)."""
    exponents, counts = (torch.frexp(scale_inv.float())[1] - 1).unique(return_counts=True)
    return dict(zip(exponents.tolist(), counts.tolist(), strict=True))


def own_rounding(x_MK: Tensor, q: Quantized, runs: Sequence[Run]) -> Tensor:
    """What `q` did to `x` in some rows: the four numbers of `spec.telemetry.Rounding`."""
    assert q.scale_inv is not None
    assert q.fmt is not None
    counts, errors_K = x_MK.new_zeros(3, dtype=torch.float64), x_MK.new_zeros((2, q.shape[1]), dtype=torch.float64)
    for start, count in runs:
        part = q.rows(start, count)
        assert part.scale_inv is not None
        x = tiled(x_MK.detach()[start : start + count].float(), q.tile)
        largest = over_tiles(part.scale_inv) * q.fmt.max
        sums = _sums(x, tiled(part.dequantize(), q.tile), largest, part.shape)
        counts += sums[0]
        errors_K += sums[1]
    return _shares(counts, errors_K)


def rounding(x_SK: Tensor, fmt: Format, tile: Tile, kind: ScaleKind, amax: Tensor | None = None) -> Tensor:
    """What a representation would do to `x`: the four numbers of `spec.telemetry.Rounding`.

    `amax`, one per tile, takes the place of the tile's own: that of a matrix of which `x` is a sample, or of an
    earlier step's.
    """
    x = tiled(x_SK, tile)
    unit = over_tiles(scale_inv_from_amax(tile_amax(x.abs()) if amax is None else amax, fmt, kind))
    scaled = within(x, unit, fmt)
    values = round_values(scaled, fmt, out=scaled).mul_(unit)
    return _shares(*_sums(x, values, unit * fmt.max, (x_SK.shape[0], x_SK.shape[1])))


def _sums(x: Tensor, values: Tensor, largest: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Of tiled `x`: (numbers that became 0, other than 0, beyond the largest), (squared errors, squares) per column."""
    alive = x != 0
    counts = torch.stack([(alive & (values == 0)).sum(), alive.sum(), (x.abs() > largest * BEYOND).sum()])
    columns = [untiled(part, shape).sum(0, dtype=torch.float64) for part in ((values - x).square_(), x.square())]
    return counts.double(), torch.stack(columns)


def _shares(counts: Tensor, errors_K: Tensor) -> Tensor:
    alive, (error, square) = counts[1].clamp_min(1), errors_K.sum(1)
    ratio_K = errors_K[0] / errors_K[1]
    channels = torch.where(errors_K[1] > 0, ratio_K, torch.nan).nanmean()
    squared = torch.stack([error / square, channels]).nan_to_num_(0.0)
    return torch.cat([squared.sqrt(), torch.stack([counts[0], counts[2]]) / alive])
