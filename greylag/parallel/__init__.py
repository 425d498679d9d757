"""Cutting and gathering over process groups: sharding inside a replica, averaging across replicas.

world = start(Grid.of(job.strategy), rank, store, torch.device("cpu"))
shard(model, model.layers, job.strategy.zero, torch.float32, world)
commit = ReplicaCommit(world)
"""

from greylag.parallel.data import ReplicaCommit, average_unsharded, local, set_micro_batch, shard
from greylag.parallel.world import World, start, stop

__all__ = ["ReplicaCommit", "World", "average_unsharded", "local", "set_micro_batch", "shard", "start", "stop"]
