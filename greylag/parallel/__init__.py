"""Cutting and gathering over process groups: sharding inside a replica, averaging across replicas.

With any module `model` whose blocks are `layers`, and a torch.distributed store that all ranks share:

    world = start(Grid.of(strategy), rank, store, torch.device("cpu"))
    shard(model, layers, zero=3, world=world)
    commit = ReplicaCommit(world)
"""

from greylag.parallel.data import ReplicaCommit, average_unsharded, local, set_micro_batch, shard
from greylag.parallel.world import World, start, stop

__all__ = ["ReplicaCommit", "World", "average_unsharded", "local", "set_micro_batch", "shard", "start", "stop"]
