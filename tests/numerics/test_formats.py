"""Formats against ml_dtypes, bit for bit; ml_dtypes overflows where we saturate, so it is given clamped values."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greylag.numerics.formats import E4M3, E5M2, FORMATS, decode, encode, pack, round_values
from greylag.numerics.reference import nearest, representable

ORACLE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
SPECIALS = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 1.17549435e-38, 3.4028235e38)

each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def all_bf16():
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def random_fp32(number=2_000_000):
    """Magnitudes log-uniform over all of FP32 and, for half, near the range of FP8."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, number // 2, dtype=np.uint32)
    near = np.exp2(generator.uniform(-20, 17, number - number // 2)) * generator.choice([-1, 1], number - number // 2)
    return torch.from_numpy(np.concatenate([bits.view(np.float32), near.astype(np.float32), np.float32(SPECIALS)]))


def ties(fmt):
    """Midpoints of neighbours, where nearest is decided by the even code."""
    table = representable(fmt)
    middle = ((table[1:] + table[:-1]) / 2).float()
    return torch.cat((middle, -middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e9))))


def expected_codes(x, fmt):
    with np.errstate(invalid="ignore"):
        return x.clamp(-fmt.max, fmt.max).numpy().astype(ORACLE[fmt.name]).view(np.uint8)


def bits(x):
    return x.contiguous().view(torch.int32)


@each_format
@pytest.mark.parametrize("values", [all_bf16, random_fp32, None], ids=["all-bf16", "random-fp32", "ties"])
def test_encode_is_ml_dtypes(fmt, values):
    x = ties(fmt) if values is None else values()
    codes, expected = encode(x, fmt).view(torch.uint8).numpy(), expected_codes(x, fmt)
    nan = x.isnan().numpy()
    np.testing.assert_array_equal(codes[~nan], expected[~nan])
    assert decode(encode(x, fmt))[nan].isnan().all()


@each_format
def test_decode_is_ml_dtypes_for_every_code(fmt):
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.numpy().view(ORACLE[fmt.name]).astype(np.float32)
    values = decode(codes.view(fmt.dtype)).numpy()
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(values), nan)
    np.testing.assert_array_equal(values.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


@each_format
def test_decode_takes_any_layout(fmt):
    codes = torch.arange(128, dtype=torch.uint8).view(8, 16).view(fmt.dtype)
    assert torch.equal(decode(codes.t()).nan_to_num(7.0), decode(codes).t().nan_to_num(7.0))
    assert decode(codes[:0]).shape == (0, 16)


@each_format
def test_pack_returns_every_code(fmt):
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode(codes.view(fmt.dtype))
    finite = values.isfinite()
    for error in (0.0, 2.0**-22, -(2.0**-22)):
        packed = pack(values[finite] * 2.0**-20, fmt, 2.0**20 * (1 + error))
        assert torch.equal(packed.view(torch.uint8), codes[finite])


@each_format
def test_table_of_the_reference_is_in_order_of_codes(fmt):
    table = representable(fmt).float()
    assert torch.equal(decode(torch.arange(len(table), dtype=torch.uint8).view(fmt.dtype)), table)
    assert table[-1] == fmt.max


@each_format
def test_nearest_of_the_reference_is_ml_dtypes(fmt):
    x = torch.cat((all_bf16(), ties(fmt)))
    expected = torch.from_numpy(expected_codes(x, fmt).view(ORACLE[fmt.name]).astype(np.float32))
    values, known = nearest(x, fmt).float(), ~x.isnan()
    assert torch.equal(bits(values[known]), bits(expected[known]))
    assert values[~known].isnan().all()


@each_format
@pytest.mark.parametrize("unit", [1.0, 2.0**-30, 2.0**60, 2.0**-112], ids=lambda u: f"2^{int(np.log2(u))}")
def test_round_values_is_decode_of_encode(fmt, unit):
    """Bits are equal but for the sign of zero: the adder makes +0 of all that rounds to zero."""
    x = torch.cat((all_bf16(), random_fp32(200_000), ties(fmt)))
    x = x[x.abs() <= fmt.max]
    x, unscaled = x * unit, (x * unit) / unit
    expected = decode(encode(unscaled, fmt)) * unit
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
def test_round_values_writes_where_it_is_told(fmt):
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    expected = round_values(x, fmt)
    kept = x.clone()
    assert torch.equal(round_values(x, fmt, scratch=torch.full_like(x, 3.0)), expected)
    assert torch.equal(x, kept)
    assert round_values(x, fmt, out=x) is x
    assert torch.equal(x, expected)


@settings(deadline=None, max_examples=200)
@given(x=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_encode_is_the_nearest_value(x):
    for fmt in (E4M3, E5M2):
        value = decode(encode(torch.tensor([x], dtype=torch.float32), fmt)).double()
        assert torch.equal(value, nearest(torch.tensor([x]), fmt))
