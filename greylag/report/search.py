"""Search: what a search found as one page, with a heat map of the degrees and what less memory costs.

Pure HTML without scripts. What it draws it is handed; `sim.search.Found` is one.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from greylag import __version__
from greylag.report.page import template
from greylag.spec.finding import Finding
from greylag.spec.job import Job
from greylag.spec.quantity import NONE, memory, seconds

HOTTEST = 2.0
"""Times the best from which all are as pale."""
ROWS = 24
"""Of the front, thinned out evenly."""


class Candidate(Protocol):
    """A strategy that fits."""

    @property
    def job(self) -> Job:
        """With it."""

    @property
    def seconds(self) -> float:
        """Of a step."""

    @property
    def bytes(self) -> float:
        """Allocated at the peak."""

    @property
    def largest(self) -> Sequence[tuple[str, float]]:
        """Causes and seconds of what it loses most by."""


class Choice(Protocol):
    """Why an axis has the winner's value."""

    @property
    def axis(self) -> str:
        """Its name."""

    @property
    def words(self) -> tuple[str, str]:
        """The winner's value, and the best of the rest."""

    @property
    def seconds(self) -> float:
        """That it loses."""

    @property
    def cause(self) -> str:
        """What most of them are spent on."""


class Heat(Protocol):
    """Seconds of the best by degrees."""

    @property
    def tp(self) -> Sequence[int]:
        """Rows."""

    @property
    def pp(self) -> Sequence[int]:
        """Columns."""

    @property
    def seconds(self) -> Sequence[Sequence[float | None]]:
        """(tp, pp); None where nothing fits."""


class Found(Protocol):
    """What a search found."""

    @property
    def job(self) -> Job:
        """That was asked about."""

    @property
    def best(self) -> Sequence[Candidate]:
        """The winner, and runners-up of other shapes."""

    @property
    def front(self) -> Sequence[Candidate]:
        """Those that none beats in both time and memory, fastest first."""

    @property
    def choices(self) -> Sequence[Choice]:
        """Dearest first."""

    @property
    def heat(self) -> Heat:
        """By tp and pp."""

    @property
    def num_tried(self) -> int:
        """Strategies."""

    @property
    def num_unfit(self) -> int:
        """Of them."""

    @property
    def num_invalid(self) -> int:
        """Combinations that no job can have."""

    @property
    def num_left_out(self) -> int:
        """Beyond the limit."""

    @property
    def findings(self) -> Sequence[Finding]:
        """Where nothing fits."""


class Cell(NamedTuple):
    """Of the heat map."""

    text: str
    share: float
    """Of its colour: 100 for the best, 0 from HOTTEST times its seconds."""
    is_best: bool


class Row(NamedTuple):
    """A strategy in a table."""

    strategy: str
    seconds: str
    memory: str
    memory_share: float
    """Length of its bar: per cent of the device."""
    loses: str = ""


def render_search(found: Found) -> str:
    """The page: one HTML file that needs no network."""
    precisions = {c.job.precision.name for c in (*found.best, *found.front)}
    return template("search.html.j2").render(
        job=found.job,
        best=_rows(found, found.best, precisions),
        front=_rows(found, found.front[:: max(1, -(-len(found.front) // ROWS))], precisions),
        choices=[(c.axis, *c.words, seconds(c.seconds), c.cause) for c in found.choices],
        heat=found.heat,
        cells=_cells(found.heat),
        found=found,
        version=__version__,
    )


def _cells(heat: Heat) -> list[list[Cell]]:
    known = [s for row in heat.seconds for s in row if s is not None]
    best = min(known, default=0.0)

    def cell(s: float | None) -> Cell:
        if s is None:
            return Cell(NONE, 0.0, False)
        share = max(0.0, 1 - (s / best - 1) / (HOTTEST - 1))
        return Cell(seconds(s), round(100 * share, 1), s == best)

    return [[cell(s) for s in row] for row in heat.seconds]


def _rows(found: Found, some: Sequence[Candidate], precisions: set[str]) -> list[Row]:
    room = found.job.cluster.device.memory
    rows = []
    for c in some:
        told = ", ".join(f"{cause} {1e3 * s:+,.0f} ms" for cause, s in c.largest)
        name = c.job.strategy.brief + (f" {c.job.precision.name}" if len(precisions) > 1 else "")
        rows.append(Row(name, seconds(c.seconds), memory(c.bytes), round(100 * c.bytes / room, 1), told))
    return rows
