"""Search: the best strategy for a job's model, cluster, sequence and batch, and why it is the best.

The sweep counts memory and time of every candidate; here they are ranked. What makes the winner win is told twice: by
axis, as what the best candidate with another value loses, and by cause, as what each runner-up spends more. The result
is a pure struct; its text is a report, its winner a job file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from greylag.sim.candidates import POINT, Bools, Ints, pinned, space_of
from greylag.sim.estimate import estimate
from greylag.sim.remedies import remedies
from greylag.sim.sweep import Progress, Sweep, sweep
from greylag.sim.timeline import Floats
from greylag.spec.error import SpecError
from greylag.spec.finding import Finding
from greylag.spec.job import Job
from greylag.spec.load import SECTIONS, load_preset
from greylag.spec.precision import Precision
from greylag.spec.strategy import Strategy
from greylag.spec.work import step_flops

SHAPE = ("pp", "tp", "cp", "ep", "etp", "schedule", "vp")
"""Axes by which runners-up differ: of candidates that agree in all of them the best stands for the others."""


CAUSES = 4
"""That are told of what a runner-up loses."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy that fits."""

    job: Job
    seconds: float
    """Of a step."""
    bytes: float
    """Allocated at the peak, on the fullest rank."""
    causes: dict[str, float] = {}
    """Seconds by what they are spent on, of a rank of the busiest stage; of the winner and runners-up alone."""
    loses: dict[str, float] = {}
    """Seconds more than the winner by cause, largest first."""

    @property
    def largest(self) -> list[tuple[str, float]]:
        """Of what it loses the causes that matter most either way, what costs more first."""
        large = sorted(self.loses.items(), key=lambda item: -abs(item[1]))[:CAUSES]
        return sorted((item for item in large if abs(item[1]) > 5e-4), key=lambda item: -item[1])


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Why an axis has the winner's value: what the best candidate with any other loses."""

    axis: str
    value: Any
    other: Any
    seconds: float
    """More than the winner's."""
    cause: str
    """What most of them are spent on."""

    @property
    def words(self) -> tuple[str, str]:
        """Both values, as a reader knows them."""
        return _short(self.value), _short(self.other)


class Heat(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the best candidate by tensor- and pipeline-parallel degree."""

    tp: tuple[int, ...]
    pp: tuple[int, ...]
    seconds: tuple[tuple[float | None, ...], ...]
    """(tp, pp); None where nothing fits."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found."""

    job: Job
    best: tuple[Candidate, ...]
    """The winner, and runners-up of other shapes (SHAPE), fastest first. Empty where nothing fits."""
    front: tuple[Candidate, ...]
    """Those that none beats in both time and memory, fastest first."""
    choices: tuple[Choice, ...]
    """Dearest first."""
    heat: Heat
    num_tried: int
    num_unfit: int
    num_invalid: int
    """Combinations of the axes' values that no job can have."""
    num_left_out: int
    """Beyond the limit."""
    findings: tuple[Finding, ...] = ()
    """Where nothing fits: what is too large, and what would make it fit."""

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def search(
    job: Job,
    *,
    fix: Sequence[str] = (),
    allow: Sequence[str] = (),
    precisions: Sequence[Precision] = (),
    top: int = 5,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Found:
    """The best strategies of a job; the rest of its strategy (replicas, overlap, offload) stays as it is.

    `fix` holds axes ("strategy.tp=8", or values to choose from: "strategy.zero=[1, 3]"), `allow` widens the space
    (`candidates.ALLOW`), `precisions` are tried beside each other, none means the job's own. `limit` thins the space
    out evenly. Raises SpecError where the job, or every candidate, has a fault, or the cluster lacks a figure.
    """
    _refuse(job)
    space, every = space_of(job, pinned(fix), allow), list(precisions) or [job.precision]
    for precision in every:
        _refuse(replace(job, precision=precision))
    found = sweep(job, space, every, limit, progress)
    if not found.num_tried:
        raise SpecError(
            f"{job.name}: none of the {found.num_invalid} combinations of axes can run; free an axis (--fix), or "
            "choose a global_batch and a number of devices with more divisors"
        )
    order = np.lexsort((found.bytes, found.seconds))
    best = _best(job, found, order, top)
    front = order[_is_front(found.bytes[order])]
    findings: tuple[Finding, ...] = ()
    if found.least:
        findings = tuple(remedies(found.least[1].job(job, found.least[2])))
    return Found(
        job=job,
        best=best,
        front=tuple(_candidate(job, found, row) for row in front),
        choices=_choices(job, found, order, best[0]) if best else (),
        heat=_heat(found, space.tp, space.pp),
        num_tried=found.num_tried,
        num_unfit=found.num_unfit,
        num_invalid=found.num_invalid,
        num_left_out=found.num_left_out,
        findings=findings,
    )


def _refuse(job: Job) -> None:
    """Raise SpecError for what no strategy mends."""
    if job.cluster.is_local:
        raise SpecError(f"cluster '{job.cluster.name}': a search needs a cluster of accelerators; set cluster=h100-8x1")
    plain = replace(job, strategy=Strategy(dp=job.cluster.num_devices))
    faults = [f for f in plain.problems() if f.where != "global_batch" and not f.where.startswith("strategy")]
    if faults:
        raise SpecError(f"{job.name}: " + "; ".join(map(str, faults)))


def _is_front(sizes: Floats) -> Bools:
    """Which of some candidates, fastest first, take less memory than every faster one."""
    return sizes < np.concatenate([[np.inf], np.minimum.accumulate(sizes)])[:-1]


def _values(found: Sweep, axis: str) -> Any:
    """The values of an axis, a number for each row, and what the numbers mean."""
    if axis in POINT:
        return found.columns[POINT.index(axis)], None
    each = [_of_group(found, number, axis) for number in range(len(found.groups))]
    names = list(dict.fromkeys(each))
    return np.array([names.index(value) for value in each])[found.group], names


def _of_group(found: Sweep, number: int, axis: str) -> Any:
    group = found.groups[number]
    if axis in ("schedule", "vp", "stage_layers"):
        return getattr(group.plan, axis)
    if axis == "recompute":
        return "+".join(group.recompute.modules) or group.recompute.kind
    return group.precision.name if axis == "precision" else group.pp


def _best(job: Job, found: Sweep, order: Ints, top: int) -> tuple[Candidate, ...]:
    """The first of each shape, at most `top`."""
    shapes = np.stack([_values(found, axis)[0][order] for axis in SHAPE]) if len(order) else np.zeros((1, 0))
    _, first = np.unique(shapes, axis=1, return_index=True)
    best = [_candidate(job, found, order[row]) for row in np.sort(first)[:top]]
    causes = [causes_of(candidate.job) for candidate in best]
    return tuple(
        replace(candidate, causes=mine, loses=_more(mine, causes[0]))
        for candidate, mine in zip(best, causes, strict=True)
    )


def _candidate(job: Job, found: Sweep, row: int) -> Candidate:
    return Candidate(job=found.job(job, row), seconds=float(found.seconds[row]), bytes=float(found.bytes[row]))


def causes_of(job: Job) -> dict[str, float]:
    """Seconds of a step by what they are spent on, of a rank of the busiest stage."""
    return {name: float(np.asarray(seconds).item()) for name, seconds in estimate(job).causes.items()}


def _more(mine: Mapping[str, float], least: Mapping[str, float]) -> dict[str, float]:
    """Seconds more by cause, largest first; what is less stands at the end."""
    more = {name: mine.get(name, 0.0) - least.get(name, 0.0) for name in {**mine, **least}}
    return {name: value for name, value in sorted(more.items(), key=lambda item: -item[1]) if value}


def _choices(job: Job, found: Sweep, order: Ints, winner: Candidate) -> tuple[Choice, ...]:
    """Of each axis that had a choice."""
    choices, stages = [], _values(found, "pp")[0][order]
    for axis in ("pp", "tp", "cp", "ep", "etp", "micro_batch", "zero", "recompute", "schedule", "vp", "stage_layers",
                 "precision"):  # fmt: skip
        numbers, names = _values(found, axis)
        numbers = numbers[order]
        differs = numbers != numbers[0]
        if axis in ("schedule", "vp", "stage_layers"):  # of another pipeline they would say nothing
            differs &= stages == stages[0]
        other = np.flatnonzero(differs)
        if not len(other):
            continue
        row = order[other[0]]
        value, instead = (n if names is None else names[n] for n in (int(numbers[0]), int(numbers[other[0]])))
        more = _more(causes_of(found.job(job, row)), winner.causes)
        cause = next(iter(more), "")
        seconds = float(found.seconds[row]) - winner.seconds
        choices.append(Choice(axis=axis, value=value, other=instead, seconds=seconds, cause=cause))
    return tuple(sorted(choices, key=lambda choice: -choice.seconds))


def _heat(found: Sweep, tp: Sequence[int], pp: Sequence[int]) -> Heat:
    best = np.full((len(tp), len(pp)), np.inf)
    if len(found.seconds):
        names = _values(found, "pp")
        stages = np.array(names[1])[names[0]]
        at = np.searchsorted(np.sort(tp), found.columns[0]), np.searchsorted(np.sort(pp), stages)
        np.minimum.at(best, at, found.seconds)
    rows = tuple(tuple(None if np.isinf(x) else float(x) for x in row) for row in best)
    return Heat(tp=tuple(sorted(tp)), pp=tuple(sorted(pp)), seconds=rows)


def job_table(job: Job) -> dict[str, Any]:
    """A job as the table of a job file: presets by name where they are unchanged, and what differs from defaults."""
    table: dict[str, Any] = {}
    for section, (_, kept_in) in SECTIONS.items():
        value = getattr(job, section)
        try:
            same = load_preset(section, value.name) == value
        except SpecError:
            same = False
        table[section] = value.name if same and kept_in else _said(value)
    table |= {"sequence": job.sequence, "global_batch": job.global_batch, "strategy": _said(job.strategy)}
    return table | ({"run": _said(job.run)} if _said(job.run) else {})


def _said(value: Any) -> dict[str, Any]:
    """A struct's fields that differ from their defaults, as a table."""
    said = {}
    for field in msgspec.structs.fields(value):
        own, make = getattr(value, field.name), field.default_factory
        default = field.default if make is msgspec.NODEFAULT else make()
        if own is not None and (default is msgspec.NODEFAULT or own != default):
            said[field.name] = _said(own) if isinstance(own, msgspec.Struct) else _plain(own)
    return said


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_said(v) if isinstance(v, msgspec.Struct) else v for v in value]
    return value


def _lines(found: Found) -> list[str]:
    """The report of a search."""
    tried = f"{found.num_tried:,} strategies tried: {found.num_unfit:,} do not fit"
    lines = [f"{tried}; {found.num_invalid:,} combinations cannot run"]
    lines += [f"{found.num_left_out:,} left out beyond the limit"] * bool(found.num_left_out)
    if not found.best:
        return [*lines, "nothing fits", *(f"  {finding}" for finding in found.findings)]
    winner, job = found.best[0], found.job
    several = len({c.job.precision.name for c in found.best}) > 1 or winner.job.precision != job.precision
    lines += ["", f"{'step':>9} {'memory':>10}   strategy"]
    for candidate in found.best:
        name = f" {candidate.job.precision.name}" if several else ""
        lines.append(_line(candidate) + name)
        if candidate is not winner:
            told = [f"{cause} {1e3 * s:+,.0f} ms" for cause, s in candidate.largest]
            lines.append(f"{'':23}loses {1e3 * (candidate.seconds - winner.seconds):,.0f} ms: {', '.join(told)}")
    peak = job.cluster.device.peak(winner.job.precision.gemm_dtype)
    rate = step_flops(winner.job) / winner.seconds / job.cluster.num_devices
    mfu = f", {rate / peak:.1%} of the peak" if peak else ""
    lines += ["", f"winner: {job.tokens / winner.seconds:,.0f} tokens/s, {rate / 1e12:.0f} TFLOP/s a device{mfu}"]
    for c in found.choices:
        instead = f"{c.axis} {' rather than '.join(c.words)}"
        lines.append(f"  {instead}: {1e3 * c.seconds:,.0f} ms ({c.cause})")
    lines += ["", "less memory for more time:"]
    step = max(1, -(-len(found.front) // 8))
    lines += [_line(c) for c in found.front[::step]]
    return lines


def _line(c: Candidate) -> str:
    return f"{c.seconds:>7.3f} s {c.bytes / 2**30:>6.1f} GiB   {c.job.strategy.brief}"


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{value[0]}..{value[-1]} layers" if value else "even"
    return str(value)
