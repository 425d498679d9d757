"""Run: the page of one run, a pure function of its record, and the thin shell that writes it.

The wording of the header and the tiles is here; figures come from `summary`, charts from `figures`, the page's
frame from `run.html.j2`. Everything that came from a file of the run is escaped by the template.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from greylag.report.chart import MEASURED, PREDICTED, plotly_js
from greylag.report.derived import write_derived
from greylag.report.figures import figures
from greylag.report.health import health
from greylag.report.page import template
from greylag.report.record import RunRecord, read_record
from greylag.report.summary import Comparison, Summary, role_sizes, summarize
from greylag.spec import quantity
from greylag.spec.finding import Finding
from greylag.spec.job import Job
from greylag.spec.parts import num_active_parameters, num_parameters
from greylag.spec.precision import role_table
from greylag.spec.step import Step

PAGE = "report.html"
SHOWN_FINDINGS = 200
"""The page lists so many, worst first, and counts the rest."""
SHARDED = (
    "nothing is sharded",
    "the optimizer state is sharded",
    "optimizer state and gradients are sharded",
    "optimizer state, gradients and parameters are sharded",
)
"""By ZeRO level (arXiv 1910.02054)."""


@dataclass(frozen=True)
class Tile:
    """One headline figure: measured in large, what was predicted below."""

    title: str
    value: str
    predicted: str = ""
    error: str = ""
    note: str = ""


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Render a run folder to `report.html` in it, or to the file `out`, and return the page's path.

    The page appears whole or not at all. Raises SpecError if the folder holds no run or the page cannot be written.
    """
    page = out or folder / PAGE
    write_derived(page, render(read_record(folder)).encode(errors="replace"))
    return page


def render(record: RunRecord) -> str:
    """The page as HTML: one file with its own style, charts and plotly.js, which asks nothing of any network."""
    summary = summarize(record)
    order = {"error": 0, "warning": 1, "info": 2}
    findings = sorted(record.findings, key=lambda f: order[f.level])
    return template("run.html.j2").render(
        record=record,
        job=record.job,
        summary=summary,
        facts=_facts(record),
        tiles=_tiles(record, summary),
        basis=_basis(record, summary),
        figures=figures(record, summary),
        health=health(record),
        precision=role_table(record.job.precision),
        roles=role_sizes(record.job),
        total=num_parameters(record.job.model),
        active=num_active_parameters(record.job.model),
        findings=findings[:SHOWN_FINDINGS],
        num_findings=len(findings),
        levels=Counter(f.level for f in findings),
        place=_place,
        seconds=quantity.seconds,
        memory=quantity.memory,
        job_json=msgspec.json.format(msgspec.json.encode(record.job)).decode(),
        versions=f"greylag {_version('greylag')}, plotly {_version('plotly')}",
        plotly_js=plotly_js(),
        colours={"measured": MEASURED, "predicted": PREDICTED},
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(version unknown)"


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    """The header: (what, in words)."""
    job, steps = record.job, record.steps
    model, cluster, precision = job.model, job.cluster, job.precision
    total, active = num_parameters(model), num_active_parameters(model)
    met = f", {quantity.count(active)} active" if active != total else ""
    formats = {o.format.upper() for o in (precision.input, precision.weight, precision.grad)}
    recipe = f"linear layers in {' and '.join(sorted(formats))}, the rest in {precision.high.upper()}"
    skipped = sum(s.skipped for s in steps)
    return [
        ("Model", f"{model.name}: {quantity.count(total)} parameters{met}, {_num(model.num_layers, 'layer')}"),
        ("Precision", f"{precision.name}: {recipe}"),
        (
            "Cluster",
            f"{cluster.name}: {_num(cluster.num_nodes, 'node')} of {cluster.devices_per_node} × {cluster.device.name}",
        ),
        ("Steps", f"{len(steps):,} of {job.run.steps:,}" + (f", {skipped:,} skipped" if skipped else "")),
        ("Strategy", strategy_sentence(job)),
        ("When", _when(steps)),
    ]


def strategy_sentence(job: Job) -> str:
    """How the job is cut, in words; axes of one are left out."""
    s = job.strategy
    names = {"dp": max(s.dp or 1, s.replicas), "pp": s.pp, "cp": s.cp, "tp": s.tp, "ep": s.ep}
    axes = {axis: f"{axis} {degree}" for axis, degree in names.items() if degree > 1}
    if s.replicas > 1:
        axes["dp"] = f"{axes['dp']} in {s.replicas} replicas"
    cut = ", ".join(axes.values())
    sharding = f"; ZeRO-{s.zero}: {SHARDED[s.zero]} over {_num(s.shards, 'rank')}" if s.shards > 1 else ""
    pipeline = f"; pipeline schedule {s.schedule}" if s.pp > 1 else ""
    recompute = "; backward runs each layer's forward again" if s.recompute == "full" else ""
    portion = f"{_num(job.num_micro_batches, 'micro-batch', 'es')} of {_num(s.micro_batch, 'sequence')} per rank"
    return (
        f"{_num(s.world, 'rank')}{': ' + cut if cut else ', nothing is cut'}{sharding}{pipeline}{recompute}. "
        f"{job.global_batch:,} × {job.sequence:,} = {job.tokens:,} tokens per step, in {portion}."
    )


def _num(count: int, noun: str, plural: str = "s") -> str:
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def _when(steps: list[Step]) -> str:
    times = [s.time for s in steps if quantity.finite(s.time)]
    if not times:
        return "not recorded"
    try:
        first, last = (datetime.fromtimestamp(t, UTC) for t in (min(times), max(times)))
    except (OverflowError, OSError, ValueError):
        return "not recorded"
    end = f" to {last:%H:%M}" if last.date() == first.date() else f" to {last:%Y-%m-%d %H:%M}"
    return f"{first:%Y-%m-%d %H:%M}{end if last - first else ''} UTC" + (
        f" ({quantity.seconds((last - first).total_seconds())} from the first to the last step)" if last - first else ""
    )


def _basis(record: RunRecord, summary: Summary) -> str:
    """What the figures of the page rest on."""
    counted = _num(len(summary.steady), "step")
    medians = f"Measured times and rates are medians over {counted}"
    medians += f"; the first {summary.warm_up} are left out as warm-up." if summary.warm_up else ", all there are."
    if not record.predicted:
        return f"{medians} This run has no prediction (predicted.json)."
    return f"{medians} Off by: predicted\u00a0/\u00a0measured\u00a0−\u00a01."


def _tiles(record: RunRecord, summary: Summary) -> list[Tile]:
    device = record.job.cluster.device
    rate: Callable[[float | None], str] = quantity.count
    last = next((y for y in reversed(summary.loss.ys) if y is not None), None)
    loss_note = f"smoothed; last {quantity.digits(last)}" if last is not None else "no finite loss"
    if summary.validation.ys:
        loss_note += f"; validation {quantity.digits(summary.validation.ys[-1])}"
    measured_memory = summary.memory.measured is not None
    return [
        Tile("Final loss", quantity.digits(summary.last_loss), note=loss_note),
        _tile("Step time", summary.step_time, quantity.seconds),
        _tile("Tokens per second", summary.tokens_per_second, rate),
        _tile("Model FLOP/s", summary.flops_per_second, quantity.flops_per_second),
        _tile("Utilization", summary.utilization, quantity.percent, "model FLOPs / peak", "peak of the ranks unknown"),
        _tile(
            "Peak memory per rank",
            summary.memory,
            quantity.memory,
            f"of {quantity.memory(device.memory)}" if measured_memory else "",
            "not measured",
        ),
    ]


def _tile(title: str, row: Comparison, text: Callable[[float | None], str], note: str = "", missing: str = "") -> Tile:
    return Tile(
        title,
        text(row.measured),
        predicted=text(row.predicted) if row.predicted is not None else "",
        error=quantity.difference(row.error) if row.error is not None else "",
        note=note if row.measured is not None else missing,
    )


def _place(finding: Finding) -> str:
    """Where a finding belongs: key, module or file, then node and rank."""
    node = f"node {finding.node}" if finding.node is not None else ""
    rank = f"rank {finding.rank}" if finding.rank is not None else ""
    return ", ".join(part for part in (finding.where, node, rank) if part) or "the run"
