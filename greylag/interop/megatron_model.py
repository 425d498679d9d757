"""Megatron model: the `model` table of a job from Megatron's arguments, with its defaults for what is not said."""

import re
from typing import Any

from greylag.interop.arguments import Arguments, Remarks
from greylag.interop.words import number_in
from greylag.spec.error import SpecError
from greylag.spec.published import MOST_LAYERS, expert_layers, shared_experts, windows

_PATTERN = re.compile(r"[\d\[\]()*+,\s]+")
_TERM = re.compile(r"\[([\d,\s]*)\](?:\*(\d+))?")


def model_table(a: Arguments, remarks: Remarks, tp: int) -> dict[str, Any]:
    """The `model` table. The vocabulary is padded as Megatron does, to a multiple that `tp` divides."""
    layers, width, heads = a.integer("num-layers"), a.integer("hidden-size"), a.integer("num-attention-heads")
    if not (1 <= layers <= MOST_LAYERS and width and heads):
        raise SpecError(f"{a.where}: {layers} layers of {width} with {heads} heads: no network")
    sequence = a.integer("seq-length")
    kind = _activation(a, remarks)
    table: dict[str, Any] = {
        "name": "imported",
        "num_layers": layers,
        "hidden_size": width,
        "num_heads": heads,
        "vocab_size": _vocabulary(a, remarks, tp),
        "ffn_hidden_size": _ffn(a, width, kind),
        "max_sequence": max(a.integer("max-position-embeddings", sequence), sequence),
        "activation": kind,
        "norm": "rmsnorm" if a.text("normalization", "LayerNorm").lower() == "rmsnorm" else "layernorm",
        "norm_eps": a.number("norm-epsilon", 1e-5),
        "tied_embeddings": a.flag("tied") if "tied" in a else not a.flag("untie-embeddings-and-output-weights"),
        "init_std": a.number("init-method-std", 0.02),
        **_position(a, remarks),
        **_biases(a, remarks),
    }
    if a.flag("multi-latent-attention"):
        table |= _latent(a, remarks, table)
    else:
        table |= _heads(a, heads)
    table |= _windows(a, remarks, layers)
    mtp = a.integer("mtp-num-layers", 0)
    if mtp:
        table["num_mtp_layers"] = mtp
    if a.integer("num-experts", 0):
        table["moe"] = _experts(a, remarks, table)
    return table


def _activation(a: Arguments, remarks: Remarks) -> str:
    function = a.text("activation-func", "").lower()
    gated, swiglu = a.flag("gated-linear-unit"), a.flag("swiglu")
    if a.flag("squared-relu") or "squared" in function:
        return "relu2"
    if a.flag("quick-geglu") or ("gelu" in function and (gated or "geglu" in function)):
        remarks.approximate("--quick-geglu", "a gated GELU is counted as SwiGLU: the same GEMMs")
        return "swiglu"
    return "swiglu" if swiglu or gated or "swiglu" in function or "silu" in function else "gelu"


def _ffn(a: Arguments, width: int, kind: str) -> int:
    """Megatron's default is 4 hidden, two thirds of that in multiples of 64 for gated units."""
    default = int(4 * width * 2 / 3 / 64) * 64 if kind == "swiglu" else 4 * width
    return a.integer("ffn-hidden-size", default)


def _vocabulary(a: Arguments, remarks: Remarks, tp: int) -> int:
    padded, divisor = a.integer("padded-vocab-size", 0), a.integer("make-vocab-size-divisible-by", 128)
    if padded:
        a.read.add("vocab-size")
        return padded
    size = a.integer("vocab-size", 0)
    if not size:
        tokenizer = (a.options.get("tokenizer-type") or [""])[0]
        size = _TOKENIZERS.get(tokenizer, _UNKNOWN_VOCABULARY)
        how = "GPT-2's" if size == _UNKNOWN_VOCABULARY else "that tokenizer's"
        remarks.approximate("--vocab-size", f"the tokenizer knows it; {size} stands for it, {how}: add vocab-size=N "
                            "behind the file")  # fmt: skip
    multiple = max(divisor, 1) * max(tp, 1)
    return -(-size // multiple) * multiple if a.switch("pad-vocab-size", True) else size


_UNKNOWN_VOCABULARY = 50257
"""openai-community/gpt2 config.json: the vocabulary of Megatron's examples with `--vocab-file`."""
_TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "Llama3Tokenizer": 128256}
"""By --tokenizer-type: openai-community/gpt2, meta-llama/Llama-2-7b and Meta-Llama-3-8B config.json."""


def _position(a: Arguments, remarks: Remarks) -> dict[str, Any]:
    kind = a.text("position-embedding-type", "learned_absolute")
    if a.flag("use-rotary-position-embeddings"):
        kind = "rope"
    a.flag("no-position-embedding")
    if a.number("rotary-percent", 1.0) != 1 and kind in ("rope", "yarn", "mrope"):
        remarks.approximate("--rotary-percent", "RoPE turns a part of each head; the whole head instead")
    if kind in ("rope", "yarn", "mrope"):
        return {"position": "rope", "rope_theta": a.number("rotary-base", 10000.0)}
    if kind != "learned_absolute":
        remarks.approximate("--position-embedding-type", f"{kind}: RoPE stands in its place")
        return {"position": "rope"}
    a.read.add("rotary-base")
    return {"position": "learned"}


def _biases(a: Arguments, remarks: Remarks) -> dict[str, Any]:
    bias = a.flag("bias-linear") if "bias-linear" in a else not a.flag("disable-bias-linear")
    qkv = a.flag("add-qkv-bias", "qkv-bias")
    inner = a.integer("num-experts", 0) > 0 or a.flag("multi-latent-attention")
    if bias and inner:
        remarks.leave_out("--disable-bias-linear", "absent: a bias on each projection; experts and MLA have none"
                          " here: a thousandth of the weights")  # fmt: skip
        return {} if a.flag("multi-latent-attention") else {"qkv_bias": True}
    return {"bias": True} if bias else {"qkv_bias": True} if qkv else {}


def _heads(a: Arguments, heads: int) -> dict[str, Any]:
    a.read |= {"q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim"}
    groups = a.integer("num-query-groups", 0)
    grouped = a.flag("group-query-attention") if "group-query-attention" in a else groups > 1
    table: dict[str, Any] = {"num_kv_heads": (groups or 1) if grouped else heads, "qk_norm": a.flag("qk-layernorm")}
    channels = a.integer("kv-channels", 0)
    return {**table, "head_dim": channels} if channels else table


def _latent(a: Arguments, remarks: Remarks, table: dict[str, Any]) -> dict[str, Any]:
    a.read |= {"kv-channels", "num-query-groups", "group-query-attention", "rotary-base"}
    if not a.flag("qk-layernorm"):
        remarks.approximate("--qk-layernorm", "absent; MLA's latents are normed all the same")
    rank = a.integer("q-lora-rank", 0)
    mla = {
        "kv_lora_rank": a.integer("kv-lora-rank", 32),
        "qk_nope_head_dim": a.integer("qk-head-dim", 128),
        "qk_rope_head_dim": a.integer("qk-pos-emb-head-dim", 64),
        "v_head_dim": a.integer("v-head-dim", 128),
    }
    if table["position"] != "rope":
        remarks.approximate("--position-embedding-type", "MLA carries position in its rotary part: RoPE")
    return {"mla": {"q_lora_rank": rank, **mla} if rank else mla, "position": "rope"}


def _windows(a: Arguments, remarks: Remarks, layers: int) -> dict[str, Any]:
    bounds = a.words("window-size")
    freq = a.text("window-attn-skip-freq", "0")
    if not bounds:
        return {}
    left = re.sub(r"\D", "", bounds[0]) if not bounds[0].startswith("-") else ""
    if not left:
        return {}
    # Megatron's window counts the tokens to the left of one's own (window_size of TransformerConfig).
    windowed = [f == 1 for f in _pattern(freq, layers, a)] if "[" in freq else _skipping(freq, layers, a)
    rule = windows(int(left[:15]) + 1, windowed)
    if rule is None:
        remarks.leave_out("--window-attn-skip-freq", "windows that follow no rule of one in so many layers: all attend"
                          " to everything instead")  # fmt: skip
    return dict(rule or {})


def _skipping(freq: str, layers: int, a: Arguments) -> list[bool]:
    every = number_in(freq)
    if every is None or every < 0:
        raise SpecError(f"{a.where}: --window-attn-skip-freq: {freq!r} is neither a number nor a list")
    return [not every or (i + 1) % every != 0 for i in range(layers)]


def _pattern(text: str, layers: int, a: Arguments) -> list[int]:
    """The list that `([0]*3+[1]*58)` says, of one number a layer."""
    if not _PATTERN.fullmatch(text):
        raise SpecError(f"{a.where}: {text[:40]!r}: write the layers as [0]*3+[1]*58")
    numbers: list[int] = []
    for items, times in _TERM.findall(text):
        if len(times) > 6:
            raise SpecError(f"{a.where}: {text[:40]!r}: too many layers")
        numbers += [int(n[:9]) for n in re.findall(r"\d+", items)] * min(int(times or 1), MOST_LAYERS)
    if len(numbers) != layers:
        raise SpecError(f"{a.where}: {text[:40]!r} says {len(numbers)} of {layers} layers")
    return numbers


def _experts(a: Arguments, remarks: Remarks, table: dict[str, Any]) -> dict[str, Any]:
    layers, freq = table["num_layers"], "".join(a.options.get("moe-layer-freq") or ["1"])
    a.read.add("moe-layer-freq")
    score, top_k = a.text("moe-router-score-function", "softmax"), a.integer("moe-router-topk", 2)
    if score not in ("softmax", "sigmoid"):
        remarks.approximate("--moe-router-score-function", f"{score}; sigmoid stands in its place")
    width = a.integer("moe-ffn-hidden-size", table["ffn_hidden_size"])
    shared = a.integer("moe-shared-expert-intermediate-size", 0)
    moe: dict[str, Any] = {
        "num_experts": a.integer("num-experts"),
        "top_k": top_k,
        "ffn_hidden_size": width,
        **shared_experts(shared, width),
        **_sparse(freq, layers, a, remarks),
        "scoring": "softmax" if score == "softmax" else "sigmoid",
        # Softmax behind the choice, Megatron's default, is softmax over all divided by the sum of the chosen.
        "normalize_top_k": top_k > 1 if score != "softmax" else not a.flag("moe-router-pre-softmax"),
        "routed_scale": a.number("moe-router-topk-scaling-factor", 1.0),
    }
    a.flag("moe-router-pre-softmax")
    if not a.flag("moe-grouped-gemm"):
        remarks.approximate("--moe-grouped-gemm", "absent; the experts of a rank are one grouped GEMM all the same")
    if a.text("moe-token-dispatcher-type", "allgather") not in ("alltoall", "flex"):
        remarks.approximate("--moe-token-dispatcher-type", "tokens travel by all-to-all, once to each rank")
    groups, reach = a.integer("moe-router-num-groups", 0), a.integer("moe-router-group-topk", 0)
    if groups and reach:
        moe |= {"num_groups": groups, "top_k_groups": reach}
    rate = a.number("moe-router-bias-update-rate", 1e-3)
    if a.flag("moe-router-enable-expert-bias") and rate > 0:
        moe["bias_update_rate"] = rate
    return moe


def _sparse(freq: str, layers: int, a: Arguments, remarks: Remarks) -> dict[str, int]:
    if "[" in freq:
        return expert_layers([n > 0 for n in _pattern(freq, layers, a)], a.where)
    every = number_in(freq)
    if every is None or not 1 <= every <= layers:
        raise SpecError(f"{a.where}: --moe-layer-freq: {freq!r} is neither a number of layers nor a list")
    if every > 1:
        remarks.approximate("--moe-layer-freq", "experts in the first of each run of layers; they stand in the last")
    return {"num_dense_layers": 0, "every": every}
