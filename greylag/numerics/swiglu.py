"""SwiGLU: silu(gate) * up, keeping only its input for backward; and Smooth-SwiGLU's factors.

The input may be kept in FP8, in 1x128 blocks. The projection behind it then keeps nothing, but computes its input
again from that cache (DeepSeek-V3, arXiv 2412.19437, section 3.3.3). Smooth-SwiGLU (arXiv 2409.12517) scales each
channel of the output to about 1 before it is quantized, so that outlier channels do not flush all others to zero;
the factors are powers of two, so that undoing them is exact. On a device with a kernel for it the projection's operand
is made straight from SwiGLU's input, and the output is never in memory.

Shape suffixes: P rows (tokens), F channels, E experts.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from greylag.numerics import device
from greylag.numerics.cache import Form, Kept, keep_blocks
from greylag.numerics.gemm import Segments
from greylag.numerics.kernels import kernels
from greylag.numerics.linear import scale_rows
from greylag.numerics.quantize import Quantized, in_tiles, plain
from greylag.numerics.quantizer import Quantizer


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Kept | None, is_read: bool) -> Tensor:
        ctx.save_for_backward(*(kept.tensors if kept else (x,)))
        ctx.restore = kept.restore if kept else None
        return _gated(x) if is_read else x.new_full((), math.nan).expand(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
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
        return dx, None, None


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu(x: Tensor, kept: Kept | None = None) -> Tensor:
    """`x` (..., 2F), gate and up side by side, to silu(gate) * up (..., F) (GLU variants, arXiv 2002.05202).

    `kept` is how `x` is kept for backward; itself, if None.
    """
    y: Tensor = _SwiGLU.apply(x, kept, True)
    return y


def gated(
    x_P2F: Tensor, segments: Segments, form: Form | None, smooth: bool, quantizer: Quantizer
) -> tuple[Tensor, Kept | None, Tensor | None, Quantized | None]:
    """SwiGLU before a projection: what `grouped_linear` takes as `x` (P, F), `kept`, `smooth_EK` and `ready`.

    `form` is how the input is kept; None keeps it as it is. `segments` are the rows of each expert. `quantizer` is
    the projection's, whose observer hears what is kept. Where a kernel makes the projection's operand straight from
    `x_P2F`, the first result has a shape but no memory.
    """
    cache = keep_blocks(x_P2F, form) if form else None
    if cache and quantizer.watcher:
        quantizer.watcher.kept("SwiGLU input", cache)
    if not _is_fused(x_P2F, form, quantizer):
        y_PF = swiglu(x_P2F, cache)
        factors_EF = smooth_factors(y_PF, segments) if smooth else None
        return y_PF, _recomputed(cache, factors_EF, segments) if cache else None, factors_EF, None
    y_PF = _SwiGLU.apply(x_P2F, cache, False)
    factors_EF = _factors(kernels("swiglu").swiglu_amax(x_P2F, segments)) if smooth else None
    ready, kept = _operand(x_P2F, factors_EF, segments, quantizer, form is None)
    return y_PF, _recomputed(cache, factors_EF, segments) if cache else kept, factors_EF, ready


def _is_fused(x_P2F: Tensor, form: Form | None, quantizer: Quantizer) -> bool:
    """Whether a kernel makes the projection's operand, and nobody else reads what it is made of."""
    how = quantizer.tiles("forward", "input")
    alone = form is not None or how == quantizer.tiles("weight-gradient", "input")
    return how is not None and alone and device.by_kernel(x_P2F, "swiglu + quantize")


def _operand(
    x_P2F: Tensor, factors_EF: Tensor | None, segments: Segments, quantizer: Quantizer, is_kept: bool
) -> tuple[Quantized, Kept | None]:
    """The projection's forward operand, by the kernel, and if it `is_kept` what the weight gradient takes."""
    how = quantizer.tiles("forward", "input")
    assert how
    fmt, kind = how
    turned = is_kept and not quantizer.keeps_forward
    source_PF = x_P2F.new_empty(x_P2F.shape[0], x_P2F.shape[1] // 2) if quantizer.watcher else None
    swiglu_quantize = kernels("swiglu").swiglu_quantize
    out = swiglu_quantize(x_P2F, fmt, kind, factors_EF, segments, turned, quantizer.counter, source_PF)
    ready = quantizer.made("forward", "input", source_PF, in_tiles(out.rows, fmt))
    if turned:
        columns = quantizer.made("weight-gradient", "input", source_PF, in_tiles(out.columns, fmt).t())
        return ready, quantizer.keep_operand(columns)
    return ready, quantizer.keep_operand(ready) if is_kept else None


def _recomputed(cache: Kept, factors_EF: Tensor | None, segments: Segments) -> Kept:
    """SwiGLU's output, kept as its input is."""
    if factors_EF is None:
        return Kept(cache.tensors, lambda *t: plain(_gated(cache.restore(*t).dequantize())), "recomputed")

    def restore(factors_EF: Tensor, *tensors: Tensor) -> Quantized:
        return plain(scale_rows(_gated(cache.restore(*tensors).dequantize()), factors_EF, segments))

    return Kept((factors_EF, *cache.tensors), restore, "recomputed")


@torch.no_grad()
def smooth_factors(y_PF: Tensor, segments: Segments) -> Tensor:
    """Smooth-SwiGLU's factor of each channel for each segment of rows, (E, F) FP32.

    The largest power of two that brings the channel's largest magnitude to 1 or below (arXiv 2409.12517, equation 3,
    where it is the reciprocal itself); 1 where that is 0, infinite or NaN.
    """
    return _factors(torch.stack([_channel_amax(y_PF[start : start + count]) for start, count in segments]))


def _factors(amax_EF: Tensor) -> Tensor:
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
