"""Stopwatch: seconds of what runs on a device, by the device's own clock, and what ranks make of their seconds.

A CPU is timed by the host, an accelerator by events on its stream. Whoever measures before training reads this one:
`train.calibrate` on CPUs, `train.accelerator` on accelerators.
"""

import functools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from greylag.spec.measurement import Sample

CACHE_BYTES = 1 << 22
"""More than a core's own caches, less than the shared one: a tensor of a training step was made a few operators ago."""
ACCELERATOR_BYTES = 1 << 29
"""Several times the largest L2 cache (126 MB in a B200), so that the sweep also takes an accelerator longer than the
host takes to launch what is timed behind it: else the gaps between launches would be in the time."""
REPEATS, PATIENCE = 9, 0.12
"""A measurement is repeated this often, or for this many seconds, but at least three times."""
MESSAGES = 9
"""How often a collective is measured; the first does not count."""
CPU = torch.device("cpu")

IN_A_ROW = 8
"""Short work is timed so many in a row at most, as nccl-tests does."""

Timed = Callable[[], object]


def in_a_row(size: float, most: int) -> int:
    """How often work on `size` bytes is done in a row: no more than `most` bytes in all."""
    return int(max(1, min(IN_A_ROW, most // size)))


class Trial(NamedTuple):
    """Something to be timed."""

    memory: float
    """Bytes that it holds meanwhile."""
    take: Callable[[], float]
    """Seconds on this rank; makes what it needs."""
    sample: Callable[[float], Sample]
    """What seconds, agreed among ranks, say."""


def nothing() -> None:
    """To do before a lap, where there is nothing to do."""


def lap(runs: Sequence[Timed], device: torch.device) -> float:
    """Seconds of `runs`, one after the other."""
    if device.type == "cpu":
        begin = time.perf_counter()
        for run in runs:
            run()
        return time.perf_counter() - begin
    module = torch.get_device_module(device)
    begin, end = (module.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for run in runs:
        run()
    end.record()
    end.synchronize()
    return 1e-3 * float(begin.elapsed_time(end))


def sweeper(device: torch.device) -> Timed:
    """What fills the caches (a CPU core's own, an accelerator's L2) with something else."""
    there = torch.zeros((CACHE_BYTES if device.type == "cpu" else ACCELERATOR_BYTES) // 4, device=device)
    return functools.partial(there.add_, 1.0)


def seconds(runs: Sequence[Timed], prepare: Timed = nothing, device: torch.device = CPU) -> float:
    """Median seconds of one of `runs`, all of them each after a `prepare` that is not counted.

    Caches are swept before each: in a training step other tensors have been there since.
    """
    sweep = sweeper(device)
    prepare()
    lap(runs, device)
    times: list[float] = []
    while len(times) < 3 or (len(times) < REPEATS and sum(times) < PATIENCE):
        prepare()
        sweep()
        times.append(lap(runs, device))
    return median(times) / len(runs)


def seconds_together(runs: Sequence[Timed], align: Timed = nothing, device: torch.device = CPU) -> float:
    """Median seconds of one of `runs`, collectives, which every rank does as often, each time after `align`."""
    times = []
    for _ in range(MESSAGES):
        align()
        times.append(lap(runs, device))
    return median(times[1:]) / len(runs)


def agreed(seconds: float, group: dist.ProcessGroup | None = None) -> float:
    """Mean over ranks, who start the next measurement together. The group takes tensors of the CPU."""
    total = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return float(total) / dist.get_world_size(group)
