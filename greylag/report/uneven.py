"""Uneven: rules that find a rank, a node, a replica or a stage that the others wait for. See `explain`.

They need the seconds of every rank, and judge by compute without collectives: the slow rank is the one that computes
long while the others wait. Where waiting inside forward and backward is not known (on devices) ranks of one replica
look alike, and a replica is named as a whole.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from greylag.report.case import Case
from greylag.report.ranks import COMPUTE, Figures, lower_median
from greylag.spec.finding import Finding
from greylag.spec.grid import Grid
from greylag.spec.quantity import difference, percent, seconds
from greylag.spec.step import PHASES

SLOW = 1.1
"""A rank is slow from so many times the one in the middle: MegaScale's stragglers took about a tenth longer for the
same work (arXiv 2402.15627, section 5.1)."""
NAMED = 4
"""Slow ranks that get a finding of their own."""
MOSTLY = 0.8
"""Share of the steps in which the others wait for the same rank, from which that is no accident."""


def uneven(case: Case) -> list[Finding]:
    """What the ranks' differences show, the largest first."""
    if case.ranks.num_ranks < 2:
        return []
    slow = {int(rank) for rank in np.flatnonzero(_slowness(case) > SLOW)}
    if not slow:
        return [*_in_turns(case), *_late(case)]
    groups = list(_groups(case, slow))
    alone = slow.difference(*(ranks for _, ranks in groups))
    order = sorted(alone, key=lambda rank: -_slowness(case)[rank])
    named = [_slow_rank(case, rank, len(order)) for rank in order[:NAMED]]
    return [*(finding for finding, _ in groups), *named]


def _slowness(case: Case) -> Figures:
    """Of each rank, the median over the steps."""
    slowness: Figures = np.median(case.ranks.slowness, axis=0)
    return slowness


def _groups(case: Case, slow: set[int]) -> Iterator[tuple[Finding, set[int]]]:
    """Stages, replicas and nodes of which all ranks are slow, and others are not."""
    grid, per_node = Grid.of(case.job.strategy), case.job.cluster.devices_per_node
    rest = set(slow)
    for name, place_of in (
        ("pipeline stage", lambda rank: grid.coordinates(rank)["pp"]),
        ("replica", lambda rank: rank // grid.replica_world),
        ("node", lambda rank: rank // per_node),
    ):
        members: dict[int, set[int]] = {}
        for rank in range(grid.world):
            members.setdefault(place_of(rank), set()).add(rank)
        for place, ranks in members.items():
            if len(members) > 1 and len(ranks) > 1 and ranks <= rest:
                rest -= ranks
                yield _slow_group(case, name, place, ranks), ranks


def _slow_group(case: Case, name: str, place: int, ranks: set[int]) -> Finding:
    longest = f"all ranks of {name} {place} compute longer than the others"
    what = f"a slow {name}: {longest}"
    where, advice = "forward, backward", "look at power limits, cooling and what else runs there; or replace it"
    if name == "pipeline stage":
        what, where, advice = f"imbalance: {longest}", "strategy.stage_layers", "give that stage fewer layers"
    elif name == "replica":
        advice = "one of its ranks may be what its others wait for: look at each one's device, and at their links"
    longer = float(np.median(_slowness(case)[sorted(ranks)])) - 1
    return Finding(
        level="warning",
        what=what,
        where=where,
        evidence=f"forward and backward {difference(longer)} against the others" + _waiting(case, ranks),
        advice=advice,
        rank=min(ranks),
    )


def _slow_rank(case: Case, rank: int, num_slow: int) -> Finding:
    """The same rank needs longer for its compute in most steps, as one of so many."""
    compute = np.median(case.ranks.compute, axis=0)
    mine, usual = compute[rank], lower_median(compute)
    where = [PHASES[p] for p, longer in zip(COMPUTE, mine > SLOW * usual, strict=True) if longer]
    share = float((case.ranks.slowness[:, rank] > SLOW).mean())
    return Finding(
        level="warning",
        what=f"a slow rank: rank {rank} computes {difference(_slowness(case)[rank] - 1)} against the others"
        + (f", one of {num_slow} that are slow" if num_slow > NAMED else ""),
        where=", ".join(where) or "forward, backward",
        evidence=f"{seconds(mine.sum())} against {seconds(usual.sum())} without collectives, a tenth longer or more in "
        f"{percent(share)} of the steps" + _waiting(case, {rank}),
        advice="look at the device's clocks, temperature and errors, and at what else its host runs"
        + ("; or at how many tokens its experts get" if case.job.strategy.ep > 1 else "; or replace it"),
        rank=rank,
    )


def _waiting(case: Case, ranks: set[int]) -> str:
    """What the others wait meanwhile, as evidence."""
    idle = np.median(case.ranks.idle, axis=0)
    idle[sorted(ranks)] = 0
    longest = idle[idle.sum(axis=1).argmax()]
    if not case.is_notable(longest.sum()):
        return ""
    phase = PHASES[longest.argmax()]
    return f"; other ranks wait up to {seconds(longest.sum())}, most of it in {phase}"


def _in_turns(case: Case) -> Iterator[Finding]:
    """In each step some rank is slow, but never the same: the work is uneven, not the machine."""
    slowness, by_experts = case.ranks.slowness, case.job.strategy.ep > 1
    gap = float(np.median(slowness.max(axis=1)))
    if gap < SLOW:
        return
    slowest = Counter(slowness.argmax(axis=1).tolist())
    cause = "experts get unequal loads" if by_experts else "sequences cost unequal work, or hosts are shared"
    yield Finding(
        level="warning",
        what=f"imbalance: the slowest rank changes from step to step, as where {cause}",
        where="model.moe" if by_experts else "forward, backward",
        evidence=f"slowest rank of a step against the others {difference(gap - 1)}; "
        f"{len(slowest)} of {case.ranks.num_ranks} ranks were the slowest once",
        advice="look at the routers' loads, and at the balancing bias or loss"
        if by_experts
        else "pack sequences to equal work",
    )


def _late(case: Case) -> Iterator[Finding]:
    """The others wait for one rank, none of whose phases is longer than theirs: it comes late to the step."""
    times = case.ranks
    idle = times.idle.sum(axis=2)
    ((rank, often),) = Counter(idle.argmin(axis=1).tolist()).most_common(1)
    waiting = float(np.median(np.delete(np.median(idle, axis=0), rank)))
    longer = float((times.own[rank] - times.usual).clip(min=0).sum())
    if not case.is_notable(waiting) or longer > waiting / 2 or often < MOSTLY * len(idle):
        return
    yield Finding(
        level="warning",
        what=f"host overhead: the others wait {seconds(waiting)} a step for rank {rank}, whose phases are no longer",
        where="between steps",
        evidence=f"it waits least in {percent(often / len(idle))} of the steps",
        advice="look at what its loop does between steps: logging, hooks, checkpoints",
        rank=rank,
    )
