"""Trend: how fast the compute of the largest training grows, fitted to the running record of known models.

A record is a training larger than all before it. Its logarithm is taken to grow linearly with time (as in arXiv
2202.05924); the standard error is that of the slope by least squares. Records are picked because they are large, so it
says how well a line fits them, and not how surely growth goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from greylag.plan.demand import Estimate
from greylag.plan.known import Trained
from greylag.spec.error import SpecError

FEWEST = 3
"""Records that a line with an error needs."""


@dataclass(frozen=True)
class Trend:
    """A line through the logarithm of the record's FLOPs."""

    records: tuple[Trained, ...]
    """The models that it was fitted to, by date."""
    growth: Estimate
    """Factor per year; the interval is one standard error on each side."""
    doubling: Estimate
    """Months in which compute doubles, likewise."""
    doubling_error: float
    """Standard error of that, in months."""
    slope: float
    """Decades (factors of ten) per year."""
    level: float
    """Decimal logarithm of the FLOPs at `centre`."""
    centre: float
    """Mean year of the records."""

    def at(self, year: float) -> float:
        """FLOPs on the line."""
        return float(10 ** (self.level + self.slope * (year - self.centre)))


def running_record(models: Sequence[Trained]) -> tuple[Trained, ...]:
    """The models whose training was larger than all before; of one day only the largest."""
    records: list[Trained] = []
    for model in sorted(models, key=lambda m: (m.year, -m.flops)):
        if not records or model.flops > records[-1].flops:
            records.append(model)
    return tuple(records)


def fit_trend(models: Sequence[Trained], since: float = 0.0) -> Trend:
    """The trend of the record since a year. Raises SpecError if fewer than `FEWEST` records are left."""
    records = tuple(m for m in running_record(models) if m.year >= since)
    if len(records) < FEWEST:
        raise SpecError(f"{len(records)} records since {since:g}, and a trend needs {FEWEST}; begin earlier")
    years = np.array([m.year for m in records])
    logs = np.log10([m.flops for m in records])
    centre = float(years.mean())
    (slope, level), covariance = np.polyfit(years - centre, logs, 1, cov=True)
    slope, level, error = float(slope), float(level), float(np.sqrt(covariance[0, 0]))
    basis = (
        f"one standard error of a log-linear fit to {len(records)} records, {records[0].name} ({records[0].date}) to "
        f"{records[-1].name} ({records[-1].date})"
    )
    months = 12 * float(np.log10(2)) / slope
    months_error = months * error / slope
    return Trend(
        records=records,
        growth=Estimate(10**slope, 10 ** (slope - error), 10 ** (slope + error), basis),
        doubling=Estimate(months, months - months_error, months + months_error, basis),
        doubling_error=months_error,
        slope=slope,
        level=level,
        centre=centre,
    )
