"""Waits: seconds that a rank spends in collectives, sending and waiting for other ranks.

A rank that waits for a slow one has steps as long as the slow one's; what tells them apart is who waited. gloo holds
the calling thread up, which can be timed. On a device collectives run beside the host, and nothing is noted.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

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


class NotedGather:
    """FSDP2's own all-gather, noted. For `FSDPModule.set_custom_all_gather`."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather."""
        with self.waits.noted():
            return _gather(output_tensor, input_tensor, group=group, async_op=async_op)


class NotedScatter:
    """FSDP2's own reduce-scatter, noted. For `FSDPModule.set_custom_reduce_scatter`."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is reduced."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce and scatter."""
        with self.waits.noted():
            return _scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
