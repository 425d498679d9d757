"""Local: seconds of a step of Greylag's own trainer on this machine's CPUs, as the sum of what a calibration measured.

Nothing overlaps: the same cores compute and send. What operators cost in a row differs from their sum alone by what the
calibration's reference step tells.
"""

from greylag.sim.measured import Cost
from greylag.sim.timeline import makespan
from greylag.spec import Job
from greylag.spec.calibration import reference_job
from greylag.spec.cluster import Calibration
from greylag.spec.messages import data_parallel_messages, data_parallel_ops, model_parallel_messages
from greylag.spec.schedule import one_f_one_b
from greylag.spec.shards import rank_parameters
from greylag.spec.step import PHASES
from greylag.spec.work import (
    Op,
    attention_flops,
    distinct_layers,
    head_gemm,
    layer_gemms,
    layer_ops,
    outer_ops,
)


def local_seconds(job: Job, calibration: Calibration) -> tuple[dict[str, float], float]:
    """Seconds by phase of a job on this machine, and the bytes that a rank sends."""
    cost = Cost(calibration)
    seconds, wire = _add_up(job, cost)
    return _in_a_row(seconds, calibration, cost), wire


def _in_a_row(seconds: dict[str, float], calibration: Calibration, cost: Cost) -> dict[str, float]:
    """Correct a sum over operators by phase, as the calibration's reference step differs from its own sum."""
    if not calibration.reference:
        return seconds
    alone, _ = _add_up(reference_job(calibration.num_ranks), cost)
    row = calibration.reference
    return {p: s * row[p] / alone[p] if alone[p] else s if p == "reduce" else row[p] for p, s in seconds.items()}


def _add_up(job: Job, cost: Cost) -> tuple[dict[str, float], float]:
    """Seconds by phase as the sum over operators and messages, and the bytes that a rank sends."""
    forward, backward = _micro_batch(job, cost)
    m, pp = job.num_micro_batches, job.strategy.pp
    seconds = dict.fromkeys(PHASES, 0.0)
    seconds["forward"], seconds["backward"] = m * forward, m * backward
    if pp > 1:
        span = makespan(one_f_one_b(pp, m), forward, backward, _transfer(job, cost))
        seconds["other"] += span - seconds["forward"] - seconds["backward"]
    seconds["optimizer"] = cost.op(Op("adamw", "optimizer", rank_parameters(job, sharded=job.strategy.zero > 0)))
    for op in data_parallel_ops(job):
        seconds[op.phase] += cost.op(op)
    tokens = job.strategy.micro_batch * job.sequence // job.strategy.cp
    wire = m * sum(message.sent(gloo=False) for message in model_parallel_messages(job, tokens)) / pp
    for phase, exposed, size in _data_parallel(job, cost):
        seconds[phase] += exposed
        wire += size
    return seconds, wire


def _micro_batch(job: Job, cost: Cost) -> tuple[float, float]:
    """Seconds of forward and backward of one micro-batch on one (average) stage.

    Recompute runs the layers' forward in backward once more; that of their messages is in `spec.messages`.
    """
    s, model = job.strategy, job.model
    tokens = s.micro_batch * job.sequence // s.cp
    forward = backward = 0.0
    for layer, count in distinct_layers(model, job.precision):
        f, b = _layer(job, cost, layer, tokens)
        forward, backward = forward + count * f, backward + count * (b + f if s.recompute == "full" else b)
    head = cost.gemm(head_gemm(model, tokens, s.tp))
    forward, backward = forward + head, backward + 2 * head
    for op in outer_ops(model, tokens):
        if op.phase == "forward":
            forward += cost.op(op)
        else:
            backward += cost.op(op)
    for message in model_parallel_messages(job, tokens):
        each = message.times * cost.message(message) if message.phase != "other" else 0.0
        if message.phase == "forward":
            forward += each
        else:
            backward += each
    return forward / s.pp, backward / s.pp


def _layer(job: Job, cost: Cost, layer: int, tokens: int) -> tuple[float, float]:
    s, model = job.strategy, job.model
    core = attention_flops(model, job.sequence, tokens, s.tp)
    forward, backward = cost.attention(core, False), cost.attention(core, True)
    for gemm in layer_gemms(model, layer, tokens, s.tp, s.ep):
        once = cost.gemm(gemm)
        forward, backward = forward + once, backward + 2 * once
    for op in layer_ops(model, job.precision, layer, tokens, s.tp, s.ep):
        if op.phase == "forward":
            forward += cost.op(op)
        else:
            backward += cost.op(op)
    return forward, backward


def _transfer(job: Job, cost: Cost) -> float:
    """Seconds to hand a micro-batch's activations to the next stage."""
    tokens = job.strategy.micro_batch * job.sequence // job.strategy.cp
    return cost.message(next(m for m in model_parallel_messages(job, tokens) if m.collective == "p2p"))


def _data_parallel(job: Job, cost: Cost) -> list[tuple[str, float, float]]:
    """(phase, seconds, bytes sent) by phase, of the collectives over parameters and gradients."""
    total: dict[str, tuple[float, float]] = {}
    for message in data_parallel_messages(job):
        seconds, size = total.get(message.phase, (0.0, 0.0))
        total[message.phase] = (seconds + message.times * cost.message(message), size + message.sent(gloo=True))
    return [(phase, *entry) for phase, entry in total.items()]
