"""Formats: the values that FP8 can hold, and the exact passage between FP32 and them.

Rounding is to nearest, ties to even; magnitudes past the largest finite value saturate. `round_values` does it in
FP32 arithmetic alone, four passes over memory and no conversion; `encode` and `decode` pass to codes and back, and
`pack` to the codes of values that are rounded already. All are held bit-equal to ml_dtypes (tests/numerics), but
that `round_values` makes every zero +0.

FP16 is the way to and from codes on a CPU: E5M2 is its upper byte, and E4M3, shifted by 7, an FP16 whose exponent is
biased 8 too low. Both are exact, and torch's own conversions are 2 to 10 times slower.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_EXPONENT = 0x7F800000
_FP16_TOP_EXPONENT = 0x4000
_E4M3_TO_FP16 = 2.0**-8


@dataclass(frozen=True)
class Format:
    """An 8-bit floating-point format (OCP 8-bit floating point specification, revision 1.0)."""

    name: str
    dtype: torch.dtype
    mantissa: int
    """Bits after the leading one."""
    min_exponent: int
    """Exponent of the smallest normal number; below it the spacing stays 2**(min_exponent - mantissa)."""
    max: float
    """Largest finite magnitude."""


E4M3 = Format("e4m3", torch.float8_e4m3fn, mantissa=3, min_exponent=-6, max=448.0)
E5M2 = Format("e5m2", torch.float8_e5m2, mantissa=2, min_exponent=-14, max=57344.0)
FORMATS = {f.name: f for f in (E4M3, E5M2)}

ROUNDABLE = 2.0**100
"""`round_values` adds up to 2**22 times the number, which must not overflow FP32."""


def round_values(
    x: Tensor,
    fmt: Format,
    unit: Tensor | float = 1.0,
    scratch: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The nearest values `unit * v`, v in `fmt`, to FP32 `x`, without overflow handling; written to `out` if given.

    `unit` is a power of two, broadcast to `x`. Adding and subtracting 1.5 * 2**23 spacings lets the adder round to
    nearest even at that spacing (Knuth, TAOCP vol. 2, 4.2.2), where the spacing is 2**-mantissa of the number's own
    power of two, and never less than that of the smallest normal number. |x| must be below `ROUNDABLE`, the smallest
    normal number times `unit` be normal in FP32 too, and |x| not exceed `fmt.max * unit` by more than half a spacing;
    `encode` clamps where a scale cannot promise that.
    `scratch`, of the shape of `x`, is overwritten: a new buffer costs as much as a pass over memory.
    """
    free = None if scratch is None else scratch.view(torch.int32)
    power = torch.bitwise_and(x.view(torch.int32), _EXPONENT, out=free).view(torch.float32)
    smallest = 2.0**fmt.min_exponent
    if isinstance(unit, Tensor):
        torch.maximum(power, unit * smallest, out=power)
    else:
        power.clamp_min_(unit * smallest)
    lift = 1.5 * 2.0 ** (23 - fmt.mantissa)
    return torch.add(x, power, alpha=lift, out=out).sub_(power, alpha=lift)


def coarsen_(values: Tensor, unit: Tensor) -> Tensor:
    """`round_values` in place for values that are of E4M3 already, but times smaller powers of two than `unit`.

    Half the passes: the spacing of E4M3's smallest numbers does for all. What is larger is a multiple of it, and
    2**18 of them reach beyond the largest, far from the 2**22 that FP32 has room for.
    """
    lift = unit * (1.5 * 2.0 ** (23 - E4M3.mantissa + E4M3.min_exponent))
    return values.add_(lift).sub_(lift)


def encode(x: Tensor, fmt: Format) -> Tensor:
    """Codes of FP32 `x`, rounded to nearest even, saturated at +-`fmt.max`; NaN stays NaN.

    The clamp stands before the cast because casts differ: up to torch 2.11 an E4M3 cast made overflow NaN, later it
    saturates, and E5M2 becomes infinite (pytorch/pytorch#178817).
    """
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def pack(values: Tensor, fmt: Format, scale: Tensor | float = 1.0) -> Tensor:
    """Codes of FP32 `values * scale`, which are in `fmt` but for an error far below FP16's spacing."""
    if fmt is not E4M3 or values.device.type != "cpu":
        return (values * scale).to(fmt.dtype)
    bits = (values * (scale * _E4M3_TO_FP16)).half().view(torch.int16)
    minus = bits.bitwise_right_shift(15)  # 0 or -1; the sign goes to the exponent's top bit too, which is free
    bits = torch.add(bits, minus, alpha=-_FP16_TOP_EXPONENT)
    return bits.bitwise_right_shift_(7).to(torch.int8).view(fmt.dtype)


def decode(codes: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """FP32 values of FP8 codes, times `scale`."""
    if codes.device.type != "cpu":
        return codes.float().mul_(scale)
    bits = codes.view(torch.int8).to(torch.int16)
    if codes.dtype == torch.float8_e5m2:
        return bits.bitwise_left_shift_(8).view(torch.float16).float().mul_(scale)
    bits.bitwise_left_shift_(7).bitwise_and_(~_FP16_TOP_EXPONENT)
    values = bits.view(torch.float16).float()
    if _has_nan(codes):
        values.masked_fill_(values.abs() > E4M3.max * _E4M3_TO_FP16, torch.nan)
    return values.mul_(1 / _E4M3_TO_FP16).mul_(scale)


def _has_nan(codes: Tensor) -> bool:
    """Whether a NaN is among E4M3 codes: all ones but for the sign."""
    shifted = codes.view(torch.uint8).bitwise_left_shift(1)
    return shifted.numel() > 0 and int(shifted.max()) == 0xFE
