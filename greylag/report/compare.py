"""Compare: a run's measured seconds and bytes beside the predicted ones, the largest excess, and what would explain it.

A run folder has the steps of rank 0, and in `ranks.jsonl` the seconds of every rank, which let a slow rank be told from
a slow link. The rules behind the explanations are `explain`'s.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from greylag.report.case import NOTABLE, Case
from greylag.report.explain import explain
from greylag.report.ranks import RankTimes, read_ranks
from greylag.report.record import PREDICTED, RunRecord, read_record, sound_job
from greylag.report.show import table_of
from greylag.report.summary import Comparison, Summary, summarize
from greylag.spec.finding import Finding
from greylag.spec.job import Job
from greylag.spec.quantity import count, difference, memory, percent, seconds
from greylag.spec.step import PHASES, Step

SHOWN_RANKS = 8
"""Ranks that are listed, those with the most excess."""


@dataclass(frozen=True)
class Excess:
    """What takes longer than predicted, on a rank."""

    phase: str
    rank: int
    seconds: float
    """Without what the rank waits for others."""
    apart: float
    """Seconds of it that a rank in the middle has not."""
    stands_out: bool
    """Whether that is worth a word."""


@dataclass(frozen=True)
class Laid:
    """Measured beside predicted."""

    job: Job
    summary: Summary
    """Of rank 0: medians over the steps behind the warm-up."""
    ranks: RankTimes
    excesses: list[Excess]
    """The largest of each rank, the largest first."""
    findings: list[Finding]
    interval: tuple[float, float] | None = None
    """Where nine in ten measured steps would lie."""

    @property
    def largest(self) -> Excess | None:
        """The largest excess by phase and rank; None where nothing takes longer."""
        top = self.excesses[0]
        return top if top.seconds > 0 else None


def compare_run(folder: Path, predict: Callable[[Job], Step], fresh: bool = False) -> None:
    """Print the comparison of a run folder: with its own prediction, or what `predict` says where it has none.

    Raises SpecError if the folder is no run, or what `predict` raises.
    """
    job, record = sound_job(folder), read_record(folder)
    predicted, source = record.predicted, f"the run's {PREDICTED}"
    if predicted is None or fresh:
        predicted, source = predict(job), "predicted anew"
    print_comparison(lay(record, predicted, read_ranks(folder, record)), source)


def lay(record: RunRecord, predicted: Step, ranks: RankTimes) -> Laid:
    """Lay a run beside a prediction. A pure function."""
    case = Case(record.job, predicted, record.steps, ranks)
    phases = [PHASES[p] for p in case.excesses.argmax(axis=1)]
    most = case.excesses.max(axis=1).tolist()
    excesses = [
        Excess(phase, rank, most[rank], case.apart(phase, rank), case.stands_out(phase, rank))
        for rank, phase in enumerate(phases)
    ]
    excesses.sort(key=lambda excess: -excess.seconds)
    summary = summarize(replace(record, predicted=predicted))
    return Laid(record.job, summary, ranks, excesses, explain(case), predicted.interval)


def print_comparison(laid: Laid, source: str, console: Console | None = None) -> None:
    """Print measured beside predicted, the largest excess, and what would explain it. `source` names the prediction."""
    console, summary = console or Console(), laid.summary
    console.print(f"[bold]{escape(laid.job.name)}[/]: measured beside predicted ({escape(source)})", highlight=False)
    console.print(_times(summary))
    left_out = f", the first {summary.warm_up} left out as warm-up" if summary.warm_up else ""
    measured = laid.ranks.num_ranks
    ranks = "rank 0, the only one measured here" if measured == 1 else f"rank 0, of {count(measured)} measured"
    console.print(f"Medians over {count(len(summary.steady))} steps{left_out}. Of {ranks}.", highlight=False)
    if measured > 1:
        console.print(_ranks(laid))
    if summary.memory.measured is not None or summary.wire.measured:
        console.print(_memory(summary))
    for line in verdict(laid):
        console.print(line, markup=False, highlight=False)


def verdict(laid: Laid) -> list[str]:
    """The largest excess and its explanations, a line each."""
    top, step, lines = laid.largest, laid.summary.step_time, []
    if laid.interval and step.measured:
        low, high = laid.interval
        where = "within" if low <= step.measured <= high else "outside of"
        lines.append(f"The measured step is {where} what nine in ten should be: {seconds(low)} to {seconds(high)}.")
    if top is None:
        return [*lines, "No phase takes longer than predicted."]
    share = top.seconds / step.predicted if step.predicted else 0.0
    on = f" on rank {top.rank}" if laid.ranks.num_ranks == 1 or top.stands_out else ""
    lines += [
        f"Largest excess: {top.phase}{on}, {seconds(top.seconds)} more than predicted "
        f"({percent(share)} of the predicted step){_against_others(laid, top)}."
    ]
    if laid.findings:
        return [*lines, "What would explain the run:", *(f"- {finding}" for finding in laid.findings)]
    if share <= NOTABLE:
        return [*lines, f"That is within {percent(NOTABLE)} of the step: nothing to explain."]
    return [*lines, "No rule explains it: these figures do not tell one cause from another."]


def _against_others(laid: Laid, top: Excess) -> str:
    if laid.ranks.num_ranks == 1:
        return ""
    return f", {seconds(top.apart)} more than on others" if top.stands_out else ", on no rank much more than on others"


def _times(summary: Summary) -> Table:
    table = table_of("phase", "measured", "predicted", "excess", "measured is")
    for row in summary.phases:
        if row.measured or row.predicted:
            table.add_row(row.what, *_cells(row))
    table.add_section()
    table.add_row("step", *_cells(summary.step_time))
    return table


def _cells(row: Comparison) -> tuple[str, str, str, str]:
    excess = (row.measured or 0.0) - (row.predicted or 0.0)
    sign = "+" if excess > 0 else "−" if excess < 0 else ""
    return seconds(row.measured), seconds(row.predicted), sign + seconds(abs(excess)), _more(row)


def _more(row: Comparison) -> str:
    """Measured against predicted; `Comparison.error` is the other way round."""
    return difference(row.measured / row.predicted - 1 if row.predicted and row.measured is not None else None)


def _ranks(laid: Laid) -> Table:
    table = table_of("rank", "mean step", "waits for others", "largest excess", "of")
    step = laid.ranks.seconds.sum(axis=2).mean(axis=0)
    idle = np.median(laid.ranks.idle.sum(axis=2), axis=0)
    for excess in laid.excesses[:SHOWN_RANKS]:
        row = (step[excess.rank], idle[excess.rank], max(0.0, excess.seconds))
        table.add_row(str(excess.rank), *map(seconds, row), excess.phase)
    if len(laid.excesses) > SHOWN_RANKS:
        table.add_row(f"{len(laid.excesses) - SHOWN_RANKS} more", "", "", "", "")
    return table


def _memory(summary: Summary) -> Table:
    table = table_of("bytes of rank 0", "measured", "predicted", "measured is")
    rows = summary.pools if summary.memory.measured is not None else []
    for row in [*rows, summary.memory, summary.wire]:
        if row.measured or row.predicted:
            table.add_row(row.what, memory(row.measured), memory(row.predicted), _more(row))
    return table
