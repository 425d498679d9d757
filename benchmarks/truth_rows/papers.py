"""Megatron-LM's papers and tables, 2021 to 2024: SC21 tables 1 and 2, the table of January 2021, selective recompute,
the README's H100 table, MT-NLG 530B.

What the tables do not print:
- SC21 table 1: micro-batch, heads and interleaving are those of NVIDIA/Megatron-LM examples/sc21/run_table_1.sh. All
  layers recomputed; no sharded optimizer; gradients all-reduced after backward; no overlap.
- SC21 table 2: as printed, without interleaving; its ZeRO-3 rows are DeepSpeed's, which gathers nothing ahead: a layer
  has more parameters than the 1e9 that it lets lie gathered (stage3_max_live_parameters).
- January 2021 (images/tables.tex): sequences of 1024 (the printed TFLOP/s are met with them), one micro-batch a step.
- Selective recompute (arXiv 2205.05198): attention recomputed. It brought sequence parallelism, which older runs
  (SC21, January 2021, MT-NLG, the README's A100 row) had not. Table 4 is one layer and no step.
- README: distributed optimizer, all overlaps on (its options); micro-batch 1 with a pipeline, else all of a rank's up
  to 4; one layer a virtual stage, as in NVIDIA's MLPerf submissions of the time.
- MT-NLG (arXiv 2201.11990, section 3) and the README's A100 row: micro-batch 1, all layers recomputed, no interleaving.
  MT-NLG's pipeline is DeepSpeed's.

FP16 costs what BF16 does, and is told as that.
"""

from typing import Any

from greylag.spec.job import Job
from truth_rows.dims import gpt
from truth_rows.flops import megatron_2021, megatron_model
from truth_rows.row import Dialect, Raw, UntoldError, make_job

_SC21 = {
    "1.7B": (16, 24, 0),
    "3.6B": (16, 32, 0),
    "7.5B": (16, 32, 0),
    "18B": (8, 48, 0),
    "39B": (4, 64, 0),
    "76B": (2, 80, 5),
    "145B": (2, 96, 5),
    "310B": (1, 128, 3),
    "530B": (1, 128, 1),
    "1T": (1, 160, 0),
}
"""Micro-batch, heads, layers per virtual stage (0: not interleaved): examples/sc21/run_table_1.sh."""


def _kind(raw: Raw) -> str:
    return "/".join(raw["id"].split("/")[:2]) if raw["id"].startswith("megatron-sc21") else raw["id"].split("/")[0]


def _job(raw: Raw, models: Raw) -> Job:
    if raw["id"].startswith("korthikanti/t4"):
        raise UntoldError("one layer, forward and backward: no step of a job")
    if raw["parallel"]["tp"] is None:
        raise UntoldError("the source does not print the degrees")
    m, p, b = dict(raw["model"]), raw["parallel"], raw["batch"]
    rules = _rules(raw)
    m["heads"] = m["heads"] or rules.pop("heads")
    rules.pop("heads", None)
    m["kv_heads"] = m["heads"]
    gpus = raw["hardware"]["num_gpus"]
    sequence = b["seq_len"] or 1024
    dp = gpus // (p["tp"] * p["pp"])
    return make_job(
        raw,
        model=gpt(m, models, None, 128 * p["tp"], max_sequence=sequence),
        precision="bf16",
        software=_generation(raw),
        sequence=sequence,
        strategy={"dp": dp, "tp": p["tp"], "pp": p["pp"], "cp": p["cp"], **rules},
    )


def _rules(raw: Raw) -> dict[str, Any]:
    """Strategy fields that a source's rules say, and `heads`."""
    kind, p, b, layers = _kind(raw), raw["parallel"], raw["batch"], raw["model"]["layers"]
    has_no_tp = p["tp"] == 1
    full: dict[str, Any] = {"zero": 0, "recompute": "full", "overlap": (), "sequence_parallel": has_no_tp}
    if kind == "megatron-sc21/t1":
        micro, heads, each = _SC21[raw["id"].split("/")[-1]]
        vp = layers // p["pp"] // each if each else 1
        return {**full, "micro_batch": micro, "heads": heads, "vp": vp}
    if kind == "megatron-sc21/t2":
        zero3 = p["sharding"] == "zero3"
        return {**full, "micro_batch": b["mbs"] or 1, **({"zero": 3} if zero3 else {})}
    if kind == "megatron-jan2021":
        return {**full, "micro_batch": _of_rank(raw)}
    if kind == "korthikanti":
        own = {"micro_batch": b["mbs"], "vp": p["vp"] or 1, "sequence_parallel": has_no_tp or p["sequence_parallel"]}
        return {"zero": 0, "overlap": (), **own, **_recompute(raw["recompute"])}
    if kind == "mt-nlg-530b" or _is_old_readme(raw):
        return {**full, "micro_batch": b["mbs"] or 1}
    return overlapping(raw)


def overlapping(raw: Raw) -> dict[str, Any]:
    """Strategy fields of a Megatron-Core run with all of its overlaps, of which the degrees alone are printed."""
    p, b = raw["parallel"], raw["batch"]
    vp, micro = 1, b["mbs"]
    if p["pp"] > 1:
        vp, micro = raw["model"]["layers"] // p["pp"], micro or 1
    return {"zero": 1, "micro_batch": micro or _up_to_4(raw), "vp": vp, "overlap": ("dp", "tp", "pp")}


def _of_rank(raw: Raw) -> int:
    """Sequences of a step on one rank."""
    return int(raw["batch"]["gbs"] * raw["parallel"]["tp"] * raw["parallel"]["pp"] // raw["hardware"]["num_gpus"])


def _up_to_4(raw: Raw) -> int:
    return max(n for n in (1, 2, 4) if _of_rank(raw) % n == 0)


def _is_old_readme(raw: Raw) -> bool:
    """The README's table of A100s, up to 2023: hardware FLOPs with full recompute."""
    return raw["id"].startswith("megatron-readme") and "hw_tflops_per_gpu" in raw["measured"]


def _recompute(said: str | None) -> dict[str, Any]:
    if said == "selective_attention":
        return {"recompute": "selective", "recompute_modules": ("attention",)}
    return {"recompute": said or "none"}


def _seconds(raw: Raw, models: Raw) -> float | None:
    t, m, b = raw["measured"], raw["model"], raw["batch"]
    if "step_time_s" in t:
        return float(t["step_time_s"])
    if "step_time_ms" in t:
        return float(t["step_time_ms"]) / 1e3
    if "layer_total_ms" in t:
        return float(t["layer_total_ms"]) / 1e3
    dims = (m["layers"], m["hidden"], m["vocab"], b["seq_len"], b["gbs"])
    if "hw_tflops_per_gpu" in t:
        return float(megatron_2021(*dims) / (t["hw_tflops_per_gpu"] * 1e12 * raw["hardware"]["num_gpus"]))
    if "model_tflops_per_gpu" in t:
        return float(megatron_model(*dims) / (t["model_tflops_per_gpu"] * 1e12 * raw["hardware"]["num_gpus"]))
    return None


def _generation(raw: Raw) -> str:
    kind = _kind(raw)
    if kind.startswith("megatron-readme") and not _is_old_readme(raw):
        return "megatron-core-2024"
    if kind == "mt-nlg-530b" or raw["parallel"]["sharding"] == "zero3":
        return "deepspeed-2021"
    return "megatron-2022" if kind == "korthikanti" else "megatron-2021"


DIALECT = Dialect("megatron_papers", _job, _seconds, _generation)
