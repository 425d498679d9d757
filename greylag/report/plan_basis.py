"""Plan's basis: every figure of the page of a plan with its formula and its source, in one table.

Formulas are those of `plan`, `sim` and `spec.work`, told in words; sources are what the answers carry themselves
(`basis`, `source`) and what the presets' comments name (`assumption`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from greylag.report.account import Account
from greylag.report.assumption import assumptions
from greylag.report.budget import Amount, Budget, at, counted, megawatt_hours, share, told
from greylag.report.demand import Demanded, flops
from greylag.report.goodput import Kept
from greylag.report.law import Answered, Best
from greylag.spec.job import Job
from greylag.spec.quantity import count, digits, memory, percent, seconds
from greylag.spec.step import Step

ASKED = "whoever asked for this plan."


class Ground(NamedTuple):
    """What one figure rests on."""

    what: str
    value: str
    formula: str
    source: str


def sentence(words: str) -> str:
    """With a capital and a full stop."""
    return f"{words[:1].upper()}{words[1:]}{'' if words.endswith('.') else '.'}"


def grounds(
    job: Job,
    demand: Demanded,
    step: Step,
    held: Account,
    budget: Budget,
    answers: Sequence[Answered],
    optima: Sequence[Best],
    failures: str,
    goodputs: Sequence[Kept],
) -> list[Ground]:
    """All of them, in the order of the page."""
    return [
        *_computing(job, demand),
        *_paid(demand, budget),
        *_predicted(job, step, held),
        *_lawful(answers, optima),
        *_failing(budget, failures, goodputs),
    ]


def _computing(job: Job, demand: Demanded) -> Iterator[Ground]:
    training, used, days = demand.training, at(demand.utilization), at(demand.days)
    yield Ground("Training compute", f"{flops(training.flops)} FLOPs", training.how, sentence(training.flops.basis))
    nodes = f"{job.cluster.num_nodes:,} nodes × {job.cluster.devices_per_node}"
    yield Ground("Devices", count(float(demand.devices[0])), nodes, f"Cluster {job.cluster.name}.")
    known = any(group.title == job.cluster.device.name for group in assumptions(job))
    peak = f"{float(demand.peak[0]) / 1e12:,.5g} TFLOP/s"
    yield Ground(
        f"Peak of a device, dense {demand.dtype.upper()}",
        peak,
        "a fact of the device",
        "With the constants, below." if known else sentence(ASKED),
    )
    formula = "model FLOPs of a step / (step time × devices × peak)"
    yield Ground("Utilization", told(used, percent).line, formula, sentence(used.basis))
    formula = "training compute / (devices × peak × utilization) / 86,400 s"
    yield Ground("Days, if nothing failed", told(days).line, formula, sentence(days.basis))


def _paid(demand: Demanded, budget: Budget) -> Iterator[Ground]:
    hours, basis = at(demand.device_hours), "Its interval is that of the days."
    if budget.policy:
        yield Ground(
            "Days, failures included",
            told(budget.days).line,
            "days of computing / effective time",
            sentence(budget.days.basis),
        )
    spares = f" + {count(budget.spares)} spare ones" if budget.spares else ""
    formula = f"days × 24 × ({count(budget.devices)} devices{spares})"
    yield Ground("Device-hours paid for", counted(budget.hours).line, formula, basis)
    if budget.energy and demand.energy:
        drawn = f"{digits(at(demand.energy).value / hours.value)} kW"
        formula = f"device-hours × {drawn}, in lost and spare hours too"
        yield Ground(
            "Energy",
            told(budget.energy, megawatt_hours).line,
            formula,
            f"Power with its server and site: {ASKED} {basis}",
        )
    if budget.money and demand.money:
        formula = f"device-hours × {digits(at(demand.money).value / hours.value)}, the price of one"
        yield Ground("Cost", counted(budget.money).line, formula, f"Price: {ASKED} {basis}")


def _predicted(job: Job, step: Step, held: Account) -> Iterator[Ground]:
    low, high = step.interval or (None, None)
    time = Amount(step.total_seconds, low, high, "")
    formula = "simulated: every matrix multiply, message and wait of the busiest stage"
    source = " ".join(map(sentence, step.remarks)) or f"Constants of {job.cluster.name} and {job.software.name}, below."
    yield Ground("Step time", told(time, seconds).line, formula, source)
    beside = [f"{percent(held.reserve)} fragmentation"] if held.reserve else []
    beside += [f"{memory(held.outside)} for driver and communication"] if held.outside else []
    formula = " + ".join(["bytes of all weights, states and activations by shape and cut", *beside])
    source = (
        f"Counted (spec.parts, sim.memory); no interval. The device's {memory(held.device)}: its data sheet, below."
    )
    yield Ground("Memory needed", memory(held.needed), formula, source)


def _lawful(answers: Sequence[Answered], optima: Sequence[Best]) -> Iterator[Ground]:
    none = "No interval: one set of constants; its reach is in section 4."
    for answer, optimum in zip(answers, optima, strict=True):
        asked = f"the law at {count(answer.parameters)} parameters, {count(answer.tokens)} tokens, {answer.precision}"
        yield Ground("Loss", f"{answer.loss:.4f}", asked, f"{answer.source}. {none}")
        formula = "least loss of the law at cost 6/16 × parameters × tokens × bits"
        yield Ground("Best precision", optimum.best.name, formula, f"{optimum.source}. {none}")


def _failing(budget: Budget, failures: str, goodputs: Sequence[Kept]) -> Iterator[Ground]:
    if not budget.effective:
        return
    kept = next(kept for kept in goodputs if kept.policy == budget.policy)
    mttf = Amount(kept.mttf, *kept.mttf_interval, "")
    formula = "node-days × devices of a node / (counted failures × devices)"
    yield Ground("Time between failures", told(mttf, seconds).line, formula, sentence(f"failures as {failures}"))
    formula = "training that is kept / elapsed time, failures Poisson: plan.goodput, after Daly, FGCS 22 (2006) 303"
    yield Ground("Effective time", told(budget.effective, share).line, formula, sentence(budget.effective.basis))
