"""Megatron-Bridge's performance summary (NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary*.md), 25.09 to 26.08.

Rules of the source (scripts/performance, src/megatron/bridge/perf_recipes, and recipes/deepseek and recipes/kimi for
pipeline layouts): distributed optimizer, BF16 gradients (`grad_reduce_in_fp32 = False`), FP8 on every linear layer with
its parameters gathered in FP8, flash attention of TransformerEngine, experts forced to balance, expert tensor
parallelism 1, one MTP layer in DeepSeek-V3 unless the row says without. `fp8` is per-tensor current scaling (`fp8_cs`).
Gradients overlap with backward, tensor-parallel messages where TP > 1, pipeline messages where stages are virtual;
graphs, experts' overlap and recompute are those of the release's recipe (`recipes.py`). Attention in FP8, which some
recipes of 26.06 and later have, has no words in a Precision.
"""

from typing import Any

from msgspec.structs import replace

from greylag.spec.job import Job
from greylag.spec.model import Model
from greylag.spec.precision import Precision
from greylag.spec.software import Software
from truth_rows.dims import model_of
from truth_rows.recipes import PRECISIONS, settings_of
from truth_rows.row import (
    Dialect,
    Raw,
    UntoldError,
    balanced_stages,
    generation,
    layout_stages,
    make_job,
    overlapped,
    preset,
    printed,
)

LLAMA_3_VOCAB = 128256
"""arXiv 2407.21783, section 3.2."""
_PRESETS = {"bf16": "bf16", "fp8": "fp8-tensor-current", "mxfp8": "mxfp8"}


def _job(raw: Raw, models: Raw) -> Job:
    if raw["task"] != "pretrain":
        raise UntoldError(f"task {raw['task']}, not pre-training")
    if raw["precision"] == "nvfp4":
        raise UntoldError("NVFP4: no recipe with scales per 16 elements and Hadamard transforms")
    model = bridge_model(raw, models)
    p = raw["parallel"]
    pp, vp = p["pp"], p["vp"] or 1
    settings = settings_of(raw, model.num_layers)
    software: Software = preset("software", _generation(raw))
    return make_job(
        raw,
        model=model,
        precision=megatron_precision(_PRESETS[PRECISIONS[raw["precision"]]]),
        software=replace(software, graphs=settings.graphs, dispatch="nodes" if settings.flex else "choices"),
        strategy={
            "dp": p["dp"],
            "tp": p["tp"],
            "pp": pp,
            "cp": p["cp"],
            "vp": vp,
            "ep": (p["ep"] or 1) if model.moe else 1,
            "etp": (p["etp"] or 1) if model.moe and p["tp"] > 1 else None,
            "zero": 3 if settings.fsdp else 1,
            "micro_batch": raw["batch"]["mbs"],
            "stage_layers": _stages(raw, model, pp * vp, settings.layout),
            "overlap": overlapped(
                ("dp", True),
                ("tp", p["tp"] > 1 and settings.tp_overlap),
                ("ep", (p["ep"] or 1) > 1 and settings.ep_overlap),
                ("pp", vp > 1),
            ),
            "offload": ("activations",) if settings.offload else None,
            **settings.recompute,
        },
    )


def bridge_model(raw: Raw, models: Raw) -> Model:
    """The model of a row of NVIDIA's, vocabulary padded to 128 per tensor-parallel rank."""
    ref: str = raw["model"]["ref"]
    fields: dict[str, Any] = {}
    if ref.startswith("qwen3"):
        fields["qk_norm"] = True
    if ref == "gpt_oss_120b":
        fields["bias"] = True
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


def _stages(raw: Raw, model: Model, stages: int, layout: str | None) -> tuple[int, ...]:
    """By the layout if there is one, else balanced; DeepSeek-V3 and Kimi-K2 fill all stages but the last."""
    layers = model.num_layers
    if layout:
        return layout_stages(layout)
    if raw["model"]["ref"] in ("deepseek_v3", "kimi_k2") and stages > 1 and layers % stages:
        each = -(-(layers + 3) // stages)  # 64 layers' places: the last stage has the loss and MTP in three of them
        last = layers - each * (stages - 1)
        if last > 0:
            return (*[each] * (stages - 1), last)
    return balanced_stages(layers, stages)


def _generation(raw: Raw) -> str:
    return generation("megatron-bridge", raw["release"].split()[-1][:5])


DIALECT = Dialect(
    "megatron_bridge", _job, printed("step_time_s_derived"), _generation, family=lambda raw: raw["model"]["ref"]
)
