"""Cutting and gathering over process groups: sharding inside a replica, averaging across replicas.

With any module `model` whose blocks are `layers`, and a torch.distributed store that all ranks share:

    world = start(Grid.of(strategy), rank, store, torch.device("cpu"))
    shard(model, layers, zero=3, world=world)
    commit = ReplicaCommit(world)
"""

from greylag.parallel.data import ReplicaCommit, average_unsharded, let_go, set_micro_batch, shard
from greylag.parallel.expert import AllToAll, spread
from greylag.parallel.wire import first_row, local
from greylag.parallel.world import World, start, stop

__all__ = [
    "AllToAll",
    "ReplicaCommit",
    "World",
    "average_unsharded",
    "first_row",
    "let_go",
    "local",
    "set_micro_batch",
    "shard",
    "spread",
    "start",
    "stop",
]
