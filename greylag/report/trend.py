"""Trend: the training compute of known models over time as a chart, and as a page of its own.

Points are models, the stepped line is the running record, the dashed one the trend that was fitted to it. Record
holders are named; the others say their names under the cursor. What it draws it is handed, as `report.demand` is.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from greylag import __version__
from greylag.report.chart import MEASURED, PREDICTED, QUIET, html, plotly_js
from greylag.report.demand import CREDIT, Knowable, Trending, growth, power
from greylag.report.figures import Figure
from greylag.report.page import template

HEIGHT = 560
"""Pixels."""
NEAR = 0.3
"""Years to the next record, below which a name goes under its point so that the two do not overlap."""
_MARKS: dict[str, tuple[str, dict[str, Any]]] = {
    "stated": ("stated by its developer", {"color": MEASURED, "size": 8}),
    "derived": ("derived from public figures", {"color": MEASURED, "size": 8, "symbol": "circle-open"}),
    "estimated": ("estimated", {"color": PREDICTED, "size": 9, "symbol": "diamond-open"}),
    "counted": ("counted here", {"color": QUIET, "size": 8, "symbol": "square-open"}),
}


def draw_trend(models: Sequence[Knowable], trend: Trending) -> Figure:
    """Compute over the date of publication, with the record and its trend; the note says what it was fitted to."""
    figure = go.Figure()
    for origin, (name, marker) in _MARKS.items():
        some = [m for m in models if (m.origin or "counted") == origin]
        if some:
            figure.add_scatter(
                x=[m.date for m in some],
                y=[m.flops for m in some],
                text=[m.name for m in some],
                mode="markers",
                marker=marker,
                name=name,
                hovertemplate="%{text}: %{y:.2e} FLOPs<extra></extra>",
            )
    records = trend.records
    figure.add_scatter(
        x=[m.date for m in records],
        y=[m.flops for m in records],
        text=[m.name for m in records],
        mode="lines+text",
        line={"color": QUIET, "width": 1.2, "shape": "hv"},
        textposition=_sides([m.year for m in records]),
        name="record",
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=[records[0].date, records[-1].date],
        y=[trend.at(records[0].year), trend.at(records[-1].year)],
        mode="lines",
        line={"color": PREDICTED, "width": 1.8, "dash": "dash"},
        name=f"trend: {trend.growth.value:.1f} times a year",
        hoverinfo="skip",
    )
    low, high = min(m.flops for m in models), max(m.flops for m in models)
    first, last = min(m.date for m in models), max(m.date for m in models)
    span = last - first
    figure.update_layout(
        xaxis={"title": {"text": "published"}, "range": [first - 0.09 * span, last + 0.05 * span]},
        yaxis={"title": {"text": "training compute (FLOPs)"}, "type": "log", "dtick": 1, "exponentformat": "power"},
    )
    text = html(figure, "compute_trend", HEIGHT)
    note = f"{len(models)} models, {power(low)} to {power(high)} FLOPs. {growth(trend)} {CREDIT}"
    return Figure(text, note)


def _sides(years: Sequence[float]) -> list[str]:
    """Where each record's name stands."""
    gaps = [later - earlier for earlier, later in pairwise(years)]
    return ["bottom right" if gap < NEAR else "top left" for gap in gaps] + ["top left"]


def render_trend(models: Sequence[Knowable], trend: Trending) -> str:
    """The chart as a page: one HTML file that needs no network."""
    page = template("trend.html.j2")
    return page.render(
        figure=draw_trend(models, trend),
        colours={"measured": MEASURED, "predicted": PREDICTED},
        plotly_js=plotly_js(),
        version=__version__,
    )
