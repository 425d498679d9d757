"""Plan: the page that goes to a budget meeting. What a training takes, what that rests on, and how sure it is.

One HTML file without scripts, that prints. It is handed what `plan` and `sim` answer, by protocol, and imports neither;
sums over them are `budget`'s, pictures `plan_picture`'s, formulas and sources `plan_basis`'. The wording is here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from greylag import __version__
from greylag.report.account import Account
from greylag.report.assumption import Constant, assumptions, limits
from greylag.report.budget import (
    Amount,
    Budget,
    Told,
    add_up,
    at,
    counted,
    elapsed,
    interval,
    lost_hours,
    megawatt_hours,
    share,
    told,
)
from greylag.report.demand import Demanded, flops, power, sized
from greylag.report.goodput import WORTH_A_ROW, Dated, Kept
from greylag.report.law import Answered, Best, Curved, figure, how_far
from greylag.report.page import template
from greylag.report.picture import colours, stages
from greylag.report.plan_basis import grounds, sentence
from greylag.report.plan_picture import bits_picture, kinds, lost_picture
from greylag.spec.job import Job
from greylag.spec.quantity import NONE, count, digits, memory, percent, seconds
from greylag.spec.step import Step

LARGEST = 6
"""Components of memory that are told one by one."""
NO_FAILURES = "no rates of failure were given"
MEANT = {
    "restart": "the whole job restarts from its last checkpoint",
    "spares": "the same, and spare nodes that stand by take the place of those that failed",
    "eject": "the replica with the failed node drops out, the others go on from the same step",
    "skip": "only that node's part of its replica drops out",
}
"""What each policy does at a failure."""


class Tile(NamedTuple):
    """A headline figure."""

    title: str
    value: str
    interval: str
    note: str


@dataclass(frozen=True)
class Size:
    """The training on one cluster."""

    name: str
    devices: str
    utilization: Told
    days: Told
    bar: tuple[float, float, float]
    """Where the interval begins, how long it is, and where the days are: per cent of the longest."""
    hours: Told
    energy: Told | None
    money: Told | None


@dataclass(frozen=True)
class Judged:
    """What one law of precision says, and what that does not hold for."""

    answer: Answered
    optimum: Best
    limits: list[str]
    penalty: str
    rows: list[tuple[str, str]]


def render_plan(
    *,
    job: Job,
    demand: Demanded,
    step: Step,
    held: Account,
    strategy: str,
    runners_up: Sequence[tuple[str, float]],
    answers: Sequence[Answered],
    optima: Sequence[Best],
    curves: Sequence[Curved],
    failures: str,
    goodputs: Sequence[Kept],
    calendars: Sequence[Dated],
    remarks: Sequence[str] = (),
) -> str:
    """The page as HTML.

    The first of the demand's clusters is the job's own, the others are what else it could be trained on. `step` and
    `held` are the predicted step and bytes of `strategy` (words), `runners_up` other strategies and by how many
    seconds a step they are longer. `answers` and `optima` are of the same laws in the same order, `goodputs` and
    `calendars` of the same policies; `failures` says whose rates those are. `remarks` are what the caller knows beyond
    that.
    """
    budget = add_up(demand, goodputs, calendars)
    return template("plan.html.j2").render(
        job=job,
        lead=_lead(job, demand, budget),
        facts=_facts(job, demand),
        tiles=_tiles(demand, budget),
        demand=demand,
        flops=flops(demand.training.flops),
        sizes=_sizes(demand),
        demand_notes=_demand_notes(demand),
        strategy=strategy,
        step_rows=_step_rows(step, demand),
        step_notes=[sentence(remark) for remark in step.remarks],
        others=_others(runners_up, step, budget),
        held=held,
        components=_components(held),
        bytes_picture=stages(held),
        legend=colours(held),
        laws=[_judged(*pair) for pair in zip(answers, optima, strict=True)],
        curves=[(curve, bits_picture(curve), power(curve.product), count(curve.tokens)) for curve in curves],
        failures=failures,
        mttf=_mttf(goodputs),
        policies=[kept.policy for kept in goodputs],
        chosen=budget.policy,
        policy_rows=_policy_rows(goodputs, calendars, budget),
        lost_picture=lost_picture(goodputs) if kinds(goodputs) else "",
        kinds=kinds(goodputs),
        failure_notes=_failure_notes(goodputs, demand),
        grounds=grounds(job, demand, step, held, budget, answers, optima, failures, goodputs),
        limits=[*map(sentence, remarks), *limits(job, step)],
        groups=[group._replace(constants=[_plain(c) for c in group.constants]) for group in assumptions(job)],
        version=__version__,
    )


def _plain(constant: Constant) -> Constant:
    """A switch as people say it."""
    return constant._replace(value={"True": "yes", "False": "no"}.get(constant.value, constant.value))


def _lead(job: Job, demand: Demanded, budget: Budget) -> str:
    """The answer in a sentence or two."""
    days, training = told(budget.days), demand.training
    spares = f" and {count(budget.spares)} spare ones" if budget.spares else ""
    with_failures = f"failures met by {budget.policy} included" if budget.policy else f"without failures: {NO_FAILURES}"
    tokens = f" on {count(training.tokens)} tokens" if training.tokens else ""
    said = (
        f"Training {training.name}{tokens} takes {days.line} days on {count(budget.devices)} devices{spares}, "
        f"{with_failures}. It uses {counted(budget.hours).line} device-hours"
    )
    said += f", {told(budget.energy, megawatt_hours).line}" if budget.energy else ""
    return said + (f" and costs {counted(budget.money).line}." if budget.money else ".")


def _facts(job: Job, demand: Demanded) -> list[tuple[str, str]]:
    cluster = job.cluster
    return [
        ("Model", f"{demand.training.name}: {sized(demand.training)}"),
        ("Cluster", f"{cluster.name}: {cluster.num_nodes:,} × {cluster.devices_per_node} × {cluster.device.name}"),
        ("Precision", job.precision.name),
        ("Framework", job.software.name),
        ("Batch", f"{job.global_batch:,} × {job.sequence:,} = {job.tokens:,} tokens a step"),
    ]


def _tiles(demand: Demanded, budget: Budget) -> list[Tile]:
    """Eight figures; one that nobody can give says what is missing for it."""
    training, policy = demand.training, f"policy: {budget.policy}" if budget.policy else NO_FAILURES
    days, computing = told(budget.days if budget.policy else None), told(budget.computing)
    hours, used, kept = (
        counted(budget.hours),
        told(at(demand.utilization), percent),
        told(budget.effective, share),
    )
    drawn, cost = told(budget.energy, megawatt_hours), counted(budget.money)
    alone = {
        "hours": f"computing alone: {counted(at(demand.device_hours)).value}",
        "energy": f"computing alone: {told(at(demand.energy), megawatt_hours).value}" if demand.energy else "",
        "money": f"computing alone: {counted(at(demand.money)).value}" if demand.money else "",
    }
    fixed = "" if training.flops.low is not None else training.flops.basis
    known = interval((training.flops.low, training.flops.high), power)
    return [
        Tile("Training compute", f"{power(training.flops.value)} FLOPs", known, fixed),
        Tile("Days, failures included", _unit(days, "days"), days.interval, policy),
        Tile("Days, if nothing failed", _unit(computing, "days"), computing.interval, _why(demand.days.low)),
        Tile("Device-hours paid for", hours.value, hours.interval, alone["hours"]),
        Tile("Energy", drawn.value, drawn.interval, alone["energy"] or "the power of a device was not given"),
        Tile("Cost", cost.value, cost.interval, alone["money"] or "no price of a device-hour was given"),
        Tile("Utilization", used.value, used.interval, f"of the dense {demand.dtype.upper()} peak"),
        Tile("Effective time", kept.value, kept.interval, policy),
    ]


def _unit(words: Told, unit: str) -> str:
    return words.value if words.value == NONE else f"{words.value} {unit}"


def _why(low: object) -> str:
    return "computing alone" if low is not None else "computing alone; no interval, see section 6"


def _sizes(demand: Demanded) -> list[Size]:
    """All clusters. Their bars share one scale."""
    days = [at(demand.days, number) for number in range(len(demand.labels))]
    longest = max(amount.high or amount.value for amount in days)
    sizes = []
    for number, (label, amount) in enumerate(zip(demand.labels, days, strict=True)):
        low, high = amount.low or amount.value, amount.high or amount.value
        sizes.append(
            Size(
                name=label,
                devices=f"{float(demand.devices[number]):,.0f}",
                utilization=told(at(demand.utilization, number), percent),
                days=told(amount),
                bar=(_percentage(low, longest), _percentage(high - low, longest), _percentage(amount.value, longest)),
                hours=counted(at(demand.device_hours, number)),
                energy=told(at(demand.energy, number), megawatt_hours) if demand.energy else None,
                money=counted(at(demand.money, number)) if demand.money else None,
            )
        )
    return sizes


def _percentage(part: float, whole: float) -> float:
    return round(100 * part / whole, 2)


def _demand_notes(demand: Demanded) -> list[str]:
    peaks = " or ".join(f"{peak:,g}" for peak in sorted({float(peak) / 1e12 for peak in demand.peak}))
    held = "Intervals" if demand.days.low is not None else "No intervals"
    return [
        f"FLOPs: {demand.training.how}.",
        f"Days are of computing: what failures add is in section 5. Utilization is of the dense "
        f"{demand.dtype.upper()} peak, {peaks} TFLOP/s a device.",
        f"{held}: {demand.days.basis}.",
    ]


def _step_rows(step: Step, demand: Demanded) -> list[tuple[str, Told]]:
    """What a step takes and gives; rates have the interval of its time."""
    time = Told(seconds(step.total_seconds), interval(step.interval, seconds) if step.interval else "")
    low, high = (step.tokens / step.interval[1], step.tokens / step.interval[0]) if step.interval else (None, None)
    speed = counted(Amount(step.tokens_per_second, low, high, ""))
    steps = demand.training.tokens / step.tokens if demand.training.tokens else None
    rows = [
        ("Step time", time),
        ("Tokens per second, whole job", speed),
        (f"Utilization, of the {demand.dtype.upper()} peak", told(at(demand.utilization), percent)),
    ]
    return [*rows, ("Steps of the training", Told(f"{steps:,.0f}", ""))] if steps else rows


def _others(runners_up: Sequence[tuple[str, float]], step: Step, budget: Budget) -> list[tuple[str, str, str, str]]:
    """(strategy, step time, longer by, days of computing more)."""
    return [
        (
            words,
            seconds(step.total_seconds + more),
            f"{seconds(more) if more else '0'} ({percent(more / step.total_seconds)})",
            digits(budget.computing.value * more / step.total_seconds),
        )
        for words, more in runners_up
    ]


def _components(held: Account) -> list[tuple[str, str, float]]:
    """The largest, and all others in one row: (what, bytes, share of what is needed)."""
    sizes = sorted((held.fullest.components | held.beside).items(), key=lambda item: -item[1])
    rest = sum(size for _, size in sizes[LARGEST:])
    shown = [*sizes[:LARGEST], *([(f"{len(sizes) - LARGEST} others", rest)] if rest else [])]
    return [(name, memory(size), size / held.needed) for name, size in shown]


def _judged(answer: Answered, optimum: Best) -> Judged:
    best, chosen = optimum.best, optimum.choices[0] if optimum.choices else None
    free = f"{optimum.held} held" if optimum.held else "parameters and tokens free"
    rows = [
        (f"Loss in the job's precision ({answer.precision})", f"{answer.loss:.4f}"),
        ("of it, what precision costs", f"{answer.loss - answer.high_loss:+.4f}"),
        (f"Best for {power(optimum.budget)} FLOPs, {free}", best.name),
        ("its parameters, tokens", f"{count(best.parameters)}, {count(best.tokens)}"),
        ("its loss", f"{best.loss:.4f}"),
    ]
    if chosen:
        rows.append(("nearest that can be chosen", f"{chosen.name}, {chosen.loss - best.loss:+.4f}"))
    if answer.critical_tokens is not None:
        beyond = ": the job is beyond" if answer.tokens > answer.critical_tokens else ""
        rows.append(("tokens beyond which more hurt", count(answer.critical_tokens) + beyond))
    leaving = (("Extrapolates", answer.outside), ("The best extrapolates", best.outside))
    said = [f"{words}: {o.what} {figure(o.value)}, {how_far(o)}." for words, some in leaving for o in some]
    said += [sentence(remark) for remark in optimum.remarks]
    return Judged(answer, optimum, said, f"{answer.loss - answer.high_loss:+.4f}", rows)


def _mttf(goodputs: Sequence[Kept]) -> str:
    """How often the job fails, in words; empty where nobody knows."""
    if not goodputs:
        return ""
    failing = told(Amount(goodputs[0].mttf, *goodputs[0].mttf_interval, ""), seconds)
    return f"A failure every {failing.line}"


def _policy_rows(goodputs: Sequence[Kept], calendars: Sequence[Dated], budget: Budget) -> list[tuple[str, list[Told]]]:
    """A row for each figure, with a cell for each policy."""
    pairs = list(zip(goodputs, calendars, strict=True))
    rows = [("Effective time", [Told(share(k.goodput), interval(k.interval, share)) for k in goodputs])]
    rows.append(("Days", [told(elapsed(budget.computing, dated)) for dated in calendars]))
    lost = [lost_hours(budget.computing, *pair) for pair in pairs]
    rows.append(("Device-hours lost", [counted(amount) for amount in lost]))
    if any(dated.spare_device_hours for dated in calendars):
        rows.append(
            (
                "of them, spares that stood by",
                [counted(Amount(d.spare_device_hours, None, None, "")) for d in calendars],
            )
        )
    if any(dated.money is not None for dated in calendars):
        prices = [
            (d.money or 0.0) / amount.value if amount.value else 0.0 for d, amount in zip(calendars, lost, strict=True)
        ]
        rows.append(("Cost of lost hours", [counted(a.times(p)) for a, p in zip(lost, prices, strict=True)]))
    rows.append(("Checkpoint every", [Told(seconds(kept.checkpoint_interval), "") for kept in goodputs]))
    for name in kinds(goodputs):
        shares = [kept.losses.get(name, 0.0) for kept in goodputs]
        rows.append((f"lost to {name}", [Told(percent(s) if s > WORTH_A_ROW else NONE, "") for s in shares]))
    return rows


def _failure_notes(goodputs: Sequence[Kept], demand: Demanded) -> list[str]:
    said = ["Effective time: nine in ten, from the count of failures that the rates rest on."] if goodputs else []
    if demand.days.low is not None and goodputs:
        said.append("Days and device-hours also carry the interval of computing (section 1), which is alike in all.")
    meant = "; ".join(f"{kept.policy}: {MEANT[kept.policy]}" for kept in goodputs if kept.policy in MEANT)
    said = [f"At a failure, {meant}.", *said] if meant else said
    return said + [sentence(remark) for remark in dict.fromkeys(r for kept in goodputs for r in kept.remarks)]
