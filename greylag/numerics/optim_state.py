"""Optimizer state: AdamW's moments as they rest between steps, in FP32, BF16, or 8 bits with a scale per 128 elements.

The scales lie along a matrix's last dim, so that a shard of rows holds the same numbers as the whole. Norms and
biases, a thousandth of all, stay FP32 where matrices take 8 bits. The names are those of `spec.precision`; where a
moment is kept, and what is done with it, is the optimizer's affair (`train.optim`).

    e4m3       the mean m            amax / 448 is the block's scale, an FP32: what is largest keeps its value
    e5m2       the mean of squares v
    e4m3-root  sqrt(v)               E4M3's range squared: 2**35 within a block, where E5M2 has 2**31

Two things would harm training, and are not left to chance.

A mean that moves by less than half a spacing per step, rounded to nearest, stands still for as long as its block's
scale does: in E5M2 v could rise on a large gradient and not fall again, for 0.95 v is nearer to v than to the number
below. So 8-bit moments are rounded stochastically (arXiv 1502.02551), and BF16 where its half spacing, 2**-8 at most,
is no less than 1 - beta. E[v] is kept, in E4M3 as a root but for 2%, and sqrt(v) is known to 11% (one standard
deviation, random gradients).

An element of v that became 0 while that of m did not would divide m by eps. No v is stored below the format's least
number, 2**-31.8 of the block's largest in E5M2 and 2**-35.6 in E4M3 as a root: an element so much smaller than its
neighbours is moved less than AdamW would, never more.

Shape suffixes: M rows, K columns, B blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from greylag.numerics.formats import E4M3, E5M2, Format, decode
from greylag.numerics.quantize import over_tiles, tile_amax, tiled, untiled
from greylag.numerics.scaling import scale_inv_from_amax
from greylag.spec.precision import BLOCK

_TILE = (1, BLOCK)
_FP16_MANTISSA = 10
_FP16_TOP_EXPONENT = 0x4000
_LEAST_AMAX = 2.0**-100
"""Of a block. What is smaller counts as that: AdamW's eps hides it, and sqrt(v) and scales stay normal numbers."""


@dataclass(frozen=True)
class Storage:
    """How one moment of one parameter is stored."""

    dtype: torch.dtype
    fmt: Format | None = None
    """None where numbers are stored as they are, without a scale."""
    root: bool = False
    """The square root is stored."""
    stochastic: bool = False
    """Rounded up or down by chance, else to nearest even."""

    @property
    def noise_bits(self) -> int:
        """Random bits that one rounding takes, 0 without chance: what is cut off of an FP32 or, for codes, an FP16."""
        if not self.stochastic:
            return 0
        return 16 if self.fmt is None else _FP16_MANTISSA - self.fmt.mantissa


class Stored(NamedTuple):
    """A moment at rest: numbers or codes (M, K), and `scale_inv` (M, B) of codes."""

    codes: Tensor
    scale_inv: Tensor | None

    def rows(self, rows: slice) -> "Stored":
        """Some rows, as views."""
        return Stored(self.codes[rows], None if self.scale_inv is None else self.scale_inv[rows])


def storage(name: str, beta: float, num_dims: int) -> Storage:
    """Storage of the moment that decays by `beta`, of a parameter of `num_dims` dims; `name` as in `Precision`."""
    if name == "bf16":
        return Storage(torch.bfloat16, stochastic=1 - beta <= 2.0**-8)
    if name == "fp32" or num_dims < 2:
        return Storage(torch.float32)
    fmt = E5M2 if name == "e5m2" else E4M3
    assert fmt.dtype is not None
    return Storage(fmt.dtype, fmt, root=name == "e4m3-root", stochastic=True)


def zeros(shape: torch.Size, how: Storage, device: torch.device) -> Stored:
    """A moment of a parameter of a shape, before the first step."""
    codes = torch.zeros(shape, dtype=how.dtype, device=device)
    if how.fmt is None:
        return Stored(codes, None)
    return Stored(codes, torch.zeros(*shape[:-1], -(-shape[-1] // BLOCK), device=device))


def restore(stored: Stored, how: Storage) -> Tensor:
    """The moment (M, K) in FP32, a tensor of its own."""
    if how.fmt is None:
        return stored.codes.to(torch.float32, copy=True)
    assert stored.scale_inv is not None
    codes = tiled(stored.codes, _TILE)
    values = untiled(decode(codes, over_tiles(stored.scale_inv), how.fmt), _shape(stored.codes))
    return values.square_() if how.root else values


def store(moment_MK: Tensor, how: Storage, noise_MK: Tensor | None, into: Stored) -> None:
    """Store an FP32 moment (M, K), which is overwritten; `noise` of its shape, from `Noise`, if stochastic.

    Finite numbers only, and none below 0 in a mean of squares, which is what E5M2 and roots are for.
    """
    assert (noise_MK is not None) == how.stochastic
    if how.fmt is None:
        into.codes.copy_(moment_MK if noise_MK is None else _drawn_bf16(moment_MK, noise_MK))
        return
    assert into.scale_inv is not None
    assert noise_MK is not None
    x = tiled(moment_MK.sqrt_() if how.root else moment_MK, _TILE)
    is_square = how.root or how.fmt is E5M2
    amax = tile_amax(x if is_square else x.abs()).clamp_min_(_LEAST_AMAX)
    scale_inv = scale_inv_from_amax(amax, how.fmt, "fp32")
    into.scale_inv.copy_(scale_inv)
    # As FP16s whose least normal number is that of the format, so that a spacing is a whole number of theirs.
    to_fp16 = 2.0 ** (-14 - how.fmt.min_exponent)
    bits = (x * over_tiles(scale_inv.reciprocal().mul_(to_fp16))).half().view(torch.int16)
    codes = _drawn_codes(untiled(bits, _shape(moment_MK)), noise_MK, how.fmt)
    into.codes.view(torch.int8).copy_(codes.clamp_min_(1) if is_square else codes)


def _shape(x_MK: Tensor) -> tuple[int, int]:
    return x_MK.shape[0], x_MK.shape[1]


def _drawn_codes(bits: Tensor, noise: Tensor, fmt: Format) -> Tensor:
    """Codes, int8, of FP16 bits, cut off after a random number below one spacing was added to the magnitude."""
    cut = _FP16_MANTISSA - fmt.mantissa
    bits = bits + noise
    if fmt is E5M2:
        return bits.bitwise_right_shift_(cut).to(torch.int8)
    minus = bits.bitwise_right_shift(15)  # 0 or -1; the sign goes to the exponent's top bit, which is free
    return bits.add_(minus, alpha=-_FP16_TOP_EXPONENT).bitwise_right_shift_(cut).to(torch.int8)


def _drawn_bf16(x: Tensor, noise: Tensor) -> Tensor:
    """FP32s that are BF16s: cut off after a random number below one spacing was added to the magnitude."""
    bits = x.contiguous().view(torch.int32) + noise.to(torch.int32).bitwise_and_(0xFFFF)
    return bits.bitwise_and_(-0x10000).view(torch.float32)


class Noise:
    """Random bits of one step: those of an element depend on seed, step and place in its parameter, and nothing else.

    So every rank that holds the element, whole or in a shard, rounds it alike. They come from one table, read in
    circles: two elements `size` apart share their bits, which is no matter where each is to keep its own mean.
    """

    def __init__(self, seed: int, step: int, device: torch.device) -> None:
        self.size = 1 << (16 if device.type == "cpu" else 22)
        """Length of the table: on a CPU what stays in its cache, on an accelerator what fills it."""
        generator = torch.Generator(device).manual_seed(((seed << 32) + step) % 2**63)
        table = torch.randint(-(2**15), 2**15, (self.size,), dtype=torch.int16, generator=generator, device=device)
        self._twice = {16: torch.cat((table, table))}

    def draw(self, bits: int, stream: int, first: int, shape: Sequence[int]) -> Tensor | None:
        """Random `bits`, int16, of the elements `first` and on of a parameter, in a shape (M, K); None for no bits.

        `stream` tells moments and parameters apart.
        """
        if not bits:
            return None
        if bits not in self._twice:
            self._twice[bits] = self._twice[16].bitwise_and((1 << bits) - 1)
        table, (rows, columns) = self._twice[bits], shape
        start = (first + stream * 40503) % self.size  # Knuth's multiplier, TAOCP vol. 3, 6.4
        count = rows * columns
        if count <= self.size:
            return table[start : start + count].view(rows, columns)
        turns = -(-(start + count) // self.size)
        return table[: self.size].repeat(turns)[start : start + count].view(rows, columns)
