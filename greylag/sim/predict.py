"""Predict: a job becomes a Step, in seconds by phase and bytes by pool.

What is not modelled yet: overlap of tensor, context and expert communication with compute, uneven stages, expert
imbalance, recompute. Data-parallel communication hides behind compute on an accelerator and is fully exposed on CPUs,
where the same cores do both.
"""

from greylag.sim.cost import Cost
from greylag.sim.memory import predict_memory
from greylag.sim.timeline import makespan
from greylag.spec import Job, SpecError, Step
from greylag.spec.calibration import reference_job
from greylag.spec.cluster import Calibration
from greylag.spec.schedule import one_f_one_b
from greylag.spec.step import PHASES
from greylag.spec.work import (
    Op,
    attention_flops,
    data_parallel_messages,
    data_parallel_ops,
    distinct_layers,
    head_gemm,
    layer_gemms,
    layer_ops,
    model_parallel_messages,
    outer_ops,
    rank_parameters,
    step_flops,
)


def predict(job: Job, calibration: Calibration | None = None) -> Step:
    """The predicted Step of a job. `calibration` is the machine's, for a `local` cluster.

    Raises SpecError if the cluster lacks a figure that it needs.
    """
    if job.cluster.is_local and calibration is None:
        raise SpecError("cluster 'local' is known by calibration alone: run `greylag calibrate`")
    if job.cluster.is_local and calibration and calibration.num_ranks != job.strategy.world:
        raise SpecError(
            f"the calibration is of {calibration.num_ranks} ranks at once, the job runs {job.strategy.world}: "
            f"run `greylag calibrate --ranks {job.strategy.world}`"
        )
    cost = Cost(job.cluster, job.precision.high, calibration if job.cluster.is_local else None)
    seconds, wire = _add_up(job, cost)
    if job.cluster.is_local and calibration:
        seconds = _in_a_row(seconds, calibration, cost)
    return Step(
        source="predicted",
        seconds=seconds,
        bytes=predict_memory(job),
        wire_bytes=wire,
        tokens=job.tokens,
        flops=step_flops(job),
        peak_flops=peak_flops(job, calibration),
    )


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
    for phase, exposed, size in _data_parallel(job, cost, seconds):
        seconds[phase] += exposed
        wire += size
    return seconds, wire


def peak_flops(job: Job, calibration: Calibration | None = None) -> float:
    """FLOP/s of all ranks at best: the data sheet's for the linear layers' dtype, or the best measured GEMM."""
    if job.cluster.is_local:
        return calibration.peak * job.strategy.world if calibration else 0.0
    return (job.cluster.device.peak(job.precision.gemm_dtype) or 0.0) * job.strategy.world


def _micro_batch(job: Job, cost: Cost) -> tuple[float, float]:
    """Seconds of forward and backward of one micro-batch on one (average) stage."""
    s, model = job.strategy, job.model
    tokens = s.micro_batch * job.sequence // s.cp
    forward = backward = 0.0
    for layer, count in distinct_layers(model):
        f, b = _layer(job, cost, layer, tokens)
        forward, backward = forward + count * f, backward + count * b
    head = cost.gemm(head_gemm(model, tokens, s.tp), job.precision.high)
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
    s, model, dtype = job.strategy, job.model, job.precision.gemm_dtype
    gemms = layer_gemms(model, layer, tokens, s.tp, s.ep)
    linear = sum(cost.gemm(g, "fp32" if g.role == "router" else dtype) for g in gemms)
    core = attention_flops(model, job.sequence, tokens, s.tp)
    forward, backward = linear + cost.attention(core, tokens, False), 2 * linear + cost.attention(core, tokens, True)
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


def _data_parallel(job: Job, cost: Cost, seconds: dict[str, float]) -> list[tuple[str, float, float]]:
    """(phase, exposed seconds, bytes sent) by phase, of the collectives over parameters and gradients."""
    hides = job.cluster.device.kind != "cpu"
    total: dict[str, list[float]] = {}
    for message in data_parallel_messages(job):
        each = message.times * cost.message(message)
        entry = total.setdefault(message.phase, [0.0, 0.0])
        entry[0] += each
        entry[1] += message.sent(gloo=not hides)
    return [(p, max(0.0, t - seconds[p]) if hides and p != "reduce" else t, size) for p, (t, size) in total.items()]
