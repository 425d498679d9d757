"""Ranks and coordinates, peers and the link that they cross."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greylag.spec.grid import AXES, Grid, tier
from greylag.spec.strategy import Strategy

GRIDS = st.builds(Grid, *[st.integers(1, 4)] * 5)


@given(GRIDS, st.data())
def test_rank_and_coordinates_are_inverse(grid: Grid, data) -> None:
    rank = data.draw(st.integers(0, grid.world - 1))
    assert grid.rank(**grid.coordinates(rank)) == rank


@given(GRIDS, st.data())
def test_peers_differ_on_their_axis_only(grid: Grid, data) -> None:
    rank = data.draw(st.integers(0, grid.world - 1))
    for axis, size in zip(AXES, grid.sizes, strict=True):
        peers = grid.peers(rank, axis)
        assert len(peers) == size
        assert rank in peers
        places = [{k: v for k, v in grid.coordinates(p).items() if k != axis} for p in peers]
        assert all(place == places[0] for place in places)


def test_a_replica_is_a_run_of_ranks_and_the_last_axis_is_fastest() -> None:
    grid = Grid.of(Strategy(dp=4, replicas=2, pp=2, tp=2))
    assert grid.replica_world == 8
    assert grid.peers(0, "tp") == [0, 1]
    assert grid.peers(0, "dp") == [0, 2]
    assert grid.peers(0, "pp") == [0, 4]
    assert grid.peers(0, "replica") == [0, 8]
    assert [grid.data_rank(r) for r in range(16)] == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]


def test_expert_groups_are_runs_within_a_stage() -> None:
    grid = Grid.of(Strategy(dp=8, pp=2, ep=4))
    assert grid.peers(5, "ep") == [4, 5, 6, 7]
    assert grid.peers(9, "ep") == [8, 9, 10, 11]


@pytest.mark.parametrize(("ranks", "expected"), [([3], "self"), ([0, 7], "node"), ([7, 8], "network")])
def test_tier(ranks: list[int], expected: str) -> None:
    assert tier(ranks, 8) == expected
