"""GEMM: the product of two quantized matrices. The one place that knows devices.

On a CPU the product is dequantize + FP32 matmul (scaling partial sums every 128, as DeepGEMM does, differs by 4e-7
of the largest element). On CUDA torch's scaled_mm multiplies the codes, where the shapes and the hardware allow;
elsewhere the values are multiplied. Another accelerator is one more function in `matmul`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from greylag.numerics.quantize import Quantized
from greylag.spec.precision import BLOCK


def matmul(a_MK: Quantized, b_KN: Quantized, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """`a` (M, K) x `b` (K, N) with FP32 accumulation, as `dtype`; written to `out` (M, N) if given."""
    codes = a_MK.codes
    if codes is not None and codes.is_cuda and b_KN.codes is not None:
        if a_MK.scale_inv is None and b_KN.scale_inv is None:
            product = torch.mm(codes, b_KN.codes, out_dtype=dtype)
            return product if out is None else out.copy_(product)
        if refusal(a_MK, b_KN) is None:
            product = scaled_mm(a_MK, b_KN, dtype)
            return product if out is None else out.copy_(product)
    a, b = a_MK.dequantize(), b_KN.dequantize()
    if out is not None and out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    product = torch.mm(a, b).to(dtype)
    return product if out is None else out.copy_(product)


def refusal(a_MK: Quantized, b_KN: Quantized) -> str | None:
    """Why torch's scaled_mm cannot multiply these on their CUDA device; None if it can.

    The rules are cuBLAS's (cublasLt, "narrow precision"): FP8 needs compute capability 8.9, block scales 9.0;
    dims that are multiples of 16; at most one E5M2 operand.
    """
    assert a_MK.codes is not None
    blocks = a_MK.tile != (0, 0)
    reason = device_refusal(blocks, torch.cuda.get_device_capability(a_MK.codes.device))
    if reason:
        return reason
    multiple = BLOCK if blocks else 16
    if a_MK.shape[1] % multiple or b_KN.shape[1] % 16:
        return f"K {a_MK.shape[1]} must be a multiple of {multiple} and N {b_KN.shape[1]} of 16"
    if a_MK.fmt is b_KN.fmt and a_MK.fmt is not None and a_MK.fmt.name == "e5m2":
        return "both operands are E5M2"
    return None


def device_refusal(blocks: bool, capability: tuple[int, int]) -> str | None:
    """Why a CUDA device of a compute capability cannot multiply FP8 with per-tensor or block scales; None if it can."""
    if capability < (8, 9):
        return f"FP8 needs compute capability 8.9, this is {capability[0]}.{capability[1]}"
    if blocks and capability != (9, 0):
        return f"1x128 and 128x128 scales need compute capability 9.0, this is {capability[0]}.{capability[1]}"
    return None


def scaled_mm(a_MK: Quantized, b_KN: Quantized, dtype: torch.dtype) -> Tensor:
    """Torch's scaled_mm on the codes. Per-tensor scales run on CPU too; block scales are unproved on hardware."""
    a, b = a_MK.encoded().contiguous(), b_KN.encoded().t().contiguous().t()
    assert a_MK.scale_inv is not None
    assert b_KN.scale_inv is not None
    if a_MK.tile == (0, 0):
        kinds = (F.ScalingType.TensorWise, F.ScalingType.TensorWise)
        scales = (a_MK.scale_inv.reshape(1), b_KN.scale_inv.reshape(1))
    else:
        square = b_KN.tile == (BLOCK, BLOCK)
        kinds = (
            F.ScalingType.BlockWise1x128,
            F.ScalingType.BlockWise128x128 if square else F.ScalingType.BlockWise1x128,
        )
        scales = (
            a_MK.scale_inv.t().contiguous().t(),
            b_KN.scale_inv.t().contiguous().t() if square else b_KN.scale_inv.contiguous().t(),
        )
    return F.scaled_mm(a, b, scales[0], kinds[0], scales[1], kinds[1], output_dtype=dtype)
