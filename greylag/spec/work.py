"""Work: what one rank computes in a step, in counts: FLOPs per GEMM, elements per operator. No seconds: those are the
simulator's opinion.

Everything is plain arithmetic on the degrees. GEMM and attention counts are held equal to torch's FlopCounterMode
(tests/agree). An expert layer is counted with balanced experts. What is sent is counted by `messages`, what is held by
`shards` (weights and their state) and `kept` (activations).
"""

import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple

from greylag.spec.job import Job
from greylag.spec.model import Model
from greylag.spec.parts import Part, Role, layer_parts
from greylag.spec.precision import BLOCK, Gemms, Operand, Precision

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


class Gemm(NamedTuple):
    """A forward matrix multiply (m, k) x (k, n), `times` over. Backward holds two more of the same FLOPs."""

    name: str
    role: Role
    m: int
    n: int
    k: int
    times: int = 1

    @property
    def flops(self) -> int:
        """FLOPs of the forward multiply."""
        return 2 * self.m * self.n * self.k * self.times


class Op(NamedTuple):
    """An operator that is bound by memory: `elements` of its main operand, in one direction."""

    name: str
    phase: Literal["forward", "backward", "optimizer"]
    elements: float
    calls: int = 1
    """Number of calls that share the elements."""


def layer_gemms(model: Model, layer: int, tokens: int, tp: int = 1, ep: int = 1, etp: int | None = None) -> list[Gemm]:
    """The linear layers of one layer for `tokens` tokens of one rank; experts are cut by `etp`, by tp if None.

    Experts that fewer tp ranks cut see the tokens of the others no more, but as many of their own.
    """
    return [_gemm(model, part, tokens, tp, ep, etp) for part in layer_parts(model, layer) if _multiplies(part)]


def _multiplies(part: Part) -> bool:
    return len(part.shape) > 1 and part.role != "bias"


def _gemm(model: Model, part: Part, tokens: int, tp: int, ep: int, etp: int | None) -> Gemm:
    n, k = part.shape[-2:]
    if part.role == "expert":
        assert model.moe
        cut = tp if etp is None else etp
        n, k = (n // cut, k) if part.tp == 1 else (n, k // cut)
        rows = tokens * model.moe.top_k * ep * cut // (model.moe.num_experts * tp)
        return Gemm(part.name, part.role, rows, n, k, model.moe.num_experts // ep)
    n, k = (n // tp, k) if part.tp == 0 else (n, k // tp) if part.tp == 1 else (n, k)
    return Gemm(part.name, part.role, tokens, n, k)


def head_gemm(model: Model, tokens: int, tp: int = 1) -> Gemm:
    """The output projection."""
    return Gemm("head.weight", "head", tokens, model.vocab_size // tp, model.hidden_size)


def attention_flops(
    model: Model, sequence: int, tokens: int, tp: int = 1, causal: bool = True, window: int | None = None
) -> float:
    """Forward FLOPs of q k^T and the product with v in one layer; causal attention is half of the square.

    With a `window` a token sees that many at most, itself included.
    """
    return core_flops(model.num_heads // tp * (model.qk_head_dim + model.v_head_dim), sequence, tokens, causal, window)


def core_flops(width: int, sequence: int, tokens: int, causal: bool = True, window: int | None = None) -> float:
    """The same of heads whose queries and values are `width` wide, all together."""
    seen = (sequence + 1) / 2 if causal else float(sequence)
    if window is not None and window < sequence:
        seen = window - window * (window - 1) / (2 * sequence)
    return 2.0 * tokens * width * seen


def forward_flops(model: Model, sequence: int, tokens: int, causal: bool = True) -> float:
    """Forward FLOPs of the whole model for `tokens` tokens in sequences of `sequence`."""
    total = float(head_gemm(model, tokens).flops)
    for layer, times in distinct_layers(model):
        linear = sum(g.flops for g in layer_gemms(model, layer, tokens))
        window = model.window if model.has_window(layer) else None
        total += times * (linear + attention_flops(model, sequence, tokens, causal=causal, window=window))
    return total


def flops_per_token(model: Model, sequence: int) -> float:
    """Model FLOPs per token, forward and backward (three times forward), without recompute."""
    tokens = sequence * (model.moe.num_experts if model.moe else 1)
    return 3 * forward_flops(model, sequence, tokens) / tokens


def step_flops(job: Job) -> float:
    """Model FLOPs of the global batch."""
    return job.tokens * flops_per_token(job.model, job.sequence)


def distinct_layers(model: Model, precision: Precision | None = None) -> list[tuple[int, int]]:
    """(a layer's number, how many are like it), in the order of the first of each kind."""
    kinds = kinds_of_layers(model, precision)
    return [(layer, kinds.count(layer)) for layer in dict.fromkeys(kinds)]


@functools.lru_cache(maxsize=64)
def kinds_of_layers(model: Model, precision: Precision | None = None) -> tuple[int, ...]:
    """For each layer the number of the first that is like it: with experts or not, with a window or not, its recipes.

    Without a `precision` all are taken to follow one recipe.
    """
    differ = precision and (precision.overrides or precision.first_layers_high or precision.last_layers_high)
    first: dict[object, int] = {}
    kinds = []
    for layer in range(model.num_layers):
        recipes = tuple(layer_recipes(model, precision, layer).values()) if precision and differ else ()
        kinds.append(first.setdefault((model.is_moe_layer(layer), model.has_window(layer), recipes), layer))
    return tuple(kinds)


def layer_recipes(model: Model, precision: Precision, layer: int) -> dict[str, Gemms]:
    """The recipes of one layer's linear layers, by what follows the layer's number: `attention.wo`."""
    names = [part.name.removesuffix(".weight") for part in layer_parts(model, layer) if part.is_gemm]
    return {name.split(".", 2)[2]: precision.gemms(name, model.num_layers) for name in names}


def layer_ops(model: Model, precision: Precision, layer: int, tokens: int, tp: int = 1, ep: int = 1) -> Iterator[Op]:
    """The memory-bound operators of one layer, forward and backward, for `tokens` tokens."""
    D, H = model.hidden_size, model.num_heads // tp
    yield from _both("norm", 2 * tokens * D // tp, 2)  # norms and residuals are cut along the sequence
    yield from _both("residual", 2 * tokens * D // tp, 2)
    for width in _inner_norms(model):
        yield from _both("norm", tokens * width)
    rotary = (H + 1) * model.mla.qk_rope_head_dim if model.mla else (H + model.kv_heads // tp) * model.qk_head_dim
    if model.position == "rope":
        yield from _both("rope", tokens * rotary)
    yield from _both("reshape", tokens * H * (3 * model.qk_head_dim if model.mla else model.qk_head_dim))
    moe = model.moe if model.is_moe_layer(layer) else None
    if moe is None:
        yield from _activation_ops(model, precision, tokens * model.ffn_hidden_size // tp)
    else:
        rows = padded_rows(model, tokens, ep)
        yield from _both("router", tokens * moe.num_experts)
        yield from _both("permute", rows * D)
        yield from _activation_ops(model, precision, rows * moe.ffn_hidden_size // tp)
        if moe.num_shared_experts:
            yield from _activation_ops(model, precision, tokens * moe.shared_ffn_hidden_size // tp)
            yield from _both("residual", tokens * D)
    for gemm in layer_gemms(model, layer, tokens, tp, ep):
        if gemm.role != "router":
            gemms = precision.gemms(gemm.name.removesuffix(".weight"), model.num_layers)
            yield from linear_ops(gemms, gemm, padded_rows(model, tokens, ep) if gemm.role == "expert" else tokens)


def _activation_ops(model: Model, precision: Precision, elements: float) -> Iterator[Op]:
    """The feed-forward layer's nonlinearity, and what it costs to keep its input in FP8 (it is recomputed then)."""
    yield from _both(model.activation, elements)
    if model.activation == "swiglu" and precision.swiglu_input != "high":
        yield Op("quantize.1x128", "forward", 2 * elements)
        yield Op("encode", "forward", 2 * elements)
        yield Op("decode", "backward", 4 * elements, 2)
        yield Op("swiglu", "forward", elements)


def outer_ops(model: Model, tokens: int) -> Iterator[Op]:
    """The memory-bound operators before and after the layers."""
    yield from _both("embedding", tokens * model.hidden_size)
    yield from _both("norm", tokens * model.hidden_size)
    yield from _both("loss", tokens * model.vocab_size)


def _inner_norms(model: Model) -> tuple[int, ...]:
    if model.mla:
        return (model.mla.kv_lora_rank, *([model.mla.q_lora_rank] if model.mla.q_lora_rank else []))
    return (model.num_heads * model.qk_head_dim, model.kv_heads * model.qk_head_dim) if model.qk_norm else ()


def _both(name: str, elements: float, calls: int = 1) -> Iterator[Op]:
    yield Op(name, "forward", elements, calls)
    yield Op(name, "backward", elements, calls)


def padded_rows(model: Model, tokens: int, ep: int = 1) -> int:
    """Rows of a rank's grouped GEMM: each expert's rows are padded to a multiple of 128, by 64 on average."""
    assert model.moe
    return tokens * model.moe.top_k + model.moe.num_experts // ep * BLOCK // 2


def linear_ops(gemms: Gemms, gemm: Gemm, rows: int) -> Iterator[Op]:
    """What quantization adds to one linear layer (`numerics.linear`)."""
    x, w, g = rows * gemm.k, gemm.n * gemm.k * gemm.times, rows * gemm.n
    forward, dgrad, wgrad = gemms
    if forward.is_fp8:
        yield Op(_quantize(forward.input), "forward", x)
        yield Op(_quantize(forward.weight), "forward", w)
    if wgrad.is_fp8:
        yield Op("encode", "forward", x)
        yield Op("decode", "backward", x)
        if wgrad.retiles:
            yield Op("retile", "backward", x)
        elif wgrad.input.granularity != "tensor" or not forward.is_fp8:
            yield Op(_quantize(wgrad.input, "128x1"), "forward", x)
    if dgrad.is_fp8:
        yield Op(_quantize(dgrad.grad), "backward", g)
        yield Op(_quantize(dgrad.weight, "128x1"), "backward", w)
    if wgrad.is_fp8 and (wgrad.grad.granularity != "tensor" or not dgrad.is_fp8):
        yield Op(_quantize(wgrad.grad, "128x1"), "backward", g)


def _quantize(operand: Operand, tile: str = "1x128") -> str:
    """The operator's name; rows and shorter blocks cost about what 1x128 costs."""
    return f"quantize.{operand.granularity if operand.granularity in ('tensor', '128x128') else tile}"
