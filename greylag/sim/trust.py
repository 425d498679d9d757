"""Trust: how far a prediction may be off, from how far those of measured runs were, and where it goes beyond them."""

from math import hypot
from typing import NamedTuple

from greylag.spec.job import Job

UNKNOWN = 0.4
"""Spread where no run of the framework is at hand: that of the frameworks known, taken for one another (a choice)."""
BEYOND = 1.5
"""By how much a spread widens for each way in which a job goes beyond the runs at hand (a choice)."""
FURTHER = 2
"""Times the ranks of the largest measured run from which a job goes beyond it."""


class Trust(NamedTuple):
    """The spread of a prediction: nine in ten such step times lie within this share of it, and why."""

    spread: float
    remarks: tuple[str, ...]

    def interval(self, seconds: float) -> tuple[float, float]:
        """The 90% interval of a step time."""
        return seconds / (1 + self.spread), seconds * (1 + self.spread)


def trust(job: Job) -> Trust:
    """How far the predicted step time of a job on accelerators can be trusted.

    A device that was calibrated need not be one of the measured runs; its own kernels' spread comes on top of theirs.
    """
    known, device = job.software.evidence, job.cluster.device.name
    own = job.cluster.device.spread
    kind, dtype = "experts" if job.model.moe else "dense", job.precision.gemm_dtype
    if not known:
        return Trust(hypot(UNKNOWN, own or 0.0), (f"no measured run of {job.software.name} is at hand",))
    spread, remarks = max(e.spread for e in known), []
    wanted = {"device": device, "kind": kind, "dtype": dtype}
    if own is not None:
        del wanted["device"]
    alike = [e for e in known if all(getattr(e, field) == value for field, value in wanted.items())]
    if alike:
        spread = max(alike, key=lambda e: e.rows).spread
    else:
        nearest = max(known, key=lambda e: sum(getattr(e, field) == value for field, value in wanted.items()))
        apart = [
            f"{value} (known: {getattr(nearest, f)})" for f, value in wanted.items() if getattr(nearest, f) != value
        ]
        remarks.append(f"extrapolates: no measured run of {job.software.name} with {', '.join(apart)}")
    ranks = max(e.ranks for e in alike or known)
    if job.strategy.world > FURTHER * ranks:
        remarks.append(f"extrapolates: {job.strategy.world} devices, measured runs had up to {ranks}")
    if alike and not remarks:
        most = max(alike, key=lambda e: e.rows)
        runs = f"rests on {most.rows} measured runs of {job.software.name} on {most.device}, {kind}, {dtype.upper()}"
        remarks.append(runs if own is None else f"{runs}, and on kernels measured on {device}")
        return Trust(hypot(spread, own or 0.0), tuple(remarks))
    return Trust(hypot(spread * BEYOND ** len(remarks), own or 0.0), tuple(remarks))
