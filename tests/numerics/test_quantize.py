"""Quantize against the reference, bit for bit, whatever the tile, the shape and the values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greylag.numerics import quantize
from greylag.numerics.formats import E4M3, E5M2, E5M6, FORMATS, decode
from greylag.numerics.quantize import Quantized
from greylag.numerics.reference import round_trip

TILES = ((0, 0), (1, 128), (128, 1), (128, 128))
SHAPES = ((1, 1), (1, 130), (130, 257), (128, 128), (3, 64))

each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
each_tile = pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t[0]}x{t[1]}")
each_kind = pytest.mark.parametrize("kind", ["pow2", "fp32"])


def matrix(shape, seed=0, spread=6.0):
    """Normal, with magnitudes spread over powers of two between rows and columns."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.randn(shape[0], 1, generator=generator), torch.randn(shape[1], generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(spread * (rows + columns))


def same(a, b):
    """Equal bits, but for the sign of zero and the payload of NaN."""
    a, b = (t.contiguous() + 0.0 for t in (a, b))
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan].view(torch.int32), b[~nan].view(torch.int32))


def check(x, fmt, tile, kind):
    """Values, scales and codes of `x` are those of the reference; returns the Quantized."""
    q = quantize(x, fmt, tile, kind)
    values, scale_inv = round_trip(x, fmt, tile, kind)
    assert q.shape == tuple(x.shape)
    assert torch.equal(q.scale_inv, scale_inv)
    assert same(q.dequantize(), values)
    if fmt is E5M6:  # wider than the codes that are made of values; `cache` packs it from the source
        return q
    codes = q.encoded()
    assert codes.dtype == (fmt.dtype or torch.uint8)
    assert same(Quantized(q.shape, tile, q.scale_inv, codes=codes, fmt=fmt).dequantize(), values)
    return q


@each_format
@each_tile
@each_kind
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_the_reference(fmt, tile, kind, shape):
    check(matrix(shape), fmt, tile, kind)


@each_format
@each_tile
@each_kind
def test_bf16_is_the_reference(fmt, tile, kind):
    check(matrix((130, 140)).bfloat16(), fmt, tile, kind)


@each_format
@each_tile
@each_kind
@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-41, 1e-38, 1e-34, 1e32, 3.4e38], ids=str)
def test_extreme_magnitudes_are_the_reference(fmt, tile, kind, largest):
    x = torch.rand(4, 130, generator=torch.Generator().manual_seed(0)) * largest
    x[:, ::2] *= -1
    q = check(x, fmt, tile, kind)
    assert largest > 3e38 or q.dequantize().isfinite().all()  # just below 2^128 the nearest may be 2^128


@each_format
@each_tile
@each_kind
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")], ids=str)
def test_what_is_not_finite_is_counted_and_stays_in_its_tile(fmt, tile, kind, bad):
    x = matrix((130, 257), spread=1.0)
    x[5, 140] = bad
    nonfinite = torch.zeros((), dtype=torch.int64)
    q = quantize(x, fmt, tile, kind, nonfinite=nonfinite)
    assert nonfinite == 1
    if fmt.has_nan or not x.isnan().any():  # values show a NaN that the format has no code for
        assert same(q.dequantize(), round_trip(x, fmt, tile, kind)[0])
    assert q.dequantize().isnan().sum() == x.isnan().sum()
    if tile != (0, 0):
        clean = quantize(torch.where(x.isfinite(), x, 0.0), fmt, tile, kind).dequantize()
        r, c = tile
        elsewhere = torch.ones_like(x, dtype=torch.bool)
        elsewhere[5 // r * r : 5 // r * r + r, 140 // c * c : 140 // c * c + c] = False
        assert same(q.dequantize()[elsewhere], clean[elsewhere])


def test_counts_add_up_and_finite_tiles_add_nothing():
    nonfinite = torch.zeros((), dtype=torch.int64)
    x = matrix((4, 256))
    quantize(x, E4M3, (1, 128), "pow2", nonfinite=nonfinite)
    assert nonfinite == 0
    x[0, 0], x[0, 1], x[3, 255] = float("nan"), float("inf"), float("inf")
    quantize(x, E4M3, (1, 128), "pow2", nonfinite=nonfinite)
    quantize(x, E4M3, (1, 128), "pow2", nonfinite=nonfinite)
    assert nonfinite == 4


@each_format
@each_tile
@each_kind
def test_values_and_codes_agree_whichever_was_made_first(fmt, tile, kind):
    q = quantize(matrix((130, 257)), fmt, tile, kind)
    r = quantize(matrix((130, 257)), fmt, tile, kind)
    values, codes = q.dequantize(), q.encoded()
    assert torch.equal(codes.view(torch.uint8), r.encoded().view(torch.uint8))
    assert same(values, r.dequantize())
    r.values = None
    assert same(values, r.dequantize())


@each_tile
@pytest.mark.parametrize("keep", ["values", "codes"])
def test_rows_and_transpose_are_views_of_the_whole(tile, keep):
    q = quantize(matrix((300, 257)), E4M3, tile, "pow2")
    whole = q.dequantize().clone()
    if keep == "codes":
        q.encoded()
        q.values = None
    part = q.rows(128, 150)
    assert part.shape == (150, 257)
    assert same(part.dequantize(), whole[128:278])
    assert same(part.t().dequantize(), whole[128:278].t())
    assert part.t().shape == (257, 150)
    assert torch.equal(part.t().encoded().view(torch.uint8), q.encoded()[128:278].t().view(torch.uint8))
    held = part.values if keep == "values" else part.codes
    source = q.values if keep == "values" else q.codes
    assert held.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


@each_format
@each_tile
@each_kind
@pytest.mark.parametrize("shape", [(0, 256), (0, 5)], ids=str)
def test_no_rows_give_no_rows(fmt, tile, kind, shape):
    q = quantize(torch.zeros(shape), fmt, tile, kind)
    assert q.dequantize().shape == shape
    assert q.encoded().shape == shape


@each_tile
def test_the_input_is_left_alone(tile):
    x = matrix((130, 257))
    kept = x.clone()
    for kind in ("pow2", "fp32"):
        q = quantize(x, E4M3, tile, kind)
        q.encoded()
        assert torch.equal(x, kept)


@each_tile
def test_layout_does_not_matter(tile):
    x = matrix((257, 130)).t()
    for kind in ("pow2", "fp32"):
        assert same(quantize(x, E5M2, tile, kind).dequantize(), quantize(x.contiguous(), E5M2, tile, kind).dequantize())


def test_turning_pow2_tiles_adds_no_rounding():
    """From 1x128 to 128x1 a value changes only where it falls below the smallest of its new tile."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    rows = quantize(x, E4M3, (1, 128), "pow2").dequantize()
    columns = quantize(rows, E4M3, (128, 1), "pow2")
    normal = columns.scale_inv.repeat_interleave(128, 0) * 2.0**E4M3.min_exponent
    kept = rows.abs() >= normal
    assert kept.float().mean() > 0.99
    assert torch.equal(columns.dequantize()[kept], rows[kept])


@each_format
@pytest.mark.parametrize("spread", [0.0, 6.0, 12.0])
def test_turn_is_quantize_of_what_was_quantized(fmt, spread):
    rows = quantize(matrix((300, 257), spread=spread), fmt, (1, 128), "pow2").dequantize()
    expected, scale_inv = round_trip(rows, fmt, (128, 1), "pow2")
    turned = quantize(rows.clone(), fmt, (128, 1), "pow2", turn=True)
    assert torch.equal(turned.scale_inv, scale_inv)
    assert same(turned.dequantize(), expected)


def test_saturation_does_not_hide_nan_in_codes():
    x = torch.tensor([[float("nan"), float("inf"), 1e9, -1.0]])
    for fmt in (E4M3, E5M2):
        values = decode(quantize(x, fmt, (1, 128), "pow2").encoded())
        assert values[0, 0].isnan()
        assert values[0, 1:].tolist() == [fmt.max, fmt.max, -1.0]


@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 140), st.integers(1, 140)),
    seed=st.integers(0, 1000),
    spread=st.floats(0, 12),
    fmt=st.sampled_from([E4M3, E5M2]),
    tile=st.sampled_from([(0, 0), (128, 128)]),
    kind=st.sampled_from(["pow2", "fp32"]),
)
def test_any_matrix_is_the_reference(shape, seed, spread, fmt, tile, kind):
    check(matrix(shape, seed, spread), fmt, tile, kind)
