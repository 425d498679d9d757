"""Memory of Greylag's own layers: peak bytes of a rank of an average stage, by pool (tests/agree/test_memory.py).

At rest a rank holds its parameters, gradients and moments, cut as the ZeRO level says. The peak comes when backward
has just begun: every micro-batch in flight keeps its activations, the last layer's feed-forward is being
differentiated, and parameters and gradients lie gathered for a moment. With recompute, where layers keep their inputs
alone, it may also come late, when the gradients are there. Fragmentation is not modelled. What fused layers keep is
`memory_fused`.
"""

from greylag.spec.job import Job
from greylag.spec.kept import history_bytes, kept_by_head, kept_bytes, kept_of_input
from greylag.spec.precision import BYTES
from greylag.spec.shards import gathered_width, held, moment_bytes, rank_parameters, shards_of, unit_bytes, units
from greylag.spec.work import distinct_layers, layer_recipes, padded_rows


def autograd_memory(job: Job) -> dict[str, float]:
    """Peak bytes of a rank of an average stage by pool (`spec.step.POOLS`)."""
    mine = rank_parameters(job, sharded=job.strategy.zero > 0)
    return {
        "parameters": 4 * mine + history_bytes(job),
        "gradients": 4 * mine,
        "optimizer": moment_bytes(job, sharded=job.strategy.zero > 0),
        "activations": max(_in_backward(job, 4 * mine), _in_reduce(job, 4 * mine)),
    }


def _in_backward(job: Job, gradients: float) -> float:
    """Beyond what rests, in backward; less the `gradients` at rest that do not exist yet."""
    s, model = job.strategy, job.model
    tokens, last = s.micro_batch * job.sequence // s.cp, model.num_layers - 1
    kept = sum(times * _kept(job, layer, tokens) for layer, times in distinct_layers(model, job.precision))
    kept *= min(s.pp, job.num_micro_batches) / s.pp
    head = _head(job, tokens) if s.pp == 1 else 0.0
    whole_gradients = s.zero == 1 and s.shards * s.cp > 1
    absent = gradients if whole_gradients or job.num_micro_batches == 1 else 0.0
    start = (
        kept + max(head, _again(job, last, tokens) + _workspace(job, last, tokens)) + _gathered(job, s.zero) - absent
    )
    return max(0.0, start, _late(job, tokens))


def _kept(job: Job, layer: int, tokens: int) -> float:
    """Of one layer and micro-batch, from forward to backward."""
    s = job.strategy
    if s.recompute == "full":
        return tokens * job.model.hidden_size * BYTES[job.precision.high] / s.tp
    return kept_bytes(job.model, job.precision, layer, tokens, s.tp, s.ep)


def _again(job: Job, layer: int, tokens: int) -> float:
    """What recompute brings back of the layer that backward is in, beside its input."""
    s = job.strategy
    return kept_bytes(job.model, job.precision, layer, tokens, s.tp, s.ep) - _kept(job, layer, tokens)


def _late(job: Job, tokens: int) -> float:
    """With recompute, at the first layer of each kind: inputs up to there, and the gradients of the layers behind."""
    s = job.strategy
    if s.recompute == "none" or job.num_micro_batches > 1:
        return 0.0
    *gradients, _ = (4 * sum(held(p, s) / (shards_of(p, s) if s.zero else 1) for p in u) for u in units(job.model))
    most = 0.0
    for layer, _ in distinct_layers(job.model, job.precision):
        there = (layer + 1) * _kept(job, layer, tokens) + _again(job, layer, tokens) + _workspace(job, layer, tokens)
        most = max(most, there - sum(gradients[: layer + 1]))
    return most + _gathered(job, 3 if s.zero else 0)


def _head(job: Job, tokens: int) -> float:
    """Of head and loss when backward begins: what they keep, and the gradients of log-probabilities and logits."""
    s, model = job.strategy, job.model
    return kept_by_head(model, job.precision, tokens, s.tp) + 2 * 4 * tokens * model.vocab_size / s.tp


def _workspace(job: Job, layer: int, tokens: int) -> float:
    """Of a layer's activation in backward: the gradients of output and input and temporaries, in FP32.

    SwiGLU's input is two wide and its temporaries are three, GELU's one and two. The head's activations and the
    down-projection's input have been freed by then.
    """
    s, model = job.strategy, job.model
    moe = model.moe if model.is_moe_layer(layer) else None
    rows = padded_rows(model, tokens, s.ep) if moe else tokens
    width = (moe.ffn_hidden_size if moe else model.ffn_hidden_size) // s.tp
    workspace = (6 if model.activation == "swiglu" else 4) * 4 * rows * width
    if model.activation == "swiglu" and job.precision.swiglu_input != "high":
        return workspace
    down = layer_recipes(model, job.precision, layer)["ffn.experts.w_down" if moe else "ffn.w_down"]
    return workspace - kept_of_input(down.weight_gradient, rows, width)


def _gathered(job: Job, zero: int) -> float:
    """Parameters that lie gathered in backward, and gradients not scattered yet: at ZeRO-3 at any time, else first."""
    s = job.strategy
    if zero == 0:
        return 0.0
    weights, sizes = (
        [sum(size for n, size in unit_bytes(unit, s, width).items() if n > 1) for unit in units(job.model)]
        for width in (gathered_width(job), None)
    )
    # An average stage holds 1/pp of each unit in `unit_bytes`; what is gathered at once is one whole layer.
    largest = max(sizes[:-1]) * s.pp
    if zero == 3:  # parameters of this layer and the next, gradients of this one
        behind = 2 if s.recompute == "full" else 1  # the layer behind is being scattered by then
        return weights[-1] + 2 * max(weights[:-1]) * s.pp + behind * largest
    if zero == 1 and job.num_micro_batches > 1:
        return sum(weights) + sum(sizes)
    return sum(weights) + largest


def _in_reduce(job: Job, gradients: float) -> float:
    """The one message in which gradients are averaged over replicas, or over ranks that shard nothing."""
    s = job.strategy
    return gradients if s.replicas > 1 or (s.zero == 0 and s.shards * s.cp > 1) else 0.0
