"""Profile: torch profiler's traces of a short run on accelerators, as the measurements that a device is fitted to.

The trace is read by `kineto`, operators by `aten`, collectives by `nccl`; here the kernels of one shape become one
sample, and what none of them understands is added up by name. The median of the times of a shape passes over warm-up
and autotuning.
"""

import functools
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from greylag.interop import nccl
from greylag.interop.aten import read_operator
from greylag.interop.inputs import Inputs, Recorded
from greylag.interop.kineto import EARLIER, GRAPH, Event, Trace, read_trace
from greylag.spec.error import SpecError
from greylag.spec.measurement import Kernel, Measurements, MoveSample

SMALLEST_MOVE = float(1 << 20)
"""Bytes; of fewer, launching takes longer than moving."""
MOST_NAMES = 20
"""Kernels that are named among the unread ones."""
SMALL = "kernels that move less than 1 MiB"
SHAPELESS = "kernels without dims (profile with record_shapes=True)"


def read_profile(paths: Sequence[Path]) -> Measurements:
    """Kernels and collectives in the traces of one or several ranks of a run.

    They are made with ProfilerActivity.CUDA and record_shapes=True. Collectives need the traces of all ranks of their
    group to be told from waiting (`nccl`). `launch_us` and `step` include what profiling itself costs the host.

    Raises SpecError, in one line with the file's name, if one cannot be read, holds no kernels or no shapes, or is of
    another device than the first.
    """
    if not paths:
        raise SpecError("no traces; name the file of at least one rank")
    times: dict[Kernel, list[float]] = defaultdict(list)
    unread: dict[str, float] = defaultdict(float)
    sent: dict[int | Path, list[nccl.Sent]] = defaultdict(list)
    gaps: list[float] = []
    steps: list[float] = []
    busy, device = 0.0, None
    for path in paths:
        trace = read_trace(path)
        if device not in (None, trace.device):
            raise SpecError(
                f"{path}: made on {trace.device or 'an unnamed device'}, {paths[0]} on {device}; give one kind"
            )
        device = trace.device
        sent[path if trace.rank is None else trace.rank] += _add(trace, times, unread)
        busy += sum(kernel.seconds for kernel in trace.kernels)
        gaps += trace.gaps
        steps += trace.steps
    samples = [replace(sample, seconds=statistics.median(took)) for sample, took in times.items()]
    return Measurements.of(
        [*samples, *nccl.samples_of(list(sent.values()))],
        device=device or "",
        source=f"trace {', '.join(map(str, paths))}",
        launch_us=statistics.median(gaps) * 1e6 if gaps else None,
        step=statistics.median(steps) if steps else None,
        busy=busy,
        unread=_largest(unread),
    )


def _add(trace: Trace, times: dict[Kernel, list[float]], unread: dict[str, float]) -> list[nccl.Sent]:
    """Add what one rank's kernels are to the times of samples or to the unread; its collectives come back."""
    collectives = nccl.in_order(trace)
    sent = [one for _, one in collectives if one]
    if not trace.has_dims and not sent:
        raise SpecError(f"{trace.path}: no operator has 'Input Dims'; profile with record_shapes=True")
    for kernel, one in collectives:
        if one is None:
            unread[_short(kernel)] += kernel.seconds
    for operator, kernels in trace.launched:
        rest = [kernel for kernel in kernels if not nccl.is_nccl(kernel)]
        names = tuple(kernel.name for kernel in rest if kernel.cat == "kernel")
        sample = _read(operator.name, operator.args.recorded, names) if operator and names else None
        took = sum(kernel.seconds for kernel in rest)
        if sample and not isinstance(sample, MoveSample) and took:
            times[sample].append(took)
            continue
        for kernel in rest:
            move = sample if kernel.cat == "kernel" else _copied(kernel)
            if isinstance(move, MoveSample) and move.bytes >= SMALLEST_MOVE and kernel.dur:
                times[move].append(kernel.seconds)
            else:
                unread[SMALL if move else _why(trace, operator) or _short(kernel)] += kernel.seconds
    return sent


def _why(trace: Trace, operator: Event | None) -> str:
    """Why none of a trace's kernels, or none without an operator, can be read."""
    if operator is EARLIER or operator is GRAPH:
        return operator.name
    return "" if trace.has_dims else SHAPELESS


@functools.lru_cache(maxsize=4096)
def _read(name: str, recorded: Recorded, kernels: tuple[str, ...]) -> Kernel | None:
    return read_operator(name, Inputs.of(recorded), kernels)


def _copied(event: Event) -> MoveSample | None:
    """A copy within the device, which reads and writes, or a fill, which writes."""
    if event.cat == "gpu_memcpy" and "DtoD" in event.name:
        return MoveSample(bytes=2 * event.args.bytes, seconds=0.0)
    return MoveSample(bytes=event.args.bytes, seconds=0.0) if event.cat == "gpu_memset" else None


def _short(event: Event) -> str:
    """A kernel's name without its result's type, its template's and its own arguments."""
    bare = event.name.replace("(anonymous namespace)::", "")
    while (shorter := re.sub(r"<[^<>]*>", "", bare)) != bare:
        bare = shorter
    bare = re.split(r"[<(]", bare)[0].strip() or event.name
    return bare.split()[-1][:60] if event.cat == "kernel" else bare


def _largest(unread: dict[str, float]) -> dict[str, float]:
    """The largest by name, and the others together."""
    ordered = sorted(unread.items(), key=lambda item: -item[1])
    rest = sum(took for _, took in ordered[MOST_NAMES:])
    return dict(ordered[:MOST_NAMES]) | ({"other": rest} if rest else {})
