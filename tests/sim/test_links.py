"""Collectives by hand: rings at the slowest link, tokens once a node where ranks share a copy."""

import numpy as np
import pytest

from greylag.sim.links import IN_A_STEP, Links
from greylag.spec.cluster import Cluster
from greylag.spec.load import load_preset

SIZE = 1e9


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    found: Cluster = load_preset("cluster", "h100-8x16")
    return found


def test_a_ring_inside_a_node_runs_at_its_link(cluster: Cluster) -> None:
    assert cluster.node
    e = cluster.device.efficiency
    seconds = Links(cluster).gather(SIZE, 8)
    expected = SIZE * 7 / 8 / (cluster.node.bandwidth * e.node) + 7 * cluster.node.latency + IN_A_STEP
    assert seconds == pytest.approx(expected)
    assert Links(cluster).gather(SIZE, 1) == 0


def test_a_collective_starts_once(cluster: Cluster) -> None:
    for call in ("gather", "reduce", "all_to_all"):
        late, early = (getattr(Links(cluster, start), call)(SIZE, 16) for start in (IN_A_STEP, 0.0))
        assert late - early == pytest.approx(IN_A_STEP)


def test_a_ring_over_nodes_leaves_each_by_as_many_cards_as_it_has_members_there(cluster: Cluster) -> None:
    links = Links(cluster)
    alone, together = links.gather(SIZE, 16, stride=8), links.gather(SIZE, 128)
    assert cluster.network
    e = cluster.device.efficiency
    assert alone > SIZE * 15 / 16 / (cluster.network.bandwidth * e.network)
    assert together < alone / 4  # eight cards carry it, up to the node link's own speed
    assert links.reduce(SIZE, 16, 8) > 1.9 * SIZE * 15 / 16 / (cluster.network.bandwidth * e.network)


def test_calls_pay_their_latency_each(cluster: Cluster) -> None:
    links = Links(cluster)
    once, often = links.gather(SIZE, 128, calls=1), links.gather(SIZE, 128, calls=100)
    assert often - once == pytest.approx(99 * (links.gather(0.0, 128)))


def test_tokens_that_share_a_copy_spare_the_network(cluster: Cluster) -> None:
    links = Links(cluster)
    each, shared = links.all_to_all(SIZE, 64), links.all_to_all(SIZE, 64, copies=0.5)
    assert shared == pytest.approx(each / 2, rel=0.02)
    assert links.all_to_all(SIZE, 8, copies=0.5) < each / 3  # nothing leaves the node


def test_arrays_are_the_same_lines(cluster: Cluster) -> None:
    links, ranks = Links(cluster), np.array([1, 2, 8, 16, 128])
    for collective in (links.gather, links.reduce, links.all_to_all):
        assert collective(SIZE, ranks) == pytest.approx([float(collective(SIZE, int(n))) for n in ranks])
