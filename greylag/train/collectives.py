"""Collectives: each as a callable at a given size, and the groups of ranks over which they are measured.

On a single node that is all ranks. On several it is all of them, a node's own, and those that have the same place on
every node, so that each tier of links is seen alone as well. Groups of a kind measure at once, as in training.
"""

import functools
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from greylag.spec.error import SpecError
from greylag.spec.measurement import Collective, CollectiveSample
from greylag.train.stopwatch import CPU, Timed, Trial, in_a_row, seconds_together, sweeper

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
ROW_BYTES = 1 << 26
"""Of those that are timed in a row, in all."""


class Peers(NamedTuple):
    """The ranks of a group, `stride` apart."""

    ranks: list[int]
    stride: int
    is_one_tier: bool
    """Whether any two of them are joined by links of one kind."""


def peers(rank: int, world: int, per_node: int) -> list[Peers]:
    """The groups of a rank. Raises SpecError if nodes have different numbers of ranks."""
    if world % per_node:
        raise SpecError(f"{world} ranks, and {per_node} on this node; start as many on every node")
    everyone = Peers(list(range(world)), 1, per_node in (1, world))
    if everyone.is_one_tier:
        return [everyone] if world > 1 else []
    first = rank - rank % per_node
    own = Peers(list(range(first, first + per_node)), 1, True)
    return [everyone, own, Peers(list(range(rank % per_node, world, per_node)), per_node, True)]


def collective_trials(size: int, among: Peers, group: dist.ProcessGroup | None, device: torch.device) -> list[Trial]:
    """Every collective of about `size` bytes in all: a multiple of what each of the peers gets.

    A transfer goes from each peer to the next at once, and is left out where those are of different tiers.
    """
    count = len(among.ranks)
    size = whole_size(size, count)
    names = [name for name in COLLECTIVES if name != "p2p" or among.is_one_tier]
    return [_trial(name, size, among, group, device) for name in names]


def _trial(name: Collective, size: int, among: Peers, group: dist.ProcessGroup | None, device: torch.device) -> Trial:
    count = len(among.ranks)

    def take() -> float:
        tick, sweep = torch.zeros(1, device=device), sweeper(device)

        def align() -> None:
            """Let ranks leave a small collective together, with what follows launched by then."""
            sweep()
            dist.all_reduce(tick, group=group)

        run = collective(name, size, count, device, group)
        runs = [run] * in_a_row(size, ROW_BYTES)
        return seconds_together(runs, align, device)

    ranks = 2 if name == "p2p" else count
    return Trial(
        2.0 * size,
        take,
        lambda s: CollectiveSample(collective=name, bytes=size, ranks=ranks, stride=among.stride, seconds=s),
    )


def collective(
    name: Collective, size: int, ranks: int, device: torch.device = CPU, group: dist.ProcessGroup | None = None
) -> Timed:
    """A collective of FP32 of `size` bytes in all: gathered, before scattering, or what a rank sends."""
    whole, part = (torch.zeros(whole_size(size, ranks) // of // 4, device=device) for of in (1, ranks))
    match name:
        case "all_reduce":
            return functools.partial(dist.all_reduce, whole, group=group)
        case "all_gather":
            return functools.partial(dist.all_gather_into_tensor, whole, part, group=group)
        case "reduce_scatter":
            return functools.partial(dist.reduce_scatter_tensor, part, whole, group=group)
        case "all_to_all":
            return functools.partial(dist.all_to_all_single, torch.empty_like(whole), whole, group=group)
        case "p2p":
            return functools.partial(_shift, whole, torch.empty_like(whole), group)


def whole_size(size: int, ranks: int) -> int:
    """The bytes at or below `size` that are a whole number of FP32 for each rank, at least one."""
    return 4 * ranks * max(1, size // (4 * ranks))


def _shift(mine: Tensor, theirs: Tensor, group: dist.ProcessGroup | None) -> None:
    """Send to the next of a group while receiving from the one before."""
    here, count = dist.get_rank(group), dist.get_world_size(group)
    ahead = dist.P2POp(dist.isend, mine, group=group, group_peer=(here + 1) % count)
    behind = dist.P2POp(dist.irecv, theirs, group=group, group_peer=(here - 1) % count)
    for work in dist.batch_isend_irecv([ahead, behind]):
        work.wait()
