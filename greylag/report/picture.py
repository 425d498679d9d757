"""Picture: a timed pipeline and a stage's bytes drawn as SVG, which takes its colours from the page's style.

Every action of a step is one stroke of a path per rank and kind, so that a hundred micro-batches on sixteen ranks stay
small; the beginning and the end, where ranks wait, are drawn once more so large that micro-batches have numbers.
"""

from collections.abc import Iterator, Sequence
from html import escape
from statistics import median
from typing import Any, NamedTuple, Protocol

from greylag.report.account import Account
from greylag.spec.quantity import SECONDS, digits, memory, seconds, unit
from greylag.spec.schedule import Action

WIDTH, LABEL = 1080, 62
"""Of a picture, and of the names of its rows, in SVG's units: a page's pixels."""
DIGIT, AROUND = 6.0, 2.0
"""Pixels of a digit in the number of a micro-batch, and beside it."""
TEAR = 26
"""Pixels between the beginning and the end."""
COLOURS = 10
"""Components that have a colour of their own (`prediction.css`)."""


class Timed(Protocol):
    """A timed order; `sim.timeline.Timeline` is one. Seconds from the first action's start."""

    @property
    def actions(self) -> Sequence[Sequence[Action]]:
        """By rank."""

    @property
    def start(self) -> Sequence[Any]:
        """By rank, an array of one per action."""

    @property
    def end(self) -> Sequence[Any]:
        """The same of its end."""

    @property
    def makespan(self) -> float:
        """The end of the last."""


class _Box(NamedTuple):
    """An action on its rank."""

    action: Action
    start: float
    end: float
    is_later: bool
    """Whether it is of another stage than the first of its rank, which has a darker colour."""


class _Window(NamedTuple):
    """A stretch of time and where it is drawn."""

    start: float
    end: float
    left: float
    width: float

    def place(self, time: float) -> float:
        """Where a moment is."""
        return self.left + self.width * (time - self.start) / (self.end - self.start)


def whole_step(timeline: Timed, ranks: Sequence[int]) -> str:
    """All actions of a step on some ranks, in one picture."""
    row = max(4.0, min(14.0, 300 / len(ranks)))
    window = _Window(0.0, timeline.makespan, LABEL, WIDTH - LABEL - 8)
    parts = [_row_name(rank, number, row) for number, rank in enumerate(ranks) if _is_named(number, row)]
    for number, rank in enumerate(ranks):
        strokes: dict[str, list[str]] = {}
        top, tall = number * row + 0.5, row - 1
        for box in _boxes(timeline, rank):
            left, right = window.place(box.start), window.place(box.end)
            strokes.setdefault(_kind(box), []).append(f"M{left:.2f} {top:.1f}h{right - left:.2f}v{tall:.1f}H{left:.2f}")
        parts += [f'<path class="{kind}" d="{"".join(d)}"/>' for kind, d in strokes.items()]
    parts += _ticks([window], len(ranks) * row)
    return _svg(parts, len(ranks) * row + 22, "All actions of the step, by rank and time")


def ends(timeline: Timed, ranks: Sequence[int]) -> str:
    """The beginning and the end of a step, or all of it if there is room, with the numbers of micro-batches."""
    row, room = 20.0 if len(ranks) <= 16 else 15.0, WIDTH - LABEL - 8
    windows = _windows(timeline, ranks, room)
    parts = [_row_name(rank, number, row) for number, rank in enumerate(ranks)]
    for number, rank in enumerate(ranks):
        for box in _boxes(timeline, rank):
            for window in windows:
                if box.end > window.start and box.start < window.end:
                    parts.append(_numbered(box, window, number * row, row))
    tall = len(ranks) * row
    for window in windows[1:]:
        middle = window.left - TEAR / 2
        parts.append(f'<text class="tear" x="{middle}" y="{tall / 2 + 4}" text-anchor="middle">⋯</text>')
    parts += _ticks(windows, tall)
    return _svg(parts, tall + 22, "The beginning and the end of the step")


def _windows(timeline: Timed, ranks: Sequence[int], room: float) -> list[_Window]:
    forwards = [box.end - box.start for rank in ranks for box in _boxes(timeline, rank) if box.action.kind == "F"]
    digits_of = len(str(max(box.action.micro_batch for rank in ranks for box in _boxes(timeline, rank))))
    per_second = max(17.0, DIGIT * digits_of + AROUND) / median(forwards)
    if timeline.makespan * per_second <= room:
        return [_Window(0.0, timeline.makespan, LABEL, room)]
    half = (room - TEAR) / 2
    shown = half / per_second
    last = _Window(timeline.makespan - shown, timeline.makespan, LABEL + half + TEAR, half)
    return [_Window(0.0, shown, LABEL, half), last]


def _boxes(timeline: Timed, rank: int) -> Iterator[_Box]:
    actions, starts, ends = timeline.actions[rank], timeline.start[rank], timeline.end[rank]
    first = actions[0].stage if actions else 0
    for action, start, end in zip(actions, starts, ends, strict=True):
        yield _Box(action, float(start), float(end), action.stage != first)


def _kind(box: _Box) -> str:
    return box.action.kind + (" later" if box.is_later else "")


def _numbered(box: _Box, window: _Window, top: float, row: float) -> str:
    """An action as a rectangle with a tip, and its micro-batch's number where it fits."""
    left, right = window.place(max(box.start, window.start)), window.place(min(box.end, window.end))
    a, wide = box.action, right - left
    tip = f"{a.kind} of stage {a.stage}, micro-batch {a.micro_batch}: {seconds(box.end - box.start)}"
    text = f'<rect class="{_kind(box)}" x="{left:.1f}" y="{top + 0.5:.1f}" width="{wide:.1f}" height="{row - 1:.1f}">'
    text += f"<title>{tip} from {seconds(box.start)} on</title></rect>"
    if wide >= DIGIT * len(str(a.micro_batch)) + 1:
        text += f'<text class="number" x="{left + wide / 2:.1f}" y="{top + row / 2 + 3.5:.1f}">{a.micro_batch}</text>'
    return text


def _is_named(number: int, row: float) -> bool:
    return row >= 10 or number % round(12 / row) == 0


def _row_name(rank: int, number: int, row: float) -> str:
    return f'<text x="{LABEL - 8}" y="{number * row + row / 2 + 4:.1f}" text-anchor="end">rank {rank}</text>'


def _ticks(windows: Sequence[_Window], top: float) -> list[str]:
    """Moments below a picture."""
    size, name = unit([windows[-1].end], SECONDS)
    parts = []
    for window in windows:
        count = 5 if len(windows) == 1 else 2
        for step in range(count + 1):
            time = window.start + (window.end - window.start) * step / count
            at = window.place(time)
            anchor = "start" if step == 0 else "end" if step == count else "middle"
            text = f"{digits(time / size)} {name}" if time else "0"
            parts.append(f'<line class="tick" x1="{at:.1f}" x2="{at:.1f}" y1="{top + 1:.1f}" y2="{top + 6:.1f}"/>')
            parts.append(f'<text x="{at:.1f}" y="{top + 18:.1f}" text-anchor="{anchor}">{text}</text>')
    return parts


def colours(held: Account) -> dict[str, int]:
    """The components that have a colour of their own, by the most that a stage holds of them."""
    most: dict[str, float] = {}
    for stage in held.stages:
        for name, size in stage.components.items():
            most[name] = max(most.get(name, 0.0), size)
    chosen = sorted(most, key=lambda name: -most[name])[:COLOURS]
    return {name: number for number, name in enumerate(chosen)}


def stages(held: Account) -> str:
    """The bytes of every stage by component, against what the device has."""
    row, right = (26.0 if len(held.stages) <= 16 else 14.0), 84
    most = max(held.device, *((1 + held.reserve) * stage.total + held.outside for stage in held.stages))
    window, known = _Window(0.0, most, LABEL, WIDTH - LABEL - right), colours(held)
    parts: list[str] = []
    for number, stage in enumerate(held.stages):
        top = number * row + 12
        name = stage.name if len(held.stages) > 1 else "a rank"
        parts.append(f'<text x="{LABEL - 8}" y="{top + row / 2 + 1:.1f}" text-anchor="end">{escape(name)}</text>')
        sizes = {name: stage.components.get(name, 0.0) for name in known}
        sizes["all others"] = stage.total - sum(sizes.values())
        sizes["fragmentation, driver"] = held.reserve * stage.total + held.outside
        at = 0.0
        for name, size in sizes.items():
            if size <= 0:
                continue
            kind = f"c{known[name]}" if name in known else "c-rest" if name == "all others" else "c-outside"
            left, wide = window.place(at), window.place(at + size) - window.place(at)
            parts.append(
                f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{row - 6:.1f}">'
                f"<title>{escape(name)}: {memory(size)}</title></rect>"
            )
            at += size
        parts.append(f'<text x="{window.place(at) + 6:.1f}" y="{top + row / 2 + 1:.1f}">{memory(at)}</text>')
    line, tall = window.place(held.device), len(held.stages) * row + 12
    parts.append(f'<line class="limit" x1="{line:.1f}" x2="{line:.1f}" y1="4" y2="{tall:.1f}"/>')
    anchor = "end" if line > WIDTH * 0.6 else "start"
    parts.append(
        f'<text class="limit" x="{line:.1f}" y="{tall + 14:.1f}" text-anchor="{anchor}">'
        f"the device has {memory(held.device)}</text>"
    )
    return _svg(parts, tall + 20, "Memory by component and stage")


def _svg(parts: Sequence[str], tall: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {tall:.0f}" role="img" aria-label="{label}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
