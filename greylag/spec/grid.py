"""Grid: which rank stands where.

Ranks are numbered as torchtitan and Megatron-LM do, the last axis fastest: replica, pp, dp, cp, tp. Here `dp`
is the data-parallel axis inside one replica (`strategy.shards` ranks); the replica axis is outermost, so that
one replica is a run of consecutive ranks. Expert groups are runs of `ep` ranks within one stage of a replica.
"""

from dataclasses import dataclass
from typing import Literal

from greylag.spec.strategy import Strategy

AXES = ("replica", "pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class Grid:
    """Degrees per axis, slowest first."""

    replica: int
    pp: int
    dp: int
    cp: int
    tp: int
    ep: int = 1

    @classmethod
    def of(cls, strategy: Strategy) -> "Grid":
        """The grid of a strategy whose dp is resolved."""
        return cls(strategy.replicas, strategy.pp, strategy.shards, strategy.cp, strategy.tp, strategy.ep)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Degree of each of `AXES`."""
        return (self.replica, self.pp, self.dp, self.cp, self.tp)

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.replica * self.replica_world

    @property
    def replica_world(self) -> int:
        """Ranks of one replica: the size of the default process group."""
        return self.pp * self.dp * self.cp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank on each axis."""
        place = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in AXES}

    def rank(self, **place: int) -> int:
        """The rank at a position; axes left out are 0."""
        number = 0
        for axis, size in zip(AXES, self.sizes, strict=True):
            number = number * size + place.get(axis, 0)
        return number

    def peers(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from `rank` on one axis only, itself included, in order."""
        if axis == "ep":
            stage = self.dp * self.cp * self.tp
            start = rank - rank % stage + (rank % stage) // self.ep * self.ep
            return list(range(start, start + self.ep))
        place = self.coordinates(rank)
        size = self.sizes[AXES.index(axis)]
        return [self.rank(**{**place, axis: i}) for i in range(size)]

    def data_rank(self, rank: int) -> int:
        """Which slice of the global batch a rank reads, out of replica * dp."""
        place = self.coordinates(rank)
        return place["replica"] * self.dp + place["dp"]


def tier(ranks: list[int], devices_per_node: int) -> Literal["self", "node", "network"]:
    """The slowest link that a group of ranks crosses, when ranks fill nodes in order."""
    if len(ranks) == 1:
        return "self"
    return "node" if len({r // devices_per_node for r in ranks}) == 1 else "network"
