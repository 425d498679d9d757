"""Timeline: when each action of a pipeline schedule runs, exactly.

It executes the very action lists of `spec.schedule`: an action starts when its rank is free and what it waits for has
arrived. What waits for what is found once per order (`graph`), so that timing an order is one pass over plain floats.
Many candidates at once are `sim.span`'s matter, which takes the same graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from greylag.spec.schedule import Action, Order, order
from greylag.spec.strategy import Schedule

Floats: TypeAlias = npt.NDArray[np.float64]
Indices: TypeAlias = npt.NDArray[np.intp]
PARTS = {"F": (0,), "I": (1,), "W": (2,), "B": (1, 2)}
"""Which of the three times (forward, input gradient, weight gradient) an action of a kind takes."""


class Graph(NamedTuple):
    """What waits for what: one entry per action, in an order in which every action stands behind what it waits for."""

    actions: Order
    places: tuple[Indices, ...]
    """By rank, where its actions stand."""
    before: list[int]
    """The action before it on its rank; -1 for none, which is the end of the list, where 0 seconds stand."""
    source: list[int]
    """The action of another stage that it waits for; -1 for none."""
    edge: Indices
    """Of the num_stages - 1 borders, the one that its input comes across to this rank; -1 for none."""
    sent: Indices
    """The same of its output."""
    leaves: Indices
    """At whose end its output leaves: its own, or of the B that it is joined with."""
    stage: Indices
    kind: npt.NDArray[np.str_]
    num_stages: int


@dataclass(frozen=True)
class Timeline:
    """A timed order. All times in seconds from the first action's start."""

    graph: Graph
    start: tuple[Floats, ...]
    """By rank, one of each action."""
    end: tuple[Floats, ...]
    departure: tuple[Floats, ...]
    """When its output leaves: at its end, or in a joined pair at the pair's end."""
    arrival: tuple[Floats, ...]
    """When its output is at the next rank; NaN where it goes to none."""

    @property
    def actions(self) -> Order:
        """The order, by rank."""
        return self.graph.actions

    @cached_property
    def makespan(self) -> float:
        """From the first action to the end of the last."""
        return float(max(row[-1] for row in self.end))

    @cached_property
    def period(self) -> float:
        """The longest that a rank takes from its first action to its last.

        It is the step's time where ranks need not wait for one another between steps (`schedule.POSTPONED`).
        """
        return float(max(end[-1] - start[0] for start, end in zip(self.start, self.end, strict=True)))

    @cached_property
    def busy(self) -> Floats:
        """Seconds that each rank computes."""
        return np.array([(end - start).sum() for start, end in zip(self.start, self.end, strict=True)])


@lru_cache(maxsize=64)
def graph(schedule: Schedule, pp: int, vp: int, num_micro_batches: int) -> Graph:
    """The graph of a schedule, kept. Raises SpecError where `order` does.

    DualPipe's pairs are joined where there are micro-batches enough for its whole pattern (2 pp).
    """
    pairs = schedule in ("dualpipe", "dualpipe-v") and num_micro_batches >= 2 * pp
    return graph_of(order(schedule, pp, vp, num_micro_batches), pairs=pairs)


def graph_of(actions: Order, *, pairs: bool = False) -> Graph:
    """The graph of any order. An order that waits for itself is a fault of ours, an AssertionError.

    With `pairs`, an F directly before a B on its rank is one piece of work with it: it begins when the inputs of both
    are there and hands over both outputs at its end (DualPipe's overlapped chunks, arXiv 2412.19437, section 3.2.1).
    """
    flat = _flatten(actions, pairs)
    makes, needs, joined = flat.makes.tolist(), flat.needs.tolist(), flat.joined.tolist()
    done, waiter = [*([_NOT_YET] * flat.outputs), -1], [-1] * (flat.outputs + 1)
    begun, last = list(flat.bounds[:-1]), [-1] * len(actions)
    before: list[int] = []
    source: list[int] = []
    leaves: list[int] = []
    listed: list[int] = []
    turn = list(range(len(actions)))[::-1]
    while turn:
        r = turn.pop()
        at, stop, previous = begun[r], flat.bounds[r + 1], last[r]
        while at < stop:
            size = 1 + joined[at]
            lacking = needs[at] if done[needs[at]] == _NOT_YET else needs[at + size - 1]
            if done[lacking] == _NOT_YET:
                waiter[lacking] = r
                break
            if size == 2:  # wait for the second's input before the first begins
                before.append(previous)
                source.append(done[needs[at + 1]])
                previous = len(listed)
                leaves.append(previous)
                listed.append(~(at + 1))
            end = len(listed) + size - 1
            for i in range(at, at + size):
                before.append(previous)
                source.append(done[needs[i]])
                previous = len(listed)
                leaves.append(end)
                listed.append(i)
                done[makes[i]] = end
                if waiter[makes[i]] >= 0:
                    turn.append(waiter[makes[i]])
            at += size
        begun[r], last[r] = at, previous
    assert begun == list(flat.bounds[1:]), "the schedule waits for itself"
    which = np.array(listed)
    own = np.where(which < 0, ~which, which)
    places = np.empty(len(flat.makes), np.intp)
    places[which[which >= 0]] = np.flatnonzero(which >= 0)
    sent, kind = np.where(which < 0, -1, flat.sent[own]), np.where(which < 0, "", flat.kind[own])
    where = tuple(places[low:high] for low, high in pairwise(flat.bounds))
    return Graph(
        actions, where, before, source, flat.edge[own], sent, np.array(leaves), flat.stage[own], kind, flat.stages
    )


_NOT_YET = -2


class _Flat(NamedTuple):
    """All ranks' actions one after the other, rank r's from bounds[r] on. What they make and need has numbers."""

    bounds: list[int]
    stage: Indices
    kind: npt.NDArray[np.str_]
    makes: Indices
    needs: Indices
    edge: Indices
    sent: Indices
    joined: npt.NDArray[np.bool_]
    stages: int
    outputs: int


def _flatten(actions: Sequence[Sequence[Action]], pairs: bool) -> _Flat:
    stage, micro_batch, kind, direction = (np.array(c) for c in zip(*(a for row in actions for a in row), strict=True))
    stages, count = int(stage.max()) + 1, int(micro_batch.max()) + 1
    bounds = [0, *np.cumsum([len(row) for row in actions]).tolist()]
    home = np.zeros((2, stages), np.intp)
    own = np.repeat(np.arange(len(actions)), np.diff(bounds))
    home[direction, stage] = own
    forward, weight = kind == "F", kind == "W"
    role = np.where(forward, 0, np.where(weight, 2, 1))
    step = np.where(forward, 1, -1)

    def neighbour(at: Indices) -> tuple[npt.NDArray[np.bool_], Indices]:
        """Whether there is such a stage, and the border to it if it is on another rank."""
        there = ~weight & (at >= 0) & (at < stages)
        apart = there & (home[direction, np.clip(at, 0, stages - 1)] != own)
        return there, np.where(apart, np.minimum(stage, at), -1)

    makes = ((direction * stages + stage) * 3 + role) * count + micro_batch
    outputs = 6 * stages * count
    there, edge = neighbour(stage - step)
    joined = np.zeros(len(stage), bool)
    joined[:-1] = pairs & forward[:-1] & (kind[1:] == "B") & (own[1:] == own[:-1])
    needs = np.where(there, makes - step * 3 * count, outputs)
    return _Flat(bounds, stage, kind, makes, needs, edge, neighbour(stage + step)[1], joined, stages, outputs)


def simulate(
    plan: Graph,
    forward: npt.ArrayLike,
    input_gradient: npt.ArrayLike,
    weight_gradient: npt.ArrayLike,
    transfer: npt.ArrayLike = 0.0,
    *,
    blocking: bool = False,
) -> Timeline:
    """Time every action of an order.

    `forward`, `input_gradient` and `weight_gradient` are seconds per micro-batch, one for all stages or an array by
    stage; a B takes both gradients' time. `transfer` is seconds from a stage to the next and back, one for all or an
    array of the num_stages - 1 borders; stages of one rank hand over in no time. Transfers run beside compute, any
    number at once; with `blocking` the sender stands still until its own has arrived.
    """
    n = plan.num_stages
    times = np.stack([np.broadcast_to(np.asarray(t, float), n) for t in (forward, input_gradient, weight_gradient)])
    borders = np.append(np.broadcast_to(np.asarray(transfer, float), n - 1), 0.0)
    seconds = np.zeros(len(plan.kind))
    for kind, parts in PARTS.items():
        seconds = np.where(plan.kind == kind, times[list(parts)].sum(0)[plan.stage], seconds)
    leaving = borders[plan.sent]
    hold = np.bincount(plan.leaves, leaving, len(seconds) + 1) if blocking else None
    ends = np.array(_ends(plan, seconds.tolist(), borders[plan.edge].tolist(), None if hold is None else hold.tolist()))
    departures = ends[plan.leaves]
    arrivals = np.where(plan.sent >= 0, departures + leaving, np.nan)
    columns = (ends - seconds, ends, departures, arrivals)
    return Timeline(plan, *(tuple(values[p] for p in plan.places) for values in columns))


def _ends(plan: Graph, seconds: list[float], delay: list[float], hold: list[float] | None) -> list[float]:
    """When each action ends. Before the first, which -1 finds at the end of the list, stand 0 seconds."""
    end = [0.0] * (len(seconds) + 1)
    if hold is None:
        for i, (before, source, wait, took) in enumerate(zip(plan.before, plan.source, delay, seconds, strict=True)):
            free, there = end[before], end[source] + wait
            end[i] = (free if free > there else there) + took
    else:
        for i, (before, source, wait, took) in enumerate(zip(plan.before, plan.source, delay, seconds, strict=True)):
            free, there = end[before] + hold[before], end[source] + wait
            end[i] = (free if free > there else there) + took
    return end[:-1]


def makespan(actions: Order, forward: float, backward: float, transfer: float) -> float:
    """Seconds from the first action to the end of the last, all stages alike, backward whole or in two halves."""
    return simulate(graph_of(actions), forward, backward / 2, backward / 2, transfer).makespan
