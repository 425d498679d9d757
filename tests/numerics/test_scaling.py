"""Scales against the published rules of TransformerEngine and DeepGEMM, written again in NumPy, and against torchao's
MX tensors; delayed scaling.
"""

import msgspec
import numpy as np
import pytest
import torch
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

from greylag.numerics import reference
from greylag.numerics.formats import E2M1, E2M3, E3M2, E4M3, E5M2, FORMATS, encode, encode_e8m0
from greylag.numerics.quantize import quantize
from greylag.numerics.scaling import DelayedScale, scale_inv_from_amax
from greylag.spec.load import load_preset

DELAYED = load_preset("precision", "fp8-tensor-delayed")
MX_MODES = {"mx-floor": ScaleCalculationMode.FLOOR, "mx-ceil": ScaleCalculationMode.RCEIL}
MX_ELEMENTS = {E4M3: E4M3.dtype, E5M2: E5M2.dtype, E3M2: "fp6_e3m2", E2M3: "fp6_e2m3"}

each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
each_tiled_kind = pytest.mark.parametrize("kind", ["pow2", "fp32"])
each_mx_kind = pytest.mark.parametrize("kind", MX_MODES)
each_kind = pytest.mark.parametrize("kind", ["pow2", "fp32", *MX_MODES])


def te_scale(amax, fmax, pow2):
    """compute_scale_from_amax of TransformerEngine, common/recipe/recipe_common.cuh, epsilon 0."""
    with np.errstate(all="ignore"):
        scale = np.float32(fmax) / amax
    scale = np.where(np.isinf(scale), np.float32(3.3895313892515355e38), scale)
    scale = np.where((amax == 0) | ~np.isfinite(amax), np.float32(1), scale)
    if pow2:
        scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return scale


def te_e8m0(amax, fmax):
    """float_to_e8m0 of TransformerEngine, common/util/ptx.cuh, of amax times the reciprocal of the largest element."""
    bits = (amax * np.float32(1 / fmax)).view(np.uint32)
    exponent, mantissa = (bits >> 23).astype(np.int32), bits & np.uint32(0x7FFFFF)
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    return (exponent + up).astype(np.uint8)


def ceil_pow2(x):
    """ceil_to_ue8m0 of DeepGEMM, deep_gemm/utils/math.py: normal positive numbers."""
    return ((x.view(np.int32) + 0x7FFFFF) & -0x800000).view(np.float32)


def many_amax(fmax):
    """Log-uniform over FP32, subnormals among them, all fmax * 2^k and 2^k, and their neighbours."""
    generator = np.random.default_rng(0)
    spread = np.exp2(generator.uniform(-149, 127.9, 100_000)).astype(np.float32)
    edges = np.concatenate([fmax * np.exp2(np.arange(-130, 112)), np.exp2(np.arange(-149, 128))]).astype(np.float32)
    return np.concatenate([spread, edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))])


def specials():
    return np.float32([0.0, 1e-45, 1e-39, 1.1754944e-38, 1e-36, 1e-34, 3.4028235e38, np.inf, np.nan])


def bits(x):
    x = np.asarray(x, np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)


@each_format
@each_tiled_kind
def test_scale_inv_is_the_reciprocal_of_transformer_engines_scale(fmt, kind):
    amax = np.concatenate([many_amax(fmt.max), specials()])
    expected = np.float32(1) / te_scale(amax, fmt.max, kind == "pow2")
    np.testing.assert_array_equal(bits(scale_inv_from_amax(torch.from_numpy(amax), fmt, kind).numpy()), bits(expected))


def test_pow2_scale_inv_is_deep_gemms():
    amax = many_amax(448.0)
    amax = amax[amax >= 448 * np.float32(2.0**-126)]  # below, amax / 448 is not normal; DeepGEMM itself stops at 1e-4
    expected = ceil_pow2(amax / np.float32(448))
    np.testing.assert_array_equal(
        bits(scale_inv_from_amax(torch.from_numpy(amax), E4M3, "pow2").numpy()), bits(expected)
    )


@each_format
def test_mx_ceil_is_transformer_engines(fmt):
    """All but Inf, of which TransformerEngine makes the largest scale and we NaN."""
    amax = np.concatenate([many_amax(fmt.max), specials()])
    amax = amax[~np.isinf(amax)]
    codes = encode_e8m0(scale_inv_from_amax(torch.from_numpy(amax), fmt, "mx-ceil")).numpy()
    expected = np.where(np.isnan(amax), 0xFF, te_e8m0(amax, fmt.max))
    np.testing.assert_array_equal(codes, expected)


@each_format
def test_mx_floor_is_the_exponent_less_that_of_the_largest_element(fmt):
    largest = {"e4m3": 8, "e5m2": 15, "e5m6": 15, "e3m2": 4, "e2m3": 2, "e2m2": 2, "e2m1": 2}[fmt.name]
    amax = many_amax(fmt.max)
    exponent = np.frexp(amax)[1] - 1
    codes = encode_e8m0(scale_inv_from_amax(torch.from_numpy(amax), fmt, "mx-floor")).numpy()
    np.testing.assert_array_equal(codes, np.where(amax == 0, 0, np.clip(exponent - largest, -127, 127) + 127))


@each_format
@each_kind
def test_scale_inv_is_the_references(fmt, kind):
    amax = np.concatenate([many_amax(fmt.max)[::100], many_amax(fmt.max)[100_000:], specials()])
    expected = [reference.scale_inv(a, fmt, kind) for a in amax.tolist()]
    ours = scale_inv_from_amax(torch.from_numpy(amax), fmt, kind)
    np.testing.assert_array_equal(bits(ours.numpy()), bits(np.float32(expected)))


@each_format
@each_tiled_kind
def test_scale_is_1_for_what_has_no_scale(fmt, kind):
    amax = torch.tensor([0.0, float("inf"), float("nan")])
    assert scale_inv_from_amax(amax, fmt, kind).tolist() == [1.0, 1.0, 1.0]


@each_format
@each_mx_kind
def test_mx_scale_is_the_least_for_zero_and_nan_for_what_is_not_finite(fmt, kind):
    amax = torch.tensor([0.0, float("inf"), float("nan"), -float("nan")])
    assert encode_e8m0(scale_inv_from_amax(amax, fmt, kind)).tolist() == [0, 0xFF, 0xFF, 0xFF]


@each_format
@pytest.mark.parametrize("kind", ["pow2", "mx-ceil"])
def test_a_scale_rounded_up_fits_the_largest_and_wastes_less_than_one_power(fmt, kind):
    amax = torch.from_numpy(many_amax(fmt.max)).double()
    scaled = amax / scale_inv_from_amax(amax.float(), fmt, kind).double()
    ulp = 2.0**-22 if kind == "mx-ceil" else 0.0  # two roundings of FP32
    assert (scaled <= fmt.max * (1 + ulp)).all()
    tiny = fmt.max * 2.0**-126  # there the scale stops
    assert (scaled[amax > tiny] > fmt.max / 2 * (1 - ulp)).all()


@each_format
@each_mx_kind
def test_margin_is_powers_of_two(fmt, kind):
    amax = torch.from_numpy(many_amax(fmt.max))
    amax = amax[(amax > 1e-20) & (amax < 1e20)]
    moved = scale_inv_from_amax(amax, fmt, kind, margin=3)
    assert torch.equal(moved, 8 * scale_inv_from_amax(amax, fmt, kind))


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="mx-round"):
        scale_inv_from_amax(torch.ones(1), E4M3, "mx-round")


def mx_blocks():
    """4096 blocks of 32: magnitudes over all of FP32, among them zero, subnormal and the largest."""
    generator = torch.Generator().manual_seed(0)
    power = torch.randint(-150, 127, (4096, 1), generator=generator).double()
    x = torch.randn(4096, 32, generator=generator).double() * torch.exp2(power)
    x[0], x[1], x[2], x[3] = 0.0, 1e-45, torch.finfo(torch.float32).max, -0.0
    x[4:600] = torch.randn(596, 32, generator=generator)
    largest = torch.finfo(torch.float32).max
    return x.clamp(-largest, largest).float()


@pytest.mark.parametrize("fmt", MX_ELEMENTS, ids=lambda f: f.name)
@each_mx_kind
def test_mx_is_torchaos(fmt, kind):
    """Exponents everywhere; elements but where the exponent is -127.

    There torchao divides by something else than the scale that it returns: by 2**-126, or by 1.
    """
    x = mx_blocks()
    scale_inv = scale_inv_from_amax(x.abs().amax(1, keepdim=True), fmt, kind)
    exponents, elements = to_mx(x, MX_ELEMENTS[fmt], 32, MX_MODES[kind])
    assert torch.equal(encode_e8m0(scale_inv), exponents.view(torch.uint8))
    codes = encode(x * scale_inv.reciprocal(), fmt).view(torch.uint8)
    usual = (scale_inv > 2.0**-127).squeeze(1)
    assert 200 < (~usual).sum() < 600
    assert torch.equal(codes[usual], elements.view(torch.uint8)[usual])
    expected = reference.nearest(x[~usual].double() * 2.0**127, fmt).float()
    assert torch.equal(encode(expected, fmt).view(torch.uint8), codes[~usual])


@each_mx_kind
def test_mx_exponents_of_e2m1_are_torchaos(kind):
    x = mx_blocks()
    scale_inv = scale_inv_from_amax(x.abs().amax(1, keepdim=True), E2M1, kind)
    exponents, pairs = to_mx(x, torch.float4_e2m1fn_x2, 32, MX_MODES[kind])
    assert torch.equal(encode_e8m0(scale_inv), exponents.view(torch.uint8))
    codes = encode(x * scale_inv.reciprocal(), E2M1)
    usual = (scale_inv > 2.0**-127).squeeze(1)
    assert torch.equal((codes[:, ::2] | codes[:, 1::2] << 4)[usual], pairs.view(torch.uint8)[usual])


def delayed(**changes):
    return DelayedScale(E4M3, msgspec.structs.replace(DELAYED, **{"amax_history": 4, **changes}))


def step(scale, *amaxes):
    """One training step that sees tensors of these amax; returns the `scale_inv` used for each."""
    used = [scale.observe(torch.tensor([[amax]])).item() for amax in amaxes]
    scale.roll()
    return used


def fp32_inv(amax, margin=0):
    return reference.scale_inv(amax * 2.0**margin, E4M3, "fp32")


def test_a_cold_start_takes_the_tensor_at_hand():
    scale = delayed()
    assert step(scale, 3.0, 5.0) == [fp32_inv(3.0), fp32_inv(5.0)]
    assert step(scale, 100.0) == [fp32_inv(5.0)]
    assert step(scale, 1.0) == [fp32_inv(100.0)]


def test_max_looks_back_over_the_history_and_no_further():
    scale = delayed(amax_history=3)
    step(scale, 9.0)
    used = [step(scale, 1.0)[0] for _ in range(4)]
    assert used == [fp32_inv(9.0)] * 3 + [fp32_inv(1.0)]


def test_most_recent_forgets_at_once():
    scale = delayed(amax_choice="most_recent")
    step(scale, 9.0)
    step(scale, 1.0)
    assert step(scale, 4.0) == [fp32_inv(1.0)]


def test_a_history_of_one_is_the_last_step():
    scale = delayed(amax_history=1)
    step(scale, 9.0)
    step(scale, 1.0)
    assert step(scale, 4.0) == [fp32_inv(1.0)]


def test_margin_leaves_headroom():
    scale = delayed(margin=2)
    step(scale, 7.0)
    assert step(scale, 7.0) == [fp32_inv(7.0, margin=2)]


def test_pow2_delayed_scales_are_powers_of_two():
    scale = delayed(scale="pow2")
    step(scale, 7.0)
    assert step(scale, 7.0) == [reference.scale_inv(7.0, E4M3, "pow2")]


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_an_amax_without_meaning_keeps_the_scale_and_leaves_no_trace(bad):
    scale = delayed(amax_choice="most_recent")
    step(scale, 7.0)
    step(scale, bad)
    assert step(scale, 7.0) == [fp32_inv(7.0)]
    assert scale.history.isfinite().all()


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_after_a_bad_first_step_the_start_is_still_cold(bad):
    scale = delayed()
    step(scale, bad)
    assert step(scale, 5.0) == [fp32_inv(5.0)]


def test_observing_twice_changes_nothing():
    once, twice = delayed(), delayed()
    for amax in (3.0, 8.0, 2.0):
        assert step(once, amax)[0] == step(twice, amax, amax)[1]
    assert torch.equal(once.history, twice.history)
    assert torch.equal(once.scale_inv, twice.scale_inv)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_state_dict_brings_back_every_bit(fmt):
    generator = torch.Generator().manual_seed(0)
    first = DelayedScale(fmt, msgspec.structs.replace(DELAYED, amax_history=4))
    tensors = [torch.randn(64, 96, generator=generator) * 10**i for i in range(5)]
    for x in tensors[:3]:
        quantize(x, fmt, (0, 0), "fp32", first)
        first.roll()
    second = DelayedScale(fmt, msgspec.structs.replace(DELAYED, amax_history=4))
    second.load_state_dict({k: v.clone() for k, v in first.state_dict().items()})
    for x in tensors[3:]:
        a, b = (quantize(x, fmt, (0, 0), "fp32", scale) for scale in (first, second))
        assert torch.equal(a.dequantize(), b.dequantize())
        assert torch.equal(a.encoded().view(torch.uint8), b.encoded().view(torch.uint8))
        first.roll()
        second.roll()


def test_delayed_values_past_the_range_saturate():
    scale = delayed()
    step(scale, 1.0)
    q = quantize(torch.tensor([[10.0, -10.0, 0.5]]), E4M3, (0, 0), "fp32", scale)
    assert torch.allclose(q.dequantize(), torch.tensor([[1.0, -1.0, 0.5]]), rtol=1e-6)
    assert torch.equal(q.encoded().float(), torch.tensor([[448.0, -448.0, 224.0]]))
