"""Goodput: what each policy makes of failures, on the terminal, at one size and over many.

The figures are `plan`'s, which this file is handed and does not import: the protocols below are what it reads of them.
Every goodput stands with its interval, and below a table stands what it rests on.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console
from rich.markup import escape

from greylag.report.show import table_of
from greylag.spec.quantity import NONE, count, digits, finite, percent, seconds

WORTH_A_ROW = 5e-5
"""Of a loss, in some policy."""

Interval = tuple[float, float]


class Kept(Protocol):
    """What one policy gives at one size; `plan.goodput.Goodput` is one."""

    @property
    def policy(self) -> str:
        """Its name."""

    @property
    def num_devices(self) -> int:
        """That train."""

    @property
    def held(self) -> int:
        """That are paid for."""

    @property
    def goodput(self) -> float:
        """Effective time over elapsed time."""

    @property
    def interval(self) -> Interval:
        """Of it, from the count of failures."""

    @property
    def mttf(self) -> float:
        """Mean seconds between failures."""

    @property
    def mttf_interval(self) -> Interval:
        """Of it."""

    @property
    def checkpoint_interval(self) -> float:
        """Seconds of training between checkpoints."""

    @property
    def losses(self) -> Mapping[str, float]:
        """Shares of elapsed time by what they are lost to."""

    @property
    def remarks(self) -> Sequence[str]:
        """What is not counted."""


class Dated(Protocol):
    """What a run takes and costs; `plan.goodput.Calendar` is one."""

    @property
    def days(self) -> float:
        """Elapsed."""

    @property
    def interval(self) -> Interval:
        """Of them."""

    @property
    def lost_device_hours(self) -> float:
        """In which the job's devices gained nothing."""

    @property
    def spare_device_hours(self) -> float:
        """In which spares stood by."""

    @property
    def money(self) -> float | None:
        """What both cost."""


class Trialled(Protocol):
    """What simulated runs gave; `plan.campaign.Campaign` is one."""

    @property
    def goodput(self) -> float:
        """Mean."""

    @property
    def interval(self) -> Interval:
        """Nine in ten runs lie between."""

    @property
    def trials(self) -> int:
        """How many."""

    @property
    def days(self) -> float:
        """Elapsed, of each."""


def print_goodput(
    source: str,
    results: Sequence[Kept],
    calendars: Sequence[Dated] = (),
    campaigns: Sequence[Trialled] = (),
    console: Console | None = None,
) -> None:
    """Print policies side by side at one size. `source` names the failures; the rest is in the order of `results`."""
    console = console or Console()
    first = results[0]
    console.print(
        f"[bold]{count(first.num_devices)} devices[/], failures as {escape(source)}: one every "
        f"{seconds(first.mttf)} ({between(first.mttf_interval, seconds)})",
        highlight=False,
    )
    table = table_of("", *(result.policy for result in results))
    table.add_row("effective time", *(f"[bold]{percent(result.goodput)}[/]" for result in results))
    table.add_row("  nine in ten", *(between(result.interval) for result in results))
    if campaigns:
        table.add_row("simulated", *(percent(campaign.goodput) for campaign in campaigns))
        table.add_row("  nine in ten runs", *(between(campaign.interval) for campaign in campaigns))
    table.add_row("checkpoint every", *(seconds(result.checkpoint_interval) for result in results))
    table.add_section()
    names = [name for name in first.losses if any(result.losses[name] > WORTH_A_ROW for result in results)]
    for name in names:
        table.add_row(name, *(_loss(result.losses[name]) for result in results))
    if calendars:
        table.add_section()
        table.add_row("days", *(digits(dated.days) for dated in calendars))
        table.add_row("  nine in ten", *(between(dated.interval, digits).replace(" to ", "–") for dated in calendars))
        table.add_row("device-hours lost", *(count(dated.lost_device_hours) for dated in calendars))
        if any(dated.spare_device_hours for dated in calendars):
            table.add_row("device-hours of spares", *(count(dated.spare_device_hours) for dated in calendars))
        if any(dated.money is not None for dated in calendars):
            table.add_row("cost of both", *(count(dated.money) for dated in calendars))
    console.print(table)
    console.print(
        "Nine in ten: by the count of failures that the rates rest on; device-hours and cost are of the middle.",
        highlight=False,
    )
    if campaigns:
        told = f"Simulated: {campaigns[0].trials:,} runs of {digits(campaigns[0].days)} days each."
        console.print(told, highlight=False)
    _print_remarks(results, console)


def print_scale(source: str, results: Sequence[Kept], console: Console | None = None) -> None:
    """Print goodput over the number of devices, a column for each policy."""
    console = console or Console()
    policies = list(dict.fromkeys(result.policy for result in results))
    sizes = sorted({result.num_devices for result in results})
    found = {(result.num_devices, result.policy): result for result in results}
    console.print(f"[bold]Effective time by size[/], failures as {escape(source)}", highlight=False)
    table = table_of("devices", "spare devices", "fails every", *policies)
    for size in sizes:
        row = [found.get((size, policy)) for policy in policies]
        some = [result for result in row if result]
        spares = max(result.held for result in some) - size
        cells = (f"{percent(r.goodput)}\n{between(r.interval).rstrip('%')}" if r else NONE for r in row)
        table.add_row(count(size), count(spares), seconds(some[0].mttf), *cells)
    console.print(table)
    console.print("Below each: nine in ten, from the count of failures that the rates rest on.", highlight=False)
    _print_remarks(results, console)


def between(interval: Interval, write: "Writer" = percent) -> str:
    """An interval: 89.1–91.4%; with a dash for an end that there is not. A unit that both ends share stands once."""
    low, high = (write(finite(end)) for end in interval)
    number = low.rstrip("%")
    if low[len(number) :] and high.endswith(low[len(number) :]):
        return f"{number}–{high}"
    (start, _, unit), (_, _, same) = low.partition(" "), high.partition(" ")
    return f"{start}–{high}" if unit and unit == same else f"{low} to {high}"


class Writer(Protocol):
    """How a number is written."""

    def __call__(self, value: float | None, /) -> str:
        """The number in words."""


def _loss(share: float) -> str:
    return percent(share) if share > WORTH_A_ROW else NONE


def _print_remarks(results: Sequence[Kept], console: Console) -> None:
    for remark in dict.fromkeys(remark for result in results for remark in result.remarks):
        console.print(f"{remark[:1].upper()}{remark[1:]}.", markup=False, highlight=False)
