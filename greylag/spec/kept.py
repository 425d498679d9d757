"""Kept: bytes that a rank keeps of a layer's activations from forward to backward, and of amax histories.

Held equal to what autograd keeps of a layer (tests/agree/test_kept.py). Balanced experts, no recompute.
"""

from greylag.spec.job import Job
from greylag.spec.model import Model
from greylag.spec.precision import BLOCK, BYTES, Precision, Recipe
from greylag.spec.work import distinct_layers, layer_recipes, padded_rows


def history_bytes(job: Job) -> float:
    """Bytes of the amax histories and scales that delayed scaling keeps on each rank."""
    p, total = job.precision, 0
    for layer, times in distinct_layers(job.model, p):
        for gemms in layer_recipes(job.model, p, layer).values():
            for role, uses in (("input", (0, 2)), ("weight", (0, 1)), ("grad", (1, 2))):
                delayed = {gemms[use] for use in uses if gemms[use].is_fp8}
                total += times * sum(
                    recipe.amax_history + 1 for recipe in delayed if getattr(recipe, role).timing == "delayed"
                )
    return 4.0 * total / job.strategy.pp


def kept_bytes(model: Model, precision: Precision, layer: int, tokens: int, tp: int = 1, ep: int = 1) -> float:
    """Bytes of activations that one layer keeps for backward, without recompute, for `tokens` tokens of a rank."""
    D, b, moe = model.hidden_size, BYTES[precision.high], model.moe if model.is_moe_layer(layer) else None
    recipes = {name: gemms.weight_gradient for name, gemms in layer_recipes(model, precision, layer).items()}
    kept = 2 * tokens * (D * b + 4.0) / tp + _kept_by_attention(model, precision, recipes, tokens, tp)
    if moe is None:
        return kept + _kept_by_mlp(model, precision, recipes, "ffn", tokens, model.ffn_hidden_size // tp)
    rows = padded_rows(model, tokens, ep)
    kept += tokens * D * 4 + 12.0 * tokens * moe.num_experts  # the router: its input; scores and choice per expert
    kept += _kept_by_mlp(model, precision, recipes, "ffn.experts", rows, moe.ffn_hidden_size // tp)
    kept += tokens * moe.top_k * (D * b + 24) + 8 * rows  # what experts returned; weights and rows, int64 and FP32
    if moe.num_shared_experts:
        kept += _kept_by_mlp(model, precision, recipes, "ffn.shared", tokens, moe.shared_ffn_hidden_size // tp)
        if b == 4 and not recipes[f"ffn.shared.{'w_gate_up' if model.activation == 'swiglu' else 'w_up'}"].is_fp8:
            kept -= tokens * D * b  # it is the router's input
    return kept


def _kept_by_mlp(
    model: Model, precision: Precision, recipes: dict[str, Recipe], at: str, rows: float, width: float
) -> float:
    """Of a feed-forward layer: the inputs of both projections and of the nonlinearity between them."""
    gated, b = model.activation == "swiglu", BYTES[precision.high]
    first, down = recipes[f"{at}.w_gate_up" if gated else f"{at}.w_up"], recipes[f"{at}.w_down"]
    kept = kept_of_input(first, rows, model.hidden_size)
    kept += 4.0 * width if gated and precision.smooth_swiglu else 0.0
    if gated and precision.swiglu_input != "high":
        return kept + rows * 2 * width * (1 + 1 / BLOCK)
    return kept + rows * width * b * (2 if gated else 1) + kept_of_input(down, rows, width)


def kept_of_input(recipe: Recipe, rows: float, width: float) -> float:
    """Bytes that a linear layer keeps of its input for the weight gradient: codes, and scales where they are blocks.

    A power of two is kept as its exponent, in a byte.
    """
    operand = recipe.input
    scale = 4 if recipe.scale == "fp32" else 1
    return rows * width * (BYTES[operand.format] + (scale / operand.block if operand.block else 0.0))


def _kept_by_attention(model: Model, precision: Precision, recipes: dict[str, Recipe], tokens: int, tp: int) -> float:
    """Inputs of the projections, and of the core: query, key, value, output and the log-sum of each row."""
    D, b = model.hidden_size, BYTES[precision.high]
    H, G, K, V = model.num_heads // tp, max(1, model.kv_heads // tp), model.qk_head_dim, model.v_head_dim
    core = tokens * H * 4.0
    if precision.attention_output == "e5m6":
        core += tokens * H * V * (BYTES["e5m6"] + 1 / BLOCK)
    else:
        core += tokens * H * K * b
        if recipes["attention.wo"].is_fp8 or V < K:  # else the projection's input is the core's output itself
            core += kept_of_input(recipes["attention.wo"], tokens, H * V)
    if model.mla is None:
        fused = (H + 2 * G) * K
        turned = (H + G) * K if model.position == "rope" else 0
        return core + kept_of_input(recipes["attention.wqkv"], tokens, D) + tokens * (fused + turned) * b
    mla = model.mla
    kept = core + tokens * 3 * H * K * b + kept_of_input(recipes["attention.wkv_b"], tokens, mla.kv_lora_rank)
    kept += tokens * ((mla.kv_lora_rank + mla.qk_rope_head_dim) * b + 4)
    readers = [recipes["attention.wkv_a"], recipes["attention.wq_a" if mla.q_lora_rank else "attention.wq"]]
    shared = sum(not reader.is_fp8 for reader in readers) == 2  # both keep the norm's output, once
    kept += sum(kept_of_input(reader, tokens, D) for reader in readers) / (2 if shared else 1)
    if mla.q_lora_rank:
        kept += kept_of_input(recipes["attention.wq_b"], tokens, mla.q_lora_rank)
        kept += tokens * (mla.q_lora_rank * b + 4)
    return kept


def kept_by_head(model: Model, precision: Precision, tokens: int, tp: int = 1) -> float:
    """Bytes that the final norm, the head and the loss keep."""
    return tokens * (2 * model.hidden_size * BYTES[precision.high] + 4 * model.vocab_size / tp)
