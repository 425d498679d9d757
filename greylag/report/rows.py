"""Rows: what an audit compared, put together for the reader: layers that agree in one row, tables, a verdict."""

import re

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from greylag.report.audit import Row
from greylag.spec.audit import Audit
from greylag.spec.job import Job


def together(rows: list[Row]) -> list[Row]:
    """Rows that say the same of several layers as one: `layers.0-3,5.attention.wo`."""
    alike: dict[Row, list[int]] = {}
    for row in rows:
        match = re.fullmatch(r"layers\.(\d+)\.(.*)", row.where)
        key, numbers = (row._replace(where=match[2]), [int(match[1])]) if match else (row, [])
        alike.setdefault(key, []).extend(numbers)
    return [
        row._replace(where=f"layers.{layer_ranges(numbers)}.{row.where}") if numbers else row
        for row, numbers in alike.items()
    ]


def layer_ranges(numbers: list[int]) -> str:
    """Numbers as `0-3,5`."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def print_audit(job: Job, audit: Audit, rows: list[Row], console: Console | None = None) -> None:
    """Print the rows of one audited step, section by section, and the verdict."""
    console = console or Console()
    console.print(f"[bold]{escape(job.name)}[/]  step {audit.step} on {audit.device}, torch {escape(audit.torch)}")
    for section in ("gemms", "caches", "messages", "state"):
        table = Table()
        kernel = ["kernel"] if section == "gemms" else []
        for column in (section, "", "expected", "used", *kernel, "ok?"):
            table.add_column(escape(column), overflow="fold")
        for row in together([r for r in rows if r.section == section]):
            ok = f"[red]{escape(row.fault)}[/]" if row.fault else "yes"
            cells = (row.where, row.what, row.expected, row.used, *([row.kernel] if kernel else []))
            table.add_row(*map(escape, cells), ok)
        console.print(table)
    console.print(verdict(job, audit, rows), markup=False, highlight=False)


def verdict(job: Job, audit: Audit, rows: list[Row]) -> str:
    """One sentence."""
    num_gemms = sum(r.section == "gemms" for r in rows)
    faults = sum(bool(r.fault) for r in rows)
    if not faults:
        return (
            f"Step {audit.step} did what {job.precision.name!r} says: {num_gemms} GEMMs, "
            f"{len(rows) - num_gemms} caches, messages and states agree."
        )
    return f"Step {audit.step} departed from {job.precision.name!r} in {faults} of {len(rows)} rows."
