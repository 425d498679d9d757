"""GEMM kernels against FP64 products of what their codes stand for, and how they sum.

Without a GPU they are run by triton's interpreter and compiled for one on paper (`triton_interpreter`).
"""

import re

import pytest
import torch
from numerics.triton_interpreter import DEVICE, INTERPRETED, compiled_for, in_parent, matrix, mend, on, on_device

from greylag.numerics import quantize
from greylag.numerics.formats import E4M3, E5M2, encode
from greylag.numerics.kernels import kernels

pytest.importorskip("triton")
if INTERPRETED:
    mend()


def values(codes, scale_inv, rows=1):
    """FP64 values of codes (M, K) with a scale for each `rows` rows and 128 columns."""
    scale = scale_inv.cpu().double().repeat_interleave(rows, 0)[: codes.shape[0]]
    return codes.cpu().float().double() * scale.repeat_interleave(128, 1)[:, : codes.shape[1]]


def check_product(out, a, b):
    """`out` is a b^T within what FP32 sums promise: K units in the last place of the sum of magnitudes.

    Hopper's tensor cores keep about 14 bits of the sum within a block (arXiv 2412.19437, section 3.5.2).
    """
    bound = 2.0**-10 if DEVICE == "cuda" else a.shape[1] * 2.0**-24
    if out.dtype == torch.bfloat16:
        bound += 2.0**-8
    error = (out.cpu().double() - a @ b.t()).abs()
    assert (error <= bound * (a.abs() @ b.abs().t())).all()


def encoded(x, fmt, kind, tile=(1, 128)):
    """Codes and scales of `x`, made by the torch operators, on the device of the kernels."""
    q = quantize(x, fmt, tile, kind)
    return on(q.encoded(), q.scale_inv)


@pytest.mark.parametrize(("kind", "dtype"), [("pow2", torch.bfloat16), ("fp32", torch.float32)], ids=["pow2", "fp32"])
@pytest.mark.parametrize("shape", [(1, 16, 64), (130, 257, 300), (64, 128, 256)], ids=str)
@on_device
def test_forward_and_input_gradient(shape, dtype, kind):
    M, N, K = shape
    gemm, square = kernels("gemm"), kernels("quantize").quantize_128x128
    w = matrix(N, K, seed=1)
    q = square(*on(w), E4M3, kind)
    a, a_scale = encoded(matrix(M, K), E4M3, kind)
    out = gemm.block_scaled_gemm(a, a_scale, *q.rows, dtype)
    check_product(out, values(a, a_scale), values(*q.rows, 128))
    g, g_scale = encoded(matrix(M, N, seed=2), E5M2, kind)
    out = gemm.block_scaled_gemm(g, g_scale, *q.columns, dtype)
    check_product(out, values(g, g_scale), values(*q.columns, 128))


@pytest.mark.parametrize("tokens", [1, 130, 256])
@pytest.mark.parametrize("shape", [None, (64, 64), (128, 128)], ids=str)
@on_device
def test_weight_gradient(tokens, shape):
    gemm, both = kernels("gemm"), kernels("quantize").quantize_1x128
    g, x = both(*on(matrix(tokens, 72)), E5M2, "pow2"), both(*on(matrix(tokens, 140, seed=1)), E4M3, "pow2")
    cut = shape and gemm.Shape(*shape)
    out = gemm.block_scaled_gemm(*g.columns, *x.columns, torch.float32, cut)
    check_product(out, values(*g.columns), values(*x.columns))


@on_device
def test_what_lies_behind_the_end_of_a_row_is_left_out():
    nan = torch.full((256, 512), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    a, b = nan.clone()[:, :200], nan.clone()[:130, :200]
    a_scale, b_scale = torch.ones(256, 2), torch.ones(130, 2)
    for codes in (a, b):
        codes.copy_(encode(matrix(*codes.shape), E4M3))
    out = kernels("gemm").block_scaled_gemm(*on(a, a_scale, b, b_scale), torch.float32)
    check_product(out, values(a, a_scale), values(b, b_scale))


@on_device
def test_operands_that_do_not_fit_are_refused():
    gemm = kernels("gemm").block_scaled_gemm
    a, scale = on(torch.zeros(256, 128, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(256, 1))
    with pytest.raises(ValueError, match="K-major"):
        gemm(a, scale, a.t(), torch.ones(1, 2), torch.float32)
    with pytest.raises(ValueError, match=r"\(256, 2\)"):
        gemm(a, torch.ones(256, 2), a, scale, torch.float32)


@on_device
def test_sums_are_promoted_every_128():
    """With sums kept to 14 bits, as on Hopper, the error stays that of one block, however long the sum."""
    a, a_scale = encoded(matrix(16, 4096).abs(), E4M3, "pow2")
    b, b_scale = encoded(matrix(16, 4096, seed=1).abs(), E4M3, "pow2")
    exact = values(a, a_scale) @ values(b, b_scale).t()
    with pytest.MonkeyPatch.context() as patch:
        dots = [] if DEVICE == "cuda" else coarse_dots(patch)
        out = kernels("gemm").block_scaled_gemm(a, a_scale, b, b_scale, torch.float32).cpu()
    assert ((out - exact) / exact).abs().max() < 2.0**-11
    if DEVICE == "cpu":
        assert dots == [(128, False)] * 32
        ones = torch.ones(1, 4096, dtype=torch.float64)
        assert (coarse_sum(ones, ones, 0.0) - 4096).abs() < 1  # exact as long as the sum fits
        chained = coarse_sum(values(a, a_scale), values(b, b_scale), 0.0)
        assert ((chained - exact) / exact).abs().max() > 2.0**-9  # what one sum over all would have cost


def coarse_sum(a, b, total):
    """`total` + a b^T, 32 of the contracted dimension at a time, each sum cut to 14 bits."""
    for start in range(0, a.shape[1], 32):
        total = total + a[:, start : start + 32] @ b[:, start : start + 32].t()
        fraction, exponent = torch.frexp(total)
        total = torch.ldexp((fraction * 2.0**14).trunc() * 2.0**-14, exponent)
    return total


def coarse_dots(patch):
    """Make the interpreter's dots `coarse_sum`; the list gets (length, whether the sum went on from another)."""
    from triton.runtime import interpreter

    dots = []

    def dot(self, a, b, d, *_):
        dots.append((a.data.shape[1], bool(d.data.any())))
        x, y = (torch.from_numpy(t.data).view(torch.float8_e4m3fn).double() for t in (a, b))
        total = coarse_sum(x, y.t(), torch.from_numpy(d.data).double())
        return interpreter.TensorHandle(total.float().numpy(), d.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    return dots


# Grouped GEMM

SEGMENTS = [(0, 100), (128, 0), (128, 1), (256, 200), (512, 0)]


def experts(P, N, K):
    """(x, g, w) of five experts; rows between segments are zero."""
    x, g = matrix(P, K), matrix(P, N, seed=1)
    inside = torch.zeros(P, 1, dtype=torch.bool)
    for start, count in SEGMENTS:
        inside[start : start + count] = True
    return x * inside, g * inside, torch.stack([matrix(N, K, seed=2 + e) for e in range(5)])


@pytest.mark.parametrize(("rows", "table"), [(512, False), (456, True)], ids=["list", "tensor"])
@on_device
def test_experts_forward_and_input_gradient(rows, table):
    N, K = 144, 200
    x, g, w = experts(rows, N, K)
    grouped, square = kernels("grouped").grouped_gemm, kernels("quantize").quantize_128x128
    segments = torch.tensor(SEGMENTS) if table else SEGMENTS
    q = [square(*on(w_NK), E4M3, "pow2") for w_NK in w]
    for source, codes, scales in (
        (x, torch.stack([e.codes for e in q]), torch.stack([e.scale_inv for e in q])),
        (g, torch.stack([e.turned for e in q]), torch.stack([e.turned_scale_inv for e in q])),
    ):
        a, a_scale = encoded(source, E4M3, "pow2")
        bytes_ = a.view(torch.uint8)
        bytes_[100:128] = 0x7F  # NaN between the segments reaches nothing
        out = grouped(a, a_scale, codes, scales, segments, torch.float32).cpu()
        for expert, (start, count) in enumerate(SEGMENTS):
            here = slice(start, start + count)
            b = values(codes[expert], scales[expert], 128)
            check_product(out[here], values(a[here], a_scale[here]), b)
            out[here] = 0.0
        assert not out.any()


@pytest.mark.parametrize("rows", [512, 456])
@on_device
def test_experts_weight_gradient(rows):
    x, g, _ = experts(rows, 72, 140)
    both = kernels("quantize").quantize_1x128
    gq, xq = both(*on(g), E4M3, "pow2"), both(*on(x), E4M3, "pow2")
    dw = kernels("grouped").grouped_weight_gradient(*gq.columns, *xq.columns, SEGMENTS, torch.float32)
    a, b = values(*gq.columns), values(*xq.columns)
    for dw_NK, (start, count) in zip(dw, SEGMENTS, strict=True):
        check_product(dw_NK, a[:, start : start + count], b[:, start : start + count])
        assert count or not dw_NK.any()


@on_device
def test_no_tokens_give_no_gradient():
    both = kernels("quantize").quantize_1x128
    g, x = both(*on(torch.zeros(0, 64)), E4M3, "pow2"), both(*on(torch.zeros(0, 128)), E4M3, "pow2")
    assert g.columns[0].shape == (64, 0)
    dw = kernels("grouped").grouped_weight_gradient(*g.columns, *x.columns, [(0, 0), (0, 0)], torch.float32)
    assert dw.shape == (2, 64, 128)
    assert not dw.any()


@on_device
def test_segments_start_at_tiles():
    table = kernels("grouped").segment_table
    for segments in ([(64, 10)], [(0, 200), (128, 5)]):
        with pytest.raises(ValueError, match="multiple of 128"):
            table(segments, torch.device("cpu"))


# Compiled for a GPU that is not there


def codes(*shape):
    """Zeros in E4M3 and their scales, one per 1x128."""
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(shape[1] // 128, shape[0]).t()


@in_parent
def test_hopper_multiplies_fp8_128_at_a_time(monkeypatch):
    """Four products of 32, the first of them from zero, then the sum leaves the tensor core."""
    gemm, grouped = kernels("gemm"), kernels("grouped")
    a, a_scale = codes(256, 512)
    with compiled_for((9, 0), monkeypatch) as compiled:
        gemm.block_scaled_gemm(a, a_scale, a, torch.ones(2, 4), torch.bfloat16)
        gemm.block_scaled_gemm(a, a_scale, a, a_scale, torch.float32)
        grouped.grouped_gemm(a, a_scale, a[None], torch.ones(1, 2, 4), [(0, 200)], torch.bfloat16)
        grouped.grouped_weight_gradient(a, a_scale, a, a_scale, [(0, 200)], torch.float32)
    assert len(compiled) == 4
    for kernel in compiled:
        ptx = kernel.asm["ptx"]
        goes_on = re.findall(r"wgmma\.mma_async\S*k32\.f32\.e4m3\.e4m3 \{.*?\}, \S+, \S+, (\S+), 1, 1;", ptx)
        assert goes_on
        assert all((flag == "0") == (place % 4 == 0) for place, flag in enumerate(goes_on))
        assert kernel.metadata.shared <= 227 * 1024


@in_parent
@pytest.mark.parametrize("capability", [(8, 9), (10, 0)], ids=["ada", "blackwell"])
def test_other_tensor_cores_multiply_fp8(monkeypatch, capability):
    gemm = kernels("gemm")
    a, a_scale = codes(256, 512)
    with compiled_for(capability, monkeypatch) as compiled:
        gemm.block_scaled_gemm(a, a_scale, a, torch.ones(2, 4), torch.bfloat16, gemm.Shape(stages=3))
    instruction = {8: "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", 10: "tcgen05.mma"}[capability[0]]
    assert instruction in compiled[0].asm["ptx"]
    assert compiled[0].metadata.shared <= 99 * 1024
