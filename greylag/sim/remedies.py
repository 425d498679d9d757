"""Remedies: what is too large of a job that does not fit, and the cheapest changes that make it fit.

Changes are searched in the neighbourhood of the job's own strategy: degrees doubled or halved, a smaller micro-batch,
more sharding, more computed again. Those that touch the fewest settings come first, among them the fastest.
"""

from typing import Any

import numpy as np
from msgspec.structs import replace

from greylag.sim.candidates import POINT, Recompute, Space, recomputes
from greylag.sim.estimate import estimate
from greylag.sim.memory import breakdown, memory, predict_memory, room
from greylag.sim.sweep import Sweep, fits, sweep
from greylag.spec.finding import Finding
from greylag.spec.job import Job
from greylag.spec.strategy import Schedule

GIB = 2**30
MOST_NODES = 16
"""Where no change helps, so many times the nodes are tried."""


def remedies(job: Job, most: int = 3) -> list[Finding]:
    """What is too large, as an error, and up to `most` changes that make it fit, as infos; empty if the job fits.

    Raises SpecError where the cluster lacks a figure.
    """
    if job.cluster.is_local or bool(fits(job, sum(predict_memory(job).values()))):
        return []
    changes = _changes(job, most)
    return [_fault(job), *(changes or [_more_devices(job)])]


def _fault(job: Job) -> Finding:
    """Which component is too large, on which stage, at which moment."""
    if job.software.activations == "autograd":
        sizes = sorted(predict_memory(job).items(), key=lambda item: -item[1])
        need, at = sum(size for _, size in sizes), "a rank"
    else:
        account = memory(job)
        number = int(account.peak_stage)
        stage = account.stages[number]
        sizes, need = breakdown(stage), float(stage.total)
        at = f"stage {number} of {job.strategy.pp} ({stage.moment})"
    largest = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in sizes[:4])
    most = room(job.cluster.device)
    return Finding(
        level="error",
        where="strategy",
        what=f"does not fit: {at} allocates {need / GIB:.1f} GiB, {job.cluster.device.name} has room for "
        f"{most / GIB:.1f} GiB; the largest part is {sizes[0][0]}",
        evidence=largest,
        advice="see the changes that make it fit",
    )


def _around(job: Job) -> Space:
    """The neighbourhood of a strategy."""
    s = job.strategy

    def near(n: int, *factors: float) -> tuple[int, ...]:
        return tuple(sorted({int(n * f) for f in (1, *factors) if n * f >= 1 and n * f == int(n * f)}))

    own = Recompute(s.recompute, s.recompute_modules)
    plain: Schedule = "1f1b"
    whole = job.software.activations == "autograd"
    tp, pp, cp = ((n,) if whole else near(n, *f) for n, f in ((s.tp, (2, 0.5)), (s.pp, (2, 0.5)), (s.cp, (2,))))
    return Space(
        tp=tuple(n for n in tp if n == s.tp or n <= job.cluster.linked),
        cp=cp,
        ep=near(s.ep, 2, 4, 0.5) if job.model.moe else (1,),
        etp=None if s.etp is None else tuple({1: None, s.etp: None}),
        micro_batch=near(s.micro_batch, 0.5, 0.25),
        zero=tuple(range(s.zero, 4)),
        pp=pp,
        vp=tuple(dict.fromkeys((s.vp, 1))),
        dp=None,
        schedule=tuple(dict.fromkeys((s.schedule, plain))),
        stage_layers=tuple(dict.fromkeys((s.stage_layers, ()))),
        recompute=tuple(dict.fromkeys((own, *recomputes(job)))),
        uneven=np.inf,
        few=True,
    )


def _changes(job: Job, most: int) -> list[Finding]:
    """The cheapest changes that fit: of each set of settings the fastest, fewest settings first."""
    found = sweep(job, _around(job), [job.precision])
    if not len(found.seconds):
        return []
    now = float(np.asarray(estimate(job).seconds).item()) if not job.problems() else None
    chosen: dict[tuple[str, ...], int] = {}
    order = np.lexsort((found.seconds, _distance(job, found)))
    for row in order[:1000]:
        names = tuple(name for name, _ in _differences(job, found.job(job, row)))
        chosen.setdefault(names, row)
        if len(chosen) >= most:
            break
    return [_remedy(job, found, row, now) for row in chosen.values()]


def _distance(job: Job, found: Sweep) -> Any:
    """How many settings differ from the job's own, by row."""
    s = job.strategy
    own = {"tp": s.tp, "cp": s.cp, "ep": s.ep, "micro_batch": s.micro_batch, "zero": s.zero}
    far = sum((found.columns[POINT.index(name)] != value).astype(int) for name, value in own.items())
    experts = found.columns[POINT.index("etp")]
    far += experts != (found.columns[0] if s.etp is None else s.etp)
    of_group = [
        (g.pp != s.pp) + (g.recompute != (s.recompute, s.recompute_modules)) + (g.plan.schedule != s.schedule)
        + (g.plan.vp != s.vp) + (g.plan.stage_layers != s.stage_layers)
        for g in found.groups
    ]  # fmt: skip
    return far + np.array(of_group)[found.group]


def _differences(job: Job, other: Job) -> list[tuple[str, Any]]:
    """(setting, its new value) of what another strategy changes; dp takes what is left."""
    pairs = []
    for name in ("pp", "tp", "cp", "ep", "etp", "zero", "micro_batch", "recompute", "schedule", "vp", "stage_layers"):
        value = getattr(other.strategy, name)
        same = value == getattr(job.strategy, name)
        if name == "recompute":
            same = same and other.strategy.recompute_modules == job.strategy.recompute_modules
        if not same:
            pairs.append((name, value))
    return pairs


def _remedy(job: Job, found: Sweep, row: int, now: float | None) -> Finding:
    """One change that fits, with what it costs."""
    other, changes, settings = found.job(job, row), [], []
    for name, value in _differences(job, other):
        modules = list(other.strategy.recompute_modules)
        old, new = getattr(job.strategy, name), value
        if name == "recompute" and value == "selective":
            new = f"of {', '.join(modules)}"
            quoted = ", ".join(f'"{module}"' for module in modules)
            settings.append(f"'strategy.recompute_modules=[{quoted}]'")
        changes.append(f"{name} {old} -> {new}" if name != "recompute" else f"recompute {new}")
        given = list(value) if isinstance(value, tuple) else value
        settings.append(f"strategy.{name}={given}")
    cost = f", {found.seconds[row] / now - 1:+.1%}" if now else ""
    return Finding(
        level="info",
        where="strategy",
        what=f"{', '.join(changes)} makes it fit",
        evidence=f"{found.bytes[row] / GIB:.1f} GiB, {found.seconds[row]:.3g} s a step{cost}",
        advice=f"set {' '.join(settings)}",
    )


def _more_devices(job: Job) -> Finding:
    """How many nodes the job needs, where no change of its strategy is enough."""
    times, nodes = 2, job.cluster.num_nodes
    while times <= MOST_NODES:
        larger = replace(job, cluster=replace(job.cluster, num_nodes=nodes * times))
        if len(sweep(larger, _around(larger), [job.precision]).seconds):
            return Finding(
                level="info",
                where="cluster",
                what=f"no change nearby makes it fit on {nodes} nodes; {nodes * times} nodes would",
                advice=f"set cluster.num_nodes={nodes * times}, or choose devices with more memory",
            )
        times *= 2
    return Finding(
        level="info",
        where="cluster",
        what=f"no change nearby makes it fit, nor do {nodes * MOST_NODES} nodes",
        advice="choose devices with more memory, a smaller model or a shorter sequence",
    )
