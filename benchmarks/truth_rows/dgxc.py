"""NVIDIA/dgxc-benchmarking: NeMo (Megatron-Core), MaxText and PaxML, 8 to 2304 GPUs; printed step seconds.

Rules of the source where a row does not say (NVIDIA/NeMo, scripts/performance: recommended_model_configs/*.csv and
llm/pretrain_*.py): distributed optimizer; gradients reduced in BF16 beside backward and tensor-parallel messages
overlapped; no recompute, but of the attention core (GB200) or MLA's up-projections (H100) in DeepSeek-V3, whose stages
are uneven; CUDA graphs for few models on GB200. FP8 is TransformerEngine's delayed scaling of per-tensor scales, NeMo's
default and JAX's only recipe; expert tensor parallelism is 1 where none is printed, as the same shapes print it later.
`cp` null is 1. JAX: parameters sharded over the printed FSDP group (all ranks if none), replicas of it, whole layers
recomputed (MaxText's remat_policy "full"). Layers of a cut model are the row's own. The generation is the container
that the title names ("24.09"), else the release of the benchmark.
"""

import re
from typing import Any

from msgspec.structs import replace

from greylag.spec.job import Job
from greylag.spec.model import Model
from truth_rows.bridge import bridge_model, megatron_precision
from truth_rows.dims import gpt, model_of
from truth_rows.row import (
    Dialect,
    Raw,
    UntoldError,
    balanced_stages,
    generation,
    make_job,
    modules,
    overlapped,
    preset,
    printed,
)

_GRAPHS = {("gpt3_175b", "GB200"), ("llama3_8b", "GB200"), ("nemotron4_15b", "GB200"), ("llama4_maverick_400b", "H100")}
"""(model, GPU) of NeMo's recommended configurations with CUDA graphs, and Nemotron-4 340B on GB200 in FP8."""
_PRECISIONS = {"bf16": "bf16", "fp8": "fp8-tensor-delayed"}


def _job(raw: Raw, models: Raw) -> Job:
    if raw["task"] != "pretrain":
        raise UntoldError(f"task {raw['task']}, not pre-training")
    model = _model(raw, models)
    is_nemo = raw["software"]["framework"].startswith("NeMo")
    strategy = _nemo(raw, model) if is_nemo else _jax(raw)
    precision = _PRECISIONS[raw["precision"]]
    return make_job(
        raw,
        model=model,
        precision=megatron_precision(precision) if is_nemo else precision,
        software=replace(preset("software", _generation(raw)), graphs=_has_graphs(raw)),
        strategy=strategy,
    )


def _model(raw: Raw, models: Raw) -> Model:
    ref, tp = raw["model"]["ref"], raw["parallel"]["tp"] or 1
    if ref.startswith("nemotron4"):
        # arXiv 2402.16819, section 2: squared ReLU, RoPE, LayerNorm, no biases, untied embeddings.
        return model_of(raw["model"], models, None, 128 * tp, activation="relu2", norm="layernorm")
    if ref == "gpt3_175b":
        return gpt(raw["model"], models, None, 128 * tp)
    model = bridge_model(raw, models)
    if ref == "llama4_maverick_400b":
        # config.json of meta-llama/Llama-4-Maverick-17B-128E: intermediate_size 8192 of routed and shared experts,
        # intermediate_size_mlp 16384 of dense layers, interleave_moe_layer_step 2.
        assert model.moe
        moe = replace(model.moe, ffn_hidden_size=8192, num_shared_experts=1, every=2, scoring="sigmoid")
        return replace(model, moe=moe)
    return model


UNPRINTED_VP = {"nemotron4_340b": 12}
"""Virtual stages where a release's table has none and a later one's of the same recipe does (NVIDIA/dgxc-benchmarking,
nemotron/README.md)."""


def _nemo(raw: Raw, model: Model) -> dict[str, Any]:
    p, gpus = raw["parallel"], raw["hardware"]["num_gpus"]
    if p["pp"] is None:
        raise UntoldError("the source misprints the pipeline degree (PP 41)")
    vp = (p["vp"] or UNPRINTED_VP.get(raw["model"]["ref"], 1)) if p["pp"] > 1 else 1
    if model.num_layers + 2 < p["pp"] * vp:
        vp = 1
    tp, cp = p["tp"], p["cp"] or 1
    return {
        "dp": gpus // (tp * p["pp"] * cp),
        "tp": tp,
        "pp": p["pp"],
        "cp": cp,
        "vp": vp,
        "ep": (p["ep"] or 1) if model.moe else 1,
        "etp": (p["etp"] or 1) if model.moe and tp > 1 else None,
        "zero": 1,
        "micro_batch": raw["batch"]["mbs"],
        "stage_layers": _stages(raw, model.num_layers, p["pp"], vp),
        "overlap": overlapped(("dp", True), ("tp", tp > 1), ("pp", vp > 1)),
        **_recompute(raw),
    }


def _has_graphs(raw: Raw) -> bool:
    key = (raw["model"]["ref"], raw["hardware"]["gpu"])
    return key in _GRAPHS or (*key, raw["precision"]) == ("nemotron4_340b", "GB200", "fp8")


def _recompute(raw: Raw) -> dict[str, Any]:
    if raw["model"]["ref"] != "deepseek_v3":
        return {}
    return modules(["core_attn"] if raw["hardware"]["gpu"] == "GB200" else ["mla_up_proj"])


def _stages(raw: Raw, layers: int, pp: int, vp: int) -> tuple[int, ...]:
    """DeepSeek-V3's first stage holds one layer less than 64 make even, its last two; others balance."""
    if raw["model"]["ref"] == "deepseek_v3" and layers == 61 and pp > 1 and vp == 1:
        return (64 // pp - 1, *[64 // pp] * (pp - 2), 64 // pp - 2)
    return balanced_stages(layers, pp * vp)


def _jax(raw: Raw) -> dict[str, Any]:
    p, b, gpus = raw["parallel"], raw["batch"], raw["hardware"]["num_gpus"]
    group = min(p["fsdp_group"] or gpus, gpus)
    return {
        "dp": gpus,
        "replicas": gpus // group,
        "zero": 3,
        "micro_batch": b["mbs"] or b["gbs"] // gpus,
        "recompute": "full",
    }


def _generation(raw: Raw) -> str:
    framework = str(raw["software"]["framework"]).split()[0].lower()
    if framework != "nemo":
        return framework
    named = re.search(r"\b24\.\d\d\b", raw["title"])
    return generation("nemo", named[0] if named else raw["software"]["release_tags"][0][1:6])


DIALECT = Dialect("dgxc", _job, printed("step_time_s"), _generation, family=lambda raw: raw["model"]["ref"])
