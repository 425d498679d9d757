"""Kernels against the torch operators whose place they take: bit for bit where they round alike, else within bounds.

Without a GPU they are run by triton's interpreter and compiled for one on paper (`triton_interpreter`).
"""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from numerics.triton_interpreter import INTERPRETED, compiled_for, in_parent, matrix, mend, on, on_device

from greylag.numerics import quantize
from greylag.numerics.formats import E4M3, E5M2, E5M6, encode
from greylag.numerics.kernels import choose, kernels
from greylag.numerics.quantize import Quantized, over_tiles, tiled, untiled
from greylag.numerics.reference import round_trip
from greylag.numerics.scaling import scale_inv_from_amax
from greylag.numerics.swiglu import swiglu

pytest.importorskip("triton")
if INTERPRETED:
    mend()

ROOT = Path(__file__).parent.parent.parent
SHAPES = ((1, 128), (1, 1), (130, 257), (256, 128), (3, 64))

each_format = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
each_kind = pytest.mark.parametrize("kind", ["pow2", "fp32"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def same(a, b):
    """Equal bits, but for the payload of NaN."""
    a, b = (t.cpu().float().contiguous() for t in (a, b))
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan].view(torch.int32), b[~nan].view(torch.int32))


def padding(codes):
    """What lies between the end of the rows of codes (M, K) and their last block of 128."""
    whole = codes.as_strided((codes.shape[0], codes.stride(0)), codes.stride(), codes.storage_offset())
    return whole[:, codes.shape[1] :].view(torch.uint8)


def check(codes, scale_inv, x, fmt, tile, kind):
    """Scales and codes are those of `quantize` on a CPU, and of `encode` even in the sign of zeros."""
    q = quantize(x, fmt, tile, kind)
    assert q.scale_inv is not None
    assert torch.equal(scale_inv.cpu(), q.scale_inv)
    assert same(codes.float() + 0.0, q.encoded().float() + 0.0)
    direct = encode(tiled(x.float(), tile) * over_tiles(q.scale_inv.reciprocal()), fmt)
    assert same(codes, untiled(direct, q.shape))
    assert not padding(codes).any()


def check_both(out, x, fmt, kind):
    """Both directions of a quantization in 1x128 tiles."""
    check(out.codes, out.scale_inv, x, fmt, (1, 128), kind)
    check(out.turned, out.turned_scale_inv, x.t().contiguous(), fmt, (1, 128), kind)
    down = quantize(x, fmt, (128, 1), kind)
    assert torch.equal(out.turned_scale_inv.t().cpu(), down.scale_inv)
    assert same(out.turned.t().float() + 0.0, down.encoded().float() + 0.0)


# Quantize


@each_format
@each_kind
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@on_device
def test_1x128_is_quantize_both_ways(fmt, kind, dtype, shape):
    x = matrix(*shape).to(dtype)
    check_both(kernels("quantize").quantize_1x128(*on(x), fmt, kind), x, fmt, kind)


@each_format
@each_kind
@on_device
def test_1x128_is_the_reference(fmt, kind):
    x = matrix(5, 200)
    out = kernels("quantize").quantize_1x128(*on(x), fmt, kind, turned=False)
    assert out.turned is None
    values, scale_inv = round_trip(x, fmt, (1, 128), kind)
    assert torch.equal(out.scale_inv.cpu(), scale_inv)
    assert same(Quantized((5, 200), (1, 128), scale_inv, codes=out.codes.cpu(), fmt=fmt).dequantize(), values)


@each_format
@each_kind
@on_device
def test_scales_are_those_of_any_amax(fmt, kind):
    powers = torch.exp2(torch.arange(-149.0, 128.0)).float()
    edges = torch.cat([powers, powers[:-1] * (fmt.max / 2.0 ** int(fmt.max).bit_length()) * 2])
    bits = edges[edges > 0].view(torch.int32)
    random = torch.randint(1, 0x7F800000, (400,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    amax = torch.cat([bits - 1, bits, bits + 1, random]).clamp(0, 0x7F7FFFFF).view(torch.float32)
    # Where the inverse of scale_inv overflows, the torch operators give Inf times x.
    amax = amax[scale_inv_from_amax(amax, fmt, kind).reciprocal().isfinite()]
    out = kernels("quantize").quantize_1x128(*on(amax.unsqueeze(1)), fmt, kind, turned=False)
    assert torch.equal(out.scale_inv.cpu().view(-1), scale_inv_from_amax(amax, fmt, kind))
    check(out.codes, out.scale_inv, amax.unsqueeze(1), fmt, (1, 128), kind)


@each_format
@each_kind
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")], ids=str)
@on_device
def test_what_is_not_finite_is_counted_and_stays_in_its_tile(fmt, kind, bad):
    x = matrix(130, 257, spread=1.0)
    x[5, 140] = x[5, 141] = bad
    x[7, :128] = 0.0
    (nonfinite,) = on(torch.full((), 40, dtype=torch.int64))
    check_both(kernels("quantize").quantize_1x128(*on(x), fmt, kind, nonfinite=nonfinite), x, fmt, kind)
    assert nonfinite == 43  # one tile along the rows, two down the columns
    out = kernels("quantize").quantize_128x128(*on(x), fmt, kind, nonfinite=nonfinite)
    check(out.codes, out.scale_inv, x, fmt, (128, 128), kind)
    assert nonfinite == 44


@each_format
@each_kind
@on_device
def test_turned_codes_are_those_of_quantize(fmt, kind):
    x = matrix(130, 257)
    rows = quantize(x, fmt, (1, 128), kind)
    codes, scale_inv = kernels("quantize").turn_1x128(*on(rows.encoded(), rows.scale_inv), kind)
    check(codes, scale_inv, rows.dequantize().t().contiguous(), fmt, (1, 128), kind)
    again = quantize(rows.dequantize(), fmt, (128, 1), kind, turn=True)
    assert torch.equal(again.scale_inv, scale_inv.t().cpu())


@each_format
@each_kind
@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
@on_device
def test_128x128_is_quantize_and_its_transpose(fmt, kind, shape):
    x = matrix(*shape)
    out = kernels("quantize").quantize_128x128(*on(x), fmt, kind)
    check(out.codes, out.scale_inv, x, fmt, (128, 128), kind)
    check(out.turned, out.turned_scale_inv, x.t().contiguous(), fmt, (128, 128), kind)


@each_format
@each_kind
@pytest.mark.parametrize("fill", [1.0, 0.0, float("nan")], ids=str)
@on_device
def test_a_whole_tensor_is_quantize(fmt, kind, fill):
    x = matrix(130, 257) * fill
    out, amax = kernels("quantize").quantize_tensor(*on(x), fmt, kind)
    check(out.codes, out.scale_inv, x, fmt, (0, 0), kind)
    assert same(out.turned, out.codes.t())
    assert same(amax, x.abs().max())


@on_device
def test_a_delayed_scale_saturates_and_the_amax_is_seen():
    x, scale_inv = matrix(130, 257), torch.tensor(2.0**-6)
    out, amax = kernels("quantize").quantize_tensor(*on(x), E4M3, "pow2", *on(scale_inv))
    assert same(out.codes, encode(x * 64.0, E4M3))
    assert out.codes.float().abs().max() == E4M3.max
    assert amax == x.abs().max()


@on_device
def test_what_no_kernel_makes_is_refused():
    (x,) = on(matrix(1, 128))
    with pytest.raises(ValueError, match="mx-ceil"):
        kernels("quantize").quantize_1x128(x, E4M3, "mx-ceil")
    with pytest.raises(ValueError, match="e5m6"):
        kernels("quantize").quantize_1x128(x, E5M6, "pow2")


# SwiGLU and RMSNorm: the exponential and the order of a sum are the device's own


def steps(codes):
    """Codes as integers in the order of the numbers they stand for."""
    codes = codes.contiguous().cpu().view(torch.uint8).int()
    return torch.where(codes >= 128, 128 - codes, codes)


def check_close(codes, scale_inv, x, fmt, kind):
    """Scales within 2**-7 (a BF16 rounded the other way), codes at most one step off, and fewer than 1 in 1000 so."""
    q = quantize(x, fmt, (1, 128), kind)
    assert ((scale_inv.cpu() / q.scale_inv - 1).abs() <= 2.0**-7).all()
    off = (steps(codes) - steps(q.encoded())).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 1e-3


@each_dtype
@each_kind
@pytest.mark.parametrize("shape", [(1, 64), (130, 200)], ids=str)
@on_device
def test_swiglu_and_quantize(dtype, kind, shape):
    x = (2.0 * matrix(shape[0], 2 * shape[1], spread=0.5)).to(dtype)
    out = kernels("swiglu").swiglu_quantize(*on(x), E4M3, kind, turned=True)
    y = swiglu(x)
    check_close(out.codes, out.scale_inv, y, E4M3, kind)
    check_close(out.turned, out.turned_scale_inv, y.t().contiguous(), E4M3, kind)


@each_dtype
@on_device
def test_swiglu_meets_zero_and_what_is_not_finite(dtype):
    gate = torch.tensor([0.0, -0.0, 100.0, -100.0, float("inf"), -float("inf"), float("nan"), 1.0])
    x = torch.cat([gate, torch.tensor([1.0, 2.0, 1.0, 3.0, 1.0, 1.0, 1.0, float("inf")])]).to(dtype).unsqueeze(0)
    (nonfinite,) = on(torch.zeros((), dtype=torch.int64))
    out = kernels("swiglu").swiglu_quantize(*on(x), E4M3, "pow2", nonfinite=nonfinite)
    check(out.codes, out.scale_inv, swiglu(x), E4M3, (1, 128), "pow2")
    assert nonfinite == 1


@each_dtype
@on_device
def test_smoothing_is_exact(dtype):
    segments = [(0, 100), (128, 0), (128, 60)]
    x = matrix(200, 160, spread=0.5).to(dtype)
    amax_EF = kernels("swiglu").swiglu_amax(*on(x), segments)
    y = swiglu(x)
    expected = torch.stack([y[:100].abs().amax(0), torch.zeros(80), y[128:188].abs().amax(0)])
    assert torch.allclose(amax_EF.cpu(), expected.float(), rtol=2.0**-7)
    factors_EF = torch.exp2(torch.randint(-3, 4, (3, 80), generator=torch.Generator().manual_seed(0)).float())
    out = kernels("swiglu").swiglu_quantize(*on(x), E4M3, "pow2", *on(factors_EF), segments)
    factor_PF = factors_EF[torch.tensor([0] * 128 + [2] * 72)]
    check_close(out.codes, out.scale_inv, y.float() * factor_PF, E4M3, "pow2")
    one = kernels("swiglu").swiglu_quantize(*on(x), E4M3, "pow2", *on(factors_EF[:1]))
    check_close(one.codes, one.scale_inv, y.float() * factors_EF[0], E4M3, "pow2")


@each_dtype
@each_kind
@pytest.mark.parametrize("shape", [(1, 64), (130, 200), (3, 640)], ids=str)
@on_device
def test_rmsnorm_and_quantize(dtype, kind, shape):
    x, weight = matrix(*shape, spread=0.5).to(dtype), matrix(1, shape[1], seed=1)[0]
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    y = (exact * weight.double()).float().to(dtype)
    out, inverse_M = kernels("norm").rmsnorm_quantize(*on(x[:5], weight), 1e-5, E4M3, kind)
    check_close(out.codes, out.scale_inv, y[:5], E4M3, kind)
    assert not padding(out.codes).any()
    out, inverse_M = kernels("norm").rmsnorm_quantize(*on(x, weight), 1e-5, E4M3, kind, turned=True)
    assert torch.allclose(inverse_M.cpu().double(), (x.double().square().mean(-1) + 1e-5).rsqrt(), rtol=2e-6)
    check_close(out.codes, out.scale_inv, y, E4M3, kind)
    check_close(out.turned, out.turned_scale_inv, y.t().contiguous(), E4M3, kind)


@on_device
def test_rmsnorm_counts_what_is_not_finite():
    x, weight = matrix(3, 300), torch.ones(300)
    x[1, 200] = float("nan")  # a row has one mean, so that all of its three tiles are lost
    for turned, tiles in ((False, 3), (True, 3 + 300)):
        (nonfinite,) = on(torch.zeros((), dtype=torch.int64))
        out, _ = kernels("norm").rmsnorm_quantize(*on(x, weight), 1e-5, E4M3, "pow2", turned, nonfinite)
        assert nonfinite == tiles
        assert not padding(out.codes).any()


# Compiled for a GPU that is not there


@in_parent
@each_format
def test_hopper_converts_to_fp8_in_one_rounding(monkeypatch, fmt):
    x = torch.zeros(256, 512, dtype=torch.bfloat16)
    with compiled_for((9, 0), monkeypatch) as compiled:
        kernels("quantize").quantize_1x128(x, fmt, "fp32")
    ptx = compiled[0].asm["ptx"]
    assert f"cvt.rn.satfinite.{fmt.name}x2.f32" in ptx
    assert "div.rn.f32" in ptx
    assert "ftz" not in ptx  # what is subnormal in FP32 counts
    assert "fma" not in ptx


# Which runs where


@in_parent
def test_choose_names_what_runs():
    assert choose("cuda", (9, 0), "block gemm") == "triton block gemm"
    assert choose("cuda", (8, 9), "grouped gemm") == "triton grouped gemm"
    assert choose("cuda", (10, 0), "swiglu + quantize") == "triton swiglu + quantize"
    assert choose("cuda", (9, 0), "tensor gemm") == "torch scaled_mm"
    for device, capability in (("cpu", None), ("cuda", (8, 0)), ("musa", (3, 1))):
        assert choose(device, capability, "block gemm") == "FP32 mm of values"
        assert choose(device, capability, "quantize") == "torch quantize"
    with pytest.raises(ValueError, match="capability"):
        choose("cuda", None, "quantize")
    with pytest.raises(ValueError, match="block gemm"):
        choose("cpu", None, "attention")


@in_parent
def test_numerics_needs_no_triton():
    code = "import sys; import greylag.numerics.kernels; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# The benchmark: what of it needs no GPU


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu")


@in_parent
def test_without_a_gpu_the_benchmark_says_so(gpu, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 2
    assert capsys.readouterr().out == "no CUDA device: nothing was checked and nothing was timed\n"


@in_parent
def test_the_benchmark_reads_its_command_line_and_prints_its_tables(gpu, capsys):
    arguments = gpu.parse(["--tokens", "256", "--out", "x.json"])
    assert (arguments.tokens, arguments.out, arguments.minutes) == (256, Path("x.json"), 6.0)
    with pytest.raises(SystemExit):
        gpu.parse(["--tokens", "100"])
    assert "multiple of 128" in capsys.readouterr().err
    table = gpu.check_table([gpu.Check("good", 0.0, 0.0), gpu.Check("bad", float("nan"), 1.0)])
    assert [line.endswith("WRONG") for line in table.splitlines()] == [False, False, True]
    assert "2.000 x a copy" in str(gpu.Timing("quantize", 1e-6, "a copy", 2.0))
    segments, rows = gpu.crowd(1024)
    assert all(start % 128 == 0 for start, _ in segments)
    assert rows == segments[-1][0] + -(-segments[-1][1] // 128) * 128
