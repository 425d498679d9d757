"""Predict: a job becomes a Step, in seconds by phase and bytes by pool.

What is not modelled yet: overlap of tensor, context and expert communication with compute, uneven stages, expert
imbalance. Data-parallel communication hides behind compute on an accelerator and is fully exposed on CPUs, where the
same cores do both.
"""

from greylag.sim.cost import Cost
from greylag.sim.memory import predict_memory
from greylag.sim.timeline import makespan
from greylag.spec import Job, SpecError, Step
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
    """Seconds of forward and backward of one micro-batch on one (average) stage.

    Recompute runs the layers' forward in backward once more; that of their messages is in `spec.messages`.
    """
    s, model = job.strategy, job.model
    tokens = s.micro_batch * job.sequence // s.cp
    forward = backward = 0.0
    for layer, count in distinct_layers(model, job.precision):
        f, b = _layer(job, cost, layer, tokens)
        forward, backward = forward + count * f, backward + count * (b + f if s.recompute == "full" else b)
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
    s, model = job.strategy, job.model
    core = attention_flops(model, job.sequence, tokens, s.tp)
    forward, backward = cost.attention(core, tokens, False), cost.attention(core, tokens, True)
    for gemm in layer_gemms(model, layer, tokens, s.tp, s.ep):
        recipes = job.precision.gemms(gemm.name.removesuffix(".weight"), model.num_layers)
        dtypes = ["fp32"] * 3 if gemm.role == "router" else [recipe.gemm_dtype for recipe in recipes]
        seconds = [cost.gemm(gemm, dtype) for dtype in dtypes]
        forward, backward = forward + seconds[0], backward + seconds[1] + seconds[2]
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
