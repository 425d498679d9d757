"""Attention with grouped queries (arXiv 2305.13245).

Shape suffixes: B batch, S sequence, D hidden, H query heads, G key and value heads, K head width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from greylag.model.norm import RMSNorm
from greylag.model.rope import rotate
from greylag.spec.model import Model

LinearFactory = Callable[[int, int, bool], nn.Module]
"""(in features, out features, bias) to a linear layer at the job's precision."""


class Attention(nn.Module):
    """Query, key and value from one projection; the core stays in high precision."""

    def __init__(self, model: Model, linear: LinearFactory) -> None:
        super().__init__()
        self.model = model
        H, G, K = model.num_heads, model.kv_heads, model.qk_head_dim
        self.wqkv = linear(model.hidden_size, (H + 2 * G) * K, model.bias or model.qkv_bias)
        if model.qk_norm:
            self.q_norm = RMSNorm(K, model.norm_eps)
            self.k_norm = RMSNorm(K, model.norm_eps)
        self.wo = linear(H * K, model.hidden_size, model.bias)

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
        o_BSD = attend(q_BSHK, k_BSGK, v_BSGK, K**-0.5)
        return self.wo(o_BSD)


def attend(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, scale: float) -> Tensor:
    """Causal softmax(q k^T scale) v, heads side by side again: (B, S, H * V).

    Values narrower than keys (MLA) are padded to the keys' width where torch's fused kernels, which want equal
    widths, may be used: on a CPU three times faster than without.
    """
    B, S, H, K = q_BSHK.shape
    V = v_BSGV.shape[-1]
    if V < K and torch.backends.cuda.flash_sdp_enabled():  # the flag holds for CPU too
        v_BSGV = F.pad(v_BSGV, (0, K - V))
    q, k, v = (t.transpose(1, 2) for t in (q_BSHK, k_BSGK, v_BSGV))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=H != k.shape[1])
    return o.transpose(1, 2)[..., :V].reshape(B, S, H * V)
