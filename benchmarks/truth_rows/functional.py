"""Megatron-LM's functional tests (tests/functional_tests/test_cases): golden values of its CI, small models, true
runs.

Rules of the source: memory is max_memory_allocated of the last rank; seconds mean something for tags `memory_speed`
and `release` alone. Where no recipe names the platform, a case runs on one node of eight (tests/test_utils/recipes:
nodes 1, gpus 8), of four where its name says 1N4G or 1node on GB200, of as many as one replica takes where the batch
is too small for more. Megatron's defaults (megatron/training/arguments.py): learned positions, LayerNorm, GELU,
biases (left out with experts and MLA, where a Model has none), tied embeddings, FP32 gradients, no sharded optimizer,
FFN of four hidden widths (8/3 rounded to 64 with SwiGLU), vocabulary of 50257 (GPT-2's) padded to 128 per
tensor-parallel rank, micro-batch and batch as printed, dropout of 0.1, the unfused loss; a local implementation has no
flash attention.
"""

import re
from typing import Any

from msgspec.structs import replace

from greylag.spec.job import Job
from greylag.spec.model import Model
from greylag.spec.software import Loss, Software
from truth_rows.bridge import megatron_precision
from truth_rows.dims import GPT2_VOCAB, dense_layers, model_of
from truth_rows.row import (
    Dialect,
    Raw,
    UntoldError,
    balanced_stages,
    cluster,
    layout_stages,
    make_job,
    modules,
    overlapped,
    peak,
    preset,
    printed,
)

_PRECISIONS = {
    "bf16": "bf16",
    "fp16": "bf16",
    "bf16+fp8:tensorwise": "fp8-tensor-current",
    "bf16+fp8:delayed": "fp8-tensor-delayed",
    "bf16+fp8:blockwise": "fp8-block128",
    "bf16+fp8:mxfp8": "mxfp8",
}


def _job(raw: Raw, models: Raw) -> Job:
    p, b, o = raw["parallel"], raw["batch"], raw["options"]
    if any(key.startswith("hybrid") for key in o):
        raise UntoldError("hybrid of Mamba and attention layers")
    if raw["precision"] not in _PRECISIONS:
        raise UntoldError(f"precision {raw['precision']!r} has no preset")
    if o.get("optimizer") == "muon":
        raise UntoldError("Muon, not AdamW")
    if not b["gbs"]:
        raise UntoldError("the global batch grows during the run")
    model = _model(raw, models)
    ranks = p["tp"] * p["pp"] * p["cp"]
    gpus = _gpus(raw, ranks)
    if gpus % ranks:
        raise UntoldError(f"{ranks} ranks on {gpus} GPUs: the case names another count")
    vp = p["vp"] or (
        model.num_layers // p["pp"] // p["layers_per_virtual_stage"] if p["layers_per_virtual_stage"] else 1
    )
    stages: tuple[int, ...] = ()
    if "pipeline-model-parallel-layout" in o:
        stages = layout_stages(o["pipeline-model-parallel-layout"])
        vp = len(stages) // p["pp"]
    elif "decoder-first-pipeline-num-layers" in o:
        stages = _uneven(model.num_layers, p["pp"], o)
    if o.get("account-for-embedding-in-pipeline-split") and p["pp"] * vp > 1:
        stages = balanced_stages(model.num_layers, p["pp"] * vp)
    fsdp = o.get("use-megatron-fsdp") and o.get("data-parallel-sharding-strategy") == "optim_grads_params"
    zero = 3 if fsdp else (1 if o.get("use-distributed-optimizer") else 0)
    dp = gpus // ranks
    return make_job(
        raw,
        model=model,
        precision=megatron_precision(_PRECISIONS[raw["precision"]]),
        on=cluster(raw["hardware"]["gpu"], gpus, raw["hardware"]["gpus_per_node"]),
        software=_software(raw),
        strategy={
            "dp": dp,
            "tp": p["tp"],
            "sequence_parallel": p["tp"] == 1 or bool(p["sequence_parallel"]),
            "pp": p["pp"],
            "cp": p["cp"],
            "vp": vp,
            "ep": p["ep"] if model.moe else 1,
            "etp": p["etp"] if model.moe else None,
            "zero": zero if zero < 2 or dp * p["cp"] > 1 else 1,
            "micro_batch": b["mbs"],
            "stage_layers": stages,
            "overlap": overlapped(
                ("dp", o.get("overlap-grad-reduce")),
                ("tp", o.get("tp-comm-overlap")),
                ("ep", o.get("overlap-moe-expert-parallel-comm")),
                ("pp", vp > 1),
            ),
            "offload": ("activations",) if o.get("fine-grained-activation-offloading") else None,
            **_recompute(raw),
        },
    )


def _software(raw: Raw) -> Software:
    o = raw["options"]
    is_local = o.get("transformer-impl") == "local" and not o.get("use-flash-attn")
    fused_loss: Loss = "in-place" if o.get("cross-entropy-fusion-impl") == "te" else "compiled-parallel"
    software: Software = preset("software", _generation(raw))
    return replace(
        software,
        gradients="bf16" if o.get("grad-reduce-in-bf16") else software.gradients,
        graphs=o.get("cuda-graph-impl", "none") != "none",
        attention="unfused" if o.get("attention-backend") == "unfused" or is_local else "flash",
        dropout=o.get("attention-dropout") != 0.0,
        loss=fused_loss if o.get("cross-entropy-loss-fusion") else "parallel",
        weight_gradients="autograd" if o.get("no-gradient-accumulation-fusion") else "accumulated",
        deterministic=bool(o.get("deterministic-mode")),
        dispatch="nodes" if o.get("moe-token-dispatcher-type") == "flex" else "choices",
    )


def _model(raw: Raw, models: Raw) -> Model:
    m, o = dict(raw["model"]), raw["options"]
    if not m["ffn_hidden"]:
        m["ffn_hidden"] = int(m["hidden"] * 8 / 3) // 64 * 64 if m["swiglu"] else 4 * m["hidden"]
    if o.get("multi-latent-attention"):
        keys = ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "v-head-dim")
        m |= {"attention": "mla", **{k.replace("-", "_"): o[k] for k in keys if k in o}}
        m["qk_rope_dim"] = o["qk-pos-emb-head-dim"]
    m["head_dim"] = o.get("kv-channels")
    if m["experts"]:
        m |= {
            "moe_ffn": o.get("moe-ffn-hidden-size"),
            "shared_expert_ffn": o.get("moe-shared-expert-intermediate-size", 0),
        }
        m["dense_layers"] = dense_layers(o.get("moe-layer-freq"))
    fields: dict[str, Any] = {
        "norm": "rmsnorm" if o.get("normalization") == "RMSNorm" else "layernorm",
        "position": "rope" if o.get("position-embedding-type") in ("rope", "none") or "attention" in m else "learned",
        "bias": not o.get("disable-bias-linear") and not m["experts"] and "attention" not in m,
        "tied_embeddings": not o.get("untie-embeddings-and-output-weights"),
        "num_mtp_layers": o.get("mtp-num-layers", 0),
        "max_sequence": raw["batch"]["seq_len"],
    }
    if o.get("qk-layernorm") and "attention" not in m:
        fields["qk_norm"] = True
    multiple = o.get("make-vocab-size-divisible-by", 128) * raw["parallel"]["tp"]
    if "release" in raw["tags"] and not m["vocab"]:
        raise UntoldError("the tokenizer of a release case, and with it the vocabulary, is not printed")
    return model_of(m, models, m["vocab"] or GPT2_VOCAB, multiple, **fields)


def _gpus(raw: Raw, ranks: int) -> int:
    small = raw["hardware"]["gpu"] == "GB200" and re.search(r"1N4G|1node", raw["model"]["name"])
    gpus = int(raw["hardware"]["num_gpus"] or (4 if small else 8))
    return gpus if raw["batch"]["gbs"] % (gpus // ranks * raw["batch"]["mbs"] or 1) == 0 else ranks


def _uneven(layers: int, pp: int, o: Raw) -> tuple[int, ...]:
    first, last = o["decoder-first-pipeline-num-layers"], o["decoder-last-pipeline-num-layers"]
    return (first, *[(layers - first - last) // (pp - 2)] * (pp - 2), last)


def _recompute(raw: Raw) -> dict[str, Any]:
    said = raw["recompute"]
    if not said:
        return {}
    if said["granularity"] == "full":
        return {"recompute": "full"}  # uniform, one layer each: every layer's input is kept
    return modules(said["modules"].strip("[]").split() if said["modules"] else ["core_attn"])


def _seconds(raw: Raw, models: Raw) -> float | None:
    if not {"memory_speed", "release"} & set(raw["tags"]):
        return None
    return printed("iteration_time_s_median")(raw, models)


def _generation(raw: Raw) -> str:
    return "megatron-core-2026" if raw["environment"] == "dev" else "megatron-core-2025"


DIALECT = Dialect("megatron_functional", _job, _seconds, _generation, peak("mem_max_allocated_bytes", rank="last"))
