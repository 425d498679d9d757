"""Fill: a zero-bubble order whose weight gradients stand where its ranks would else wait.

The orders of `spec.schedule` place them by rule, which leaves no bubble where forward, input gradient and weight
gradient take the same time. For other times arXiv 2401.10241 (section 3) searches an order (ZB-1p, ZB-2p). Here
forwards and input gradients keep their handcrafted order; the weight gradients are taken out and put back, each where
its rank waits for input or needs the memory. On ZB-H2 that comes to the bubble rates that the paper prints for ZB-2p
(`benchmarks/schedules.py`). It needs seconds, so it is not in `spec`; its result is an order like any other.
"""

import heapq
from collections import deque

import numpy as np
import numpy.typing as npt

from greylag.sim.timeline import Floats, graph, graph_of, simulate
from greylag.spec.error import SpecError
from greylag.spec.job import Job
from greylag.spec.schedule import Action, Order
from greylag.spec.strategy import Schedule

ROOM: dict[Schedule, int] = {"zb-h1": 1, "zb-h2": 2, "zb-v": 2}
"""Memory that a schedule may take, in activations of a stage times pp: as much as its handcrafted order."""
PATIENCE = (0.0, 0.3, 0.6, 1.0)
"""Shares of a weight gradient's time that a wait must last to be filled by it: each is tried."""
GOOD = 1.005
"""A rank's time, in that of its work, at which no more is tried."""


def fill(
    schedule: Schedule,
    pp: int,
    vp: int,
    num_micro_batches: int,
    forward: npt.ArrayLike,
    input_gradient: npt.ArrayLike,
    weight_gradient: npt.ArrayLike,
    transfer: float = 0.0,
    *,
    share: float = 1.0,
) -> Order:
    """The order of a schedule with its weight gradients placed for these seconds (one for all stages or by stage).

    `share` of a micro-batch's activations stay from its input gradient to its weight gradient; a rank holds no more
    than ROOM. It is never slower than the schedule's own order. Raises SpecError for a schedule that has none to place.
    """
    if schedule not in ROOM:
        raise SpecError(f"strategy.schedule = {schedule!r} has no weight gradients to place: {', '.join(ROOM)} have")
    f, i, w = (np.broadcast_to(np.asarray(t, float), pp * vp) for t in (forward, input_gradient, weight_gradient))
    least = simulate(graph(schedule, pp, vp, num_micro_batches), f, i, w, transfer)
    rule = least.actions
    for patience in PATIENCE:
        if least.period <= GOOD * least.busy.max():
            break
        tried = _place(rule, [f, i, w], transfer, ROOM[schedule] * pp, share, patience)
        timeline = simulate(graph_of(tried), f, i, w, transfer)
        if timeline.period < least.period:
            least = timeline
    return least.actions


def is_placed(job: Job) -> bool:
    """Whether the job's framework places weight gradients by their times.

    For `zb-h2` alone: in the memory of `zb-h1` the paper's search finds nothing better than the rule (its bubble rates
    of ZB-1p are those of ZB-H1).
    """
    return job.software.placed and job.strategy.schedule == "zb-h2" and job.strategy.pp > 1


def placed(job: Job, forward: Floats, input_gradient: Floats, weight_gradient: Floats, transfer: float) -> Order:
    """The order of a job that is placed, for seconds by stage.

    A weight gradient needs 32 of the 34 values per token and hidden dim that forward keeps, and none of the 5 that an
    unfused attention keeps per head and pair of tokens (arXiv 2401.10241, section 3).
    """
    s, model = job.strategy, job.model
    scores = 5 * model.num_heads * job.sequence / model.hidden_size if job.software.attention == "unfused" else 0.0
    times = (forward, input_gradient, weight_gradient, transfer)
    return fill(s.schedule, s.pp, s.vp, job.num_micro_batches, *times, share=32 / (34 + scores))


def _place(actions: Order, times: list[Floats], transfer: float, room: float, share: float, patience: float) -> Order:
    """Let the ranks run, each taking what `_Rank.take` says whenever it is free or an input comes."""
    n = len(times[0])
    seconds = dict(zip("FIW", (t.tolist() for t in times), strict=True))
    waits = [patience * w for w in seconds["W"]]
    ranks = [_Rank(deque(a for a in row if a.kind != "W"), room, share) for row in actions]
    home = {a.stage: r for r, rank in enumerate(ranks) for a in rank.todo}
    arrived = {(0, a.micro_batch, "F"): 0.0 for a in actions[home[0]]}
    turns = [(0.0, r) for r in range(len(ranks))]
    while turns:
        now, r = heapq.heappop(turns)
        rank = ranks[r]
        if now < rank.free:
            continue
        there = arrived.get(rank.todo[0][:3]) if rank.todo else None
        a = rank.take(now, there, waits)
        if a is None:
            if there is not None and there > now:
                heapq.heappush(turns, (there, r))
            continue
        rank.free = now + seconds[a.kind][a.stage]
        heapq.heappush(turns, (rank.free, r))
        if a.kind != "W":
            target = _next(a, n)
            at = rank.free + (transfer if home[target[0]] != r else 0.0)
            arrived[target] = at
            heapq.heappush(turns, (at, home[target[0]]))
    assert not any(rank.todo or rank.awaiting for rank in ranks), "an order waits for itself"
    return tuple(tuple(rank.done) for rank in ranks)


def _next(a: Action, num_stages: int) -> tuple[int, int, str]:
    """What an action's output lets run: the next stage, and the last stage's own input gradient."""
    if a.kind == "F":
        return (a.stage + 1, a.micro_batch, "F") if a.stage + 1 < num_stages else (a.stage, a.micro_batch, "I")
    return max(a.stage - 1, 0), a.micro_batch, "I"


class _Rank:
    """What a rank has done and has to do."""

    def __init__(self, todo: deque[Action], room: float, share: float) -> None:
        self.todo, self.room, self.share = todo, room, share
        self.done: list[Action] = []
        self.awaiting: deque[Action] = deque()
        """Weight gradients that may be done, the oldest first."""
        self.held = 0.0
        self.free = 0.0

    def take(self, now: float, there: float | None, waits: list[float]) -> Action | None:
        """What to do now, given when the next action's input is there (None: not known yet); None is to wait.

        A weight gradient is done where the wait lasts the `waits` of its stage.
        """
        fits = bool(self.todo) and (self.todo[0].kind != "F" or self.held + 1 <= self.room + 1e-9)
        if there is not None and there <= now and fits:
            a = self.todo.popleft()
            self.held += 1.0 if a.kind == "F" else self.share - 1
            if a.kind == "I":
                self.awaiting.append(a._replace(kind="W"))
        elif self.awaiting and (there is None or not fits or there - now >= waits[self.awaiting[0].stage]):
            a = self.awaiting.popleft()
            self.held -= self.share
        else:
            return None
        self.done.append(a)
        return a
