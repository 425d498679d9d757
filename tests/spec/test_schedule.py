"""Every schedule does all its work once, in an order that can run, and holds no more micro-batches than it says."""

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greylag.spec import SpecError
from greylag.spec.schedule import CHUNKS, Action, Order, in_flight, one_f_one_b, order, rank_of
from greylag.spec.strategy import Schedule

SCHEDULES = get_args(Schedule)


def chunks(schedule: Schedule, vp: int) -> int:
    return CHUNKS.get(schedule, vp)


def text(actions: tuple[Action, ...], pp: int) -> str:
    """As the papers' figures number them: from 1, a prime for the second chunk."""
    return " ".join(f"{a.kind}{a.micro_batch + 1}{chr(39) * (a.stage // pp)}" for a in actions)


def held(actions: Order) -> list[int]:
    return [sum(row.values()) for row in in_flight(actions)]


def run(actions: Order) -> None:
    """Work the order off as ranks that wait for each other would; fails if they wait for ever."""
    top = max(a.stage for row in actions for a in row)
    done: set[tuple[int, int, str, int]] = set()
    at = [0] * len(actions)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(actions):
            while at[rank] < len(row):
                s, m, kind, d = row[at[rank]]
                needs = {
                    "F": [] if s == 0 else [(s - 1, m, "F", d)],
                    "W": [(s, m, "I", d)],
                }.get(kind, [(s, m, "F", d)] + ([] if s == top else [(s + 1, m, "I", d)]))
                if not all(need in done for need in needs):
                    break
                done.add((s, m, "I" if kind == "B" else kind, d))
                at[rank], moved = at[rank] + 1, True
    assert at == [len(row) for row in actions]


@given(st.sampled_from(SCHEDULES), st.integers(1, 16), st.integers(1, 4), st.integers(1, 70))
def test_all_work_is_done_once_where_it_belongs_and_nobody_waits_for_ever(
    schedule: Schedule, pp: int, vp: int, micro_batches: int
) -> None:
    if schedule == "dualpipe":
        pp, micro_batches = pp + pp % 2, micro_batches + 1
    vp = chunks(schedule, vp)
    actions = order(schedule, pp, vp, micro_batches)
    assert len(actions) == pp
    count = Counter(a for row in actions for a in row)
    assert max(count.values()) == 1
    work: Counter[tuple[int, int, str]] = Counter()
    for a in count:
        work[a.stage, a.micro_batch, a.kind] += 1
    for stage in range(pp * vp):
        for m in range(micro_batches):
            assert work[stage, m, "F"] == 1
            assert work[stage, m, "I"] == work[stage, m, "W"] == 1 - work[stage, m, "B"]
    assert len(count) == sum(work.values())
    for rank, row in enumerate(actions):
        assert all(rank_of(schedule, pp, vp, a.stage, a.direction) == rank for a in row)
    run(actions)


@given(st.integers(1, 16), st.integers(1, 60))
def test_1f1b_holds_few_and_gpipe_all(pp: int, micro_batches: int) -> None:
    assert held(order("1f1b", pp, 1, micro_batches)) == [min(pp - s, micro_batches) for s in range(pp)]
    assert held(order("gpipe", pp, 1, micro_batches)) == [micro_batches] * pp
    assert one_f_one_b(pp, micro_batches) == order("1f1b", pp, 1, micro_batches)


@given(st.integers(1, 16), st.integers(1, 60))
def test_zero_bubble_schedules_hold_what_they_say(pp: int, micro_batches: int) -> None:
    assert max(held(order("zb-h1", pp, 1, micro_batches))) == max(held(order("1f1b", pp, 1, micro_batches)))
    assert max(held(order("zb-h2", pp, 1, micro_batches))) == min(2 * pp - 1, micro_batches)
    halves = max(held(order("zb-v", pp, 2, micro_batches)))
    assert halves == min(2 * pp, 2 * micro_batches)


@pytest.mark.parametrize("pp", [2, 4, 8, 16])
def test_dualpipe_holds_one_more_than_there_are_ranks(pp: int) -> None:
    """PP + 1 (arXiv 2412.19437, table 2); the V has twice as many chunks of half the size."""
    assert held(order("dualpipe", pp, 1, 4 * pp)) == [pp + 1] * pp
    assert held(order("dualpipe-v", pp, 2, 4 * pp)) == [2 * pp + 1] * pp


def test_interleaved_is_the_published_figure() -> None:
    """arXiv 2104.04473, figure 4 bottom: 4 devices, 2 chunks each, 8 micro-batches; its first and last row."""
    rows = order("interleaved", 4, 2, 8)
    assert text(rows[0], 4) == (
        "F1 F2 F3 F4 F1' F2' F3' F4' F5 F6 F7 B1' F8 B2' F5' B3' F6' B4' F7' B1 F8' B2 B3 B4 "
        "B5' B6' B7' B8' B5 B6 B7 B8"
    )
    assert text(rows[3], 4) == (
        "F1 F2 F3 F4 F1' B1' F2' B2' F3' B3' F4' B4' F5 B1 F6 B2 F7 B3 F8 B4 "
        "F5' B5' F6' B6' F7' B7' F8' B8' B5 B6 B7 B8"
    )


def test_zero_bubble_rows_read_as_in_the_paper() -> None:
    """arXiv 2401.10241, figure 3: the last stage puts its weight gradients off, the first does not."""
    first, *_, last = order("zb-h1", 3, 1, 4)
    assert text(first, 3) == "F1 F2 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4"
    assert text(last, 3) == "F1 I1 F2 I2 F3 I3 W1 F4 I4 W2 W3 W4"


def test_dualpipe_runs_from_both_ends() -> None:
    rows = order("dualpipe", 4, 1, 8)
    assert rows[0][0] == Action(0, 0, "F", 0)
    assert rows[3][0] == Action(0, 4, "F", 1)
    mirrored = {(a.stage, a.micro_batch % 4, a.kind) for a in rows[0]}
    assert mirrored == {(a.stage, a.micro_batch % 4, a.kind) for a in rows[3]}
    assert {(a.stage, a.direction) for a in rows[1]} == {(1, 0), (2, 1)}


def test_in_flight_weighs_stages() -> None:
    actions = order("interleaved", 2, 2, 8)
    even, heavy = in_flight(actions)[0], in_flight(actions, [1.0, 1.0, 100.0, 1.0])[0]
    assert sum(even.values()) == 5
    assert heavy[2, 0] >= even[2, 0]
    assert 100 * heavy[2, 0] + heavy[0, 0] >= 100 * even[2, 0] + even[0, 0]


@pytest.mark.parametrize(
    ("schedule", "pp", "vp", "micro_batches", "says"),
    [
        ("1f1b", 4, 2, 8, "1f1b has 1 stages per rank"),
        ("zb-v", 4, 1, 8, "zb-v has 2 stages per rank"),
        ("dualpipe", 3, 1, 8, "even pp"),
        ("dualpipe", 4, 1, 1, "at least 2"),
        ("gpipe", 0, 1, 8, "positive"),
        ("gpipe", 4, 1, 0, "positive"),
    ],
)
def test_what_cannot_run_is_refused(schedule: Schedule, pp: int, vp: int, micro_batches: int, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        order(schedule, pp, vp, micro_batches)
