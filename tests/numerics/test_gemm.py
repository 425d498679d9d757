"""GEMM: torch's scaled_mm on the codes, where a CPU has it, against the product of the values."""

import pytest
import torch

from greylag.numerics import quantize
from greylag.numerics.formats import E4M3, E5M2
from greylag.numerics.gemm import matmul, scaled_mm


def matrix(rows, columns, seed):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["pow2", "fp32"])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=["e4m3xe4m3", "e5m2xe4m3"])
@pytest.mark.parametrize("shape", [(64, 256, 48), (16, 16, 16), (33, 100, 7)], ids=str)
def test_scaled_mm_is_the_product_of_the_values(shape, formats, kind):
    M, K, N = shape
    a = quantize(matrix(M, K, 0), formats[0], (0, 0), kind)
    b = quantize(matrix(N, K, 1), formats[1], (0, 0), kind).t()
    exact = a.dequantize().double() @ b.dequantize().double()
    ours, product = scaled_mm(a, b, torch.float32), matmul(a, b, torch.empty(M, N))
    for result in (ours, product):
        assert (result - exact).abs().max() <= 1e-6 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tile", [(0, 0), (1, 128)], ids=["tensor", "1x128"])
def test_matmul_writes_where_it_is_told(tile, dtype):
    a = quantize(matrix(32, 256, 0), E4M3, tile, "pow2")
    b = quantize(matrix(48, 256, 1), E4M3, (128, 128) if tile[0] else tile, "pow2").t()
    out = torch.empty(32, 48, dtype=dtype)
    assert matmul(a, b, out) is out
    assert torch.equal(out, torch.mm(a.dequantize(), b.dequantize()).to(dtype))
