"""Budget: what a plan takes in all: days, device-hours, energy and money with failures and spares counted in.

`plan.demand` gives what computing takes, `plan.goodput` what failures add under each policy. Here the two are put
together for the policy that a budget rests on, with both intervals: handed by protocol, as `demand` and `goodput` are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isclose
from typing import NamedTuple

from greylag.report.demand import Demanded, Figured
from greylag.report.goodput import Dated, Interval, Kept, between
from greylag.spec.quantity import COUNT, NONE, digits, finite, percent, unit

PREFERRED = ("spares", "restart", "eject", "skip")
"""The first of them that is there carries the budget: it pays for its spares, and asks for no special software."""
TOGETHER = (
    "the intervals of computing and of failures together, low end with low end and high with high, so no narrower "
    "than either"
)
FAILURES_ALONE = "the count of failures alone, nine in ten"


class Amount(NamedTuple):
    """One figure with its interval."""

    value: float
    low: float | None
    high: float | None
    """Both None where there is no interval; infinite where nothing is known of the upper end."""
    basis: str

    def times(self, factor: float) -> "Amount":
        """So many times as much."""
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Amount(self.value * factor, low, high, self.basis)


class Told(NamedTuple):
    """An amount in words."""

    value: str
    interval: str
    """Empty where there is none."""

    @property
    def line(self) -> str:
        """12.3 (10.1–14.2)."""
        return f"{self.value} ({self.interval})" if self.interval else self.value


@dataclass(frozen=True)
class Budget:
    """What the job takes on its own cluster, all told."""

    policy: str
    """Which failures are met with; empty where no rates of failure were given, so that none is counted in."""
    devices: int
    """That train."""
    spares: int
    """Devices that stand by."""
    computing: Amount
    """Days, if nothing failed."""
    days: Amount
    hours: Amount
    """Device-hours that are paid for, those of spares with them."""
    energy: Amount | None
    """KWh of all those, at the draw of a device that trains."""
    money: Amount | None
    effective: Amount | None
    """Training that is kept over elapsed time."""


def add_up(demand: Demanded, goodputs: Sequence[Kept], calendars: Sequence[Dated]) -> Budget:
    """The budget of the demand's first cluster under the most trusted policy that is there."""
    computing, hours = at(demand.days), at(demand.device_hours)
    energy, money = (at(figure) if figure else None for figure in (demand.energy, demand.money))
    devices = round(float(demand.devices[0]))
    by_policy = {kept.policy: (kept, dated) for kept, dated in zip(goodputs, calendars, strict=True)}
    if not by_policy:
        return Budget("", devices, 0, computing, computing, hours, energy, money, None)
    policy = next((name for name in PREFERRED if name in by_policy), next(iter(by_policy)))
    kept, dated = by_policy[policy]
    assert isclose(dated.days * kept.goodput, computing.value, rel_tol=1e-3), "calendars are of another job"
    days = elapsed(computing, dated)
    paid = days.times(24.0 * kept.held)
    return Budget(
        policy=policy,
        devices=devices,
        spares=kept.held - kept.num_devices,
        computing=computing,
        days=days,
        hours=paid,
        energy=paid.times(energy.value / hours.value) if energy else None,
        money=paid.times(money.value / hours.value) if money else None,
        effective=Amount(kept.goodput, *kept.interval, FAILURES_ALONE),
    )


def at(figure: Figured, number: int = 0) -> Amount:
    """One cluster's figure."""
    low, high = (None if end is None else float(end[number]) for end in (figure.low, figure.high))
    return Amount(float(figure.value[number]), low, high, figure.basis)


def elapsed(computing: Amount, dated: Dated) -> Amount:
    """Days with failures: their interval, and that of the days of computing, which the calendar takes as exact."""
    return _with_computing(dated.days, dated.interval, computing)


def lost_hours(computing: Amount, kept: Kept, dated: Dated) -> Amount:
    """Device-hours in which nothing was gained: of the job's devices, and of spares that stood by."""
    low, high = (24 * (days * kept.held - computing.value * kept.num_devices) for days in dated.interval)
    return _with_computing(dated.lost_device_hours + dated.spare_device_hours, (low, high), computing)


def _with_computing(value: float, failing: Interval, computing: Amount) -> Amount:
    basis = FAILURES_ALONE if computing.low is None else TOGETHER
    return Amount(value, *together(failing, computing), basis)


def together(failing: Interval, computing: Amount) -> Interval:
    """The ends of what failures leave open, each for the same end of the computing that it grows with."""
    if computing.low is None or computing.high is None:
        return failing
    return failing[0] * computing.low / computing.value, failing[1] * computing.high / computing.value


def told(amount: Amount | None, write: Callable[[float | None], str] = digits) -> Told:
    """An amount and its interval, in words; of an infinite one the end that is known."""
    if amount is None:
        return Told(NONE, "")
    words = interval((amount.low, amount.high), write)
    return Told(words or NONE, "") if finite(amount.value) is None else Told(write(amount.value), words)


def counted(amount: Amount | None) -> Told:
    """The same of device-hours or money: three digits, in one unit with its interval."""
    size, name = unit([amount.value] if amount else [], COUNT)

    def write(value: float | None) -> str:
        assert value is not None
        return f"{digits(value / size)} {name}" if name else f"{float(f'{value:.3g}'):,.0f}"

    return told(amount, write)


def share(value: float | None) -> str:
    """A share of time, with decimals where little is lost: 99.11%."""
    return f"{value:.2%}" if value is not None and 0.98 <= value < 1 else percent(value)


def megawatt_hours(kilowatt_hours: float | None) -> str:
    """12.3 MWh."""
    return NONE if kilowatt_hours is None else f"{digits(float(f'{kilowatt_hours / 1000:.3g}'))} MWh"


def interval(ends: tuple[float | None, float | None], write: Callable[[float | None], str] = digits) -> str:
    """128–294; a single end where nothing is known of the other; empty where there is none."""
    low, high = map(finite, ends)
    if low is not None and high is not None:
        return between((low, high), write).replace(" to ", "–")
    if low is None and high is None:
        return ""
    return f"{write(low)} or more" if high is None else f"up to {write(high)}"
