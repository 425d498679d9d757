"""Plan: commands before there is a cluster: `greylag plan demand`, `precision`, `goodput`, and a job's page."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from greylag.plan.demand import Demand, Training
    from greylag.spec import Job


class JobFirst(TyperGroup):
    """`greylag plan JOB` is `greylag plan job JOB`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Take what is no command for a job file."""
        if args and args[0] not in self.commands:
            args = ["job", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    help="Plan a run: compute and days, precision, failures; or all of it for a JOB, as one page.",
    cls=JobFirst,
    no_args_is_help=True,
    rich_markup_mode=None,
)

Tokens = Annotated[
    float | None, typer.Option(help="Tokens of the training: 14.8e12.", min=1e3, max=1e18, show_default=False)
]
Price = Annotated[float | None, typer.Option(help="Of a device-hour, in any currency.", show_default=False)]
Watts = Annotated[float | None, typer.Option(help="Of a device with its share of the server.", show_default=False)]
Pue = Annotated[float | None, typer.Option(help="What the site draws over that: 1.2.", show_default=False)]
RATES = "Rates: llama-3, meta-rsc-1, meta-rsc-2, megascale, byterobust, or a TOML file."
FailureNames = Annotated[str, typer.Option(help=RATES)]


@app.command("job")
def plan_job(
    job_file: Annotated[Path, typer.Argument(help="A job file (TOML).", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides: global_batch=4096", show_default=False)
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the page: FILE.html.", show_default=False)] = None,
    tokens: Tokens = None,
    failures: FailureNames = "llama-3",
    price: Price = None,
    watts: Watts = None,
    pue: Pue = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what lies there.")] = False,
) -> None:
    """Demand, strategy, precision and goodput of a job, for a budget meeting."""
    from greylag.plan.failures import load_failures
    from greylag.planning import plan_of
    from greylag.report.demand import print_demand
    from greylag.report.derived import check_place, write_derived
    from greylag.report.goodput import print_goodput
    from greylag.report.law import print_law_answer
    from greylag.spec import SpecError, load_job

    if report:
        check_place(report, force, (".html",))
        require("jinja2", "report")
    if tokens is None:
        raise SpecError("--tokens is missing: say how many the training takes, such as 14.8e12")
    job, rates = load_job(job_file, overrides or []), load_failures(failures)
    with Status() as say:
        plan = plan_of(job, tokens, rates, watts=watts, pue=pue, price=price, progress=say)
    print_demand(plan.demand)
    print(f"Strategy: {plan.flown.job.strategy.brief}, {plan.flown.step.total_seconds:.3f} s a step predicted")
    for answer in plan.answers:
        print_law_answer(answer)
    print_goodput(failures, plan.goodputs, plan.dated)
    for remark in plan.remarks:
        print(remark)
    if report:
        from greylag.report.plan import render_plan

        page = render_plan(
            job=plan.flown.job, demand=plan.demand, step=plan.flown.step, held=plan.held,
            strategy=plan.flown.job.strategy.brief, runners_up=plan.flown.runners_up, answers=plan.answers,
            optima=plan.optima, curves=plan.curves, goodputs=plan.goodputs,
            failures=f"{rates.name} ({rates.source})" if rates.source else rates.name,
            calendars=plan.calendars, remarks=plan.remarks,
        )  # fmt: skip
        write_derived(report, page.encode())
        print(report)


@app.command()
def demand(
    job_file: Annotated[Path | None, typer.Argument(help="A job file (TOML).", show_default=False)] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides: global_batch=4096", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option(help="A known model: deepseek-v3.", show_default=False)] = None,
    params: Annotated[
        float | None, typer.Option(help="Parameters: 671e9.", min=1e3, max=1e16, show_default=False)
    ] = None,
    active: Annotated[
        float | None, typer.Option(help="That a token meets.  [default: all]", show_default=False)
    ] = None,
    tokens: Tokens = None,
    devices: Annotated[
        list[int] | None, typer.Option(help="Cluster sizes.  [default: 1024 ...]", min=1, max=10**7, show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Whose data sheet, without a job.  [default: h100]", show_default=False)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Whose peak, without a job.  [default: bf16]", show_default=False)
    ] = None,
    utilization: Annotated[
        float | None, typer.Option(help="Share of the peak.  [default: predicted, of a job]", show_default=False)
    ] = None,
    price: Price = None,
    watts: Watts = None,
    pue: Pue = None,
    known: Annotated[bool, typer.Option("--known", help="List the known models, and their trend.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --known: write the trend as a page.", show_default=False)
    ] = None,
) -> None:
    """Training compute, and days, device-hours, energy and money by cluster size.

    Of a JOB's model and tokens, of a known model, or of parameters and tokens. A job's utilization is predicted for
    each size, by a search of the strategy.
    """
    from greylag.report.demand import print_demand

    given = {
        "JOB": job_file, "--model": model, "--params": params, "--active": active, "--tokens": tokens,
        "--devices": devices, "--device": device, "--dtype": dtype, "--utilization": utilization, "--price": price,
        "--watts": watts, "--pue": pue,
    }  # fmt: skip
    if known:
        _unused("--known", given)
        return _known(out)
    _unused("the days of one training; it is the trend of the known models (--known)", {"--out": out})
    job = _load(job_file, overrides)
    if job:
        _unused("a job, which has its own", {"--device": device, "--dtype": dtype})
    training = _training(job, model, params, active, tokens)
    sizes = list(dict.fromkeys(devices or [1024, 5000, 10000]))
    cost = {"watts": watts, "pue": pue, "price": price}
    return print_demand(_days(job, training, sizes, device or "h100", dtype or "bf16", utilization, cost))


def _days(
    job: "Job | None", training: "Training", sizes: list[int], device: str, dtype: str, utilization: float | None,
    cost: dict[str, float | None],
) -> "Demand":  # fmt: skip
    """Days at the stated utilization, or at the one that is predicted of a job."""
    from greylag.planning import days_by_size, dtype_of, stated_days
    from greylag.spec import SpecError

    if utilization is not None and job:
        return stated_days(training, sizes, job.cluster.device, dtype_of(job), utilization, **cost)
    if utilization is not None:
        return stated_days(training, sizes, device, dtype, utilization, **cost)
    if not job:
        raise SpecError("--utilization is missing: state it (0.4), or give a job file, whose utilization is predicted")
    with Status() as say:
        return days_by_size(job, training, sizes, progress=say, **cost)


def _load(job_file: Path | None, overrides: list[str] | None) -> "Job | None":
    from greylag.spec import load_job

    return load_job(job_file, overrides or []) if job_file else None


def _unused(beside: str, given: Mapping[str, object]) -> None:
    """Refuse what has no effect beside something."""
    from greylag.spec import SpecError

    used = [name for name, value in given.items() if value is not None and value != []]
    if used:
        raise SpecError(
            f"{' and '.join(used)}: no effect beside {beside}; leave {'it' if len(used) == 1 else 'them'} out"
        )


def _training(
    job: "Job | None", model: str | None, params: float | None, active: float | None, tokens: float | None
) -> "Training":
    """What is trained, of the one of three ways that is given."""
    from greylag.plan.demand import approximate_training, count_training
    from greylag.plan.known import find_model, known_models, training
    from greylag.spec import SpecError

    ways = {"JOB": job, "--model": model, "--params": params}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        raise SpecError(f"{' and '.join(given) or 'nothing'} says what is trained; give one of JOB, --model, --params")
    if active is not None and params is None:
        raise SpecError("--active: has no effect without --params")
    if model is not None:
        if tokens is not None:
            raise SpecError("--tokens: a known model has its own; leave it out, or give --params")
        return training(find_model(model, known_models()))
    if tokens is None:
        raise SpecError("--tokens is missing: say how many the training takes, such as 14.8e12")
    if job is not None:
        return count_training(job.model, job.sequence, tokens)
    return approximate_training(params or 0.0, tokens, active)


def _known(out: Path | None) -> None:
    from greylag.plan.known import known_models
    from greylag.plan.trend import fit_trend
    from greylag.report.demand import print_known

    models = known_models()
    trend = fit_trend(models)
    if out:
        require("plotly", "report")
        from greylag.report.derived import check_place, write_derived
        from greylag.report.trend import render_trend

        check_place(out, False, (".html",))
        write_derived(out, render_trend(models, trend).encode())
    print_known(models, trend)
    if out:
        print(out)


@app.command()
def precision(
    law: Annotated[str, typer.Option(help="kumar (bits by operand) or sun (format and block).")] = "kumar",
    params: Annotated[
        float | None, typer.Option(help="Parameters: 8e9.", min=1e3, max=1e16, show_default=False)
    ] = None,
    tokens: Tokens = None,
    weights: Annotated[float | None, typer.Option(help="Bits, kumar.  [default: 16]", show_default=False)] = None,
    activations: Annotated[float | None, typer.Option(help="Bits, kumar.  [default: 16]", show_default=False)] = None,
    kv: Annotated[float | None, typer.Option(help="Bits, kumar.  [default: 16]", show_default=False)] = None,
    format: Annotated[str | None, typer.Option(help="e4m3 ..., sun.  [default: bf16]", show_default=False)] = None,
    block: Annotated[str | None, typer.Option(help="128 or channel, sun.  [default: 128]", show_default=False)] = None,
    budget: Annotated[
        float | None, typer.Option(help="FLOPs to spend best: 1e24.", min=1e12, max=1e36, show_default=False)
    ] = None,
    fit: Annotated[Path | None, typer.Option(help="Fit the law to a CSV of runs.", show_default=False)] = None,
    fit_runs: Annotated[
        list[Path] | None, typer.Option(help="Fit it to a run folder; repeat for more.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write both published laws at fixed compute.", show_default=False)
    ] = None,
) -> None:
    """Loss by a scaling law of precision, the best precision for a budget, or the law fitted to your own runs."""
    from greylag.questions import Asked, precision_of

    if out:
        from greylag.report.derived import check_place

        check_place(out, False, (".html",))
        require("plotly", "report")
    bits = {"--weights": weights, "--activations": activations, "--kv": kv, "--format": format}
    if budget is not None:
        _unused("--budget, which chooses", bits)
    if fit or fit_runs:
        _unused("a fit", {"--budget": budget, "--out": out})
        if params is None or tokens is None:
            _unused(
                "a fit without both --params and --tokens",
                {"--params": params, "--tokens": tokens, **bits, "--block": block},
            )
    asked = Asked(law, params, tokens, weights, activations, kv, format, block, budget, fit, tuple(fit_runs or ()))
    if fit or fit_runs:
        require("scipy", "fit")
    precision_of(asked)
    if out:
        from greylag.plan.law import fixed_compute, law_named
        from greylag.report.derived import write_derived
        from greylag.report.law_chart import render_fixed_compute

        page = render_fixed_compute([fixed_compute(law_named(name)) for name in ("kumar", "sun")])
        write_derived(out, page.encode())
        print(out)


def require(package: str, extra: str) -> None:
    """Refuse where an optional package is not installed."""
    import importlib.util

    from greylag.spec import SpecError

    if importlib.util.find_spec(package) is None:
        raise SpecError(f"this command needs {package}: pip install 'greylag[{extra}]'")


@app.command()
def goodput(
    devices: Annotated[
        int | None, typer.Option(help="That train.  [default: 16384]", min=1, max=10**7, show_default=False)
    ] = None,
    per_node: Annotated[int, typer.Option(help="Devices of a node.", min=1, max=1024)] = 8,
    failures: Annotated[
        str | None,
        typer.Option(help=f"{RATES}  [default: llama-3]", show_default=False),
    ] = None,
    failures_from: Annotated[
        list[Path] | None, typer.Option(help="Rates of your own: a run folder; repeat for more.", show_default=False)
    ] = None,
    days: Annotated[
        float | None, typer.Option(help="If nothing failed.  [default: 54]", min=0.01, max=1e5, show_default=False)
    ] = None,
    checkpoint_minutes: Annotated[str, typer.Option(help="Between checkpoints, or best.")] = "10",
    checkpoint_seconds: Annotated[float, typer.Option(help="That one blocks training.", min=0, max=1e5)] = 5.0,
    detect_minutes: Annotated[float, typer.Option(help="From a failure to the restart.", min=0, max=1e5)] = 2.0,
    restart_minutes: Annotated[float, typer.Option(help="From that to the next step.", min=0, max=1e5)] = 8.0,
    eject_minutes: Annotated[
        float | None, typer.Option(help="Until the others go on.  [default: 3]", min=0, max=1e5, show_default=False)
    ] = None,
    spares: Annotated[
        int | None, typer.Option(help="Nodes.  [default: enough]", min=0, max=10**6, show_default=False)
    ] = None,
    repair_hours: Annotated[
        float | None, typer.Option(help="Until a node is back.  [default: 24]", min=0, max=1e5, show_default=False)
    ] = None,
    replica_nodes: Annotated[
        int | None, typer.Option(help="That `eject` loses.  [default: 16]", min=1, max=10**6, show_default=False)
    ] = None,
    policy: Annotated[str, typer.Option(help="restart, spares, eject, skip, or all.")] = "all",
    trials: Annotated[
        int | None, typer.Option(help="Simulated runs beside the formulas.", min=2, max=10**5, show_default=False)
    ] = None,
    scale: Annotated[bool, typer.Option("--scale", help="From 1,000 to 100,000 devices.")] = False,
    price: Price = None,
) -> None:
    """Effective training time under failures, by policy; days and cost of a run, or how it scales."""
    from greylag.questions import NO_EFFECT, Running, goodput_of

    optional = {
        "--eject-minutes": eject_minutes, "--spares": spares, "--repair-hours": repair_hours,
        "--replica-nodes": replica_nodes,
    }  # fmt: skip
    _unused(f"--policy {policy}", {name: optional[name] for name in NO_EFFECT.get(policy, ())})
    if scale:
        best = checkpoint_minutes if checkpoint_minutes == "best" else None
        alone = {"--devices": devices, "--days": days, "--spares": spares, "--trials": trials, "--price": price}
        _unused("--scale", {**alone, "--checkpoint-minutes best": best})
    _unused("--failures-from", {"--failures": failures if failures_from else None})
    run = Running(
        devices or 16384, per_node, failures or "llama-3", tuple(failures_from or ()), 54.0 if days is None else days,
        checkpoint_minutes, checkpoint_seconds, detect_minutes, restart_minutes,
        3.0 if eject_minutes is None else eject_minutes, spares, 24.0 if repair_hours is None else repair_hours,
        replica_nodes or 16, policy, trials or 0, scale, price,
    )  # fmt: skip
    with Status() as say:
        show = goodput_of(run, say)
    show()


class Status:
    """A line on a terminal's stderr that says what is going on, and is gone when it is done."""

    def __enter__(self) -> "Status":
        from rich.console import Console

        console = Console(stderr=True)
        self._status = console.status("planning") if console.is_terminal else None
        if self._status:
            self._status.start()
        return self

    def __call__(self, what: str) -> None:
        """Say it."""
        if self._status:
            self._status.update(what)

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()
