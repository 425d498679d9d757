"""Scales against the published rules of TransformerEngine and DeepGEMM, written again in NumPy; delayed scaling."""

import msgspec
import numpy as np
import pytest
import torch

from greylag.numerics import reference
from greylag.numerics.formats import E4M3, E5M2, FORMATS
from greylag.numerics.quantize import quantize
from greylag.numerics.scaling import DelayedScale, scale_inv_from_amax
from greylag.spec.load import load_preset

DELAYED = load_preset("precision", "fp8-tensor-delayed")

each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
each_kind = pytest.mark.parametrize("kind", ["pow2", "fp32"])


def te_scale(amax, fmax, pow2):
    """compute_scale_from_amax of TransformerEngine, common/recipe/recipe_common.cuh, epsilon 0."""
    with np.errstate(all="ignore"):
        scale = np.float32(fmax) / amax
    scale = np.where(np.isinf(scale), np.float32(3.3895313892515355e38), scale)
    scale = np.where((amax == 0) | ~np.isfinite(amax), np.float32(1), scale)
    if pow2:
        scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return scale


def ceil_pow2(x):
    """ceil_to_ue8m0 of DeepGEMM, deep_gemm/utils/math.py: normal positive numbers."""
    return ((x.view(np.int32) + 0x7FFFFF) & -0x800000).view(np.float32)


def many_amax(fmax):
    """Log-uniform over FP32, all fmax * 2^k, and their neighbours."""
    generator = np.random.default_rng(0)
    spread = np.exp2(generator.uniform(-126, 127.9, 100_000)).astype(np.float32)
    edges = (fmax * np.exp2(np.arange(-130, 112))).astype(np.float32)
    return np.concatenate([spread, edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))])


def specials():
    return np.float32([0.0, 1e-45, 1e-39, 1.1754944e-38, 1e-36, 1e-34, 3.4028235e38, np.inf, np.nan])


def bits(x):
    return np.asarray(x).view(np.uint32)


@each_format
@each_kind
def test_scale_inv_is_the_reciprocal_of_transformer_engines_scale(fmt, kind):
    amax = np.concatenate([many_amax(fmt.max), specials()])
    expected = np.float32(1) / te_scale(amax, fmt.max, kind == "pow2")
    np.testing.assert_array_equal(bits(scale_inv_from_amax(torch.from_numpy(amax), fmt, kind).numpy()), bits(expected))


def test_pow2_scale_inv_is_deep_gemms():
    amax = many_amax(448.0)
    amax = amax[amax >= 448 * np.float32(2.0**-126)]  # below, amax / 448 is not normal
    expected = ceil_pow2(amax / np.float32(448))
    np.testing.assert_array_equal(
        bits(scale_inv_from_amax(torch.from_numpy(amax), E4M3, "pow2").numpy()), bits(expected)
    )


@each_format
@each_kind
def test_scale_inv_is_the_references(fmt, kind):
    amax = np.concatenate([many_amax(fmt.max)[::100], specials()])
    expected = [reference.scale_inv(a, fmt, kind) for a in amax.tolist()]
    ours = scale_inv_from_amax(torch.from_numpy(amax), fmt, kind)
    np.testing.assert_array_equal(bits(ours.numpy()), bits(np.float32(expected)))


@each_format
@each_kind
def test_scale_is_1_for_what_has_no_scale(fmt, kind):
    amax = torch.tensor([0.0, float("inf"), float("nan")])
    assert scale_inv_from_amax(amax, fmt, kind).tolist() == [1.0, 1.0, 1.0]


@each_format
def test_pow2_fits_the_largest_and_wastes_less_than_one_power(fmt):
    amax = torch.from_numpy(many_amax(fmt.max)).double()
    scaled = amax / scale_inv_from_amax(amax.float(), fmt, "pow2").double()
    assert (scaled <= fmt.max).all()
    tiny = fmt.max * 2.0**-127  # there the scale stops at 2^127
    assert (scaled[amax > tiny] > fmt.max / 2).all()


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
