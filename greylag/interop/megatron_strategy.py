"""Megatron strategy: degrees, stages, recompute, overlap and sharding of a job from Megatron's arguments.

Rules of stages: get_num_layers_to_build and PipelineParallelLayerLayout of NVIDIA/Megatron-LM d98e8a6.
"""

import re
from collections.abc import Sequence
from typing import Any

from greylag.interop.arguments import Arguments, Remarks
from greylag.interop.jobfile import data_parallel
from greylag.spec.error import SpecError
from greylag.spec.published import MOST_LAYERS
from greylag.spec.strategy import RecomputeModule

RECOMPUTE_MODULES: dict[str, RecomputeModule] = {
    "core_attn": "attention",
    "layernorm": "norm",
    "moe_act": "activation",
    "mla_up_proj": "mla_up",
    "mlp": "mlp",
    "moe": "moe",
}
"""Names of Megatron-Core's `recompute_modules` (megatron/core/transformer/transformer_config.py)."""
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def degrees(a: Arguments) -> dict[str, int]:
    """tp, pp and cp."""
    names = {"tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size", "cp": "context-parallel-size"}
    return {axis: a.integer(name, 1) for axis, name in names.items()}


def strategy_table(a: Arguments, remarks: Remarks, model: dict[str, Any], devices: int) -> dict[str, Any]:
    """The `strategy` table on so many devices."""
    d = degrees(a)
    table: dict[str, Any] = {"dp": data_parallel(d, devices, a.where), **d}
    table["micro_batch"] = a.integer("micro-batch-size", 1)
    table |= _expert_degrees(a, model)
    table |= _pipeline(a, remarks, model["num_layers"], d["pp"])
    table |= _sharding(a, remarks, table)
    table |= _recompute(a, remarks, model)
    table["overlap"] = _overlap(a, remarks, table)
    offload = ["optimizer"] if a.flag("optimizer-cpu-offload") else []
    offload += ["activations"] if a.flag("fine-grained-activation-offloading", "cpu-offloading") else []
    if "optimizer" in offload and a.number("optimizer-offload-fraction", 1.0) < 1:
        remarks.approximate("--optimizer-offload-fraction", "the whole optimizer state lies in the host's memory")
    if offload:
        table["offload"] = offload
    if not a.flag("sequence-parallel") and d["tp"] > 1:
        table["sequence_parallel"] = False
    return table


def _expert_degrees(a: Arguments, model: dict[str, Any]) -> dict[str, Any]:
    ep, etp = a.integer("expert-model-parallel-size", 1), a.integer("expert-tensor-parallel-size", 0)
    if "moe" not in model:
        return {}
    return {"ep": ep, **({"etp": etp} if etp else {})}


def _pipeline(a: Arguments, remarks: Remarks, layers: int, pp: int) -> dict[str, Any]:
    """vp, stage_layers and schedule."""
    layout = a.text("pipeline-model-parallel-layout", "")
    per_stage = a.integer("num-layers-per-virtual-pipeline-stage", 0)
    per_rank = a.integer("num-virtual-stages-per-pipeline-rank", 0)
    stages: Sequence[int] = ()
    vp = 1
    if pp == 1:
        _edges(a, 0, 1, 1)  # so that what speaks of stages is read
        return {"vp": 1}
    if layout:
        stages = layout_stages(layout, f"{a.where}: --pipeline-model-parallel-layout")
        if "m" in layout and "m" not in layout.rpartition("|")[2]:
            remarks.approximate("--pipeline-model-parallel-layout", "prediction modules stand on the last stage")
        if len(stages) % pp or sum(stages) != layers:
            raise SpecError(f"{a.where}: --pipeline-model-parallel-layout: {len(stages)} stages, {sum(stages)} layers, "
                            f"for pp {pp} and {layers} layers")  # fmt: skip
        vp = len(stages) // pp
    elif per_rank:
        vp = per_rank
    elif per_stage:
        vp = max(layers // pp // per_stage, 1)
    if vp > layers + 2:
        raise SpecError(f"{a.where}: {vp} virtual stages a rank for {layers} layers; lower them")
    if not layout:
        stages = _edges(a, layers, pp, vp)
    even = len(set(stages)) <= 1
    return {
        "vp": vp,
        "schedule": "interleaved" if vp > 1 else "1f1b",
        **({} if even else {"stage_layers": list(stages)}),
    }


def _edges(a: Arguments, layers: int, pp: int, vp: int) -> list[int]:
    """Layers of each stage in the model's order where the first or last rank has another number; else empty."""
    first, last = a.integer("decoder-first-pipeline-num-layers", 0), a.integer("decoder-last-pipeline-num-layers", 0)
    embedding = a.flag("account-for-embedding-in-pipeline-split")
    loss = a.flag("account-for-loss-in-pipeline-split")
    if pp == 1 or not (first or last or embedding or loss):
        return []
    if embedding or loss:
        each, rest = divmod(layers + embedding + loss, pp * vp)
        stages = [each - embedding, *[each] * (pp * vp - 2), each - loss]
    else:
        between = pp - (first > 0) - (last > 0)
        each, rest = divmod(layers - first - last, max(between, 1) * vp)
        ranks = [first // vp if first else each, *[each] * (pp - 2), last // vp if last else each]
        rest += first % vp + last % vp
        stages = ranks * vp
    if rest or min(stages) < 0:
        raise SpecError(f"{a.where}: {layers} layers do not come out even over pp {pp} and vp {vp} with this first and "
                        "last stage")  # fmt: skip
    return stages


def layout_stages(layout: str, where: str = "layout") -> tuple[int, ...]:
    """Layers of each stage of a `--pipeline-model-parallel-layout`: `Et*3|(tt|)*6mL` is (3, 2, 2, 2, 2, 2, 2, 0).

    `t` is a decoder layer, `|` ends a stage, `E`, `m`, `L` are the embedding, a prediction module and the loss; `x*3`
    and `(x)*3` repeat (megatron/core/transformer/pipeline_parallel_layer_layout.py). Raises SpecError on anything else.
    """
    plain = re.sub(r"[\s,'\"]", "", layout)
    for _ in range(8):
        if "*" not in plain:
            break
        plain = re.sub(r"(\(([^()]*)\)|([A-Za-z|]))\*(\d{1,4})", lambda m: (m[2] or m[3] or "") * int(m[4]), plain)
        if len(plain) > 4 * MOST_LAYERS:
            raise SpecError(f"{where}: too long")
    if not re.fullmatch(r"[EtmL|]*", plain):
        raise SpecError(f"{where}: {layout!r}: write it as Et*3|(tt|)*29m|L")
    return tuple(stage.count("t") for stage in plain.split("|"))


def _sharding(a: Arguments, remarks: Remarks, table: dict[str, Any]) -> dict[str, Any]:
    zero = 1 if a.flag("use-distributed-optimizer") else 0
    level = a.text("data-parallel-sharding-strategy", "optim_grads_params")
    if a.flag("use-megatron-fsdp", "use-custom-fsdp"):
        zero = _SHARDING.get(level, 3)
    elif a.flag("use-torch-fsdp2"):
        zero = 2 if a.flag("torch-fsdp2-no-reshard-after-forward") else 3
    replicas = a.integer("num-distributed-optimizer-instances", 1)
    if zero > 1 and table["dp"] // max(replicas, 1) * table["cp"] == 1:
        remarks.approximate("--data-parallel-sharding-strategy", "one data-parallel rank: nothing is sharded")
        zero = 1
    return {"zero": zero, **({"replicas": replicas} if replicas > 1 else {})}


def _recompute(a: Arguments, remarks: Remarks, model: dict[str, Any]) -> dict[str, Any]:
    granularity, method = a.text("recompute-granularity", ""), a.text("recompute-method", "")
    if a.flag("recompute-activations", "checkpoint-activations"):
        granularity = granularity or "selective"
    number = a.integer("recompute-num-layers", 0)
    chosen = a.words("recompute-modules")
    if a.flag("recompute-moe-layers"):
        granularity, chosen = granularity or "selective", [*chosen, "moe"]
    if granularity == "full":
        if method == "block":
            return {"recompute": "full", "recompute_layers": number} if number else {}
        if number > 1:
            remarks.approximate("--recompute-num-layers", f"the input of each layer is kept, not of each {number}")
        return {"recompute": "full"}
    if granularity != "selective":
        return {}
    modules: list[str] = []
    for name in chosen or ["core_attn"]:
        module = RECOMPUTE_MODULES.get(name)
        applies = {"mla_up": "mla" in model, "moe": "moe" in model, "activation": "moe" in model}
        if module is None:
            remarks.leave_out("--recompute-modules", f"{name} is kept: memory")
        elif applies.get(module, True) and module not in modules:
            modules.append(module)
    return {"recompute": "selective", "recompute_modules": modules} if modules else {}


def _overlap(a: Arguments, remarks: Remarks, table: dict[str, Any]) -> list[str]:
    grads, params = a.flag("overlap-grad-reduce"), a.flag("overlap-param-gather")
    fsdp = a.flag("use-torch-fsdp2")  # which prefetches by itself; Megatron's own FSDP goes by the two flags
    if grads != params and table["zero"] and not fsdp:
        one = "--overlap-grad-reduce" if grads else "--overlap-param-gather"
        remarks.approximate(one, "gradients and parameters are counted alike: both overlapped")
    steps = {
        "dp": table["dp"] * table["cp"] > 1 and (grads or params or fsdp),
        "tp": a.flag("tp-comm-overlap") and table["tp"] > 1,
        "ep": a.flag("overlap-moe-expert-parallel-comm") and table.get("ep", 1) > 1,
        # Megatron overlaps messages between stages only where a rank has several.
        "pp": not a.flag("no-overlap-p2p-communication") and table["vp"] > 1,
    }
    a.flag("overlap-p2p-comm")
    on = [axis for axis, is_on in steps.items() if is_on]
    # The default stays where there is nothing to overlap.
    return on if on or table["dp"] * table["cp"] > 1 else ["dp"]
