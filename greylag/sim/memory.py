"""Memory: peak bytes of the fullest rank, by pool.

At rest a rank holds its parameters, gradients and moments, cut as the ZeRO level says. The peak comes when backward
has just begun: every micro-batch in flight keeps its activations, the last layer's feed-forward is being
differentiated, and parameters and gradients lie gathered for a moment. Fragmentation is not modelled.
"""

from greylag.spec.job import Job
from greylag.spec.work import (
    distinct_layers,
    history_bytes,
    kept_by_head,
    kept_bytes,
    kept_of_input,
    padded_rows,
    rank_parameters,
    unit_bytes,
    units,
)

MOMENTS = 8
"""Bytes of AdamW's two FP32 moments per parameter."""


def predict_memory(job: Job) -> dict[str, float]:
    """Peak bytes of a rank of an average stage by pool (`spec.step.POOLS`)."""
    mine = rank_parameters(job, sharded=job.strategy.zero > 0)
    return {
        "parameters": 4 * mine + history_bytes(job),
        "gradients": 4 * mine,
        "optimizer": MOMENTS * mine,
        "activations": max(_in_backward(job, 4 * mine), _in_reduce(job, 4 * mine)),
    }


def _in_backward(job: Job, gradients: float) -> float:
    """Beyond what rests, at the start of backward; less the `gradients` at rest if they do not exist yet."""
    s = job.strategy
    tokens = s.micro_batch * job.sequence // s.cp
    layers = distinct_layers(job.model)
    kept = sum(times * kept_bytes(job.model, job.precision, layer, tokens, s.tp, s.ep) for layer, times in layers)
    kept *= min(s.pp, job.num_micro_batches) / s.pp
    whole_gradients = s.zero == 1 and s.shards * s.cp > 1
    absent = gradients if whole_gradients or job.num_micro_batches == 1 else 0.0
    return max(0.0, kept + _workspace(job, tokens) + _gathered(job) - absent)


def _workspace(job: Job, tokens: int) -> float:
    """Of the last layer's SwiGLU in backward: the gradients of output and input and three temporaries, in FP32.

    The head's activations and the down-projection's input have been freed by then.
    """
    s, model = job.strategy, job.model
    rows = padded_rows(model, tokens, s.ep) if model.moe else tokens
    width = (model.moe.ffn_hidden_size if model.moe else model.ffn_hidden_size) // s.tp
    head = kept_by_head(model, job.precision, tokens, s.tp) if s.pp == 1 else 0.0
    return max(head, 6 * 4 * rows * width - kept_of_input(job.precision, rows, width))


def _gathered(job: Job) -> float:
    """Parameters that lie gathered at the start of backward, and gradients not scattered yet."""
    s = job.strategy
    if s.zero == 0:
        return 0.0
    sizes = [sum(size for n, size in unit_bytes(unit, s).items() if n > 1) for unit in units(job.model)]
    # An average stage holds 1/pp of each unit in `unit_bytes`; what is gathered at once is one whole layer.
    largest, outer = max(sizes[:-1]) * s.pp, sizes[-1]  # parameters of this layer and the next, gradients of this one
    if s.zero == 3:
        return outer + 3 * largest
    if s.zero == 1 and job.num_micro_batches > 1:
        return 2 * sum(sizes)
    return sum(sizes) + largest


def _in_reduce(job: Job, gradients: float) -> float:
    """The one message in which gradients are averaged over replicas, or over ranks that shard nothing."""
    s = job.strategy
    return gradients if s.replicas > 1 or (s.zero == 0 and s.shards * s.cp > 1) else 0.0
