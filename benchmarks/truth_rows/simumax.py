"""SimuMax's tables (MooreThreads/SimuMax): Megatron-LM on one node of eight B200 or A100 PCIe.

Rules of the source: BF16, no recompute, distributed optimizer, FP32 gradients, every overlap off, drop-and-pad with
capacity factor 1 (balanced experts). Embeddings are untied; where the padded vocabulary is not printed, it is
Megatron's of 128 per tensor-parallel rank. Peak memory is max_memory_allocated, the largest over ranks.
"""

from greylag.spec.job import Job
from truth_rows.dims import model_of
from truth_rows.row import Dialect, Raw, make_job, peak, printed


def _job(raw: Raw, models: Raw) -> Job:
    m, p, b = raw["model"], raw["parallel"], raw["batch"]
    padded = m.get("vocab_padded_simumax")
    model = model_of(m, models, padded, 1) if padded else model_of(m, models, None, 128 * p["tp"])
    etp = p["etp"] if model.moe and p["etp"] != p["tp"] else None
    return make_job(
        raw,
        model=model,
        precision="bf16",
        software=_generation(raw),
        strategy={
            "dp": p["dp"],
            "tp": p["tp"],
            "pp": p["pp"],
            "cp": p["cp"],
            "vp": p["vp"],
            "ep": p["ep"],
            "etp": etp,
            "zero": p["zero"],
            "micro_batch": b["mbs"],
            "overlap": (),
        },
    )


def _generation(raw: Raw) -> str:
    return "megatron-core-2026" if "B200" in raw["hardware"]["gpu"] else "megatron-core-2025"


def dialect(group: str) -> Dialect:
    """For the B200 and the A100 table."""
    return Dialect(
        group,
        _job,
        printed("step_time_ms", "step_time_ms_derived", per_second=1e3),
        _generation,
        peak("max_allocated_gib", "max_allocated_gib_derived", unit=2**30),
    )
