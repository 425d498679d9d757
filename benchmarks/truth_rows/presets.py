"""Presets: write what a fit found into the package's own TOML, with what it rests on.

A device's `[device.efficiency]` and a generation's numbers and `[[evidence]]` are replaced; all else of a file stays.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import greylag
from greylag.spec.cluster import Efficiency
from truth_rows.fit import SOFTWARE, Fit
from truth_rows.row import Row

PRESETS = Path(greylag.__file__).parent / "presets"
NOTE = "# Fitted to the rows of benchmarks/truth by `python benchmarks/accuracy.py --fit --write`."
RUNS = "# Runs of benchmarks/truth, against predictions made without their model."
FEW = 6
"""Rows below which a kind's spread is that of all kinds of its generation, or of all rows."""
LEAST = 0.03
"""The least spread that is told: two runs of one setting differ by about this."""


def write(found: Fit, rows: Iterable[Row], apart: dict[str, float]) -> None:
    """Write the constants, and the spread of the predictions `apart` (by row id, without the row's own model)."""
    rows = list(rows)
    for device in dict.fromkeys(name for name, constant in found.shift if constant not in SOFTWARE):
        _device(PRESETS / "clusters" / f"{device}.toml", found, device)
    overall = _spread(rows, apart)
    for generation in dict.fromkeys(row.generation for row in rows):
        mine = [row for row in rows if row.generation == generation]
        spread = _spread(mine, apart) if len(mine) >= FEW else overall
        _software(PRESETS / "software" / f"{generation}.toml", found, generation, _evidence(mine, apart, spread))


def _spread(rows: list[Row], apart: dict[str, float]) -> float:
    """The 90th percentile of how far measured and predicted lie apart, as a share of the smaller."""
    errors = [abs(np.log(apart[row.id] / (row.seconds or 1.0))) for row in rows]
    return max(LEAST, float(np.expm1(np.quantile(errors, 0.9))))


def _evidence(rows: list[Row], apart: dict[str, float], otherwise: float) -> list[str]:
    """`[[evidence]]` tables, one for each device, kind of model and dtype."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        assert row.job
        kind = "experts" if row.job.model.moe else "dense"
        groups.setdefault((row.job.cluster.device.name, kind, row.job.precision.gemm_dtype), []).append(row)
    lines = []
    for (device, kind, dtype), mine in sorted(groups.items()):
        spread = _spread(mine, apart) if len(mine) >= FEW else otherwise
        ranks = max(row.job.strategy.world for row in mine if row.job)
        lines += ["", RUNS, "[[evidence]]", f'device = "{device}"', f'kind = "{kind}"', f'dtype = "{dtype}"']
        lines += [f"rows = {len(mine)}", f"ranks = {ranks}", f"spread = {spread:.3f}"]
    return lines


def _device(path: Path, found: Fit, device: str) -> None:
    text = path.read_text(encoding="utf-8")
    comment = re.search(r"((?:#[^\n]*\n)*)\[device\.efficiency\]\n(?:[a-z_0-9]+ = [^\n]*\n)+\n?", text)
    kept = ""
    if comment:
        kept = "".join(line + "\n" for line in comment[1].splitlines() if line != NOTE)
        text = text.replace(comment[0], "")
    table = "\n".join(found.lines(device, Efficiency.__struct_fields__))
    new = f"{kept}{NOTE}\n[device.efficiency]\n{table}\n"
    head, device_table, rest = re.split(r"(\[device\]\n(?:[a-z_0-9]+ = [^\n]*\n)+)", text, maxsplit=1)
    path.write_text(f"{head}{device_table}\n{new}\n{rest.lstrip()}", encoding="utf-8")


def _software(path: Path, found: Fit, generation: str, evidence: list[str]) -> None:
    lines = path.read_text(encoding="utf-8").split(RUNS)[0].rstrip().splitlines()
    kept = [line for line in lines if line != NOTE and not line.startswith(tuple(f"{n} =" for n in SOFTWARE))]
    while kept and not kept[-1]:
        kept.pop()
    path.write_text("\n".join([*kept, NOTE, *found.lines(generation, SOFTWARE), *evidence]) + "\n", encoding="utf-8")
