"""Commands: from a job to a run and its reports."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from greylag.cli.plan import app as plan
from greylag.cli.plan import require

if TYPE_CHECKING:
    from greylag.sim.search import Candidate
    from greylag.spec import Job

app = typer.Typer(
    help="Plan, check, train and land FP8 training runs of large models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.add_typer(plan, name="plan")

JobFile = Annotated[Path, typer.Argument(help="A job file (TOML).", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Overrides: strategy.tp=8 run.steps=100", show_default=False)
]


@app.command()
def show(job_file: JobFile, overrides: Overrides = None) -> None:
    """Print a job: size, FLOPs, bytes, rank grid, precision.

    Parameters (total and active), FLOPs per token, bytes per rank by pool, peers of rank 0 on each axis, and the
    precision of every role.
    """
    from greylag.report.show import print_job
    from greylag.sim import predict_memory

    job = _load_sound(job_file, overrides)
    print_job(job, predict_memory(job))


@app.command()
def simulate(
    job_file: JobFile,
    overrides: Overrides = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Perfetto trace: FILE.json or FILE.json.gz.", show_default=False)
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Places in the pipeline to draw: 0,1,15.  [default: all]", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write an HTML page.", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what lies there.")] = False,
) -> None:
    """Predict step time, utilization and peak memory.

    Time by phase and cause, memory by component on the fullest stage. On a `local` cluster from `greylag calibrate`,
    else from data sheets.
    """
    from greylag.simulation import Outputs
    from greylag.simulation import simulate as simulate_job

    job = _load_sound(job_file, overrides)
    outputs = Outputs(trace, out, ranks, force)
    if not out:
        return simulate_job(job, outputs)
    try:
        from greylag.report.prediction import render_prediction
    except ImportError as error:
        _fail(f"'simulate --out' needs {error.name}: pip install 'greylag[report]'")
    return simulate_job(job, outputs, render_prediction)


@app.command()
def calibrate(
    ranks: Annotated[
        int | None,
        typer.Option(help="Ranks that measure at once.  [default: 2; accelerators: all]", min=1, show_default=False),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Accelerators, and whose data sheet: h100-8x2.", show_default=False)
    ] = None,
    from_trace: Annotated[
        list[Path] | None,
        typer.Option(help="A profiler's trace of a rank; repeat for more.", show_default=False),
    ] = None,
    job: Annotated[Path | None, typer.Option(help="The job that was traced.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="The cluster file to write.", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what lies there.")] = False,
) -> None:
    """Measure this machine, for the `local` cluster; or accelerators, for a cluster file.

    GEMMs by shape, the model's operators, FP8 quantization, collectives by size; under a minute. Of accelerators:
    kernels and collectives, here (under torchrun or srun over nodes) or in torch profiler's traces of a short run.
    """
    from greylag.calibration import Request, calibrate_accelerators

    if cluster is not None:
        request = Request(cluster, out, ranks, tuple(from_trace or ()), job, force)
        require("scipy", "fit")
        if from_trace:
            return calibrate_accelerators(request)
        require("torch", "train")
        from greylag.train.accelerator import measure_accelerators

        return calibrate_accelerators(request, measure_accelerators)
    named = {"--from-trace": from_trace, "--job": job, "--out": out, "--force": force}
    unused = next((option for option, value in named.items() if value), None)
    if unused:
        _fail(f"{unused} has no effect without --cluster: this machine's CPUs have one calibration, in its place")
    require("torch", "train")
    from greylag.train.calibrate import calibrate_local

    return print(calibrate_local(ranks or 2))


@app.command()
def train(
    job_file: JobFile,
    overrides: Overrides = None,
    folder: Annotated[
        Path | None, typer.Option(help="The run folder.  [default: runs/JOB]", show_default=False)
    ] = None,
) -> None:
    """Train a job, or resume it from its run folder.

    Runs under torchrun or srun, or starts local ranks itself. Ctrl-C saves.
    """
    require("torch", "train")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or torch's profiler, which measures memory, chats on stderr
    job = _load_sound(job_file, overrides)
    from greylag.simulation import lay_prediction, peak_of
    from greylag.train.build import refuse
    from greylag.train.launch import INTERRUPTED, find_place, launch, run_folder, run_rank

    refuse(job)
    run = run_folder(folder, job)
    place = find_place(os.environ, job)
    if place is None or (place.rank == 0 and place.launcher != "greylag"):
        run.claim(job)
        unknown = lay_prediction(job, run.path)
        if unknown:
            _say(f"no prediction: {unknown}")
    if place is not None:
        finished = run_rank(job, run, place, peak_of(job))
    else:
        code = launch(["train", *sys.argv[2:]], job.strategy.world, run.lock)
        if code not in (0, INTERRUPTED):
            if code != 2:
                _say(f"a rank ended with code {code}; what it said stands above. Run the same command to resume.")
            raise typer.Exit(code if code > 0 else 1)
        finished = code == 0
        if not finished:
            _say(f"{run.path}: saved; run the same command again to resume")
    if not finished:
        raise typer.Exit(INTERRUPTED)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A launch script, YAML, TOML or config.json.", show_default=False)],
    variables: Annotated[
        list[str] | None, typer.Argument(help="Variables or arguments: NNODES=16 vocab-size=128256", show_default=False)
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Kind and number of devices: h100-8x16.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the job here, not below.", show_default=False)] = None,
) -> None:
    """Turn another framework's configuration into a job.

    Of Megatron-LM, Megatron-Bridge, torchtitan or Hugging Face. Says on stderr what the job cannot express.
    """
    from greylag.interop import import_file
    from greylag.spec import SpecError

    _check_new(out)
    given = [variable.partition("=") for variable in variables or []]
    wrong = next((name + equals for name, equals, _ in given if not name or not equals), None)
    if wrong is not None:
        raise SpecError(f"{wrong!r}: write a variable of the script or an argument as NAME=value")
    imported = import_file(file, cluster, {name: value for name, _, value in given})
    for remark in imported.remarks:
        _say(remark)
    if out is None:
        print(imported.text, end="")
        return
    _write_new(out, imported.text)


@app.command()
def search(
    job_file: JobFile,
    overrides: Overrides = None,
    fix: Annotated[
        list[str] | None, typer.Option(help="Hold an axis: tp=8, or 'zero=[1, 3]' to choose from.", show_default=False)
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="Widen it: tp-across-nodes gpipe uneven few-micro-batches.", show_default=False),
    ] = None,
    precision: Annotated[
        list[str] | None, typer.Option(help="Presets to try.  [default: the job's own]", show_default=False)
    ] = None,
    top: Annotated[int, typer.Option(help="Strategies to print, of different shapes.", min=1)] = 5,
    limit: Annotated[
        int | None, typer.Option(help="Thin the space out to so many.  [default: all]", min=1, show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the winner as a job file.", show_default=False)] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page: PAGE.html.", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a page that lies there.")] = False,
) -> None:
    """Find the fastest strategy that fits, and say why.

    All of tp, pp, cp, ep, etp, dp, vp, micro-batch, ZeRO, recompute, schedule, layers per stage. Exit code 1 if nothing
    fits, with what would.
    """
    from rich.console import Console
    from rich.progress import Progress

    from greylag.report.derived import check_place, write_derived
    from greylag.sim.search import search as find
    from greylag.spec import SpecError
    from greylag.spec.load import load_preset

    _check_new(out)
    if report is not None:
        require("jinja2", "report")
        check_place(report, force, (".html",))
    elif force:
        raise SpecError("--force: no page is written; give --report too")
    job = _load(job_file, overrides)
    recipes = [load_preset("precision", name) for name in precision or []]
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("strategies", total=None)
        found = find(job, fix=fix or (), allow=allow or (), precisions=recipes, top=top, limit=limit,
                     progress=lambda done, total: bar.update(task, completed=done, total=total))  # fmt: skip
    print(found)
    if report is not None:
        from greylag.report.search import render_search

        write_derived(report, render_search(found).encode())
        print(report)
    if not found.best:
        raise typer.Exit(1)
    if out is not None:
        _write_new(out, _job_file(found.best[0]))


def _job_file(winner: "Candidate") -> str:
    from greylag.interop.jobfile import to_toml
    from greylag.sim.search import job_table

    head = f"# Found by greylag search: {winner.job.strategy.brief}, {winner.seconds:.3f} s a step predicted\n"
    return head + to_toml(job_table(winner.job))


def _check_new(out: Path | None) -> None:
    """Refuse to write over a file."""
    from greylag.spec import SpecError

    if out is not None and out.exists():
        raise SpecError(f"{out}: exists already and is left as it is; choose another place")


def _write_new(out: Path, text: str) -> None:
    """Write where nothing lies, and say where."""
    from greylag.spec import SpecError

    try:
        with out.open("x", encoding="utf-8") as new:
            new.write(text)
    except OSError as error:
        raise SpecError(f"{out}: cannot be written ({error.strerror}); choose another place") from None
    print(out)


RunDirectory = Annotated[Path, typer.Argument(help="A run folder.", show_default=False)]


@app.command()
def compare(
    run: RunDirectory,
    fresh: Annotated[bool, typer.Option("--fresh", help="Predict anew, whatever the folder says.")] = False,
) -> None:
    """Lay a run's measured phases beside the predicted ones.

    Names the largest excess by phase and rank, and what would explain it. With the run's own prediction if it has one.
    """
    from greylag.notebook import predict
    from greylag.report.compare import compare_run

    compare_run(run, predict, fresh)


@app.command()
def audit(run: RunDirectory) -> None:
    """Hold what a run really multiplied, kept, stored and sent against its job.

    From the run folder alone. Exit code 1 if anything differs, with the rows that do.
    """
    from greylag.report.audit import compare, read_audits
    from greylag.report.rows import print_audit, verdict

    job, audits = read_audits(run)
    compared = [(one, compare(job, one)) for one in audits]
    print_audit(job, *compared[-1])
    for one, rows in compared[:-1]:
        print(verdict(job, one, rows))
    faults = [(one.step, row) for one, rows in compared for row in rows if row.fault]
    for step, row in faults:
        _say(f"step {step}: {row.where} {row.what}: {row.fault}")
    if faults:
        raise typer.Exit(1)


@app.command()
def advise(
    run: RunDirectory,
    budget: Annotated[float, typer.Option(help="Largest relative error of any operand.", min=0.001, max=1.0)] = 0.03,
    each_layer: Annotated[bool, typer.Option("--each-layer", help="Decide layer by layer, not kind by kind.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the TOML here, not below.", show_default=False)] = None,
) -> None:
    """Propose the cheapest recipe for every layer, from a run's telemetry.

    With reasons, and as TOML for the job file.
    """
    from greylag.report.advise import advise as decide
    from greylag.report.advise import read_telemetry
    from greylag.report.proposal import print_advice, propose

    _check_new(out)
    job, telemetry, unread = read_telemetry(run)
    for finding in unread:
        typer.echo(f"greylag: {finding}", err=True)
    advice = decide(job, telemetry, budget, each_layer)
    text = propose(job, advice)
    print_advice(job, advice, [step.step for step in telemetry], budget)
    if out is None:
        print(f"\n{text}", end="")
        return
    _write_new(out, text)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Where to write.  [default: RUN/report.html]", show_default=False)
    ] = None,
) -> None:
    """Write one offline HTML page about a run."""
    try:
        from greylag.report.run import write_report
    except ImportError as error:
        _fail(f"'report' needs {error.name}: pip install 'greylag[report]'")
    print(write_report(run, out))


def main() -> None:
    """Run the command line; the user's mistakes end in one line on stderr and exit code 2."""
    from greylag.spec.error import SpecError

    try:
        app()
    except SpecError as error:
        _fail(str(error))


def _fail(text: str) -> None:
    names = ("LOCAL_RANK", "RANK", "SLURM_LOCALID", "SLURM_PROCID")
    rank = next((os.environ[name] for name in names if name in os.environ), "0")
    if rank == "0" or not rank.isdecimal() or sys.argv[1:2] != ["train"]:  # ranks share their faults: one a node speaks
        _say(text)
    sys.stdout.flush()
    raise SystemExit(2)


def _say(text: str) -> None:
    print(f"greylag: {text}", file=sys.stderr, flush=True)


def _load(job_file: Path, overrides: list[str] | None) -> "Job":
    from greylag.spec import load_job

    return load_job(job_file, overrides or [])


def _load_sound(job_file: Path, overrides: list[str] | None) -> "Job":
    from greylag.notebook import require_no_problems

    job = _load(job_file, overrides)
    require_no_problems(job)
    return job
