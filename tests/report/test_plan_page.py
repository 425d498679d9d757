"""The page of a plan: whole, offline, without scripts, with an interval or a reason beside every answer."""

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from greylag.plan.demand import Demand, count_training, demand, predicted_utilization, stated_utilization
from greylag.plan.failures import Failures, load_failures
from greylag.plan.goodput import calendar, enough_spares, goodput
from greylag.plan.law import answer, asked_precision, fixed_compute, law_named, optimum
from greylag.plan.recovery import POLICIES, Fleet, Recovery
from greylag.report.account import account
from greylag.report.budget import Amount, add_up, counted, interval, share, told
from greylag.report.plan import render_plan
from greylag.sim import predict
from greylag.sim.memory import CONTEXT, FRAGMENTATION, memory
from greylag.spec import Job, load_job
from greylag.spec.quantity import digits, percent

JOB = Path(__file__).parents[2] / "jobs" / "llama-3-8b_h100_pretrain.toml"
TOKENS, PRICE, WATTS, PUE = 15e12, 2.5, 1275.0, 1.2
VOID = {"meta", "link", "br", "img", "hr", "input"}


def job_of(*overrides: str, nodes: int = 16) -> Job:
    job = load_job(JOB, [f"cluster=h100-8x{nodes}", "software=megatron-core-2025", *overrides])
    assert not job.problems()
    return job


def demand_of(job: Job, nodes: Sequence[int] = (16, 32, 64), **given: Any) -> Demand:
    """On the job's own cluster and on larger ones, each with its predicted utilization."""
    jobs = [job if 8 * n == job.strategy.world else job_of(nodes=n) for n in nodes]
    steps = [predict(one) for one in jobs]
    used = [step.utilization for step in steps]
    low, high = ([s.flops / (s.peak_flops * s.interval[end]) for s in steps] for end in (1, 0))
    return demand(
        count_training(job.model, job.sequence, TOKENS),
        [8 * number for number in nodes],
        [step.peak_flops / (8 * number) for step, number in zip(steps, nodes, strict=True)],
        predicted_utilization(used, low, high, "nine in ten predicted steps, " + "; ".join(steps[0].remarks)),
        dtype="fp8",
        labels=[f"h100-8x{number}" for number in nodes],
        **given,
    )


def plan_of(job: Job, needed: Demand, failures: Failures | None) -> dict[str, Any]:
    """All that a page is made of."""
    step = predict(job)
    laws = [
        asked_precision(law_named("kumar"), weights=8, activations=8, kv=8),
        asked_precision(law_named("sun"), format="e4m3"),
    ]
    answers = [answer(law, 8.03e9, TOKENS, precision) for law, precision in laws]
    results, price = [], PRICE if needed.money else None
    if failures:
        fleet = Fleet(num_devices=128, replica_nodes=1)
        fleet = replace(fleet, spares=enough_spares(failures, fleet, Recovery()))
        results = [goodput(failures, fleet, Recovery(), policy) for policy in POLICIES]
    return {
        "job": job,
        "demand": needed,
        "step": step,
        "held": account(job, step.bytes, memory(job).stages, FRAGMENTATION, CONTEXT),
        "strategy": "tp 2, dp 64, ZeRO-3, micro-batch 1",
        "runners_up": [("tp 1, dp 128, ZeRO-3", 0.21), ("tp 4, dp 32, ZeRO-1, recompute full", 0.6)],
        "answers": answers,
        "optima": [optimum(law, a.cost) for (law, _), a in zip(laws, answers, strict=True)],
        "curves": [fixed_compute(law) for law, _ in laws],
        "failures": failures.name if failures else "",
        "goodputs": results,
        "calendars": [calendar(r, float(needed.days.value[0]), price) for r in results],
    }


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    job = job_of()
    return plan_of(job, demand_of(job, price=PRICE, watts=WATTS, pue=PUE), load_failures("llama-3"))


class Balance(HTMLParser):
    """Refuses a tag that is closed by another."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()


def whole(html: str) -> str:
    """What a reader sees of a page, once it is sound."""
    balance = Balance()
    balance.feed(html)
    assert not balance.open
    assert not re.search(r"<(script|link|iframe|img|object|base|details)\b|@import|url\(|src=|href=", html)
    assert "default-src 'none'" in html
    for svg in re.findall(r"<svg.*?</svg>", html, re.S):
        root = ElementTree.fromstring(svg)
        wide, tall = (float(x) for x in root.attrib["viewBox"].split()[2:])
        for node in root.iter("{http://www.w3.org/2000/svg}text"):
            assert 0 <= float(node.attrib["x"]) <= wide
            assert 0 <= float(node.attrib["y"]) <= tall
    body = re.sub(r"<title>.*?</title>", "", html[html.index("<body>") :])
    text = " ".join(re.sub(r"<[^>]+>", " ", body).split())
    assert not re.search(r"\b(None|nan|NaN|inf|Infinity|True|False)\b|\{\{|\[\]|Undefined", text), text
    return text


def test_the_page_is_whole_small_and_asks_nothing_of_the_network(plan: dict[str, Any]) -> None:
    html = render_plan(**plan, remarks=("the data is 15 T tokens in one pass",))
    text = whole(html)
    titles = [
        "1 Demand",
        "2 Strategy and step",
        "3 Memory",
        "4 Precision",
        "5 Failures",
        "6 What these numbers rest on",
    ]
    assert re.findall(r"<h2>(\d .*?)</h2>", html) == titles
    assert "The data is 15 T tokens in one pass." in text
    assert len(html) < 2e5


def test_headline_figures_and_their_intervals(plan: dict[str, Any]) -> None:
    text = whole(render_plan(**plan))
    needed, kept, dated = plan["demand"], plan["goodputs"][1], plan["calendars"][1]
    assert kept.policy == "spares"
    days = needed.days
    low = float(days.low[0]) / kept.interval[1]
    hours = dated.days * 24 * kept.held
    high = float(days.high[0]) / kept.interval[0]
    seconds, soonest, latest = (f"{s:.2f}" for s in (plan["step"].total_seconds, *plan["step"].interval))
    for said in (
        f"Training compute {needed.training.flops.value:.2e}".replace("e+", "e"),
        f"Days, failures included {digits(dated.days)} days {digits(low)}–{digits(high)} policy: spares",
        f"Days, if nothing failed {digits(days.value[0])} days {digits(days.low[0])}–{digits(days.high[0])}",
        f"Device-hours paid for {float(f'{hours:.3g}'):,.0f} {float(f'{low * 24 * kept.held:.3g}'):,.0f}–",
        f"computing alone: {float(f'{needed.device_hours.value[0]:.3g}'):,.0f}",
        f"Effective time {share(kept.goodput)} {interval(kept.interval, share)}",
        f"Utilization {percent(needed.utilization.value[0])} ",
        "MWh",
        f"Step time {seconds} s {soonest}–{latest} s",
    ):
        assert said in text, said


def test_the_budget_pays_for_failures_and_spares(plan: dict[str, Any]) -> None:
    needed, kept, dated = plan["demand"], plan["goodputs"][1], plan["calendars"][1]
    budget = add_up(needed, plan["goodputs"], plan["calendars"])
    assert budget.spares == kept.held - 128 > 0
    assert budget.hours.value == pytest.approx(dated.days * 24 * kept.held)
    assert budget.money is not None
    assert budget.money.value == pytest.approx(float(needed.money.value[0]) + dated.money)
    assert budget.energy is not None
    assert budget.energy.value == pytest.approx(budget.hours.value * WATTS / 1000 * PUE)
    for amount in (budget.days, budget.hours, budget.money, budget.energy, budget.effective):
        assert amount is not None
        assert amount.low is not None
        assert amount.high is not None
        assert amount.low < amount.value < amount.high
        assert amount.basis


def test_a_calendar_of_another_job_is_refused(plan: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="another job"):
        add_up(plan["demand"], plan["goodputs"], [replace(d, days=2 * d.days) for d in plan["calendars"]])


def test_every_section_says_what_it_knows(plan: dict[str, Any]) -> None:
    text = whole(render_plan(**plan))
    for label in plan["demand"].labels:
        assert label in text
    best = plan["step"].total_seconds
    assert f"tp 1, dp 128, ZeRO-3 {best + 0.21:.2f} s 210 ms ({percent(0.21 / best)})" in text
    assert re.search(r"Fits: [\d.]+ GiB needed of 80.0 GiB", text)
    for a, o in zip(plan["answers"], plan["optima"], strict=True):
        assert f"{a.loss:.4f}" in text
        assert o.best.name in text
        assert a.source in text
    assert "Extrapolates: tokens 15.0 T, 577 times above 26.0 B, the most fitted." in text
    for kept in plan["goodputs"]:
        assert f"{share(kept.goodput)} {interval(kept.interval, share)}" in text
        assert all(f"{r[:1].upper()}{r[1:]}." in text for r in kept.remarks)
    assert "by the rates of llama-3" in text
    assert "FGCS 22 (2006) 303" in text
    assert "NVIDIA H100 SXM data sheet" in text


def test_text_from_outside_is_escaped(plan: dict[str, Any]) -> None:
    bad = "<script>alert(1)</script>"
    curves = [c._replace(source=bad) for c in plan["curves"]]
    html = render_plan(**plan | {"strategy": bad, "failures": bad, "runners_up": [(bad, 0.1)], "curves": curves})
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 5


def test_without_price_and_watts_the_page_says_so(plan: dict[str, Any]) -> None:
    job = plan["job"]
    text = whole(render_plan(**plan_of(job, demand_of(job), load_failures("llama-3"))))
    assert "Energy – the power of a device was not given" in text
    assert "Cost – no price of a device-hour was given" in text
    assert "Cost of lost hours" not in text
    assert "kW" not in text.split("6 What these numbers rest on")[1].split("Constants of the prediction")[0]


def test_what_does_not_fit_is_said_first(plan: dict[str, Any]) -> None:
    job = job_of("strategy.micro_batch=8", "strategy.recompute=none", "strategy.zero=1")
    text = whole(render_plan(**plan_of(job, demand_of(job, (16,)), load_failures("llama-3"))))
    assert text.index("This strategy does not fit: a device lacks") < text.index("Training compute")
    assert "Does not fit:" in text


def test_without_intervals_failures_laws_or_rivals_the_page_says_why(plan: dict[str, Any]) -> None:
    job = plan["job"]
    step = replace(plan["step"], interval=None, remarks=())
    needed = demand(
        count_training(job.model, job.sequence, TOKENS), [128], 1979e12, stated_utilization(0.2), dtype="fp8"
    )
    none: dict[str, Any] = dict.fromkeys(("answers", "optima", "curves", "runners_up", "goodputs", "calendars"), ())
    bare = plan | none | {"step": step, "demand": needed, "failures": ""}
    text = whole(render_plan(**bare))
    for said in (
        "Days, failures included – no rates of failure were given",
        "No intervals: FLOPs are an exact count for these dimensions and tokens; utilization is stated as one number.",
        "No interval: nothing is known of how far this prediction may be off.",
        "No other strategy was compared.",
        "No law of precision was asked.",
        "failures will add to them",
        "without failures: no rates of failure were given",
    ):
        assert said in text, said
    assert "Effective time –" in text
    with_failures = plan_of(job, needed, load_failures("llama-3"))
    assert "The count of failures alone, nine in ten." in whole(render_plan(**with_failures))


def test_rates_of_nothing_counted_leave_the_upper_end_open(plan: dict[str, Any]) -> None:
    job = plan["job"]
    quiet = Failures(name="quiet", node_days=1000.0)
    text = whole(render_plan(**plan_of(job, plan["demand"], quiet)))
    assert re.search(r"A failure every \d+ h or more, by the rates of quiet", text)
    assert "No failure is counted in the 1,000 node-days of quiet." in text


def test_amounts_in_words() -> None:
    endless = float("inf")
    assert told(None) == ("–", "")
    assert told(Amount(2.0, None, None, "")) == ("2.00", "")
    assert told(Amount(2.0, 1.0, endless, "")) == ("2.00", "1.00 or more")
    assert told(Amount(endless, 1.0, endless, "")) == ("1.00 or more", "")
    assert told(Amount(endless, None, None, "")) == ("–", "")
    assert counted(Amount(677_739.0, 447_474.0, 1.03e6, "")) == ("678,000", "447,000–1,030,000")
    assert counted(Amount(5378.0, 3530.0, 8195.0, "")) == ("5,380", "3,530–8,200")
    assert counted(Amount(0.0, None, None, "")) == ("0", "")
    assert counted(None) == ("–", "")
