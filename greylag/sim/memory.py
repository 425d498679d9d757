"""Memory: peak bytes of the fullest rank, by pool.

At rest a rank holds its parameters, gradients and moments, cut as the ZeRO level says. Within a step come the
activations kept by the micro-batches in flight, the parameters and gradients that are gathered whole for a moment,
and the workspace of the widest operator. Fragmentation is not modelled.
"""

from greylag.spec.job import Job
from greylag.spec.precision import BYTES
from greylag.spec.work import distinct_layers, kept_by_head, kept_bytes, padded_rows, rank_parameters, unit_bytes, units

MOMENTS = 8
"""Bytes of AdamW's two FP32 moments per parameter."""


def predict_memory(job: Job) -> dict[str, float]:
    """Peak bytes of the first pipeline stage's rank by pool (`spec.step.POOLS`)."""
    s, cpu = job.strategy, job.cluster.device.kind == "cpu"
    whole, mine = rank_parameters(job, sharded=False), rank_parameters(job)
    if s.zero == 0:
        mine = whole
    width = 4 if cpu else BYTES[job.precision.high]
    gathered = _gathered(job, width)
    gradients = 4 * (mine if s.shards * s.cp > 1 or s.zero == 0 else whole)
    return {
        "parameters": 4 * mine,
        "gradients": gradients,
        "optimizer": MOMENTS * mine,
        "activations": _activations(job) + gathered + _workspace(job) - _not_yet(job, gradients),
    }


def _activations(job: Job) -> float:
    """Kept for backward by all micro-batches in flight, at the end of a forward."""
    s, model = job.strategy, job.model
    tokens = s.micro_batch * job.sequence // s.cp
    layers = sum(
        count * kept_bytes(model, job.precision, layer, tokens, s.tp, s.ep) for layer, count in distinct_layers(model)
    )
    in_flight = min(s.pp, job.num_micro_batches)
    return layers / s.pp * in_flight + (kept_by_head(model, job.precision, tokens, s.tp) if s.pp == 1 else 0.0)


def _gathered(job: Job, width: int) -> float:
    """Parameters gathered whole, and their gradients before they are scattered."""
    s = job.strategy
    sizes = [sum(size for n, size in unit_bytes(unit, s).items() if n > 1) for unit in units(job.model)]
    if s.zero == 0:
        return 0.0
    # An average stage holds 1/pp of each unit in `unit_bytes`; what is gathered at once is one whole layer.
    largest, outer = max(sizes[:-1]) * s.pp, sizes[-1]
    share = width / 4
    if s.zero == 3:
        return share * (outer + 2 * largest) + 2 * largest
    return share * sum(sizes) + (sum(sizes) if s.zero == 1 else 2 * largest)


def _workspace(job: Job) -> float:
    """FP32 temporaries of the widest feed-forward layer in backward: gradients and dequantized operands."""
    s, model = job.strategy, job.model
    tokens = s.micro_batch * job.sequence // s.cp
    if model.moe:
        return 4.0 * 4 * padded_rows(model, tokens, s.ep) * 2 * model.moe.ffn_hidden_size / s.tp
    return 4.0 * 4 * tokens * 2 * model.ffn_hidden_size / s.tp


def _not_yet(job: Job, gradients: float) -> float:
    """Gradients at rest that do not exist yet at the peak."""
    return 0.0
