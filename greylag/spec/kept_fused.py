"""Kept by fused layers: bytes that TransformerEngine's and Megatron-Core's layers keep from forward to backward.

The terms are those of Korthikanti et al. (arXiv 2205.05198, section 4), less what fused kernels compute again (the
softmax and its dropout in a flash attention, arXiv 2205.14135) and with what came since: grouped queries, latent
attention, gated activations, experts, FP8 inputs. `kept` remembers which module of selective recompute drops a term.
`spec.software` says what a framework fuses. Sequence parallelism cuts by `tp` what lies outside the GEMMs. Degrees and
tokens may be numpy arrays. Experts are balanced. What Greylag's own layers keep is `spec.kept`.
"""

import functools
from typing import Literal, NamedTuple

from greylag.spec.holdings import Number
from greylag.spec.model import Model
from greylag.spec.parts import layer_parts
from greylag.spec.precision import BYTES, Gemms, Precision, Recipe
from greylag.spec.software import Software
from greylag.spec.strategy import RecomputeModule, Strategy
from greylag.spec.work import kinds_of_layers, layer_recipes

Module = Literal["input"] | RecomputeModule


class Layer(NamedTuple):
    """The facts of one kind of layer: whether it has experts, and the recipe of each of its linear layers."""

    is_moe: bool
    recipes: tuple[tuple[str, Gemms], ...]

    def recipe(self, name: str) -> Recipe:
        """Of the operand that the weight gradient takes."""
        return dict(self.recipes)[name].weight_gradient


class Term(NamedTuple):
    """Bytes of one operator that lie from forward to backward."""

    name: str
    module: Module
    """The module of selective recompute that drops it; `input` is dropped by full recompute alone or never."""
    bytes: Number


@functools.lru_cache(maxsize=64)
def layer_kinds(model: Model, precision: Precision) -> tuple[Layer, ...]:
    """The kind of each layer; equal kinds are one object."""
    numbers = kinds_of_layers(model, precision)
    known: dict[Layer, Layer] = {}  # layers that differ in their window alone are alike here
    of = {}
    for first in dict.fromkeys(numbers):
        kind = Layer(model.is_moe_layer(first), tuple(layer_recipes(model, precision, first).items()))
        of[first] = known.setdefault(kind, kind)
    return tuple(of[number] for number in numbers)


def code_bytes(recipe: Recipe, role: Literal["input", "weight"], orientations: int = 1) -> float:
    """Bytes per element of a quantized operand in so many orientations, scales included.

    Scales: one FP32 per tensor (nothing here) or per block of 128, one byte per 32 in MX (OCP MX 1.0, section 5.1);
    TransformerEngine, tensor/float8_blockwise_tensor.py and tensor/mxfp8_tensor.py.
    """
    operand = recipe.operand(role)
    if not operand.is_scaled:
        return BYTES[operand.format]
    scale = {"1x128": 4 / 128, "128x128": 4 / 128**2, "1x32": 1 / 32}.get(operand.granularity, 0.0)
    return orientations * (BYTES[operand.format] + scale)


def weight_orientations(recipe: Recipe, transposes: bool) -> int:
    """Codes of a weight that lie beside it: along its rows for forward and along its columns for the input gradient.

    One scale per tensor needs the transpose only where FP8 GEMMs take one layout (Hopper's `transposes`; Blackwell
    takes both: TransformerEngine, common/gemm/cublaslt_gemm.cu); block and MX recipes keep both.
    """
    if not recipe.weight.is_scaled:
        return 0
    return 2 if transposes or recipe.weight.granularity != "tensor" else 1


def kept(model: Model, precision: Precision, kind: Layer, tokens: Number, s: Strategy, soft: Software) -> list[Term]:
    """Of one layer and micro-batch, nothing computed again.

    `tokens` are a rank's (micro-batch x sequence / cp) before sequence parallelism.
    """
    D, b, outside = model.hidden_size, BYTES[precision.high], tokens / s.sequence_cut
    read = tokens if soft.gathered else outside
    blocks = 1 if model.parallel_block else 2
    terms = [Term("norm input", "input", blocks * outside * (D * b + 4))]
    if soft.dropout:
        terms.append(Term("dropout masks", "input", 2 * outside * D))
    terms += _latent(model, precision, kind, tokens, outside, s) if model.mla else _grouped(model, kind, tokens, s, b)
    if not model.mla:
        terms.append(_read("qkv input", "norm", kind, "attention.wqkv", read * D))
    terms += _core(model, kind, tokens, s, soft, b)
    if kind.is_moe:
        experts = _experts(model, precision, kind, tokens, outside, s)
        is_kept = _has_attention_kept(model, kind, None)
        return terms + [term for term in experts if not (is_kept and term.name == "router input")]
    if not _has_attention_kept(model, kind, f"ffn.{_first(model)}"):
        terms.append(_read("mlp input", "norm", kind, f"ffn.{_first(model)}", read * D))
    return terms + _mlp(model, precision, kind, "ffn", "mlp ", tokens * model.ffn_hidden_size / s.tp)


def _has_attention_kept(model: Model, kind: Layer, reader: str | None) -> bool:
    """Whether attention keeps what the feed-forward layer's `reader` (None: the router, in high precision) reads, in
    the same form: the two of a parallel block read one norm."""
    if not model.parallel_block or model.mla:
        return False
    kept = kind.recipe("attention.wqkv").input
    return kind.recipe(reader).input == kept if reader else not kept.is_scaled


def _first(model: Model) -> str:
    """The projection that reads a feed-forward layer's input (`spec.parts`)."""
    return "w_gate_up" if model.activation == "swiglu" else "w_up"


def _read(name: str, module: Module, kind: Layer, layer: str, elements: Number) -> Term:
    """The input of a linear layer, as its recipe keeps it."""
    return Term(name, module, elements * code_bytes(kind.recipe(layer), "input"))


def _grouped(model: Model, kind: Layer, tokens: Number, s: Strategy, b: float) -> list[Term]:
    """Queries, keys and values; where heads are normed, also before the norm."""
    H, G, K = model.num_heads, model.kv_heads, model.qk_head_dim
    of_keys = _at_least_one(G, s.tp) * K
    terms = [Term("query, key, value", "input", tokens * (H / s.tp * K + 2 * of_keys) * b)]
    if model.qk_norm:
        terms.append(Term("head norm input", "norm", tokens * (H / s.tp * K + of_keys) * b))
    return terms


def _at_least_one(heads: int, tp: Number) -> Number:
    """Key heads of a rank: never less than one, as they are repeated beyond."""
    return (heads / tp + 1 + abs(heads / tp - 1)) / 2


def _latent(
    model: Model, precision: Precision, kind: Layer, tokens: Number, outside: Number, s: Strategy
) -> list[Term]:
    """MLA: the layer's input, the latents before and after their norms, and what is projected up from them."""
    mla, b, D, H = model.mla, BYTES[precision.high], model.hidden_size, model.num_heads / s.tp
    assert mla
    down = ("attention.wkv_a", "attention.wq_a" if mla.q_lora_rank else "attention.wq")
    codes = [code_bytes(kind.recipe(name), "input") for name in down]
    shared = all(not kind.recipe(name).input.is_scaled for name in down)  # one tensor in high precision
    terms = [Term("qkv input", "norm", outside * D * (codes[0] if shared else sum(codes)))]
    latents = outside * (mla.kv_lora_rank + mla.qk_rope_head_dim + (mla.q_lora_rank or 0))
    terms.append(Term("latents", "input", latents * b))
    terms.append(_read("latents normed", "mla_up", kind, "attention.wkv_b", outside * mla.kv_lora_rank))
    if mla.q_lora_rank:
        terms.append(_read("latents normed", "mla_up", kind, "attention.wq_b", outside * mla.q_lora_rank))
    return [*terms, Term("query, key, value", "mla_up", tokens * H * (2 * model.qk_head_dim + model.v_head_dim) * b)]


def _core(model: Model, kind: Layer, tokens: Number, s: Strategy, soft: Software, b: float) -> list[Term]:
    """The attention's output, kept once for itself and the projection behind it unless that reads FP8."""
    H, out = model.num_heads / s.tp, tokens * model.num_heads * model.v_head_dim / s.tp
    terms = [Term("attention output", "input", out * b)]
    if kind.recipe("attention.wo").input.is_scaled:
        terms.append(_read("projection input", "input", kind, "attention.wo", out))
    if soft.attention != "unfused":
        return [*terms, Term("attention statistics", "attention", tokens * H * 4)]
    return terms  # `probabilities` needs the sequence's length


def probabilities(model: Model, tokens: Number, sequence: Number, s: Strategy, soft: Software, b: float) -> Term:
    """The softmax that an unfused attention keeps: the probabilities, and with dropout its mask and what is left of
    them (arXiv 2205.05198, section 4.1: 5 a s^2 b)."""
    each = b + (1 + b if soft.dropout else 0)
    return Term("attention probabilities", "attention", tokens * sequence * model.num_heads / s.tp * each)


def waiting_bytes(model: Model, layer: int, tokens: Number, s: Strategy, b: float) -> Number:
    """Bytes that a layer keeps between the two halves of a split backward, for its weight gradients: the inputs of
    its linear layers and the gradients of their outputs (arXiv 2401.10241, section 2.2, M_W)."""
    total = 0.0
    for part in layer_parts(model, layer):
        if len(part.shape) == 2:
            total += tokens * sum(part.shape) / (1 if part.tp is None else s.tp) * b
        elif part.role == "expert":
            total += expert_rows(model, tokens / s.tp, s) * sum(part.shape[1:]) / s.expert_tp * b
    shared = model.parallel_block and not model.mla and not model.is_moe_layer(layer)  # the input of both
    return total - tokens * model.hidden_size / s.tp * b * shared


def _mlp(
    model: Model, precision: Precision, kind: Layer, at: str, name: str, elements: Number, module: Module = "activation"
) -> list[Term]:
    """Of `elements` (rows x width): the nonlinearity's input, and its output, which the second projection reads."""
    gated, b = model.activation == "swiglu", BYTES[precision.high]
    if gated and precision.swiglu_input != "high":
        return [Term(f"{name}activation input", "mlp", 2 * elements * (1 + 4 / 128))]
    inner: Module = "mlp" if at == "ffn" else "moe"
    before = Term(f"{name}activation input", inner, (2 if gated else 1) * elements * b)
    return [before, _read(f"{name}activation output", module, kind, f"{at}.w_down", elements)]


def _experts(
    model: Model, precision: Precision, kind: Layer, tokens: Number, outside: Number, s: Strategy
) -> list[Term]:
    """The router, the tokens that arrive and the experts that read them, shared experts beside them.

    The layer's input is kept once for the router, the dispatch and the shared experts. The router's scores and choice
    are FP32 twice and a byte, its row map INT32 twice (Megatron-Core, transformer/moe/router.py and moe_utils.py);
    probabilities travel with the tokens and weigh the activation's output, so that nothing is kept behind the experts.
    """
    moe, D, b = model.moe, model.hidden_size, BYTES[precision.high]
    assert moe
    rows = expert_rows(model, tokens / s.tp, s)
    terms = [
        Term("router input", "norm", outside * D * b),
        Term("router", "moe", outside * moe.num_experts * (4 + 4 + 1 + 8)),
        _read("expert input", "moe", kind, f"ffn.experts.{_first(model)}", rows * D),
        Term("probabilities of tokens", "moe", 2 * rows * 4),
    ]
    terms += _mlp(model, precision, kind, "ffn.experts", "expert ", rows * moe.ffn_hidden_size / s.expert_tp)
    if moe.num_shared_experts:
        width = tokens * moe.shared_ffn_hidden_size / s.tp
        terms += _mlp(model, precision, kind, "ffn.shared", "shared expert ", width, "moe")
        first = f"ffn.shared.{_first(model)}"
        if kind.recipe(first).input.is_scaled:
            terms.append(_read("shared expert input", "moe", kind, first, outside * D))
    return terms


def expert_rows(model: Model, own: Number, s: Strategy) -> Number:
    """Rows that a rank's experts are given, balanced: its `own` tokens `top_k` times each, gathered over expert-tp."""
    assert model.moe
    return own * model.moe.top_k * s.expert_tp
