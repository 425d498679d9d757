"""Figures: which charts a run has, and what each of them shows.

Every function here turns a RunRecord and its Summary into one chart, or None where there is nothing to draw, so
that the page can say so in words. How a chart looks is `chart`'s.
"""

from collections.abc import Callable
from statistics import median, quantiles
from typing import NamedTuple

from greylag.report.chart import Line, bars, lines
from greylag.report.curve import Curve, smooth, thin
from greylag.report.record import RunRecord
from greylag.report.summary import Comparison, Summary, throughput
from greylag.spec.quantity import BYTES, SECONDS, Ladder, finite, seconds, unit
from greylag.spec.step import Step

OUTLIER = 3.0
"""A slowest step this many times beyond the rest leaves the axis of step times, and is named below it."""
WIDE = 50.0
"""A gradient norm that peaks this many times above its median is drawn on a logarithmic axis."""


MARKS = 100
"""Crosses for skipped steps; more would hide the curve."""
DENSE = 300
"""From so many steps on, a curve is drawn faintly under its smoothed one."""


class Figure(NamedTuple):
    """A chart as HTML, and a note on what it leaves out."""

    html: str
    note: str = ""


def figures(record: RunRecord, summary: Summary) -> dict[str, Figure | None]:
    """All charts of a run by name."""
    return {
        "loss": _loss(record, summary),
        "grad_norm": _grad_norm(record, summary),
        "learning_rate": _learning_rate(record),
        "phases": _bars("phases", summary.phases, SECONDS, "time"),
        "step_time": _step_time(record, summary),
        "throughput": _throughput(record, summary),
        "pools": _bars("pools", summary.pools, BYTES, "peak memory of a rank"),
    }


def _over(steps: list[Step], of: Callable[[Step], float | None]) -> Curve:
    return Curve([s.number for s in steps], [finite(of(s)) for s in steps])


def _known(curve: Curve) -> list[float]:
    return [y for y in curve.ys if y is not None]


def _level(record: RunRecord, value: float) -> Curve:
    """A level line across the run; a lone step gets one of some width."""
    first, last = record.steps[0].number, record.steps[-1].number
    return Curve([first, last if last > first else first + 1], [value, value])


def _trend(name: str, curve: Curve, summary: Summary) -> list[Line]:
    if len(curve.xs) < DENSE:
        return [Line(name, curve, "measured")]
    return [Line(name, curve, "raw"), Line("smoothed", Curve(curve.xs, smooth(curve.ys, summary.span)), "measured")]


def _loss(record: RunRecord, summary: Summary) -> Figure | None:
    if summary.last_loss is None:
        return None
    at = dict(zip(summary.smoothed.xs, summary.smoothed.ys, strict=True))
    marks = Curve([s.number for s in summary.skipped], [at[s.number] for s in summary.skipped])
    content = [Line("loss", summary.loss, "raw"), Line("smoothed", summary.smoothed, "measured")]
    if summary.validation.xs:
        content.append(Line("validation", summary.validation, "validation"))
    drawn = thin(marks, MARKS)
    if marks.xs:
        content.append(Line("skipped step", drawn, "skipped"))
    note = f"Smoothed curves are exponential moving averages over {summary.span} steps."
    if summary.validation.xs:
        note += f" Validation: over {_validated(record)}, after the update of the step."
    if summary.skipped:
        note += f" Steps that skipped their update: {len(summary.skipped):,}"
        note += f", {len(drawn.xs)} of them marked." if len(drawn.xs) < len(marks.xs) else ", marked by crosses."
    if summary.num_lossless:
        note += f" Steps without a finite loss: {summary.num_lossless:,}, gaps in the raw curve."
    return Figure(lines("loss", content, "loss"), note)


def _validated(record: RunRecord) -> str:
    """Which text the validation loss is of."""
    run, number = record.job.run, record.job.validation_sequences
    return f"{number:,} sequences " + (f"of {', '.join(run.validation)}" if run.validation else "held out of the data")


def _grad_norm(record: RunRecord, summary: Summary) -> Figure | None:
    curve = _over(record.steps, lambda s: s.grad_norm)
    known = _known(curve)
    if not known:
        return None
    clip = record.job.run.clip_norm
    wide = min(known) > 0 and max(known) > WIDE * median(known)
    content = _trend("gradient norm", curve, summary)
    if finite(clip) and clip <= max(known) * 1.5:
        content.append(Line(f"clipped at {clip:g}", _level(record, clip), "limit"))
    axis = {"type": "log", "dtick": 1} if wide else {"rangemode": "tozero"}
    note = "Global norm before clipping, on a logarithmic axis." if wide else "Global norm before clipping."
    return Figure(lines("grad_norm", content, "gradient norm", y_axis=axis), note)


def _learning_rate(record: RunRecord) -> Figure | None:
    curve = _over(record.steps, lambda s: s.learning_rate)
    if not _known(curve):
        return None
    axis = {"rangemode": "tozero", "exponentformat": "e"}
    return Figure(lines("learning_rate", [Line("learning rate", curve, "measured")], "learning rate", y_axis=axis))


def _step_time(record: RunRecord, summary: Summary) -> Figure | None:
    curve = _over(record.steps, lambda s: s.total_seconds)
    if not any(_known(curve)):
        return None
    predicted = summary.step_time.predicted
    top, note = _top(_known(curve), predicted)
    size, name = unit([summary.step_time.measured, predicted], SECONDS)
    content = _trend("measured", curve, summary)
    if predicted is not None:
        content.append(Line("predicted", _level(record, predicted), "predicted"))
    axis = {"range": [0, top / size]} if top else {"rangemode": "tozero"}
    return Figure(lines("step_time", content, f"step time ({name})", size, axis), note)


def _top(values: list[float], predicted: float | None) -> tuple[float | None, str]:
    """Where the axis of step times ends if a few steps would flatten all others, and a word on those steps."""
    if len(values) < 20:
        return None, ""
    usual = max(quantiles(values, n=10)[-1], predicted or 0.0)
    if max(values) <= OUTLIER * usual:
        return None, ""
    top = 1.5 * usual
    above = sum(value > top for value in values)
    return top, f"Steps beyond the axis: {above:,}, the slowest took {seconds(max(values))}; double-click to see all."


def _throughput(record: RunRecord, summary: Summary) -> Figure | None:
    curve = _over(record.steps, throughput)
    if not _known(curve):
        return None
    content = _trend("measured", curve, summary)
    predicted = summary.tokens_per_second.predicted
    if predicted is not None:
        content.append(Line("predicted", _level(record, predicted), "predicted"))
    axis = {"rangemode": "tozero", "tickformat": "~s"}
    return Figure(lines("throughput", content, "throughput (tokens/s)", y_axis=axis))


def _bars(name: str, rows: list[Comparison], ladder: Ladder, title: str) -> Figure | None:
    values = [value for row in rows for value in (row.measured, row.predicted)]
    if all(value is None for value in values):
        return None
    size, unit_name = unit(values, ladder)
    return Figure(bars(name, rows, f"{title} ({unit_name})", size))
