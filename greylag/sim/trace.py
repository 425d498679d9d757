"""Trace: a timeline as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

One process per rank, with a thread for compute and one or more for its transfers, an arrow from each transfer to the
action that takes what it brings, and a counter of the bytes that the rank holds. The format is "Trace Event Format"
(Google, 2016); times are microseconds, written to the nanosecond. This makes bytes; commands write files.
"""

import gzip
import json
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from greylag.sim.timeline import Timeline
from greylag.spec.error import SpecError
from greylag.spec.schedule import Action

COMPUTE = 0
"""The thread of actions; those from 1 on are of transfers, as many as are under way at once."""


def trace(
    timeline: Timeline,
    *,
    activation: npt.ArrayLike = 0.0,
    resting: npt.ArrayLike = 0.0,
    ranks: Sequence[int] = (),
    compress: bool = False,
) -> bytes:
    """The trace of a timeline, as JSON or (with `compress`) gzipped JSON.

    `activation` is the bytes that a stage keeps of a micro-batch from its F's start to its B's or W's end, one for all
    or by stage; `resting` what a rank holds besides, one for all or by rank. `ranks` are shown, none means all.
    Raises SpecError for a rank that the pipeline does not have.
    """
    count = len(timeline.actions)
    shown = list(ranks) or list(range(count))
    for rank in shown:
        if not 0 <= rank < count:
            raise SpecError(f"trace of rank {rank}: the pipeline has ranks 0 to {count - 1}; name one of them")
    kept = np.broadcast_to(np.asarray(activation, float), timeline.graph.num_stages).tolist()
    base = np.broadcast_to(np.asarray(resting, float), count).tolist()
    events = [event for rank in shown for event in _rank(timeline, rank, kept, base[rank])]
    events += _arrows(timeline, set(shown))
    text = '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(events) + "\n]}\n"
    return gzip.compress(text.encode(), 4, mtime=0) if compress else text.encode()


def _nanoseconds(seconds: npt.NDArray[np.float64]) -> list[int]:
    """Whole nanoseconds, so that what meets in time meets in the file; -1 for NaN."""
    return [int(t) for t in np.rint(np.nan_to_num(seconds * 1e9, nan=-1)).tolist()]


def _slice(name: str, kind: str, rank: int, thread: int, start: int, end: int) -> str:
    return (
        f'{{"ph":"X","name":"{name}","cat":"{kind}","pid":{rank},"tid":{thread},'
        f'"ts":{start / 1e3:.3f},"dur":{(end - start) / 1e3:.3f}}}'
    )


def _name(action: Action) -> str:
    way = ", backwards through the ranks" if action.direction else ""
    return f"{action.kind} stage {action.stage} micro-batch {action.micro_batch}{way}"


def _label(kind: str, rank: int, thread: int, name: str) -> str:
    return f'{{"ph":"M","name":"{kind}","pid":{rank},"tid":{thread},"args":{{"name":{json.dumps(name)}}}}}'


def _rank(timeline: Timeline, rank: int, kept: list[float], base: float) -> Iterator[str]:
    actions = timeline.actions[rank]
    starts, ends = _nanoseconds(timeline.start[rank]), _nanoseconds(timeline.end[rank])
    yield _label("process_name", rank, COMPUTE, f"rank {rank}")
    yield f'{{"ph":"M","name":"process_sort_index","pid":{rank},"args":{{"sort_index":{rank}}}}}'
    yield _label("thread_name", rank, COMPUTE, "compute")
    for action, start, end in zip(actions, starts, ends, strict=True):
        yield _slice(_name(action), action.kind, rank, COMPUTE, start, end)
    threads = _threads(timeline, rank)
    for thread in sorted({thread for _, thread, _, _ in threads}):
        yield _label("thread_name", rank, thread, "transfers" if thread == 1 else f"transfers {thread}")
    for at, thread, start, end in threads:
        yield _slice(f"send {_name(actions[at])}", "send", rank, thread, start, end)
    yield from _counter(actions, starts, ends, rank, kept, base)


def _threads(timeline: Timeline, rank: int) -> list[tuple[int, int, int, int]]:
    """(place of the action, thread, start, end) of a rank's transfers, each on the first thread that is free."""
    starts, ends = _nanoseconds(timeline.departure[rank]), _nanoseconds(timeline.arrival[rank])
    free: list[int] = []
    placed = []
    for at in sorted((i for i, end in enumerate(ends) if end > starts[i]), key=starts.__getitem__):
        lane = next((lane for lane, until in enumerate(free) if until <= starts[at]), len(free))
        free[lane : lane + 1] = [ends[at]]
        placed.append((at, lane + 1, starts[at], ends[at]))
    return placed


def _counter(
    actions: Sequence[Action], starts: list[int], ends: list[int], rank: int, kept: list[float], base: float
) -> Iterator[str]:
    """The bytes held, wherever they change. What is let go at a moment goes before what is taken at it."""
    changes = [(end, 0, -kept[a.stage]) for a, end in zip(actions, ends, strict=True) if a.kind in "BW"]
    changes += [(start, 1, kept[a.stage]) for a, start in zip(actions, starts, strict=True) if a.kind == "F"]
    held = {0: base}
    now = 0.0
    for time, _, change in sorted(changes):
        now += change
        held[time] = base + now
    for time, amount in held.items():
        yield f'{{"ph":"C","name":"memory","pid":{rank},"ts":{time / 1e3:.3f},"args":{{"bytes":{round(amount)}}}}}'


def _arrows(timeline: Timeline, shown: set[int]) -> Iterator[str]:
    """From the start of a transfer to the start of the action that takes what it brings."""
    takers: dict[tuple[int, int, bool, int], tuple[int, int]] = {}
    for rank, actions in enumerate(timeline.actions):
        for a, start in zip(actions, _nanoseconds(timeline.start[rank]), strict=True):
            if a.kind != "W":
                takers[a.stage, a.micro_batch, a.kind == "F", a.direction] = (rank, start)
    number = 0
    for rank in sorted(shown):
        for at, thread, start, _ in _threads(timeline, rank):
            a = timeline.actions[rank][at]
            to, when = takers[a.stage + (1 if a.kind == "F" else -1), a.micro_batch, a.kind == "F", a.direction]
            if to not in shown:
                continue
            number += 1
            common = f'"name":"send","cat":"send","id":{number}'
            yield f'{{"ph":"s",{common},"pid":{rank},"tid":{thread},"ts":{start / 1e3:.3f}}}'
            yield f'{{"ph":"f","bp":"e",{common},"pid":{to},"tid":{COMPUTE},"ts":{when / 1e3:.3f}}}'
