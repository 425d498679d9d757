"""Parts: every weight of a model by name, with its shape, its role, and how each axis cuts it.

The names are those of `greylag.model`'s modules (tests/agree holds them equal), so that the cutter, the
simulator and the checkpoint speak of the same things without knowing any class.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from greylag.spec.model import Model

Role = Literal["embedding", "head", "position", "norm", "router", "bias", "attention", "ffn", "expert", "shared_expert"]


class Part(NamedTuple):
    """One weight. A GEMM weight is (out, in); expert weights carry the expert first."""

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None = None
    """None for the embedding, the final norm and the head."""
    tp: int | None = None
    """The dim that tensor parallelism cuts; None keeps it whole."""
    sections: tuple[int, ...] = ()
    """Sizes along dim 0 (dim 1 of an expert weight) of weights fused into one; a cut takes its share of each."""
    is_buffer: bool = False
    """State that no gradient moves."""

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for dim in self.shape:
            size *= dim
        return size

    @property
    def is_gemm(self) -> bool:
        """Whether a recipe of `spec.precision` applies: the weight of a linear layer that may be FP8."""
        return self.role in ("attention", "ffn", "expert", "shared_expert")

    @property
    def is_experts(self) -> bool:
        """Whether dim 0 counts routed experts, so that the expert axis cuts it."""
        return ".experts." in self.name


def parts(model: Model) -> list[Part]:
    """All weights and persistent buffers of a model, in the order of its modules."""
    return list(_parts(model))


def layer_parts(model: Model, layer: int) -> list[Part]:
    """The weights of one layer."""
    return list(_layer(model, layer))


def num_parameters(model: Model) -> int:
    """Trained parameters of the whole model, multi-token prediction modules not counted."""
    return sum(p.size for p in parts(model) if not p.is_buffer)


def num_active_parameters(model: Model) -> int:
    """Parameters that one token meets: of the routed experts only `top_k`."""
    total = 0
    for part in parts(model):
        if part.is_buffer:
            continue
        if part.is_experts:
            assert model.moe
            total += part.size // model.moe.num_experts * model.moe.top_k
        else:
            total += part.size
    return total


def _parts(model: Model) -> Iterator[Part]:
    D, V = model.hidden_size, model.vocab_size
    yield Part("embed.weight", (V, D), "embedding", tp=0)
    if model.position == "learned":
        yield Part("position.weight", (model.max_sequence, D), "position")
    for layer in range(model.num_layers):
        yield from _layer(model, layer)
    yield from _norm(model, "norm", D, None)
    if not model.tied_embeddings:
        yield Part("head.weight", (V, D), "head", tp=0)


def _layer(model: Model, layer: int) -> Iterator[Part]:
    at = f"layers.{layer}"
    yield from _norm(model, f"{at}.attention_norm", model.hidden_size, layer)
    yield from _mla(model, layer) if model.mla else _gqa(model, layer)
    if not model.parallel_block:
        yield from _norm(model, f"{at}.ffn_norm", model.hidden_size, layer)
    if model.is_moe_layer(layer):
        yield from _moe(model, layer)
    else:
        yield from _mlp(model, f"{at}.ffn", model.ffn_hidden_size, "ffn", layer)


def _norm(model: Model, name: str, width: int, layer: int | None) -> Iterator[Part]:
    yield Part(f"{name}.weight", (width,), "norm", layer)
    if model.norm == "layernorm":
        yield Part(f"{name}.bias", (width,), "bias", layer)


def _linear(
    name: str,
    out: int,
    in_: int,
    role: Role,
    layer: int,
    tp: int | None,
    bias: bool = False,
    sections: tuple[int, ...] = (),
) -> Iterator[Part]:
    yield Part(f"{name}.weight", (out, in_), role, layer, tp, sections)
    if bias:
        yield Part(f"{name}.bias", (out,), "bias", layer, 0 if tp == 0 else None, sections)


def _gqa(model: Model, layer: int) -> Iterator[Part]:
    at, D = f"layers.{layer}.attention", model.hidden_size
    q, kv = model.num_heads * model.qk_head_dim, model.kv_heads * model.qk_head_dim
    bias = model.bias or model.qkv_bias
    yield from _linear(f"{at}.wqkv", q + 2 * kv, D, "attention", layer, 0, bias, (q, kv, kv))
    if model.qk_norm:
        yield Part(f"{at}.q_norm.weight", (model.qk_head_dim,), "norm", layer)
        yield Part(f"{at}.k_norm.weight", (model.qk_head_dim,), "norm", layer)
    yield from _linear(f"{at}.wo", D, q, "attention", layer, 1, model.bias)


def _mla(model: Model, layer: int) -> Iterator[Part]:
    assert model.mla
    mla, at, D, H = model.mla, f"layers.{layer}.attention", model.hidden_size, model.num_heads
    if mla.q_lora_rank:
        yield Part(f"{at}.wq_a.weight", (mla.q_lora_rank, D), "attention", layer)
        yield Part(f"{at}.q_norm.weight", (mla.q_lora_rank,), "norm", layer)
        yield Part(f"{at}.wq_b.weight", (H * mla.qk_head_dim, mla.q_lora_rank), "attention", layer, 0)
    else:
        yield Part(f"{at}.wq.weight", (H * mla.qk_head_dim, D), "attention", layer, 0)
    yield Part(f"{at}.wkv_a.weight", (mla.kv_lora_rank + mla.qk_rope_head_dim, D), "attention", layer)
    yield Part(f"{at}.kv_norm.weight", (mla.kv_lora_rank,), "norm", layer)
    kv_b = (H * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    yield Part(f"{at}.wkv_b.weight", kv_b, "attention", layer, 0)
    yield Part(f"{at}.wo.weight", (D, H * mla.v_head_dim), "attention", layer, 1)


def _mlp(model: Model, at: str, width: int, role: Role, layer: int) -> Iterator[Part]:
    D = model.hidden_size
    if model.activation == "swiglu":
        yield from _linear(f"{at}.w_gate_up", 2 * width, D, role, layer, 0, model.bias, (width, width))
    else:
        yield from _linear(f"{at}.w_up", width, D, role, layer, 0, model.bias)
    yield from _linear(f"{at}.w_down", D, width, role, layer, 1, model.bias)


def _moe(model: Model, layer: int) -> Iterator[Part]:
    assert model.moe
    moe, at, D = model.moe, f"layers.{layer}.ffn", model.hidden_size
    E, F = moe.num_experts, moe.ffn_hidden_size
    yield Part(f"{at}.router.weight", (E, D), "router", layer)
    if moe.bias_update_rate:
        yield Part(f"{at}.router.bias", (E,), "router", layer, is_buffer=True)
    if model.activation == "swiglu":
        yield Part(f"{at}.experts.w_gate_up", (E, 2 * F, D), "expert", layer, 1, (F, F))
    else:
        yield Part(f"{at}.experts.w_up", (E, F, D), "expert", layer, 1)
    yield Part(f"{at}.experts.w_down", (E, D, F), "expert", layer, 2)
    if model.bias:
        yield Part(f"{at}.experts.bias_up", (E, (2 if model.activation == "swiglu" else 1) * F), "bias", layer, 1)
        yield Part(f"{at}.experts.bias_down", (E, D), "bias", layer)
    if moe.num_shared_experts:
        yield from _mlp(model, f"{at}.shared", moe.shared_ffn_hidden_size, "shared_expert", layer)
