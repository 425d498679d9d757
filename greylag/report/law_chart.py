"""Law's chart: loss over bits at fixed compute, from FP32 to FP4, a panel for each law.

The figure of Kumar et al. (arXiv 2411.04330, Figure 1, right). Panels have their own loss axes: the laws were fitted to
other models on other text, and their levels do not compare. Handed plain curves, as `report.law` is.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from greylag.report.chart import HELD_OUT, MEASURED, PREDICTED, QUIET, html, plotly_js
from greylag.report.law import Curved
from greylag.spec.quantity import count

TOP = 30
"""Pixels for the titles of panels."""


def fixed_compute(curves: Sequence[Curved]) -> str:
    """The chart as HTML without plotly.js."""
    titles = [f"{c.law}: {count(c.tokens)} tokens, parameters x bits {count(c.product)}" for c in curves]
    figure = make_subplots(rows=1, cols=len(curves), subplot_titles=titles, horizontal_spacing=0.1)
    figure.update_annotations(font={"size": 12, "color": QUIET})
    for number, curve in enumerate(curves, 1):
        _panel(figure, curve, number)
    ticks = [32, 16, 12, 8, 7, 6, 5, 4]
    figure.update_xaxes(
        type="log", autorange="reversed", tickvals=ticks, ticktext=list(map(str, ticks)), title={"text": "bits"},
        tickangle=0,
    )  # fmt: skip
    figure.update_yaxes(nticks=6)
    figure.update_yaxes(title={"text": "loss (nats per token)"}, col=1)
    return html(figure, "fixed_compute", height=380, top=TOP)


def _panel(figure: go.Figure, curve: Curved, number: int) -> None:
    where = {"row": 1, "col": number, "showlegend": False}
    figure.add_scatter(
        x=[float(b) for b in curve.bits], y=[float(f"{y:.6g}") for y in curve.loss], mode="lines", name="law",
        line={"color": PREDICTED, "width": 1.8}, hovertemplate="%{x:.3~g} bits: %{y:.4f}<extra></extra>", **where,
    )  # fmt: skip
    for marks, colour, size in ((curve.choices, MEASURED, 7), ((curve.best,), HELD_OUT, 11)):
        figure.add_scatter(
            x=[m.bits for m in marks],
            y=[float(f"{m.loss:.6g}") for m in marks],
            text=[f"{m.name}<br>{count(m.parameters)} parameters" for m in marks],
            mode="markers",
            marker={"color": colour, "size": size, "symbol": "circle" if len(marks) > 1 else "diamond"},
            hovertemplate="%{text}<br>%{y:.4f}<extra></extra>",
            **where,
        )


def render_fixed_compute(curves: Sequence[Curved]) -> str:
    """The chart as a page of its own, which needs no network."""
    css = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    best = "".join(
        f"<p class='note'>{escape(c.source)}: least at {c.best.bits:.1f} bits, {c.best.loss:.4f}; a diamond.</p>"
        for c in curves
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Precision at fixed compute</title>"
        f"<style>{css}</style><script>{plotly_js()}</script></head><body><main><h1>Precision at fixed compute</h1>"
        f"<section class='card'>{fixed_compute(curves)}{best}</section></main></body></html>\n"
    )
