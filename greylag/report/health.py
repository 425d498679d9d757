"""Health: the page's section on FP8: what the audit found, and what the operands of the linear layers look like.

A pure function of the record. Tensors of one kind (the same weight of every layer) share a panel, lines by depth, so
that a model of many layers stays readable; the page's selector chooses the kind.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, get_args

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from greylag.report.audit import Row, compare
from greylag.report.chart import FEW, MEASURED, QUIET, html
from greylag.report.curve import Curve, thin
from greylag.report.figures import Figure
from greylag.report.record import RunRecord
from greylag.report.rows import together, verdict
from greylag.spec.precision import OperandRole
from greylag.spec.telemetry import QUANTILES, OperandHealth, Telemetry

ROLES: tuple[OperandRole, ...] = get_args(OperandRole)
TITLES = {"input": "input", "weight": "weight", "grad": "output gradient"}
POINTS = 200
"""No line has more, of the many."""
WORST = 8
SHOWN_FAULTS = 6
TOP = 30
"""Pixels for the titles of panels."""
_SHALLOW, _DEEP = (52, 131, 209), (160, 90, 200)
"""Colours of the first and the last layer."""


class Health(NamedTuple):
    """What the section shows."""

    verdict: str
    is_sound: bool | None
    """None: not audited."""
    faults: list[Row]
    num_faults: int
    kinds: list[str]
    """What the selector offers, first shown first."""
    amax: Figure | None
    blocks: Figure | None
    shares: Figure | None
    worst: list[OperandHealth]
    """Of the last measured step, those that lose most."""
    step: int
    """The last measured one."""


def health(record: RunRecord) -> Health:
    """The section of a run; empty where it was neither audited nor measured."""
    told, is_sound, faults = "", None, []
    if record.audits:
        rows = compare(record.job, record.audits[-1])
        told = verdict(record.job, record.audits[-1], rows)
        faults = together([row for row in rows if row.fault])
        is_sound = not faults
    steps = record.telemetry
    if not steps or not steps[-1].operands:
        return Health(told, is_sound, faults[:SHOWN_FAULTS], len(faults), [], None, None, None, [], 0)
    kinds = list(dict.fromkeys(_kind(operand) for operand in steps[-1].operands))
    quantized = [operand for operand in steps[-1].operands if operand.rounding]
    worst = sorted(quantized, key=_lost, reverse=True)[:WORST]
    return Health(
        told,
        is_sound,
        faults[:SHOWN_FAULTS],
        len(faults),
        kinds,
        Figure(_amax(steps, kinds), "A line for each layer, from blue for the first to violet for the last."),
        Figure(_blocks(steps[-1].operands, kinds), _blocks_note(steps[-1].step)),
        _shares(steps),
        worst,
        steps[-1].step,
    )


def _kind(operand: OperandHealth) -> str:
    """The layer's name without its number."""
    return operand.layer.split(".", 2)[2]


def _depth(operand: OperandHealth) -> int:
    return int(operand.layer.split(".")[1])


def _lost(operand: OperandHealth) -> tuple[float, float]:
    assert operand.rounding
    return (operand.rounding.flushed + operand.rounding.saturated, operand.rounding.error)


def _panels() -> go.Figure:
    figure = make_subplots(rows=1, cols=len(ROLES), subplot_titles=[TITLES[role] for role in ROLES])
    figure.update_annotations(font={"size": 12, "color": QUIET})
    return figure


def _amax(steps: Sequence[Telemetry], kinds: list[str]) -> str:
    """Largest magnitude over steps, a panel per role; only the first kind is visible before the reader chooses."""
    curves: dict[tuple[str, int, OperandRole], tuple[list[int], list[float | None]]] = {}
    for step in steps:
        for operand in step.operands:
            xs, ys = curves.setdefault((_kind(operand), _depth(operand), operand.role), ([], []))
            xs.append(step.step)
            ys.append(operand.amax or None)
    last = max(depth for _, depth, _ in curves)
    figure = _panels()
    for (kind, depth, role), (xs, ys) in curves.items():
        curve = thin(Curve(xs, ys), POINTS)
        figure.add_scatter(
            x=curve.xs,
            y=curve.ys,
            name=f"layer {depth}",
            meta=kind,
            visible=kind == kinds[0],
            mode="lines+markers" if len(steps) <= FEW else "lines",
            line={"color": _between(depth / max(last, 1)), "width": 1.4},
            marker={"size": 4},
            hovertemplate="%{y:.3~g}",
            showlegend=False,
            row=1,
            col=ROLES.index(role) + 1,
        )
    figure.update_layout(hovermode="x" if last < 12 else "closest")
    figure.update_xaxes(title={"text": "step"}, nticks=5, tickangle=0)
    figure.update_yaxes(type="log", nticks=6, exponentformat="power")
    return html(figure, "amax", height=320, top=TOP)


def _between(share: float) -> str:
    """A colour between the first layer's and the last's."""
    return f"rgb({','.join(str(round(a + (b - a) * share)) for a, b in zip(_SHALLOW, _DEEP, strict=True))})"


def _blocks(operands: Iterable[OperandHealth], kinds: list[str]) -> str:
    """Quantiles of the blocks' amax by kind, all layers together: all of them thin, the middle 80% thick."""
    figure = _panels()
    found: dict[tuple[str, OperandRole], list[tuple[float, ...]]] = {}
    for operand in operands:
        if operand.block_amax:
            found.setdefault((_kind(operand), operand.role), []).append(operand.block_amax)
    for (kind, role), quantiles in found.items():
        low, tenth, _, ninth, high = (
            (min if q < 0.5 else max)(row[i] for row in quantiles) for i, q in enumerate(QUANTILES)
        )
        middle = sorted(row[QUANTILES.index(0.5)] for row in quantiles)[len(quantiles) // 2]
        where = {"row": 1, "col": ROLES.index(role) + 1}
        for ends, width in (((low, high), 2), ((tenth, ninth), 8)):
            text = f"{ends[0]:.3g} to {ends[1]:.3g}"
            _line(figure, ends, kind, where, {"color": MEASURED, "width": width}, text, 0.55)
        figure.add_scatter(
            x=[middle], y=[kind], mode="markers", showlegend=False, name="median", hovertemplate="%{x:.3g}",
            marker={"symbol": "line-ns", "size": 13, "line": {"color": QUIET, "width": 2.5}}, **where,
        )  # fmt: skip
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(type="log", nticks=5, exponentformat="power", tickangle=0)
    figure.update_yaxes(showgrid=False, categoryorder="array", categoryarray=kinds[::-1])
    figure.update_yaxes(showticklabels=False, col=2)
    figure.update_yaxes(showticklabels=False, col=3)
    return html(figure, "block_amax", height=80 + 26 * len(kinds), top=TOP)


def _line(
    figure: go.Figure,
    ends: tuple[float, float],
    kind: str,
    where: dict[str, Any],
    look: dict[str, Any],
    text: str,
    opacity: float,
) -> None:
    figure.add_scatter(
        x=list(ends), y=[kind, kind], mode="lines", line=look, opacity=opacity, showlegend=False,
        hoverinfo="text", text=[text, text], **where,
    )  # fmt: skip


def _blocks_note(step: int) -> str:
    return (
        f"Amax of 1x128 blocks in step {step}, all layers of a kind together: thin from the smallest to the largest, "
        "thick the middle 80%, the mark the median. A block that a tensor's scale leaves below the format's smallest "
        "value is flushed to zero."
    )


def _shares(steps: Sequence[Telemetry]) -> Figure | None:
    """The share flushed and saturated of the tensor that loses most, over steps, a panel per role."""
    figure, is_empty = _panels(), True
    for number, role in enumerate(ROLES):
        found = {s.step: [o.rounding for o in s.operands if o.rounding and o.role == role] for s in steps}
        for name, dash, field in (("flushed to zero", "solid", "flushed"), ("saturated", "dot", "saturated")):
            curve = Curve(
                [step for step, some in found.items() if some],
                [100 * max(getattr(r, field) for r in some) for some in found.values() if some],
            )
            is_empty = is_empty and not curve.xs
            curve = thin(curve, POINTS)
            figure.add_scatter(
                x=curve.xs, y=curve.ys, name=name, mode="lines+markers" if len(curve.xs) <= FEW else "lines",
                line={"color": MEASURED, "dash": dash, "width": 1.6}, marker={"size": 4},
                showlegend=False, hovertemplate="%{y:.3~g}%", row=1, col=number + 1,
            )  # fmt: skip
    if is_empty:
        return None
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(title={"text": "step"}, nticks=5, tickangle=0)
    figure.update_yaxes(rangemode="tozero", ticksuffix="%", nticks=5)
    return Figure(
        html(figure, "shares", height=280, top=TOP),
        "Solid: flushed to zero. Dotted: saturated. Of the tensor that loses most, by the run's own recipe.",
    )
