"""Data parallelism: sharding inside a replica (FSDP2), averaging across replicas.

ZeRO's levels above 0 are FSDP2's switches: parameters rest as shards, and what differs is when they are gathered and
when gradients are scattered. Level 0 shards nothing and averages gradients at the end of the step.

    level  gather of parameters          reduction of gradients
    0      never (kept whole)            all-reduce, once per step
    1      once per step                 reduce-scatter, once per step
    2      once per step                 reduce-scatter, every micro-batch
    3      every forward and backward    reduce-scatter, every micro-batch
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from greylag.numerics import Quantizer
from greylag.parallel.waits import NotedGather, NotedScatter
from greylag.parallel.wire import Agreement, local, mark
from greylag.parallel.world import World


def shard(
    model: nn.Module,
    layers: Sequence[nn.Module],
    zero: int,
    world: World,
    as_operands: Mapping[str, Quantizer] | None = None,
) -> None:
    """Shard a model's parameters over the replica's dp ranks, one unit per layer and one for the rest.

    They are gathered in FP32, the master copy, so that a layer quantizes the same numbers however it is sharded; but
    those named in `as_operands` as what their quantizer makes of them, which is the same bits (`parallel.wire`).
    """
    if zero == 0 or world.grid.dp == 1:
        return
    mesh = world.mesh()
    names = mark(model, as_operands or {})
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    cut: set[nn.Parameter] = {p for p in model.parameters() if isinstance(p, DTensor)}  # `expert.spread` did
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy, ignored_params=cut)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=cut)
    if world.device.type == "cpu":  # on a device they run on streams of their own
        for module in (*layers, model):
            assert isinstance(module, FSDPModule)
            module.set_custom_all_gather(NotedGather(world.waits))
            module.set_custom_reduce_scatter(NotedScatter(world.waits))
    if names:
        Agreement(model, names, mesh.get_group(), world.waits)


def set_micro_batch(model: nn.Module, zero: int, is_last: bool) -> None:
    """Tell FSDP2, before a micro-batch, what it need not do until the last one."""
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(is_last)
    if zero == 1:
        model.set_requires_gradient_sync(is_last)
    if zero < 3:
        model.set_reshard_after_backward(is_last)


def let_go(model: nn.Module) -> None:
    """Shard again what a forward without a backward has gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def average(gradients: Sequence[Tensor], group: Any, size: int) -> None:
    """Average gradients (this rank's shards) over a group of `size` ranks, in place, as one message."""
    parts = [local(g) for g in gradients]
    flat = torch.cat([g.reshape(-1) for g in parts])
    dist.all_reduce(flat, group=group)
    flat.div_(size)
    for part, whole in zip(parts, flat.split([g.numel() for g in parts]), strict=True):
        part.copy_(whole.view_as(part))


def average_unsharded(gradients: Sequence[Tensor], zero: int, world: World) -> None:
    """Average over the replica's dp ranks what FSDP2 does not: the gradients of level 0."""
    if zero == 0 and world.grid.dp > 1:
        average(gradients, None, world.grid.dp)


class ReplicaCommit:
    """The commit of a job whose replicas all stay: averages over them, and updates if every rank is healthy.

    Satisfies `train.loop.Commit`.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def begin(self, number: int) -> None:
        """A step starts; nothing to agree on."""

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients over replicas, in place."""
        if self.world.across is not None:
            average(gradients, self.world.across, self.world.grid.replica)

    def vote(self, healthy: bool) -> bool:
        """Whether every rank of every replica is healthy."""
        ballot = torch.tensor(float(healthy), device=self.world.device)
        return bool(self.world.all_reduce(ballot, dist.ReduceOp.MIN).item())
