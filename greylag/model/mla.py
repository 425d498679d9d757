"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in the form that trains.

Queries, keys and values rise from low-rank latents; position enters through a rotary part beside them, whose key
is shared by all heads. Shape suffixes: B batch, S sequence, D hidden, H heads, N width without position,
R rotary width, V value width, C latent width.
"""

import torch
from torch import Tensor, nn

from greylag.model.attention import LinearFactory, attend
from greylag.model.norm import RMSNorm
from greylag.model.rope import rotate
from greylag.numerics.cache import form_of
from greylag.spec.model import Model
from greylag.spec.precision import Precision


class MLAttention(nn.Module):
    """Latent attention; the down-projections, up-projections and output are linear layers at the job's precision."""

    def __init__(self, model: Model, linear: LinearFactory, precision: Precision) -> None:
        super().__init__()
        self.form = form_of(precision.attention_output)
        assert model.mla
        self.mla, self.num_heads = model.mla, model.num_heads
        mla, D, H = model.mla, model.hidden_size, model.num_heads
        if mla.q_lora_rank:
            self.wq_a = linear("attention.wq_a", D, mla.q_lora_rank, False)
            self.q_norm = RMSNorm(mla.q_lora_rank, model.norm_eps)
            self.wq_b = linear("attention.wq_b", mla.q_lora_rank, H * mla.qk_head_dim, False)
        else:
            self.wq = linear("attention.wq", D, H * mla.qk_head_dim, False)
        self.wkv_a = linear("attention.wkv_a", D, mla.kv_lora_rank + mla.qk_rope_head_dim, False)
        self.kv_norm = RMSNorm(mla.kv_lora_rank, model.norm_eps)
        self.wkv_b = linear("attention.wkv_b", mla.kv_lora_rank, H * (mla.qk_nope_head_dim + mla.v_head_dim), False)
        self.wo = linear("attention.wo", H * mla.v_head_dim, D, False)

    def forward(self, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        """Causal self-attention."""
        B, S, _ = x_BSD.shape
        mla, H = self.mla, self.num_heads
        q = self.wq_b(self.q_norm(self.wq_a(x_BSD))) if mla.q_lora_rank else self.wq(x_BSD)
        q_BSHN, q_BSHR = q.view(B, S, H, mla.qk_head_dim).split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        latent_BSC, k_BSR = self.wkv_a(x_BSD).split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        kv = self.wkv_b(self.kv_norm(latent_BSC)).view(B, S, H, mla.qk_nope_head_dim + mla.v_head_dim)
        k_BSHN, v_BSHV = kv.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        q_BSHR = rotate(q_BSHR, cos_SR, sin_SR)
        k_BSHR = rotate(k_BSR.unsqueeze(2), cos_SR, sin_SR).expand(B, S, H, mla.qk_rope_head_dim)
        q_BSHK = torch.cat((q_BSHN, q_BSHR), dim=-1)
        k_BSHK = torch.cat((k_BSHN, k_BSHR), dim=-1)
        o_BSD, kept = attend(q_BSHK, k_BSHK, v_BSHV, mla.qk_head_dim**-0.5, self.form, self.wo.quantizer)
        return self.wo(o_BSD, kept)
