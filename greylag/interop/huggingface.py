"""Hugging Face: a config.json as the `model` table of a job, the nearest one where a Model cannot say all of it.

A job file may name a config.json itself; where that is refused, this is the way to take what comes near, knowingly.
The reading is `spec.huggingface`'s.
"""

from pathlib import Path

from greylag.interop.arguments import Remarks
from greylag.interop.jobfile import Imported, head, to_toml
from greylag.spec.huggingface import read_model


def import_config(path: Path) -> Imported:
    """The `model` table of a config.json."""
    table, departures = read_model(path)
    remarks = Remarks()
    for departure in departures:
        lost = f" ({departure.parameters:,} weights)" if departure.parameters else ""
        remarks.approximate(departure.key, departure.what + lost)
    text = head("Hugging Face, the model table alone", path.name, remarks) + to_toml({"model": table})
    return Imported(text=text, remarks=tuple(remarks.lines()), job=None)
