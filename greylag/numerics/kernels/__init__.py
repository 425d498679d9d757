"""Kernels: what a GPU runs in the place of several torch operators, and the rule that says where each one runs.

Only `choose` is imported here. The other modules need triton, and `kernels` brings them when a device wants them.

from greylag.numerics.kernels import choose, kernels

choose("cuda", (9, 0), "block gemm")  # 'triton block gemm'
choose("cpu", None, "block gemm")  # 'FP32 mm of values'
out = kernels("quantize").quantize_1x128(x, E4M3, "pow2")  # on a GPU
y = kernels("gemm").block_scaled_gemm(*out.rows, *w.rows, torch.bfloat16)
"""

from greylag.numerics.kernels.choose import What, choose, kernels

__all__ = ["What", "choose", "kernels"]
