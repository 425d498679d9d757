"""Prediction: the page of a predicted step, before there is a run. One HTML file without scripts, for any browser.

What it shows it is given: the job, the predicted Step, the timed pipeline and the account of memory. The wording is
here, pictures are `picture`'s, constants and their sources `assumption`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from greylag import __version__
from greylag.report.account import Account
from greylag.report.assumption import assumptions, limits
from greylag.report.page import template
from greylag.report.picture import Timed, colours, ends, stages, whole_step
from greylag.report.rows import layer_ranges
from greylag.report.show import between
from greylag.spec import quantity
from greylag.spec.cluster import Calibration
from greylag.spec.finding import Finding
from greylag.spec.job import Job
from greylag.spec.parts import num_active_parameters, num_parameters
from greylag.spec.schedule import POSTPONED
from greylag.spec.step import Step

SHOWN_RANKS = 64
"""Ranks that a picture of the pipeline shows at most; the first ones, unless others are asked for."""


@dataclass(frozen=True)
class Row:
    """One row of a table with bars."""

    what: str
    value: str
    share: float


@dataclass(frozen=True)
class Drawn:
    """The pictures of a pipeline."""

    whole: str
    ends: str
    note: str
    kinds: Sequence[tuple[str, str]]
    """What the colours mean: (class, words)."""


KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward, gradient of the input",
    "W": "backward, gradient of the weights",
}


def render_prediction(
    job: Job,
    step: Step,
    held: Account,
    timeline: Timed,
    *,
    ranks: Sequence[int] = (),
    calibration: Calibration | None = None,
    findings: Sequence[Finding] = (),
) -> str:
    """The page as HTML. `ranks` are the places in the pipeline that are drawn, none means all (`SHOWN_RANKS`)."""
    full = held.fullest
    return template("prediction.html.j2").render(
        job=job,
        facts=_facts(job),
        tiles=_tiles(job, step, held),
        phases=_rows(step.seconds, step.total_seconds),
        causes=_rows(step.causes, step.total_seconds),
        has_others=len(colours(held)) < len({name for stage in held.stages for name in stage.components}),
        pipeline=_drawn(job, timeline, ranks) if job.strategy.pp > 1 else None,
        held=held,
        full=full,
        components=_components(held),
        bytes_picture=stages(held),
        legend=colours(held),
        moments=_moments(held),
        groups=assumptions(job, calibration),
        limits=limits(job, step, calibration),
        findings=findings,
        job_json=msgspec.json.format(msgspec.json.encode(job)).decode(),
        version=__version__,
    )


def _facts(job: Job) -> list[tuple[str, str]]:
    """The header: (what, in words)."""
    s, cluster = job.strategy, job.cluster
    total, active = num_parameters(job.model), num_active_parameters(job.model)
    met = f", {quantity.count(active)} active" if active != total else ""
    degrees = {"dp": s.data_parallel, "pp": s.pp, "vp": s.vp, "cp": s.cp, "tp": s.tp, "ep": s.ep}
    cut = ", ".join(f"{axis} {degree:,}" for axis, degree in degrees.items() if degree > 1) or "nothing is cut"
    again = f", recompute {s.recompute} {' '.join(s.recompute_modules)}".rstrip() if s.recompute != "none" else ""
    beside = f", {' '.join(s.overlap)} overlapped" if s.overlap and not cluster.is_local else ""
    return [
        ("Model", f"{job.model.name}: {quantity.count(total)} parameters{met}, {job.model.num_layers} layers"),
        ("Precision", job.precision.name),
        ("Cluster", f"{cluster.name}: {cluster.num_nodes:,} × {cluster.devices_per_node} × {cluster.device.name}"),
        ("Framework", job.software.name),
        ("Strategy", f"{s.world:,} ranks: {cut}; ZeRO-{s.zero}{again}{beside}"),
        (
            "Batch",
            f"{job.global_batch:,} × {job.sequence:,} tokens, {job.num_micro_batches:,} micro-batches of "
            f"{s.micro_batch:,} a rank",
        ),
    ]


def _tiles(job: Job, step: Step, held: Account) -> list[tuple[str, str, str]]:
    """(title, figure, what to know of it)."""
    waiting = step.causes.get("bubble", 0.0) if job.strategy.pp > 1 else 0.0
    fits = f"does not fit: {quantity.memory(held.excess)} too much" if held.excess > 0 else "fits"
    return [
        ("Step time", quantity.seconds(step.total_seconds), between(step) or f"{job.tokens:,} tokens"),
        ("Tokens per second", quantity.count(step.tokens_per_second), "of the whole job"),
        ("Model FLOP/s", quantity.flops_per_second(step.flops_per_second), "of the whole job"),
        ("Utilization", quantity.percent(step.utilization), "model FLOPs / peak"),
        ("Waiting in the pipeline", quantity.percent(waiting / step.total_seconds), "of the step, busiest stage")
        if job.strategy.pp > 1
        else ("Sent by a rank", quantity.memory(step.wire_bytes), "per step"),
        ("Memory needed", quantity.memory(held.needed), f"of {quantity.memory(held.device)}: {fits}"),
    ]


def _rows(parts: dict[str, float], total: float) -> list[Row]:
    largest_first = sorted(((name, value) for name, value in parts.items() if value), key=lambda item: -item[1])
    return [Row(name, quantity.seconds(value), value / total if total else 0.0) for name, value in largest_first]


def _components(held: Account) -> list[Row]:
    """What the fullest stage's ranks need of the device."""
    needed = held.fullest.largest | held.beside
    return [Row(name, quantity.memory(size), size / held.needed) for name, size in needed.items()]


def _moments(held: Account) -> list[tuple[str, str]]:
    """(moment of the peak, which stages have it there), where there is more than one stage."""
    by_moment: dict[str, list[int]] = {}
    for number, stage in enumerate(held.stages):
        if stage.moment and len(held.stages) > 1:
            by_moment.setdefault(stage.moment, []).append(number)
    return [
        (moment, f"{held.fullest.name.split()[0]}{'s' if len(numbers) > 1 else ''} {layer_ranges(numbers)}")
        for moment, numbers in by_moment.items()
    ]


def _drawn(job: Job, timeline: Timed, ranks: Sequence[int]) -> Drawn:
    everyone = range(len(timeline.actions))
    shown = list(ranks) or list(everyone)[:SHOWN_RANKS]
    s, kinds = job.strategy, {a.kind for row in timeline.actions for a in row}
    note = f"Schedule {s.schedule}, {job.num_micro_batches:,} micro-batches"
    note += f", {s.vp} stages a rank (the darker one is the later)" if s.vp > 1 else ""
    note += ", fed in from both ends (darker: the stage of the other direction)" if s.schedule == "dualpipe" else ""
    note += f". Pipelined part of the step: {quantity.seconds(timeline.makespan)}; empty is waiting."
    if s.schedule in POSTPONED:
        note += " A rank begins the next step when it has ended its own."
    if len(shown) < len(everyone):
        note += f" Drawn: {len(shown)} of {len(everyone)} ranks of the pipeline."
    names = [(kind, words) for kind, words in KINDS.items() if kind in kinds]
    return Drawn(whole_step(timeline, shown), ends(timeline, shown), note, names)
