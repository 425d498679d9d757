"""Plan's pictures: loss over bits at fixed compute, and the time that failures cost by policy, as SVG without scripts.

A page that is printed cannot hold a chart that a script draws; these take their colours from the page's style.
"""

from collections.abc import Callable, Sequence
from html import escape
from math import isfinite, log2

from greylag.report.goodput import WORTH_A_ROW, Kept
from greylag.report.law import Curved
from greylag.spec.quantity import percent

WIDE, TALL = 520, 250
"""Of the figure of one law, in SVG's units: a page's pixels."""
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 38
"""Of its frame."""
TICKS = (32, 16, 12, 8, 6, 5, 4)
"""Bits that are written below."""
ROWS_WIDE, NAME, END = 1080, 62, 170
"""Of the picture of lost time: all of it, the names of policies, and the figures at the end."""
ROW = 30


def bits_picture(curve: Curved) -> str:
    """Loss over bits for one law: a line, dots for what can be chosen, a diamond for the best."""
    line = [(float(b), float(y)) for b, y in zip(curve.bits, curve.loss, strict=True) if isfinite(y)]
    choices, best = [mark for mark in curve.choices if isfinite(mark.loss)], curve.best
    xs = [log2(mark.bits) for mark in (*choices, best)] + [log2(bits) for bits, _ in line]
    ys = [mark.loss for mark in (*choices, best)] + [loss for _, loss in line]
    least, most = min(ys), max(ys)
    above, below = (share * (most - least) or 0.01 for share in (0.06, 0.18))

    def place(bits: float, loss: float) -> tuple[float, float]:
        across = (max(xs) - log2(bits)) / (max(xs) - min(xs) or 1)
        up = (loss - least + below) / (most - least + above + below)
        return LEFT + 6 + (WIDE - LEFT - RIGHT - 12) * across, TALL - BOTTOM - (TALL - TOP - BOTTOM) * up

    parts = _frame(place, least, most)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
    parts.append(f'<polyline class="law" points="{points}"/>')
    for mark in choices:
        x, y = place(mark.bits, mark.loss)
        tip = f"<title>{escape(mark.name)}: {mark.loss:.4f}</title>"
        parts.append(f'<circle class="choice" cx="{x:.1f}" cy="{y:.1f}" r="3.5">{tip}</circle>')
    x, y = place(best.bits, best.loss)
    diamond = f"M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7z"
    parts.append(f'<path class="best" d="{diamond}"/>')
    anchor = "end" if x > 0.75 * WIDE else "middle"
    parts.append(
        f'<text class="told" x="{x:.1f}" y="{y + 21:.1f}" text-anchor="{anchor}">best: {escape(best.name)}</text>'
    )
    return _svg(parts, WIDE, TALL, f"Loss over bits at fixed compute, {curve.source}")


def _frame(place: Callable[[float, float], tuple[float, float]], least: float, most: float) -> list[str]:
    """Ticks of both axes, and what they count."""
    parts = []
    for step in range(5):
        loss = least + (most - least) * step / 4
        y = place(TICKS[0], loss)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{loss:.3f}</text>')
    for bits in TICKS:
        x = place(bits, least)[0]
        parts.append(f'<text x="{x:.1f}" y="{TALL - BOTTOM + 16}" text-anchor="middle">{bits}</text>')
    label = f'<text x="{(LEFT + WIDE) / 2}" y="{TALL - 5}" text-anchor="middle">bits</text>'
    return [*parts, label]


def kinds(goodputs: Sequence[Kept]) -> dict[str, int]:
    """What time is lost to in some policy, and the colour of each (`prediction.css`)."""
    names = goodputs[0].losses if goodputs else {}
    return {
        name: number
        for number, name in enumerate(names)
        if any(kept.losses.get(name, 0.0) > WORTH_A_ROW for kept in goodputs)
    }


def lost_picture(goodputs: Sequence[Kept]) -> str:
    """The share of its time that each policy loses, by cause; the line is the interval of the whole."""
    most = max(1 - kept.interval[0] for kept in goodputs) or 1.0
    per_share, known = (ROWS_WIDE - NAME - END) / most, kinds(goodputs)
    parts = []
    for number, kept in enumerate(goodputs):
        top, left = number * ROW + 4.0, float(NAME)
        parts.append(f'<text x="{NAME - 8}" y="{top + 14}" text-anchor="end">{escape(kept.policy)}</text>')
        for name, colour in known.items():
            wide = kept.losses.get(name, 0.0) * per_share
            parts.append(
                f'<rect class="c{colour}" x="{left:.1f}" y="{top}" width="{max(wide, 0):.2f}" height="{ROW - 12}">'
                f"<title>{escape(f'{name}: {percent(kept.losses.get(name, 0.0))}')}</title></rect>"
            )
            left += wide
        low, high = (NAME + (1 - end) * per_share for end in (kept.interval[1], kept.interval[0]))
        y = top + ROW - 8.5
        parts.append(f'<path class="whisker" d="M{low:.1f} {y - 2}v4M{low:.1f} {y}H{high:.1f}M{high:.1f} {y - 2}v4"/>')
        lost = f"{percent(1 - kept.goodput)} ({percent(1 - kept.interval[1])} to {percent(1 - kept.interval[0])})"
        parts.append(f'<text x="{max(left, high) + 8:.1f}" y="{top + 14}">{escape(lost)}</text>')
    return _svg(parts, ROWS_WIDE, len(goodputs) * ROW + 4, "Time lost by policy and cause")


def _svg(parts: Sequence[str], wide: float, tall: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {wide} {tall}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
