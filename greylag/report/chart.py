"""Chart: a line chart and a bar chart in the one look that every page shares, as HTML without plotly.js.

Colours mean the same everywhere: blue is measured, on held-out text green, orange is predicted; all stand out from a
light and from a dark page. Backgrounds are transparent, and text and grid take their colours from `page.css`, which
follows the reader's colour scheme. The page itself inlines `plotly_js()` once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import plotly.graph_objects as go
import plotly.io
import plotly.offline

from greylag.report.curve import Curve, thin
from greylag.report.summary import Comparison
from greylag.spec.quantity import finite

MEASURED, PREDICTED, HELD_OUT, ALARM, QUIET = "#3483d1", "#d9822b", "#2e9e6b", "#d64545", "#8a8f98"

FEW = 30
"""Up to so many points are marked as points."""

Look = Literal["measured", "raw", "validation", "predicted", "limit", "skipped"]
_LINES: dict[str, dict[str, Any]] = {
    "measured": {"line": {"color": MEASURED, "width": 1.8}},
    "raw": {"line": {"color": MEASURED, "width": 1}, "opacity": 0.5},
    "validation": {"line": {"color": HELD_OUT, "width": 1.2}, "marker": {"color": HELD_OUT, "size": 6}},
    "predicted": {"line": {"color": PREDICTED, "width": 1.8, "dash": "dash"}},
    "limit": {"line": {"color": QUIET, "width": 1.2, "dash": "dot"}},
    "skipped": {"marker": {"color": ALARM, "size": 8, "symbol": "x-thin", "line": {"color": ALARM, "width": 1.8}}},
}
_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
_CONFIG = {"displayModeBar": False, "displaylogo": False, "responsive": True}


@dataclass(frozen=True)
class Line:
    """One line of a chart, or the marks of skipped steps."""

    name: str
    curve: Curve
    look: Look


def plotly_js() -> str:
    """The source of plotly.js."""
    return str(plotly.offline.get_plotlyjs())


def lines(
    name: str,
    content: Sequence[Line],
    y_title: str,
    divisor: float = 1.0,
    y_axis: dict[str, Any] | None = None,
) -> str:
    """A line chart over steps. `name` becomes the id of its element, `divisor` turns values into the axis' unit."""
    figure = go.Figure()
    numbers = [line.curve.xs[at] for line in content for at in (0, -1)]
    first, last = min(numbers), max(numbers)
    margin = max(0.01 * (last - first), 0.5)
    steps = {"dtick": 1} if last - first <= 8 else {"nticks": 8}
    for line in content:
        curve = thin(line.curve)
        figure.add_scatter(
            x=curve.xs,
            y=[_short(y, divisor) for y in curve.ys],
            name=line.name,
            mode=_mode(line.look, curve),
            hovertemplate="%{y:.4~g}",
            showlegend=len(content) > 1,
            **_LINES[line.look],
        )
    figure.update_layout(
        hovermode="x unified",
        xaxis={"title": {"text": "step"}, "range": [first - margin, last + margin], "tickangle": 0, **steps},
        yaxis={"title": {"text": y_title}, **(y_axis or {})},
    )
    return html(figure, name, height=300)


def bars(name: str, content: Sequence[Comparison], x_title: str, divisor: float) -> str:
    """Horizontal bars, measured above predicted, the first row on top."""
    figure = go.Figure()
    labels = [row.what for row in content]
    sides: list[tuple[str, str, str, list[float | None]]] = [
        ("predicted", PREDICTED, "rgba(217,130,43,0.4)", [row.predicted for row in content]),
        ("measured", MEASURED, MEASURED, [row.measured for row in content]),
    ]
    for side, colour, fill, values in sides:
        if any(value is not None for value in values):
            figure.add_bar(
                x=[_short(value, divisor) for value in values],
                y=labels,
                name=side,
                orientation="h",
                marker={"color": fill, "line": {"color": colour, "width": 1.2}},
                hovertemplate="%{x:.4~g}",
            )
    figure.update_layout(
        barmode="group",
        bargap=0.35,
        hovermode="y unified",
        xaxis={"title": {"text": x_title}, "rangemode": "tozero", "nticks": 7, "tickangle": 0},
        yaxis={"showgrid": False, "categoryorder": "array", "categoryarray": labels[::-1]},
        legend={"traceorder": "reversed"},
    )
    return html(figure, name, height=90 + 42 * len(content))


def _mode(look: Look, curve: Curve) -> str:
    """Marks for skipped steps, a line for the rest, with points where they are few: a lone point has no line."""
    if look == "skipped":
        return "markers"
    few = sum(y is not None for y in curve.ys) <= FEW
    return "lines+markers" if look == "validation" or (few and look in ("measured", "raw")) else "lines"


def _short(value: float | None, divisor: float) -> float | None:
    """Six digits are more than a chart shows."""
    value = finite(value)
    return None if value is None else float(f"{value / divisor:.6g}")


def html(figure: go.Figure, name: str, height: int, top: int = 8) -> str:
    """A figure in the look of the page, `top` pixels of it for titles. `name` becomes the id of its element."""
    axis = {"zeroline": False, "automargin": True, "ticks": "", "showline": False, "title": {"standoff": 8}}
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": _FONT, "size": 12, "color": QUIET},
        margin={"l": 8, "r": 8, "t": top, "b": 8},
        legend={
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.02,
            "yanchor": "bottom",
            "bgcolor": "rgba(0,0,0,0)",
        },
        height=height,
    )
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    text = plotly.io.to_html(
        figure, config=_CONFIG, include_plotlyjs=False, full_html=False, div_id=name, default_height=f"{height}px"
    )
    return str(text)
