"""Every measure of a tensor's numbers against one that is written out plainly."""

import math

import pytest
import torch

from greylag.numerics import health
from greylag.numerics.formats import FORMATS
from greylag.numerics.quantize import quantize, tile_of
from greylag.numerics.reference import round_trip

GENERATOR = torch.Generator().manual_seed(0)
WIDE = torch.randn(300, 200, generator=GENERATOR) * torch.logspace(-4, 2, 200)
WIDE[17] = 0
WIDE[:, 9] = 0


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize(
    ("tile", "kind"),
    [((0, 0), "fp32"), ((1, 0), "pow2"), ((1, 128), "pow2"), ((128, 1), "fp32"), ((1, 32), "mx-floor")],
)
def test_rounding_is_that_of_the_reference(fmt: str, tile: tuple[int, int], kind: str) -> None:
    values, _ = round_trip(WIDE, FORMATS[fmt], tile, kind)
    error, channels, flushed, _ = health.rounding(WIDE, FORMATS[fmt], tile, kind).tolist()
    difference, x = (values - WIDE).double(), WIDE.double()
    alive = [k for k in range(200) if x[:, k].any()]
    each = [float((difference[:, k].norm() / x[:, k].norm()) ** 2) for k in alive]
    assert error == pytest.approx(float(difference.norm() / x.norm()), rel=1e-6)
    assert channels == pytest.approx(math.sqrt(sum(each) / len(alive)), rel=1e-6)
    lost = int(((values == 0) & (WIDE != 0)).sum())
    assert flushed == pytest.approx(lost / int((WIDE != 0).sum()), abs=1e-12)


def test_own_rounding_is_that_of_the_candidate() -> None:
    for tile, kind in (((0, 0), "fp32"), ((1, 128), "pow2"), ((128, 128), "fp32")):
        q = quantize(WIDE, FORMATS["e4m3"], tile, kind)
        own = health.own_rounding(WIDE, q, [(0, 128), (128, 128), (256, 44)])
        assert own.tolist() == pytest.approx(health.rounding(WIDE, FORMATS["e4m3"], tile, kind).tolist(), rel=1e-9)


def test_saturated_numbers_are_counted_and_rounding_of_the_scale_is_not() -> None:
    x = torch.full((2, 64), 3.0)
    x[0, :4] = 10.0
    assert health.rounding(x, FORMATS["e4m3"], (0, 0), "fp32", torch.tensor([[5.0]]))[3] == 4 / 128
    for seed in range(50):
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed))
        for tile, kind in (((0, 0), "fp32"), ((1, 128), "fp32"), ((1, 128), "pow2"), ((1, 32), "mx-ceil")):
            assert health.rounding(x, FORMATS["e4m3"], tile, kind)[3] == 0


def test_one_large_channel_does_not_hide_the_small_ones() -> None:
    x = torch.randn(256, 256, generator=GENERATOR)
    x[:, 3] *= 1e6
    error, channels, flushed, _ = health.rounding(x, FORMATS["e4m3"], (0, 0), "fp32").tolist()
    assert error < 0.03
    assert channels > 0.9
    assert flushed > 0.9
    assert health.rounding(x, FORMATS["e4m3"], tile_of("row", False), "pow2", x.abs().amax(0)[None])[1] < 0.03


def test_outliers_are_held_against_the_median_of_what_is_alive() -> None:
    amax = torch.tensor([1.0, 2.0, 0.0, 0.5, 500.0, 40.0])
    count, channels, ratios = health.outliers(amax, 10.0, 2)
    assert (int(count), channels.tolist(), ratios.tolist()) == (2, [4, 5], [250.0, 20.0])
    assert health.outliers(torch.zeros(8), 10.0, 2)[0] == 0


def test_dynamic_range_in_octaves() -> None:
    x = torch.zeros(4, 1000)
    x[0] = 1.0
    x[1, :1] = 2.0**-30  # one in a thousand and one: below the share that counts
    x[2, 0] = 1024.0
    assert health.dynamic_range(x, x.abs().max()).item() == 10
    x[3] = 2.0**-6
    assert health.dynamic_range(x, x.abs().max()).item() == 16
    assert health.dynamic_range(torch.zeros(3, 3), torch.tensor(0.0)).item() == 0


def test_block_amax_leaves_blocks_of_zeros_out() -> None:
    x = torch.zeros(5, 256)
    x[0, 3], x[1, 200], x[2, 0] = 1.0, -4.0, 2.0
    assert health.block_amax(x, (0.0, 0.5, 1.0)).tolist() == [1.0, 2.0, 4.0]
    assert health.block_amax(torch.zeros(2, 128), (0.5,)).isnan().all()


def test_scale_exponents_are_counted() -> None:
    assert health.scale_exponents(torch.tensor([[0.25, 0.26, 0.49], [1.0, 1.5, 0.5]])) == {-2: 3, 0: 2, -1: 1}


def test_a_sample_is_whole_runs_of_rows() -> None:
    assert health.sample((100, 4096), 1000) == [(0, 100)]
    assert health.sample((1024, 64), 1 << 20) == [(0, 1024)]
    runs = health.sample((1024, 256), 1 << 16)
    assert runs == [(0, 128), (512, 128)]
    assert torch.equal(health.take(WIDE, [(0, 128), (128, 128)]), WIDE[:256])
    assert torch.equal(health.take(WIDE, [(128, 128)]), WIDE[128:256])
    assert health.sample((10**6, 7168), 1 << 15) == [(0, 128)]
