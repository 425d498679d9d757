"""Quantize: a tensor as FP8 codes and one scale per tile.

A `Quantized` may hold its codes, its dequantized FP32 values, or both: on a CPU the product is taken of the
values, and codes are made only of what is kept or sent; on an accelerator the codes are multiplied. Either
way the values are `code * scale_inv`, bit for bit (tests/numerics).

Shape suffixes: M rows, K columns; tiles are (r, c), and scales have one entry per tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from greylag.numerics import device
from greylag.numerics.formats import E4M3, ROUNDABLE, Format, coarsen_, decode, encode, pack, round_values
from greylag.numerics.kernels import kernels
from greylag.numerics.scaling import DelayedScale, scale_inv_from_amax
from greylag.spec.precision import BLOCK, MX_BLOCK, Granularity, ScaleKind

Tile = tuple[int, int]


@dataclass
class Quantized:
    """A matrix (M, K) in FP8 (or, with `scale_inv` None, a plain cast to a wider format).

    `tile` is (rows, columns) that share a scale; 0 stands for all of that dim. `scale_inv` is
    (ceil(M / rows), ceil(K / columns)).
    """

    shape: tuple[int, int]
    tile: Tile
    scale_inv: Tensor | None
    codes: Tensor | None = None
    values: Tensor | None = None
    fmt: Format | None = None

    def dequantize(self) -> Tensor:
        """FP32 values (M, K)."""
        if self.values is None:
            assert self.codes is not None
            if self.scale_inv is None:
                self.values = self.codes.float()
            else:
                values = decode(tiled(self.codes, self.tile), over_tiles(self.scale_inv), self.fmt)
                self.values = untiled(values, self.shape)
        return self.values

    def encoded(self) -> Tensor:
        """Codes (M, K), computed from the values where only those were made. Exact: the codes lie far apart."""
        if self.codes is None:
            assert self.values is not None
            assert self.scale_inv is not None
            assert self.fmt is not None
            scale = inverse(over_tiles(self.scale_inv))
            self.codes = untiled(pack(tiled(self.values, self.tile), self.fmt, scale), self.shape)
        return self.codes

    @property
    def tiles(self) -> str:
        """What shares a scale, in the words of `spec.precision`; "none" for a plain cast."""
        return "none" if self.scale_inv is None else tile_name(self.tile)

    def rows(self, start: int, count: int) -> "Quantized":
        """Rows `start` to `start + count`, as views; `start` lies on a tile's edge."""
        stop, edge = start + count, self.tile[0]
        assert not edge or start % edge == 0
        scale_inv = self.scale_inv
        if scale_inv is not None and edge:
            scale_inv = scale_inv[start // edge : -(-stop // edge)]
        return Quantized(
            (count, self.shape[1]),
            self.tile,
            scale_inv,
            None if self.codes is None else self.codes[start:stop],
            None if self.values is None else self.values[start:stop],
            self.fmt,
        )

    def t(self) -> "Quantized":
        """The transpose, as views."""
        return Quantized(
            (self.shape[1], self.shape[0]),
            (self.tile[1], self.tile[0]),
            None if self.scale_inv is None else self.scale_inv.t(),
            None if self.codes is None else self.codes.t(),
            None if self.values is None else self.values.t(),
            self.fmt,
        )


def tile_of(granularity: Granularity, along_rows: bool = True, grouped: bool = False) -> Tile:
    """Tile of a granularity; what lies along one dim lies along the rows, or along the columns (128x1).

    A scale per column of a matrix that is `grouped` (several experts, one below the other) is held once for every
    128 rows, since it may not reach over the edge of a group.
    """
    if granularity == "tensor":
        return (0, 0)
    if granularity == "128x128":
        return (BLOCK, BLOCK)
    length = {"1x128": BLOCK, "1x32": MX_BLOCK, "row": BLOCK if grouped and not along_rows else 0}[granularity]
    return (1, length) if along_rows else (length, 1)


def tile_name(tile: Tile) -> str:
    """`1x128` for (1, 128); `tensor`, `row` and `column` where a scale is for all of a dim."""
    names = {(0, 0): "tensor", (1, 0): "row", (0, 1): "column"}
    return names.get(tile, f"{tile[0]}x{tile[1]}")


def quantize(
    x_MK: Tensor,
    fmt: Format,
    tile: Tile,
    kind: ScaleKind,
    delayed: DelayedScale | None = None,
    nonfinite: Tensor | None = None,
    turn: bool = False,
    groups: Sequence[tuple[int, int]] = (),
    noise: torch.Generator | None = None,
) -> Quantized:
    """Quantize FP32 or BF16 `x` (M, K) to `fmt`, one scale per tile.

    `delayed` supplies the scale of a whole tensor from earlier steps. `nonfinite` counts the tiles in which Inf or
    NaN was seen: a saturating cast would hide them. `turn` says that `x` holds values of `fmt` times powers of two,
    quantized in other tiles, and is not needed any more. The tiles within each of `groups` (first row of tiles,
    number of rows of tiles) share one scale per column. `noise` makes rounding stochastic.
    """
    shape = (x_MK.shape[0], x_MK.shape[1])
    if delayed is None and noise is None and not groups and device.by_kernel(x_MK, "quantize"):
        quantized = _by_kernel(x_MK.detach(), fmt, tile, kind, nonfinite)
        if quantized is not None:
            return quantized
    x = tiled(x_MK.detach().float(), tile)
    magnitude = x.abs()
    amax = tile_amax(magnitude)
    for start, count in groups:
        if count > 1:
            amax[start : start + count] = amax[start : start + count].amax(0)
    is_small = amax.numel() == 0 or (x.device.type == "cpu" and amax.max().item() < ROUNDABLE)  # and finite
    as_values = is_small or fmt.dtype is None
    if nonfinite is not None and not is_small:
        nonfinite += (~amax.isfinite()).sum()
    scale_inv = scale_inv_from_amax(amax, fmt, kind) if delayed is None else delayed.observe(amax).reshape(1, 1)
    unit = over_tiles(scale_inv)
    drawn = None if noise is None else torch.rand(x.shape, generator=noise, device=x.device)
    if not as_values:
        scaled = within(x, unit, fmt)
        if drawn is not None:
            scaled = round_values(scaled, fmt, noise=drawn)
        return Quantized(shape, tile, scale_inv, codes=untiled(encode(scaled, fmt), shape), fmt=fmt)
    exact = kind in ("pow2", "mx-ceil") and delayed is None and drawn is None
    if not exact or not is_small or _is_tiny(scale_inv, fmt):
        scaled = within(x, unit, fmt)
        values = round_values(scaled, fmt, scratch=magnitude, out=scaled, noise=drawn).mul_(unit)
    elif turn and fmt is E4M3:
        values = coarsen_(x, unit)
    else:
        values = round_values(x, fmt, unit, scratch=magnitude)
    return Quantized(shape, tile, scale_inv, values=untiled(values, shape), fmt=fmt)


def _by_kernel(x_MK: Tensor, fmt: Format, tile: Tile, kind: ScaleKind, nonfinite: Tensor | None) -> Quantized | None:
    """The same bits from a kernel that reads `x` once; None where there is none for the tile or the format."""
    if not has_kernel(fmt, kind):
        return None
    module, shape = kernels("quantize"), (x_MK.shape[0], x_MK.shape[1])
    if tile == (1, BLOCK):
        out = module.quantize_1x128(x_MK, fmt, kind, turned=False, nonfinite=nonfinite)
        return in_tiles(out.rows, fmt)
    if tile == (BLOCK, 1):
        out = module.quantize_1x128(x_MK, fmt, kind, turned=True, nonfinite=nonfinite)
        return in_tiles(out.columns, fmt).t()
    if tile == (BLOCK, BLOCK):
        out = module.quantize_128x128(x_MK, fmt, kind, turned=False, nonfinite=nonfinite)
        return Quantized(shape, tile, out.scale_inv, codes=out.codes, fmt=fmt)
    return None


def both_ways(x_MK: Tensor, fmt: Format, kind: ScaleKind, nonfinite: Tensor | None) -> tuple[Quantized, Quantized]:
    """`x` in 1x128 and in 128x1 tiles, from a kernel that reads it once."""
    out = kernels("quantize").quantize_1x128(x_MK, fmt, kind, nonfinite=nonfinite)
    return in_tiles(out.rows, fmt), in_tiles(out.columns, fmt).t()


def in_tiles(half: tuple[Tensor, Tensor], fmt: Format) -> Quantized:
    """Codes (M, K) and scales in 1x128 tiles, as a kernel gives them."""
    codes_MK, scale_inv = half
    return Quantized((codes_MK.shape[0], codes_MK.shape[1]), (1, BLOCK), scale_inv, codes=codes_MK, fmt=fmt)


def has_kernel(fmt: Format, kind: ScaleKind) -> bool:
    """Whether kernels write the format and make the scale."""
    return fmt.dtype is not None and kind in ("pow2", "fp32")


def _is_tiny(unit: Tensor, fmt: Format) -> bool:
    """Whether the smallest normal number of `fmt`, times `unit`, is too small for `round_values`."""
    return unit.numel() > 0 and unit.min().item() < torch.finfo(torch.float32).tiny / 2.0**fmt.min_exponent


def cast(x_MK: Tensor, dtype: torch.dtype) -> Quantized:
    """`x` (M, K) in a format that needs no scale."""
    return plain(x_MK.detach().to(dtype))


def plain(x_MK: Tensor) -> Quantized:
    """`x` (M, K) as it is."""
    return Quantized((x_MK.shape[0], x_MK.shape[1]), (0, 0), None, codes=x_MK)


def tile_amax(magnitude: Tensor) -> Tensor:
    """Largest element of each tile of (row tiles, r, column tiles, c); NaN and Inf show."""
    rows, r, columns, c = magnitude.shape
    if magnitude.numel() == 0:
        return magnitude.new_zeros(rows, columns)
    if c == 1:
        return magnitude.view(rows, r, columns).amax(1)  # a reduction of one element each is slow
    return magnitude.amax(3).amax(1)


def tiled(x_MK: Tensor, tile: Tile) -> Tensor:
    """View as (row tiles, r, column tiles, c), padded with zeros to whole tiles."""
    M, K = x_MK.shape
    rows, r = (-(-M // tile[0]), tile[0]) if tile[0] else (1, M)
    columns, c = (-(-K // tile[1]), tile[1]) if tile[1] else (1, K)
    if rows * r > M or columns * c > K:
        x_MK = F.pad(x_MK, (0, columns * c - K, 0, rows * r - M))
    return x_MK.contiguous().view(rows, r, columns, c)


def untiled(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """The matrix (M, K) again, without the padding of its last tiles."""
    return x.view(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3])[: shape[0], : shape[1]]


def within(x: Tensor, unit: Tensor, fmt: Format) -> Tensor:
    """`x` over its scales, saturated at the largest value of the format: what is left to do is to round."""
    return (x * inverse(unit)).clamp_(-fmt.max, fmt.max)


def inverse(unit: Tensor) -> Tensor:
    """1 / `unit`, finite also where `unit` is so small a subnormal that it overflows."""
    return unit.reciprocal().clamp_max_(torch.finfo(torch.float32).max)


def over_tiles(scale: Tensor) -> Tensor:
    """View that broadcasts one factor per tile over a tiled matrix."""
    return scale[:, None, :, None]
