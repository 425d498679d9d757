"""Formats: the values that FP8 and its narrower and wider kin can hold, and the exact passage between FP32 and them.

Rounding is to nearest, ties to even; magnitudes past the largest finite value saturate. `round_values` does it in
FP32 arithmetic alone, four passes over memory and no conversion (with noise it rounds stochastically); `encode` and
`decode` pass to codes and back, and `pack` to the codes of values that are rounded already. All are held bit-equal to
ml_dtypes, E5M6 to gfloat (tests/numerics), but that `round_values` makes every zero +0.

FP16 is the way to and from codes: E5M2 is its upper byte, E5M6 its upper twelve bits, and E4M3 and all below 8 bits,
shifted, are FP16s whose exponent is biased too low. All are exact, and on a CPU torch's own conversions are 2 to 10
times slower.

E5M6 has a packed form, three bytes for two codes, to be kept in. E3M2, E2M3, E2M2 and E2M1 are here to be studied: a
code takes a whole byte. E8M0, a bare exponent, is for scales.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_EXPONENT = 0x7F800000
_FP32_MANTISSA = 23
_FP16_TOP_EXPONENT = 0x4000
_FP16_MANTISSA = 10
_FP16_MIN_EXPONENT = -14
_E4M3_TO_FP16 = 2.0**-8
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Format:
    """A narrow floating-point format: sign, exponent, mantissa, and numbers below the smallest normal one.

    Sources: E4M3 and E5M2, OCP 8-bit floating point specification, revision 1.0; E3M2, E2M3 and E2M1, OCP
    Microscaling formats (MX) specification, version 1.0, section 5.3; E5M6, DeepSeek-V3 (arXiv 2412.19437, section
    3.3.3), which names it and no more: here it is IEEE-style, as E5M2 is. E2M2 is no standard's: it lies between
    E2M3 and E2M1 and is made as they are, without Inf and NaN.
    """

    name: str
    dtype: torch.dtype | None
    """None where torch has none: codes are then plain integers, see `container`."""
    bits: int
    """Of a code; one is the sign."""
    mantissa: int
    """Bits after the leading one."""
    min_exponent: int
    """Exponent of the smallest normal number; below it the spacing stays 2**(min_exponent - mantissa)."""
    max: float
    """Largest finite magnitude."""
    has_nan: bool = True
    """Whether a code stands for NaN."""

    @property
    def container(self) -> torch.dtype:
        """Dtype of a tensor of codes: torch's own, or an integer that holds a code in its lowest bits."""
        return self.dtype or (torch.uint8 if self.bits <= 8 else torch.int16)


E4M3 = Format("e4m3", torch.float8_e4m3fn, bits=8, mantissa=3, min_exponent=-6, max=448.0)
E5M2 = Format("e5m2", torch.float8_e5m2, bits=8, mantissa=2, min_exponent=-14, max=57344.0)
E5M6 = Format("e5m6", None, bits=12, mantissa=6, min_exponent=-14, max=65024.0)
E3M2 = Format("e3m2", None, bits=6, mantissa=2, min_exponent=-2, max=28.0, has_nan=False)
E2M3 = Format("e2m3", None, bits=6, mantissa=3, min_exponent=0, max=7.5, has_nan=False)
E2M2 = Format("e2m2", None, bits=5, mantissa=2, min_exponent=0, max=7.0, has_nan=False)
E2M1 = Format("e2m1", None, bits=4, mantissa=1, min_exponent=0, max=6.0, has_nan=False)
FORMATS = {f.name: f for f in (E4M3, E5M2, E5M6, E3M2, E2M3, E2M2, E2M1)}

E8M0_BIAS = 127
E8M0_NAN = 0xFF
E8M0_SMALLEST = 0x00400000
"""2**-127 as bits of FP32, a subnormal. Added to those of infinity they make a NaN."""

ROUNDABLE = 2.0**100
"""`round_values` adds up to 2**23 times the number, which must not overflow FP32."""


def round_values(
    x: Tensor,
    fmt: Format,
    unit: Tensor | float = 1.0,
    scratch: Tensor | None = None,
    out: Tensor | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """The nearest values `unit * v`, v in `fmt`, to FP32 `x`, without overflow handling; written to `out` if given.

    `unit` is a power of two, broadcast to `x`. Adding and subtracting 1.5 * 2**23 spacings lets the adder round to
    nearest even at that spacing (Knuth, TAOCP vol. 2, 4.2.2), where the spacing is 2**-mantissa of the number's own
    power of two, and never less than that of the smallest normal number. |x| must be below `ROUNDABLE`, the smallest
    normal number times `unit` be normal in FP32 too, and |x| not exceed `fmt.max * unit` by more than half a spacing;
    `encode` clamps where a scale cannot promise that.
    `scratch`, of the shape of `x`, is overwritten: a new buffer costs as much as a pass over memory.

    With `noise`, uniform in [0, 1) and of the shape of `x`, rounding is stochastic: to one of the two neighbours, with
    the probability of the distance to the other, to within the grain of the noise (2**-24 for FP32 of torch.rand).
    Values of the format stay. |x| above `fmt.max * unit` may then go a whole spacing further: clamp `x` before, or the
    result after, which is finite and has the same bits in the end.
    """
    free = None if scratch is None else scratch.view(torch.int32)
    power = torch.bitwise_and(x.view(torch.int32), _EXPONENT, out=free).view(torch.float32)
    smallest = 2.0**fmt.min_exponent
    if isinstance(unit, Tensor):
        torch.maximum(power, unit * smallest, out=power)
    else:
        power.clamp_min_(unit * smallest)
    if noise is not None:
        return _round_stochastically(x, power, fmt.mantissa, noise, out)
    lift = 1.5 * 2.0 ** (23 - fmt.mantissa)
    return torch.add(x, power, alpha=lift, out=out).sub_(power, alpha=lift)


def _round_stochastically(x: Tensor, power: Tensor, mantissa: int, noise: Tensor, out: Tensor | None) -> Tensor:
    """`x` in spacings of `power * 2**-mantissa`, down to a whole number, and one up where noise is below the rest.

    The rest is taken by itself: `floor(x + noise)` would round the sum, and now and then move what is whole already.
    """
    rest = torch.div(x, power, out=out).mul_(2.0**mantissa)
    whole = rest.floor()
    rest.sub_(whole)
    whole.add_(noise < rest)
    return torch.mul(whole, power, out=rest).mul_(2.0**-mantissa)


def coarsen_(values: Tensor, unit: Tensor) -> Tensor:
    """`round_values` in place for values that are of E4M3 already, but times smaller powers of two than `unit`.

    Half the passes: the spacing of E4M3's smallest numbers does for all. What is larger is a multiple of it, and
    2**18 of them reach beyond the largest, far from the 2**22 that FP32 has room for.
    """
    lift = unit * (1.5 * 2.0 ** (23 - E4M3.mantissa + E4M3.min_exponent))
    return values.add_(lift).sub_(lift)


def encode(x: Tensor, fmt: Format) -> Tensor:
    """Codes of FP32 `x` in `fmt.container`, of its shape, rounded to nearest even, saturated at +-`fmt.max`.

    NaN stays NaN where the format has one, and becomes +`fmt.max` where it has none, as NVIDIA's conversions do (PTX
    ISA, cvt): who must know of NaN or Inf counts them before.
    The clamp stands before the cast because casts differ: up to torch 2.11 an E4M3 cast made overflow NaN, later it
    saturates, and E5M2 becomes infinite (pytorch/pytorch#178817).
    """
    clamped = x.clamp(-fmt.max, fmt.max)
    if fmt.dtype is not None:
        return clamped.to(fmt.dtype)
    if not fmt.has_nan:
        clamped.nan_to_num_(nan=fmt.max)
    return _codes_of_fp16(_round_to_fp16(clamped, fmt), fmt)


def pack(values: Tensor, fmt: Format, scale: Tensor | float = 1.0) -> Tensor:
    """Codes of FP32 `values * scale`, which are in `fmt` but for an error far below FP16's spacing.

    NaN goes as in `encode`, but may not be among values of E4M3.
    """
    if fmt.dtype is None:
        scaled = values * scale
        if not fmt.has_nan:
            scaled.nan_to_num_(nan=fmt.max)
        return _codes_of_fp16(scaled.mul_(_to_fp16(fmt)).half(), fmt)
    if fmt is not E4M3 or values.device.type != "cpu":
        return (values * scale).to(fmt.dtype)
    bits = (values * (scale * _E4M3_TO_FP16)).half().view(torch.int16)
    minus = bits.bitwise_right_shift(15)  # 0 or -1; the sign goes to the exponent's top bit too, which is free
    bits = torch.add(bits, minus, alpha=-_FP16_TOP_EXPONENT)
    return bits.bitwise_right_shift_(7).to(torch.int8).view(fmt.dtype)


def decode(codes: Tensor, scale: Tensor | float = 1.0, fmt: Format | None = None) -> Tensor:
    """FP32 values of codes, times `scale`. ValueError if `fmt` is not given and the codes' dtype does not tell it."""
    fmt = fmt or _format_of(codes.dtype)
    if fmt.dtype is None:
        return _fp16_of_codes(codes, fmt).float().mul_(1 / _to_fp16(fmt)).mul_(scale)
    if codes.device.type != "cpu":
        return codes.view(fmt.dtype).float().mul_(scale)
    bits = codes.view(torch.int8).to(torch.int16)
    if fmt is E5M2:
        return bits.bitwise_left_shift_(8).view(torch.float16).float().mul_(scale)
    bits.bitwise_left_shift_(7).bitwise_and_(~_FP16_TOP_EXPONENT)
    values = bits.view(torch.float16).float()
    if _has_nan(codes):
        values.masked_fill_(values.abs() > E4M3.max * _E4M3_TO_FP16, torch.nan)
    return values.mul_(1 / _E4M3_TO_FP16).mul_(scale)


def _format_of(dtype: torch.dtype) -> Format:
    for fmt in FORMATS.values():
        if fmt.dtype == dtype:
            return fmt
    raise ValueError(f"{dtype} holds codes of more than one format: name it")


def _has_nan(codes: Tensor) -> bool:
    """Whether a NaN is among E4M3 codes: all ones but for the sign."""
    shifted = codes.view(torch.uint8).bitwise_left_shift(1)
    return shifted.numel() > 0 and int(shifted.max()) == 0xFE


def _to_fp16(fmt: Format) -> float:
    """Factor that makes the smallest normal number of `fmt` that of FP16, so that exponent fields differ by nothing."""
    return 2.0 ** (_FP16_MIN_EXPONENT - fmt.min_exponent)


def _round_to_fp16(clamped: Tensor, fmt: Format) -> Tensor:
    """FP32 numbers within +-`fmt.max` rounded to `fmt`, times `_to_fp16`, as FP16. -0 and NaN stay.

    FP16's own rounding must find nothing left to do: twice to nearest is not once to nearest.
    """
    rounded = round_values(clamped, fmt).copysign_(clamped)
    factor = _to_fp16(fmt)
    return (rounded if factor == 1 else rounded.mul_(factor)).half()


def _codes_of_fp16(values: Tensor, fmt: Format) -> Tensor:
    """Codes of numbers of `fmt`, times `_to_fp16`: FP16's bits without the mantissa's end and the exponent's top."""
    bits = values.view(torch.int16)
    minus = bits.bitwise_right_shift(15).bitwise_and_(1 << (fmt.bits - 1))
    magnitude = bits.bitwise_right_shift(_FP16_MANTISSA - fmt.mantissa).bitwise_and_((1 << (fmt.bits - 1)) - 1)
    return magnitude.bitwise_or_(minus).to(fmt.container)


def _fp16_of_codes(codes: Tensor, fmt: Format) -> Tensor:
    """Numbers of `fmt`, times `_to_fp16`, as FP16: the inverse of `_codes_of_fp16`."""
    codes = codes.to(torch.int16)
    minus = codes.bitwise_right_shift(fmt.bits - 1).bitwise_left_shift_(15)
    magnitude = codes.bitwise_and((1 << (fmt.bits - 1)) - 1).bitwise_left_shift_(_FP16_MANTISSA - fmt.mantissa)
    return magnitude.bitwise_or_(minus).view(torch.float16)


def encode_e8m0(scale: Tensor) -> Tensor:
    """E8M0 codes, uint8, of FP32 powers of two from 2**-127 to 2**127: the exponent, plus 127. NaN and Inf are 0xFF.

    It is FP32's exponent field, and 0 for 2**-127. Anything between powers goes down to one. Not torch's own cast,
    which rounds to nearest and would so hide a scale that is no power of two.
    """
    return (scale.view(torch.int32) >> _FP32_MANTISSA).bitwise_and_(0xFF).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """FP32 powers of two 2**(code - 127) of E8M0 codes, uint8 or wider; NaN for 0xFF (OCP MX 1.0, section 5.4.1)."""
    codes = codes.int()
    special = (codes == 0) | (codes == E8M0_NAN)
    return (codes << _FP32_MANTISSA).add_(special, alpha=E8M0_SMALLEST).view(torch.float32)


def pack_e5m6(x: Tensor) -> Tensor:
    """FP32 or BF16 `x` rounded to E5M6 as `encode` does, 1.5 bytes each: uint8, flat, 3 * ceil(numel / 2) of them.

    The two codes that share three bytes are those of element i and i + h, h = ceil(numel / 2), of `x` laid flat (a
    lacking last one is 0). The upper 8 bits of all codes come first, 2 * h bytes, then h bytes of the lower 4 bits:
    those of i low, those of i + h high. So no byte is moved by itself, as two codes side by side would need.
    """
    flat = x.detach().reshape(-1)
    half = -(-flat.numel() // 2)
    if flat.numel() % 2:
        flat = torch.cat((flat, flat.new_zeros(1)))
    packed = torch.empty(3 * half, dtype=torch.uint8, device=x.device)
    upper_2H, lower_H = _planes(packed)
    for part in _chunks(half, x.device):
        clamped = flat.view(2, half)[:, part].float().clamp(-E5M6.max, E5M6.max)
        bits = _round_to_fp16(clamped, E5M6).view(torch.int16)
        upper_2H[:, part] = bits.bitwise_right_shift(8)
        low = bits[0].bitwise_and(0xF0).bitwise_right_shift_(4)
        lower_H[part] = low.bitwise_or_(bits[1].bitwise_and(0xF0))
    return packed


def unpack_e5m6(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """FP32 values, of `shape`, of the bytes that `pack_e5m6` made of a tensor of that shape."""
    upper_2H, lower_H = _planes(packed)
    half, numel = lower_H.numel(), torch.Size(shape).numel()
    assert half == -(-numel // 2), "packed from another shape"
    values_2H = torch.empty(2, half, device=packed.device)
    for part in _chunks(half, packed.device):
        bits = upper_2H[:, part].to(torch.int16).bitwise_left_shift_(8)
        low = lower_H[part].to(torch.int16)
        bits[1].bitwise_or_(low.bitwise_and(0xF0))
        bits[0].bitwise_or_(low.bitwise_and_(0x0F).bitwise_left_shift_(4))
        values_2H[:, part] = bits.view(torch.float16)
    return values_2H.view(-1)[:numel].view(shape)


def _planes(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Views of packed E5M6 codes: upper bytes (2, H), with their sign, and pairs of lower nibbles (H)."""
    half = packed.numel() // 3
    return packed[: 2 * half].view(torch.int8).view(2, half), packed[2 * half :]


def _chunks(size: int, device: torch.device) -> list[slice]:
    """Slices of `size`, so short on a CPU that what is computed between two passes stays in its cache."""
    step = _CHUNK if device.type == "cpu" else max(size, 1)
    return [slice(start, start + step) for start in range(0, size, step)]
