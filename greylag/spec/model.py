"""Model: the dimensions of a decoder-only transformer, dense or mixture of experts.

Names follow Megatron-LM. These are facts only: `spec.parts` turns them into weights by name, `spec.work`
into counts, `greylag.model` into torch modules.
"""

from typing import Literal

import msgspec


class MLA(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_lora_rank: int | None = None
    """Width of the compressed query; None projects the query directly (DeepSeek-V2-Lite)."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head: the part without position and the rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class MoE(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Mixture of experts (DeepSeekMoE, arXiv 2401.06066; routing of DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    """Width of one routed expert."""
    num_shared_experts: int = 0
    """Shared experts are one MLP, as wide as so many routed ones."""
    shared_width: int | None = None
    """Width of all shared experts together where it is another."""
    num_dense_layers: int = 0
    """How many layers at the bottom keep a dense MLP."""
    every: int = 1
    """Above them one layer in this many has experts: the last of each run (Llama 4 Maverick: 2)."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True
    """Divide the chosen scores by their sum."""
    routed_scale: float = 1.0
    num_groups: int = 1
    """Experts stand in this many groups (nodes); a token may reach `top_k_groups` of them."""
    top_k_groups: int = 1
    bias_update_rate: float = 0.0
    """Step of the auxiliary-loss-free balancing bias (arXiv 2408.15664); 0 has no bias."""

    @property
    def shared_ffn_hidden_size(self) -> int:
        """Width of all shared experts together."""
        return self.num_shared_experts * self.ffn_hidden_size if self.shared_width is None else self.shared_width


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A decoder-only transformer."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    ffn_hidden_size: int
    """Width of a dense MLP."""
    num_kv_heads: int | None = None
    """None: as many as query heads. Unused by MLA."""
    head_dim: int | None = None
    """None: hidden_size / num_heads. Unused by MLA."""
    max_sequence: int
    mla: MLA | None = None
    moe: MoE | None = None
    activation: Literal["swiglu", "gelu", "relu2"] = "swiglu"
    """Of MLPs and experts; `relu2` is the squared ReLU of Nemotron-4, ungated as GELU is."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-6
    position: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10000.0
    qk_norm: bool = False
    """RMSNorm over each query and key head (Qwen3). Unused by MLA, which norms its latents."""
    bias: bool = False
    """Biases on every projection (GPT-3), of experts too (GPT-OSS)."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections alone (Qwen2)."""
    parallel_block: bool = False
    """Attention and feed-forward layer read one norm, side by side, and add to the residual together (GPT-J; PaLM,
    arXiv 2204.02311, section 2), instead of one after the other with a norm each."""
    tied_embeddings: bool = False
    window: int | None = None
    """Tokens that sliding-window attention sees; None sees all before."""
    full_attention_every: int | None = None
    """With a window, one layer in this many sees all (GPT-OSS: 2); None: none does."""
    num_mtp_layers: int = 0
    """Multi-token prediction modules behind the last layer (arXiv 2412.19437, section 2.2)."""
    init_std: float = 0.02

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head."""
        return self.mla.qk_head_dim if self.mla else self.head_dim or self.hidden_size // self.num_heads

    @property
    def v_head_dim(self) -> int:
        """Width of one value head."""
        return self.mla.v_head_dim if self.mla else self.qk_head_dim

    @property
    def num_moe_layers(self) -> int:
        """Number of layers whose MLP is a mixture of experts."""
        return sum(self.is_moe_layer(layer) for layer in range(self.num_layers)) if self.moe else 0

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer number `layer` (from 0) holds experts."""
        if self.moe is None or layer < self.moe.num_dense_layers:
            return False
        return (layer - self.moe.num_dense_layers + 1) % self.moe.every == 0

    def has_window(self, layer: int) -> bool:
        """Whether layer number `layer` attends to a window alone."""
        every = self.full_attention_every
        return self.window is not None and (every is None or (layer + 1) % every != 0)
