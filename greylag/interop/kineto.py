"""Kineto: the Chrome trace that torch's profiler writes, as one rank's kernels under the operators that launched them.

A kernel belongs to the innermost operator around its launch, which "correlation" names and which lies on the operator's
thread. Where the trace lacks it, newer ones still say it by an "External id" that kernel and operator share; in older
ones that is a number of the kernel's own, equal to the correlation. What the operators compute is read by `aten`, what
NCCL's kernels send by `nccl`.
"""

import bisect
import gzip
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from greylag.interop.inputs import Recorded
from greylag.spec.error import SpecError

_WANTED = re.compile(rb'"cat":\s*"(?:kernel|cpu_op|gpu_mem|cuda_|user_annotation|gpu_user)|ProfilerStep#')
"""Of a trace most is Python's call stack and arrows, which are skipped undecoded."""
_LAUNCH = re.compile(r"^(cuda|cu|hip)\w*Launch\w*Kernel")
_BLOCKS = re.compile(r"Synchronize|^(cuda|hip)(Memcpy|MemcpyWithStream|Malloc|Free|HostAlloc|HostMalloc)$")
_GRAPH = re.compile(r"GraphLaunch")
QUEUE = 512
"""Kernels that wait on the device; at about twice as many the driver lets the host wait."""
FEWEST_GAPS = 100
"""Fewer say nothing of the host's time per kernel."""
_NONE = msgspec.Raw(b"[]")

Number: TypeAlias = int | str | None
"""What numbers a thing: some versions write text."""


class Args(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename={
        "external": "External id",
        "dims": "Input Dims",
        "types": "Input type",
        "strides": "Input Strides",
        "values": "Concrete Inputs",
        "collective": "Collective name",
        "elements_in": "In msg nelems",
        "elements_out": "Out msg nelems",
        "ranks": "Group size",
        "split_in": "In split size",
        "split_out": "Out split size",
        "group": "Process Group Name",
        "members": "Process Group Ranks",
        "source": "Src Rank",
        "target": "Dst Rank",
        "number": "Comms Id",
    },
):
    """What is read of an event's arguments; what the trace does not say is None or empty."""

    external: Number = None
    correlation: Number = None
    device: Number = None
    bytes: float = 0.0
    dims: msgspec.Raw = _NONE
    types: msgspec.Raw = _NONE
    strides: msgspec.Raw = _NONE
    values: msgspec.Raw = _NONE
    collective: str = ""
    elements_in: int = 0
    elements_out: int = 0
    ranks: int = 0
    dtype: str = ""
    split_in: Any = None
    split_out: Any = None
    group: Number = None
    members: Any = None
    source: int | None = None
    target: int | None = None
    number: Number = None

    @property
    def recorded(self) -> Recorded:
        """An operator's inputs."""
        return bytes(self.dims), bytes(self.types), bytes(self.strides), bytes(self.values)


_NO_ARGS = Args()


class Event(msgspec.Struct, frozen=True, gc=False):
    """An event of the trace; times are microseconds."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: Number = None
    tid: Number = None
    args: Args = _NO_ARGS

    @property
    def end(self) -> float:
        """When it is over."""
        return self.ts + self.dur

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.dur * 1e-6


EARLIER = Event(name="kernels launched before the trace began")
GRAPH = Event(name="kernels in CUDA graphs, whose operators are not recorded")
"""In place of an operator."""


class _File(msgspec.Struct, rename="camel"):
    trace_events: list[msgspec.Raw] | None = None
    device_properties: list[dict[str, Any]] = []
    distributed_info: dict[str, Any] | None = None


@dataclass(frozen=True)
class Trace:
    """One rank's run on its device."""

    path: Path
    device: str
    """What the driver calls it; empty where the trace does not say."""
    rank: int | None
    launched: list[tuple[Event | None, list[Event]]]
    """Operators and the kernels, copies and fills of each; None, `EARLIER` or `GRAPH` for those without one."""
    has_dims: bool
    """Whether operators carry their inputs' dims."""
    gaps: list[float]
    """Seconds from one launch to the next on the host; empty if that is not known."""
    steps: list[float] = field(default_factory=list)
    """Seconds of each step that the profiler was told of."""

    @property
    def kernels(self) -> Iterable[Event]:
        """All that ran on the device."""
        return (kernel for _, kernels in self.launched for kernel in kernels)


def read_trace(path: Path) -> Trace:
    """Read one rank's trace, gzipped or not. Raises SpecError if there is none or no kernel of a GPU in it."""
    file, events = _decode(path)
    by: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by[event.cat].append(event)
    kernels = by["kernel"] + by["gpu_memcpy"] + by["gpu_memset"]
    if not by["kernel"]:
        raise SpecError(f"{path}: no GPU kernels in it, it was made on CPU alone; profile with ProfilerActivity.CUDA")
    calls = by["cuda_runtime"] + by["cuda_driver"]
    launches = {call.args.correlation: call for call in calls if call.args.correlation is not None}
    rank = (file.distributed_info or {}).get("rank")
    return Trace(
        path=path,
        device=_device(file, kernels, path),
        rank=rank if isinstance(rank, int) else None,
        launched=_by_operator(by["cpu_op"], kernels, launches),
        has_dims=any(bytes(op.args.dims) != b"[]" for op in by["cpu_op"]),
        gaps=_gaps(calls, kernels, launches),
        steps=_steps(by["user_annotation"] + by["gpu_user_annotation"] + by["cpu_op"]),
    )


def _decode(path: Path) -> tuple[_File, list[Event]]:
    said = "give a trace of torch.profiler, as export_chrome_trace writes it"
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        file = msgspec.json.decode(content, type=_File, strict=False)
        if file.trace_events is None:
            raise SpecError(f"{path}: no 'traceEvents' in it; {said}")
        decode = msgspec.json.Decoder(Event, strict=False).decode
        return file, [decode(raw) for raw in file.trace_events if _WANTED.search(raw)]
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file; {said}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise SpecError(f"{path}: the gzip file is cut off or damaged; copy it again") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}; {said}") from None
    except msgspec.ValidationError as error:
        raise SpecError(f"{path}: not a profiler's trace ({error}); {said}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not JSON, or cut off ({error}); {said}") from None


def _device(file: _File, kernels: Iterable[Event], path: Path) -> str:
    """The name of the device that the kernels ran on. ROCm numbers it otherwise than the list, whose names then do."""
    used = {kernel.args.device for kernel in kernels}
    listed = [(device.get("id"), str(device.get("name", ""))) for device in file.device_properties]
    names = {name for number, name in listed if number in used} or {name for _, name in listed}
    if len(names) > 1:
        raise SpecError(f"{path}: kernels on {' and '.join(sorted(names))}; give traces of one kind of device")
    return names.pop() if names else ""


def _by_operator(
    operators: list[Event], kernels: list[Event], launches: Mapping[Any, Event]
) -> list[tuple[Event | None, list[Event]]]:
    """The operators with the kernels of each, in the order of their first kernels."""
    named: dict[Number, Event] = {op.args.external: op for op in operators if op.args.external is not None}
    searched: dict[Any, list[tuple[float, int]]] = defaultdict(list)
    for i, kernel in enumerate(kernels):
        if launch := launches.get(kernel.args.correlation):
            middle = launch.ts + launch.dur / 2  # old traces round to microseconds: ends touch, middles do not
            searched[launch.pid, launch.tid].append((middle, i))
    around = _innermost(operators, searched)
    groups: dict[int, tuple[Event | None, list[Event]]] = {}
    for i, kernel in enumerate(kernels):
        launch = launches.get(kernel.args.correlation)
        of_its_own = kernel.args.external == kernel.args.correlation
        op = around.get(i) or (None if of_its_own else named.get(kernel.args.external))
        if launch and _GRAPH.search(launch.name):
            op = GRAPH
        elif launch is None:
            op = op or EARLIER
        alone = op is None or op is EARLIER or op is GRAPH
        groups.setdefault(-i - 1 if alone else id(op), (op, []))[1].append(kernel)
    return list(groups.values())


def _innermost(operators: list[Event], searched: Mapping[Any, list[tuple[float, int]]]) -> dict[int, Event]:
    """For each (time, number) of a thread, the innermost of its operators around that time, by number."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for op in operators:
        if (op.pid, op.tid) in searched:
            threads[op.pid, op.tid].append(op)
    found: dict[int, Event] = {}
    for thread, times in searched.items():
        waiting = sorted(threads[thread], key=lambda op: (-op.ts, op.dur))
        around: list[Event] = []
        for time, i in sorted(times):
            while waiting and waiting[-1].ts <= time:
                op = waiting.pop()
                while around and around[-1].end <= op.ts:
                    around.pop()
                around.append(op)
            while around and around[-1].end < time:
                around.pop()
            if around:
                found[i] = around[-1]
    return found


def _gaps(calls: list[Event], kernels: list[Event], launches: Mapping[Any, Event]) -> list[float]:
    """Seconds from launch to launch on the thread with most of them, where nothing keeps the host.

    Left out are gaps with a call in them that waits for the device, and those behind a launch that may wait itself,
    with many kernels before it. Nothing is left of too few launches, or where graphs launch most kernels.
    """
    made = [(launches.get(kernel.args.correlation), kernel) for kernel in kernels]
    single = [(launch, kernel) for launch, kernel in made if not (launch and _GRAPH.search(launch.name))]
    threads: dict[Any, list[Event]] = defaultdict(list)
    for call in calls:
        if _LAUNCH.search(call.name) or _BLOCKS.search(call.name):
            threads[call.pid, call.tid].append(call)
    busiest = max(threads.values(), key=lambda own: sum(bool(_LAUNCH.search(c.name)) for c in own), default=[])
    if 2 * len(single) < len(made):
        return []
    launched = sorted(launch.ts if launch else -math.inf for launch, _ in single)
    begun = sorted(kernel.ts for _, kernel in single)
    gaps, last = [], None
    for call in sorted(busiest, key=lambda c: c.ts):
        if _BLOCKS.search(call.name):
            last = None
            continue
        if last is not None:
            gaps.append((call.ts - last) * 1e-6)
        waiting = bisect.bisect_right(launched, call.ts) - bisect.bisect_right(begun, call.ts)
        last = call.ts if waiting < QUEUE else None
    return gaps if len(gaps) >= FEWEST_GAPS else []


def _steps(events: list[Event]) -> list[float]:
    """Seconds of each step: on the host or from its first kernel to its last, whichever is longer.

    A host that waits for nothing is done with a step before the device is.
    """
    steps: dict[str, float] = {}
    for event in events:
        if event.name.startswith("ProfilerStep#"):
            steps[event.name] = max(steps.get(event.name, 0.0), event.seconds)
    return list(steps.values())
