"""Questions: what `greylag plan precision` and `greylag plan goodput` are asked, and their answers on the terminal.

It stands beside `cli`, like `planning`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from msgspec.structs import replace

from greylag.plan.campaign import simulate
from greylag.plan.failures import Failures, count_restarts, load_failures
from greylag.plan.failures import fit as fit_failures
from greylag.plan.goodput import calendar, enough_spares, over_sizes
from greylag.plan.law import answer, asked_precision, law_named, optimum
from greylag.plan.law_fit import fit
from greylag.plan.law_runs import LawName, of_runs, read_csv
from greylag.plan.recovery import POLICIES, Fleet, Policy, Recovery
from greylag.planning import Practice, Progress
from greylag.report.goodput import print_goodput, print_scale
from greylag.report.law import print_fit, print_law_answer, print_optimum
from greylag.report.record import STEPS, read_lines, read_record
from greylag.spec.error import SpecError
from greylag.spec.quantity import HOUR, MINUTE
from greylag.spec.step import Step

SCALE = (1000, 3000, 10000, 30000, 100000)
"""Devices over which a goodput is told."""


class Asked(NamedTuple):
    """A question to a law of precision."""

    law: str
    params: float | None
    tokens: float | None
    weights: float | None
    activations: float | None
    kv: float | None
    format: str | None
    block: str | None
    budget: float | None
    fit: Path | None
    folders: tuple[Path, ...]


def precision_of(asked: Asked) -> None:
    """Print what a law answers. Raises SpecError for a question that it cannot answer."""
    block = _block(asked.block)
    law, precision = asked_precision(
        law_named(asked.law), asked.weights, asked.activations, asked.kv, asked.format, block
    )
    if asked.fit or asked.folders:
        if asked.fit and asked.folders:
            raise SpecError("--fit and --fit-runs: give one of them")
        name: LawName = "kumar" if law.name == "kumar" else "sun"
        records = [read_record(folder) for folder in asked.folders]
        own = ((str(folder), r.job, r.steps) for folder, r in zip(asked.folders, records, strict=True))
        runs = read_csv(asked.fit, name) if asked.fit else of_runs(own, name)
        fitted, told = fit(runs), None
        if asked.params is not None and asked.tokens is not None:
            _, precision = asked_precision(fitted.law, asked.weights, asked.activations, asked.kv, asked.format, block)
            told = fitted.predict(asked.params, asked.tokens, precision)
        print_fit(fitted, told)
        return
    if asked.budget is not None:
        print_optimum(optimum(law, asked.budget, asked.params, asked.tokens))
        return
    if asked.params is None or asked.tokens is None:
        raise SpecError("--params and --tokens, or --budget, are missing: say what is trained, or what it may cost")
    print_law_answer(answer(law, asked.params, asked.tokens, precision))


def _block(text: str | None) -> float | Literal["channel"] | None:
    if text is None:
        return None
    if text == "channel":
        return "channel"
    try:
        return float(text)
    except ValueError:
        raise SpecError(f"--block {text}: give how many numbers share a scale (128), or channel") from None


NO_EFFECT = {
    "restart": ("--eject-minutes", "--spares", "--repair-hours", "--replica-nodes"),
    "spares": ("--eject-minutes", "--replica-nodes"),
    "skip": ("--replica-nodes",),
}
"""Options that a policy alone has no use for."""


class Running(NamedTuple):
    """A run that meets failures, as the command line says it."""

    devices: int
    per_node: int
    failures: str
    folders: tuple[Path, ...]
    """Runs whose own failures count, where there are any."""
    days: float
    checkpoint_minutes: str
    checkpoint_seconds: float
    detect_minutes: float
    restart_minutes: float
    eject_minutes: float
    spares: int | None
    repair_hours: float
    replica_nodes: int
    policy: str
    trials: int
    scale: bool
    price: float | None

    @property
    def recovery(self) -> Recovery:
        """Its times in seconds. Raises SpecError for an interval that is no number."""
        try:
            minutes = 10.0 if self.checkpoint_minutes == "best" else float(self.checkpoint_minutes)
        except ValueError:
            raise SpecError(f"--checkpoint-minutes {self.checkpoint_minutes}: give minutes, or best") from None
        return Recovery(
            detect=self.detect_minutes * MINUTE,
            restart=self.restart_minutes * MINUTE,
            eject=self.eject_minutes * MINUTE,
            interval=minutes * MINUTE,
            save=self.checkpoint_seconds,
        )

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Those asked for. Raises SpecError if there is no such policy."""
        found = [policy for policy in POLICIES if self.policy in (policy, "all")]
        if not found:
            raise SpecError(f"--policy {self.policy}: is none of {', '.join(POLICIES)}, all; choose one")
        return tuple(found)


def goodput_of(run: Running, progress: Progress = lambda _: None) -> Callable[[], None]:
    """What failures make of a run; calling the result prints it. Raises SpecError where the run cannot be."""
    failures = own_failures(run.folders, run.per_node) if run.folders else load_failures(run.failures)
    recovery, policies = run.recovery, run.policies
    fleet = Fleet(
        num_devices=run.devices,
        devices_per_node=run.per_node,
        repair=run.repair_hours * HOUR,
        replica_nodes=run.replica_nodes,
    )
    if run.scale:
        sizes = [n - n % run.per_node for n in SCALE if n >= run.per_node]
        found = over_sizes(failures, fleet, recovery, policies, sizes)
        if not found:
            raise SpecError(f"--scale: {', '.join(policies)} cannot be followed at any size; lower --replica-nodes")
        return lambda: print_scale(failures.name, found)
    spares = enough_spares(failures, fleet, recovery) if run.spares is None else run.spares
    practice = Practice(failures, replace(fleet, spares=spares), recovery, run.checkpoint_minutes == "best")
    results = practice.by_policy(policies)
    calendars = [calendar(result, run.days, run.price) for result in results]
    campaigns = []
    for result in results if run.trials else ():
        progress(f"simulating {run.trials:,} runs: {result.policy}")
        own = replace(recovery, interval=result.checkpoint_interval)
        rng = np.random.default_rng(0)
        campaigns.append(simulate(failures, practice.fleet, own, result.policy, run.days, rng, run.trials, True))
    lost = [policy for policy in policies if policy not in {result.policy for result in results}]

    def show() -> None:
        print_goodput(failures.name, results, calendars, campaigns)
        for policy in lost:
            print(f"{policy}: a replica of {fleet.replica_nodes:,} nodes is all of the job; it cannot be followed.")

    return show


def own_failures(folders: Sequence[Path], per_node: int) -> Failures:
    """Rates of runs of one's own, by their findings and restarts. Raises SpecError where a folder is none of a run."""
    records = [read_record(folder) for folder in folders]
    hours = sum(sum(s.total_seconds for s in r.steps) * r.job.strategy.world for r in records) / HOUR
    written = [read_lines(folder / STEPS, Step)[0] for folder in folders]
    restarts = sum(count_restarts(steps) for steps in written)
    return fit_failures([r.findings for r in records], hours, restarts, per_node, f"{len(folders)} runs of your own")
