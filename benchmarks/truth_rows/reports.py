"""Large training reports: MegaScale, Llama 3 405B, DeepSeek-V3, Nemotron-4, MLPerf, DeepSeek-V3 on GB200 step by
step.

What they do not print:
- MegaScale (NSDI 2024): micro-batch 1; its Megatron-LM of 2023 overlaps nothing and reduces gradients in FP32; the
  ablation adds the parallel block, the sliding window, then tensor, pipeline and data overlap in that order. The window
  (its width is not printed) and LAMB are not told. MFU is of 312 TFLOP/s, by 72 B s
  l h^2 (1 + s/6h + V/12lh).
- Llama 3 (arXiv 2407.21783, section 3.3.2): micro-batch 1; a chunk is one layer, the first and the last chunk none
  (so eight virtual stages); FSDP keeps parameters gathered after forward. Its TFLOP/s convention is not printed:
  causal is taken.
- DeepSeek-V3 (arXiv 2412.19437, section 3.2): DualPipe, ZeRO-1, MLA up-projections and norms and SwiGLU recomputed.
- Nemotron-4 (arXiv 2402.16819, 2406.11704): Megatron-Core with its overlaps; micro-batch all of a rank's up to 4
  without a pipeline, else 1; one layer a virtual stage.
- MLPerf v3.1: FP8 with delayed scaling, micro-batch 1, 12 virtual stages, as in NVIDIA's submission.
- DeepSeek-V3 on GB200 (NVIDIA/Megatron-LM docs/discussions/deepseek-v3-gb200-optimization): MXFP8, BF16 moments; CUDA
  graphs from the fifth step, no EP overlap; DeepEP and HybridEP differ in speed, which a Job does not
  say; TFLOP/s count attention causal and one MTP layer.
"""

from typing import Any

from msgspec.structs import replace

from greylag.spec.job import Job
from greylag.spec.model import Model
from greylag.spec.precision import Precision
from greylag.spec.software import Software
from truth_rows.bridge import megatron_precision
from truth_rows.dims import gpt, model_of
from truth_rows.flops import causal, megatron_model
from truth_rows.fsdp import gathered_low
from truth_rows.papers import overlapping
from truth_rows.row import (
    Dialect,
    Raw,
    UntoldError,
    layout_stages,
    make_job,
    modules,
    overlapped,
    preset,
)

A100_TFLOPS = 312.0
"""Peak that MegaScale's MFU refers to (A100 data sheet, BF16)."""


def _kind(raw: Raw) -> str:
    return str(raw["id"].split("/")[0])


def _job(raw: Raw, models: Raw) -> Job:
    kind, p, b = _kind(raw), raw["parallel"], raw["batch"]
    if "two phases" in " ".join(raw.get("notes", [])):
        raise UntoldError("one figure for two runs of other sequence lengths")
    missing = [k for k in ("seq_len", "gbs") if b[k] is None] + ["num_gpus"] * (raw["hardware"]["num_gpus"] is None)
    if missing or p["tp"] is None:
        raise UntoldError(f"the source does not print {', '.join(missing or ['tp'])}")
    if kind not in _RULES:
        raise UntoldError(f"no rules for {kind!r}: what it does not print is not known")
    rules = _RULES[kind](raw)
    cp = p["cp"] or 1
    gpus = raw["hardware"]["num_gpus"]
    return make_job(
        raw,
        model=_model(raw, models),
        precision=_precision(raw),
        software=_software(raw),
        strategy={"dp": gpus // (p["tp"] * p["pp"] * cp), "tp": p["tp"], "pp": p["pp"], "cp": cp, **rules},
    )


def _model(raw: Raw, models: Raw) -> Model:
    kind, tp = _kind(raw), raw["parallel"]["tp"] or 1
    if kind in ("megascale", "mlperf-v3.1"):
        parallel = kind == "megascale" and _megascale_step(raw) >= 1
        sequence = raw["batch"]["seq_len"]
        return gpt(raw["model"], models, None, 128 * tp, max_sequence=sequence, parallel_block=parallel)
    if kind.startswith("nemotron4"):
        return model_of(raw["model"], models, None, 128 * tp, activation="relu2", norm="layernorm")
    if raw["model"]["name"] == "DeepSeek-V3":
        own = {"ref": "deepseek_v3", **raw["model"]}
        return model_of(own, models, num_mtp_layers=raw["model"]["mtp_layers"])
    return model_of(raw["model"], models, None, 128 * tp)


def _precision(raw: Raw) -> Precision:
    said = raw["precision"] or ""
    if said.startswith("fp8 (fine-grained"):
        found: Precision = preset("precision", "fp8-deepseek")
        return found
    if said == "mxfp8":
        return replace(megatron_precision("mxfp8"), first_moment="bf16", second_moment="bf16")
    if _kind(raw) == "mlperf-v3.1":
        return megatron_precision("fp8-tensor-delayed")
    if _kind(raw) == "llama3-405b":
        return gathered_low("bf16")
    return megatron_precision("bf16")


def _software(raw: Raw) -> Software:
    """CUDA graphs of attention and router are the fifth step of the optimization of DeepSeek-V3 on GB200."""
    software: Software = preset("software", _generation(raw))
    if _kind(raw) != "megatron-dsv3-gb200":
        return software
    dispatch = "choices" if raw["options"]["dispatcher"] == "AlltoAll" else "nodes"
    return replace(software, graphs=int(raw["id"].split("/")[-1]) >= 5, dispatch=dispatch)


def _megascale_step(raw: Raw) -> int:
    """Of the ablation in table 3: how many of its rows a run has behind the first, Megatron-LM's."""
    parts = raw["id"].split("/")
    return int(parts[-1]) if parts[1] == "t3" else (9 if raw.get("system") == "megascale" else 0)


def _megascale(raw: Raw) -> dict[str, Any]:
    step = _megascale_step(raw)
    overlap = overlapped(("dp", step >= 5), ("tp", step >= 3), ("pp", step >= 4))
    return {"zero": 1, "micro_batch": 1, "vp": raw["parallel"]["vp"] or 1, "overlap": overlap}


def _mlperf(raw: Raw) -> dict[str, Any]:
    return {"zero": 1, "micro_batch": 1, "vp": 12, "overlap": ("dp", "tp", "pp")}


def _llama(raw: Raw) -> dict[str, Any]:
    stages = raw["model"]["layers"] + 2
    layers = (0, *[1] * (stages - 2), 0)
    vp = stages // raw["parallel"]["pp"]
    return {"zero": 2, "micro_batch": 1, "vp": vp, "stage_layers": layers, "overlap": ("dp", "pp")}


def _deepseek(raw: Raw) -> dict[str, Any]:
    return {
        "zero": 1,
        "micro_batch": 1,
        "ep": raw["parallel"]["ep"],
        "schedule": "dualpipe",
        "overlap": ("dp", "ep", "pp"),
        "recompute": "selective",
        "recompute_modules": ("norm", "mla_up", "activation"),
    }


def _on_gb200(raw: Raw) -> dict[str, Any]:
    names = ["mla_up_proj" if name == "up_proj" else name for name in raw["recompute"] or []]
    return {
        "zero": 1,
        "micro_batch": raw["batch"]["mbs"],
        "vp": raw["parallel"]["vp"],
        "ep": raw["parallel"]["ep"],
        "stage_layers": layout_stages(raw["options"]["pp_layout"]),
        "overlap": ("dp", "pp"),
        **modules(names),
    }


_RULES = {
    "megascale": _megascale,
    "mlperf-v3.1": _mlperf,
    "llama3-405b": _llama,
    "deepseek-v3": _deepseek,
    "nemotron4-15b": overlapping,
    "nemotron4-340b": overlapping,
    "megatron-dsv3-gb200": _on_gb200,
}


def _seconds(raw: Raw, models: Raw) -> float | None:
    t, m, b, gpus = raw["measured"], raw["model"], raw["batch"], raw["hardware"]["num_gpus"]
    if t.get("step_time_s") is not None:
        return float(t["step_time_s"])
    if None in (b["gbs"], b["seq_len"], gpus):
        return None
    if "gpu_hours_total" in t and "tokens_b" in t:
        return float(t["gpu_hours_total"] * 3600 / gpus / (t["tokens_b"] * 1e9 / (b["gbs"] * b["seq_len"])))
    if "model_tflops_per_gpu" in t:
        return float(causal(_model(raw, models), b["seq_len"], b["gbs"]) / (t["model_tflops_per_gpu"] * 1e12 * gpus))
    if "mfu_pct" in t and _kind(raw) == "megascale":
        flops = megatron_model(m["layers"], m["hidden"], m["vocab"], b["seq_len"], b["gbs"])
        return float(flops / (t["mfu_pct"] / 100 * A100_TFLOPS * 1e12 * gpus))
    return None


def _generation(raw: Raw) -> str:
    kind = _kind(raw)
    if kind == "megascale":
        return "megascale" if _megascale_step(raw) > 5 else "megatron-2023"
    return {
        "mlperf-v3.1": "nemo-mlperf-2023",
        "llama3-405b": "llama-3",
        "deepseek-v3": "hai-llm",
        "megatron-dsv3-gb200": "megatron-core-2025",
    }.get(kind, "megatron-core-2024")


DIALECT = Dialect("reports", _job, _seconds, _generation)
