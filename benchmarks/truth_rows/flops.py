"""FLOPs per step by the conventions of the sources that print TFLOP/s in the place of seconds."""

from greylag.spec.model import Model
from greylag.spec.work import layer_gemms


def megatron_2021(layers: int, hidden: int, vocab: int, sequence: int, batch: int) -> float:
    """Hardware FLOPs with full recompute, attention not causal: 96 B s l h^2 (1 + s/6h + V/16lh).

    arXiv 2104.04473, section 5.1, equation 3.
    """
    share = 1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden)
    return 96.0 * batch * sequence * layers * hidden**2 * share


def megatron_model(layers: int, hidden: int, vocab: int, sequence: int, batch: int) -> float:
    """Model FLOPs, attention not causal: 72 B s l h^2 (1 + s/6h + V/12lh).

    arXiv 2205.05198, appendix A; Megatron-Core's README of r0.8 and MegaScale's tables agree with it.
    """
    share = 1 + sequence / (6 * hidden) + vocab / (12 * layers * hidden)
    return 72.0 * batch * sequence * layers * hidden**2 * share


def causal(model: Model, sequence: int, batch: int) -> float:
    """Model FLOPs with causal attention (half), vocabulary projection and MTP layers with theirs.

    Megatron-Core's `num_floating_point_operations` (megatron/training/training.py) since 2025. 6 FLOPs per weight and
    token, forward and backward.
    """
    D, tokens = model.hidden_size, model.moe.num_experts if model.moe else 1
    core = model.num_heads * (model.qk_head_dim + model.v_head_dim) * sequence / 2
    per_token = 0.0
    for layer in range(model.num_layers + model.num_mtp_layers):
        gemms = layer_gemms(model, min(layer, model.num_layers - 1), tokens)
        per_token += sum(gemm.flops for gemm in gemms) / 2 / tokens + core
    per_token += model.num_mtp_layers * (2 * D * D + D * model.vocab_size) + D * model.vocab_size
    return 6.0 * batch * sequence * per_token
