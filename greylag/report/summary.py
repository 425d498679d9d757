"""Summary: the few figures that a run comes down to, measured beside predicted.

Pure functions of a RunRecord. Medians are taken over the steady steps; what is compared is put into one shape,
`Comparison`, so that every table and chart of the page reads the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from greylag.report.curve import Curve, smooth, span
from greylag.report.record import RunRecord
from greylag.spec.job import Job
from greylag.spec.parts import num_active_parameters, num_parameters, parts
from greylag.spec.quantity import finite
from greylag.spec.step import PHASES, POOLS, Step

WARM_UP = 3
"""First steps that no median counts: they allocate and fill caches, and in the third the profiler watches memory."""
FEW = 5
"""Up to this many steps, medians count them all."""


@dataclass(frozen=True)
class Comparison:
    """One quantity, measured and predicted; None where it is not known."""

    what: str
    measured: float | None
    predicted: float | None

    @property
    def error(self) -> float | None:
        """How far the prediction is off, relative to the measurement; positive where it said too much."""
        if not self.predicted or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Summary:
    """What the page says in figures."""

    steady: Sequence[Step]
    """The steps that medians count."""
    warm_up: int
    """How many first steps they leave out."""
    step_time: Comparison
    tokens_per_second: Comparison
    flops_per_second: Comparison
    utilization: Comparison
    memory: Comparison
    wire: Comparison
    phases: list[Comparison]
    pools: list[Comparison]
    """Of the step with the highest total."""
    loss: Curve
    smoothed: Curve
    validation: Curve
    """Validation loss at the steps that have one."""
    span: int
    """Steps that the smoothed loss looks back on."""
    skipped: list[Step]
    num_lossless: int
    """Steps without a finite loss."""

    @property
    def last_loss(self) -> float | None:
        """The smoothed loss at the end."""
        return self.smoothed.ys[-1]


@dataclass(frozen=True)
class RoleSize:
    """The weights of one role."""

    role: str
    num_weights: int
    total: int
    active: int
    """What one token meets."""
    is_gemm: bool
    """Whether the recipe's operand formats apply to them."""


def summarize(record: RunRecord) -> Summary:
    """All figures of a run."""
    steps, predicted = record.steps, record.predicted
    counted = steady(steps)
    fullest = max((s for s in steps if s.bytes), key=lambda s: s.total_bytes, default=None)

    def compare(what: str, of: Callable[[Step], float | None]) -> Comparison:
        return Comparison(what, middle(counted, of), finite(of(predicted)) if predicted else None)

    losses = Curve([s.number for s in steps], [finite(s.loss) for s in steps])
    validated = [(s.number, y) for s in steps if (y := finite(s.validation_loss)) is not None]
    smoothing = span(len(steps))
    return Summary(
        steady=counted,
        warm_up=len(steps) - len(counted),
        step_time=compare("step", lambda s: s.total_seconds),
        tokens_per_second=compare("tokens/s", throughput),
        flops_per_second=compare("FLOP/s", lambda s: s.flops_per_second if s.total_seconds else None),
        utilization=compare("utilization", lambda s: s.utilization if s.total_seconds else None),
        memory=_peak("peak", fullest, predicted, lambda s: s.total_bytes),
        wire=compare("sent to peers", lambda s: s.wire_bytes),
        phases=[compare(phase, lambda s, phase=phase: s.seconds.get(phase, 0.0)) for phase in PHASES],  # type: ignore[misc]
        pools=[_peak(pool, fullest, predicted, lambda s, pool=pool: s.bytes.get(pool, 0.0)) for pool in POOLS],  # type: ignore[misc]
        loss=losses,
        smoothed=Curve(losses.xs, smooth(losses.ys, smoothing)),
        validation=Curve([number for number, _ in validated], [y for _, y in validated]),
        span=smoothing,
        skipped=[s for s in steps if s.skipped],
        num_lossless=losses.ys.count(None),
    )


def steady(steps: Sequence[Step]) -> Sequence[Step]:
    """The steps that medians count: those behind the warm-up, of a short run all."""
    return steps[WARM_UP:] if len(steps) > FEW else steps


def middle(steps: Sequence[Step], of: Callable[[Step], float | None]) -> float | None:
    """The median over the steps that have the quantity."""
    known = [value for s in steps if (value := finite(of(s))) is not None]
    return median(known) if known else None


def throughput(step: Step) -> float | None:
    """Tokens per second, None for a step that took no time."""
    return step.tokens_per_second if step.total_seconds else None


def role_sizes(job: Job) -> list[RoleSize]:
    """The model's weights by role, largest first. Experts are the only weights that a token may not meet."""
    resting = num_parameters(job.model) - num_active_parameters(job.model)
    sizes: dict[str, list[int]] = {}
    gemm: dict[str, bool] = {}
    for part in parts(job.model):
        if not part.is_buffer:
            sizes.setdefault(part.role, []).append(part.size)
            gemm[part.role] = part.is_gemm
    rows = [
        RoleSize(role, len(own), sum(own), sum(own) - (resting if role == "expert" else 0), gemm[role])
        for role, own in sizes.items()
    ]
    return sorted(rows, key=lambda row: -row.total)


def _peak(what: str, fullest: Step | None, predicted: Step | None, of: Callable[[Step], float]) -> Comparison:
    return Comparison(
        what,
        finite(of(fullest)) if fullest else None,
        finite(of(predicted)) if predicted and predicted.bytes else None,
    )
