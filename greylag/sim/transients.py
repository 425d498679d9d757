"""Transients: what the head, and a layer's forward and backward, make for a while beyond what is kept.

Each moment is the balance, at one operator of backward, of the gradients that live against the kept tensors that are
already freed, when the last layer of a stage is differentiated and every other still keeps its own. Derived from the
operators' order in Megatron-Core (transformer/mlp.py, moe/token_dispatcher.py, tensor_parallel/layers.py); nothing is
fitted. Tokens and degrees may be numpy arrays.
"""

from greylag.spec.holdings import Number
from greylag.spec.job import Job
from greylag.spec.kept_fused import Layer, Term, expert_rows
from greylag.spec.precision import BYTES


def _whole(job: Job, tokens: Number) -> Number:
    """Tokens of a gathered (or not yet scattered) sequence; none without tensor parallelism."""
    return tokens * (job.strategy.tp > 1)


def _loss_widths(job: Job) -> tuple[Number, Number]:
    """Bytes per logit at the loss's own peak, and of what is kept from its forward to its backward."""
    b, is_cut, loss = BYTES[job.precision.high], job.strategy.tp > 1, job.software.loss
    if loss == "torch":
        return 12.0 + 4.0 * is_cut, 4.0
    widths = {"in-place": (b, b), "parallel": (b + 4, 4.0), "compiled-parallel": (b + 8, 4.0), "compiled": (2 * b, b)}
    return widths[loss]


def head_moments(job: Job, tokens: Number) -> dict[str, dict[str, Number]]:
    """When the loss is taken or differentiated, and when its gradient goes through the head.

    The final norm keeps input and output; logits are in the high precision. Each multi-token prediction module has
    logits of its own, which wait while the others' are at work.
    """
    s, model, b = job.strategy, job.model, BYTES[job.precision.high]
    heads, outside, D = 1 + model.num_mtp_layers, tokens / s.sequence_cut, job.model.hidden_size
    logits, norm = tokens * model.vocab_size / s.tp, heads * 2 * outside * D * b
    at_loss, waits = _loss_widths(job)
    waiting = (heads - 1) * logits * waits
    soft, weight = job.software, 0.0
    if soft.weight_gradients == "autograd":
        weight = model.vocab_size * D / s.tp * BYTES[soft.parameters]
    behind = (outside + _whole(job, tokens) * 2) * D * b
    return {
        "loss": {"head norm": norm, "logits and loss": at_loss * logits + waiting},
        "backward of head": {
            "head norm": norm,
            "logits and loss": b * logits + waiting,
            "head gradients": behind + weight,
        },
    }


def forward_moment(job: Job, tokens: Number) -> dict[str, Number]:
    """Behind the experts, when their outputs have come back. With an all-to-all of choices the layer still holds the
    tokens as they were sent and as they arrived, beside the outputs in their order and as they came back; DeepEP's
    kernels order tokens as they send them (Megatron-Core, transformer/moe/moe_layer.py and token_dispatcher.py)."""
    s, copies = job.strategy, {"choices": 4, "nodes": 2}[job.software.dispatch]
    rows, width = expert_rows(job.model, tokens / s.tp, s), job.model.hidden_size * BYTES[job.precision.high]
    return {"tokens on the wire": copies * rows * width, "layer output": tokens / s.sequence_cut * width}


def backward_moments(job: Job, kind: Layer, terms: list[Term], tokens: Number) -> dict[str, dict[str, Number]]:
    """In a layer's backward: at the feed-forward layer's second projection, at its nonlinearity, and where an unfused
    attention holds the gradients of its probabilities, the feed-forward layer's share being freed by then."""
    s, model, b, D = job.strategy, job.model, BYTES[job.precision.high], job.model.hidden_size
    residual = tokens / s.sequence_cut * D * b
    if kind.is_moe:
        assert model.moe
        rows = expert_rows(model, tokens / s.tp, s)
        inner, outer = rows * model.moe.ffn_hidden_size / s.expert_tp * b, rows * D * b
    else:
        inner, outer = tokens * model.ffn_hidden_size / s.tp * b, _whole(job, tokens) * D * b
    wide = 2 if model.activation == "swiglu" else 1
    moments: dict[str, dict[str, Number]] = {
        "second projection": {"residual gradient": residual, "layer gradients": outer + inner},
        "activation": {"residual gradient": residual, "layer gradients": wide * inner},
    }
    if job.software.attention == "unfused":
        scores = tokens * job.sequence * model.num_heads / s.tp * b
        freed = sum(t.bytes for t in terms if t.module in ("activation", "mlp", "moe"))
        moments["attention"] = {"residual gradient": residual, "layer gradients": 2 * scores, "freed by then": -freed}
    return moments
