"""World: the process groups of one rank, and where it stands.

The default process group and the device mesh span one data-parallel replica. The replica axis lies outside, as a
bare process group between the same ranks of all replicas, so that a replica can leave or join while the modules,
DTensors and meshes of the others stay as they are. Ranks meet through a store that they are handed.
"""

import datetime
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from greylag.parallel.waits import Waits
from greylag.spec.grid import Grid

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "musa": "mccl"}
TIMEOUT = datetime.timedelta(minutes=10)


@dataclass
class World:
    """Process groups of a rank. `across` is None where there is a single replica."""

    grid: Grid
    rank: int
    """Number among all ranks of the job."""
    device: torch.device
    across: dist.ProcessGroup | None
    saver: dist.ProcessGroup
    """A group of its own for checkpoints, whose collectives run in a thread."""
    waits: Waits = field(default_factory=Waits)
    """What this rank has spent in collectives of a step so far."""

    @property
    def replica(self) -> int:
        """Which replica this rank belongs to."""
        return self.rank // self.grid.replica_world

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes records."""
        return self.rank == 0

    def mesh(self) -> DeviceMesh:
        """The mesh of data-parallel shards inside this replica."""
        return init_device_mesh(self.device.type, (self.grid.dp,), mesh_dim_names=("dp",))

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce `x` in place over every rank of the job: inside the replica, then across replicas."""
        with self.waits.noted():
            if self.grid.replica_world > 1:
                dist.all_reduce(x, op)
            if self.across is not None:
                dist.all_reduce(x, op, group=self.across)
        return x


def start(grid: Grid, rank: int, store: dist.Store, device: torch.device) -> World:
    """Form the groups of a rank. Raises RuntimeError if a peer does not come within ten minutes."""
    replica, inner = divmod(rank, grid.replica_world)
    backend = BACKENDS[device.type]
    own = dist.PrefixStore(f"replica{replica}", store)
    dist.init_process_group(backend, store=own, rank=inner, world_size=grid.replica_world, timeout=TIMEOUT)
    saver = dist.new_group(backend="gloo", timeout=TIMEOUT)
    across = None
    if grid.replica > 1:
        across = _bare_group(backend, dist.PrefixStore(f"across{inner}", store), replica, grid.replica)
    return World(grid, rank, device, across, saver)


def _bare_group(backend: str, store: dist.Store, rank: int, size: int) -> Any:
    """A process group that no mesh and no registry knows."""
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)


def stop(world: World) -> None:
    """Dissolve the groups."""
    world.across = None
    dist.destroy_process_group()
