"""Layer: seconds of one layer on one rank for one micro-batch, by what they are spent on.

GEMMs take their shapes from `spec.work` and their dtypes from the job's recipes. Elementwise kernels are counted by the
bytes that fused layers read and write, those of an unfused attention over its scores. Communication inside a layer is
what its axes cost, less what hides behind the GEMMs beside it. Where a framework launches kernels slower than the
device runs them, the host sets the pace. Degrees, sequence and batch may be numpy arrays.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from greylag.sim.links import Links
from greylag.sim.operators import Operators, Size
from greylag.spec.job import Job
from greylag.spec.precision import BYTES, Gemms, Operand
from greylag.spec.routing import copies_to_nodes, row_bytes
from greylag.spec.work import Gemm, attention_flops, head_gemm, layer_gemms

Pass = Literal["forward", "input_gradient", "weight_gradient"]
PASSES: tuple[Pass, ...] = ("forward", "input_gradient", "weight_gradient")
ACCUMULATED = 8.0
"""Bytes moved per element of a weight gradient: FP32, read and added to (Megatron-Core, accumulation fused)."""

EXPERT_BIAS = 28.0
"""Bytes moved per element of the experts' output where they have biases, in each direction: the last is no part of the
grouped GEMM but, scaled by each token's probability, repeated (4), multiplied (8), added (10) and cast (6) in FP32
(Megatron-Core, transformer/moe/experts.py, _apply_packed_bias)."""

PACE = 4.0
"""Norm in which device and host add up: at equal times 19% more than either. A choice of ours, between the larger one
(infinity) and their sum (1)."""


class Kernel(NamedTuple):
    """An elementwise kernel of a fused layer: bytes read and written, forward and backward."""

    module: str
    forward: Size
    backward: Size
    kernels: Size = 1


@dataclass
class LayerTime:
    """Seconds of one layer by pass and by what they are spent on."""

    spent: dict[Pass, dict[str, Size]] = field(default_factory=lambda: {p: {} for p in PASSES})
    launches: dict[Pass, Size] = field(default_factory=lambda: dict.fromkeys(PASSES, 0.0))
    again: Size = 0.0
    """Of the forward pass, what selective recompute repeats."""

    def add(self, when: Pass, what: str, seconds: Size, kernels: Size = 0) -> None:
        """Spend seconds on something."""
        self.spent[when][what] = self.spent[when].get(what, 0.0) + seconds
        self.launches[when] = self.launches[when] + kernels

    def paced(self, launch: float) -> "LayerTime":
        """With the time for which the device waits for a host that takes `launch` seconds per kernel.

        Whoever is slower sets the pace; where both take about as long, each waits for the other now and then.
        """
        if launch:
            for when in PASSES:
                busy, host = sum(self.spent[when].values()), self.launches[when] * launch
                self.spent[when]["host"] = (busy**PACE + host**PACE) ** (1 / PACE) - busy
        return self

    def seconds(self, when: Pass) -> Size:
        """Of a pass."""
        return sum(self.spent[when].values())


def tokens_of(job: Job) -> Size:
    """Tokens of a micro-batch that a rank works on, those of its tensor-parallel peers included."""
    return job.strategy.micro_batch * job.sequence // job.strategy.cp


def layer_time(job: Job, layer: int, operators: Operators, links: Links) -> LayerTime:
    """One layer of the job."""
    time, tokens = LayerTime(), tokens_of(job)
    s, model = job.strategy, job.model
    gemms = layer_gemms(model, layer, tokens, s.tp, s.ep, s.expert_tp)
    names = [gemm.name.removesuffix(".weight") for gemm in gemms]
    recipes = [
        None if gemm.role == "router" else job.precision.gemms(name, model.num_layers)
        for name, gemm in zip(names, gemms, strict=True)
    ]
    dtypes = [tuple(r.gemm_dtype for r in recipe) if recipe else ("fp32",) * 3 for recipe in recipes]
    _gemms(time, operators, gemms, dtypes)
    for gemm, recipe in zip(gemms, recipes, strict=True):
        if recipe:
            for when, operand, elements in _quantized(gemm, recipe, job.num_micro_batches):
                time.add(when, "quantize", _quantize(operators, operand, elements), gemm.times)
    core = _attention(time, job, layer, tokens, operators)
    again = core if "attention" in s.recompute_modules else 0.0
    for kernel in layer_kernels(job, layer, tokens):
        forward = operators.move(kernel.forward, kernel.kernels)
        time.add("forward", "elementwise", forward, kernel.kernels)
        time.add("input_gradient", "elementwise", operators.move(kernel.backward, kernel.kernels), kernel.kernels)
        again = again + (forward if kernel.module in s.recompute_modules else 0.0)
    time.again = again + _repeated_gemms(job, operators, gemms, dtypes, layer)
    _communication(time, job, layer, tokens, links)
    return time.paced(operators.launch)


def _attention(time: LayerTime, job: Job, layer: int, tokens: Size, operators: Operators) -> Size:
    """The attention core; seconds of its forward."""
    if job.software.attention == "unfused":
        return _unfused(time, job, tokens, operators)
    model, tp = job.model, job.strategy.tp
    window = model.window if model.has_window(layer) else None
    flops = attention_flops(model, job.sequence, tokens, tp, window=window)
    width = model.qk_head_dim + model.v_head_dim
    core = operators.attention(flops, width)
    time.add("forward", "attention", core, 1)
    time.add("input_gradient", "attention", operators.attention(flops, width, backward=True), 2)
    return core


def _unfused(time: LayerTime, job: Job, tokens: Size, operators: Operators) -> Size:
    """Attention by GEMMs over every pair of tokens, masked ones too, and passes over the scores between them.

    Heads lie side by side as rows of one GEMM. Scores are in the high precision (arXiv 2205.05198, section 4.1): the
    softmax, scale and mask with it, reads and writes them, dropout does so with a mask of a byte; backward reads the
    gradient and the mask, then the gradient and the probabilities.
    """
    model, b, dropout = job.model, BYTES[job.precision.high], job.software.dropout
    rows, sequence = tokens * np.maximum(1, model.num_heads // job.strategy.tp), job.sequence
    K, V = model.qk_head_dim, model.v_head_dim
    forward = [(rows, sequence, K, 1), (rows, V, sequence, 1)]
    backward = [(rows, sequence, V, 1), (rows, V, sequence, 1), (rows, K, sequence, 1), (rows, K, sequence, 1)]
    m, n, k, times = _columns(forward + backward)
    seconds = operators.gemms(m, n, k, [job.precision.high] * 6, times, [b] * 6)
    scores, passes = rows * sequence, 1 + dropout
    first = seconds[:2].sum(axis=0) + operators.move(scores * (2 * b + dropout * (2 * b + 1)), passes)
    time.add("forward", "attention", first, 2 + passes)
    then = seconds[2:].sum(axis=0) + operators.move(scores * (3 * b + dropout * (2 * b + 1)), passes)
    time.add("input_gradient", "attention", then, 4 + passes)
    return first


def _gemms(time: LayerTime, operators: Operators, gemms: list[Gemm], dtypes: list[tuple[str, ...]]) -> None:
    """All GEMMs of a layer in the three passes, priced at once.

    The host launches a grouped one expert by expert (TransformerEngine, GroupedLinear: one cuBLAS call each, on a few
    streams).
    """
    shapes = [(g.m, g.n, g.k, g.times) for g in gemms] + [(g.m, g.k, g.n, g.times) for g in gemms]
    shapes += [(g.n, g.k, g.m, g.times) for g in gemms]
    m, n, k, times = _columns(shapes)
    every = [dtype[which] for which in range(3) for dtype in dtypes]
    moved = [2.0] * (2 * len(gemms)) + [ACCUMULATED] * len(gemms)
    seconds = operators.gemms(m, n, k, every, times, moved)
    for which, when in enumerate(PASSES):
        mine = seconds[which * len(gemms) : (which + 1) * len(gemms)]
        time.add(when, "gemm", mine.sum(axis=0), sum(g.times for g in gemms))


def _columns(rows: list[tuple[Size, Size, Size, Size]]) -> list[Size]:
    """The columns of a table of numbers and arrays, each stacked, (rows,) or (rows, candidates or 1)."""
    stacked = [np.stack(np.broadcast_arrays(*column)) for column in zip(*rows, strict=True)]
    most = max(map(np.ndim, stacked))
    return [c.reshape(c.shape + (1,) * (most - c.ndim)) for c in stacked]


def _repeated_gemms(
    job: Job, operators: Operators, gemms: list[Gemm], dtypes: list[tuple[str, ...]], layer: int
) -> Size:
    """Forward GEMMs that selective recompute runs again: latent up-projections, the dense MLP, the experts."""
    modules, is_moe = job.strategy.recompute_modules, job.model.is_moe_layer(layer)
    wanted = [".wq_b", ".wkv_b"] * ("mla_up" in modules)
    wanted += [".ffn."] * (("moe" if is_moe else "mlp") in modules)
    chosen = [i for i, gemm in enumerate(gemms) if any(word in gemm.name for word in wanted)]
    if not chosen:
        return 0.0
    m, n, k, times = _columns([(gemms[i].m, gemms[i].n, gemms[i].k, gemms[i].times) for i in chosen])
    return operators.gemms(m, n, k, [dtypes[i][0] for i in chosen], times, [2.0] * len(chosen)).sum(axis=0)


def _quantized(gemm: Gemm, recipe: Gemms, micro_batches: Size) -> Iterator[tuple[Pass, Operand, Size]]:
    """(when, how, elements) of what is quantized for one linear layer; weights once a step."""
    forward, dgrad, wgrad = recipe
    if forward.is_fp8:
        yield "forward", forward.input, gemm.m * gemm.k * gemm.times
        yield "forward", forward.weight, gemm.n * gemm.k * gemm.times / micro_batches
    if dgrad.is_fp8 or wgrad.is_fp8:
        yield "input_gradient", dgrad.grad, gemm.m * gemm.n * gemm.times


def _quantize(operators: Operators, operand: Operand, elements: Size) -> Size:
    """Read in BF16, written as codes in both orientations; a scale of the whole tensor at hand wants a pass before."""
    first = 2.0 if operand.granularity in ("tensor", "row") and operand.timing == "current" else 0.0
    return operators.move(elements * (first + 2.0 + 2 * BYTES[operand.format]))


def layer_kernels(job: Job, layer: int, tokens: Size) -> Iterator[Kernel]:
    """The elementwise kernels of one layer with fused norms, rotary embedding and activation, in BF16.

    Sequence parallelism cuts norms and residuals (arXiv 2205.05198). Dropout is fused into the residual's sum, with a
    mask of a byte that backward applies in a pass of its own. A parallel block has one norm, and one sum of three.
    """
    model, s, b = job.model, job.strategy, BYTES[job.precision.high]
    rows = tokens * model.hidden_size * b / s.sequence_cut
    mask = rows / b if job.software.dropout else 0.0
    blocks = 1 if model.parallel_block else 2
    yield Kernel("norm", blocks * 2 * rows, blocks * 3 * rows, blocks)
    yield Kernel("residual", 2 * (1 + blocks) * rows + 2 * mask, 2 * (rows + (2 * b + 1) * mask), blocks)
    heads = tokens * b * np.maximum(1, model.num_heads // s.tp)
    groups = tokens * b * np.maximum(1, model.kv_heads // s.tp)
    if model.mla:
        latent = tokens * b * (model.mla.kv_lora_rank + (model.mla.q_lora_rank or 0))
        yield Kernel("norm", 2 * latent, 3 * latent, 2)
        joined = heads * (2 * model.qk_head_dim + model.v_head_dim)
        yield Kernel("mla_up", 2 * joined, 2 * joined, 4)  # rotary parts turned, and concatenated with the rest
    else:
        width = (heads + groups) * model.qk_head_dim
        if model.position == "rope":
            yield Kernel("rope", 2 * width, 2 * width, 2)
        if model.qk_norm:
            yield Kernel("norm", 2 * width, 3 * width, 2)
    moe = model.moe if model.is_moe_layer(layer) else None
    if moe is None:
        yield _activation(job, tokens * model.ffn_hidden_size / s.tp)
        return
    own, rows = tokens / s.sequence_cut, tokens * moe.top_k * model.hidden_size * b / s.tp
    yield Kernel("router", own * moe.num_experts * 4 * 6, own * moe.num_experts * 4 * 6, 12)
    yield Kernel("moe", 2 * 2 * rows, 2 * 2 * rows, 10)  # to experts and back
    yield _activation(job, tokens * moe.top_k * moe.ffn_hidden_size / s.tp)
    if model.bias:
        yield Kernel("moe", rows / b * EXPERT_BIAS, rows / b * EXPERT_BIAS, 4)
    if moe.num_shared_experts:
        yield _activation(job, tokens * moe.shared_ffn_hidden_size / s.tp)
        yield Kernel("residual", 3 * own * model.hidden_size * b, 0.0)


def _activation(job: Job, elements: Size) -> Kernel:
    """SwiGLU reads two and writes one; backward reads three and writes two. Ungated ones read one and write one."""
    size = elements * BYTES[job.precision.high]
    gated = job.model.activation == "swiglu"
    return Kernel("activation", (3 if gated else 2) * size, (5 if gated else 3) * size)


def _communication(time: LayerTime, job: Job, layer: int, tokens: Size, links: Links) -> None:
    """What tp, cp and ep cost in one layer, as far as it shows."""
    s, model, b = job.strategy, job.model, BYTES[job.precision.high]
    exposed = job.software.exposed
    is_moe = model.is_moe_layer(layer)
    if np.any(s.tp > 1):
        _tensor(time, job, is_moe, tokens, links)
    if np.any(s.cp > 1):
        width = (model.num_heads if model.mla else model.kv_heads) * (model.qk_head_dim + model.v_head_dim)
        ring = links.gather(tokens * s.cp * width / s.tp * b, s.cp, s.tp)
        time.add("forward", "cp", np.maximum(exposed * ring, ring - time.spent["forward"]["attention"]), 2 * (s.cp > 1))
        behind = time.spent["input_gradient"]["attention"]
        time.add("input_gradient", "cp", np.maximum(exposed * 2 * ring, 2 * ring - behind), 4 * (s.cp > 1))
    if is_moe and np.any(s.ep > 1):
        assert model.moe
        choices = tokens * model.moe.top_k * s.expert_tp / s.tp
        low, high = row_bytes(job.precision, model.hidden_size), model.hidden_size * b
        hidden = exposed if "ep" in s.overlap else 1.0
        by_node = job.software.dispatch == "nodes"
        copies = copies_to_nodes(model.moe, links.nodes(s.ep, s.expert_tp)) if by_node else 1.0
        there, back = (links.all_to_all(choices * width, s.ep, s.expert_tp, copies) for width in (low, high))
        time.add("forward", "ep", (there + back) * hidden, 4 * (s.ep > 1))
        time.add("input_gradient", "ep", (there + back) * hidden, 4 * (s.ep > 1))


def _tensor(time: LayerTime, job: Job, is_moe: bool, tokens: Size, links: Links) -> None:
    """What tp costs in one layer: around attention, and around the feed-forward layer where all ranks share its GEMMs.

    With sequence parallelism a gather before and a scatter behind (arXiv 2205.05198, section 4.2.2), without it an
    all-reduce behind, and of the input's gradient in backward, beside the GEMM of the weight gradient (arXiv
    1909.08053, section 3; Megatron-Core, tensor_parallel/layers.py). A parallel block has them once.
    """
    s, model, exposed = job.strategy, job.model, job.software.exposed
    has_ffn = not is_moe or (model.moe and model.moe.num_shared_experts)
    around = (2 if has_ffn and not model.parallel_block else 1) * (s.tp > 1)
    size = tokens * model.hidden_size * BYTES[job.precision.high]
    hidden = exposed if "tp" in s.overlap else 1.0
    if not s.sequence_parallel:
        once = links.reduce(size, s.tp)
        time.add("forward", "tp", around * once * hidden, around)
        time.add("input_gradient", "tp", around * once * exposed, around)
        return
    once = links.gather(size, s.tp)
    time.add("forward", "tp", 2 * around * once * hidden, 2 * around)
    # Backward gathers the gradient of what was scattered; two more gathers and scatters run beside GEMMs.
    time.add("input_gradient", "tp", around * once * (hidden + 2 * exposed), 3 * around)


def head_time(job: Job, operators: Operators, links: Links) -> LayerTime:
    """Final norm, output projection and loss."""
    time, model, s, tokens = LayerTime(), job.model, job.strategy, tokens_of(job)
    head = head_gemm(model, tokens, s.tp)
    _gemms(time, operators, [head], [(job.precision.high,) * 3])
    logits = tokens * model.vocab_size / s.tp
    time.add("forward", "elementwise", operators.move(logits * 4 * 3, 4), 4)
    time.add("input_gradient", "elementwise", operators.move(logits * 4 * 2, 2), 2)
    if np.any(s.tp > 1):
        size = tokens * model.hidden_size * BYTES[job.precision.high]
        if s.sequence_parallel:
            time.add("forward", "tp", links.gather(size, s.tp), (s.tp > 1))
            time.add("input_gradient", "tp", links.gather(size, s.tp), (s.tp > 1))
        else:
            time.add("input_gradient", "tp", links.reduce(size, s.tp) * job.software.exposed, (s.tp > 1))
    return time.paced(operators.launch)


def embedding_time(job: Job, operators: Operators, links: Links) -> LayerTime:
    """Looking tokens up, each rank in its part of the table, and adding their gradients to it."""
    time, s, tokens = LayerTime(), job.strategy, tokens_of(job)
    size = tokens * job.model.hidden_size * BYTES[job.precision.high]
    time.add("forward", "elementwise", operators.move(2 * size / s.sequence_cut, 2), 2)
    time.add("weight_gradient", "elementwise", operators.move(3 * size / s.sequence_cut, 2), 2)
    if np.any(s.tp > 1) and not s.sequence_parallel:
        time.add("forward", "tp", links.reduce(size, s.tp), (s.tp > 1))
    elif np.any(s.tp > 1):
        time.add("forward", "tp", links.gather(size, s.tp), (s.tp > 1))
        time.add("weight_gradient", "tp", links.gather(size, s.tp), (s.tp > 1))
    return time
