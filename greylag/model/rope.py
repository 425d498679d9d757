"""RoPE: rotary position embedding (arXiv 2104.09864), in FP32.

Pairs are (i, i + width/2), the layout of Llama's and Qwen's public weights; DeepSeek's interleaved layout is the
same function under a permutation of the projection's rows.
"""

import torch
from torch import Tensor


def angles(sequence: int, width: int, theta: float, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Cosine and sine (S, width) of position times frequency, each frequency twice."""
    frequency = theta ** -(torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
    angle = torch.outer(torch.arange(sequence, device=device, dtype=torch.float64), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().float(), angle.sin().float()


def rotate(x_BSHR: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Turn each pair of the last dim by the angle of its position."""
    first, second = x_BSHR.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    cos, sin = cos_SR[:, None, :], sin_SR[:, None, :]
    return (x_BSHR * cos + turned * sin).to(x_BSHR.dtype)
