"""Compare: a run's measured seconds and bytes beside the predicted ones, the largest excess, and what would explain it.

A run folder has the steps of rank 0. Whoever writes those of others as `steps_rank_N.jsonl`, in the same layout, lets a
slow rank be told from a slow link. The rules behind the explanations are `explain`'s.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from greylag.report.explain import NOTABLE, Case, explain
from greylag.report.record import PREDICTED, RunRecord, read_lines, read_record, sound_job
from greylag.report.show import table_of
from greylag.report.summary import Comparison, Summary, summarize
from greylag.spec.error import SpecError
from greylag.spec.finding import Finding
from greylag.spec.job import Job
from greylag.spec.quantity import count, difference, memory, percent, seconds
from greylag.spec.step import PHASES, Step

OTHERS = "steps_rank_*.jsonl"
SHOWN_RANKS = 8
"""Ranks that are listed, those with the most excess."""


@dataclass(frozen=True)
class Excess:
    """What takes longer than predicted."""

    phase: str
    rank: int
    seconds: float


@dataclass(frozen=True)
class Laid:
    """Measured beside predicted."""

    job: Job
    summary: Summary
    """Of rank 0: medians over the steps behind the warm-up."""
    ranks: list[tuple[int, float, Excess]]
    """(rank, seconds of its mean step, its largest excess), of all that were measured, the largest first."""
    findings: list[Finding]
    interval: tuple[float, float] | None = None
    """Where nine in ten measured steps would lie."""

    @property
    def largest(self) -> Excess | None:
        """The largest excess by phase and rank; None where nothing takes longer."""
        top = self.ranks[0][2]
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


def read_ranks(folder: Path, record: RunRecord) -> dict[int, Sequence[Step]]:
    """The measured steps of every rank that a folder has, rank 0's from `steps.jsonl`.

    Raises SpecError if a file of a rank is something else, or of a rank that the job does not have.
    """
    ranks: dict[int, Sequence[Step]] = {0: record.steps}
    for path in sorted(folder.glob(OTHERS)):
        name = re.fullmatch(r"steps_rank_(\d+)\.jsonl", path.name)
        if not name or not int(name[1]) < record.job.strategy.world:
            raise SpecError(f"{path}: the job has ranks 0 to {record.job.strategy.world - 1}; rename or remove it")
        steps = {s.number: s for s in read_lines(path, Step)[0] if s.source == "measured"}
        if steps and int(name[1]):
            ranks[int(name[1])] = [steps[number] for number in sorted(steps)]
    return ranks


def lay(record: RunRecord, predicted: Step, ranks: Mapping[int, Sequence[Step]]) -> Laid:
    """Lay a run beside a prediction. A pure function."""
    case = Case(record.job, predicted, ranks)
    rows = [(rank, fmean(s.total_seconds for s in case.ranks[rank]), _largest(case, rank)) for rank in ranks]
    return Laid(
        record.job,
        summarize(replace(record, predicted=predicted)),
        sorted(rows, key=lambda row: -row[2].seconds),
        explain(case),
        predicted.interval,
    )


def _largest(case: Case, rank: int) -> Excess:
    phase = max(PHASES, key=lambda p: case.excess(p, rank))
    return Excess(phase, rank, case.excess(phase, rank))


def print_comparison(laid: Laid, source: str, console: Console | None = None) -> None:
    """Print measured beside predicted, the largest excess, and what would explain it. `source` names the prediction."""
    console, summary = console or Console(), laid.summary
    console.print(f"[bold]{escape(laid.job.name)}[/]: measured beside predicted ({escape(source)})", highlight=False)
    console.print(_times(summary))
    left_out = f", the first {summary.warm_up} left out as warm-up" if summary.warm_up else ""
    ranks = "rank 0, the only one measured here" if len(laid.ranks) == 1 else f"rank 0, of {len(laid.ranks)} measured"
    console.print(f"Medians over {count(len(summary.steady))} steps{left_out}. Of {ranks}.", highlight=False)
    if len(laid.ranks) > 1:
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
    lines += [
        f"Largest excess: {top.phase} on rank {top.rank}, {seconds(top.seconds)} more than predicted "
        f"({percent(share)} of the predicted step)."
    ]
    if laid.findings:
        return [*lines, "What would explain the run:", *(f"- {finding}" for finding in laid.findings)]
    if share <= NOTABLE:
        return [*lines, f"That is within {percent(NOTABLE)} of the step: nothing to explain."]
    return [*lines, "No rule explains it: these figures do not tell one cause from another."]


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
    table = table_of("rank", "mean step", "largest excess", "of")
    for rank, time, excess in laid.ranks[:SHOWN_RANKS]:
        table.add_row(str(rank), seconds(time), seconds(max(0.0, excess.seconds)), excess.phase)
    if len(laid.ranks) > SHOWN_RANKS:
        table.add_row(f"{len(laid.ranks) - SHOWN_RANKS} more", "", "", "")
    return table


def _memory(summary: Summary) -> Table:
    table = table_of("bytes of rank 0", "measured", "predicted", "measured is")
    rows = summary.pools if summary.memory.measured is not None else []
    for row in [*rows, summary.memory, summary.wire]:
        if row.measured or row.predicted:
            table.add_row(row.what, memory(row.measured), memory(row.predicted), _more(row))
    return table
