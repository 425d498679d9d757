"""Memory: peak bytes of each pipeline stage's ranks, by component, and the moment at which the peak comes.

`predict_memory` is what a Step carries. `memory` is the whole account for frameworks with fused layers
(`memory_fused`): what rests on a rank, and what stands beside it at each of the moments that can be the peak. Every
degree of the strategy but pp and vp, the sequence and the global batch may be numpy arrays, one value a candidate.
Greylag's own layers, whose account is tested against the trainer, are `memory_autograd`'s.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from greylag.sim.memory_autograd import autograd_memory
from greylag.sim.memory_fused import Layers, Stage, count_kinds, fused_stage
from greylag.spec.cluster import Device
from greylag.spec.holdings import Number, chunks
from greylag.spec.job import Job
from greylag.spec.kept_fused import layer_kinds
from greylag.spec.model import Model
from greylag.spec.precision import Precision
from greylag.spec.step import POOLS
from greylag.spec.strategy import Strategy

FRAGMENTATION = 0.045
"""Bytes reserved beyond those allocated, as a share. Fitted: the middle of the stages of SimuMax's B200 runs, which
range from 0.02 to 0.07 (MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.json)."""
CONTEXT = 1.0 * 2**30
"""Bytes that CUDA's context, its kernels and NCCL's channels take outside the allocator: an allowance for about 0.5 GiB
of context and 4 MiB a channel and peer (NVIDIA/nccl, NCCL_BUFFSIZE). No row measures it, and no total holds it."""
POOL_OF = {
    "weights": "parameters",
    "FP8 weights": "parameters",
    "gradients": "gradients",
    "master weights": "optimizer",
    "moments": "optimizer",
}
"""Pool (`spec.step.POOLS`) of what rests; all else comes and goes within a step."""


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a rank of each pipeline stage that was asked for, first stage first."""

    stages: tuple[Stage, ...]

    def stage(self, rank: int) -> Stage:
        """Of the ranks at place `rank` of the pipeline; negative from the end."""
        return self.stages[rank]

    @property
    def peak_stage(self) -> Number:
        """Place of the fullest stage in `stages`."""
        return np.argmax(np.broadcast_arrays(*(s.total for s in self.stages)), axis=0)

    @property
    def total(self) -> Number:
        """Allocated bytes of the fullest stage's ranks at their peak."""
        return np.maximum.reduce(np.broadcast_arrays(*(s.total for s in self.stages)))

    @property
    def reserved(self) -> Number:
        """Bytes that the allocator holds by then: what is allocated, and what lies between (`FRAGMENTATION`)."""
        return self.total * (1 + FRAGMENTATION)

    @property
    def components(self) -> dict[str, list[Number]]:
        """By component, bytes on each stage at its peak."""
        by_stage = [stage.components for stage in self.stages]
        names = dict.fromkeys(name for components in by_stage for name in components)
        return {name: [components.get(name, 0.0) for components in by_stage] for name in names}

    def fits(self, device: Device) -> Number:
        """Whether the fullest stage fits."""
        return self.total <= room(device)

    def __str__(self) -> str:
        stage = self.stages[int(self.peak_stage)]
        lines = [f"stage {int(self.peak_stage)}, {stage.moment}: {float(stage.total) / 2**30:.2f} GiB allocated"]
        return "\n".join(lines + [f"  {size / 2**30:8.3f} GiB  {name}" for name, size in breakdown(stage)])


def room(device: Device) -> float:
    """Bytes that may be allocated: without what is lost between them and what lies outside the allocator."""
    return (device.memory - CONTEXT) / (1 + FRAGMENTATION)


def breakdown(stage: Stage) -> list[tuple[str, float]]:
    """(component, bytes) of one candidate's stage at its peak, largest first, without those that are nothing."""
    sizes = [(name, float(size)) for name, size in stage.components.items()]
    return sorted(((name, size) for name, size in sizes if size), key=lambda item: -item[1])


def memory(job: Job) -> Memory:
    """The account of every stage of a job whose layers are fused, as far as its software says."""
    layers = Layers.of(job)
    return Memory(tuple(fused_stage(layers, rank) for rank in range(job.strategy.pp)))


def fullest(job: Job, layers: Layers | None = None) -> Memory:
    """As `memory`, but only of stages that can be the fullest. This is what a search asks for.

    Of ranks with the same layers the earliest stands for all, or it and the last one. `layers` spares
    counting what `Layers.of` gives for the same job in another schedule, layout or kind of recompute.
    """
    s = job.strategy
    layers = replace(layers, job=job) if layers else Layers.of(job)
    plan = Strategy(pp=s.pp, vp=s.vp, schedule=s.schedule, stage_layers=s.stage_layers)
    return Memory(tuple(fused_stage(layers, rank) for rank in _distinct(job.model, job.precision, plan)))


@lru_cache(maxsize=4096)
def _distinct(model: Model, precision: Precision, plan: Strategy) -> tuple[int, ...]:
    """The first of the ranks with the same kinds of layers, and of those with several stages the last as well.

    The last holds more of the stages that the first holds few of (folded and bidirectional schedules).
    """
    kinds = layer_kinds(model, precision)
    number = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
    first: dict[object, int] = {}
    last: dict[object, int] = {}
    for rank in range(plan.pp):
        held = chunks(model, plan, rank)
        counts = [
            sorted((number[kind], count) for kind, count in count_kinds(model, precision, c).items()) for c in held
        ]
        key = tuple((tuple(n), c.has_embedding, c.has_head) for n, c in zip(counts, held, strict=True))
        first.setdefault(key, rank)
        last[key] = rank if len(held) > 1 else first[key]
    return tuple(sorted({*first.values(), *last.values()}))


def predict_memory(job: Job) -> dict[str, float]:
    """Peak bytes by pool (`spec.step.POOLS`): of a rank of the fullest stage, of an average one for Greylag's own."""
    if job.software.activations == "autograd":
        return autograd_memory(job)
    account = fullest(job)
    pools = dict.fromkeys(POOLS, 0.0)
    for name, size in account.stages[int(account.peak_stage)].components.items():
        pools[POOL_OF.get(name, "activations")] += float(size)
    return pools
