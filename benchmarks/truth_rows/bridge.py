"""Megatron-Bridge's performance summary (NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary*.md), 25.09 to 26.08.

Rules of the source (src/megatron/bridge/perf_recipes, and recipes/deepseek and recipes/kimi for the pipeline
layouts): distributed optimizer, BF16 gradients (`grad_reduce_in_fp32 = False`), FP8 on every linear layer with its
parameters gathered in FP8, flash attention of TransformerEngine, experts forced to balance, expert tensor parallelism
1, one MTP layer in DeepSeek-V3 unless the row says without. `fp8` is per-tensor current scaling (`fp8_cs`). The
settings joined to a row are today's recipe of that shape; without one, gradients and (TP > 1) tensor-parallel
messages overlap, experts do not. A graph of the attention and the router counts as CUDA graphs: what it leaves out is
few, large kernels.
"""

from typing import Any

from msgspec.structs import replace

from greylag.spec.job import Job
from greylag.spec.model import Model
from greylag.spec.precision import Precision
from greylag.spec.software import Software
from truth_rows.dims import model_of
from truth_rows.row import (
    Dialect,
    Memory,
    Raw,
    Untold,
    balanced_stages,
    cluster,
    generation,
    make_job,
    modules,
    overlapped,
    preset,
)

LLAMA_3_VOCAB = 128256
"""arXiv 2407.21783, section 3.2."""
_RECIPES = {
    "bf16": "bf16",
    "fp8": "fp8-tensor-current",
    "fp8_current_scaling": "fp8-tensor-current",
    "mxfp8": "mxfp8",
    "fp8_32x32_block (mxfp8-like)": "mxfp8",
}
_FULL_ITERATION = (
    "_enable_deepseek_full_iteration_mxfp8",
    "_enable_hybridep_full_iteration_mxfp8",
    "_apply_gpt_oss_120b_full_iter_fp8mx_configs",
)
"""Helpers of the recipes that capture the whole iteration and overlap experts' messages."""


def _job(raw: Raw, models: Raw) -> Job:
    if raw["task"] != "pretrain":
        raise Untold(f"task {raw['task']}, not pre-training")
    if raw["precision"] == "nvfp4":
        raise Untold("NVFP4: no recipe with scales per 16 elements and Hadamard transforms")
    model = bridge_model(raw, models)
    p, b = raw["parallel"], raw["batch"]
    pp, vp, gpus = p["pp"], p["vp"] or 1, raw["hardware"]["num_gpus"]
    settings = _settings(raw)
    return make_job(
        raw,
        model=model,
        precision=megatron_precision(_RECIPES[raw["precision"]]),
        on=cluster(raw["hardware"]["gpu"], gpus),
        software=_software(raw, settings),
        sequence=b["seq_len"],
        global_batch=b["gbs"],
        strategy={
            "dp": p["dp"],
            "tp": p["tp"],
            "pp": pp,
            "cp": p["cp"],
            "vp": vp,
            "ep": (p["ep"] or 1) if model.moe else 1,
            "etp": (p["etp"] or 1) if model.moe and p["tp"] > 1 else None,
            "zero": 3 if p["fsdp"] else 1,
            "micro_batch": b["mbs"],
            "stage_layers": _stages(raw, model, pp * vp),
            "overlap": _overlap(raw, settings),
            "offload": ("activations",) if settings.get("model.cpu_offloading") else None,
            **_recompute(raw),
        },
    )


def bridge_model(raw: Raw, models: Raw) -> Model:
    """The model of a row of NVIDIA's, vocabulary padded to 128 per tensor-parallel rank."""
    ref: str = raw["model"]["ref"]
    fields: dict[str, Any] = {}
    if ref.startswith("qwen3"):
        fields["qk_norm"] = True
    if ref == "deepseek_v3":
        fields["num_mtp_layers"] = 0 if raw["model"].get("variant") == "w/o MTP" else 1
    vocab = LLAMA_3_VOCAB if ref.startswith("llama3") else None
    return model_of(raw["model"], models, vocab, 128 * (raw["parallel"]["tp"] or 1), **fields)


def megatron_precision(name: str) -> Precision:
    """A precision preset as Megatron-Core runs it: every linear layer of a block, MLA's down-projections too."""
    precision: Precision = preset("precision", name)
    if not precision.is_fp8:
        return precision
    gather: Any = "fp8" if precision.weight.granularity in ("tensor", "128x128") else "fp32"
    return replace(precision, most_sensitive="B", parameter_gather=gather)


def _settings(raw: Raw) -> dict[str, Any]:
    recipe = raw.get("recipe") or {}
    return dict(recipe.get("settings") or {})


def _helpers(raw: Raw) -> list[str]:
    return list((raw.get("recipe") or {}).get("helpers") or [])


def _overlap(raw: Raw, settings: dict[str, Any]) -> tuple[Any, ...]:
    whole = str(settings.get("comm_overlap", ""))
    experts = (
        any(helper in _FULL_ITERATION for helper in _helpers(raw))
        or settings.get("comm_overlap.overlap_moe_expert_parallel_comm")
        or settings.get("model.moe_a2a_overlap")
        or "overlap_moe_expert_parallel_comm=True" in whole
    )
    tensors = settings.get("comm_overlap.tp_comm_overlap", "tp_comm_overlap=False" not in whole)
    return overlapped(
        ("dp", settings.get("ddp.overlap_grad_reduce", True)),
        ("tp", raw["parallel"]["tp"] > 1 and tensors),
        ("ep", (raw["parallel"]["ep"] or 1) > 1 and experts),
        ("pp", (raw["parallel"]["vp"] or 1) > 1),
    )


def _software(raw: Raw, settings: dict[str, Any]) -> Software:
    software: Software = preset("software", _generation(raw))
    graphs = settings.get("model.cuda_graph_impl", "none") not in ("none", None)
    return replace(software, graphs=graphs or any(helper in _FULL_ITERATION for helper in _helpers(raw)))


def _recompute(raw: Raw) -> dict[str, Any]:
    recompute = raw["recompute"] or {}
    if recompute.get("granularity") == "full":
        return {"recompute": "full", "recompute_layers": recompute.get("num_layers")}
    if recompute.get("granularity") == "selective":
        return modules(["core_attn"] if recompute["modules"] is None else recompute["modules"])
    return {}


def _stages(raw: Raw, model: Model, stages: int) -> tuple[int, ...]:
    """DeepSeek-V3's and Kimi-K2's tables put as many layers as fit on all stages but the last; others balance."""
    layers = model.num_layers
    if raw["model"]["ref"] in ("deepseek_v3", "kimi_k2") and stages > 1 and layers % stages:
        each = -(-(layers + 3) // stages)  # 64 layers' places: the last stage has the loss and MTP in three of them
        last = layers - each * (stages - 1)
        if last > 0:
            return (*[each] * (stages - 1), last)
    return balanced_stages(layers, stages)


def _seconds(raw: Raw, models: Raw) -> float | None:
    seconds: float | None = raw["measured"].get("step_time_s_derived")
    return seconds


def _memory(raw: Raw) -> Memory | None:
    return None


def _generation(raw: Raw) -> str:
    return generation("megatron-bridge", raw["release"].split()[-1][:5])


DIALECT = Dialect("megatron_bridge", _job, _seconds, _memory, _generation, lambda raw: raw["model"]["ref"])
