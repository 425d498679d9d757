"""Hugging Face: a config.json as the `model` table of a job, the nearest one where a Model cannot say all of it.

A job file may name a config.json itself; where that is refused, this is the way to take what comes near, knowingly.
The reading is `spec.huggingface`'s.
"""

from pathlib import Path

from greylag.interop.arguments import Remarks
from greylag.interop.jobfile import Imported, to_toml
from greylag.spec.huggingface import read_model


def import_config(path: Path) -> Imported:
    """The `model` table of a config.json."""
    table, departures = read_model(path)
    remarks = Remarks()
    for departure in departures:
        lost = f" ({departure.parameters:,} weights)" if departure.parameters else ""
        remarks.approximate(departure.key, departure.what + lost)
    head = f"# The model table of a job file, imported by greylag from {path.name} of {table['name']}\n"
    head = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in head)
    notes = "".join(f"# {line}\n" for line in remarks.lines())
    return Imported(text=head + notes + to_toml({"model": table}), remarks=tuple(remarks.lines()), job=None)
