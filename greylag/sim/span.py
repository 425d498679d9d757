"""Span: the seconds of a pipelined step for many candidates at once, without timing any action of theirs.

An order's makespan is the longest path through its graph (`sim.timeline`), so it is a maximum of sums: how often a path
takes each stage's forward, input gradient and weight gradient, and how many borders it crosses. Few paths are ever the
longest. They are found once per schedule: probes (even stages, one slow rank or stage, light and heavy ends, uneven
stages; several ratios of the three times; free and dear transfers) are timed all at once, and one walks back from the
end of each. A candidate then costs one row of a matrix product. With many micro-batches the paths are those of a
smaller number with the same remainder, prolonged by what pp more micro-batches add. What is left out can only make the
span too short, by what `tests/sim/test_span.py` says.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from greylag.sim.timeline import Floats, Graph, Indices, graph
from greylag.spec.schedule import POSTPONED, rank_of
from greylag.spec.strategy import Schedule

CHUNK = 4096
"""Candidates per matrix product, so that its result stays in the cache."""
SETTLED = 3
"""A schedule's pattern repeats after this many times pp micro-batches."""
CLOSE = 1e-4
"""A path is left out if the others come this close to it for the probe that it was found by."""


def span(
    schedule: Schedule,
    pp: int,
    vp: int,
    num_micro_batches: npt.ArrayLike,
    forward: npt.ArrayLike,
    input_gradient: npt.ArrayLike,
    weight_gradient: npt.ArrayLike,
    transfer: npt.ArrayLike = 0.0,
) -> Floats:
    """Seconds from the first action to the end of the last, of each candidate.

    `forward`, `input_gradient` and `weight_gradient` are seconds per micro-batch, (candidates, pp x vp stages) in
    the model's order; `num_micro_batches` and `transfer` (seconds across a border) are (candidates,) or one for all. Of
    a schedule in POSTPONED it is the longest that one rank takes, as in `Timeline.period`. Raises SpecError where
    `order` does.
    """
    forward = np.atleast_2d(np.asarray(forward, float))
    count = len(forward)
    m = np.broadcast_to(np.asarray(num_micro_batches), count)
    times = [forward, np.asarray(input_gradient, float), np.asarray(weight_gradient, float)]
    hop = np.broadcast_to(np.asarray(transfer, float), count)[:, None]
    spans = np.empty(count)
    for each in np.unique(m):
        chosen = np.flatnonzero(m == each)
        visits = paths(schedule, pp, vp, int(each)).T
        for part in np.split(chosen, range(CHUNK, len(chosen), CHUNK)):
            rows = slice(None) if len(part) == count else part
            spans[part] = (np.concatenate([*(t[rows] for t in times), hop[rows]], axis=1) @ visits).max(axis=1)
    return spans


@lru_cache(maxsize=1024)
def paths(schedule: Schedule, pp: int, vp: int, num_micro_batches: int) -> Floats:
    """(paths, 3 x stages + 1): how often each path goes through F, I and W of each stage and across a border."""
    few = SETTLED * pp + num_micro_batches % pp
    if num_micro_batches <= few + pp:
        return _needed(_longest(schedule, pp, vp, num_micro_batches), _probes(schedule, pp, vp))
    base = _longest(schedule, pp, vp, few)
    repeat = _longest(schedule, pp, vp, few + pp) - base
    rest = (num_micro_batches - few) // pp * repeat
    return _needed((base + rest)[(repeat >= 0).all(axis=1)], _probes(schedule, pp, vp))


def _needed(visits: Floats, probes: Floats) -> Floats:
    """The paths without those that others make up for, for every probe."""
    visits = np.unique(visits, axis=0)
    lengths = probes @ visits.T
    reached = lengths >= (1 - CLOSE) * lengths.max(axis=1, keepdims=True)
    kept = []
    while reached.any():
        kept.append(int(reached.sum(axis=0).argmax()))
        reached &= ~reached[:, kept[-1], None]
    return visits[kept]


@lru_cache(maxsize=64)
def _probes(schedule: Schedule, pp: int, vp: int) -> Floats:
    """(probes, 3 x stages + 1): times of stages and transfer, as candidates have them. The seed is fixed.

    No two stages of a probe are quite alike, so that its longest path keeps to its side with more micro-batches.
    """
    rng, n = np.random.default_rng(0), pp * vp
    home = np.array([[rank_of(schedule, pp, vp, stage) == rank for stage in range(n)] for rank in range(pp)])
    ends = np.ones((32, n))
    ends[:, 0], ends[:, -1] = rng.uniform(0.5, 2, 32), rng.uniform(0.5, 2, 32)
    more = 1 + rng.choice([0.15, 0.5], (12, 1)) * (np.arange(n) < rng.integers(1, n + 1, (12, 1)))
    uneven = np.exp(rng.normal(0, 0.1, (24, n)))
    slow = [1 + 9 * home, 1 + 0.2 * home, *([1 + 0.5 * np.eye(n)] if vp > 1 else [])]
    load = np.concatenate([np.ones((18, n)), *slow, ends, more, more[:, ::-1], uneven])
    load *= 1 + 1e-6 * rng.random(load.shape)
    ratios = np.array(
        [[1.0, 1.0, 1.0], [1.0, 1.1, 0.7], [1.0, 1.2, 0.9], [1.0, 2.1, 0.9], [1.0, 1.4, 0.5], [1.0, 0.8, 1.1]]
    )
    ratio, hop = (
        rng.permutation(np.resize(np.arange(6), len(load))),
        rng.permutation(np.resize([0.0, 0.02, 0.08, 0.2], len(load))),
    )
    ratio[:18], hop[:18] = np.arange(18) % 6, np.repeat([0.0, 0.02, 0.2], 6)
    return np.concatenate([*(load * ratios[ratio][:, [k]] for k in range(3)), hop[:, None]], axis=1)


@lru_cache(maxsize=1024)
def _longest(schedule: Schedule, pp: int, vp: int, num_micro_batches: int) -> Floats:
    """(probes, 3 x stages + 1): what the longest path of each probe goes through."""
    plan, probes = graph(schedule, pp, vp, num_micro_batches), _probes(schedule, pp, vp)
    steps = _Steps(plan)
    ended, late = _time(steps, probes)
    last = np.array([p[-1] for p in plan.places])
    if schedule not in POSTPONED:
        return _walk(steps, late, last[ended[last].argmax(axis=0)])
    first = np.array([p[0] for p in plan.places])
    rank = (ended[last] - (ended[first] - probes.T[plan.stage[first]])).argmax(axis=0)  # the first action is an F
    before = _walk(steps, late, first[rank])
    before[np.arange(len(rank)), plan.stage[first[rank]]] -= 1
    return _walk(steps, late, last[rank]) - before


class _Steps:
    """A graph as arrays with one more entry, the start of time, which takes no time and waits for itself."""

    def __init__(self, plan: Graph) -> None:
        size, n = len(plan.kind), plan.num_stages
        self.num_stages = n
        self.before = np.array([*plan.before, size]) % (size + 1)
        self.source = np.array([*plan.source, size]) % (size + 1)
        self.crosses = np.append(plan.edge >= 0, False)
        work = np.full(size, 4 * n)
        for row, kind in enumerate("FIWB"):
            work[plan.kind == kind] = row * n
        self.work = np.append(np.where(work < 4 * n, work + plan.stage, work), 4 * n)
        """Which row of a table of times an action takes: F, I, W and B of each stage, and nothing."""
        depth = [0] * size + [-1]
        for i, (before, source) in enumerate(zip(plan.before, plan.source, strict=True)):
            a, b = depth[before], depth[source]
            depth[i] = 1 + (a if a > b else b)
        depths = np.array(depth[:-1])
        by_depth = np.argsort(depths, kind="stable")
        self.levels = np.split(by_depth, np.flatnonzero(np.diff(depths[by_depth])) + 1)
        """The actions that wait for none of each other, level by level."""


def _time(steps: _Steps, probes: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """(actions + 1, probes): when each action ends, and whether it waited for its input rather than for its rank."""
    hop = probes[:, -1]
    f, i, w = np.split(probes[:, :-1].T, 3)
    table = np.concatenate([f, i, w, i + w, np.zeros((1, len(probes)))])
    shape = (len(steps.work), len(probes))
    ended, late = np.zeros(shape), np.zeros(shape, bool)
    for level in steps.levels:
        free = ended[steps.before[level]]
        there = ended[steps.source[level]] + steps.crosses[level, None] * hop
        late[level] = there > free
        ended[level] = np.maximum(free, there) + table[steps.work[level]]
    return ended, late


def _walk(steps: _Steps, late: npt.NDArray[np.bool_], at: Indices) -> Floats:
    """Walk back from the end of each probe's action `at` to the start, counting what is passed."""
    n, probe = steps.num_stages, np.arange(len(at))
    passed, crossed = [], np.zeros(len(at))
    while (at < len(steps.work) - 1).any():
        passed.append(at)
        came = late[at, probe]
        crossed += came & steps.crosses[at]
        at = np.where(came, steps.source[at], steps.before[at])
    works = probe * (4 * n + 1) + steps.work[np.array(passed)]
    counts = np.bincount(works.ravel(), minlength=len(at) * (4 * n + 1)).reshape(len(at), -1)
    f, i, w, b = np.split(counts[:, : 4 * n], 4, axis=1)
    return np.concatenate([f, i + b, w + b, crossed[:, None]], axis=1).astype(float)
