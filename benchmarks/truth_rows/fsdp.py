"""Rows of PyTorch FSDP: mosaicml/llm-foundry's MPT table and pytorch/torchtitan's Llama reports.

llm-foundry (scripts/train/benchmarking/README.md): MPT is GPT-like with learned positions and biases (the printed
count of parameters is met with them); FULL_SHARD is ZeRO-3 and SHARD_GRAD_OP ZeRO-2; parameters are FP32 shards,
gathered in BF16; gradients are reduced in FP32 with mp_mode DEFAULT and in BF16 with PURE (get_mixed_precision of
Composer, late 2023); activation checkpointing is of whole blocks. FP8 is TransformerEngine's delayed scaling.

torchtitan: FSDP2, FP32 shards gathered in BF16 (in FP8 with tensorwise scales), gradients reduced in FP32; with a
pipeline parameters stay gathered (reshard_after_forward "default"), so ZeRO-2; as many micro-batches as pipeline
stages (pipeline_parallel_microbatches' default); two virtual stages when interleaved. Selective recompute by layer is
every second layer. By operator it keeps every second matrix multiply and the attention core, so that wk, wo and one
of w1 and w3 are computed again: 36% of the FLOPs of Llama's layers. The nearest that a Strategy says is the whole MLP
in two layers of three.
"""

from typing import Any

from msgspec.structs import replace

from greylag.spec.job import Job
from greylag.spec.precision import Precision
from greylag.spec.software import Software
from truth_rows.bridge import LLAMA_3_VOCAB
from truth_rows.dims import gpt, model_of
from truth_rows.row import Dialect, Raw, UntoldError, make_job, peak, preset, printed

_MPT_PRECISIONS = {"bf16": "bf16", "amp_bf16": "bf16", "amp_fp8": "fp8-tensor-delayed"}
_TITAN_PRECISIONS = {"bf16": "bf16", "fp8_tensorwise": "fp8-tensor-current", "fp8_rowwise": "fp8-row"}


def gathered_low(name: str) -> Precision:
    """A precision preset whose sharded FP32 parameters are gathered in BF16.

    A Precision knows no BF16 gather of weights that layers take in FP8: there the software holds BF16 (`low_weights`).
    """
    precision: Precision = preset("precision", name)
    return precision if precision.is_fp8 else replace(precision, parameter_gather="bf16")


def low_weights(software: str, precision: Precision) -> Software:
    """A software preset that holds weights in BF16 where no Precision says that they travel so."""
    made: Software = preset("software", software)
    return replace(made, parameters="bf16") if precision.is_fp8 and precision.parameter_gather == "fp32" else made


def _mpt(raw: Raw, models: Raw) -> Job:
    m, b, gpus = raw["model"], raw["batch"], raw["hardware"]["num_gpus"]
    precision = gathered_low(_MPT_PRECISIONS[raw["precision"]])
    software = low_weights("llm-foundry", precision)
    if raw["options"]["mp_mode"] == "PURE":
        software = replace(software, gradients="bf16")
    model = gpt({**m, "ffn_hidden": m["ffn_ratio"] * m["hidden"]}, models, max_sequence=b["seq_len"])
    return make_job(
        raw,
        model=model,
        precision=precision,
        software=software,
        strategy={
            "dp": gpus,
            "zero": {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}[raw["parallel"]["sharding"]],
            "micro_batch": b["mbs"],
            "recompute": raw["recompute"],
            "offload": ("activations",) if raw["options"].get("activation_cpu_offload") else None,
        },
    )


def _mpt_seconds(raw: Raw, models: Raw) -> float | None:
    b = raw["batch"]
    return float(b["gbs"] * b["seq_len"] / raw["measured"]["tokens_per_s"])


_LLAMA_2 = {"Llama 2 13B": "llama2_13b", "Llama 2 70B": "llama2_70b", "Llama 2 7B": "llama2_7b"}


def _titan(raw: Raw, models: Raw) -> Job:
    p, b, m = raw["parallel"], raw["batch"], raw["model"]
    model = model_of({"ref": _LLAMA_2.get(m["name"]), **m}, models, None if m["name"] in _LLAMA_2 else LLAMA_3_VOCAB)
    pp = p["pp"]
    precision = gathered_low(_TITAN_PRECISIONS[raw["precision"]])
    if raw["precision"] == "fp8_tensorwise":
        precision = replace(precision, parameter_gather="fp8")
    interleaved = raw["options"].get("schedule") == "1f1b-interleaved"
    vp = 2 if interleaved else 1
    return make_job(
        raw,
        model=model,
        precision=precision,
        software=low_weights(_generation(raw), precision),
        strategy={
            "dp": p["dp"],
            "tp": p["tp"],
            "pp": pp,
            "vp": vp,
            "cp": p["cp"],
            "zero": 2 if pp > 1 else 3,
            "micro_batch": b["mbs"] or max(1, b["gbs"] // p["dp"] // pp),
            "overlap": ("dp", "tp") if raw["options"].get("async_tp") else ("dp",),
            **_titan_recompute(raw["recompute"], model.num_layers // (pp * vp)),
        },
    )


def _titan_recompute(said: str, layers: int) -> dict[str, Any]:
    """Strategy fields. `layers` are those of a stage."""
    if said in ("selective", "selective (op)"):
        some = {"recompute_modules": ("mlp",), "recompute_layers": round(layers * 2 / 3)}
        return {"recompute": "selective", **some}
    if said == "selective (layer)":
        return {"recompute": "full", "recompute_layers": layers // 2}
    if said not in ("none", "full"):
        raise UntoldError(f"recompute {said!r}")
    return {"recompute": said}


def _generation(raw: Raw) -> str:
    return "torchtitan-2025" if "/2025" in raw["id"] else "torchtitan-2024"


MOSAIC = Dialect("mosaic", _mpt, _mpt_seconds, lambda raw: "llm-foundry")
TORCHTITAN = Dialect(
    "torchtitan",
    _titan,
    printed("step_time_s_derived"),
    _generation,
    peak("peak_memory_gib", unit=2**30, kind="reserved"),  # max_reserved (torchtitan/components/metrics.py)
)
