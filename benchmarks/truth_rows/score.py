"""Score: errors of predictions against measured figures, by group, and the table that shows them."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import correlation, mean, median
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from rich.table import Table

from greylag.sim.memory import Memory, memory
from greylag.sim.memory_fused import Stage
from greylag.spec.step import Step
from greylag.spec.strategy import Strategy
from truth_rows.row import Row

SMALLEST_SET = 3
"""Runs that differ in strategy alone, from which a ranking is scored."""


@dataclass(frozen=True)
class Prediction:
    """What the simulator said of a row; figures are None where `why_not` says that there are none."""

    row: Row
    step: Step | None
    why_not: str
    other_seconds: float | None = None
    """A step time in the place of the Step's."""

    @property
    def seconds(self) -> float | None:
        """Predicted seconds of a step."""
        if self.other_seconds is not None:
            return self.other_seconds
        return self.step.total_seconds if self.step else None

    @cached_property
    def stage(self) -> Stage | None:
        """The predicted account of the ranks whose memory was measured; None where none was."""
        if not (self.step and self.row.job and self.row.memory):
            return None
        account = memory(self.row.job)
        return account.stage(-1 if self.row.memory.rank == "last" else int(account.peak_stage))

    @property
    def bytes(self) -> float | None:
        """Predicted peak bytes of a rank, counted as they were measured."""
        if not (self.stage and self.row.memory):
            return None
        whole = Memory((self.stage,))
        return float(whole.reserved if self.row.memory.kind == "reserved" else whole.total)

    @property
    def time_error(self) -> float | None:
        """Predicted over measured step time, less one."""
        return _error(self.seconds, self.row.seconds)

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured peak memory, less one."""
        return _error(self.bytes, self.row.bytes)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The step time's 90% interval in seconds, where the Step carries one."""
        return self.step.interval if self.step else None

    def record(self) -> dict[str, Any]:
        """What is written of a row."""
        row = self.row
        return {
            "id": row.id,
            "group": row.group,
            "family": row.family,
            "generation": row.generation,
            "device": row.job.cluster.device.name if row.job else None,
            "predicted_seconds": self.seconds,
            "measured_seconds": row.seconds,
            "time_error": self.time_error,
            "interval_seconds": self.interval,
            "predicted_bytes": self.bytes,
            "measured_bytes": row.bytes,
            "memory_kind": row.memory.kind if row.memory else None,
            "memory_error": self.memory_error,
            "memory_peak": self.stage.moment if self.stage else None,
            "why_not": self.why_not,
        }


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else predicted / measured - 1


@dataclass(frozen=True)
class Errors:
    """Of one figure over some rows: shares, signed ones in `bias`."""

    count: int
    mean: float
    median: float
    p90: float
    worst: float
    bias: float

    @classmethod
    def of(cls, errors: list[float]) -> "Errors | None":
        """None without errors."""
        if not errors:
            return None
        sizes = sorted(abs(e) for e in errors)
        p90 = float(np.quantile(sizes, 0.9))
        return cls(len(sizes), mean(sizes), median(sizes), p90, sizes[-1], mean(errors))


def time_errors(predictions: list[Prediction]) -> Errors | None:
    """Of step times."""
    return Errors.of([p.time_error for p in predictions if p.time_error is not None])


def memory_errors(predictions: list[Prediction]) -> Errors | None:
    """Of peak memory."""
    return Errors.of([p.memory_error for p in predictions if p.memory_error is not None])


def strategy_sets(predictions: list[Prediction]) -> list[list[Prediction]]:
    """Predictions of timed rows, in sets whose jobs differ in their strategy alone; sets of three and more."""
    sets = _alike(predictions, lambda strategy: Strategy())
    return [found for found in sets if len(found) >= SMALLEST_SET]


def _alike(predictions: list[Prediction], plain: Callable[[Strategy], Strategy]) -> list[list[Prediction]]:
    """Predictions of timed rows by what their jobs are where `plain` takes the place of their strategies."""
    sets: dict[bytes, dict[Strategy, Prediction]] = defaultdict(dict)
    for p in predictions:
        if p.row.job and p.time_error is not None:
            job, strategy = p.row.job, p.row.job.strategy
            same = replace(job, name="", strategy=plain(strategy), model=replace(job.model, name="", vocab_size=1))
            sets[msgspec.json.encode(same, order="sorted")].setdefault(strategy, p)
    return [list(found.values()) for found in sets.values()]


def schedule_errors(predictions: list[Prediction]) -> Errors | None:
    """Of step times as ratios to that of 1F1B, or else of the first, among runs that differ in their schedule alone."""
    errors = []
    for found in _alike(predictions, lambda strategy: replace(strategy, schedule="1f1b", vp=1, stage_layers=())):
        by_schedule = {p.row.job.strategy.schedule: p for p in found if p.row.job}
        usual = by_schedule.pop("1f1b", None) or by_schedule.pop(next(iter(by_schedule)))
        assert usual.time_error is not None
        others = (p.time_error for p in by_schedule.values() if p.time_error is not None)
        errors += [(1 + error) / (1 + usual.time_error) - 1 for error in others]
    return Errors.of(errors)


def spearman(first: list[float], second: list[float]) -> float:
    """Rank correlation; ties share the mean of their ranks. 1 where one side does not vary."""
    varies = len(set(first)) > 1 and len(set(second)) > 1
    return correlation(_ranks(first), _ranks(second)) if varies else 1.0


def _ranks(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def ranking(predictions: list[Prediction]) -> tuple[float, int] | None:
    """Mean Spearman over the sets of `strategy_sets`, and how many; None without any."""
    found = []
    for each in strategy_sets(predictions):
        found.append(spearman([p.seconds or 0.0 for p in each], [p.row.seconds or 0.0 for p in each]))
    return (mean(found), len(found)) if found else None


def coverage(predictions: list[Prediction]) -> float | None:
    """Share of measured step times inside their interval; None where no Step carries one."""
    inside = [p.interval[0] <= p.row.seconds <= p.interval[1] for p in predictions if p.interval and p.row.seconds]
    return mean(inside) if inside else None


def table(predictions: list[Prediction], by: str = "group") -> Table:
    """One line per group (or other attribute of a Row), and one for all."""
    out = Table(title="Predicted against measured (errors in %)")
    out.add_column(by, no_wrap=True)
    time, memory = ("time n", "mean", "median", "p90", "worst", "bias"), ("memory n", "mean", "median", "worst", "bias")
    for name in ("rows", "told", *time, *memory, "Spearman (sets)", "in interval"):
        out.add_column(name, justify="right")
    for key in dict.fromkeys(getattr(p.row, by) for p in predictions):
        out.add_row(str(key), *_cells([p for p in predictions if getattr(p.row, by) == key]))
    out.add_section()
    out.add_row("all", *_cells(predictions))
    return out


def _cells(predictions: list[Prediction]) -> list[str]:
    time, memory = time_errors(predictions), memory_errors(predictions)
    ranked, inside = ranking(predictions), coverage(predictions)
    return [
        str(len(predictions)),
        str(sum(p.step is not None for p in predictions)),
        *_shown(time, ("count", "mean", "median", "p90", "worst", "bias")),
        *_shown(memory, ("count", "mean", "median", "worst", "bias")),
        f"{ranked[0]:.2f} ({ranked[1]})" if ranked else "",
        f"{inside:.0%}" if inside is not None else "",
    ]


def _shown(errors: Errors | None, names: tuple[str, ...]) -> list[str]:
    def show(name: str, value: Any) -> str:
        if name == "count":
            return str(value)
        return f"{100 * value:+.1f}" if name == "bias" else f"{100 * value:.1f}"

    return [show(name, getattr(errors, name)) if errors else "" for name in names]
