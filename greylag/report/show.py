"""Show: a job and its prediction as tables on the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from greylag.report.account import Account
from greylag.spec import Finding, Job, Step, num_active_parameters, num_parameters
from greylag.spec.grid import AXES, Grid, tier
from greylag.spec.precision import role_table
from greylag.spec.quantity import count, flops_per_second, memory, percent, seconds
from greylag.spec.work import flops_per_token

_SHOWN_RANKS = 16


def print_job(job: Job, pools: dict[str, float], console: Console | None = None) -> None:
    """Print what a job is. `pools` are the bytes of a rank by pool."""
    console = console or Console()
    console.print(
        f"[bold]{escape(job.name)}[/]  " + escape(f"{job.model.name} in {job.precision.name} on {job.cluster.name}")
    )
    console.print(_model(job))
    console.print(_bytes(job, pools))
    console.print(_grid(job))
    console.print(_precision(job))


def print_prediction(
    job: Job, step: Step, held: Account, findings: Sequence[Finding] = (), console: Console | None = None
) -> None:
    """Print a predicted step: time by phase and by cause, throughput, memory of the fullest stage by component.

    `findings` say what to change where the job does not fit.
    """
    console = console or Console()
    console.print(f"[bold]{escape(job.name)}[/]: predicted step")
    side_by_side = Table.grid(padding=(0, 2))
    tables = [_shares("phase", step.seconds, step.total_seconds, "step")]
    if step.causes:
        tables.append(_shares("spent on", step.causes, step.total_seconds))
    side_by_side.add_row(*tables)
    console.print(side_by_side)
    if step.causes and job.strategy.pp > 1:
        console.print("Phases and causes are those of a rank of the busiest stage.", style="dim")
    if between(step):
        console.print(f"{between(step)[:1].upper()}{between(step)[1:]}.", highlight=False)
    for remark in step.remarks:
        console.print(
            f"It {remark}." if remark.startswith(("rests", "extrapolates")) else f"But {remark}.", markup=False
        )
    facts = table_of("quantity", "value")
    facts.add_row("tokens per second", count(step.tokens_per_second))
    facts.add_row("model FLOP/s", flops_per_second(step.flops_per_second))
    facts.add_row("utilization (MFU)", percent(step.utilization))
    facts.add_row("sent by a rank per step", memory(step.wire_bytes))
    console.print(facts)
    _print_account(held, console)
    if held.excess > 0 and not findings:
        console.print(f"To blame: {blame(held)}.", markup=False, highlight=False)
    for finding in findings:
        console.print(str(finding), markup=False, highlight=False)


def _shares(what: str, parts: dict[str, float], total: float, last: str = "") -> Table:
    """Seconds by part, and their share of the step."""
    table = table_of(what, "time", "share")
    for part, value in parts.items():
        if value:
            table.add_row(part, seconds(value), percent(value / total if total else None))
    if last:
        table.add_section()
        table.add_row(last, seconds(total), "")
    return table


def _print_account(held: Account, console: Console) -> None:
    """The fullest stage's bytes by component, what the device needs beside them, and whether it fits."""
    full = held.fullest
    name = f"a rank of {full.name}" if full.name.startswith("stage") else full.name
    table = table_of(f"bytes of {name}", "peak")
    for name, size in full.largest.items():
        table.add_row(name, memory(size))
    table.add_section()
    table.add_row("allocated", memory(full.total))
    for name, size in held.beside.items():
        table.add_row(name, memory(size))
    table.add_row("the device has", memory(held.device))
    table.add_section()
    if held.excess > 0:
        table.add_row("[red]does not fit[/]", f"[red]{memory(held.excess)} too much[/]")
    else:
        table.add_row("fits", f"{memory(-held.excess)} free")
    console.print(table)
    if full.moment:
        console.print(f"The peak comes at: {escape(full.moment)}.", highlight=False)


def between(step: Step) -> str:
    """Where nine in ten measured steps would lie; empty where nothing is known of it."""
    return (
        f"nine in ten runs lie between {seconds(step.interval[0])} and {seconds(step.interval[1])}"
        if step.interval
        else ""
    )


def blame(held: Account, most: int = 3) -> str:
    """The largest components of the fullest stage, with their sizes and shares."""
    full = held.fullest
    largest = list(full.components.items())[:most]
    return ", ".join(f"{name} {memory(size)} ({percent(size / full.total)})" for name, size in largest)


def table_of(*columns: str) -> Table:
    """An empty table, whose first column is words and the rest figures."""
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _model(job: Job) -> Table:
    table = table_of("model", "value")
    total, active = num_parameters(job.model), num_active_parameters(job.model)
    table.add_row("parameters", f"{total:,}")
    if active != total:
        table.add_row("active per token", f"{active:,}")
    table.add_row("model FLOPs per token, forward + backward", count(flops_per_token(job.model, job.sequence)))
    table.add_row("tokens per step", f"{job.tokens:,}")
    table.add_row("micro-batches per rank and step", f"{job.num_micro_batches:,}")
    if job.strategy.recompute != "none":
        table.add_row("recomputed in backward", "the forward of every layer")
    if job.validation_sequences:
        table.add_row(f"validation sequences, every {job.run.validate_every:,} steps", f"{job.validation_sequences:,}")
    return table


def _bytes(job: Job, pools: dict[str, float]) -> Table:
    table = table_of("bytes per rank", "peak")
    for pool, size in pools.items():
        table.add_row(pool, memory(size))
    table.add_section()
    total, limit = sum(pools.values()), job.cluster.device.memory
    table.add_row("all", memory(total))
    table.add_row("the device has", memory(limit))
    if total > limit:
        table.add_row("[red]does not fit[/]", f"[red]{memory(total - limit)} too much[/]")
    return table


def _grid(job: Job) -> Table:
    grid = Grid.of(job.strategy)
    table = Table()
    table.add_column(f"{grid.world:,} ranks, axis")
    table.add_column("degree", justify="right")
    table.add_column("peers of rank 0")
    table.add_column("over")
    for axis, degree in (*zip(AXES, grid.sizes, strict=True), ("ep", grid.ep)):
        peers = grid.peers(0, axis)
        shown = ", ".join(map(str, peers[:_SHOWN_RANKS])) + (", …" if len(peers) > _SHOWN_RANKS else "")
        table.add_row(axis, f"{degree:,}", shown, tier(peers, job.cluster.devices_per_node))
    return table


def _precision(job: Job) -> Table:
    table = Table()
    table.add_column(f"precision {escape(job.precision.name)}")
    table.add_column("representation")
    for role, representation in role_table(job.precision):
        table.add_row(role, representation)
    return table
