"""Job: one run, described once. Model, strategy, precision and cluster together, with the sequence, the global
batch and the settings of the run itself.

`problems()` returns every fault of a job as Findings and changes nothing; reading and writing job files is
`spec.load`'s.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from greylag.spec.cluster import Cluster
from greylag.spec.finding import Finding
from greylag.spec.model import Model
from greylag.spec.precision import Operand, Precision
from greylag.spec.strategy import Strategy

PEAKS = ("fp8", "bf16", "fp32")
"""Dtypes whose peak the simulator asks for."""


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What only the trainer reads."""

    steps: int = 1000
    data: tuple[str, ...] = ("python-stdlib",)
    """Text files, folders or glob patterns; `python-stdlib` is the source of this Python's standard library."""
    seed: int = 0
    learning_rate: float = 3e-4
    warmup_steps: int = 100
    min_learning_rate: float = 3e-5
    """Where the cosine ends."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0
    """Global gradient norm is clipped to this."""
    checkpoint_every: int = 100
    """Steps; 0 saves only at the end and when interrupted."""
    keep_checkpoints: int = 2
    tensorboard: bool = True
    store: Literal["auto", "file"] = "auto"
    """How ranks find each other: the launcher's TCP store, or a file store in the run folder."""


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A complete run. Make one with `load_job`, which fills in presets."""

    name: str
    model: Model
    precision: Precision
    cluster: Cluster
    strategy: Strategy = Strategy()
    sequence: int
    """Tokens per sequence."""
    global_batch: int
    """Sequences per step over all ranks."""
    run: Run = Run()

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.global_batch * self.sequence

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per rank and step (gradient accumulation)."""
        return self.global_batch // ((self.strategy.dp or 1) * self.strategy.micro_batch)

    def problems(self) -> list[Finding]:
        """Every fault of this job, as errors; empty when it can run."""
        return [
            *_name(self),
            *_model(self),
            *_cluster(self),
            *_grid(self),
            *_batch(self),
            *_precision(self),
            *_run(self),
        ]

    def __str__(self) -> str:
        s = self.strategy
        return (
            f"{self.name}: {self.model.name}, {self.precision.name}, {s.world} x {self.cluster.device.name}, "
            f"dp{s.dp} (replicas {s.replicas}) pp{s.pp} cp{s.cp} tp{s.tp} ep{s.ep}, ZeRO-{s.zero}, "
            f"{self.global_batch} x {self.sequence} tokens"
        )


def _error(where: str, what: str, advice: str) -> Finding:
    return Finding(level="error", where=where, what=what, advice=advice)


def _unused(where: str, struct: msgspec.Struct, names: tuple[str, ...], reason: str) -> Iterator[Finding]:
    """Settings that were given and cannot take effect."""
    for field in msgspec.structs.fields(struct):
        make = field.default_factory
        default = field.default if make is msgspec.NODEFAULT else make()
        if field.name in names and getattr(struct, field.name) != default:
            yield _error(f"{where}{field.name}", f"has no effect {reason}", "remove it")


def _positive(where: str, struct: msgspec.Struct, zero_allowed: tuple[str, ...] = ()) -> Iterator[Finding]:
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value != value or value in (float("inf"), float("-inf")):
            yield _error(f"{where}{name}", f"{value} is not a finite number", "give a finite number")
        elif value < 0 or (value == 0 and name not in zero_allowed):
            yield _error(
                f"{where}{name}",
                f"must be {'0 or more' if name in zero_allowed else 'positive'}, is {value}",
                "change it",
            )


def _name(job: Job) -> Iterator[Finding]:
    name = job.name
    if name in ("", ".", "..") or not name.isprintable() or set(name) & set("/\\"):
        yield _error("name", f"{name!r} cannot name a run's folder", "use letters, digits, - and _")


_CALIBRATED = "on 'local', whose speed calibration alone knows"


def _cluster(job: Job) -> Iterator[Finding]:
    cluster, device = job.cluster, job.cluster.device
    yield from _positive("cluster.", cluster)
    yield from _positive("cluster.device.", device)
    for dtype, peak in device.peak_tflops.items():
        if dtype not in PEAKS:
            yield _error("cluster.device.peak_tflops", f"unknown dtype {dtype!r}", f"use {', '.join(PEAKS)}")
        elif not 0 < peak < float("inf"):
            yield _error(f"cluster.device.peak_tflops.{dtype}", f"must be positive and finite, is {peak}", "change it")
    for tier in ("node", "network"):
        link = getattr(cluster, tier)
        if link:
            yield from _positive(f"cluster.{tier}.", link, ("latency_us",))
    if cluster.is_local:
        yield from _unused("cluster.", cluster, ("node", "network"), _CALIBRATED)
        yield from _unused("cluster.device.", device, ("peak_tflops", "memory_gb_per_s"), _CALIBRATED)
    if cluster.is_local and device.kind != "cpu":
        yield _error(
            "cluster.name",
            f"{cluster.name!r} stands for this machine's CPUs, but the device is {device.kind}",
            "choose a name that does not begin with 'local'",
        )


def _model(job: Job) -> Iterator[Finding]:
    model = job.model
    yield from _positive("model.", model)
    if model.mla:
        yield from _positive("model.mla.", model.mla)
    if model.moe:
        yield from _positive("model.moe.", model.moe, ("num_shared_experts", "num_dense_layers", "bias_update_rate"))
    if any(_positive("", model)) or (model.moe and model.moe.num_groups < 1):
        return
    if not model.mla and model.head_dim is None and model.hidden_size % model.num_heads:
        yield _error(
            "model.num_heads", f"{model.num_heads} does not divide hidden_size {model.hidden_size}", "set head_dim"
        )
    if not model.mla and model.num_heads % model.kv_heads:
        yield _error(
            "model.num_kv_heads", f"{model.kv_heads} does not divide num_heads {model.num_heads}", "choose a divisor"
        )
    rotary = model.mla.qk_rope_head_dim if model.mla else model.qk_head_dim
    if model.position == "rope" and rotary % 2:
        yield _error("model.head_dim", f"rotary width {rotary} is odd", "RoPE turns pairs: choose an even width")
    if model.position != "rope":
        yield from _unused("model.", model, ("rope_theta",), "without RoPE")
    if model.mla and model.position != "rope":
        yield _error("model.position", "MLA carries position in its rotary part", 'set position = "rope"')
    if model.mla and (model.bias or model.qkv_bias or model.qk_norm or model.num_kv_heads or model.head_dim):
        yield _error(
            "model.mla", "bias, qkv_bias, qk_norm, num_kv_heads and head_dim have no effect with MLA", "remove them"
        )
    if model.bias and model.qkv_bias:
        yield _error("model.qkv_bias", "has no effect beside bias, which puts one on every projection", "remove one")
    if model.moe and model.bias:
        yield _error("model.bias", "experts have no biases", "set bias = false")
    if model.moe:
        yield from _moe(model)
    if job.sequence > model.max_sequence:
        yield _error(
            "sequence", f"{job.sequence} is longer than the model's max_sequence {model.max_sequence}", "shorten it"
        )


def _moe(model: Model) -> Iterator[Finding]:
    moe = model.moe
    assert moe
    if model.activation != "swiglu":
        yield _error("model.activation", "experts are SwiGLU", 'set activation = "swiglu"')
    if moe.num_dense_layers >= model.num_layers:
        yield _error("model.moe.num_dense_layers", f"{moe.num_dense_layers} leaves no layer with experts", "lower it")
    if moe.num_experts % moe.num_groups:
        yield _error(
            "model.moe.num_groups",
            f"{moe.num_groups} does not divide num_experts {moe.num_experts}",
            "choose a divisor",
        )
    elif moe.top_k_groups > moe.num_groups:
        yield _error("model.moe.top_k_groups", f"{moe.top_k_groups} of {moe.num_groups} groups", "lower it")
    elif moe.top_k > moe.num_experts // moe.num_groups * moe.top_k_groups:
        reach = moe.num_experts // moe.num_groups * moe.top_k_groups
        yield _error(
            "model.moe.top_k",
            f"{moe.top_k} experts, but a token reaches only {reach}",
            "lower top_k or raise top_k_groups",
        )


def _grid(job: Job) -> Iterator[Finding]:
    s, model, cluster = job.strategy, job.model, job.cluster
    bad = list(_positive("strategy.", s, ("zero",)))
    yield from bad
    if bad or any(_positive("", cluster)) or any(_positive("", model)):
        return
    if s.world != cluster.num_devices:
        yield _error(
            "strategy",
            f"dp {s.dp} x pp {s.pp} x cp {s.cp} x tp {s.tp} = {s.world} ranks, "
            f"but cluster '{cluster.name}' has {cluster.num_devices}",
            "change the degrees or the cluster's size",
        )
    if (s.dp or 1) % s.replicas:
        yield _error("strategy.replicas", f"{s.replicas} does not divide dp {s.dp}", "choose a divisor")
    if s.zero > 1 and s.shards * s.cp == 1:
        yield _error("strategy.zero", f"{s.zero} has no effect: a replica has one data-parallel rank", "set zero = 1")
    if model.num_heads % s.tp:
        yield _error("strategy.tp", f"{s.tp} does not divide num_heads {model.num_heads}", "choose a divisor")
    elif not model.mla and max(model.kv_heads, s.tp) % min(model.kv_heads, s.tp):
        yield _error(
            "strategy.tp", f"{s.tp} and num_kv_heads {model.kv_heads}: neither divides the other", "choose another tp"
        )
    widths = {"model.ffn_hidden_size": model.ffn_hidden_size}
    if model.moe:
        widths |= {"model.moe.ffn_hidden_size": model.moe.ffn_hidden_size}
    for name, width in widths.items():
        if width % s.tp:
            yield _error("strategy.tp", f"{s.tp} does not divide {name} {width}", "choose a divisor")
    if s.pp > model.num_layers:
        yield _error("strategy.pp", f"{s.pp} stages for {model.num_layers} layers", "lower pp")
    if job.sequence % (2 * s.cp if s.cp > 1 else 1):
        yield _error(
            "strategy.cp", f"sequence {job.sequence} is not a multiple of 2 x cp {s.cp}", "change the sequence"
        )
    if s.ep > 1 and not model.moe:
        yield _error("strategy.ep", "the model has no experts", "remove it")
    elif model.moe and model.moe.num_experts % s.ep:
        yield _error("strategy.ep", f"{s.ep} does not divide num_experts {model.moe.num_experts}", "choose a divisor")
    if (s.shards * s.cp * s.tp) % s.ep:
        yield _error(
            "strategy.ep", f"{s.ep} does not divide the {s.shards * s.cp * s.tp} ranks of a stage", "choose a divisor"
        )


def _batch(job: Job) -> Iterator[Finding]:
    for name in ("sequence", "global_batch"):
        if getattr(job, name) < 1:
            yield _error(name, f"must be positive, is {getattr(job, name)}", "change it")
    portion = (job.strategy.dp or 1) * job.strategy.micro_batch
    if portion > 0 and job.global_batch >= 1 and job.global_batch % portion:
        yield _error(
            "global_batch",
            f"{job.global_batch} is not a multiple of dp {job.strategy.dp} x micro_batch {job.strategy.micro_batch}",
            "change one of them",
        )


def _precision(job: Job) -> Iterator[Finding]:
    p = job.precision
    yield from _positive("precision.", p, ("margin",))
    for role in ("input", "weight", "grad"):
        yield from _operand(f"precision.{role}", getattr(p, role))
    if not p.is_fp8:
        yield from _unused("precision.", p, ("scale",), "without FP8")
        if len({p.input.format, p.weight.format, p.grad.format}) > 1:
            yield _error(
                "precision", "input, weight and grad must have one format, if it is not FP8", "make them agree"
            )
    if not p.is_delayed:
        yield from _unused("precision.", p, ("amax_history", "amax_choice", "margin"), "without a delayed scale")
    kinds = {o.granularity == "tensor" for o in (p.input, p.weight, p.grad) if o.is_fp8}
    if len(kinds) > 1:
        yield _error(
            "precision", "one GEMM cannot mix a per-tensor and a block-scaled operand", "use blocks for all or for none"
        )
    if p.is_fp8 and not (p.input.is_fp8 and p.weight.is_fp8 and p.grad.is_fp8):
        yield _error("precision", "input, weight and grad must all be FP8 or none", "make them agree")
    if {p.input.granularity, p.grad.granularity} & {"128x128"} and p.is_fp8:
        yield _error("precision", "128x128 blocks are for weights; on activations and gradients they diverge "
                     "(DeepSeek-V3, appendix B.2)", 'use "1x128"')  # fmt: skip
    if p.weight.is_fp8 and p.weight.granularity == "1x128":
        yield _error(
            "precision.weight", "weights are used in both orientations and take 128x128 blocks", 'use "128x128"'
        )


def _operand(where: str, operand: Operand) -> Iterator[Finding]:
    if operand.timing == "delayed" and operand.granularity != "tensor":
        yield _error(
            where, "a delayed scale is kept per tensor only: block scales move too fast", 'set timing = "current"'
        )
    if not operand.is_fp8 and (operand.granularity != "tensor" or operand.timing != "current"):
        yield _error(where, f"{operand.format} has no scale, so granularity and timing have no effect", "remove them")


def _run(job: Job) -> Iterator[Finding]:
    run = job.run
    yield from _positive(
        "run.", run, ("seed", "warmup_steps", "min_learning_rate", "weight_decay", "checkpoint_every", "beta1", "beta2")
    )
    for name in ("beta1", "beta2"):
        if getattr(run, name) >= 1:
            yield _error(f"run.{name}", f"must lie in [0, 1), is {getattr(run, name)}", "lower it")
    if run.min_learning_rate > run.learning_rate:
        yield _error(
            "run.min_learning_rate", f"{run.min_learning_rate} exceeds learning_rate {run.learning_rate}", "lower it"
        )
    if run.warmup_steps > run.steps:
        yield _error("run.warmup_steps", f"{run.warmup_steps} exceeds steps {run.steps}", "lower it")
    if not all(run.data) or not run.data:
        yield _error(
            "run.data", "names no data" if not run.data else "a name is empty", 'give files, or ["python-stdlib"]'
        )
