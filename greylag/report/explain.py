"""Explain: why a run takes other seconds than were predicted. Rules from (prediction, measured steps, job) to Findings.

Each rule is a pure function of a `Case` that looks for one cause, and yields nothing where the figures do not show it.
What speaks for a cause is its evidence. Seconds of rank 0 are always there; those of other ranks let a slow rank be
told from a slow link, which look alike from one rank alone.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median, quantiles

from greylag.report.summary import steady
from greylag.spec.finding import Finding
from greylag.spec.grid import Grid
from greylag.spec.job import Job
from greylag.spec.quantity import difference, digits, memory, percent, seconds
from greylag.spec.step import PHASES, Step

NOTABLE = 0.05
"""Share of the predicted step from which an excess is looked into. Steps of one run differ by a few percent."""
SLOW = 1.1
"""A rank is slow from so many times the median of all: MegaScale's stragglers took about a tenth longer for the same
work (arXiv 2402.15627, section 5.1)."""
COMMUNICATES = 0.1
"""Share of the predicted step from which communication inside forward and backward can be told."""
OUTLIER = 1.5
"""A step stands out from so many times the median."""
ALIKE = 0.15
"""Two ratios are alike if they differ by less."""


@dataclass(frozen=True)
class Case:
    """What the rules look at."""

    job: Job
    predicted: Step
    every: Mapping[int, Sequence[Step]]
    """All measured steps, ascending, of rank 0 and of every other rank that wrote its own."""

    @cached_property
    def ranks(self) -> dict[int, Sequence[Step]]:
        """The steps behind the warm-up."""
        return {rank: steady(steps) for rank, steps in self.every.items()}

    @property
    def steps(self) -> Sequence[Step]:
        """Of rank 0."""
        return self.ranks[0]

    @cached_property
    def measured(self) -> dict[int, dict[str, float]]:
        """Median seconds by rank and phase."""
        return {
            rank: {phase: median(s.seconds.get(phase, 0.0) for s in steps) for phase in PHASES}
            for rank, steps in self.ranks.items()
        }

    def excess(self, phase: str, rank: int = 0) -> float:
        """Seconds that a phase takes longer than predicted."""
        return self.measured[rank][phase] - self.predicted.seconds.get(phase, 0.0)

    def ratio(self, phase: str) -> float:
        """Measured over predicted, of rank 0; 1 for a phase that is not predicted."""
        predicted = self.predicted.seconds.get(phase, 0.0)
        return self.measured[0][phase] / predicted if predicted else 1.0

    def is_notable(self, excess: float) -> bool:
        """Whether an excess is worth a word."""
        return excess > NOTABLE * self.predicted.total_seconds

    def compute(self, rank: int) -> float:
        """Seconds of a rank's forward and backward."""
        return self.measured[rank]["forward"] + self.measured[rank]["backward"]

    @cached_property
    def together(self) -> list[dict[int, float]]:
        """Seconds of forward and backward by rank, of each step that all ranks have."""
        by_step: dict[int, dict[int, float]] = {}
        for rank, steps in self.ranks.items():
            for s in steps:
                time = s.seconds.get("forward", 0.0) + s.seconds.get("backward", 0.0)
                by_step.setdefault(s.number, {})[rank] = time
        return [times for times in by_step.values() if len(times) == len(self.ranks)]

    @cached_property
    def slowest(self) -> Counter[int]:
        """How often each rank's compute was the longest of a step."""
        return Counter(max(times, key=times.__getitem__) for times in self.together)

    def spoken(self, *phases: str) -> str:
        """The phases' seconds as evidence."""
        return ", ".join(
            f"{p} {seconds(self.measured[0][p])}, {seconds(self.predicted.seconds.get(p, 0.0))} predicted"
            for p in phases
        )


def explain(case: Case) -> list[Finding]:
    """What would explain that the measured steps are not as predicted, the likeliest first; empty if they are."""
    if not case.predicted.total_seconds or not all(case.every.values()):
        return []
    inside = [f for rule in (_slow_rank, _uneven_ranks, _recompute, _inner_link, _launches) for f in rule(case)]
    inside = inside or list(_everywhere(case))
    around = [f for rule in (_link, _host, _input) for f in rule(case)]
    if max(map(case.excess, ("reduce", "other", "data"))) > case.excess("forward") + case.excess("backward"):
        inside, around = around, inside
    return [*inside, *around, *(f for rule in (_now_and_then, _drift, _memory) for f in rule(case))]


def _slow_rank(case: Case) -> Iterator[Finding]:
    """The same ranks need longer for their compute in most steps: a device, a host or a stage with more to do."""
    if len(case.ranks) < 2:
        return
    grid, usual = Grid.of(case.job.strategy), median(case.compute(rank) for rank in case.ranks)
    slow = {rank for rank in case.ranks if case.compute(rank) > SLOW * usual}
    by_stage: dict[int, list[int]] = {}
    for rank in case.ranks:
        by_stage.setdefault(grid.coordinates(rank)["pp"], []).append(rank)
    for stage, mine in by_stage.items():
        if len(by_stage) > 1 and slow.issuperset(mine):
            slow -= set(mine)
            longer = median(case.compute(rank) for rank in mine) / usual - 1
            yield Finding(
                level="warning",
                what=f"imbalance: all measured ranks of pipeline stage {stage} compute longer than the others",
                where="strategy.stage_layers",
                evidence=f"forward and backward {difference(longer)} against the median of the ranks",
                advice="give that stage fewer layers",
                rank=mine[0],
            )
    for rank in sorted(slow, key=case.compute, reverse=True):
        share = case.slowest[rank] / max(1, case.slowest.total())
        if share < 0.5:
            continue
        waiting = max((case.excess("reduce", other) for other in case.ranks if other != rank), default=0.0)
        others = f"; other ranks wait up to {seconds(waiting)} in reduce" if case.is_notable(waiting) else ""
        yield Finding(
            level="warning",
            what=f"a slow rank: rank {rank} computes {difference(case.compute(rank) / usual - 1)} against the median",
            where="forward, backward",
            evidence=f"{seconds(case.compute(rank))} against {seconds(usual)}, slowest in "
            f"{percent(share)} of the steps{others}",
            advice="look at the device's clocks, temperature and errors, and at what else its host runs; or replace it",
            rank=rank,
        )


def _uneven_ranks(case: Case) -> Iterator[Finding]:
    """In each step some rank is slow, but never the same: the work is uneven, not the machine."""
    if len(case.ranks) < 2:
        return
    usual = [(max(times.values()), median(times.values())) for times in case.together]
    gaps, slowest = [most / middle if middle else 1.0 for most, middle in usual], case.slowest
    if not slowest or median(gaps) < SLOW or max(slowest.values()) > 0.5 * slowest.total():
        return
    cause = "experts get unequal loads" if case.job.model.moe else "sequences cost unequal work, or hosts are shared"
    yield Finding(
        level="warning",
        what=f"imbalance: the slowest rank changes from step to step, as where {cause}",
        where="model.moe" if case.job.model.moe else "forward, backward",
        evidence=f"slowest rank against the median of a step {difference(median(gaps) - 1)}; "
        f"{len(slowest)} of {len(case.ranks)} ranks were the slowest once",
        advice="look at the routers' loads, and at the balancing bias or loss"
        if case.job.model.moe
        else "pack sequences to equal work",
    )


def _recompute(case: Case) -> Iterator[Finding]:
    """Backward is off by about one forward, and forward itself is not."""
    forward, excess = case.measured[0]["forward"], case.excess("backward")
    if not forward or abs(case.ratio("forward") - 1) > ALIKE or abs(abs(excess) / forward - 1) > 2 * ALIKE:
        return
    says = case.job.strategy.recompute
    if excess > 0 and says == "full":
        return
    if excess < 0 and says == "none":
        return
    what = "computes activations again" if excess > 0 else "does not compute activations again"
    yield Finding(
        level="warning",
        what=f"recompute: backward is off by about one forward, as if it {what}, but the job says {says!r}",
        where="strategy.recompute",
        evidence=case.spoken("forward", "backward"),
        advice="compare the run's own setting with the job's",
    )


def _link(case: Case) -> Iterator[Finding]:
    """Averaging takes longer: because more is sent, or because the same is sent more slowly; but a rank that computes
    longer makes the others wait just there."""
    waited = max(case.compute(rank) for rank in case.ranks) - case.compute(0)
    if case.is_notable(case.excess("reduce") - waited):
        yield _communication(case, "reduce", case.excess("reduce"), case.spoken("reduce"))


def _inner_link(case: Case) -> Iterator[Finding]:
    """Communication inside forward and backward weighs more in forward, which computes half as much and sends as
    much."""
    axes = ("tp", "cp", "ep", *(("dp",) if case.job.strategy.zero else ()))  # whole gradients are reduced apart
    inside = sum(case.predicted.causes.get(axis, 0.0) for axis in axes)
    forward, backward = case.excess("forward"), case.excess("backward")
    if inside <= COMMUNICATES * case.predicted.total_seconds or not case.is_notable(forward + backward):
        return
    if case.ratio("forward") > (1 + ALIKE / 2) * case.ratio("backward") and backward > 0:
        evidence = f"{seconds(inside)} of it predicted; {case.spoken('forward', 'backward')}"
        yield _communication(case, f"what {', '.join(axes)} send in forward and backward", forward + backward, evidence)


def _communication(case: Case, what: str, excess: float, evidence: str) -> Finding:
    """A link that is slow, unless more was sent than the job says."""
    sent, planned = median(s.wire_bytes for s in case.steps), case.predicted.wire_bytes
    if planned and sent > (1 + ALIKE) * planned:
        return Finding(
            level="warning",
            what="a rank sends more than the job says",
            where="strategy.zero, precision",
            evidence=f"{memory(sent)} a step, {memory(planned)} predicted; {evidence}",
            advice="`greylag audit RUN` names the messages that differ",
        )
    alone = len(case.ranks) == 1
    return Finding(
        level="warning",
        what=f"a slow link{', or a rank that others wait for' * alone}: {what} takes {seconds(excess)} longer",
        where="cluster.network" if case.job.cluster.num_nodes > 1 else "cluster.node",
        evidence=evidence + (f"; {memory(sent)} a step sent, no more than predicted" if sent and planned else ""),
        advice="measure the links between these ranks alone" + ("; write the steps of every rank to tell" * alone),
    )


def _host(case: Case) -> Iterator[Finding]:
    """The loop itself takes long."""
    if case.is_notable(case.excess("other")):
        pipelined = case.job.strategy.pp > 1
        yield Finding(
            level="warning",
            what=f"host overhead: {seconds(case.excess('other'))} a step outside of every phase"
            + (", or stages that wait for each other" * pipelined),
            where="other",
            evidence=case.spoken("other"),
            advice="look at what the loop does between steps: logging, hooks, synchronizing, garbage collection",
        )


def _launches(case: Case) -> Iterator[Finding]:
    """Kernels are launched too slowly, which forward shows first: its kernels are the shorter ones."""
    forward, backward = case.ratio("forward"), case.ratio("backward")
    on_host = case.job.cluster.device.kind != "cpu" and not case.job.software.graphs
    if on_host and case.is_notable(case.excess("forward")) and forward > backward + 2 * ALIKE:
        yield Finding(
            level="warning",
            what="host overhead: forward is slower than backward by more than compute would make it",
            where="software.launch_us",
            evidence=f"forward {difference(forward - 1)}, backward {difference(backward - 1)} against the prediction",
            advice="capture CUDA graphs, raise the micro-batch, or free the host's cores",
        )


def _input(case: Case) -> Iterator[Finding]:
    """Steps wait for data."""
    if case.is_notable(case.excess("data")):
        yield Finding(
            level="warning",
            what=f"host overhead: a step waits {seconds(case.measured[0]['data'])} for data",
            where="data",
            evidence=case.spoken("data"),
            advice="read ahead, use more workers, or move the data nearer",
        )


def _now_and_then(case: Case) -> Iterator[Finding]:
    """A few steps take far longer than the rest: medians do not show it, but the run pays for it."""
    times = [s.total_seconds for s in case.steps]
    usual = median(times)
    long = [s for s in case.steps if s.total_seconds > OUTLIER * usual]
    lost = sum(s.total_seconds - usual for s in long)
    if not long or lost < NOTABLE * sum(times):
        return
    names = ", ".join(str(s.number) for s in long[:6]) + (f" and {len(long) - 6} more" if len(long) > 6 else "")
    every = case.job.run.checkpoint_every
    at_saves = every > 0 and all(s.number % every <= 1 for s in long)
    yield Finding(
        level="warning",
        what=f"{len(long)} of {len(times)} steps take over {digits(OUTLIER)} times the median"
        + (", all where checkpoints are saved" * at_saves),
        where="run.checkpoint_every" if at_saves else "steps",
        evidence=f"steps {names}; {percent(lost / sum(times))} of the time of all steps",
        advice="save less often, or beside the training"
        if at_saves
        else "look for what runs then: evaluations, garbage collection, allocator retries, another job",
        step=max(long, key=lambda s: s.total_seconds).number,
    )


def _drift(case: Case) -> Iterator[Finding]:
    """The last quarter of the steps is slower than the first."""
    quarter = len(case.steps) // 4
    if quarter < 5:
        return
    first, last = (median(s.total_seconds for s in part) for part in (case.steps[:quarter], case.steps[-quarter:]))
    if last > SLOW * first:
        yield Finding(
            level="warning",
            what="the run grows slower as it goes on",
            where="steps",
            evidence=f"median step {seconds(first)} in its first quarter, {seconds(last)} in its last",
            advice="look at temperatures and clocks, at memory that grows, and at other jobs on the hosts",
        )


def _memory(case: Case) -> Iterator[Finding]:
    """More memory than predicted, or so much that the allocator must free and ask again."""
    fullest = max((s.total_bytes for s in case.every[0] if s.bytes), default=0.0)
    planned, device = case.predicted.total_bytes, case.job.cluster.device.memory
    times = [s.total_seconds for s in case.steps]
    jitter = quantiles(times, n=10)[-1] / median(times) if len(times) >= 10 and median(times) else 1.0
    if fullest > 0.92 * device:
        yield Finding(
            level="warning",
            what="memory pressure: the device is nearly full, where an allocator frees and asks again",
            where="memory",
            evidence=f"{memory(fullest)} of {memory(device)}; the slowest tenth of the steps takes "
            f"{difference(jitter - 1)} against the median",
            advice="recompute more, shard more, or take a smaller micro-batch",
        )
    elif planned and fullest > (1 + ALIKE) * planned:
        yield Finding(
            level="warning",
            what="the run holds more memory than predicted",
            where="memory",
            evidence=f"{memory(fullest)}, {memory(planned)} predicted",
            advice="`greylag audit RUN` names the caches and states that differ",
        )


def _everywhere(case: Case) -> Iterator[Finding]:
    """Forward and backward are slower alike, and nothing else tells why: the device itself."""
    excess = case.excess("forward") + case.excess("backward")
    if not case.is_notable(excess) or abs(case.ratio("forward") / case.ratio("backward") - 1) > 2 * ALIKE:
        return
    local, s = case.job.cluster.is_local, case.job.strategy
    is_joined = s.zero == 3 or max(s.tp, s.cp, s.ep, s.pp) > 1
    yield Finding(
        level="warning",
        what=f"compute is slower than predicted, forward and backward alike, by {seconds(excess)} a step"
        + (", or what they wait for inside" * is_joined),
        where="forward, backward",
        evidence=case.spoken("forward", "backward"),
        advice="nothing else may run beside it, or calibrate this machine again"
        if local
        else "look at clocks and power limits, and at the kernels of the largest matrix multiplies",
    )
