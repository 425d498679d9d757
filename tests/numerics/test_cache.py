"""What is kept for backward comes back as it should, in the bytes it should, and nothing is kept twice."""

import pytest
import torch

from greylag.numerics import quantize, reference
from greylag.numerics.cache import keep, keep_blocks
from greylag.numerics.formats import E4M3, E5M6, FORMATS


def matrix(rows, columns, seed=0):
    """Normal, with magnitudes spread over columns."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.exp2(4 * torch.randn(columns, generator=generator))


def nbytes(kept):
    return sum(t.untyped_storage().nbytes() for t in kept.tensors)


@pytest.mark.parametrize("shape", [(64, 256), (5, 130), (1, 1), (3, 127), (0, 128)], ids=str)
@pytest.mark.parametrize("form", ["e4m3", "e5m6"])
def test_blocks_come_back_as_the_reference_rounds_them(form, shape):
    x = matrix(*shape)
    expected, _ = reference.round_trip(x, FORMATS[form], (1, 128), "pow2")
    assert torch.equal(keep_blocks(x, form).matrix(), expected)


def test_bytes_of_the_blocks():
    x = matrix(256, 512)
    assert nbytes(keep_blocks(x, "e4m3")) == x.numel() * (1 + 1 / 128)
    assert nbytes(keep_blocks(x, "e5m6")) == x.numel() * (1.5 + 1 / 128)


def test_e5m6_is_eight_times_finer_than_e4m3():
    x = matrix(256, 512)
    coarse, fine = (((keep_blocks(x, form).matrix() - x).norm() / x.norm()).item() for form in ("e4m3", "e5m6"))
    assert 7 < coarse / fine < 9


@pytest.mark.parametrize(("kind", "tile"), [("pow2", (1, 128)), ("fp32", (1, 128)), ("mx-ceil", (1, 32)),
                                            ("pow2", (0, 0)), ("fp32", (128, 1))])  # fmt: skip
def test_codes_and_scales_are_kept_exactly(kind, tile):
    x = matrix(96, 256)
    x[:, 128:160] = 0.0
    q = quantize(x, E4M3, tile, kind)
    kept = keep(q, kind)
    assert torch.equal(kept.matrix(), q.dequantize())
    assert kept.tensors[0].dtype == torch.float8_e4m3fn
    assert kept.tensors[1].dtype == (torch.float32 if kind == "fp32" else torch.uint8)


def test_extremes_of_e5m6():
    x = torch.tensor([[65024.0, 2.0**-20, -(2.0**-21), 0.0, -65504.0]])
    kept = keep_blocks(x, "e5m6")
    expected, _ = reference.round_trip(x, E5M6, (1, 128), "pow2")
    assert torch.equal(kept.matrix(), expected)
