"""Waits: seconds that a rank spends in collectives, sending and waiting for other ranks.

A rank that waits for a slow one has steps as long as the slow one's; what tells them apart is who waited. gloo holds
the calling thread up, which can be timed. On a device collectives run beside the host, and nothing is noted.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
"""Torch 2.13 gave them other names, and warns of the old ones."""


class Waits:
    """Counts the seconds of one rank's blocking collectives, from its start on."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Count the time inside."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin


class NotedGather(DefaultAllGather):
    """FSDP2's own all-gather, noted. For `FSDPModule.set_custom_all_gather`."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits

    def __call__(self, *arguments: Any, **options: Any) -> dist.Work | None:
        """Gather."""
        with self.waits.noted():
            return super().__call__(*arguments, **options)


class NotedScatter(DefaultReduceScatter):
    """FSDP2's own reduce-scatter, noted. For `FSDPModule.set_custom_reduce_scatter`."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits

    def __call__(self, *arguments: Any, **options: Any) -> dist.Work:
        """Reduce and scatter."""
        with self.waits.noted():
            return super().__call__(*arguments, **options)
