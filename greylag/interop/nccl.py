"""NCCL: what its kernels sent, and how long that took once every rank was there.

A rank's kernel begins when that rank is ready and ends with the others, so most of its time may be waiting. Only the
last to come does not wait: with the traces of all ranks of a group that is the shortest kernel of each collective. Else
it is guessed from the many times that a rank does the same: in one of ten it is taken to come last.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from greylag.interop.inputs import WIDTHS
from greylag.interop.kineto import Args, Event, Trace
from greylag.spec.measurement import Collective, CollectiveSample

_KINDS: dict[str, Collective] = {
    **dict.fromkeys(("allreduce", "all_reduce", "allreduce_coalesced"), "all_reduce"),
    **dict.fromkeys(("all_gather", "allgather", "_allgather_base", "all_gather_into_tensor"), "all_gather"),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_into_tensor_coalesced"), "all_gather"),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor"), "reduce_scatter"),
    **dict.fromkeys(("reduce_scatter_tensor_coalesced",), "reduce_scatter"),
    **dict.fromkeys(("all_to_all", "all_to_allv", "alltoall", "alltoall_base"), "all_to_all"),
    **dict.fromkeys(("send", "recv"), "p2p"),
}
LAST = 0.1
"""In how many of its collectives a rank alone is taken to come last."""
ALIKE = 8
"""Sizes are alike within an octave cut in so many: an all-to-all of routed tokens never has the same twice."""
UNEVEN = 2.0
"""An all-to-all whose largest part is beyond so many times the mean is none that is predicted."""


class Sent(NamedTuple):
    """One rank's part in a collective."""

    key: tuple[Any, ...]
    """The same on every rank of it; a later one of the same key is the next."""
    kind: Collective
    bytes: float
    ranks: int
    stride: int
    seconds: float


def is_nccl(kernel: Event) -> bool:
    """Whether a kernel is NCCL's or RCCL's."""
    return "nccl" in kernel.name.lower()


def read_sent(kernel: Event, operator: Event | None, rank: int | None) -> Sent | None:
    """What a kernel sent, by its own arguments or those of `record_param_comms` around it; None if that is not said."""
    args = kernel.args
    if operator is not None and operator.args.collective and args.collective in ("", operator.args.collective):
        args = operator.args  # which say more: the other end of a transfer
    kind, width = _KINDS.get(args.collective), WIDTHS.get(args.dtype.lower())
    size = max(args.elements_in, args.elements_out) * (width or 0)
    members = _integers(args.members)
    if kind is None or not size or not kernel.dur:
        return None
    if kind == "p2p":
        ends = _ends(args, members, rank)
        ranks, stride = 2, abs(ends[1] - ends[0]) if ends else 0
    else:
        ends, ranks, stride = None, args.ranks, _stride(members)
    uneven = kind == "all_to_all" and not all(map(_is_even, (args.split_in, args.split_out)))
    if ranks < 2 or not stride or uneven:
        return None
    group = (args.group, str(args.members), None if ends else args.number)  # both ends number transfers on their own
    key = (kind, *group, ends, None if kind == "all_to_all" else size)
    return Sent(key, kind, float(size), ranks, stride, kernel.seconds)


def _ends(args: Args, members: Sequence[int], rank: int | None) -> tuple[int, int] | None:
    """Ranks of who sends and who receives."""
    sends = args.collective == "send"
    other = args.target if sends else args.source
    if other is None and len(members) == 2 and rank in members:
        other = sum(members) - (rank or 0)
    if rank is None or other is None:
        return None
    return (rank, other) if sends else (other, rank)


def _stride(members: Sequence[int]) -> int:
    """How far apart the ranks of a group are, as many as are listed; 0 if not equally far."""
    apart = {after - before for before, after in zip(sorted(members), sorted(members)[1:], strict=False)}
    return apart.pop() if len(apart) == 1 else 0


def _integers(said: Any) -> list[int]:
    """A list as text or JSON; behind its 30th element NCCL's has '...'."""
    if isinstance(said, str):
        try:
            said = json.loads(said.replace(", ...", "").replace("...", ""))
        except ValueError:
            return []
    return [int(n) for n in said] if isinstance(said, list) and all(isinstance(n, int) for n in said) else []


def _is_even(split: Any) -> bool:
    """Whether the parts of an all-to-all are about equal; no parts are equal ones."""
    parts = _integers(split)
    return not parts or max(parts) * len(parts) <= UNEVEN * sum(parts)


def samples_of(ranks: Sequence[Sequence[Sent]]) -> list[CollectiveSample]:
    """One sample for collectives that are alike, from what each of some ranks sent, in order."""
    counts = [Counter(one.key for one in sent) for sent in ranks]
    met: dict[tuple[Any, ...], list[Sent]] = defaultdict(list)
    for number, sent in enumerate(ranks):
        seen: Counter[tuple[Any, ...]] = Counter()
        for one in sent:
            seen[one.key] += 1
            matched = len({count[one.key] for count in counts if one.key in count}) == 1
            met[one.key, seen[one.key], None if matched else number].append(one)
    alike: dict[tuple[Collective, int, int, int], list[_Time]] = defaultdict(list)
    for parts in met.values():
        size = max(part.bytes for part in parts)
        like = (parts[0].kind, parts[0].ranks, parts[0].stride, round(ALIKE * math.log2(size)))
        pace = min(part.seconds for part in parts) / size
        alike[like].append(_Time(pace, size, len(parts) == parts[0].ranks))
    return [_sample(kind, ranks, stride, times) for (kind, ranks, stride, _), times in alike.items()]


class _Time(NamedTuple):
    pace: float
    """Seconds per byte."""
    size: float
    complete: bool
    """Whether all ranks of the group were seen in it."""


def _sample(kind: Collective, ranks: int, stride: int, times: Sequence[_Time]) -> CollectiveSample:
    """The median of those that all ranks were seen in; without any, the low quantile at which one comes last."""
    complete = sorted(time for time in times if time.complete)
    time = complete[len(complete) // 2] if complete else sorted(times)[int(LAST * (len(times) - 1))]
    return CollectiveSample(collective=kind, bytes=time.size, ranks=ranks, stride=stride, seconds=time.pace * time.size)


def in_order(trace: Trace) -> list[tuple[Event, Sent | None]]:
    """A rank's NCCL kernels as they began, with what each sent; none of several that carry out one call."""
    found = []
    for operator, kernels in trace.launched:
        sending = [kernel for kernel in kernels if is_nccl(kernel)]
        found += [(k, read_sent(k, operator, trace.rank) if len(sending) == 1 else None) for k in sending]
    return sorted(found, key=lambda one: one[0].ts)
