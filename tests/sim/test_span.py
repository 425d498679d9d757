"""The fast span against the exact timeline: equal for even stages, within a stated bound for uneven ones."""

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greylag.sim.span import paths, span
from greylag.sim.timeline import Floats, graph, simulate
from greylag.spec import SpecError
from greylag.spec.schedule import CHUNKS, POSTPONED, rank_of
from greylag.spec.strategy import Schedule

ALL: tuple[Schedule, ...] = get_args(Schedule)
EXACT: list[Schedule] = ["gpipe", "1f1b", "interleaved", "zb-h1"]


def exact(schedule: Schedule, pp: int, vp: int, m: int, times: Floats, transfer: float) -> float:
    timeline = simulate(graph(schedule, pp, vp, m), *times, transfer)
    return timeline.period if schedule in POSTPONED else timeline.makespan


def errors(schedule: Schedule, pp: int, m: int, load: Callable[[np.random.Generator, int], Floats]) -> Floats:
    """(candidates,) span / exact - 1, with transfers of up to 15% of a stage's forward."""
    rng, vp = np.random.default_rng([pp, m]), CHUNKS.get(schedule, 2)
    n = pp * vp
    loads = np.array([load(rng, n) for _ in range(30)])
    f, i, w = loads, loads * rng.uniform(0.9, 2.1, (30, 1)), loads * rng.uniform(0.5, 1.1, (30, 1))
    transfer = rng.choice([0.0, 0.02, 0.05, 0.1, 0.15], 30)
    fast = span(schedule, pp, vp, m, f, i, w, transfer)
    slow = [exact(schedule, pp, vp, m, np.stack([f[k], i[k], w[k]]), transfer[k]) for k in range(30)]
    return fast / np.array(slow) - 1


def heavy_ends(rng: np.random.Generator, n: int) -> Floats:
    load = np.ones(n)
    load[[0, -1]] = rng.uniform(0.5, 2, 2)
    return load


def one_more(rng: np.random.Generator, n: int) -> Floats:
    """The first stages have a layer more than the others."""
    return 1 + (np.arange(n) < rng.integers(1, n)) / rng.integers(2, 9)


def uneven(rng: np.random.Generator, n: int) -> Floats:
    return np.exp(rng.normal(0, 0.1, n))


@given(
    st.sampled_from(EXACT),
    st.sampled_from([1, 2, 3, 4, 8, 16]),
    st.sampled_from([1, 2, 3, 5, 8]),
    st.floats(0.7, 2.2),
    st.floats(0.4, 1.2),
    st.sampled_from([0.0, 0.01, 0.1]),
)
@settings(deadline=None, max_examples=150)
def test_even_stages_are_exact(schedule: Schedule, pp: int, rounds: int, i: float, w: float, transfer: float) -> None:
    vp = CHUNKS.get(schedule, 2)
    m = pp * rounds
    times = np.multiply([[1.0], [i], [w]], np.ones(pp * vp))
    fast = span(schedule, pp, vp, m, *(t[None] for t in times), transfer)[0]
    assert fast == pytest.approx(exact(schedule, pp, vp, m, times, transfer), rel=2e-3 if transfer else 2e-5)


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize(("pp", "m"), [(4, 4), (4, 32), (8, 20), (8, 120), (16, 128)])
def test_heavy_or_light_ends_are_within_3_percent(schedule: Schedule, pp: int, m: int) -> None:
    off = errors(schedule, pp, m, heavy_ends)
    assert off.min() >= -0.03
    assert off.max() <= 0.01


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize(("pp", "m"), [(4, 32), (8, 20), (16, 128)])
@pytest.mark.parametrize("load", [one_more, uneven])
def test_uneven_stages_are_within_6_percent(
    schedule: Schedule, pp: int, m: int, load: Callable[[np.random.Generator, int], Floats]
) -> None:
    off = errors(schedule, pp, m, load)
    assert off.min() >= -0.06
    assert off.max() <= 0.01
    assert off.mean() >= -0.02


@pytest.mark.parametrize("schedule", ALL)
def test_a_rank_ten_times_slower_is_found_however_many_micro_batches(schedule: Schedule) -> None:
    vp = CHUNKS.get(schedule, 2)
    times = np.ones((3, 4 * vp))
    times[:, [rank_of(schedule, 4, vp, stage) == 1 for stage in range(4 * vp)]] = 10
    for m in (2, 7, 64, 1000):
        fast = span(schedule, 4, vp, m, *(t[None] for t in times), 0.05)[0]
        assert fast == pytest.approx(exact(schedule, 4, vp, m, times, 0.05), rel=0.02)


def test_candidates_are_told_apart() -> None:
    rng = np.random.default_rng(0)
    f, i, w = rng.uniform(1, 2, (3, 50, 4))
    m, transfer = rng.choice([4, 6, 40], 50), rng.uniform(0, 0.1, 50)
    together = span("1f1b", 4, 1, m, f, i, w, transfer)
    alone = [span("1f1b", 4, 1, m[k], f[[k]], i[[k]], w[[k]], transfer[k])[0] for k in range(50)]
    assert together == pytest.approx(alone)


def test_many_candidates_pass_in_portions() -> None:
    ones = np.ones((10000, 2))
    assert np.allclose(span("gpipe", 2, 1, 4, ones, ones, ones), 15)


def test_paths_of_gpipe_are_its_closed_form() -> None:
    """Once through every stage, and m - 1 times more through the slowest."""
    visits = paths("gpipe", 3, 1, 50)
    assert {tuple(row) for row in visits.tolist()} == {
        (*(1 + 49 * (k == s) for k in range(3)),) * 3 + (4,) for s in range(3)
    }


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(SpecError, match="even pp"):
        span("dualpipe", 3, 1, 8, np.ones(3), np.ones((1, 3)), np.ones((1, 3)))
