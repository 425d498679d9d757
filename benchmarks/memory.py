"""Predicted against measured peak memory, by group of published runs.

    python benchmarks/memory.py [FOLDER] [--rows]      # one line per group; with --rows also one per run

What of a layer is fused is a fact of a framework's release or of a run's arguments that no Job says yet: it is told
here (`fusion_of`). Nothing else about a run is: the model, its cut and its batch are those of the Job.
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rows import TRUTH, Row, rows

from greylag.sim.memory import Memory, memory
from greylag.spec.kept_fused import Fusion

GENERATIONS = {
    "zero-bubble": Fusion(attention="unfused", dropout=True, loss="parallel", gradients="autograd"),
    "torchtitan-2024": Fusion(loss="torch", gradients="autograd", gathered=True),
    "torchtitan-2025": Fusion(loss="compiled", gradients="autograd", gathered=True),
}
"""zero-bubble: a fork of Megatron-LM of 2023 without FlashAttention, GPT-3's dropout. torchtitan compiles its loss
since 2025 (torchtitan/components/loss.py)."""


class Comparison(NamedTuple):
    """One run's peak bytes."""

    row: Row
    predicted: float
    measured: float
    moment: str

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.measured - 1


def fusion_of(row: Row) -> Fusion:
    """What the run fuses, from its arguments where the source prints them (Megatron-LM, megatron/training/arguments.py:
    dropout of 0.1 and the unfused loss are defaults; a local implementation has no flash attention)."""
    assert row.job
    if row.group != "megatron_functional":
        return GENERATIONS.get(row.generation, Fusion.of(row.job.software))
    o = row.raw["options"]
    is_unfused = o.get("attention-backend") == "unfused" or (
        o.get("transformer-impl") == "local" and not o.get("use-flash-attn")
    )
    native = "in-place" if o.get("cross-entropy-fusion-impl") == "te" else "compiled-parallel"
    return Fusion(
        attention="unfused" if is_unfused else "flash",
        dropout=o.get("attention-dropout") != 0.0,
        loss=native if o.get("cross-entropy-loss-fusion") else "parallel",
        gradients="autograd" if o.get("no-gradient-accumulation-fusion") else "accumulated",
        sequence_parallel=bool(row.raw["parallel"].get("sequence_parallel")),
        deterministic=bool(o.get("deterministic-mode")),
    )


def compare(row: Row) -> Comparison:
    """The prediction for the rank that was measured."""
    assert row.job
    assert row.memory
    account = memory(row.job, fusion_of(row))
    stage = account.stage(-1) if row.memory.rank == "last" else account.stage(int(account.peak_stage))
    predicted = float(stage.total)
    if row.memory.kind == "reserved":
        predicted = float(Memory((stage,)).reserved)
    return Comparison(row, predicted, row.memory.bytes, stage.moment)


def comparisons(found: list[Row]) -> Iterator[Comparison]:
    """Of every run that a Job says and whose memory was measured."""
    return (compare(row) for row in found if row.job and row.memory)


def line(c: Comparison) -> str:
    """One run."""
    sizes = f"{c.predicted / 2**30:8.2f} of {c.measured / 2**30:8.2f} GiB"
    return f"{100 * c.error:+7.2f}%  {sizes}  {c.row.id}  {c.moment}"


def main() -> None:
    """Print the table."""
    folders = [a for a in sys.argv[1:] if not a.startswith("-")]
    found = rows(folders[0] if folders else TRUTH)
    done = list(comparisons(found))
    if "--rows" in sys.argv:
        print("\n".join(line(c) for c in done))
    columns = ("mean", "median", "p90", "worst", "bias")
    print(f"{'group':22s} {'rows':>5s} " + " ".join(f"{name:>7s}" for name in columns) + "  not expressible")
    for group in dict.fromkeys(row.group for row in found if row.memory):
        errors = np.array([c.error for c in done if c.row.group == group])
        missing = sum(row.memory is not None and row.job is None for row in found if row.group == group)
        size = np.abs(errors)
        figures = (
            (size.mean(), np.median(size), np.quantile(size, 0.9), size.max(), errors.mean()) if len(errors) else ()
        )
        print(f"{group:22s} {len(errors):5d} {' '.join(f'{100 * x:6.2f}%' for x in figures):39s}  {missing}")


if __name__ == "__main__":
    main()
