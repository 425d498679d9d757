"""Hugging Face: the Model that a `config.json` of a published model describes.

Lives in spec because a job file may name such a file in the place of a preset. Every key that changes a shape, a FLOP
or a byte is read; a key that is not known is refused, and so is what a Model cannot say (`Departure`), unless the
caller takes departures knowingly, as `greylag import` does. Left out with the presets, since they change neither FLOPs
nor bytes: RoPE scaling, dropout, initial scales of routing losses. Names and defaults of keys: the configuration
classes of huggingface/transformers 5.24; `moe_layer_freq`, `topk_method` and `scoring_func`: the modelling files beside
deepseek-ai/DeepSeek-V3 and moonshotai/Kimi-K2-Base.
"""

import difflib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from greylag.spec.error import SpecError
from greylag.spec.published import MOST_LAYERS, Config, Departure, expert_layers, shared_experts, windows

BIAS_UPDATE_RATE = 0.001
"""No config.json says it: DeepSeek-V3's for the first 14.3T tokens (arXiv 2412.19437, section 4.2)."""


def model_table(path: Path) -> dict[str, Any]:
    """The `model` table of a job file, from a config.json. Raises SpecError on what it cannot say exactly."""
    table, departures = read_model(path)
    if departures:
        said = "; ".join(f"'{d.key}': {d.what}" for d in departures)
        raise SpecError(
            f"{path}: a model of greylag cannot say all of it: {said}; `greylag import {path}` writes the nearest "
            "model table, to be taken instead"
        )
    return table


def read_model(path: Path) -> tuple[dict[str, Any], list[Departure]]:
    """The nearest `model` table of a job file and what it leaves out, from a config.json."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file; give the path of a Hugging Face config.json") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}; give the path of a config.json") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise SpecError(f"{path}: holds no table; give the path of a Hugging Face config.json")
    name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    return model_from(config, str(path), name)


def model_from(config: dict[str, Any], where: str, name: str) -> tuple[dict[str, Any], list[Departure]]:
    """The nearest `model` table named `name` and what it leaves out. `where` names the file in errors."""
    c = Config(config, where)
    kind = c.text("model_type")
    if kind not in _ARCHITECTURES:
        if "text_config" in config:
            raise SpecError(f"{where}: {kind!r} is more than a language model; save its 'text_config' as a file")
        near = difflib.get_close_matches(kind, _ARCHITECTURES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_ARCHITECTURES)}"
        raise SpecError(f"{where}: 'model_type': no architecture {kind!r}; {hint}")
    table = _ARCHITECTURES[kind](c)
    c.refuse_unread()
    return {"name": name, **{k: v for k, v in table.items() if v is not None}}, c.departures


def _decoder(c: Config, kv_heads: bool = True, ffn: str = "intermediate_size") -> dict[str, Any]:
    """What the architectures after Llama share."""
    heads = c.integer("num_attention_heads")
    if c.integer("num_hidden_layers") > MOST_LAYERS:
        raise SpecError(f"{c.where}: 'num_hidden_layers': {c.integer('num_hidden_layers')}; lower it")
    rope = c.table.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    c.read.add("rope_parameters")
    nested = Config(rope, f"{c.where}: 'rope_parameters'")
    table: dict[str, Any] = {
        "num_layers": c.integer("num_hidden_layers"),
        "hidden_size": c.integer("hidden_size"),
        "num_heads": heads,
        "vocab_size": c.integer("vocab_size"),
        "ffn_hidden_size": c.integer(ffn),
        "max_sequence": c.integer("max_position_embeddings"),
        "norm_eps": c.number("rms_norm_eps", 1e-6),
        "rope_theta": c.number("rope_theta", nested.number("rope_theta", 10000.0)),
        "tied_embeddings": c.flag("tie_word_embeddings"),
        "init_std": c.number("initializer_range", 0.02),
    }
    rotary = c.number("partial_rotary_factor", nested.number("partial_rotary_factor", 1.0))
    if rotary != 1:
        c.depart("partial_rotary_factor", f"RoPE turns {rotary:g} of each head; the whole head is turned instead")
    if kv_heads:
        table["num_kv_heads"] = c.integer("num_key_value_heads", heads)
        table["head_dim"] = c.integer("head_dim", 0) or None
    activation = c.text("hidden_act", c.text("hidden_activation", "silu"))
    if activation not in ("silu", "swish"):
        c.depart("hidden_act", f"{activation}; SwiGLU stands in its place")
    return table


def _biases(c: Config, table: dict[str, Any]) -> dict[str, Any]:
    """Biases of attention and of dense MLPs (`attention_bias`, `mlp_bias`)."""
    layers, width = table["num_layers"], table["hidden_size"]
    attention, mlp = c.flag("attention_bias"), c.flag("mlp_bias")
    if attention and mlp:
        return {"bias": True}
    if attention:
        c.depart("attention_bias", "a bias on the output projection of attention too; left out", layers * width)
    if mlp:
        each = 2 * table["ffn_hidden_size"] + width
        c.depart("mlp_bias", "biases on dense MLPs alone; left out", layers * each)
    return {"qkv_bias": attention}


def _window(c: Config, table: dict[str, Any], window: int, windowed: Iterator[bool]) -> dict[str, Any]:
    """Sliding windows: from `layer_types` where it is said, else `windowed`, whether each layer has one."""
    kinds, layers = c.items("layer_types"), table["num_layers"]
    if kinds:
        strange = sorted({str(k) for k in kinds} - {"sliding_attention", "full_attention"})
        if strange or len(kinds) != layers:
            raise SpecError(
                f"{c.where}: 'layer_types': {len(kinds)} for {layers} layers, of kinds {', '.join(map(str, kinds[:4]))}"
                "...; only sliding_attention and full_attention are known"
            )
    rule = windows(window, [k == "sliding_attention" for k in kinds] if kinds else list(windowed))
    if rule is None:
        c.depart("layer_types", "windows that follow no rule of one in so many layers; full attention instead")
    return rule or {}


def _llama(c: Config) -> dict[str, Any]:
    table = _decoder(c)
    return {**table, **_biases(c, table)}


def _mistral(c: Config, window: int = 4096) -> dict[str, Any]:
    table = _decoder(c)
    # A window that is null is none; where the key is absent the class's own default holds.
    window = c.integer("sliding_window", 0) if "sliding_window" in c.table else window
    return {**table, **_window(c, table, window, (True for _ in range(table["num_layers"])))}


def _phi3(c: Config) -> dict[str, Any]:
    return _mistral(c, window=0)


def _mixtral(c: Config) -> dict[str, Any]:
    experts = _experts(c, "num_local_experts", c.integer("intermediate_size"), normalize=True)
    return {**_mistral(c, window=0), "moe": experts}


def _qwen(c: Config) -> dict[str, Any]:
    table = _decoder(c)
    first = c.integer("max_window_layers", 0)
    window = c.integer("sliding_window", 0) if c.flag("use_sliding_window") else 0
    c.read.add("sliding_window")
    return {**table, **_window(c, table, window, (i >= first for i in range(table["num_layers"])))}


def _qwen2(c: Config) -> dict[str, Any]:
    return {**_qwen(c), "qkv_bias": True}


def _qwen3(c: Config) -> dict[str, Any]:
    table = _qwen(c)
    return {**table, **_biases(c, table), "qk_norm": True}


def _qwen2_moe(c: Config) -> dict[str, Any]:
    table = {**_qwen(c), "qkv_bias": c.flag("qkv_bias", True)}
    moe = _sparse_experts(c, table)
    shared = c.integer("shared_expert_intermediate_size", 0)
    if shared:
        gates = sum(_sparse_layers(c, table)) * table["hidden_size"]
        c.depart("shared_expert_gate", "a sigmoid gate on the shared expert; left out", gates)
    return {**table, "moe": {**moe, **shared_experts(shared, moe["ffn_hidden_size"])}}


def _qwen3_moe(c: Config) -> dict[str, Any]:
    table = _qwen3(c)
    return {**table, "moe": _sparse_experts(c, table)}


def _sparse_layers(c: Config, table: dict[str, Any]) -> list[bool]:
    """Which layers have experts (Qwen2MoeDecoderLayer)."""
    step, dense = c.integer("decoder_sparse_step", 1), c.items("mlp_only_layers")
    return [i not in dense and (i + 1) % max(step, 1) == 0 for i in range(table["num_layers"])]


def _sparse_experts(c: Config, table: dict[str, Any]) -> dict[str, Any]:
    count = "num_experts" if "num_experts" in c.table else "num_local_experts"
    moe = _experts(c, count, c.integer("moe_intermediate_size"), c.flag("norm_topk_prob"))
    return {**moe, **expert_layers(_sparse_layers(c, table), c.where)}


def _experts(c: Config, count: str, width: int, normalize: bool) -> dict[str, Any]:
    return {
        "num_experts": c.integer(count),
        "top_k": c.integer("num_experts_per_tok"),
        "ffn_hidden_size": width,
        "scoring": "softmax",
        "normalize_top_k": normalize,
    }


def _deepseek(c: Config, scoring: str, method: str) -> dict[str, Any]:
    table = _decoder(c, kv_heads=False)
    c.read |= {"num_key_value_heads", "head_dim"}  # MLA gives every head its own keys and values
    if c.flag("attention_bias"):
        raise SpecError(f"{c.where}: 'attention_bias': MLA has no biases")
    table["mla"] = {
        "kv_lora_rank": c.integer("kv_lora_rank"),
        "qk_nope_head_dim": c.integer("qk_nope_head_dim"),
        "qk_rope_head_dim": c.integer("qk_rope_head_dim"),
        "v_head_dim": c.integer("v_head_dim"),
    }
    rank = c.integer("q_lora_rank", 0)
    if rank:
        table["mla"]["q_lora_rank"] = rank
    table["num_mtp_layers"] = c.integer("num_nextn_predict_layers", 0)
    if c.integer("n_routed_experts", 0):
        table["moe"] = _routed(c, table["num_layers"], scoring, method)
    return table


def _routed(c: Config, layers: int, scoring: str, method: str) -> dict[str, Any]:
    """Experts of DeepSeek-V2 and V3."""
    first, every = c.integer("first_k_dense_replace", 0), c.integer("moe_layer_freq", 1)
    chosen = [i >= first and i % max(every, 1) == 0 for i in range(layers)]
    moe = {
        **_experts(c, "n_routed_experts", c.integer("moe_intermediate_size"), c.flag("norm_topk_prob")),
        **expert_layers(chosen, c.where),
        "num_shared_experts": c.integer("n_shared_experts", 0),
        "scoring": c.text("scoring_func", scoring),
        "routed_scale": c.number("routed_scaling_factor", 1.0),
    }
    groups, reach = c.integer("n_group", 1), c.integer("topk_group", 1)
    method = c.text("topk_method", method)
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise SpecError(f"{c.where}: 'topk_method': {method!r} is none of greedy, group_limited_greedy, noaux_tc")
    if method != "greedy":
        moe |= {"num_groups": groups, "top_k_groups": reach}
    if method == "noaux_tc":
        moe["bias_update_rate"] = BIAS_UPDATE_RATE
    return moe


def _deepseek_v2(c: Config) -> dict[str, Any]:
    return _deepseek(c, "softmax", "greedy")


def _deepseek_v3(c: Config) -> dict[str, Any]:
    return _deepseek(c, "sigmoid", "noaux_tc")


def _gpt_oss(c: Config) -> dict[str, Any]:
    table = _decoder(c)
    layers, width, heads = table["num_layers"], table["hidden_size"], table["num_heads"]
    moe = _experts(c, "num_local_experts", table["ffn_hidden_size"], normalize=True)
    table |= _biases(c, table)
    table |= _window(c, table, c.integer("sliding_window", 0), ((i + 1) % 2 != 0 for i in range(layers)))
    c.depart("sinks", "a learned sink in each head; left out", layers * heads)
    each = moe["num_experts"] * (1 + 2 * moe["ffn_hidden_size"] + width)
    c.depart("experts", "biases on router and experts; left out", layers * each)
    limit, alpha = c.number("swiglu_limit", 7.0), c.number("swiglu_alpha", 1.702)
    c.depart("swiglu_limit", f"SwiGLU clamped at {limit:g} with slope {alpha:g}; plain SwiGLU instead")
    c.read |= {"experts_per_token"}
    return {**table, "moe": moe}


def _olmo2(c: Config) -> dict[str, Any]:
    table = _llama(c)
    c.depart("post_attention_layernorm", "norms stand behind attention and MLP; they stand before them instead")
    _wide_norm(c, table)
    return {**table, "qk_norm": True}


def _olmoe(c: Config) -> dict[str, Any]:
    table = _llama(c)
    if c.number("clip_qkv", 0.0):
        c.depart("clip_qkv", "queries, keys and values are clamped; not clamped instead")
    _wide_norm(c, table)
    moe = _experts(c, "num_experts", table["ffn_hidden_size"], c.flag("norm_topk_prob"))
    return {**table, "qk_norm": True, "moe": moe}


def _wide_norm(c: Config, table: dict[str, Any]) -> None:
    """Norms over all heads of query and of key together, which become norms over each head."""
    heads = table["num_heads"] + table["num_kv_heads"]
    width = table["head_dim"] or table["hidden_size"] // max(table["num_heads"], 1)
    c.depart("q_norm", "norms over all heads at once; over each head instead",
             table["num_layers"] * (heads - 2) * width)  # fmt: skip


def _gpt2(c: Config) -> dict[str, Any]:
    width = c.integer("n_embd")
    activation = c.text("activation_function", "gelu_new")
    if not activation.startswith("gelu"):
        c.depart("activation_function", f"{activation}; GELU stands in its place")
    return {
        "num_layers": c.integer("n_layer"),
        "hidden_size": width,
        "num_heads": c.integer("n_head"),
        "vocab_size": c.integer("vocab_size"),
        "ffn_hidden_size": c.integer("n_inner", 4 * width),
        "max_sequence": c.integer("n_positions"),
        "activation": "gelu",
        "norm": "layernorm",
        "norm_eps": c.number("layer_norm_epsilon", 1e-5),
        "position": "learned",
        "bias": True,
        "tied_embeddings": c.flag("tie_word_embeddings", True),
        "init_std": c.number("initializer_range", 0.02),
    }


_ARCHITECTURES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
}
