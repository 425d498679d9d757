"""Megatron precision: the `precision` and `software` tables of a job from Megatron's arguments.

TransformerEngine runs every linear layer of a block in FP8, MLA's down-projections among them, and keeps embedding,
head, router and attention core in BF16. Defaults: TransformerConfig of NVIDIA/Megatron-LM d98e8a6.
"""

from typing import Any

from greylag.interop.arguments import Arguments, Remarks
from greylag.interop.jobfile import newest_software
from greylag.spec.load import load_preset

_RECIPES = {"delayed": "fp8-tensor-delayed", "tensorwise": "fp8-tensor-current", "blockwise": "fp8-block128",
            "mxfp8": "mxfp8"}  # fmt: skip
_FP8_ALONE = {
    "fp8-interval", "fp8-margin", "fp8-amax-history-len", "fp8-amax-compute-algo", "fp8-recipe", "fp8-wgrad",
    "first-last-layers-bf16", "num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16", "fp4-param-gather",
    "fp8-param-gather", "no-fp8-wgrad", "disable-fp8-wgrad", "fp4-recipe", "tp-only-amax-red", "fp8-e4m3",
}  # fmt: skip
"""Options of FP8 that have no effect without it."""
_MOMENTS = {"fp32": "fp32", "bf16": "bf16", "fp16": "bf16", "fp8": "fp8"}


def precision_table(a: Arguments, remarks: Remarks, model: dict[str, Any]) -> dict[str, Any]:
    """The `precision` table."""
    fp8, fp4 = a.text("fp8-format", ""), a.text("fp4-format", "")
    a.read |= _FP8_ALONE
    if a.flag("fp8-hybrid"):
        fp8 = "hybrid"
    elif a.flag("fp8-e4m3"):
        fp8 = "e4m3"
    table: dict[str, Any] = {"preset": "bf16"}
    if a.flag("fp16"):
        remarks.approximate("--fp16", "BF16 stands in its place: as many bytes and FLOP/s")
    elif not (a.flag("bf16") or fp8 or fp4):
        table = {"preset": "fp32"}
    if fp4:
        remarks.leave_out("--fp4-format", "GEMMs in FP4; MXFP8 stands in their place, at half the speed or less")
        table = _fp8(a, remarks, model, "e4m3", "mxfp8")
    elif fp8 and fp8 != "none":
        table = _fp8(a, remarks, model, fp8, a.text("fp8-recipe", "delayed"))
    return table | _moments(a, remarks)


def _fp8(a: Arguments, remarks: Remarks, model: dict[str, Any], form: str, recipe: str) -> dict[str, Any]:
    if recipe not in _RECIPES:
        remarks.leave_out("--fp8-recipe", f"{recipe}; per-tensor current scaling stands in its place")
        recipe = "tensorwise"
    table: dict[str, Any] = {"preset": _RECIPES[recipe]}
    # E5M2 is for the gradient alone (transformer_engine.common.recipe.Format.HYBRID).
    own = load_preset("precision", table["preset"]).grad
    if own.format != (gradient := "e5m2" if form == "hybrid" else "e4m3"):
        table["grad"] = {"format": gradient}
    if recipe == "delayed":
        table["amax_history"] = max(a.integer("fp8-amax-history-len", 1), 1)
        table["amax_choice"] = a.text("fp8-amax-compute-algo", "most_recent")
        table["margin"] = a.integer("fp8-margin", 0)
    if model.get("mla"):
        table["most_sensitive"] = "B"
    if a.flag("first-last-layers-bf16"):
        table["first_layers_high"] = a.integer("num-layers-at-start-in-bf16", 1)
        table["last_layers_high"] = a.integer("num-layers-at-end-in-bf16", 1)
    if not a.switch("fp8-wgrad", True):
        table["overrides"] = [{"match": "*", "gemms": ["weight-gradient"]}]
    if a.flag("fp8-param-gather"):
        if recipe == "mxfp8":
            remarks.approximate("--fp8-param-gather", "parameters of MXFP8 travel in BF16: a Precision knows no other "
                                "gather of blocks along one dim")  # fmt: skip
        else:
            table["parameter_gather"] = "fp8"
            remarks.approximate("--fp8-param-gather", "parameters travel in FP8, and rest as the software says")
    return table


def _moments(a: Arguments, remarks: Remarks) -> dict[str, Any]:
    table: dict[str, Any] = {}
    first, second = a.text("exp-avg-dtype", "fp32"), a.text("exp-avg-sq-dtype", "fp32")
    kinds = [_MOMENTS.get(d, "fp32") for d in (first, second)]
    if "fp16" in (first, second):
        remarks.approximate("--exp-avg-dtype", "FP16 moments stand as BF16: as many bytes")
    if kinds.count("fp8") == 1:
        remarks.approximate("--exp-avg-dtype", "one moment in FP8 beside one that is not; both stand as BF16")
        kinds = ["bf16", "bf16"]
    if kinds[0] != "fp32":
        table["first_moment"] = "e4m3" if kinds[0] == "fp8" else kinds[0]
    if kinds[1] != "fp32":
        table["second_moment"] = "e5m2" if kinds[1] == "fp8" else kinds[1]
    if a.text("main-params-dtype", a.text("megatron-fsdp-main-params-dtype", "fp32")) not in ("fp32", "auto"):
        remarks.leave_out("--main-params-dtype", "master weights of 2 bytes; FP32 instead: memory")
    return table


def software_table(a: Arguments, remarks: Remarks) -> dict[str, Any] | str:
    """Megatron-Core's newest software preset, with what the arguments change of it."""
    low = a.flag("bf16") or a.flag("fp16") or a.text("fp8-format", "") != "" or a.text("fp4-format", "") != ""
    facts: dict[str, Any] = {"parameters": "bf16" if low else "fp32", "activations": "fused"}
    gradients = a.text("main-grads-dtype", a.text("megatron-fsdp-main-grads-dtype", "fp32"))
    half = a.flag("grad-reduce-in-bf16") or gradients == "bf16"
    facts["gradients"] = "bf16" if half or a.flag("no-grad-reduce-in-fp32") else "fp32"
    a.read |= {"megatron-fsdp-grad-comm-dtype", "grad-reduce-in-fp32"}
    graphs = a.text("cuda-graph-impl", "none") != "none" or a.flag("cuda-graph")
    facts |= {"graphs": True} if graphs else {}
    facts |= _layers(a, remarks)
    if a.text("moe-token-dispatcher-type", "allgather") == "flex":
        facts["dispatch"] = "nodes"  # DeepEP or HybridEP
    return newest_software("megatron-core", facts)


def _layers(a: Arguments, remarks: Remarks) -> dict[str, Any]:
    """What of a layer is fused. A local implementation has no flash attention unless told; dropout of 0.1, the unfused
    loss and weight gradients added by the GEMM are defaults."""
    is_local = a.text("transformer-impl", "transformer_engine") != "transformer_engine"
    if is_local:
        remarks.approximate("--transformer-impl", "layers are counted as TransformerEngine's: what backward keeps")
    unfused = a.text("attention-backend", "auto") == "unfused" or (is_local and not a.flag("use-flash-attn"))
    rates = [a.number(name, 0.1) > 0 for name in ("hidden-dropout", "attention-dropout")]
    if len(set(rates)) == 2:
        remarks.approximate("--hidden-dropout", "dropout of hidden states and attention is one fact: both have it")
    in_place = a.text("cross-entropy-fusion-impl", "native") == "te"
    fused = a.flag("cross-entropy-loss-fusion")
    deterministic = a.flag("deterministic-mode")
    if deterministic:
        remarks.approximate("--deterministic-mode", "deterministic kernels are slower than those counted")
    return {
        "attention": "unfused" if unfused else "flash",
        "dropout": any(rates),
        "loss": ("in-place" if in_place else "compiled-parallel") if fused else "parallel",
        "weight_gradients": "accumulated" if a.switch("gradient-accumulation-fusion", True) else "autograd",
        "deterministic": deterministic,
    }
