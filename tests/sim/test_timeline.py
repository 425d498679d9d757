"""The exact timeline: the papers' bubbles, an evaluation written twice, and what transfers cost."""

from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greylag.sim.timeline import Timeline, graph, graph_of, makespan, simulate
from greylag.spec.schedule import CHUNKS, POSTPONED, order
from greylag.spec.strategy import Schedule


def even(schedule: Schedule, pp: int, m: int, f: float = 1.0, i: float = 1.0, w: float = 1.0, vp: int = 1) -> Timeline:
    """One rank's forward takes f, whatever it is cut into."""
    vp = CHUNKS.get(schedule, vp)
    return simulate(graph(schedule, pp, vp, m), f / vp, i / vp, w / vp)


def bubble(timeline: Timeline, postponed: bool = False) -> float:
    return (timeline.period if postponed else timeline.makespan) - float(timeline.busy[0])


TIMES = [(1.0, 1.0, 1.0), (1.0, 1.1, 0.8), (1.0, 1.0, 0.6)]


@pytest.mark.parametrize("pp", [2, 4, 8, 16])
@pytest.mark.parametrize(("f", "i", "w"), TIMES)
def test_bubbles_are_the_published_ones(pp: int, f: float, i: float, w: float) -> None:
    """arXiv 2104.04473 section 2.2; 2401.10241 table 1 (its B is I here); 2412.19437 table 2 (its B is I + W)."""
    b, m = i + w, 4 * pp
    assert bubble(even("gpipe", pp, m, f, i, w)) == pytest.approx((pp - 1) * (f + b))
    assert bubble(even("1f1b", pp, m, f, i, w)) == pytest.approx((pp - 1) * (f + b))
    for vp in (2, 4):
        assert bubble(even("interleaved", pp, m, f, i, w, vp)) == pytest.approx((pp - 1) * (f + b) / vp)
    assert bubble(even("zb-h1", pp, m, f, i, w)) == pytest.approx((pp - 1) * (f + i - w))
    assert bubble(even("zb-h2", pp, m, f, i, w), postponed=True) == pytest.approx((pp - 1) * (f + i - 2 * w))
    pair = f + b
    assert bubble(even("dualpipe", pp, m, f, i, w)) == pytest.approx((pp / 2 - 1) * (pair + b - 3 * w))
    assert bubble(even("dualpipe-v", pp, m, f, i, w)) == pytest.approx((pp - 1) * (pair + b - 3 * w) / 2)


@pytest.mark.parametrize("pp", [2, 4, 8, 16])
def test_even_times_leave_no_bubble_in_zero_bubble_schedules(pp: int) -> None:
    for schedule in POSTPONED:
        assert bubble(even(schedule, pp, 4 * pp), postponed=True) == pytest.approx(0.0)
    assert bubble(even("zb-v", pp, 4 * pp)) == pytest.approx((pp - 1) / 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2"])
def test_bubble_rates_of_the_zero_bubble_paper(schedule: Schedule) -> None:
    """arXiv 2401.10241: the rates that its authors compute from times (ms) that they profiled on A100s."""
    profiled = {
        (8, 24): (18.522, 18.086, 9.337, 0.601, {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083}),
        (16, 128): (11.325, 11.308, 8.109, 0.378, {"1f1b": 0.1251, "zb-h1": 0.0576, "zb-h2": 0.0266}),
        (32, 96): (10.419, 10.207, 7.715, 0.408, {"1f1b": 0.2646, "zb-h1": 0.1421, "zb-h2": 0.0641}),
    }
    for (pp, m), (f, i, w, transfer, rates) in profiled.items():
        t = simulate(graph(schedule, pp, 1, m), f, i, w, transfer)
        assert 1 - m * (f + i + w) / t.period == pytest.approx(rates[schedule], abs=5e-5)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Schedule, int, int, int, int]:
    schedule: Schedule = draw(st.sampled_from(get_args(Schedule)))
    pp = draw(st.integers(1, 6))
    if schedule == "dualpipe":
        pp += pp % 2
    return (
        schedule,
        pp,
        CHUNKS.get(schedule, draw(st.integers(1, 3))),
        draw(st.integers(2, 20)),
        draw(st.integers(0, 99)),
    )


@given(pipelines())
@settings(deadline=None)
def test_every_action_starts_as_soon_as_it_may(pipeline: tuple[Schedule, int, int, int, int]) -> None:
    """Written again, without the graph: start = max(rank free, input there)."""
    schedule, pp, vp, m, seed = pipeline
    rng, n = np.random.default_rng(seed), pp * vp
    f, i, w = rng.uniform(0.5, 2, (3, n))
    borders = rng.uniform(0, 0.5, max(n - 1, 0))
    t = simulate(graph_of(order(schedule, pp, vp, m)), f, i, w, borders)
    ends = {}
    for row, end in zip(t.actions, t.end, strict=True):
        for a, e in zip(row, end, strict=True):
            ends[a.stage, a.micro_batch, "I" if a.kind == "B" else a.kind, a.direction] = e
    home = {(a.stage, a.direction): rank for rank, row in enumerate(t.actions) for a in row}
    took = {"F": f, "I": i, "W": w, "B": i + w}
    for rank, row in enumerate(t.actions):
        free = 0.0
        for a, start, end in zip(row, t.start[rank], t.end[rank], strict=True):
            s = a.stage - 1 if a.kind == "F" else a.stage + 1
            ready = 0.0
            if a.kind != "W" and 0 <= s < n:
                ready = ends[s, a.micro_batch, "F" if a.kind == "F" else "I", a.direction]
                ready += borders[min(s, a.stage)] if home[s, a.direction] != rank else 0.0
            assert start == pytest.approx(max(free, ready))
            assert end == pytest.approx(start + took[a.kind][a.stage])
            free = end
    assert t.makespan == pytest.approx(max(e for row in t.end for e in row))
    assert t.busy.sum() == pytest.approx(m * (f + i + w).sum())


def test_pairs_begin_and_hand_over_together() -> None:
    t = even("dualpipe-v", 4, 16)
    joined = 0
    for rank, row in enumerate(t.actions):
        for at, (a, b) in enumerate(pairwise(row)):
            if a.kind == "F" and b.kind == "B":
                joined += 1
                assert t.departure[rank][at] == t.end[rank][at + 1]
                assert t.start[rank][at + 1] == t.end[rank][at]
            elif a.kind != "W":
                assert t.departure[rank][at] == t.end[rank][at]
    assert joined == sum(2 * (16 - 8 + r + 1) + (4 - r - 1) for r in range(4))


def test_few_micro_batches_run_unpaired() -> None:
    t = even("dualpipe-v", 4, 3)
    assert all(np.array_equal(d, e) for d, e in zip(t.departure, t.end, strict=True))


def test_transfers_cost_time_and_blocking_ones_more() -> None:
    plan = graph("1f1b", 4, 1, 8)
    free, beside = simulate(plan, 1, 1, 1), simulate(plan, 1, 1, 1, 0.1)
    blocking = simulate(plan, 1, 1, 1, 0.1, blocking=True)
    assert free.makespan < beside.makespan < blocking.makespan
    assert blocking.makespan <= free.makespan + 0.1 * 2 * (8 + 3)


def test_a_slow_border_is_felt_where_it_is() -> None:
    plan = graph("1f1b", 4, 1, 8)
    t = simulate(plan, 1, 1, 1, [0, 5, 0])
    assert t.start[1][0] == 1
    assert t.start[2][0] == 2 + 5


def test_stages_of_one_rank_hand_over_in_no_time() -> None:
    t = simulate(graph("zb-v", 1, 2, 4), 1, 1, 1, 100.0)
    assert t.makespan == pytest.approx(24)
    assert np.isnan(t.arrival[0]).all()


@given(st.integers(1, 6), st.integers(1, 12))
def test_makespan_of_an_order(stages: int, micro_batches: int) -> None:
    span = makespan(order("1f1b", stages, 1, micro_batches), 1.0, 2.0, 0.0)
    assert span == pytest.approx(3.0 * (micro_batches + stages - 1))


def test_an_order_that_waits_for_itself_is_caught() -> None:
    rows = order("1f1b", 2, 1, 2)
    with pytest.raises(AssertionError, match="waits for itself"):
        graph_of((rows[0][::-1], rows[1]))
