"""The command line, and the only file that knows every wing: composition happens here.

Each command imports its wing inside, so that `greylag --help` answers at once. A SpecError becomes one line and
exit code 2.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from greylag.spec import Job, Step

app = typer.Typer(
    help="Plan, check, train and land FP8 training runs of large models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

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

    job = _load(job_file, overrides)
    _require_no_problems(job)
    print_job(job, predict_memory(job))


@app.command()
def simulate(job_file: JobFile, overrides: Overrides = None) -> None:
    """Predict step time, utilization and peak memory.

    Time by phase, memory by pool. On a `local` cluster from `greylag calibrate`, else from data sheets.
    """
    from greylag.report.show import print_prediction

    job = _load(job_file, overrides)
    _require_no_problems(job)
    print_prediction(job, _predict(job))


@app.command()
def calibrate(
    ranks: Annotated[int, typer.Option(help="Ranks that measure at once, as the job will run.", min=1)] = 2,
) -> None:
    """Measure this machine, for the `local` cluster.

    GEMMs by shape, the model's operators, FP8 quantization, collectives by size; under a minute.
    """
    _require_torch()
    from greylag.train.calibrate import calibrate_local

    print(calibrate_local(ranks))


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
    _require_torch()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or torch's profiler, which measures memory, chats on stderr
    job = _load(job_file, overrides)
    _require_no_problems(job)
    from greylag.train.build import refuse
    from greylag.train.launch import INTERRUPTED, find_place, launch, run_folder, run_rank

    refuse(job)
    run = run_folder(folder, job)
    place = find_place(os.environ, job)
    peak = _peak_flops(job)
    if place is not None:
        if place.rank == 0 and place.launcher != "greylag":
            run.claim(job)
            _write_prediction(job, run.path)
        finished = run_rank(job, run, place, peak)
    else:
        run.claim(job)
        _write_prediction(job, run.path)
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


RunDirectory = Annotated[Path, typer.Argument(help="A run folder.", show_default=False)]


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
    from greylag.spec import SpecError

    if out is not None and out.exists():
        raise SpecError(f"{out}: exists already and is left as it is; choose another place")
    job, telemetry, unread = read_telemetry(run)
    for finding in unread:
        typer.echo(f"greylag: {finding}", err=True)
    advice = decide(job, telemetry, budget, each_layer)
    text = propose(job, advice)
    print_advice(job, advice, [step.step for step in telemetry], budget)
    if out is None:
        print(f"\n{text}", end="")
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{out}: cannot be written ({error.strerror}); choose another place") from None
    print(out)


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


def _require_no_problems(job: "Job") -> None:
    from greylag.spec import SpecError

    problems = job.problems()
    if problems:
        raise SpecError(f"{job.name}: " + "\n".join(map(str, problems)))


def _require_torch() -> None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        _fail("this command needs torch: pip install 'greylag[train]'")


def _predict(job: "Job") -> "Step":
    from greylag.sim import predict
    from greylag.spec.calibration import load_local

    return predict(job, load_local() if job.cluster.is_local else None)


def _write_prediction(job: "Job", folder: Path) -> None:
    """Lay the prediction beside the run, where one can be made."""
    import msgspec

    from greylag.spec import SpecError
    from greylag.train.folder import write_whole

    try:
        step = _predict(job)
    except SpecError as error:
        _say(f"no prediction: {error}")
        return
    write_whole(folder / "predicted.json", msgspec.json.encode(step))


def _peak_flops(job: "Job") -> float:
    from greylag.sim import peak_flops
    from greylag.spec import SpecError
    from greylag.spec.calibration import load_local

    try:
        return peak_flops(job, load_local() if job.cluster.is_local else None)
    except SpecError:
        return 0.0
