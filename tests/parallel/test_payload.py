"""What travels: bytes that say the same when they arrive, and that a layer quantizes as it would have the source."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greylag.numerics import Quantizer
from greylag.numerics.formats import E4M3
from greylag.numerics.quantize import quantize
from greylag.parallel.payload import pack, pack_marks, unpack, unpack_marks
from greylag.spec.load import load_preset
from greylag.spec.routing import mark_bytes, row_bytes

BLOCK128 = load_preset("precision", "fp8-block128")
ROWS, WIDTHS = (0, 1, 5, 300), (1, 128, 200, 256)


def rows(num_rows: int, width: int, seed: int = 0, spread: float = 4.0) -> torch.Tensor:
    """Numbers whose blocks, and whose numbers within a block, differ by many powers of two."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, width, generator=draw)
    x *= torch.exp2(spread * torch.randn(num_rows, 1, generator=draw))
    return x * torch.exp2(spread * torch.randn(num_rows, width, generator=draw))


@pytest.mark.parametrize("form", ["high", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_arrive_as_sent(form: str, dtype: torch.dtype) -> None:
    for num_rows in ROWS:
        for width in WIDTHS:
            x = rows(num_rows, width).to(dtype)
            packed = pack(x, form)
            how = msgspec.structs.replace(BLOCK128, dispatch=form, high="fp32" if dtype == torch.float32 else "bf16")
            assert packed.dtype == torch.uint8
            assert packed.shape == (num_rows, row_bytes(how, width))
            beside = torch.cat((packed, packed[:, :1]), dim=1)[:, :-1]  # a view whose rows do not touch
            came = unpack(beside, width, form, dtype)
            assert came.dtype == dtype
            expected = x if form == "high" else quantize(x, E4M3, (1, 128), "pow2").dequantize().to(dtype)
            assert torch.equal(came, expected)


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 10**6), spread=st.floats(0, 20), scale=st.sampled_from([1e-38, 1e-20, 1.0, 1e20, 1e30]))
def test_a_layer_of_1x128_powers_of_two_rounds_what_arrives_to_itself(seed: int, spread: float, scale: float) -> None:
    x = (rows(7, 200, seed, spread) * scale).clamp(-1e38, 1e38)
    came = unpack(pack(x, "e4m3"), 200, "e4m3", torch.float32)
    quantizer = Quantizer(BLOCK128)
    for gemm, role in (("forward", "input"), ("input-gradient", "grad")):
        at_home = quantizer.quantize(gemm, role, x).dequantize()
        assert torch.equal(quantizer.quantize(gemm, role, came).dequantize(), at_home)
        assert torch.equal(came, at_home)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_inf_and_nan_are_not_hidden(value: float) -> None:
    x = rows(5, 200)
    x[3, 150] = value
    came = unpack(pack(x, "e4m3"), 200, "e4m3", torch.float32)
    assert not came[3, 128:].isfinite().any()
    quantizer = Quantizer(BLOCK128)
    quantizer.quantize("forward", "input", came)
    assert quantizer.nonfinite > 0


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(3, 200)
    assert torch.equal(unpack(pack(zeros, "e4m3"), 200, "e4m3", torch.float32), zeros)


@given(num_rows=st.integers(0, 20), num_marks=st.integers(1, 40), seed=st.integers(0, 99))
def test_marks_arrive_as_set(num_rows: int, num_marks: int, seed: int) -> None:
    marks = torch.rand(num_rows, num_marks, generator=torch.Generator().manual_seed(seed)) < 0.3
    moe = msgspec.structs.replace(load_preset("model", "deepseek-v3-tiny").moe, num_experts=4 * num_marks)
    packed = pack_marks(marks)
    assert packed.dtype == torch.uint8
    assert packed.shape == (num_rows, mark_bytes(moe, 4))
    assert torch.equal(unpack_marks(packed, num_marks), marks)
