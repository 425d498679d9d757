"""Explain: why a run takes other seconds than were predicted. Rules from (prediction, measured steps, job) to Findings.

Each rule is a pure function of a `Case` that looks for one cause, and yields nothing where the figures do not show it.
What speaks for a cause is its evidence. Seconds of rank 0 are always there; those of other ranks let a slow rank be
told from a slow link, which look alike from one rank alone. What is uneven between ranks is `uneven`'s; the rules here
look at a rank in the middle, which one slow rank leaves as it is.
"""

from collections.abc import Iterator
from statistics import median, quantiles

from greylag.report.case import ALIKE, NOTABLE, Case
from greylag.report.ranks import COMPUTE
from greylag.report.uneven import uneven
from greylag.spec.finding import Finding
from greylag.spec.quantity import difference, digits, memory, percent, seconds

COMMUNICATES = 0.1
"""Share of the predicted step from which communication inside forward and backward can be told."""
OUTLIER = 1.5
"""A step stands out from so many times the median."""
SLOWER = 1.1
"""A run has grown slower from so many times its first quarter's steps."""


def explain(case: Case) -> list[Finding]:
    """What would explain that the measured steps are not as predicted, the likeliest first; empty if they are."""
    if not case.predicted.total_seconds or not case.every:
        return []
    inside = [f for rule in (_recompute, _inner_link, _launches) for f in rule(case)] or list(_everywhere(case))
    inside = [*uneven(case), *inside]
    around = [f for rule in (_link, _host, _input) for f in rule(case)]
    if max(case.worst(phase)[1] for phase in ("reduce", "other", "data")) > case.excesses[:, COMPUTE].sum(axis=1).max():
        inside, around = around, inside
    return [*inside, *around, *(f for rule in (_now_and_then, _drift, _memory) for f in rule(case))]


def _recompute(case: Case) -> Iterator[Finding]:
    """Backward is off by about one forward, and forward itself is not."""
    forward, excess = case.measured("forward"), case.excess("backward")
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
    """Averaging takes longer: because more is sent, or because the same is sent more slowly."""
    if case.is_notable(case.excess("reduce")):
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
    alone = case.ranks.num_ranks == 1
    return Finding(
        level="warning",
        what=f"a slow link{', or a rank that others wait for' * alone}: {what} takes {seconds(excess)} longer",
        where="cluster.network" if case.job.cluster.num_nodes > 1 else "cluster.node",
        evidence=evidence + (f"; {memory(sent)} a step sent, no more than predicted" if sent and planned else ""),
        advice="measure the links between these ranks alone" + ("; `ranks.jsonl` would tell" * alone),
    )


def _host(case: Case) -> Iterator[Finding]:
    """The loop itself takes long."""
    rank, excess = case.worst("other")
    if case.is_notable(excess):
        pipelined = case.job.strategy.pp > 1
        yield Finding(
            level="warning",
            what=f"host overhead: {seconds(excess)} a step outside of every phase"
            + _on(case, "other", rank)
            + (", or stages that wait for each other" * pipelined),
            where="other",
            evidence=case.spoken("other", rank=rank),
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
            where="cluster.device.efficiency.launch_us",
            evidence=f"forward {difference(forward - 1)}, backward {difference(backward - 1)} against the prediction",
            advice="capture CUDA graphs, raise the micro-batch, or free the host's cores",
        )


def _input(case: Case) -> Iterator[Finding]:
    """Steps wait for data."""
    rank, excess = case.worst("data")
    if case.is_notable(excess):
        yield Finding(
            level="warning",
            what=f"host overhead: a step waits {seconds(excess)} longer for data" + _on(case, "data", rank),
            where="data",
            evidence=case.spoken("data", rank=rank),
            advice="read ahead, use more workers, or move the data nearer",
        )


def _on(case: Case, phase: str, rank: int) -> str:
    """Names the rank, if a phase is longer there than elsewhere."""
    return f" on rank {rank}" if case.stands_out(phase, rank) else ""


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
    if last > SLOWER * first:
        yield Finding(
            level="warning",
            what="the run grows slower as it goes on",
            where="steps",
            evidence=f"median step {seconds(first)} in its first quarter, {seconds(last)} in its last",
            advice="look at temperatures and clocks, at memory that grows, and at other jobs on the hosts",
        )


def _memory(case: Case) -> Iterator[Finding]:
    """More memory than predicted, or so much that the allocator must free and ask again."""
    fullest = max((s.total_bytes for s in case.every if s.bytes), default=0.0)
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
