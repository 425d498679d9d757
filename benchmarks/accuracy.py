"""Accuracy: the simulator's predictions against published runs, group by group.

    python benchmarks/accuracy.py [--truth FOLDER] [--group GROUP ...] [--out rows.jsonl] [--by group]
    python benchmarks/accuracy.py --fit        # constants for the presets, and errors on models left out of the fit

FOLDER holds row files like `benchmarks/truth` (the default). Each row is told as a Job (`benchmarks/rows.py`),
predicted, and compared with what was measured; `--out` writes a line of JSON for each, also for those that no Job
says, with why. `--fit` fits the constants of devices and software generations to the step times (`truth_rows/fit.py`)
and prints TOML.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console

from greylag.sim import predict
from greylag.sim.estimate import estimate
from greylag.spec.error import SpecError
from greylag.spec.job import Job
from rows import TRUTH, Row, rows
from truth_rows.fit import as_toml, fit, left_out
from truth_rows.presets import write
from truth_rows.score import Prediction, schedule_errors, table


def predicted(row: Row, job: Job | None = None) -> Prediction:
    """The prediction of a row, of `job` in the place of its own if given."""
    job = job or row.job
    if job is None:
        return Prediction(row, None, row.why_not)
    try:
        return Prediction(row, predict(job), "")
    except SpecError as error:
        return Prediction(row, None, f"the simulator: {error}")


def seconds(job: Job) -> float:
    """Predicted seconds of a step, without its memory: what a fit asks for ten thousand times."""
    return float(np.asarray(estimate(job).seconds).item())


def show_missing(console: Console, predictions: list[Prediction]) -> None:
    """Print what was not predicted, by reason."""
    missing = [p for p in predictions if p.step is None]
    for why in dict.fromkeys(p.why_not for p in missing):
        same = [p for p in missing if p.why_not == why]
        groups = ", ".join(dict.fromkeys(p.row.group for p in same))
        console.print(f"{len(same):4d} not told ({groups}): {why}", highlight=False, markup=False)


def show_fit(console: Console, found: list[Row], by: str, keep: bool) -> dict[str, dict[str, float]]:
    """Fit the constants, print them as TOML, and the tables of the fit and of the models left out; `keep` writes them.

    Returns seconds by row id, `fitted_seconds` and `left_out_seconds`.
    """
    fitted_to = [row for row in found if row.seconds and predicted(row).step]
    began = time.perf_counter()
    best = fit(fitted_to, seconds)
    console.print(as_toml(best), highlight=False, markup=False)
    took = time.perf_counter() - began
    console.print(f"fitted to {len(fitted_to)} rows, {len(best.shift)} constants, in {took:.0f} s", highlight=False)
    now = [predicted(row, best.job(row)) for row in fitted_to]
    console.print(table(now, by))
    apart = left_out(fitted_to, best)
    console.print("Leave one model out: each predicted by constants fitted to the other models alone.")
    console.print(table([Prediction(p.row, p.step, "", apart[p.row.id]) for p in now], by))
    if keep:
        write(best, fitted_to, apart)
    return {p.row.id: {"fitted_seconds": p.seconds or 0.0, "left_out_seconds": apart[p.row.id]} for p in now}


def main(arguments: list[str]) -> None:
    """Predict, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, default=TRUTH, help="folder of row files")
    parser.add_argument("--group", action="append", default=[], help="only this group; may be repeated")
    parser.add_argument("--by", default="group", choices=("group", "generation", "family"), help="lines of the table")
    parser.add_argument("--out", type=Path, help="write one line of JSON per row")
    parser.add_argument("--fit", action="store_true", help="fit the constants and print them")
    parser.add_argument("--write", action="store_true", help="with --fit: write the constants into greylag's presets")
    parser.add_argument("--sample", type=int, default=1, help="fit to one row in so many")
    chosen = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 200)
    found = [row for row in rows(chosen.truth) if not chosen.group or row.group in chosen.group]
    if not found:
        raise SystemExit(f"no rows in {chosen.truth} (of {', '.join(chosen.group) or 'any group'})")
    began = time.perf_counter()
    predictions = [predicted(row) for row in found]
    took = time.perf_counter() - began
    console.print(table(predictions, chosen.by))
    if errors := schedule_errors(predictions):
        told = f"{errors.count} of them, {errors.mean:.1%} in the mean, {errors.worst:.1%} at worst"
        console.print(f"Ratios between schedules of one pipeline: {told}", highlight=False)
    show_missing(console, predictions)
    told = sum(p.step is not None for p in predictions)
    console.print(f"{told} predictions in {took:.1f} s, {1e3 * took / max(told, 1):.1f} ms each", highlight=False)
    more = show_fit(console, found[:: chosen.sample], chosen.by, chosen.write) if chosen.fit else {}
    if chosen.out:
        lines = [json.dumps(p.record() | more.get(p.row.id, {})) + "\n" for p in predictions]
        chosen.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
