"""Trust: how far a prediction may be off, from how far those of measured runs were, and where it goes beyond them."""

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
    """How far the predicted step time of a job on accelerators can be trusted."""
    known, device = job.software.evidence, job.cluster.device.name
    kind, dtype = "experts" if job.model.moe else "dense", job.precision.gemm_dtype
    if not known:
        return Trust(UNKNOWN, (f"no measured run of {job.software.name} is at hand",))
    spread, remarks = max(e.spread for e in known), []
    wanted = {"device": device, "kind": kind, "dtype": dtype}
    alike = [e for e in known if all(getattr(e, field) == value for field, value in wanted.items())]
    if alike:
        spread = alike[0].spread
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
        runs = f"{alike[0].rows} measured runs of {job.software.name} on {device}, {kind}, {dtype.upper()}"
        return Trust(spread, (f"rests on {runs}",))
    return Trust(spread * BEYOND ** len(remarks), tuple(remarks))
