"""Measure: seconds by phase, bytes by pool, bytes on the wire. What the simulator predicts, read off the machine."""

import bisect
import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch._C._profiler import _ExtraFields_Allocation
from torch.profiler import ProfilerActivity, profile

from greylag.parallel import local
from greylag.parallel.waits import Waits
from greylag.spec.step import PHASES


class Clock:
    """Seconds by phase of one step; what falls outside any phase is `other`."""

    def __init__(self, device: torch.device, waits: Waits) -> None:
        self.device, self.waits = device, waits
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._waited = dict.fromkeys(PHASES, 0.0)
        self._before = waits.seconds
        self.started = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside towards a phase."""
        begin, before = time.perf_counter(), self.waits.seconds
        try:
            yield
        finally:
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            self.seconds[name] += time.perf_counter() - begin
            self._waited[name] += self.waits.seconds - before

    def stop(self) -> dict[str, float]:
        """Seconds by phase, which add up to the wall time since the start."""
        self.seconds["other"] += time.perf_counter() - self.started - sum(self.seconds.values())
        self._waited["other"] += self.waits.seconds - self._before - sum(self._waited.values())
        return self.seconds

    @property
    def waited(self) -> dict[str, float]:
        """Seconds in collectives of each phase that had any, after `stop`; empty on a device, where they are not
        known."""
        return {phase: s for phase, s in self._waited.items() if s > 0} if self.device.type == "cpu" else {}


class MemoryMeter:
    """Peak bytes of one step by pool.

    On a GPU the allocator knows its high-water mark. A CPU's allocator keeps none, so the profiler follows every
    allocation of the step; what lay there before is added up from the tensors themselves.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._before = self.resting()
        if device.type == "cpu":
            self._profile.__enter__()
        else:
            torch.cuda.reset_peak_memory_stats(device)

    def resting(self) -> dict[str, float]:
        """Bytes at rest by pool."""
        weights = [*self.model.parameters(), *self.model.buffers()]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        moments = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        return {
            "parameters": _bytes(weights),
            "gradients": _bytes(gradients),
            "optimizer": _bytes(moments),
        }

    def stop(self) -> dict[str, float]:
        """Peak bytes by pool. Called with the step's gradients still there."""
        pools = {**self._before, "gradients": self.resting()["gradients"]}
        if self.device.type == "cpu":
            self._profile.__exit__(None, None, None)
            peak = sum(self._before.values()) + _profiled_peak(self._profile)
        else:
            peak = float(torch.cuda.max_memory_allocated(self.device))
        return {**pools, "activations": max(0.0, peak - sum(pools.values()))}


def _profiled_peak(trace: profile) -> float:
    """The most bytes that were alive at once of those allocated while profiling."""
    assert trace.profiler is not None
    results = trace.profiler.kineto_results
    assert results is not None
    unseen, changes = list(results.experimental_event_tree()), []
    while unseen:
        event = unseen.pop()
        unseen += event.children
        if isinstance(event.extra_fields, _ExtraFields_Allocation):
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return float(peak_alive((address, size) for _, address, size in sorted(changes, key=lambda change: change[0])))


def peak_alive(changes: Iterable[tuple[int, int]]) -> int:
    """The most bytes alive at once, from (address, bytes) of allocations and, negative, of what is freed.

    A thread that the profiler does not follow, as gloo's own, frees without a word. What lies where something new is
    allocated was freed.
    """
    starts: list[int] = []
    sizes: dict[int, int] = {}
    alive = peak = 0
    for address, size in changes:
        if size < 0:
            if address in sizes:
                alive -= sizes.pop(address)
                starts.pop(bisect.bisect_left(starts, address))
            continue
        at = bisect.bisect_right(starts, address)
        if at and starts[at - 1] + sizes[starts[at - 1]] > address:
            at -= 1
        while at < len(starts) and starts[at] < address + size:
            alive -= sizes.pop(starts.pop(at))
        starts.insert(at, address)
        sizes[address] = size
        alive += size
        peak = max(peak, alive)
    return peak


def _bytes(tensors: list[torch.Tensor]) -> float:
    storages = {local(t).untyped_storage().data_ptr(): local(t).untyped_storage().nbytes() for t in tensors}
    return float(sum(storages.values()))


def sent_bytes() -> int:
    """Bytes that this process's TCP sockets have sent and seen acknowledged, from the kernel's counters (Linux).

    The sockets of gloo among them: the difference over a step is what really went over the wire, headers included.
    """
    total = 0
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            total += struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked, linux/tcp.h
        except (OSError, struct.error):
            continue
    return total
