"""The order of summation: ours against DeepGEMM's, and what a Hopper tensor core loses without promotion.

`mmaemu` models the FP8 tensor core of an H100 to the bit (validated by its author on the card): what it keeps of a
partial sum is some 14 bits, so that long sums of one sign drift. The three GEMMs here add in FP32, as a kernel that
promotes every 128 products does.
"""

import mmaemu
import pytest
import torch

from greylag.numerics import quantize
from greylag.numerics.formats import E4M3, encode
from greylag.numerics.reference import promoted

K = 2048


def normal(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["pow2", "fp32"])
@pytest.mark.parametrize("tile", [(128, 128), (1, 128)], ids=["weights", "gradients"])
def test_dequantized_product_is_the_promoted_sum(tile, kind):
    """Bound: FP32's rounding of two orders of K products, far below FP8's own 2**-4."""
    x, w = normal(64, K, 0) * torch.exp2(3 * normal(1, K, 2)), normal(256, K, 1)
    a, b = quantize(x, E4M3, (1, 128), kind), quantize(w, E4M3, tile, kind)
    ours = a.dequantize() @ b.dequantize().t()
    theirs = promoted(a.encoded(), a.scale_inv, b.encoded(), b.scale_inv)
    assert (ours - theirs).abs().max() < 1e-6 * theirs.abs().max()


def hopper(a, b, fast):
    return mmaemu.accumulate(a, b, use_fast_accum=fast, profile="hopper", splitk=1)


def error(ours, exact):
    return ((ours - exact).abs() / exact.abs()).max().item()


@pytest.fixture(scope="module")
def positive():
    """Codes of numbers of one sign, where the error of a long sum is plainest, and their exact product."""
    a, b = (encode(normal(rows, K, seed).abs() * 16, E4M3) for rows, seed in ((16, 0), (32, 1)))
    return a, b, a.double() @ b.double().t()


def test_fast_accumulation_on_hopper_loses_percents(positive):
    """DeepSeek-V3, section 3.3.2, says about 2% at K = 4096."""
    a, b, exact = positive
    assert 0.01 < error(hopper(a, b, True).double(), exact) < 0.06


def test_promotion_every_128_wins_it_back(positive):
    a, b, exact = positive
    parts = [hopper(x, y, True) for x, y in zip(a.split(128, 1), b.split(128, 1), strict=True)]
    promotion = error(torch.stack(parts).sum(0).double(), exact)
    assert promotion < 1.5e-3
    assert promotion < error(hopper(a, b, True).double(), exact) / 20


def test_ours_adds_in_fp32(positive):
    a, b, exact = positive
    ones = torch.ones(a.shape[0], K // 128), torch.ones(b.shape[0], K // 128)
    assert error(promoted(a, ones[0], b, ones[1]).double(), exact) < 1e-6
