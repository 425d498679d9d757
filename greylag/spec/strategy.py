"""Strategy: how one job is cut over ranks, and in what portions it is worked off.

The degrees use the field's axes: dp pp cp tp ep. `dp` counts every data-parallel rank; `replicas` of them
groups stand outside the device mesh and exchange gradients over bare process groups, so that one of them can
leave without disturbing the others, and the remaining `dp / replicas` ranks shard the state inside a replica.
"""

from typing import Literal

import msgspec


class Strategy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Degrees of parallelism and the portions of work."""

    dp: int | None = None
    """Data-parallel degree; None takes the ranks that pp, cp and tp leave over."""
    replicas: int = 1
    """How many data-parallel replicas stand outside the mesh; must divide dp."""
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Expert-parallel degree; its groups are taken from the ranks of dp, cp and tp inside a replica."""
    zero: Literal[0, 1, 2, 3] = 1
    """What the dp ranks of a replica shard within a step (ZeRO, arXiv 1910.02054): 1 the optimizer state, 2 also the
    gradients, 3 also the parameters. Between steps parameters rest as shards at every level but 0."""
    micro_batch: int = 1
    """Sequences per rank in one forward."""
    recompute: Literal["none", "full"] = "none"
    """What backward computes again instead of keeping it (arXiv 1604.06174): full keeps the input of each layer and
    runs the layer's forward again. Losses keep their bits."""
    schedule: Literal["1f1b"] = "1f1b"

    @property
    def shards(self) -> int:
        """Data-parallel ranks inside one replica."""
        return (self.dp or 1) // self.replicas

    @property
    def world(self) -> int:
        """Number of ranks of the job."""
        return (self.dp or 1) * self.pp * self.cp * self.tp
