"""Pipeline: a job's own schedule, timed action by action, with the bytes that its stages keep of a micro-batch.

`estimate` gives the seconds of a step in one go; this is the exact order behind them, for a trace or a picture. It ends
where the last backward ends: the reduction of gradients and the optimizer come after it.
"""

from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from greylag.sim.estimate import estimate
from greylag.sim.fill import is_placed, placed
from greylag.sim.layer import PASSES
from greylag.sim.memory import memory, predict_memory
from greylag.sim.memory_fused import Layers
from greylag.sim.timeline import Floats, Timeline, graph, graph_of, simulate
from greylag.spec.holdings import chunks, stage_sizes
from greylag.spec.job import Job
from greylag.spec.kept import kept_bytes
from greylag.spec.precision import BYTES
from greylag.spec.schedule import rank_of
from greylag.spec.step import Step


@dataclass(frozen=True)
class Pipeline:
    """A timed pipeline."""

    timeline: Timeline
    activation: Floats
    """Bytes that each stage keeps of a micro-batch from its F to the end of its backward."""
    resting: Floats
    """Bytes that the ranks at each place of the pipeline hold throughout."""


def pipeline(job: Job, step: Step | None = None) -> Pipeline:
    """The pipeline of a job: its ranks' actions in seconds, and their bytes.

    On accelerators by `estimate`. On a `local` cluster `step` is the job's prediction, whose seconds are spread evenly
    over stages and micro-batches. Raises SpecError where `estimate` or the schedule does.
    """
    s, m = job.strategy, job.num_micro_batches
    if job.cluster.is_local:
        assert step
        forward, backward = (np.full(s.num_stages, step.seconds[p] / m / s.vp) for p in ("forward", "backward"))
        times = (forward, backward / 2, backward / 2, 0.0)
    else:
        found = estimate(job)
        forward, dgrad, wgrad = (np.asarray(found.stages[p], float).reshape(-1) for p in PASSES)
        times = (forward, dgrad, wgrad, float(found.transfer.item()))
    plan = graph_of(placed(job, *times)) if is_placed(job) else graph(s.schedule, s.pp, s.vp, m)
    timeline = simulate(plan, *times)
    if job.software.activations == "autograd":
        pools = predict_memory(job)
        rest = sum(size for pool, size in pools.items() if pool != "activations")
        return Pipeline(timeline, _autograd(job), np.full(s.pp, rest))
    rests = [float(sum(stage.rests.values())) for stage in memory(job).stages]
    return Pipeline(timeline, _fused(job), np.array(rests))


def _autograd(job: Job) -> Floats:
    """Bytes of a micro-batch by stage, of Greylag's own layers."""
    s, model, first = job.strategy, job.model, 0
    tokens = s.micro_batch * job.sequence // s.cp
    kept = []
    for size in stage_sizes(model, s):
        layers = range(first, first + size)
        first += size
        if s.recompute == "full":
            kept.append(size * tokens * model.hidden_size * BYTES[job.precision.high] / s.tp)
        else:
            kept.append(sum(kept_bytes(model, job.precision, layer, tokens, s.tp, s.ep) for layer in layers))
    return np.array(kept, float)


def _fused(job: Job) -> Floats:
    """Bytes of a micro-batch by stage, of fused layers.

    They are those of the same job with a single micro-batch (dualpipe: one each way). What the stages of one rank keep
    together is split by their layers.
    """
    s, sides = job.strategy, 2 if job.strategy.schedule == "dualpipe" else 1
    one = replace(job, global_batch=sides * s.data_parallel * s.micro_batch)
    layers = Layers.of(one)
    names = {term.name for terms in layers.terms.values() for term in terms}
    account, sizes = memory(one), stage_sizes(job.model, s)
    kept = np.zeros(s.num_stages)
    for rank in range(s.pp):
        beside = next(sizes for name, sizes in account.stages[rank].moments.items() if name != "optimizer")
        total = float(sum(size for name, size in beside.items() if name in names))
        of_rank = sum(len(chunk.layers) for chunk in chunks(job.model, s, rank))
        for stage in range(s.num_stages):
            if rank_of(s.schedule, s.pp, s.vp, stage) == rank:
                kept[stage] = total * sizes[stage] / max(1, of_rank)
    return kept
