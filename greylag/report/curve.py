"""Curve: a number over the steps of a run, smoothed and thinned so that a long run still makes a small page.

Both are deterministic. Plotting is `chart`'s.
"""

from collections.abc import Sequence
from typing import NamedTuple

POINTS = 2000
"""No curve on a page has more."""


class Curve(NamedTuple):
    """Points in order; y is None where there is no finite value."""

    xs: list[int]
    ys: list[float | None]


def span(num_steps: int) -> int:
    """Steps that the smoothing looks back on: a twenty-fifth of the run, at least 5 and at most 100."""
    return min(max(num_steps // 25, 5), 100)


def smooth(ys: Sequence[float | None], span: int) -> list[float | None]:
    """Exponential moving average with decay 1 - 2 / (span + 1), corrected for its empty start.

    The correction is that of Adam (arXiv 1412.6980, section 3). A missing value repeats the average so far.
    """
    decay = 1 - 2 / (span + 1)
    average, weight = 0.0, 0.0
    smoothed: list[float | None] = []
    for y in ys:
        if y is not None:
            average = decay * average + (1 - decay) * y
            weight = decay * weight + (1 - decay)
        smoothed.append(average / weight if weight else None)
    return smoothed


def thin(curve: Curve, limit: int = POINTS) -> Curve:
    """At most `limit` points: the lowest and the highest of each of `limit / 2` stretches, so that spikes stay."""
    total = len(curve.xs)
    if total <= limit:
        return curve
    stretches = limit // 2
    keep: list[int] = []
    for i in range(stretches):
        inside = range(i * total // stretches, (i + 1) * total // stretches)
        known = [(y, at) for at in inside if (y := curve.ys[at]) is not None]
        keep += sorted({min(known)[1], max(known)[1]}) if known else [inside[0]]
    return Curve([curve.xs[at] for at in keep], [curve.ys[at] for at in keep])
