"""Work: what one rank does in a step, in counts. FLOPs per GEMM, elements per operator, bytes per message, bytes
kept for backward. No seconds: those are the simulator's opinion.

Everything is plain arithmetic on the degrees. GEMM and attention counts are held equal to torch's FlopCounterMode,
message bytes to what process groups are handed (tests/agree). An expert layer is counted with balanced experts.
"""

import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple

from greylag.spec.job import Job
from greylag.spec.model import Model
from greylag.spec.parts import Part, Role, layer_parts, parts
from greylag.spec.precision import BLOCK, BYTES, Precision
from greylag.spec.strategy import Strategy

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


class Message(NamedTuple):
    """A collective that a rank takes part in, `times` per step."""

    name: str
    collective: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p"]
    axis: Literal["dp", "replica", "tp", "ep", "cp", "pp"]
    bytes: float
    """Of the whole tensor: gathered, or before scattering."""
    ranks: int
    times: int = 1
    phase: Literal["forward", "backward", "reduce", "optimizer", "other"] = "other"
    stride: int = 1
    """Distance between its ranks' numbers."""

    def sent(self, gloo: bool) -> float:
        """Bytes that a rank sends in all of them, by the ring algorithm.

        Gloo scatters by reducing everywhere (measured on its sockets: torch 2.13), so its reduce-scatter sends twice.
        """
        n = self.ranks
        twice = self.collective == "all_reduce" or (self.collective == "reduce_scatter" and gloo)
        share = 1.0 if self.collective == "p2p" else (n - 1) / n
        return self.times * self.bytes * share * (2 if twice else 1)


# --- FLOPs ----------------------------------------------------------------------------------------------------


def layer_gemms(model: Model, layer: int, tokens: int, tp: int = 1, ep: int = 1) -> list[Gemm]:
    """The linear layers of one layer for `tokens` tokens of one rank."""
    return [_gemm(model, part, tokens, tp, ep) for part in layer_parts(model, layer) if len(part.shape) > 1]


def _gemm(model: Model, part: Part, tokens: int, tp: int, ep: int) -> Gemm:
    n, k = part.shape[-2:]
    if part.role == "expert":
        assert model.moe
        n, k = (n // tp, k) if part.tp == 1 else (n, k // tp)
        rows = tokens * model.moe.top_k * ep // model.moe.num_experts
        return Gemm(part.name, part.role, rows, n, k, model.moe.num_experts // ep)
    n, k = (n // tp, k) if part.tp == 0 else (n, k // tp) if part.tp == 1 else (n, k)
    return Gemm(part.name, part.role, tokens, n, k)


def head_gemm(model: Model, tokens: int, tp: int = 1) -> Gemm:
    """The output projection."""
    return Gemm("head.weight", "head", tokens, model.vocab_size // tp, model.hidden_size)


def attention_flops(model: Model, sequence: int, tokens: int, tp: int = 1, causal: bool = True) -> float:
    """Forward FLOPs of q k^T and the product with v in one layer; causal attention is half of the square."""
    width = model.num_heads // tp * (model.qk_head_dim + model.v_head_dim)
    return 2.0 * tokens * sequence * width * ((sequence + 1) / (2 * sequence) if causal else 1.0)


def forward_flops(model: Model, sequence: int, tokens: int, causal: bool = True) -> float:
    """Forward FLOPs of the whole model for `tokens` tokens in sequences of `sequence`."""
    total = float(head_gemm(model, tokens).flops)
    for layer, times in distinct_layers(model):
        linear = sum(g.flops for g in layer_gemms(model, layer, tokens))
        total += times * (linear + attention_flops(model, sequence, tokens, causal=causal))
    return total


def flops_per_token(model: Model, sequence: int) -> float:
    """Model FLOPs per token, forward and backward (three times forward), without recompute."""
    tokens = sequence * (model.moe.num_experts if model.moe else 1)
    return 3 * forward_flops(model, sequence, tokens) / tokens


def step_flops(job: Job) -> float:
    """Model FLOPs of the global batch."""
    return job.tokens * flops_per_token(job.model, job.sequence)


def distinct_layers(model: Model) -> list[tuple[int, int]]:
    """(a layer's number, how many are like it): the dense ones and those with experts."""
    if model.moe is None:
        return [(0, model.num_layers)]
    dense = model.moe.num_dense_layers
    return [(0, dense)] * (dense > 0) + [(dense, model.num_layers - dense)]


# --- operators bound by memory ------------------------------------------------------------------------------------


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
        yield from _both(model.activation, tokens * model.ffn_hidden_size // tp)
    else:
        rows = padded_rows(model, tokens, ep)
        yield from _both("router", tokens * moe.num_experts)
        yield from _both("permute", rows * D)
        yield from _both("swiglu", rows * moe.ffn_hidden_size // tp)
        if moe.num_shared_experts:
            yield from _both("swiglu", tokens * moe.shared_ffn_hidden_size // tp)
            yield from _both("residual", tokens * D)
    for gemm in layer_gemms(model, layer, tokens, tp, ep):
        yield from linear_ops(precision, gemm, padded_rows(model, tokens, ep) if gemm.role == "expert" else tokens)


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


def linear_ops(precision: Precision, gemm: Gemm, rows: int) -> Iterator[Op]:
    """What quantization adds to one linear layer (`numerics.linear`)."""
    if gemm.role == "router" or not precision.is_fp8:
        return
    x, w, g = rows * gemm.k, gemm.n * gemm.k * gemm.times, rows * gemm.n
    tensor = precision.input.granularity == "tensor"
    along, down, square = (
        ("quantize.tensor",) * 3 if tensor else ("quantize.1x128", "quantize.128x1", "quantize.128x128")
    )
    yield Op(along, "forward", x)
    yield Op(square, "forward", w)
    yield Op("encode", "forward", x)
    yield Op(along, "backward", g)
    yield Op(square, "backward", w)
    yield Op("decode", "backward", x)
    if not tensor:
        yield Op(down, "backward", g)
        yield Op("retile", "backward", x)


# --- messages -----------------------------------------------------------------------------------------------------


def units(model: Model) -> list[list[Part]]:
    """What is gathered and scattered together: each layer, and last the embedding, final norm and head."""
    every = [p for p in parts(model) if not p.is_buffer]
    groups = [[p for p in every if p.layer == layer] for layer in range(model.num_layers)]
    return [*groups, [p for p in every if p.layer is None]]


def held(part: Part, strategy: Strategy) -> float:
    """Elements of a weight that a rank works with: its tensor-parallel slice, its experts; of an average stage."""
    cut = strategy.tp if part.tp is not None else 1
    return part.size / cut / (strategy.ep if part.role == "expert" else 1) / strategy.pp


def shards_of(part: Part, strategy: Strategy) -> int:
    """Over how many ranks the state of a weight is sharded: those that hold the same elements, inside a replica."""
    s = strategy
    return max(1, s.shards * s.cp * s.tp // s.ep) if part.role == "expert" and s.ep > 1 else s.shards * s.cp


def unit_bytes(unit: list[Part], strategy: Strategy, width: int = 4) -> dict[int, float]:
    """Bytes of a unit as it is gathered, by number of ranks: dim 0 of every weight is padded to a multiple of them."""
    total: dict[int, float] = {}
    for part in unit:
        n = shards_of(part, strategy)
        padded = -(-part.shape[0] // n) * n / part.shape[0] if part.shape[0] >= n else 1.0
        total[n] = total.get(n, 0.0) + width * held(part, strategy) * padded
    return total


def data_parallel_messages(job: Job) -> Iterator[Message]:
    """Collectives over parameters and gradients in one step (`parallel.data` states the rule of each ZeRO level)."""
    s, groups = job.strategy, units(job.model)
    for number, unit in enumerate(groups):
        for n, size in unit_bytes(unit, s).items():
            if n > 1:
                yield from _shard_messages(job, n, size, number == len(groups) - 1)
    if s.replicas > 1:
        sharded = s.zero > 0
        shard = sum(size / (n if sharded else 1) for unit in groups for n, size in unit_bytes(unit, s).items())
        yield Message("gradients", "all_reduce", "replica", shard, s.replicas, 1, "reduce")


def _shard_messages(job: Job, n: int, size: float, is_root: bool) -> Iterator[Message]:
    """Of one unit among the `n` ranks that shard it. Parameters are gathered in FP32, gradients reduced in FP32."""
    zero, m, dense = job.strategy.zero, job.num_micro_batches, job.strategy.shards * job.strategy.cp
    message = functools.partial(
        Message, axis="dp", bytes=size, ranks=n, stride=job.strategy.tp if n == dense else job.strategy.ep
    )
    if zero == 0:
        yield message("gradients", "all_reduce", times=1, phase="reduce")
        return
    yield message("parameters", "all_gather", times=m if zero == 3 else 1, phase="forward")
    if zero == 3 and not is_root:
        yield message("parameters", "all_gather", times=m, phase="backward")
    yield message("gradients", "reduce_scatter", times=m if zero >= 2 else 1, phase="backward")


def data_parallel_ops(job: Job) -> Iterator[Op]:
    """Copies around those collectives: gathered parameters out of the buffer, gradients into one."""
    for message in data_parallel_messages(job):
        if message.phase == "reduce":
            continue
        phase: Direction = "forward" if message.phase == "forward" else "backward"
        yield Op("copy", phase, message.times * message.bytes / 4, message.times)


def model_parallel_messages(job: Job, tokens: int) -> Iterator[Message]:
    """Messages of one micro-batch of `tokens` tokens of a rank over tp, cp, ep and pp, of all stages together.

    Tensor parallelism with sequence parallelism (arXiv 2205.05198) gathers and scatters activations once around
    attention and once around the feed-forward layer, in each direction; experts receive and return their tokens, each
    token once per group (node) that it may reach.
    """
    s, model, width = job.strategy, job.model, BYTES[job.precision.high]
    activation = float(tokens * model.hidden_size * width)
    if s.tp > 1:
        for phase in DIRECTIONS:
            for collective in ("all_gather", "reduce_scatter"):
                yield Message("activations", collective, "tp", activation, s.tp, 2 * model.num_layers, phase)
    if s.cp > 1:
        width_of_heads = (model.kv_heads if not model.mla else model.num_heads) * (model.qk_head_dim + model.v_head_dim)
        size = float(tokens * s.cp * width_of_heads // s.tp * width)
        yield Message("keys and values", "all_gather", "cp", size, s.cp, model.num_layers, "forward", s.tp)
        yield Message("keys and values", "reduce_scatter", "cp", size, s.cp, model.num_layers, "backward", s.tp)
    if s.ep > 1 and model.moe:
        for phase in DIRECTIONS:
            reach = min(model.moe.top_k, model.moe.top_k_groups) if model.moe.num_groups > 1 else model.moe.top_k
            size = activation * reach / s.tp
            yield Message("tokens", "all_to_all", "ep", size, s.ep, 2 * model.num_moe_layers, phase)
    if s.pp > 1:
        stride = s.shards * s.cp * s.tp
        yield Message("activations", "p2p", "pp", activation / s.tp, 2, 2, "other", stride)


# --- bytes at rest and kept -----------------------------------------------------------------------------------------


def rank_parameters(job: Job, sharded: bool = True) -> float:
    """Parameters of an average stage that one rank holds; `sharded` also over the ranks that hold the same."""
    every = [p for p in parts(job.model) if not p.is_buffer]
    return sum(held(p, job.strategy) / (shards_of(p, job.strategy) if sharded else 1) for p in every)


def history_bytes(job: Job) -> float:
    """Bytes of the amax histories and scales that delayed scaling keeps on each rank."""
    p = job.precision
    delayed = sum(o.is_fp8 and o.timing == "delayed" for o in (p.input, p.weight, p.grad))
    linears = sum(part.is_gemm for part in parts(job.model))
    return 4.0 * delayed * (p.amax_history + 1) * linears / job.strategy.pp


def kept_bytes(model: Model, precision: Precision, layer: int, tokens: int, tp: int = 1, ep: int = 1) -> float:
    """Bytes of activations that one layer keeps for backward, without recompute, for `tokens` tokens of a rank."""
    D, b, moe = model.hidden_size, BYTES[precision.high], model.moe if model.is_moe_layer(layer) else None
    rows = padded_rows(model, tokens, ep) if moe else 0
    kept = 2 * tokens * (D * b + 4.0) / tp + _kept_by_attention(model, precision, tokens, tp)
    linear = functools.partial(kept_of_input, precision)
    if moe is None:
        gated = model.activation == "swiglu"
        width = model.ffn_hidden_size // tp
        return kept + linear(tokens, D) + tokens * width * b * (2 if gated else 1) + linear(tokens, width)
    kept += tokens * D * 4 + 12.0 * tokens * moe.num_experts  # the router: its input; scores and choice per expert
    kept += linear(rows, D) + rows * 2 * moe.ffn_hidden_size // tp * b + linear(rows, moe.ffn_hidden_size // tp)
    kept += tokens * moe.top_k * (D * b + 24) + 8 * rows  # what experts returned; weights and rows, int64 and FP32
    if moe.num_shared_experts:
        width = moe.shared_ffn_hidden_size // tp
        kept += (linear(tokens, D) if precision.is_fp8 else 0) + tokens * 2 * width * b + linear(tokens, width)
    return kept


def kept_of_input(precision: Precision, rows: float, width: float) -> float:
    """Bytes that a linear layer keeps of its input: codes, and scales where they are blocks."""
    operand = precision.input
    return rows * width * (BYTES[operand.format] + (4 / BLOCK if operand.granularity == "1x128" else 0))


def _kept_by_attention(model: Model, precision: Precision, tokens: int, tp: int) -> float:
    """Inputs of the projections, and of the core: query, key, value, output and the log-sum of each row."""
    D, b, linear = model.hidden_size, BYTES[precision.high], functools.partial(kept_of_input, precision)
    H, G, K, V = model.num_heads // tp, max(1, model.kv_heads // tp), model.qk_head_dim, model.v_head_dim
    core = tokens * H * (K * b + 4.0)
    if precision.is_fp8 or V < K:  # else the projection's input is the core's output itself
        core += linear(tokens, H * V)
    if model.mla is None:
        fused = (H + 2 * G) * K
        turned = (H + G) * K if model.position == "rope" else 0
        return core + linear(tokens, D) + tokens * (fused + turned) * b
    mla = model.mla
    kept = core + tokens * 3 * H * K * b + linear(tokens, D) + linear(tokens, mla.kv_lora_rank)
    kept += tokens * ((mla.kv_lora_rank + mla.qk_rope_head_dim) * b + 4)
    if mla.q_lora_rank:
        kept += (linear(tokens, D) if precision.is_fp8 else 0) + linear(tokens, mla.q_lora_rank)
        kept += tokens * (mla.q_lora_rank * b + 4)
    return kept


def kept_by_head(model: Model, precision: Precision, tokens: int, tp: int = 1) -> float:
    """Bytes that the final norm, the head and the loss keep."""
    return tokens * (2 * model.hidden_size * BYTES[precision.high] + 4 * model.vocab_size / tp)
