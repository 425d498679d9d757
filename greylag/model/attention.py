"""Attention with grouped queries (arXiv 2305.13245).

Shape suffixes: B batch, S sequence, D hidden, H query heads, G key and value heads, K head width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from greylag.model.norm import RMSNorm
from greylag.model.rope import rotate
from greylag.numerics import Linear, Quantizer
from greylag.numerics.cache import Form, Kept, form_of, keep_blocks
from greylag.spec.model import Model
from greylag.spec.precision import Precision

LinearFactory = Callable[[str, int, int, bool], Linear]
"""(name inside its block, in features, out features, bias) to a linear layer at its precision."""
QuantizerFactory = Callable[[str], Quantizer]
"""The name of a layer inside its block to what quantizes its operands."""


class Attention(nn.Module):
    """Query, key and value from one projection; the core stays in high precision."""

    def __init__(self, model: Model, linear: LinearFactory, precision: Precision) -> None:
        super().__init__()
        self.model, self.form = model, form_of(precision.attention_output)
        H, G, K = model.num_heads, model.kv_heads, model.qk_head_dim
        self.wqkv = linear("attention.wqkv", model.hidden_size, (H + 2 * G) * K, model.bias or model.qkv_bias)
        if model.qk_norm:
            self.q_norm = RMSNorm(K, model.norm_eps)
            self.k_norm = RMSNorm(K, model.norm_eps)
        self.wo = linear("attention.wo", H * K, model.hidden_size, model.bias)

    def forward(self, x_BSD: Tensor, cos_SK: Tensor | None, sin_SK: Tensor | None) -> Tensor:
        """Causal self-attention; `cos` and `sin` are None where positions are learned."""
        B, S, _ = x_BSD.shape
        H, G, K = self.model.num_heads, self.model.kv_heads, self.model.qk_head_dim
        q, k, v = self.wqkv(x_BSD).split((H * K, G * K, G * K), dim=-1)
        q_BSHK, k_BSGK, v_BSGK = q.view(B, S, H, K), k.view(B, S, G, K), v.view(B, S, G, K)
        if self.model.qk_norm:
            q_BSHK, k_BSGK = self.q_norm(q_BSHK), self.k_norm(k_BSGK)
        if cos_SK is not None and sin_SK is not None:
            q_BSHK, k_BSGK = rotate(q_BSHK, cos_SK, sin_SK), rotate(k_BSGK, cos_SK, sin_SK)
        o_BSD, kept = attend(q_BSHK, k_BSGK, v_BSGK, K**-0.5, self.form, self.wo.quantizer)
        return self.wo(o_BSD, kept)


def attend(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    scale: float,
    form: Form | None = None,
    quantizer: Quantizer | None = None,
) -> tuple[Tensor, Kept | None]:
    """Causal softmax(q k^T scale) v, heads side by side again: (B, S, H * V).

    Values narrower than keys (MLA) are padded to the keys' width where torch's fused kernels, which want equal
    widths, may be used: on a CPU three times faster than without. With a `form` the output is kept in that form
    alone, for the core's backward and, as the second result, for the projection behind it, whose `quantizer` it is.
    """
    B, S, H, K = q_BSHK.shape
    V = v_BSGV.shape[-1]
    if V < K and torch.backends.cuda.flash_sdp_enabled():  # the flag holds for CPU too
        v_BSGV = F.pad(v_BSGV, (0, K - V))
    q, k, v = (t.transpose(1, 2) for t in (q_BSHK, k_BSGK, v_BSGV))
    if form is None:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=H != k.shape[1])
        return o.transpose(1, 2)[..., :V].reshape(B, S, H * V), None
    o_BSD, kept = _Core.apply(q, k, v, scale, V, form)
    if quantizer and quantizer.watcher:
        quantizer.watcher.kept("attention output", kept)
    return o_BSD, kept


class _Core(torch.autograd.Function):
    """Attention by torch's fused kernel, whose output is kept for backward in a narrower form."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, width: int, form: Form) -> tuple[Tensor, Kept]:
        o, *rest = _fused(q, k, v, scale)
        o_BSD = o.transpose(1, 2)[..., :width].reshape(o.shape[0], o.shape[2], -1)
        kept = keep_blocks(o_BSD.flatten(0, 1), form)
        ctx.is_tensor = [isinstance(t, Tensor) for t in rest]
        tensors, ctx.others = ([t for t in rest if isinstance(t, Tensor) is kind] for kind in (True, False))
        ctx.restore, ctx.scale, ctx.width, ctx.num_kept = kept.restore, scale, width, len(kept.tensors)
        ctx.save_for_backward(q, k, v, *kept.tensors, *tensors)
        return o_BSD, kept

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors
        B, H, S, K = q.shape
        matrix = ctx.restore(*saved[: ctx.num_kept]).dequantize().to(q.dtype)
        o, g = (F.pad(t.view(B, S, H, ctx.width), (0, K - ctx.width)).transpose(1, 2) for t in (matrix, grads[0]))
        tensors, others = iter(saved[ctx.num_kept :]), iter(ctx.others)
        rest = [next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor]
        return (*_fused_backward(g, q, k, v, o, rest, ctx.scale), None, None, None)


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Any, ...]:
    """Output, and what backward wants beside it."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)[:-1]


def _fused_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, rest: list[Any], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, o, *rest, 0.0, True, scale=scale
        )
    logsumexp, first_q, first_k, most_q, most_k, seed, offset = rest
    groups = q.shape[1] // k.shape[1]
    k_, v_ = (t.repeat_interleave(groups, 1) for t in (k, v))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        g, q, k_, v_, o, logsumexp, first_q, first_k, most_q, most_k, 0.0, True, seed, offset, scale=scale
    )
    return dq, *(d.unflatten(1, (-1, groups)).sum(2) for d in (dk, dv))
