"""SwiGLU: silu(gate) * up, keeping only its input for backward; and Smooth-SwiGLU's factors.

The input may be kept in FP8, in 1x128 blocks. The projection behind it then keeps nothing, but computes its input
again from that cache (DeepSeek-V3, arXiv 2412.19437, section 3.3.3). Smooth-SwiGLU (arXiv 2409.12517) scales each
channel of the output to about 1 before it is quantized, so that outlier channels do not flush all others to zero;
the factors are powers of two, so that undoing them is exact.

Shape suffixes: P rows (tokens), F channels, E experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from greylag.numerics.cache import Form, Kept, keep_blocks
from greylag.numerics.gemm import Segments
from greylag.numerics.linear import scale_rows
from greylag.numerics.quantize import Quantized, plain
from greylag.numerics.quantizer import Quantizer


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Kept | None) -> Tensor:
        ctx.save_for_backward(*(kept.tensors if kept else (x,)))
        ctx.restore = kept.restore if kept else None
        return _gated(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        g = grads[0]
        x = ctx.restore(*ctx.saved_tensors).dequantize() if ctx.restore else ctx.saved_tensors[0]
        gate, up = x.view(*g.shape[:-1], 2 * g.shape[-1]).chunk(2, dim=-1)
        dx = g.new_empty(*g.shape[:-1], 2 * g.shape[-1])
        d_gate, d_up = dx.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        torch.mul(g, silu, out=d_up)
        # silu'(a) = sigmoid(a) + silu(a) (1 - sigmoid(a))
        slope = silu.sub_(silu * sigmoid).add_(sigmoid)
        torch.mul(slope.mul_(up), g, out=d_gate)
        return dx, None


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu(x: Tensor, kept: Kept | None = None) -> Tensor:
    """`x` (..., 2F), gate and up side by side, to silu(gate) * up (..., F) (GLU variants, arXiv 2002.05202).

    `kept` is how `x` is kept for backward; itself, if None.
    """
    y: Tensor = _SwiGLU.apply(x, kept)  # type: ignore[no-untyped-call]
    return y


def gated(
    x_P2F: Tensor, segments: Segments, form: Form | None, smooth: bool, quantizer: Quantizer
) -> tuple[Tensor, Kept | None, Tensor | None]:
    """SwiGLU before a projection: (output (P, F), what stands for it in the projection's cache, factors (E, F)).

    `form` is how the input is kept; None keeps it as it is. `segments` are the rows of each expert. `quantizer` is
    the projection's, whose observer hears what is kept.
    """
    if form is None:
        y_PF = swiglu(x_P2F)
        return y_PF, None, smooth_factors(y_PF, segments) if smooth else None
    kept = keep_blocks(x_P2F, form)
    if quantizer.watcher:
        quantizer.watcher.kept("SwiGLU input", kept)
    y_PF = swiglu(x_P2F, kept)
    if not smooth:
        return y_PF, Kept(kept.tensors, lambda *t: plain(_gated(kept.restore(*t).dequantize())), "recomputed"), None
    factors_EF = smooth_factors(y_PF, segments)

    def restore(factors_EF: Tensor, *tensors: Tensor) -> Quantized:
        return plain(scale_rows(_gated(kept.restore(*tensors).dequantize()), factors_EF, segments))

    return y_PF, Kept((factors_EF, *kept.tensors), restore, "recomputed"), factors_EF


@torch.no_grad()
def smooth_factors(y_PF: Tensor, segments: Segments) -> Tensor:
    """Smooth-SwiGLU's factor of each channel for each segment of rows, (E, F) FP32.

    The largest power of two that brings the channel's largest magnitude to 1 or below (arXiv 2409.12517, equation 3,
    where it is the reciprocal itself); 1 where that is 0, infinite or NaN.
    """
    amax_EF = torch.stack([_channel_amax(y_PF[start : start + count]) for start, count in segments])
    _, exponent = torch.frexp(amax_EF)
    is_power = amax_EF == torch.ldexp(torch.ones_like(amax_EF), exponent - 1)
    factor = torch.ldexp(torch.ones_like(amax_EF), torch.where(is_power, 1 - exponent, -exponent).clamp(-100, 100))
    return torch.where((amax_EF > 0) & amax_EF.isfinite(), factor, 1.0)


def _channel_amax(y_PF: Tensor) -> Tensor:
    y = y_PF.detach().float()
    return y.abs().amax(0) if y.shape[0] else y.new_zeros(y.shape[1])


def fold(w_gate_up: Tensor, w_down: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Fold smoothing factors into the weights, for those who quantize the same function without factors.

    `w_gate_up` (..., 2F, D) and `w_down` (..., D, F) become new weights: the up half of the first times `factors`
    (..., F), the second divided by them. Silu's half stays, since silu is not linear. The function is unchanged, and
    with powers of two every product of it bit for bit but for underflow.
    """
    gate, up = w_gate_up.chunk(2, dim=-2)
    return torch.cat((gate, up * factors.unsqueeze(-1)), dim=-2), w_down / factors.unsqueeze(-2)
