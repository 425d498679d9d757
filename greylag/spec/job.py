"""Job: one run, described once. Model, strategy, precision and cluster together, with the sequence, the global
batch and the settings of the run itself.

`problems()` returns every fault of a job as Findings and changes nothing; reading and writing job files is
`spec.load`'s.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from greylag.spec.cluster import Cluster, Efficiency
from greylag.spec.fault import error, positive, unused
from greylag.spec.finding import Finding
from greylag.spec.model import Model
from greylag.spec.precision import Precision
from greylag.spec.recipe import layer_faults, recipe_faults
from greylag.spec.software import Software
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
    validate_every: int = 0
    """Steps between evaluations of the validation loss, which the last step always gets; 0 never evaluates it."""
    validation: tuple[str, ...] = ()
    """Text to evaluate, named as in `data`; empty holds out the end of `data`, which training then never sees."""
    validation_batches: int = 1
    """Global batches of sequences that each evaluation takes, the same each time."""
    telemetry_every: int = 100
    """Steps between measurements of what quantization does to each operand of each linear layer; 0 never measures."""
    store: Literal["auto", "file"] = "auto"
    """How ranks find each other: the launcher's TCP store, or a file store in the run folder."""


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A complete run. Make one with `load_job`, which fills in presets."""

    name: str
    model: Model
    precision: Precision
    cluster: Cluster
    strategy: Strategy = Strategy()
    software: Software = Software(name="greylag")
    """The framework that flies it."""
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
    def validation_sequences(self) -> int:
        """Sequences that the validation loss is the mean over; 0 without validation."""
        return self.run.validation_batches * self.global_batch if self.run.validate_every else 0

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per rank and step (gradient accumulation)."""
        return self.global_batch // (self.strategy.data_parallel * self.strategy.micro_batch)

    def problems(self) -> list[Finding]:
        """Every fault of this job, as errors; empty when it can run."""
        return [
            *_name(self),
            *_model(self),
            *_cluster(self),
            *_software(self),
            *_grid(self),
            *_pipeline(self),
            *_recompute(self),
            *_batch(self),
            *_precision(self),
            *_run(self),
        ]

    def __str__(self) -> str:
        s = self.strategy
        recompute = f", recompute {s.recompute}" if s.recompute != "none" else ""
        chunks = f" vp{s.vp}" if s.vp > 1 else ""
        return (
            f"{self.name}: {self.model.name}, {self.precision.name}, {s.world} x {self.cluster.device.name}, "
            f"dp{s.dp} (replicas {s.replicas}) pp{s.pp}{chunks} cp{s.cp} tp{s.tp} ep{s.ep}, ZeRO-{s.zero}{recompute}, "
            f"{self.global_batch} x {self.sequence} tokens"
        )


def _name(job: Job) -> Iterator[Finding]:
    name = job.name
    if name in ("", ".", "..") or not name.isprintable() or set(name) & set("/\\"):
        yield error("name", f"{name!r} cannot name a run's folder", "use letters, digits, - and _")


_CALIBRATED = "on 'local', whose speed calibration alone knows"


def _cluster(job: Job) -> Iterator[Finding]:
    cluster, device = job.cluster, job.cluster.device
    yield from positive("cluster.", cluster)
    yield from positive("cluster.device.", device)
    for dtype, peak in device.peak_tflops.items():
        if dtype not in PEAKS:
            yield error("cluster.device.peak_tflops", f"unknown dtype {dtype!r}", f"use {', '.join(PEAKS)}")
        elif not 0 < peak < float("inf"):
            yield error(f"cluster.device.peak_tflops.{dtype}", f"must be positive and finite, is {peak}", "change it")
    yield from _shares("cluster.device.efficiency.", device.efficiency)
    if device.spread is not None and device.spread > 1:
        yield error("cluster.device.spread", f"is a share of the seconds, is {device.spread:g}", "calibrate again")
    for tier in ("node", "network"):
        link = getattr(cluster, tier)
        if link:
            yield from positive(f"cluster.{tier}.", link, ("latency_us",))
    if cluster.is_local:
        yield from unused("cluster.", cluster, ("node", "network"), _CALIBRATED)
        yield from unused("cluster.device.", device, ("peak_tflops", "memory_gb_per_s"), _CALIBRATED)
    if cluster.is_local and device.kind != "cpu":
        yield error(
            "cluster.name",
            f"{cluster.name!r} stands for this machine's CPUs, but the device is {device.kind}",
            "choose a name that does not begin with 'local'",
        )


def _shares(where: str, efficiency: Efficiency) -> Iterator[Finding]:
    """Constants that are not positive, and shares of a data sheet that are beyond it."""
    yield from positive(where, efficiency)
    for field in msgspec.structs.fields(efficiency):
        value = getattr(efficiency, field.name)
        if field.default <= 1 < value:
            yield error(f"{where}{field.name}", f"is a share of the data sheet, is {value:g}", "give 1 or less")


_FUSED = ("attention", "dropout", "loss", "weight_gradients", "gathered", "deterministic")
"""Facts of a Software about layers that are not Greylag's own."""


def _software(job: Job) -> Iterator[Finding]:
    yield from positive("software.", job.software, ("grouped", "exposed"))
    if job.software.activations == "autograd":
        yield from unused("software.", job.software, _FUSED, "on Greylag's own layers (activations = 'autograd')")


def _model(job: Job) -> Iterator[Finding]:
    model = job.model
    yield from positive("model.", model, ("num_mtp_layers",))
    if model.mla:
        yield from positive("model.mla.", model.mla)
    if model.moe:
        yield from positive("model.moe.", model.moe, ("num_shared_experts", "num_dense_layers", "bias_update_rate"))
    if any(positive("", model, ("num_mtp_layers",))) or (model.moe and model.moe.num_groups < 1):
        return
    if not model.mla and model.head_dim is None and model.hidden_size % model.num_heads:
        yield error(
            "model.num_heads", f"{model.num_heads} does not divide hidden_size {model.hidden_size}", "set head_dim"
        )
    if not model.mla and model.num_heads % model.kv_heads:
        yield error(
            "model.num_kv_heads", f"{model.kv_heads} does not divide num_heads {model.num_heads}", "choose a divisor"
        )
    rotary = model.mla.qk_rope_head_dim if model.mla else model.qk_head_dim
    if model.position == "rope" and rotary % 2:
        yield error("model.head_dim", f"rotary width {rotary} is odd", "RoPE turns pairs: choose an even width")
    if model.position != "rope":
        yield from unused("model.", model, ("rope_theta",), "without RoPE")
    if model.mla and model.position != "rope":
        yield error("model.position", "MLA carries position in its rotary part", 'set position = "rope"')
    if model.mla and (model.bias or model.qkv_bias or model.qk_norm or model.num_kv_heads or model.head_dim):
        yield error(
            "model.mla", "bias, qkv_bias, qk_norm, num_kv_heads and head_dim have no effect with MLA", "remove them"
        )
    if model.bias and model.qkv_bias:
        yield error("model.qkv_bias", "has no effect beside bias, which puts one on every projection", "remove one")
    if model.window is None:
        yield from unused("model.", model, ("full_attention_every",), "without a window")
    if model.moe:
        yield from _moe(model)
    if job.sequence > model.max_sequence:
        yield error(
            "sequence", f"{job.sequence} is longer than the model's max_sequence {model.max_sequence}", "shorten it"
        )


def _moe(model: Model) -> Iterator[Finding]:
    moe = model.moe
    assert moe
    if not moe.num_shared_experts:
        yield from unused("model.moe.", moe, ("shared_width",), "without shared experts")
    if moe.num_dense_layers >= model.num_layers:
        yield error("model.moe.num_dense_layers", f"{moe.num_dense_layers} leaves no layer with experts", "lower it")
    if moe.num_experts % moe.num_groups:
        yield error(
            "model.moe.num_groups",
            f"{moe.num_groups} does not divide num_experts {moe.num_experts}",
            "choose a divisor",
        )
    elif moe.top_k_groups > moe.num_groups:
        yield error("model.moe.top_k_groups", f"{moe.top_k_groups} of {moe.num_groups} groups", "lower it")
    elif moe.top_k > moe.num_experts // moe.num_groups * moe.top_k_groups:
        reach = moe.num_experts // moe.num_groups * moe.top_k_groups
        yield error(
            "model.moe.top_k",
            f"{moe.top_k} experts, but a token reaches only {reach}",
            "lower top_k or raise top_k_groups",
        )


def _grid(job: Job) -> Iterator[Finding]:
    s, model, cluster = job.strategy, job.model, job.cluster
    bad = list(positive("strategy.", s, ("zero",)))
    yield from bad
    if bad or any(positive("", cluster)) or any(positive("", model, ("num_mtp_layers",))):
        return
    if s.world != cluster.num_devices:
        yield error(
            "strategy",
            f"dp {s.dp} x pp {s.pp} x cp {s.cp} x tp {s.tp} = {s.world} ranks, "
            f"but cluster '{cluster.name}' has {cluster.num_devices}",
            "change the degrees or the cluster's size",
        )
    if s.data_parallel % s.replicas:
        yield error("strategy.replicas", f"{s.replicas} does not divide dp {s.dp}", "choose a divisor")
    if s.zero > 1 and s.shards * s.cp == 1:
        yield error("strategy.zero", f"{s.zero} has no effect: a replica has one data-parallel rank", "set zero = 1")
    if s.tp == 1:
        yield from unused("strategy.", s, ("sequence_parallel",), "without tensor parallelism (tp = 1)")
    if model.num_heads % s.tp:
        yield error("strategy.tp", f"{s.tp} does not divide num_heads {model.num_heads}", "choose a divisor")
    elif not model.mla and max(model.kv_heads, s.tp) % min(model.kv_heads, s.tp):
        yield error(
            "strategy.tp", f"{s.tp} and num_kv_heads {model.kv_heads}: neither divides the other", "choose another tp"
        )
    widths = {"model.ffn_hidden_size": model.ffn_hidden_size}
    if model.moe:
        widths |= {"model.moe.ffn_hidden_size": model.moe.ffn_hidden_size}
        widths |= {"model.moe.shared_width": model.moe.shared_width} if model.moe.shared_width else {}
    for name, width in widths.items():
        if width % s.tp:
            yield error("strategy.tp", f"{s.tp} does not divide {name} {width}", "choose a divisor")
    if job.sequence % (2 * s.cp if s.cp > 1 else 1):
        yield error("strategy.cp", f"sequence {job.sequence} is not a multiple of 2 x cp {s.cp}", "change the sequence")
    if s.ep > 1 and not model.moe:
        yield error("strategy.ep", "the model has no experts", "remove it")
    elif model.moe and model.moe.num_experts % s.ep:
        yield error("strategy.ep", f"{s.ep} does not divide num_experts {model.moe.num_experts}", "choose a divisor")
    ranks = s.shards * s.cp * s.tp
    if ranks % (s.ep * s.expert_tp):
        of = f"{s.ep}" if s.expert_tp == 1 else f"{s.ep} x etp {s.expert_tp}"
        yield error("strategy.ep", f"{of} does not divide the {ranks} ranks of a stage", "choose a divisor")
    if s.etp is not None and not model.moe:
        yield error("strategy.etp", "the model has no experts", "remove it")
    elif model.moe and s.etp is not None and model.moe.ffn_hidden_size % s.etp:
        yield error("strategy.etp", f"{s.etp} does not divide model.moe.ffn_hidden_size", "choose a divisor")


def _pipeline(job: Job) -> Iterator[Finding]:
    s, layers = job.strategy, job.model.num_layers
    if min(s.pp, s.vp, layers) < 1:
        return
    if s.num_stages > layers + (2 if s.stage_layers else 0):
        yield error("strategy.pp", f"{s.num_stages} stages for {layers} layers", "lower pp or vp")
    if s.pp == 1:
        yield from unused("strategy.", s, ("vp", "schedule", "stage_layers"), "without pipeline stages (pp = 1)")
        return
    if s.vp > 1 and s.schedule not in ("interleaved", "zb-v", "dualpipe-v"):
        yield error("strategy.vp", f"has no effect with schedule {s.schedule!r}", 'set schedule = "interleaved"')
    elif s.schedule == "interleaved" and s.vp == 1:
        yield error("strategy.schedule", "interleaved needs vp of 2 or more", 'set vp, or schedule = "1f1b"')
    elif s.schedule in ("zb-v", "dualpipe-v") and s.vp != 2:
        yield error("strategy.vp", f"{s.schedule} folds the model once: a rank holds 2 stages", "set vp = 2")
    if s.stage_layers and len(s.stage_layers) != s.num_stages:
        yield error("strategy.stage_layers", f"{len(s.stage_layers)} for {s.num_stages} stages", "give one each")
    elif s.stage_layers and (sum(s.stage_layers) != layers or min(s.stage_layers) < 0):
        yield error("strategy.stage_layers", f"{sum(s.stage_layers)} layers of {layers}", "make them add up")
    if s.schedule == "dualpipe" and s.pp % 2:
        yield error("strategy.pp", f"{s.pp} is odd: dualpipe runs from both ends", "choose an even pp")
    elif s.schedule == "dualpipe" and min(s.micro_batch, s.data_parallel) > 0 and job.num_micro_batches == 1:
        yield error("global_batch", "one micro-batch: dualpipe feeds one in at each end", "take two or more a rank")


def _recompute(job: Job) -> Iterator[Finding]:
    s = job.strategy
    if s.recompute == "selective" and not s.recompute_modules:
        yield error("strategy.recompute_modules", "selective recompute of nothing", 'name modules, such as ["norm"]')
    if s.recompute != "selective":
        yield from unused("strategy.", s, ("recompute_modules",), f"with recompute = {s.recompute!r}")
    if s.recompute == "none":
        yield from unused("strategy.", s, ("recompute_layers",), "without recompute")


def _batch(job: Job) -> Iterator[Finding]:
    for name in ("sequence", "global_batch"):
        if getattr(job, name) < 1:
            yield error(name, f"must be positive, is {getattr(job, name)}", "change it")
    portion = job.strategy.data_parallel * job.strategy.micro_batch
    if portion > 0 and job.global_batch >= 1 and job.global_batch % portion:
        yield error(
            "global_batch",
            f"{job.global_batch} is not a multiple of dp {job.strategy.dp} x micro_batch {job.strategy.micro_batch}",
            "change one of them",
        )


def _precision(job: Job) -> Iterator[Finding]:
    yield from recipe_faults(job.precision, job.model)
    if not any(_model(job)):
        yield from layer_faults(job.precision, job.model)


def _run(job: Job) -> Iterator[Finding]:
    run = job.run
    never = ("checkpoint_every", "validate_every", "telemetry_every")
    may_be_zero = (*never, "seed", "warmup_steps", "min_learning_rate", "weight_decay", "beta1", "beta2")
    yield from positive("run.", run, may_be_zero)
    for name in ("beta1", "beta2"):
        if getattr(run, name) >= 1:
            yield error(f"run.{name}", f"must lie in [0, 1), is {getattr(run, name)}", "lower it")
    if run.min_learning_rate > run.learning_rate:
        yield error(
            "run.min_learning_rate", f"{run.min_learning_rate} exceeds learning_rate {run.learning_rate}", "lower it"
        )
    if run.warmup_steps > run.steps:
        yield error("run.warmup_steps", f"{run.warmup_steps} exceeds steps {run.steps}", "lower it")
    if not all(run.data) or not run.data:
        yield error(
            "run.data", "names no data" if not run.data else "a name is empty", 'give files, or ["python-stdlib"]'
        )
    if not run.validate_every:
        yield from unused("run.", run, ("validation", "validation_batches"), "without validate_every")
    if not all(run.validation):
        yield error("run.validation", "a name is empty", "give files, or remove it to hold out the end of run.data")
