"""Rows: every published run of a folder as a Job and the figures to compare its prediction with.

    python benchmarks/rows.py [FOLDER]      # how many rows of each group can be expressed, and why the others cannot

The folder holds JSON files of rows and `models.json`; the file's `dataset` says which dialect of `truth_rows` reads
it.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from greylag.spec.error import SpecError
from truth_rows import bridge, dgxc, fsdp, functional, layer, papers, reports, simumax, zero_bubble
from truth_rows.row import Dialect, Memory, Raw, Row, UntoldError, family

__all__ = ["TRUTH", "Memory", "Row", "rows"]

TRUTH = Path(__file__).parent / "truth"
DIALECTS: dict[str, Dialect] = {
    "simumax_b200": simumax.dialect("simumax_b200"),
    "simumax_a100": simumax.dialect("simumax_a100"),
    "nvidia_megatron_bridge": bridge.DIALECT,
    "nvidia_dgxc": dgxc.DIALECT,
    "mosaic_llm_foundry": fsdp.MOSAIC,
    "torchtitan": fsdp.TORCHTITAN,
    "megatron_papers": papers.DIALECT,
    "large_scale_reports": reports.DIALECT,
    "megatron_moe_layer_h100": layer.DIALECT,
    "megatron_functional": functional.DIALECT,
    "zero_bubble": zero_bubble.DIALECT,
}
FORMULA = "analytic_or_digitised"
"""Rows whose value is no run."""


def rows(folder: str | Path = TRUTH) -> list[Row]:
    """All rows of a folder but formula values. Raises FileNotFoundError where `models.json` is missing."""
    folder = Path(folder)
    models = json.loads((folder / "models.json").read_text(encoding="utf-8"))["models"]
    found = []
    for path in sorted(folder.glob("*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        dialect = DIALECTS.get(table.get("dataset", path.stem))
        if dialect:
            found += [
                _row(raw, dialect, path.name, models) for raw in table["rows"] if raw.get("value_origin") != FORMULA
            ]
    return found


def _row(raw: Raw, dialect: Dialect, file: str, models: Raw) -> Row:
    job, why_not = None, ""
    try:
        job = dialect.job(raw, models)
    except UntoldError as reason:
        why_not = str(reason)
    except (KeyError, SpecError) as fault:  # a new kind of row, or a release without a preset
        why_not = f"this dialect does not read it: {type(fault).__name__} {fault}"
    return Row(
        id=raw["id"],
        group=dialect.group,
        file=file,
        job=job,
        why_not=why_not,
        seconds=dialect.seconds(raw, models),
        memory=dialect.memory(raw),
        generation=job.software.name if job else dialect.generation(raw),
        family=family(dialect.family(raw)),
        raw=raw,
    )


def main() -> None:
    """Print what can be expressed."""
    found = rows(sys.argv[1] if len(sys.argv) > 1 else TRUTH)
    for group in dict.fromkeys(row.group for row in found):
        mine = [row for row in found if row.group == group]
        told = [row for row in mine if row.job]
        print(f"{group}: {len(told)} of {len(mine)} rows, {sum(r.seconds is not None for r in told)} with a step time, "
              f"{sum(r.memory is not None for r in told)} with memory")  # fmt: skip
        for why, count in Counter(row.why_not for row in mine if not row.job).most_common():
            print(f"    {count:4d}  {why}")


if __name__ == "__main__":
    main()
