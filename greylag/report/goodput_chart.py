"""Goodput as two figures: over the number of devices, and over the time between checkpoints, by policy.

They are HTML in the look of every page (`chart`), for a page that inlines plotly.js. The band is the interval.
"""

from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from greylag.report.chart import ALARM, HELD_OUT, MEASURED, PREDICTED, QUIET, html
from greylag.report.goodput import Kept

COLOURS = {"restart": ALARM, "spares": PREDICTED, "eject": MEASURED, "skip": HELD_OUT}
"""By policy."""


def over_devices(results: Sequence[Kept], name: str = "goodput_devices") -> str:
    """Goodput over the number of devices, a line for each policy. `name` becomes the id of the figure's element."""
    return _figure(results, name, "devices", lambda result: float(result.num_devices))


def over_checkpoints(results: Sequence[Kept], name: str = "goodput_checkpoints") -> str:
    """Goodput over the minutes of training between two checkpoints, a line for each policy."""
    return _figure(results, name, "minutes between checkpoints", lambda result: result.checkpoint_interval / 60)


def _figure(results: Sequence[Kept], name: str, x_title: str, x_of: Callable[[Kept], float]) -> str:
    figure = go.Figure()
    for policy in dict.fromkeys(result.policy for result in results):
        line = sorted((result for result in results if result.policy == policy), key=x_of)
        xs, colour = [_short(x_of(result)) for result in line], COLOURS.get(policy, QUIET)
        ends = [_short(r.interval[1]) for r in line] + [_short(r.interval[0]) for r in reversed(line)]
        figure.add_scatter(
            x=xs + xs[::-1],
            y=ends,
            fill="toself",
            fillcolor=colour,
            opacity=0.15,
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            mode="lines",
        )
        figure.add_scatter(
            x=xs,
            y=[_short(result.goodput) for result in line],
            name=policy,
            mode="lines",
            line={"color": colour, "width": 1.8},
            hovertemplate="%{y:.1%}",
        )
    figure.update_layout(
        hovermode="x unified",
        xaxis={"title": {"text": x_title}, "type": "log", "tickformat": "~s"},
        yaxis={"title": {"text": "effective time"}, "range": [0, 1], "tickformat": ".0%"},
    )
    return html(figure, name, height=320)


def _short(value: float) -> float:
    """Six digits are more than a chart shows."""
    return float(f"{value:.6g}")
