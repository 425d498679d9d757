"""Planning: the plan of a job, of counts and laws of `plan` and the strategies that the simulator's search finds.

It stands beside `cli`, like `simulation` and `calibration`; what `greylag plan` asks without a job is `questions`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from greylag.plan.checkpoint import best_interval
from greylag.plan.demand import (
    Demand,
    Estimate,
    Training,
    between,
    count_training,
    demand,
    predicted_utilization,
    stated_utilization,
)
from greylag.plan.failures import Failures
from greylag.plan.goodput import Calendar, Goodput, calendar, enough_spares, goodput
from greylag.plan.law import (
    Answer,
    Curve,
    Law,
    Optimum,
    answer,
    cost,
    fixed_compute,
    law_named,
    optimum,
)
from greylag.plan.law_runs import LawName, counted, job_precision
from greylag.plan.recovery import POLICIES, Fleet, Policy, Recovery
from greylag.report.account import Account, account
from greylag.report.budget import at, together
from greylag.sim import predict
from greylag.sim.memory import CONTEXT, FRAGMENTATION, memory
from greylag.sim.search import search
from greylag.spec.cluster import Cluster, Device
from greylag.spec.error import SpecError
from greylag.spec.job import Job
from greylag.spec.load import load_preset
from greylag.spec.step import Step

LIMIT = 20_000
"""Strategies that a search for a utilization tries at most, thinned out evenly."""
SIZES = (0.25, 0.5, 2, 4, 8)
"""Times the job's devices at which its page tells the days too, where a strategy fits."""
BASIS = "utilization is the simulator's, of the fastest strategy at each size; nine in ten runs like it lie between"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Flown:
    """The fastest strategy of a job at one size, and its prediction."""

    job: Job
    step: Step
    runners_up: tuple[tuple[str, float], ...]
    """In words, and the seconds that each loses to it."""

    @property
    def utilization(self) -> tuple[float, float, float]:
        """Low, middle and high share of the peak."""
        value = self.step.utilization or 0.0
        fast, slow = self.step.interval or (self.step.total_seconds,) * 2
        return value * self.step.total_seconds / slow, value, min(1.0, value * self.step.total_seconds / fast)


def resized(cluster: Cluster, devices: int) -> Cluster:
    """The cluster with so many devices. Raises SpecError if they are no whole number of its nodes."""
    nodes, rest = divmod(devices, cluster.devices_per_node)
    if rest or not nodes:
        raise SpecError(f"{devices:,} devices are no whole number of nodes of {cluster.devices_per_node}; change them")
    return replace(cluster, name=f"{cluster.name} at {devices:,}", num_nodes=nodes)


def fastest(job: Job, devices: int, progress: Progress = lambda _: None) -> Flown | None:
    """The fastest strategy that fits on so many devices of the job's kind; None where none does."""
    if job.cluster.is_local:
        raise SpecError(f"{job.name}: runs on this machine's CPUs; a plan needs a cluster of accelerators")
    progress(f"searching strategies for {devices:,} devices")
    here = replace(job, cluster=resized(job.cluster, devices)) if devices != job.cluster.num_devices else job
    try:
        found = search(here, limit=LIMIT)
    except SpecError:
        return None
    if not found.best:
        return None
    best, *others = found.best
    losing = tuple((other.job.strategy.brief, other.seconds - best.seconds) for other in others)
    return Flown(best.job, predict(best.job), losing)


def predicted(job: Job, sizes: Sequence[int], progress: Progress = lambda _: None) -> tuple[list[int], Estimate]:
    """The utilization that the simulator's search predicts, at the powers of two around `sizes` where a strategy fits.

    Raises SpecError if it finds a strategy at none of them, or not around all sizes.
    """
    around = sorted({_below(size) for size in sizes} | {_above(size) for size in sizes})
    flown = {size: fastest(job, size, progress) for size in around}
    known = [size for size, found in flown.items() if found]
    lost = [size for size in sizes if not {_below(size), _above(size)} <= set(known)]
    if lost:
        raise SpecError(
            f"{job.name}: no strategy fits on {lost[0]:,} devices with a global_batch of {job.global_batch:,}; raise "
            "it, leave that size out of --devices, or state --utilization"
        )
    return known, _utilization([found for found in flown.values() if found])


def _below(size: int) -> int:
    """The power of two at or below."""
    return 1 << (size.bit_length() - 1)


def _above(size: int) -> int:
    """The power of two at or above."""
    return 1 << (size - 1).bit_length()


def _utilization(flown: Sequence[Flown]) -> Estimate:
    """With its interval, at the sizes of several flights."""
    low, value, high = np.array([found.utilization for found in flown]).T
    said = dict.fromkeys(remark for found in flown for remark in found.step.remarks)
    return predicted_utilization(value, low, high, "; ".join([BASIS, *said]))


def days_by_size(
    job: Job,
    training: Training,
    sizes: Sequence[int],
    *,
    watts: float | None = None,
    pue: float | None = None,
    price: float | None = None,
    progress: Progress = lambda _: None,
) -> Demand:
    """Days of a job's training on clusters of several sizes, at the utilization that the search predicts for each."""
    known, utilization = predicted(job, sizes, progress)
    used, device = between(sizes, known, utilization), job.cluster.device
    return _demand(training, sizes, device, dtype_of(job), used, watts=watts, pue=pue, price=price)


def _demand(
    training: Training, sizes: Sequence[int], device: Device, dtype: str, used: Estimate, **paid: float | None
) -> Demand:
    """Of so many devices of one kind; `paid` are the power, the site and the price of `demand`."""
    labels = [device.name] * len(sizes)
    return demand(training, sizes, peak_of(device, dtype), used, dtype=dtype, labels=labels, **paid)


def peak_of(device: Device, dtype: str) -> float:
    """FLOP/s of a device in its own units. Raises SpecError if it has none for the dtype, or they are not public."""
    if dtype not in device.peak_tflops:
        known = ", ".join(device.peak_tflops) or "none is public"
        raise SpecError(f"{device.name}: no {dtype} peak; choose another --dtype ({known}), device or cluster")
    return device.peak_tflops[dtype] * 1e12


def dtype_of(job: Job) -> str:
    """Whose peak a job's utilization is of: its GEMMs', or the one at which its device runs them."""
    device, dtype = job.cluster.device, job.precision.gemm_dtype
    return dtype if dtype in device.peak_tflops else "bf16"


@dataclass(frozen=True)
class Practice:
    """Failures, and how a job meets them."""

    failures: Failures
    fleet: Fleet
    recovery: Recovery
    is_best: bool = False
    """Whether each policy saves as often as is best for it."""

    def by_policy(self, policies: Sequence[Policy] = POLICIES) -> list[Goodput]:
        """What each policy gives; one that the fleet cannot follow is left out where there are others.

        Raises SpecError if none can be followed.
        """
        found: list[Goodput] = []
        faults: list[SpecError] = []
        for policy in policies:
            try:
                recovery = self.recovery
                if self.is_best:
                    recovery = replace(recovery, interval=best_interval(self.failures, self.fleet, recovery, policy))
                found.append(goodput(self.failures, self.fleet, recovery, policy))
            except SpecError as fault:
                faults.append(fault)
        if not found:
            raise faults[0]
        return found


def practice_of(job: Job, failures: Failures) -> Practice:
    """How a job meets failures: by the default times, with spares enough, saving every ten minutes.

    A replica's nodes are what its ranks fill.
    """
    per_node, s = job.cluster.devices_per_node, job.strategy
    replica = max(1, -(-s.pp * s.tp * s.cp // per_node))
    fleet = Fleet(num_devices=job.cluster.num_devices, devices_per_node=per_node, replica_nodes=replica)
    recovery = Recovery()
    return Practice(failures, replace(fleet, spares=enough_spares(failures, fleet, recovery)), recovery)


@dataclass(frozen=True)
class Plan:
    """All that the page of a plan says. Calendars take the days of computing as exact; `dated` does not."""

    flown: Flown
    held: Account
    demand: Demand
    answers: tuple[Answer, ...]
    optima: tuple[Optimum, ...]
    curves: tuple[Curve, ...]
    goodputs: list[Goodput]
    calendars: list[Calendar]
    remarks: tuple[str, ...]

    @property
    def dated(self) -> list[Calendar]:
        """The calendars with the interval of computing and that of failures, end to end: no narrower than either."""
        computing = at(self.demand.days)
        return [replace(c, interval=together(c.interval, computing)) for c in self.calendars]


def plan_of(
    job: Job,
    tokens: float,
    failures: Failures,
    *,
    watts: float | None = None,
    pue: float | None = None,
    price: float | None = None,
    progress: Progress = lambda _: None,
) -> Plan:
    """The plan of a job: its fastest strategy, its days, its precision and what failures make of it.

    Raises SpecError where no strategy fits, or a figure of the cluster is missing.
    """
    devices = job.cluster.num_devices
    flown = fastest(job, devices, progress)
    if flown is None:
        raise SpecError(
            f"{job.name}: no strategy fits on {devices:,} devices; `greylag search` says what would make one"
        )
    training = count_training(job.model, job.sequence, tokens)
    beside = [int(devices * times) for times in SIZES if devices * times % job.cluster.devices_per_node == 0]
    others = [(size, fastest(job, size, progress)) for size in beside]
    fitting = [(devices, flown), *((size, found) for size, found in others if found)]
    sizes, used = [size for size, _ in fitting], _utilization([found for _, found in fitting])
    asked = _demand(training, sizes, job.cluster.device, dtype_of(job), used, watts=watts, pue=pue, price=price)
    useful = float(np.asarray(asked.days.value)[0])
    goodputs = practice_of(flown.job, failures).by_policy()
    answers, optima, curves, remarks = _precision(job, tokens)
    stages = memory(flown.job).stages if flown.job.software.activations == "fused" else ()
    return Plan(
        flown=flown,
        held=account(flown.job, flown.step.bytes, stages, FRAGMENTATION, CONTEXT),
        demand=asked,
        answers=answers,
        optima=optima,
        curves=curves,
        goodputs=goodputs,
        calendars=[calendar(result, useful, price) for result in goodputs],
        remarks=remarks,
    )


def _precision(
    job: Job, tokens: float
) -> tuple[tuple[Answer, ...], tuple[Optimum, ...], tuple[Curve, ...], tuple[str, ...]]:
    """What each law says of the job's precision; a law that cannot say it is named instead."""
    size, answers, optima, curves, remarks = counted(job.model), [], [], [], []
    names: tuple[LawName, ...] = ("kumar", "sun")
    for name in names:
        law: Law = law_named(name)
        try:
            precision = job_precision(job, name)
            answers.append(answer(law, size, tokens, precision))
            optima.append(optimum(law, float(cost(size, tokens, law.bits(precision))), parameters=size))
            curves.append(fixed_compute(law))
        except SpecError as fault:
            remarks.append(f"{name}: {fault}")
    if answers:
        remarks.append("the laws count parameters without embedding and head, and a multiplication of P bits as P / 16")
    return tuple(answers), tuple(optima), tuple(curves), tuple(remarks)


def stated_days(
    training: Training,
    sizes: Sequence[int],
    device: Device | str,
    dtype: str,
    utilization: float,
    *,
    watts: float | None = None,
    pue: float | None = None,
    price: float | None = None,
) -> Demand:
    """Days of a training on so many devices of a kind (a cluster preset's name) at a stated utilization."""
    if isinstance(device, str):
        cluster: Cluster = load_preset("cluster", device)
        device = cluster.device
    used = stated_utilization(utilization)
    return _demand(training, sizes, device, dtype, used, watts=watts, pue=pue, price=price)
