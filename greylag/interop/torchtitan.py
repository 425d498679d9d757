"""torchtitan: a TOML configuration of pytorch/torchtitan as a job.

The layouts of its years are read alike: degrees stand in [parallelism], or before in [training] and [experimental];
FP8 in [quantize.linear.float8], or before in [float8]. Names and defaults: torchtitan/config/job_config.py at the
parent of 76d5c72e2, torchtitan/config_manager.py at 0f5bafa33 and 40f79d79f. Later configurations are Python.
"""

import difflib
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from greylag.interop.arguments import Arguments, Remarks
from greylag.interop.jobfile import Imported, count_devices, data_parallel, finish, newest_software, place
from greylag.interop.torchtitan_models import MODELS
from greylag.interop.words import number_in
from greylag.spec.error import SpecError

_SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v", "interleavedzerobubble": "interleaved", "loopedbfs": "interleaved",
    "flexibleinterleaved1f1b": "interleaved",
}  # fmt: skip
_NEAR = ("interleavedzerobubble", "loopedbfs", "flexibleinterleaved1f1b")
_IRRELEVANT = re.compile(
    r"(job|profiling|metrics|checkpoint|comm|validation|memory_estimation|fault_tolerance)\..*"
    r"|debug\.(seed|print.*|save.*)"
    r"|model\.(tokenizer_path|hf_assets_path|print_after_conversion|norm_type|tokenizer_name)|optimizer\.(fused|foreach"
    r"|implementation)|training\.(dataset.*|gc_.*|dataloader.*|seed|data_parallel_type|mixed_precision_.*)"
    r"|lr_scheduler\.(decay_.*|total_steps|lr_min|min_lr_factor)|parallelism\.context_parallel_load_balancer"
    r"|activation_checkpoint\.(early_stop|preserve.*|determinism.*|debug|visualize.*)|compile\.(components|backend)"
    r"|experimental\.custom_.*|float8\.emulate|quantize\.linear\.float8\.emulate|.*mxfp8_dim1_cast_kernel_choice"
)
_APPROXIMATED = {
    r".*loss_parallel": "the loss is counted as cut over tp",
    r"parallelism\.(context_parallel_rotate_method|expert_parallel_comm_backend)": "how messages are sent",
    r"experimental\.(context_parallel_rotate_method|enable_compiled_autograd)": "how messages are sent",
    r".*precompute_float8_dynamic_scale_for_fsdp|.*force_recompute_fp8_weight_in_bwd": "one scale a weight",
    r"optimizer\.early_step_in_backward": "the update comes behind backward",
    r"debug\.(deterministic.*|moe_force_load_balance)|training\.deterministic": "usual kernels, tokens spread evenly",
    r"parallelism\.pipeline_parallel_expert_parallel_overlap": "counted where the schedule is dualpipe-v",
}


def import_toml(text: str, path: Path, cluster: str | None, given: Mapping[str, str]) -> Imported:
    """The job of a torchtitan configuration on a cluster whose size the configuration does not know.

    `given` keys (`training.steps`) win over the file's.
    """
    where = str(path)
    try:
        table = tomllib.loads(text)
    except ValueError as error:
        raise SpecError(f"{where}: not valid TOML: {error}") from None
    a = Arguments(dict(_flat(table, "", where)) | {k: [v] for k, v in given.items()}, where, prefix="")
    if "model.name" not in a or not any(name.startswith("training.") for name in a.options):
        raise SpecError(f"{where}: no [model] and [training] as torchtitan has them; another TOML cannot be imported")
    on = place(cluster, 0, 0, where)  # a configuration does not know its devices
    remarks = Remarks()
    model = _model(a)
    strategy, local = _strategy(a, remarks, model, count_devices(on, where))
    batch = a.text("training.global_batch_size", "-1")
    precision, software = _precision(a, remarks, model)
    job: dict[str, Any] = {
        "sequence": _sequence(a),
        "global_batch": local * strategy["dp"] if batch == "-1" else a.integer("training.global_batch_size"),
        "cluster": on,
        "model": model,
        "precision": precision,
        "software": software,
        "strategy": strategy,
        "run": _run(a, remarks),
    }
    a.sort_unread(remarks, _sort_name)
    return finish(job, path, "a torchtitan configuration", remarks)


def _flat(table: Mapping[str, Any], prefix: str, where: str) -> Iterator[tuple[str, list[str]]]:
    """Words of each value by its dotted key; an empty word for an empty list."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.", where)
        else:
            items = value if isinstance(value, list) else [value]
            yield prefix + key, [str(i).lower() if isinstance(i, bool) else str(i) for i in items] or [""]


def _first(a: Arguments, *names: str) -> str:
    """The first of the names that the configuration has."""
    return next((name for name in names if name in a), names[0])


def _degree(a: Arguments, axis: str) -> str:
    return _first(a, *(f"{section}.{axis}" for section in ("parallelism", "training", "experimental")))


def _sequence(a: Arguments) -> int:
    return a.integer("training.seq_len", 2048)


def _model(a: Arguments) -> dict[str, Any]:
    name, flavor = a.text("model.name"), a.text("model.flavor", "debugmodel")
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(MODELS)}"
        raise SpecError(f"{a.where}: 'model.name': {name!r} is no model that a job can say; {hint}")
    plain = re.sub(r"_(flex|varlen)(_attn)?$", "", flavor)  # the same dimensions under another attention kernel
    if plain not in MODELS[name]:
        raise SpecError(f"{a.where}: 'model.flavor': no {flavor!r} of {name}; known: {', '.join(MODELS[name])}")
    return {"name": f"{name}-{plain}", "max_sequence": _sequence(a), **MODELS[name][plain]}


def _strategy(a: Arguments, remarks: Remarks, model: dict[str, Any], devices: int) -> tuple[dict[str, Any], int]:
    """The `strategy` table, and the sequences of a data-parallel rank in a forward and backward."""
    names = {"tp": "tensor_parallel_degree", "pp": "pipeline_parallel_degree", "cp": "context_parallel_degree"}
    table: dict[str, Any] = {axis: a.integer(_degree(a, name), 1) for axis, name in names.items()}
    table["dp"] = data_parallel(table, devices, a.where)
    table |= _sharding(a, table)
    if "moe" in model:
        table["ep"] = a.integer("parallelism.expert_parallel_degree", 1)
        table["etp"] = a.integer("parallelism.expert_tensor_parallel_degree", 1)
        if table["ep"] == 1:  # experts are then cut as the rest is
            table.pop("etp")
    local = a.integer(_first(a, "training.local_batch_size", "training.batch_size"), 8)
    table["micro_batch"] = local
    if table["pp"] == 1:
        a.read |= {
            name for name in a.options if ".pipeline_parallel_" in name or name.endswith("module_fqns_per_model_part")
        }
    else:
        table |= _pipeline(a, remarks, model["num_layers"], table["pp"], local)
    table |= _recompute(a, remarks, model["num_layers"] // max(table["pp"] * table.get("vp", 1), 1))
    asynchronous = a.flag(_degree(a, "enable_async_tensor_parallel"))
    table["overlap"] = ["dp"] + ["tp"] * (asynchronous and table["tp"] > 1)
    if a.flag("training.enable_cpu_offload"):
        table["offload"] = ["optimizer"]
        remarks.approximate("training.enable_cpu_offload", "the optimizer state lies in the host's memory; parameters "
                            "and gradients do not")  # fmt: skip
    return table, local


def _sharding(a: Arguments, table: dict[str, Any]) -> dict[str, Any]:
    """FSDP2 shards over dp and cp; with several replicas it is HSDP, with nothing else DDP."""
    replicas = a.integer(_degree(a, "data_parallel_replicate_degree"), 1)
    shard = a.text(_first(a, _degree(a, "data_parallel_shard_degree"), "training.data_parallel_degree"), "-1")
    a.read |= {"training.data_parallel_degree", "parallelism.data_parallel_shard_degree"}
    shards = table["dp"] // max(replicas, 1) if shard == "-1" else number_in(shard) or 0
    if replicas * shards != table["dp"]:
        raise SpecError(f"{a.where}: data_parallel_replicate_degree {replicas} x shard degree {shard} is not the "
                        f"{table['dp']} data-parallel ranks of the cluster; give another --cluster")  # fmt: skip
    reshard = a.text(_degree(a, "fsdp_reshard_after_forward"), "default")
    if shards * table["cp"] == 1:
        return {"zero": 0}
    stays = reshard == "never" or (reshard == "default" and table["pp"] > 1)
    return {"zero": 2 if stays else 3, **({"replicas": replicas} if replicas > 1 else {})}


def _pipeline(a: Arguments, remarks: Remarks, layers: int, pp: int, local: int) -> dict[str, Any]:
    name = a.text(_degree(a, "pipeline_parallel_schedule"), "1F1B")
    schedule = _SCHEDULES.get(name.lower())
    if schedule is None:
        raise SpecError(f"{a.where}: pipeline_parallel_schedule: no {name!r}; known: {', '.join(_SCHEDULES)}")
    if name.lower() in _NEAR:
        remarks.approximate("pipeline_parallel_schedule", f"{name}; Interleaved1F1B stands in its place")
    vp = 1 if schedule in ("1f1b", "gpipe") else 2
    first = a.integer("parallelism.pipeline_parallel_first_stage_less_layers", 1)
    last = a.integer("parallelism.pipeline_parallel_last_stage_less_layers", 1)
    each = a.integer("parallelism.pipeline_parallel_layers_per_stage", 0)
    if each:
        vp = max(-(-(layers + first + last) // each) // pp, 1)
    table: dict[str, Any] = {"schedule": schedule, "vp": vp}
    points = [int(p) for p in re.findall(r"layers\.(\d{1,6})", " ".join(a.options.get(_SPLIT, [])))]
    a.read |= {_SPLIT, "parallelism.module_fqns_per_model_part"}
    if points:
        edges = [0, *points, layers]
        table["stage_layers"] = [b - e for e, b in itertools.pairwise(edges)]
        table["vp"] = max(len(table["stage_layers"]) // pp, 1)
    elif any(n.startswith("parallelism.") for n in a.options):
        table |= _weighted(layers, pp * vp, first, last)
    count = a.integer("experimental.pipeline_parallel_microbatches", 0)
    size = local // count if count else 1 if "experimental.pipeline_parallel_degree" not in a else max(local // pp, 1)
    table["micro_batch"] = max(a.integer("parallelism.pipeline_parallel_microbatch_size", size), 1)
    return table


_SPLIT = "experimental.pipeline_parallel_split_points"


def _weighted(layers: int, stages: int, first: int, last: int) -> dict[str, Any]:
    """Layers of each stage where embedding and head weigh so many layers (generate_llm_fqn_per_model_part)."""
    each, more = divmod(layers + first + last, stages)
    if stages > layers + first + last:
        return {}
    count = [each + (stage < more) for stage in range(stages)]
    count[0] -= first
    count[-1] -= last
    return {} if len(set(count)) == 1 or min(count) < 0 else {"stage_layers": count}


def _recompute(a: Arguments, remarks: Remarks, per_stage: int) -> dict[str, Any]:
    mode = a.text("activation_checkpoint.mode", "selective")
    option = a.text("activation_checkpoint.selective_ac_option", "2")
    budget = a.number("activation_checkpoint.memory_budget", 0.5)
    a.read.add("activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns")
    if mode == "full":
        return {"recompute": "full"}
    if mode == "memory_budget":
        remarks.leave_out("activation_checkpoint.mode", f"the compiler's choice within a budget of {budget:g}: memory")
        return {}
    if mode != "selective":
        return {}
    if option == "op":
        remarks.approximate("activation_checkpoint.selective_ac_option", "op keeps attention and every second GEMM; "
                            "norms and activations are computed again here, and no GEMM")  # fmt: skip
        return {"recompute": "selective", "recompute_modules": ["norm", "activation"]}
    every = number_in(option) or 0
    if every <= 1:
        return {"recompute": "full"}
    if per_stage < every:
        return {}
    return {"recompute": "full", "recompute_layers": per_stage // every}


def _precision(a: Arguments, remarks: Remarks, model: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | str]:
    """The `precision` and `software` tables."""
    software = newest_software("torchtitan", {"parameters": "fp32", "gradients": "fp32"})
    if a.text("training.dtype", "float32") == "bfloat16":
        remarks.leave_out("training.dtype", "weights, gradients and moments in BF16 without FP32 copies: memory")
    compiled = a.flag("compile.enable", "training.compile")
    if not compiled:
        remarks.approximate("compile.enable", "off; the software's constants are those of compiled layers")
    linear = "quantize.linear.float8" if any(n.startswith("quantize.") for n in a.options) else "float8"
    converters = a.words("model.converters")
    old = a.flag("float8.enable_float8_linear")
    recipe = a.text(f"{linear}.recipe_name", "tensorwise")
    gathers = a.flag(f"{linear}.enable_fsdp_float8_all_gather")
    filters = [f for f in a.words(f"{linear}.filter_fqns") if f not in ("output", "router.gate")]
    a.read |= {n for n in a.options if n.startswith(("float8.scaling_type", "quantize."))}
    if any("mx" in c for c in converters):
        table: dict[str, Any] = {"preset": "mxfp8"}
    elif old or any("float8" in c for c in converters):
        kinds = {"tensorwise": "fp8-tensor-current", "rowwise": "fp8-row", "rowwise_with_gw_hp": "fp8-row-gw-hp"}
        if recipe not in kinds:
            raise SpecError(f"{a.where}: '{linear}.recipe_name': no {recipe!r}; known: {', '.join(kinds)}")
        table = {"preset": kinds[recipe]}
        if gathers and recipe == "tensorwise":
            table["parameter_gather"] = "fp8"
    else:
        return {"preset": "bf16", "parameter_gather": "bf16"}, software
    if filters:
        remarks.approximate(f"{linear}.filter_fqns", f"{', '.join(filters)} in FP8 all the same")
    if "parameter_gather" not in table:
        remarks.approximate(f"{linear}.enable_fsdp_float8_all_gather", "off; parameters are gathered in FP32, not BF16")
    grouped = any(a.words(f"quantize.grouped_mm.{kind}.fqns") for kind in ("float8", "mx"))
    if "moe" in model and not grouped:
        kept = [{"match": "*.experts.*", "gemms": ["weight-gradient"]}] if table["preset"] == "fp8-row-gw-hp" else []
        table["overrides"] = [*kept, {"match": "*.experts.*"}]
    return table, software


def _run(a: Arguments, remarks: Remarks) -> dict[str, Any]:
    steps = a.integer("training.steps", 10000)
    warmup = a.integer(_first(a, "lr_scheduler.warmup_steps", "training.warmup_steps"), 200)
    if warmup > steps:
        remarks.approximate("warmup_steps", "warms up beyond the last step; to the last step instead")
    optimizer = a.text("optimizer.name", "AdamW")
    if optimizer not in ("AdamW", "Adam"):
        remarks.leave_out("optimizer.name", f"{optimizer}; AdamW stands in its place: state and time")
    rate = a.number("optimizer.lr", 8e-4)
    run: dict[str, Any] = {"steps": max(steps, 1), "warmup_steps": min(warmup, max(steps, 1))}
    run |= {"learning_rate": rate} if rate > 0 else {}
    run["min_learning_rate"] = max(rate, 0.0) * min(max(a.number("lr_scheduler.min_lr_factor", 0.0), 0.0), 1.0)
    defaults = {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    run |= {key: a.number(f"optimizer.{key}", default) for key, default in defaults.items()}
    norm = a.number("training.max_norm", 1.0)
    return run | ({"clip_norm": norm} if norm > 0 else {})


def _sort_name(name: str) -> tuple[str, str]:
    """(group, what to say) of a key that no table has read: irrelevant, approximated or left out."""
    if _IRRELEVANT.fullmatch(name):
        return "irrelevant", ""
    for pattern, how in _APPROXIMATED.items():
        if re.fullmatch(pattern, name):
            return "approximated", how
    return "left out", "not known here as a key of torchtitan: what it changes is not counted"
