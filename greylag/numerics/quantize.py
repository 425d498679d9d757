"""Quantize: a tensor as FP8 codes and one scale per tile.

A `Quantized` may hold its codes, its dequantized FP32 values, or both: on a CPU the product is taken of the
values, and codes are made only of what is kept or sent; on an accelerator the codes are multiplied. Either
way the values are `code * scale_inv`, bit for bit (tests/numerics).

Shape suffixes: M rows, K columns; tiles are (r, c), and scales have one entry per tile.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from greylag.numerics.formats import E4M3, ROUNDABLE, Format, coarsen_, decode, encode, pack, round_values
from greylag.numerics.scaling import DelayedScale, scale_inv_from_amax
from greylag.spec.precision import BLOCK, Granularity, ScaleKind

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
                values = decode(_tiled(self.codes, self.tile), _over_tiles(self.scale_inv))
                self.values = _untiled(values, self.shape)
        return self.values

    def encoded(self) -> Tensor:
        """Codes (M, K), computed from the values where only those were made. Exact: the codes lie far apart."""
        if self.codes is None:
            assert self.values is not None
            assert self.scale_inv is not None
            assert self.fmt is not None
            scale = _over_tiles(self.scale_inv.reciprocal())
            self.codes = _untiled(pack(_tiled(self.values, self.tile), self.fmt, scale), self.shape)
        return self.codes

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


def tile_of(granularity: Granularity, along_rows: bool = True) -> Tile:
    """Tile of a granularity; a 1x128 tile lies along the rows, or along the columns (128x1)."""
    if granularity == "tensor":
        return (0, 0)
    if granularity == "128x128":
        return (BLOCK, BLOCK)
    return (1, BLOCK) if along_rows else (BLOCK, 1)


def quantize(
    x_MK: Tensor,
    fmt: Format,
    tile: Tile,
    kind: ScaleKind,
    delayed: DelayedScale | None = None,
    nonfinite: Tensor | None = None,
    turn: bool = False,
) -> Quantized:
    """Quantize FP32 or BF16 `x` (M, K) to `fmt`, one scale per tile.

    `delayed` supplies the scale of a whole tensor from earlier steps. `nonfinite` counts the tiles in which Inf or
    NaN was seen: a saturating cast would hide them. `turn` says that `x` holds values of `fmt` times powers of two,
    quantized in other tiles, and is not needed any more.
    """
    shape = (x_MK.shape[0], x_MK.shape[1])
    x = _tiled(x_MK.detach().float(), tile)
    magnitude = x.abs()
    amax = _tile_amax(magnitude)
    as_values = x.device.type == "cpu" and (amax.numel() == 0 or amax.max().item() < ROUNDABLE)
    if nonfinite is not None and not as_values:
        nonfinite += (~amax.isfinite()).sum()
    scale_inv = scale_inv_from_amax(amax, fmt, kind) if delayed is None else delayed.observe(amax).reshape(1, 1)
    unit = _over_tiles(scale_inv)
    if not as_values:
        codes = encode(x * unit.reciprocal(), fmt)
        return Quantized(shape, tile, scale_inv, codes=_untiled(codes, shape), fmt=fmt)
    if delayed is not None or kind != "pow2" or _is_tiny(scale_inv, fmt):
        scaled = x * unit.reciprocal()
        if delayed is not None:
            scaled.clamp_(-fmt.max, fmt.max)
        values = round_values(scaled, fmt, scratch=magnitude, out=scaled).mul_(unit)
    elif turn and fmt is E4M3:
        values = coarsen_(x, unit)
    else:
        values = round_values(x, fmt, unit, scratch=magnitude)
    return Quantized(shape, tile, scale_inv, values=_untiled(values, shape), fmt=fmt)


def _is_tiny(unit: Tensor, fmt: Format) -> bool:
    """Whether the smallest normal number of `fmt`, times `unit`, is too small for `round_values`."""
    return unit.numel() > 0 and unit.min().item() < torch.finfo(torch.float32).tiny / 2.0**fmt.min_exponent


def cast(x_MK: Tensor, dtype: torch.dtype) -> Quantized:
    """`x` (M, K) in a format that needs no scale."""
    x = x_MK.detach()
    return Quantized((x.shape[0], x.shape[1]), (0, 0), None, codes=x.to(dtype))


def _tile_amax(magnitude: Tensor) -> Tensor:
    """Largest element of each tile of (row tiles, r, column tiles, c); NaN and Inf show."""
    rows, r, columns, c = magnitude.shape
    if magnitude.numel() == 0:
        return magnitude.new_zeros(rows, columns)
    if c == 1:
        return magnitude.view(rows, r, columns).amax(1)  # a reduction of one element each is slow
    return magnitude.amax(3).amax(1)


def _tiled(x_MK: Tensor, tile: Tile) -> Tensor:
    """View as (row tiles, r, column tiles, c), padded with zeros to whole tiles."""
    M, K = x_MK.shape
    rows, r = (-(-M // tile[0]), tile[0]) if tile[0] else (1, M)
    columns, c = (-(-K // tile[1]), tile[1]) if tile[1] else (1, K)
    if rows * r > M or columns * c > K:
        x_MK = F.pad(x_MK, (0, columns * c - K, 0, rows * r - M))
    return x_MK.contiguous().view(rows, r, columns, c)


def _untiled(x: Tensor, shape: tuple[int, int]) -> Tensor:
    return x.view(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3])[: shape[0], : shape[1]]


def _over_tiles(scale: Tensor) -> Tensor:
    """View that broadcasts one factor per tile over a tiled matrix."""
    return scale[:, None, :, None]
