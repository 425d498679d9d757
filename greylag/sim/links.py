"""Links: seconds of collectives and transfers over the tiers of a cluster.

Ranks fill nodes in order, so a group of `ranks` whose numbers lie `stride` apart has min(ranks, linked / stride)
members in reach of the node link. A ring over more nodes leaves each node by as many network cards as the group has
members there. All sizes and degrees may be numpy arrays.
"""

from dataclasses import dataclass

import numpy as np

from greylag.sim.operators import Size
from greylag.spec.cluster import Cluster, Link
from greylag.spec.error import SpecError

ALONE = 23e-6
"""Seconds that a collective takes beyond its bytes and steps where nothing else runs: 22 to 26 us over NVLink, fitted
by the makers of SimuMax to many sizes (MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json,
fixed_latency_us)."""
IN_A_STEP = 45e-6
"""The same in a step, to which ranks come one after the other. A choice of ours."""


@dataclass(frozen=True)
class Links:
    """The links of a cluster."""

    cluster: Cluster
    start: float = IN_A_STEP
    """Seconds that each collective takes beyond its bytes and steps."""

    def gather(self, size: Size, ranks: Size, stride: Size = 1, calls: Size = 1) -> Size:
        """All-gather of `size` bytes in all, or a reduce-scatter of them, in so many calls, by rings; 0 for one rank.

        A ring takes as many steps as it has other ranks, each with the latency of the link that it crosses.
        """
        near = self._near(ranks, stride)
        nodes = np.ceil(ranks / near)
        latency = self._link_latency("node", near > 1) * (ranks - nodes)
        latency = latency + self._link_latency("network", nodes > 1) * np.where(nodes > 1, nodes, 0)
        ring = size * (ranks - 1) / ranks / self._slowest(ranks, near)
        return np.where(ranks > 1, ring + calls * (latency + self.start), 0.0)

    def reduce(self, size: Size, ranks: Size, stride: Size = 1) -> Size:
        """All-reduce of `size` bytes, twice what a gather moves; between nodes by trees, whose depth is the latency."""
        near = self._near(ranks, stride)
        ring = 2 * size * (ranks - 1) / ranks / self._slowest(ranks, near)
        return np.where(ranks > 1, ring + 2 * self._steps(ranks, near) + self.start, 0.0)

    def all_to_all(self, size: Size, ranks: Size, stride: Size = 1, copies: Size = 1.0) -> Size:
        """Each of `ranks` sends `size` bytes, an equal share to each; both tiers carry their part at once.

        `copies` is the share of what is meant for other nodes that travels there, where a node's ranks share a copy,
        which the node link then hands on.
        """
        near = self._near(ranks, stride)
        e = self.cluster.device.efficiency
        beyond = size * (ranks - near) / ranks
        inside = np.where(np.less(copies, 1.0), size - size / ranks, size * (near - 1) / ranks)
        inside = inside / (self._bandwidth("node", near > 1) * e.all_to_all)
        outside = copies * beyond / (self._bandwidth("network", ranks > near) * e.all_to_all_network)
        return np.where(ranks > 1, np.maximum(inside, outside) + self._steps(ranks, near) + self.start, 0.0)

    def send(self, size: Size, stride: Size) -> Size:
        """A transfer of `size` bytes to the rank `stride` away."""
        e, near = self.cluster.device.efficiency, self._near(2, stride) > 1
        node = self._bandwidth("node", near) * e.node
        network = self._bandwidth("network", np.logical_not(near)) * e.network
        latency = np.where(near, self._link_latency("node", near), self._link_latency("network", np.logical_not(near)))
        return size / np.where(near, node, network) + latency + e.kernel

    def _slowest(self, ranks: Size, near: Size) -> Size:
        """Bytes per second of the slowest link of a ring, per rank."""
        e = self.cluster.device.efficiency
        node = self._bandwidth("node", near > 1) * e.node
        network = self._bandwidth("network", ranks > near) * e.network * near
        return np.where(ranks > near, np.where(near > 1, np.minimum(node, network), network), node)

    def _steps(self, ranks: Size, near: Size) -> Size:
        """Latency of a collective: a step to each neighbour within nodes, a tree's between them."""
        nodes = ranks / near
        inside = self._link_latency("node", near > 1) * (near - 1)
        between = self._link_latency("network", nodes > 1) * 2 * np.ceil(np.log2(np.maximum(nodes, 1)))
        return inside + between

    def nodes(self, ranks: Size, stride: Size = 1) -> Size:
        """Over how many reaches of the node link a group is spread."""
        return ranks / self._near(ranks, stride)

    def _near(self, ranks: Size, stride: Size) -> Size:
        """Members of a group within reach of the node link."""
        return np.minimum(ranks, np.maximum(1, self.cluster.linked // np.maximum(stride, 1)))

    def _bandwidth(self, tier: str, used: Size) -> float:
        link = self._link(tier, used)
        return link.bandwidth if link else 1.0

    def _link_latency(self, tier: str, used: Size) -> float:
        link = self._link(tier, used)
        return link.latency if link else 0.0

    def _link(self, tier: str, used: Size) -> Link | None:
        """The link; None if nothing that is asked for uses it. Raises SpecError if it is used and not public."""
        link: Link | None = getattr(self.cluster, tier)
        if link is None and np.any(used):
            raise SpecError(
                f"cluster '{self.cluster.name}': the {tier} link is not public; write cluster.{tier} in the job file"
            )
        return link
