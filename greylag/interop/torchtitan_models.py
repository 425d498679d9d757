"""torchtitan models: the dimensions behind `model.name` and `model.flavor`.

pytorch/torchtitan at the parent of 76d5c72e2, the last commit with TOML configurations: `llama3_args`,
`deepseekv3_args` and `qwen3_args` of torchtitan/models/*/__init__.py and the defaults of their model/args.py; Llama 2
at 40f79d79f (torchtitan/models/llama/__init__.py).
"""

from typing import Any

Flavors = dict[str, dict[str, Any]]


def _llama(
    hidden: int, layers: int, heads: int, ffn: int, kv: int | None = None, vocab: int = 128256, theta: float = 500000.0
) -> dict[str, Any]:
    table: dict[str, Any] = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "ffn_hidden_size": ffn}
    table |= {"vocab_size": vocab, "norm_eps": 1e-5, "rope_theta": theta}
    return table | ({"num_kv_heads": kv} if kv else {})


def _llama2(hidden: int, layers: int, heads: int, ffn: int, kv: int | None = None) -> dict[str, Any]:
    return _llama(hidden, layers, heads, ffn, kv, vocab=32000, theta=10000.0)


# The width of an MLP is 8/3 hidden, times ffn_dim_multiplier, rounded up to multiple_of (FeedForward of model.py).
LLAMA3: Flavors = {
    "debugmodel": _llama(256, 6, 16, 768, vocab=2048),
    "8B": _llama(4096, 32, 32, 14336, 8),
    "70B": _llama(8192, 80, 64, 28672, 8),
    "405B": _llama(16384, 126, 128, 53248, 8),
}
LLAMA2: Flavors = {
    "7B": _llama2(4096, 32, 32, 11008),
    "13B": _llama2(5120, 40, 40, 13824),
    "70B": _llama2(8192, 80, 64, 28672, 8),
}


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, kv: int = 8, tied: bool = False) -> dict[str, Any]:
    table: dict[str, Any] = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "num_kv_heads": kv}
    table |= {"ffn_hidden_size": ffn, "head_dim": 128, "vocab_size": 151936, "norm_eps": 1e-6}
    return table | {"rope_theta": 1000000.0, "qk_norm": True, "tied_embeddings": tied}


def _qwen3_moe(width: int) -> dict[str, Any]:
    experts = {"num_experts": 128, "top_k": 8, "ffn_hidden_size": width, "scoring": "softmax", "normalize_top_k": True}
    return {"moe": experts}


QWEN3: Flavors = {
    "0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "8B": _qwen3(4096, 36, 32, 12288),
    "14B": _qwen3(5120, 40, 40, 17408),
    "32B": _qwen3(5120, 64, 64, 25600),
    "30B-A3B": {**_qwen3(2048, 48, 32, 6144, 4), **_qwen3_moe(768)},
    "235B-A22B": {**_qwen3(4096, 94, 64, 12288, 4), "rope_theta": 5000000.0, **_qwen3_moe(1536)},
}


def _deepseek(hidden: int, layers: int, heads: int, ffn: int, vocab: int, rank: int, **experts: Any) -> dict[str, Any]:
    mla = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    if rank:
        mla["q_lora_rank"] = rank
    table: dict[str, Any] = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "ffn_hidden_size": ffn}
    # load_balance_coeff of MoEArgs is the rate of the balancing bias.
    moe = {"bias_update_rate": 0.001, **experts}
    return table | {"vocab_size": vocab, "norm_eps": 1e-5, "rope_theta": 10000.0, "mla": mla, "moe": moe}


_V2 = {"top_k": 6, "num_shared_experts": 2, "num_dense_layers": 1, "scoring": "softmax", "normalize_top_k": False}
DEEPSEEK_V3: Flavors = {
    "16B": _deepseek(2048, 27, 16, 10944, 102400, 0, num_experts=64, ffn_hidden_size=1408, **_V2),
    "236B": _deepseek(
        5120, 60, 128, 12288, 102400, 1536,
        num_experts=160, ffn_hidden_size=1536, routed_scale=16.0, num_groups=8, top_k_groups=3, **_V2,
    ),
    "671B": _deepseek(
        7168, 61, 128, 18432, 129280, 1536,
        num_experts=256, ffn_hidden_size=2048, top_k=8, num_shared_experts=1, num_dense_layers=3, scoring="sigmoid",
        normalize_top_k=True, routed_scale=2.5, num_groups=8, top_k_groups=4,
    ),
}  # fmt: skip

MODELS: dict[str, Flavors] = {"llama3": LLAMA3, "llama2": LLAMA2, "qwen3": QWEN3, "deepseek_v3": DEEPSEEK_V3}
"""Flavors by `model.name`."""
