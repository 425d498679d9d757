"""Demand: what a training takes on clusters of several sizes, and the table of known models, on the terminal.

The figures are `plan`'s, which this file is handed and does not import: the protocols below are what it reads of them.
Each figure is printed with its interval, and below the table stands what the intervals rest on, or why there are none.
"""

import datetime
from collections.abc import Sequence
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from greylag.report.show import table_of
from greylag.spec.quantity import NONE, count, difference, digits, percent

CREDIT = "Published compute: each row of presets/trained.toml names its source; many are Epoch AI's (CC BY 4.0)."


class Figured(Protocol):
    """A figure with its interval; `plan.demand.Estimate` is one. Numbers, or arrays over clusters."""

    @property
    def value(self) -> Any:
        """The figure."""

    @property
    def low(self) -> Any:
        """Where its interval begins; None where there is none."""

    @property
    def high(self) -> Any:
        """Where it ends."""

    @property
    def basis(self) -> str:
        """What the interval rests on, or why there is none."""


class Sized(Protocol):
    """A model and how long it is trained."""

    @property
    def name(self) -> str:
        """Of the model."""

    @property
    def parameters(self) -> float | None:
        """All of them."""

    @property
    def active(self) -> float | None:
        """Those that one token meets; None: all."""

    @property
    def tokens(self) -> float | None:
        """Trained on."""


class Trainable(Sized, Protocol):
    """A training; `plan.demand.Training` is one."""

    @property
    def flops(self) -> Figured:
        """Of the whole training."""

    @property
    def how(self) -> str:
        """How they were come by."""


class Demanded(Protocol):
    """A training on clusters of several sizes; `plan.demand.Demand` is one."""

    @property
    def training(self) -> Trainable:
        """What is trained."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The clusters' names."""

    @property
    def devices(self) -> Any:
        """By cluster."""

    @property
    def peak(self) -> Any:
        """FLOP/s of a device, by cluster."""

    @property
    def dtype(self) -> str:
        """Whose peak that is."""

    @property
    def utilization(self) -> Figured:
        """Share of the peak."""

    @property
    def days(self) -> Figured:
        """By cluster."""

    @property
    def device_hours(self) -> Figured:
        """By cluster."""

    @property
    def energy(self) -> Figured | None:
        """KWh by cluster."""

    @property
    def money(self) -> Figured | None:
        """By cluster."""


class Knowable(Sized, Protocol):
    """A known model; `plan.known.Trained` is one."""

    @property
    def date(self) -> datetime.date:
        """Of its publication."""

    @property
    def year(self) -> float:
        """The same in years."""

    @property
    def counted(self) -> float | None:
        """FLOPs from dimensions and tokens."""

    @property
    def compute(self) -> float | None:
        """Published FLOPs."""

    @property
    def origin(self) -> str | None:
        """Whether those are stated, derived or estimated."""

    @property
    def difference(self) -> float | None:
        """Counted over published, as a share of it."""

    @property
    def agrees(self) -> bool | None:
        """Whether that is little; None where one of the two is not there."""

    @property
    def apart(self) -> str:
        """Why it is much."""

    @property
    def flops(self) -> float:
        """The figure that counts."""


class Trending(Protocol):
    """How the record grows; `plan.trend.Trend` is one."""

    @property
    def records(self) -> Sequence[Knowable]:
        """The models that it was fitted to."""

    @property
    def growth(self) -> Figured:
        """Factor per year."""

    @property
    def doubling(self) -> Figured:
        """Months."""

    @property
    def doubling_error(self) -> float:
        """Standard error of that."""

    def at(self, year: float) -> float:
        """FLOPs on the line."""


def print_demand(demand: Demanded, console: Console | None = None) -> None:
    """Print a training's FLOPs and what they take on every cluster."""
    console = console or Console()
    training = demand.training
    console.print(f"[bold]{escape(training.name)}[/]: {escape(sized(training))}", highlight=False)
    console.print(f"{flops(training.flops)} FLOPs, {training.how}", markup=False, highlight=False)
    columns = ["cluster", "devices", "utilization", "days", "device-hours"]
    columns += ["MWh"] if demand.energy else []
    columns += ["money"] if demand.money else []
    table = table_of(*columns)
    for at, label in enumerate(demand.labels):
        cells = [f"{demand.devices[at]:,.0f}", _cell(demand.utilization, at, percent), _cell(demand.days, at, days)]
        cells.append(_cell(demand.device_hours, at, count))
        if demand.energy:
            cells.append(_cell(demand.energy, at, _megawatt_hours))
        if demand.money:
            cells.append(_cell(demand.money, at, count))
        table.add_row(escape(label), *cells)
    console.print(table)
    peaks = " or ".join(f"{peak:,g}" for peak in sorted({float(peak) / 1e12 for peak in demand.peak}))
    console.print(
        f"Utilization is of the dense {demand.dtype.upper()} peak, {peaks} TFLOP/s a device. "
        "Days are of computing: failures and restarts come on top.",
        markup=False,
        highlight=False,
    )
    told = "Intervals" if demand.days.low is not None else "No intervals"
    console.print(f"{told}: {demand.days.basis}.", markup=False, highlight=False)


def print_known(models: Sequence[Knowable], trend: Trending | None, console: Console | None = None) -> None:
    """Print known models by date, how counting agrees with what is published, and the trend of the largest."""
    console = console or Console()
    table = Table(box=box.SIMPLE, padding=0)
    for column in ("model", "date", "N", "active", "tokens", "counted", "published", "is", "off by"):
        is_words = column in ("model", "is")
        table.add_column(column, justify="left" if is_words else "right", no_wrap=column != "model", overflow="fold")
    for model in models:
        off = model.difference
        table.add_row(
            escape(model.name),
            f"{model.date:%Y-%m}",
            _billions(model.parameters),
            _billions(model.active),
            _billions(model.tokens),
            power(model.counted),
            power(model.compute),
            model.origin or NONE,
            f"[yellow]{difference(off)}[/]" if model.agrees is False else difference(off),
        )
    console.print(table)
    console.print("N: parameters; counted and published: FLOPs of the training.", highlight=False)
    for line in (agreement(models), *[f"{m.name}: {m.apart}." for m in models if m.apart]):
        console.print(line, markup=False, highlight=False)
    if trend:
        console.print(growth(trend), markup=False, highlight=False)
    console.print(CREDIT, markup=False, highlight=False, style="dim")


def agreement(models: Sequence[Knowable]) -> str:
    """How many models have both figures, and how many agree, in words."""
    both = [m for m in models if m.agrees is not None]
    stated = [m for m in both if m.origin == "stated"]
    close, close_stated = (sum(m.agrees is True for m in some) for some in (both, stated))
    return (
        f"{len(models)} models, {len(both)} with published compute, dimensions and tokens: counted and published agree "
        f"within a tenth for {close}, for {close_stated} of the {len(stated)} whose developers state it."
    )


def growth(trend: Trending) -> str:
    """How fast the record grows and over which models that was fitted, in words."""
    low, high = trend.growth.low, trend.growth.high
    names = ", ".join(f"{m.name} ({m.date:%Y-%m})" for m in trend.records)
    return (
        f"The largest training's compute grew {digits(trend.growth.value)} times a year ({digits(low)} to "
        f"{digits(high)}) and doubled every {trend.doubling.value:.1f} ± {trend.doubling_error:.1f} months: "
        f"{trend.growth.basis}. Records: {names}."
    )


def sized(training: Sized) -> str:
    """671 B parameters, 37.0 B active, 14.8 T tokens."""
    parts = [f"{count(training.parameters)} parameters"] if training.parameters else []
    if training.active and training.active != training.parameters:
        parts.append(f"{count(training.active)} active")
    if training.tokens:
        parts.append(f"{count(training.tokens)} tokens")
    return ", ".join(parts) or "neither parameters nor tokens are public"


def flops(figure: Figured) -> str:
    """3.40e24, with its interval where there is one."""
    if figure.low is None:
        return power(figure.value)
    return f"{power(figure.value)} ({power(figure.low)} to {power(figure.high)})"


def power(value: float | None) -> str:
    """3.40e24."""
    return NONE if value is None else f"{value:.2e}".replace("e+", "e")


def days(value: float) -> str:
    """Whole days from ten on."""
    return f"{value:,.0f}" if value >= 9.95 else digits(value)


def _cell(figure: Figured, at: int, text: Any) -> str:
    """One cluster's figure, with its interval where there is one."""
    if figure.low is None:
        return str(text(float(figure.value[at])))
    return f"{text(float(figure.value[at]))} ({text(float(figure.low[at]))} to {text(float(figure.high[at]))})"


def _megawatt_hours(kilowatt_hours: float) -> str:
    return f"{kilowatt_hours / 1000:,.0f}" if kilowatt_hours >= 1e5 else digits(kilowatt_hours / 1000)


def _billions(value: float | None) -> str:
    return NONE if value is None else count(value)
