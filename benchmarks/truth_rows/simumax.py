"""SimuMax's tables (MooreThreads/SimuMax): Megatron-LM on one node of eight B200 or A100 PCIe.

Rules of the source: BF16, no recompute, distributed optimizer, FP32 gradients, every overlap off, drop-and-pad with
capacity factor 1 (balanced experts). Embeddings are untied; where the padded vocabulary is not printed, it is
Megatron's of 128 per tensor-parallel rank. Peak memory is max_memory_allocated, the largest over ranks.
"""

from greylag.spec.job import Job
from truth_rows.dims import model_of
from truth_rows.row import Dialect, Memory, Raw, cluster, make_job


def _job(raw: Raw, models: Raw) -> Job:
    m, p, b = raw["model"], raw["parallel"], raw["batch"]
    padded = m.get("vocab_padded_simumax")
    model = model_of(m, models, padded, 1) if padded else model_of(m, models, None, 128 * p["tp"])
    etp = p["etp"] if model.moe and p["etp"] != p["tp"] else None
    gpu = raw["hardware"]["gpu"]
    return make_job(
        raw,
        model=model,
        precision="bf16",
        on=cluster(gpu, raw["hardware"]["num_gpus"], raw["hardware"]["gpus_per_node"]),
        software=_generation(raw),
        sequence=b["seq_len"],
        global_batch=b["gbs"],
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


def _seconds(raw: Raw, models: Raw) -> float | None:
    ms = raw["measured"].get("step_time_ms", raw["measured"].get("step_time_ms_derived"))
    return None if ms is None else ms / 1e3


def _memory(raw: Raw) -> Memory | None:
    gib = raw["measured"].get("max_allocated_gib", raw["measured"].get("max_allocated_gib_derived"))
    return None if gib is None else Memory(gib * 2**30, "allocated")


def _generation(raw: Raw) -> str:
    return "megatron-core-2026" if "B200" in raw["hardware"]["gpu"] else "megatron-core-2025"


def dialect(group: str) -> Dialect:
    """For the B200 and the A100 table."""
    return Dialect(group, _job, _seconds, _memory, _generation, lambda raw: raw["model"]["name"])
