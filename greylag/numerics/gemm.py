"""GEMM: the product of two quantized matrices, of one weight or of each expert's. The one place that knows devices.

On a CPU the product is dequantize + FP32 matmul (scaling partial sums every 128, as DeepGEMM does, differs by 4e-7
of the largest element). On CUDA the codes are multiplied: of 1x128 and 128x128 tiles by `kernels`, of whole tensors by
torch's scaled_mm, where shapes and hardware allow it; elsewhere the values are. `kernel` says which one it is, and is
what `matmul` obeys.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from greylag.numerics import device
from greylag.numerics.kernels import kernels
from greylag.numerics.quantize import Quantized
from greylag.spec.precision import BLOCK

Segments = list[tuple[int, int]]
"""(first row, number of rows) for each weight; first rows are multiples of 128."""


def matmul(a_MK: Quantized, b_KN: Quantized, out: Tensor) -> Tensor:
    """`a` (M, K) x `b` (K, N) with FP32 accumulation, written to `out` (M, N) in its dtype."""
    name, a, b = kernel(a_MK, b_KN), a_MK.codes, b_KN.codes
    if name == "FP32 mm of values":
        values = a_MK.dequantize(), b_KN.dequantize()
        return torch.mm(*values, out=out) if out.dtype == torch.float32 else out.copy_(torch.mm(*values))
    assert a is not None
    assert b is not None
    if name == "torch mm":
        return out.copy_(torch.mm(a, b, out_dtype=out.dtype))
    if name == "torch scaled_mm":
        return out.copy_(scaled_mm(a_MK, b_KN, out.dtype))
    operands = (_k_major(a), a_MK.scale_inv, _k_major(b.t()), b_KN.t().scale_inv)
    return out.copy_(kernels("gemm").block_scaled_gemm(*operands, out.dtype))


def matmul_segments(a_PK: Quantized, b_KN: list[Quantized], segments: Segments, out_PN: Tensor) -> None:
    """Rows of `a` in segments, each times its own `b`, written to `out`; zeros between the segments."""
    if grouped_kernel(a_PK, b_KN):
        codes, scales = (torch.stack([x.t() for x in part]) for part in zip(*(_halves(b) for b in b_KN), strict=True))
        out_PN.copy_(kernels("grouped").grouped_gemm(*_halves(a_PK), codes, scales, segments, out_PN.dtype))
        return
    for (start, count), b in zip(segments, b_KN, strict=True):
        if count:
            matmul(a_PK.rows(start, count), b, out_PN[start : start + count])
    clear_gaps(out_PN, segments)


def matmul_columns(a_PN: Quantized, b_PK: Quantized, segments: Segments, out_ENK: Tensor) -> None:
    """`a` transposed x `b` over the rows of each segment, written to `out`; zero for a segment without rows."""
    if len(segments) > 1 and kernel(a_PN.t(), b_PK) == "triton block gemm":
        (a, a_scale), (b, b_scale) = _halves(a_PN.t()), _halves(b_PK.t())
        module = kernels("grouped")
        out_ENK.copy_(module.grouped_weight_gradient(a, a_scale, b, b_scale, segments, out_ENK.dtype))
        return
    for (start, count), out_NK in zip(segments, out_ENK, strict=True):
        if count:
            matmul(a_PN.rows(start, count).t(), b_PK.rows(start, count), out_NK)
        else:
            out_NK.zero_()


def clear_gaps(x: Tensor, segments: Segments) -> None:
    """Zero the rows that belong to no segment, so that they add nothing to any tile."""
    ends = [start for start, _ in segments[1:]] + [x.shape[0]]
    for (start, count), end in zip(segments, ends, strict=True):
        if start + count < end:
            x[start + count : end].zero_()


def kernel(a_MK: Quantized, b_KN: Quantized) -> str:
    """Which kernel multiplies these two."""
    codes = a_MK.codes
    if codes is None or b_KN.codes is None:
        return "FP32 mm of values"
    if a_MK.scale_inv is None and b_KN.scale_inv is None:
        return "torch mm" if codes.is_cuda else "FP32 mm of values"
    if a_MK.tile == (1, BLOCK) and b_KN.t().tile in ((BLOCK, BLOCK), (1, BLOCK)):
        return device.implementation(codes, "block gemm")
    if codes.is_cuda and a_MK.tile == b_KN.tile == (0, 0) and refusal(a_MK, b_KN) is None:
        return device.implementation(codes, "tensor gemm")
    return "FP32 mm of values"


def grouped_kernel(a_PK: Quantized, b_KN: list[Quantized]) -> bool:
    """Whether one kernel multiplies the rows of all segments."""
    return len(b_KN) > 1 and b_KN[0].tile == (BLOCK, BLOCK) and kernel(a_PK, b_KN[0]) == "triton block gemm"


def _halves(x: Quantized) -> tuple[Tensor, Tensor]:
    assert x.codes is not None
    assert x.scale_inv is not None
    return _k_major(x.codes), x.scale_inv


def _k_major(codes: Tensor) -> Tensor:
    return codes if codes.stride(-1) == 1 else codes.contiguous()


def refusal(a_MK: Quantized, b_KN: Quantized) -> str | None:
    """Why torch's scaled_mm cannot multiply these, under one scale each, on their CUDA device; None if it can.

    The rules are cuBLAS's (cublasLt, "narrow precision"): FP8 needs compute capability 8.9; dims that are multiples of
    16; at most one E5M2 operand.
    """
    assert a_MK.codes is not None
    reason = device_refusal(torch.cuda.get_device_capability(a_MK.codes.device))
    if reason:
        return reason
    if a_MK.shape[1] % 16 or b_KN.shape[1] % 16:
        return f"K {a_MK.shape[1]} and N {b_KN.shape[1]} must be multiples of 16"
    if a_MK.fmt is b_KN.fmt and a_MK.fmt is not None and a_MK.fmt.name == "e5m2":
        return "both operands are E5M2"
    return None


def device_refusal(capability: tuple[int, int]) -> str | None:
    """Why a CUDA device of a compute capability cannot multiply FP8; None if it can."""
    if capability < (8, 9):
        return f"FP8 needs compute capability 8.9, this is {capability[0]}.{capability[1]}"
    return None


def scaled_mm(a_MK: Quantized, b_KN: Quantized, dtype: torch.dtype) -> Tensor:
    """Torch's scaled_mm on the codes of whole tensors, one scale each. It runs on CPU too."""
    a, b = a_MK.encoded().contiguous(), b_KN.encoded().t().contiguous().t()
    assert a_MK.scale_inv is not None
    assert b_KN.scale_inv is not None
    kind = F.ScalingType.TensorWise
    return F.scaled_mm(a, b, a_MK.scale_inv.reshape(1), kind, b_KN.scale_inv.reshape(1), kind, output_dtype=dtype)
