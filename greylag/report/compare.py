"""Compare: a run's measured seconds and bytes beside the predicted ones, the largest excess, and what would explain it.

A run folder has the steps of rank 0. Whoever writes those of others as `steps_rank_N.jsonl`, in the same layout, lets a
slow rank be told from a slow link. The rules behind the explanations are `explain`'s.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from greylag.report.explain import NOTABLE, Case, explain, steady
from greylag.report.quantity import count, difference, memory, percent, seconds
from greylag.report.record import PREDICTED, RunRecord, read_lines, read_record, sound_job
from greylag.report.summary import Comparison, summarize
from greylag.spec.error import SpecError
from greylag.spec.finding import Finding
from greylag.spec.job import Job
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
    """Measured beside predicted. Phases are rank 0's, medians over the steps behind the warm-up."""

    job: Job
    step: Comparison
    phases: list[Comparison]
    memory: Comparison
    pools: list[Comparison]
    wire: Comparison
    num_steps: int
    warm_up: int
    ranks: list[tuple[int, float, Excess]]
    """(rank, seconds of its median step, its largest excess), of all that were measured."""
    largest: Excess | None
    """The largest excess by phase and rank; None where nothing takes longer."""
    findings: list[Finding]
    interval: tuple[float, float] | None = None
    """Where nine in ten measured steps would lie."""


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
    summary = summarize(
        RunRecord(record.job, record.steps, predicted, record.findings, record.folder, record.audits, record.telemetry)
    )
    case = Case(record.job, predicted, ranks)
    excesses = [
        (rank, sum(s.total_seconds for s in steady(steps)) / len(steady(steps)), _largest(case, rank))
        for rank, steps in ranks.items()
    ]
    top = max((excess for _, _, excess in excesses), key=lambda e: e.seconds)
    return Laid(
        record.job,
        summary.step_time,
        summary.phases,
        summary.memory,
        summary.pools,
        summary.wire,
        len(summary.steady),
        summary.warm_up,
        sorted(excesses, key=lambda row: -row[2].seconds),
        top if top.seconds > 0 else None,
        explain(record.job, predicted, ranks),
        predicted.interval,
    )


def _largest(case: Case, rank: int) -> Excess:
    phase = max(PHASES, key=lambda p: case.excess(p, rank))
    return Excess(phase, rank, case.excess(phase, rank))


def print_comparison(laid: Laid, source: str, console: Console | None = None) -> None:
    """Print measured beside predicted, the largest excess, and what would explain it. `source` names the prediction."""
    console = console or Console()
    console.print(f"[bold]{escape(laid.job.name)}[/]: measured beside predicted ({escape(source)})", highlight=False)
    console.print(_times(laid))
    left_out = f", the first {laid.warm_up} left out as warm-up" if laid.warm_up else ""
    ranks = "rank 0, the only one measured here" if len(laid.ranks) == 1 else f"rank 0, of {len(laid.ranks)} measured"
    console.print(f"Medians over {count(laid.num_steps)} steps{left_out}. Of {ranks}.", highlight=False)
    if len(laid.ranks) > 1:
        console.print(_ranks(laid))
    if laid.memory.measured is not None or laid.wire.measured:
        console.print(_memory(laid))
    for line in verdict(laid):
        console.print(line, markup=False, highlight=False)


def verdict(laid: Laid) -> list[str]:
    """The largest excess and its explanations, a line each."""
    top, lines = laid.largest, []
    if laid.interval and laid.step.measured:
        low, high = laid.interval
        where = "within" if low <= laid.step.measured <= high else "outside of"
        lines.append(f"The measured step is {where} what nine in ten should be: {seconds(low)} to {seconds(high)}.")
    if top is None:
        return [*lines, "No phase takes longer than predicted."]
    share = top.seconds / laid.step.predicted if laid.step.predicted else 0.0
    lines += [
        f"Largest excess: {top.phase} on rank {top.rank}, {seconds(top.seconds)} more than predicted "
        f"({percent(share)} of the predicted step)."
    ]
    if laid.findings:
        return [*lines, "What would explain the run:", *(f"- {finding}" for finding in laid.findings)]
    if share <= NOTABLE:
        return [*lines, f"That is within {percent(NOTABLE)} of the step: nothing to explain."]
    return [*lines, "No rule explains it: these figures do not tell one cause from another."]


def _table(*columns: str) -> Table:
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _times(laid: Laid) -> Table:
    table = _table("phase", "measured", "predicted", "excess", "measured is")
    for row in laid.phases:
        if row.measured or row.predicted:
            table.add_row(row.what, *_cells(row))
    table.add_section()
    table.add_row("step", *_cells(laid.step))
    return table


def _cells(row: Comparison) -> tuple[str, str, str, str]:
    excess = (row.measured or 0.0) - (row.predicted or 0.0)
    sign = "+" if excess > 0 else "−" if excess < 0 else ""
    more = (row.measured or 0.0) / row.predicted - 1 if row.predicted else None
    return seconds(row.measured), seconds(row.predicted), sign + seconds(abs(excess)), difference(more)


def _ranks(laid: Laid) -> Table:
    table = _table("rank", "mean step", "largest excess", "of")
    for rank, time, excess in laid.ranks[:SHOWN_RANKS]:
        table.add_row(str(rank), seconds(time), seconds(max(0.0, excess.seconds)), excess.phase)
    if len(laid.ranks) > SHOWN_RANKS:
        table.add_row(f"{len(laid.ranks) - SHOWN_RANKS} more", "", "", "")
    return table


def _memory(laid: Laid) -> Table:
    table = _table("bytes of rank 0", "measured", "predicted", "measured is")
    rows = laid.pools if laid.memory.measured is not None else []
    for row in [*rows, laid.memory, laid.wire]:
        if row.measured or row.predicted:
            more = (row.measured or 0.0) / row.predicted - 1 if row.predicted and row.measured is not None else None
            table.add_row(row.what, memory(row.measured), memory(row.predicted), difference(more))
    return table
