"""Dims: a source's dimensions of a network as a Model."""

from typing import Any

from greylag.spec.model import MLA, Model, MoE
from truth_rows.row import Raw, UntoldError, padded

GPT2_VOCAB = 50257
"""Where a source trains GPT-like models on GPT-2's tokens."""
_SAME = {
    "moe_ffn_hidden": "moe_ffn",
    "qk_pos_emb_head_dim": "qk_rope_dim",
    "shared_experts": "num_shared",
    "ffn_hidden_size": "ffn_hidden",
}


def dims_of(model: Raw, models: Raw) -> Raw:
    """The dimensions of a row's model: its own, over those that `ref` names."""
    base = dict(models.get(model.get("ref", ""), {}))
    own = {_SAME.get(k, k): v for k, v in model.items() if v is not None}
    if "swiglu" in own:
        base.pop("gated_mlp", None)
    return {k: v for k, v in base.items() if v is not None} | own


def model_of(model: Raw, models: Raw, vocab: int | None = None, vocab_multiple: int = 1, **fields: Any) -> Model:
    """A Model from a row's `model` table. `fields` go over what the table says.

    The vocabulary is padded to `vocab_multiple`. Raises UntoldError where a dimension is missing or the
    network is none that a Model says.
    """
    d = dims_of(model, models)
    name = str(d.get("name", model.get("ref", "model")))
    if "hybrid" in d or "hybrid_pattern" in d or "mamba" in str(d.get("attention", "")):
        raise UntoldError("hybrid of Mamba and attention layers")
    if "linear_attention_freq" in d:
        raise UntoldError("hybrid of linear and full attention layers")
    vocab = vocab or d.get("vocab")
    missing = [k for k in ("layers", "hidden", "heads", "ffn_hidden") if not d.get(k)] + ([] if vocab else ["vocab"])
    if missing:
        raise UntoldError(f"dimensions not collected: {', '.join(missing)}")
    assert vocab
    gated = d.get("gated_mlp", d.get("swiglu", True))
    mla = _mla(d)
    made = {
        "name": name,
        "num_layers": d["layers"],
        "hidden_size": d["hidden"],
        "num_heads": d["heads"],
        "vocab_size": padded(vocab, vocab_multiple),
        "ffn_hidden_size": d["ffn_hidden"],
        "num_kv_heads": None if mla else d.get("kv_heads"),
        "head_dim": None if mla else d.get("head_dim"),
        "max_sequence": 1,
        "mla": mla,
        "moe": _moe(d),
        "activation": "swiglu" if gated else "gelu",
        "tied_embeddings": bool(d.get("tied_embeddings", False)),
    }
    if d.get("sliding_window"):  # "every other layer" in the one model so far
        made |= {"window": d["sliding_window"], "full_attention_every": 2}
    return Model(**(made | fields))


def gpt(model: Raw, models: Raw, vocab: int | None = None, vocab_multiple: int = 1, **fields: Any) -> Model:
    """A Model of GPT-3's kind: learned positions, LayerNorm, GELU, biases, tied embeddings."""
    kind = {"norm": "layernorm", "position": "learned", "bias": True, "tied_embeddings": True, "activation": "gelu"}
    return model_of(model, models, vocab, vocab_multiple, **(kind | fields))


def _mla(d: Raw) -> MLA | None:
    if d.get("attention") != "mla":
        return None
    return MLA(
        q_lora_rank=d.get("q_lora_rank"),
        kv_lora_rank=d["kv_lora_rank"],
        qk_nope_head_dim=d["qk_head_dim"],
        qk_rope_head_dim=d["qk_rope_dim"],
        v_head_dim=d["v_head_dim"],
    )


def _moe(d: Raw) -> MoE | None:
    if not d.get("experts"):
        return None
    width = d.get("moe_ffn") or d["ffn_hidden"]
    shared = d.get("shared_expert_ffn", d.get("num_shared", 0) * width)
    groups = d.get("router_groups", 1)
    return MoE(
        num_experts=d["experts"],
        top_k=d["topk"],
        ffn_hidden_size=width,
        num_shared_experts=-(-shared // width),
        shared_width=shared if shared % width else None,
        num_dense_layers=d.get("dense_layers", dense_layers(d.get("moe_layer_freq"))),
        num_groups=groups if d["experts"] % groups == 0 else 1,
        top_k_groups=d.get("router_group_topk", 1) if d["experts"] % groups == 0 else 1,
        every=d.get("moe_every", 1),
    )


def dense_layers(frequency: str | None) -> int:
    """Dense layers at the bottom by Megatron's `--moe-layer-freq`: `([0]*3+[1]*58)` has 3."""
    if not frequency or "[0]*" not in frequency:
        return 0
    return int(frequency.split("[0]*")[1].split("+")[0])
