"""Show: a job and its prediction as tables on the terminal."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from greylag.report.quantity import count, flops_per_second, memory, percent, seconds
from greylag.spec import Job, Step, num_active_parameters, num_parameters
from greylag.spec.grid import AXES, Grid, tier
from greylag.spec.precision import role_table
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


def print_prediction(job: Job, step: Step, console: Console | None = None) -> None:
    """Print a predicted step: time by phase, throughput, utilization, memory by pool."""
    console = console or Console()
    console.print(f"[bold]{escape(job.name)}[/]: predicted step")
    table = Table()
    table.add_column("phase")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for phase, value in step.seconds.items():
        if value:
            table.add_row(phase, seconds(value), percent(value / step.total_seconds))
    table.add_section()
    table.add_row("step", seconds(step.total_seconds), "")
    console.print(table)
    facts = _table("quantity", "value")
    facts.add_row("tokens per second", count(step.tokens_per_second))
    facts.add_row("model FLOP/s", flops_per_second(step.flops_per_second))
    facts.add_row("utilization (MFU)", percent(step.utilization))
    facts.add_row("sent by a rank per step", memory(step.wire_bytes))
    console.print(facts)
    console.print(_bytes(job, step.bytes))


def _table(*columns: str) -> Table:
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _model(job: Job) -> Table:
    table = _table("model", "value")
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
    table = _table("bytes per rank", "peak")
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
