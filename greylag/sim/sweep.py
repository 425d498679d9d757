"""Sweep: memory and time of all candidates of a space, in arrays.

The work is nested as its parts repeat: what layers keep is counted once per pipeline degree, what they take once per
way to compute again, and a plan (schedule, virtual stages, layout) adds the account of its stages and its span. Memory
comes first, and only points that fit in some plan are timed. Time and memory grow with the number of candidates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from greylag.sim.candidates import POINT, Bools, Ints, Plan, Points, Recompute, Space, plans, points
from greylag.sim.estimate import estimate, layer_times
from greylag.sim.memory import fullest, predict_memory, room
from greylag.sim.memory_fused import Layers
from greylag.sim.timeline import Floats
from greylag.spec.holdings import Number
from greylag.spec.job import Job
from greylag.spec.precision import Precision

PORTION = 2048
"""Points that are counted at once, so that their arrays stay in the cache."""
Progress = Callable[[int, int], None]
"""Is told how many candidates are done, of how many."""


@dataclass(frozen=True)
class Group:
    """What the candidates of one evaluation share."""

    precision: Precision
    pp: int
    recompute: Recompute
    plan: Plan

    def job(self, job: Job, point: Sequence[int] | Ints) -> Job:
        """One candidate as a job."""
        values: dict[str, Any] = dict(zip(POINT, map(int, point), strict=True))
        if not job.model.moe:
            values |= {"ep": 1, "etp": None}
        elif values["etp"] == values["tp"]:
            values["etp"] = None
        values["sequence_parallel"] = job.strategy.sequence_parallel or values["tp"] == 1
        strategy = replace(job.strategy, pp=self.pp, recompute_layers=None, **values)
        return replace(job, precision=self.precision, strategy=self._planned(strategy))

    def jobs(self, job: Job, some: Points) -> Job:
        """All candidates of some points as one job of arrays."""
        many = some.job(job)
        batch: Number = job.global_batch
        if self.plan.schedule == "dualpipe":  # what it cannot run (`_enough`) is counted here as if it could
            batch = np.maximum(batch, 2 * many.strategy.data_parallel * many.strategy.micro_batch)
        return replace(many, precision=self.precision, strategy=self._planned(many.strategy), global_batch=batch)

    def _planned(self, strategy: Any) -> Any:
        kind, modules = self.recompute
        schedule, vp, layers = self.plan
        return replace(
            strategy, schedule=schedule, vp=vp, stage_layers=layers, recompute=kind, recompute_modules=modules
        )


@dataclass
class Sweep:
    """What a sweep found: of each candidate that fits a row in every column, in the order of evaluation."""

    groups: list[Group] = field(default_factory=list)
    seconds: Floats = field(default_factory=lambda: np.zeros(0))
    bytes: Floats = field(default_factory=lambda: np.zeros(0))
    """Allocated at the peak of the fullest rank."""
    group: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Which of `groups`."""
    columns: Ints = field(default_factory=lambda: np.zeros((len(POINT), 0), np.int64))
    """(len(POINT), rows)."""
    num_tried: int = 0
    num_invalid: int = 0
    num_left_out: int = 0
    """Beyond the limit."""
    least: tuple[float, Group, Ints] | None = None
    """(bytes, group, point) of the candidate that takes the least memory; where something fits, None."""

    def job(self, job: Job, row: int) -> Job:
        """The candidate of a row."""
        group: Group = self.groups[int(self.group[row])]
        return group.job(job, self.columns[:, row])

    @property
    def num_unfit(self) -> int:
        """Candidates tried that do not fit."""
        return self.num_tried - len(self.seconds)


def sweep(
    job: Job, space: Space, precisions: Sequence[Precision], limit: int | None = None, progress: Progress | None = None
) -> Sweep:
    """Evaluate every candidate of a space. With more than `limit` points are thinned out evenly.

    Raises SpecError where the cluster lacks a figure.
    """
    found, parts = Sweep(), []
    units = []
    for pp in space.pp:
        here, (mine, wrong) = points(job, space, pp), plans(job, space, pp)
        ways = len(precisions) * len(space.recompute)
        found.num_invalid += ways * (here.num_invalid * (len(mine) + wrong) + len(here) * wrong)
        if len(here) and mine:
            units.append((here, mine, ways * len(mine)))
    total = sum(len(here) * times for here, _, times in units)
    every = -(-total // limit) if limit else 1
    units = [(here.take(slice(None, None, every)), mine, times) for here, mine, times in units]
    found.num_left_out = total - sum(len(here) * times for here, _, times in units)
    total, done = total - found.num_left_out, 0
    for precision in precisions:
        for here, mine, _ in units:
            for first in range(0, len(here), PORTION):
                portion = here.take(slice(first, first + PORTION))
                for recompute in space.recompute:
                    parts += _evaluate(job, found, precision, recompute, portion, mine)
                    done += len(portion) * len(mine)
                    if progress:
                        progress(done, total)
    if parts:
        found.seconds, found.bytes, found.group = (np.concatenate([p[k] for p in parts]) for k in range(3))
        found.columns = np.concatenate([p[3] for p in parts], axis=1)
        found.least = None
    return found


Part = tuple[Floats, Floats, Ints, Ints]


def _evaluate(
    job: Job, found: Sweep, precision: Precision, recompute: Recompute, here: Points, mine: list[Plan]
) -> list[Part]:
    """The rows of those that fit among some points in all plans of a pipeline degree."""
    groups = [Group(precision, here.pp, recompute, plan) for plan in mine]
    runnable = [_enough(group, here.job(job)) for group in groups]
    able = sum(int(np.count_nonzero(ok)) for ok in runnable)
    found.num_tried += able
    found.num_invalid += len(here) * len(groups) - able
    sizes = _peaks(job, groups, here)
    roomy = [ok & fits(job, size) for ok, size in zip(runnable, sizes, strict=True)]
    kept = np.flatnonzero(np.logical_or.reduce(roomy))
    if not len(kept):
        _least(found, groups, [np.where(ok, size, np.inf) for ok, size in zip(runnable, sizes, strict=True)], here)
        return []
    some, parts = here.take(kept), []
    times = layer_times(groups[0].jobs(job, some))
    for group, size, ok in zip(groups, sizes, roomy, strict=True):
        rows = np.flatnonzero(ok[kept])
        if not len(rows):
            continue
        seconds = np.broadcast_to(estimate(group.jobs(job, some), times).seconds, len(some))
        found.groups.append(group)
        which = np.full(len(rows), len(found.groups) - 1)
        parts.append((seconds[rows], size[kept][rows], which, some.columns[:, rows]))
    return parts


def fits(job: Job, size: Any) -> Any:
    """Whether allocated bytes fit, as `Memory.fits` says."""
    return size <= room(job.cluster.device)


def _enough(group: Group, many: Job) -> Bools:
    """DualPipe feeds both ends: with one micro-batch `spec.schedule` has no order for it."""
    least = 2 if group.plan.schedule == "dualpipe" and group.pp > 1 else 1
    return np.asarray(many.num_micro_batches) >= least


def _peaks(job: Job, groups: list[Group], here: Points) -> list[Floats]:
    """Allocated bytes of the fullest rank, of each point in each group of a precision and a way to compute again."""
    if job.software.activations == "autograd":
        return [
            np.array([sum(predict_memory(group.job(job, point)).values()) for point in here.columns.T])
            for group in groups
        ]
    layers = Layers.of(groups[0].jobs(job, here))
    return [
        np.broadcast_to(fullest(group.jobs(job, here), layers=layers).total, len(here)).astype(float)
        for group in groups
    ]


def _least(found: Sweep, groups: list[Group], sizes: list[Floats], here: Points) -> None:
    """Remember what takes the least memory, as long as nothing fits."""
    for group, size in zip(groups, sizes, strict=True):
        row = int(size.argmin())
        if size[row] < (found.least[0] if found.least else np.inf):
            found.least = (float(size[row]), group, here.columns[:, row])
