"""Formats against ml_dtypes and, for E5M6, gfloat, bit for bit; they overflow where we saturate, so values are clamped.

Stochastic rounding against the two neighbours in the reference's table, and against the mean that it must keep.
"""

import functools
import math

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greylag.numerics.formats import (
    E2M1,
    E2M2,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E5M6,
    FORMATS,
    decode,
    decode_e8m0,
    encode,
    encode_e8m0,
    pack,
    pack_e5m6,
    round_values,
    unpack_e5m6,
)
from greylag.numerics.reference import nearest, representable

ORACLE = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E3M2: ml_dtypes.float6_e3m2fn,
    E2M3: ml_dtypes.float6_e2m3fn,
    E2M1: ml_dtypes.float4_e2m1fn,
}
GFLOAT_E5M6 = gfloat.FormatInfo(
    name="e5m6",
    k=12,
    precision=7,
    bias=15,
    is_signed=True,
    domain=gfloat.Domain.Extended,
    has_nz=True,
    num_high_nans=2**6 - 1,
    has_subnormals=True,
    is_twos_complement=False,
)
SPECIALS = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 1.17549435e-38, 3.4028235e38)
ALMOST_ONE = 1 - 2.0**-24

each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
each_known_to_ml_dtypes = pytest.mark.parametrize("fmt", ORACLE, ids=lambda f: f.name)


def all_bf16():
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


@functools.cache
def random_fp32(number=10_000_000):
    """Magnitudes log-uniform over all of FP32, subnormals among them, and, for half, near the range of the formats."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, number, dtype=np.uint32)
    near = generator.integers(127 - 24, 127 + 18, number // 2, dtype=np.uint32)
    bits[: number // 2] = bits[: number // 2] & np.uint32(0x807FFFFF) | near << np.uint32(23)
    return torch.from_numpy(np.concatenate([bits.view(np.float32), np.float32(SPECIALS)]))


def ties(fmt):
    """Midpoints of neighbours, where nearest is decided by the even code, and the FP32s beside them."""
    table = representable(fmt)
    middle = ((table[1:] + table[:-1]) / 2).float()
    beside = [middle.nextafter(torch.tensor(end)) for end in (0.0, 1e9)]
    return torch.cat([t for near in (middle, *beside) for t in (near, -near)])


def as_codes(numbers, fmt):
    return numbers.to(torch.uint8).view(fmt.dtype) if fmt.dtype else numbers.to(fmt.container)


def all_codes(fmt):
    return as_codes(torch.arange(2**fmt.bits), fmt)


def as_numbers(codes):
    return codes.view(torch.uint8 if codes.element_size() == 1 else codes.dtype).int()


def expected_codes(x, fmt):
    with np.errstate(invalid="ignore"):
        return x.clamp(-fmt.max, fmt.max).numpy().astype(ORACLE[fmt]).view(np.uint8)


def bits(x):
    return x.contiguous().view(torch.int32)


def assert_same(values, expected):
    """Equal bits, but for the payload of NaN."""
    nan = torch.isnan(expected)
    assert torch.equal(values.isnan(), nan)
    assert torch.equal(bits(values[~nan]), bits(expected[~nan]))


@each_known_to_ml_dtypes
@pytest.mark.parametrize("values", [all_bf16, random_fp32, None], ids=["all-bf16", "random-fp32", "ties"])
def test_encode_is_ml_dtypes(fmt, values):
    x = ties(fmt) if values is None else values()
    encoded = encode(x, fmt)
    codes, expected = encoded.view(torch.uint8).numpy(), expected_codes(x, fmt)
    nan = x.isnan().numpy()
    assert np.array_equal(codes[~nan], expected[~nan])
    there = decode(encoded[torch.from_numpy(nan)], fmt=fmt)
    assert (there.isnan() if fmt.has_nan else there == fmt.max).all()


@each_known_to_ml_dtypes
def test_decode_is_ml_dtypes_for_every_code(fmt):
    expected = np.arange(2**fmt.bits, dtype=np.uint8).view(ORACLE[fmt]).astype(np.float32)
    assert_same(decode(all_codes(fmt), fmt=fmt), torch.from_numpy(expected))


@each_known_to_ml_dtypes
def test_range_is_ml_dtypes(fmt):
    info = ml_dtypes.finfo(ORACLE[fmt])
    assert (fmt.bits, fmt.mantissa, fmt.min_exponent, fmt.max) == (info.bits, info.nmant, info.minexp, float(info.max))


def test_e5m6_is_gfloats_for_every_code():
    assert (GFLOAT_E5M6.max, GFLOAT_E5M6.smallest_normal, GFLOAT_E5M6.smallest_subnormal) == (65024, 2**-14, 2**-20)
    expected = gfloat.decode_ndarray(GFLOAT_E5M6, np.arange(4096)).astype(np.float32)
    assert_same(decode(all_codes(E5M6), fmt=E5M6), torch.from_numpy(expected))


def test_e2m2_is_what_gfloat_makes_of_five_bits():
    info = gfloat.FormatInfo(
        name="e2m2",
        k=5,
        precision=3,
        bias=1,
        is_signed=True,
        domain=gfloat.Domain.Finite,
        has_nz=True,
        num_high_nans=0,
        has_subnormals=True,
        is_twos_complement=False,
    )
    assert (info.max, info.smallest_normal, info.smallest_subnormal) == (E2M2.max, 1, 0.25)
    expected = gfloat.decode_ndarray(info, np.arange(32)).astype(np.float32)
    assert_same(decode(all_codes(E2M2), fmt=E2M2), torch.from_numpy(expected))
    x = torch.cat([decode(all_codes(E2M2), fmt=E2M2), ties(E2M2), all_bf16(), random_fp32()[:400_000]])
    x = x[~x.isnan()]
    rounded = gfloat.round_ndarray(info, x.double().numpy(), sat=True)
    expected = torch.from_numpy(gfloat.encode_ndarray(info, rounded).astype(np.int32))
    assert torch.equal(encode(x, E2M2).int(), expected)


def test_encode_is_gfloats_e5m6():
    """All codes and the FP32s beside them, ties and the FP32s beside them: FP16 in between must not round twice."""
    values = decode(all_codes(E5M6), fmt=E5M6)
    beside = [values.nextafter(torch.tensor(end)) for end in (-math.inf, math.inf)]
    x = torch.cat([values, *beside, ties(E5M6), all_bf16(), random_fp32()[:400_000], torch.tensor(SPECIALS)])
    rounded = gfloat.round_ndarray(GFLOAT_E5M6, x.double().numpy(), sat=True)
    expected = torch.from_numpy(gfloat.encode_ndarray(GFLOAT_E5M6, rounded).astype(np.int32))
    codes, known = encode(x, E5M6), ~x.isnan()
    assert codes.dtype == torch.int16
    assert torch.equal(codes[known].int(), expected[known])
    assert decode(codes, fmt=E5M6)[~known].isnan().all()
    assert_same(unpack_e5m6(pack_e5m6(x), x.shape), decode(codes, fmt=E5M6))


@each_format
def test_decode_takes_any_layout_and_a_scale(fmt):
    codes = all_codes(fmt)[: 2 ** (fmt.bits - 1)].view(4, -1)
    assert_same(decode(codes.t(), fmt=fmt), decode(codes, fmt=fmt).t())
    assert decode(codes[:0], fmt=fmt).shape == (0, codes.shape[1])
    scale = torch.tensor([[0.5], [3.0], [2.0**-40], [1.0]])
    assert_same(decode(codes, scale, fmt), decode(codes, fmt=fmt) * scale)


def test_decode_tells_the_format_by_its_dtype_or_asks():
    codes = torch.arange(120, dtype=torch.uint8)
    for fmt in (E4M3, E5M2):
        assert_same(decode(codes.view(fmt.dtype)), decode(codes, fmt=fmt))
    with pytest.raises(ValueError, match="uint8"):
        decode(codes)


@each_format
def test_pack_returns_every_code(fmt):
    values = decode(all_codes(fmt), fmt=fmt)
    finite = values.isfinite()
    for error in (0.0, 2.0**-22, -(2.0**-22)):
        packed = pack(values[finite] * 2.0**-20, fmt, 2.0**20 * (1 + error))
        assert packed.dtype == fmt.container
        assert torch.equal(as_numbers(packed), as_numbers(all_codes(fmt)[finite]))
    if fmt is not E4M3:
        nan = torch.tensor([math.nan])
        assert_same(decode(pack(nan, fmt), fmt=fmt), decode(encode(nan, fmt), fmt=fmt))


@each_format
def test_table_of_the_reference_is_in_order_of_codes(fmt):
    table = representable(fmt).float()
    assert torch.equal(decode(as_codes(torch.arange(len(table)), fmt), fmt=fmt), table)
    assert table[-1] == fmt.max


@each_known_to_ml_dtypes
def test_nearest_of_the_reference_is_ml_dtypes(fmt):
    x = torch.cat((all_bf16(), ties(fmt)))
    expected = torch.from_numpy(expected_codes(x, fmt).view(ORACLE[fmt]).astype(np.float32))
    values, known = nearest(x, fmt).float(), ~x.isnan()
    assert torch.equal(bits(values[known]), bits(expected[known]))
    assert (values[~known].isnan() if fmt.has_nan else values[~known] == fmt.max).all()


@each_format
@pytest.mark.parametrize("unit", [1.0, 2.0**-30, 2.0**60, 2.0**-112], ids=lambda u: f"2^{int(np.log2(u))}")
def test_round_values_is_decode_of_encode(fmt, unit):
    """Bits are equal but for the sign of zero: the adder makes +0 of all that rounds to zero."""
    x = torch.cat((all_bf16(), random_fp32()[:200_000], ties(fmt)))
    x = x[x.abs() <= fmt.max]
    x, unscaled = x * unit, (x * unit) / unit
    expected = decode(encode(unscaled, fmt), fmt=fmt) * unit
    rounded = round_values(x, fmt, unit)
    assert torch.equal(bits(rounded), bits(expected + 0.0))
    assert not (rounded[rounded == 0].signbit()).any()


@each_format
def test_round_values_takes_a_unit_for_each_row(fmt):
    generator = torch.Generator().manual_seed(0)
    unit = torch.exp2(torch.randint(-126 - fmt.min_exponent, 80, (500, 1), generator=generator).double()).float()
    grid = torch.randn(500, 64, generator=generator) * torch.exp2(-20 * torch.rand(500, 64, generator=generator))
    x = unit * (grid * fmt.max / 8).clamp(-fmt.max, fmt.max)
    expected = nearest(x.double() / unit.double(), fmt) * unit.double()
    assert torch.equal(bits(round_values(x, fmt, unit)), bits(expected.float() + 0.0))


@each_format
@pytest.mark.parametrize("noise", [None, torch.rand(64, generator=torch.Generator().manual_seed(1))], ids=["rne", "sr"])
def test_round_values_writes_where_it_is_told(fmt, noise):
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    expected = round_values(x, fmt, noise=noise)
    kept = x.clone()
    assert torch.equal(round_values(x, fmt, scratch=torch.full_like(x, 3.0), noise=noise), expected)
    assert torch.equal(x, kept)
    assert round_values(x, fmt, out=x, noise=noise) is x
    assert torch.equal(x, expected)


@settings(deadline=None, max_examples=200)
@given(x=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_encode_is_the_nearest_value(x):
    for fmt in FORMATS.values():
        value = decode(encode(torch.tensor([x], dtype=torch.float32), fmt), fmt=fmt).double()
        assert torch.equal(value, nearest(torch.tensor([x]), fmt))


def neighbours(x, fmt):
    """Greatest value of the format not above `x`, and least not below."""
    table = representable(fmt)
    table = torch.cat((-table.flip(0), table[1:]))
    x = torch.as_tensor(x, dtype=torch.float64)
    above = torch.searchsorted(table, x)
    return table[torch.searchsorted(table, x, right=True) - 1].item(), table[above].item()


@settings(deadline=None, max_examples=300)
@given(
    where=st.floats(-1, 1, width=32),
    exponent=st.integers(0, 24),
    unit=st.integers(-90, 60),
    grain=st.integers(0, 2**24),
)
def test_stochastic_rounding_takes_a_neighbour_and_the_upper_one_for_little_noise(where, exponent, unit, grain):
    noise = min(grain * 2.0**-24, ALMOST_ONE)
    for fmt in FORMATS.values():
        x = torch.tensor([where * 2.0**-exponent * fmt.max], dtype=torch.float32)
        below, above = neighbours(x.item(), fmt)
        rounded = round_values(x * 2.0**unit, fmt, 2.0**unit, noise=torch.full_like(x, noise)).item() / 2.0**unit
        assert rounded in (below, above)
        part = (x.item() - below) / (above - below) if above > below else 0.0
        if abs(part - noise) > 2.0**-24:  # the part of a tiny negative number is known no better
            assert rounded == (above if noise < part else below)


@each_format
def test_stochastic_rounding_keeps_the_mean(fmt):
    """The share that goes up, of 10**6 draws each, lies within 5 standard deviations of the distance.

    Normal and subnormal numbers, just below a power of two (where spacings change), and beside the largest.
    """
    generator = torch.Generator().manual_seed(0)
    smallest, draws = 2.0 ** (fmt.min_exponent - fmt.mantissa), 1_000_000
    for number in (1.03, -1.3, 1.99, -0.3 * smallest, 1.8 * smallest, 0.99 * fmt.max, -0.999 * fmt.max):
        x = torch.full((draws,), number)
        below, above = neighbours(x[0].item(), fmt)
        rounded = round_values(x, fmt, noise=torch.rand(draws, generator=generator)).double()
        part = (x[0].item() - below) / (above - below)
        deviation = math.sqrt(part * (1 - part) / draws)
        assert abs((rounded.mean().item() - below) / (above - below) - part) < 5 * deviation, number
        assert set(rounded.unique().tolist()) == {below, above}


@each_format
@pytest.mark.parametrize("noise", [0.0, 0.5, ALMOST_ONE])
@pytest.mark.parametrize("unit", [1.0, 2.0**-100, 2.0**60], ids=["1", "2^-100", "2^60"])
def test_stochastic_rounding_leaves_values_of_the_format(fmt, noise, unit):
    table = representable(fmt).float() * unit
    values = torch.cat((table, -table))
    rounded = round_values(values, fmt, unit, noise=torch.full_like(values, noise))
    assert torch.equal(bits(rounded), bits(values + 0.0))


@each_format
def test_stochastic_rounding_past_the_largest_is_for_a_clamp(fmt):
    x = torch.tensor([fmt.max]).nextafter(torch.tensor(math.inf)) * torch.tensor([1.0, -1.0, 1.01, -1.9])
    for noise in (torch.zeros(4), torch.full((4,), ALMOST_ONE)):
        rounded = round_values(x, fmt, noise=noise)
        assert (rounded.abs() >= fmt.max).all()
        assert (rounded.abs() <= 2 * fmt.max).all()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (64, 130), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_e5m6_packs_three_bytes_for_two(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = pack_e5m6(x)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3 * math.ceil(x.numel() / 2),)
    values = unpack_e5m6(packed, x.shape)
    assert values.shape == x.shape
    assert_same(values, decode(encode(x.float(), E5M6), fmt=E5M6))


def test_e5m6_packs_across_chunks_any_layout_and_every_code():
    x = random_fp32()[: 700 * 701].view(700, 701)
    for laid in (x, x.t(), x[1:, ::2]):
        assert_same(unpack_e5m6(pack_e5m6(laid), laid.shape), decode(encode(laid, E5M6), fmt=E5M6))
    values = decode(all_codes(E5M6), fmt=E5M6).nan_to_num(posinf=0.0, neginf=0.0)
    assert_same(unpack_e5m6(pack_e5m6(values), values.shape), values)
    with pytest.raises(AssertionError):
        unpack_e5m6(pack_e5m6(values), (4095 - 2,))


def test_e5m6_lies_in_planes_as_documented():
    packed = pack_e5m6(torch.tensor([1.0 + 1 / 64, -1.5, 1.0 + 2 / 64]))  # codes 0x3C1, 0xBE0, 0x3C2 and 0
    assert packed.tolist() == [0x3C, 0xBE, 0x3C, 0x00, 0x21, 0x00]


def test_e8m0_is_every_power_and_nan():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert expected[0].double() == 2.0**-127  # an FP32 subnormal
    assert_same(decode_e8m0(codes), expected)
    assert torch.equal(encode_e8m0(decode_e8m0(codes)), codes)
    assert encode_e8m0(torch.tensor([math.inf, -math.nan, 1.99, 2.0])).tolist() == [255, 255, 127, 128]
