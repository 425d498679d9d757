"""Predict: a job becomes a Step, in seconds by phase and bytes by pool.

On accelerators by `estimate`, on this machine's CPUs by `local`.
"""

import numpy as np

from greylag.sim.estimate import estimate, shard_traffic
from greylag.sim.local import local_seconds
from greylag.sim.memory import predict_memory
from greylag.sim.operators import Size
from greylag.sim.trust import trust
from greylag.spec import Job, SpecError, Step
from greylag.spec.cluster import Calibration
from greylag.spec.messages import model_parallel_messages
from greylag.spec.own import unknown_settings
from greylag.spec.step import PHASES
from greylag.spec.work import step_flops


def predict(job: Job, calibration: Calibration | None = None) -> Step:
    """The predicted Step of a job. `calibration` is the machine's, for a `local` cluster.

    Raises SpecError if the cluster lacks a figure that it needs, and for settings that would have no effect: those that
    Greylag's own trainer does not know, where it is the one that flies.
    """
    if job.software.activations == "autograd":
        for unknown in unknown_settings(job):
            raise SpecError(f"{job.name}: {unknown}")
    causes: dict[str, float] = {}
    interval: tuple[float, float] | None = None
    remarks: tuple[str, ...] = ()
    if job.cluster.is_local:
        if calibration is None:
            raise SpecError("cluster 'local' is known by calibration alone: run `greylag calibrate`")
        if calibration.num_ranks != job.strategy.world:
            raise SpecError(
                f"the calibration is of {calibration.num_ranks} ranks at once, the job runs {job.strategy.world}: "
                f"run `greylag calibrate --ranks {job.strategy.world}`"
            )
        seconds, wire = local_seconds(job, calibration)
    else:
        found = estimate(job)
        seconds = dict.fromkeys(PHASES, 0.0) | {phase: _one(x) for phase, x in found.phases.items()}
        causes = {cause: _one(x) for cause, x in found.causes.items() if np.any(x)}
        wire = _sent(job)
        trusted = trust(job)
        interval, remarks = trusted.interval(sum(seconds.values())), trusted.remarks
    return Step(
        source="predicted",
        seconds=seconds,
        causes=causes,
        interval=interval,
        remarks=remarks,
        bytes=predict_memory(job),
        wire_bytes=wire,
        tokens=job.tokens,
        flops=step_flops(job),
        peak_flops=peak_flops(job, calibration),
    )


def peak_flops(job: Job, calibration: Calibration | None = None) -> float:
    """FLOP/s of all ranks at best: the data sheet's for the linear layers' dtype, or the best measured GEMM."""
    if job.cluster.is_local:
        return calibration.peak * job.strategy.world if calibration else 0.0
    return (job.cluster.device.peak(job.precision.gemm_dtype) or 0.0) * job.strategy.world


def _one(x: Size) -> float:
    """The value of the only candidate."""
    return float(np.asarray(x).item())


def _sent(job: Job) -> float:
    """Bytes that a rank of an average stage sends in a step."""
    s, m = job.strategy, job.num_micro_batches
    tokens = s.micro_batch * job.sequence // s.cp
    total = m * sum(message.sent(gloo=False) for message in model_parallel_messages(job, tokens)) / s.pp
    for gathered, scattered, ranks, _ in shard_traffic(job):
        total += (gathered * (2 * m if s.zero == 3 else 1) + scattered * (m if s.zero >= 2 else 1)) * (1 - 1 / ranks)
    return float(total)
