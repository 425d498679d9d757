"""Memory of fused layers: what stands on a rank of a pipeline stage at each moment that can be the peak.

Beside what rests (`memory_rest`) stand the activations of the micro-batches in flight, and what the head, a layer's
forward or backward, or the optimizer makes for a while (`transients`). Megatron-Core's and FSDP's layout. Formulas take
Python numbers or numpy arrays.
"""

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from greylag.sim.inflight import in_flight
from greylag.sim.memory_rest import resting
from greylag.sim.transients import backward_moments, forward_moment, head_moments
from greylag.spec.holdings import Chunk, Number, Weights, chunk_weights, chunks, layer_weights, on_rank, state_shards
from greylag.spec.job import Job
from greylag.spec.kept_fused import Layer, Term, kept, layer_kinds, probabilities, waiting_bytes
from greylag.spec.model import Model
from greylag.spec.precision import BYTES, Precision


@dataclass(frozen=True)
class Stage:
    """Bytes of a rank of one stage: what `rests`, and what stands beside it at each of the `moments`."""

    rests: Mapping[str, Number]
    moments: Mapping[str, Mapping[str, Number]]

    @property
    def by_moment(self) -> dict[str, Number]:
        """Allocated bytes at each moment."""
        rest = sum(self.rests.values())
        return {name: rest + sum(beside.values()) for name, beside in self.moments.items()}

    @property
    def total(self) -> Number:
        """Allocated bytes at the peak."""
        return np.maximum.reduce(np.broadcast_arrays(*self.by_moment.values()))

    @property
    def moment(self) -> str:
        """The moment of the peak; of one candidate."""
        sizes = self.by_moment
        return max(sizes, key=lambda name: float(sizes[name]))

    @property
    def components(self) -> dict[str, Number]:
        """Bytes by component at the peak; they add up to `total`."""
        which = np.argmax(np.broadcast_arrays(*self.by_moment.values()), axis=0)
        every: dict[str, Number] = dict(self.rests)
        for number, beside in enumerate(self.moments.values()):
            for name, size in beside.items():
                every[name] = every.get(name, 0.0) + np.where(which == number, size, 0.0)
        return every


@dataclass(frozen=True)
class Layers:
    """What all stages of a job ask for: each layer's kind, and what each kind keeps of one micro-batch."""

    job: Job
    tokens: Number
    """Of a rank's micro-batch, before sequence parallelism."""
    kinds: tuple[Layer, ...]
    terms: dict[Layer, list[Term]]

    @classmethod
    def of(cls, job: Job) -> "Layers":
        """The layers of a job."""
        s, soft, b = job.strategy, job.software, BYTES[job.precision.high]
        tokens, kinds = s.micro_batch * job.sequence / s.cp, layer_kinds(job.model, job.precision)
        terms = {kind: kept(job.model, job.precision, kind, tokens, s, soft) for kind in dict.fromkeys(kinds)}
        if soft.attention == "unfused":
            extra = probabilities(job.model, tokens, job.sequence, s, soft, b)
            terms = {kind: [*each, extra] for kind, each in terms.items()}
        return cls(job, tokens, kinds, terms)

    def count(self, chunk: Chunk) -> Mapping[Layer, int]:
        """How many layers of a chunk are of each kind."""
        return count_kinds(self.job.model, self.job.precision, chunk)


@functools.lru_cache(maxsize=4096)
def count_kinds(model: Model, precision: Precision, chunk: Chunk) -> Mapping[Layer, int]:
    """How many layers of a chunk are of each kind; a prediction module's layer is like the last."""
    kinds = layer_kinds(model, precision)
    counts = Counter(kinds[layer] for layer in chunk.layers)
    if chunk.has_head and model.num_mtp_layers:
        counts[kinds[-1]] += model.num_mtp_layers
    return counts


def fused_stage(layers: Layers, rank: int) -> Stage:
    """The account of the ranks at place `rank` of the pipeline."""
    held = chunks(layers.job.model, layers.job.strategy, rank)
    return Stage(resting(layers.job, held), _moments(layers, rank, held))


def _moments(layers: Layers, rank: int, held: tuple[Chunk, ...]) -> dict[str, dict[str, Number]]:
    """What stands beside what rests, at each moment that can be the peak."""
    job, s, tokens = layers.job, layers.job.strategy, layers.tokens
    beside = _activations(layers, rank, held) | _gathered(job, held) | _waiting(job, rank, held, tokens)
    if s.pp > 1:  # the gradient handed on by the last backward still lies there
        beside["pipeline messages"] = tokens / s.sequence_cut * job.model.hidden_size * BYTES[job.precision.high]
    moments: dict[str, dict[str, Number]] = {"optimizer": _optimizer(job, held)}
    for kind in dict.fromkeys(kind for chunk in held for kind in layers.count(chunk)):
        terms = layers.terms[kind]
        again = {"computed again": sum(t.bytes * (1 - _share(job, t, 1)) for t in terms)}
        name = "expert layer" if kind.is_moe else "layer"
        for when, sizes in backward_moments(job, kind, terms, tokens).items():
            moments[f"backward of {name}: {when}"] = beside | again | sizes
        if kind.is_moe:
            moments[f"forward of {name}"] = beside | forward_moment(job, tokens)
    if any(chunk.has_head for chunk in held):
        for when, sizes in head_moments(job, tokens).items():
            moments[when] = beside | sizes
    return moments


def _activations(layers: Layers, rank: int, held: tuple[Chunk, ...]) -> dict[str, Number]:
    """By operator, of all micro-batches in flight; offloaded, of the layer at work and the one on its way alone."""
    job, s = layers.job, layers.job.strategy
    sizes: dict[str, Number] = {}
    flying = in_flight(s, rank, job.num_micro_batches)
    for chunk, times in zip(held, flying, strict=True):
        for kind, count in layers.count(chunk).items():
            for term in layers.terms[kind]:
                share = _share(job, term, len(chunk.layers))
                if share:
                    sizes[term.name] = sizes.get(term.name, 0.0) + times * (count * share) * term.bytes
    if "activations" not in s.offload:
        return sizes
    in_all = sum(len(chunk.layers) * times for chunk, times in zip(held, flying, strict=True))
    on_device = np.minimum(1.0, 2 / np.maximum(in_all, 1))
    return {name: size * on_device for name, size in sizes.items()}


def _share(job: Job, term: Term, layers: int) -> float:
    """Share of a term that recompute leaves in a stage of so many layers. Full recompute keeps a layer's input, the
    first norm's; a whole feed-forward layer computed again takes its activation with it."""
    s, norms = job.strategy, 1 if job.model.parallel_block else 2
    if s.recompute == "none" or not layers:
        return 1.0
    reached = 1.0 if s.recompute_layers is None else min(1.0, s.recompute_layers / layers)
    if s.recompute == "full":
        return 1 - reached * (1 - 1 / norms if term.name == "norm input" else 1.0)
    modules = set(s.recompute_modules)
    is_dropped = term.module in modules or (term.module == "activation" and bool(modules & {"mlp", "moe"}))
    return 1 - reached * is_dropped


def _waiting(job: Job, rank: int, held: tuple[Chunk, ...], tokens: Number) -> dict[str, Number]:
    """What zero-bubble schedules keep for weight gradients put off: of `rank` micro-batches in ZB-H1, of twice as many
    in ZB-H2 (arXiv 2401.10241, table 2)."""
    s = job.strategy
    times = {"zb-h1": rank, "zb-h2": 2 * rank}.get(s.schedule, 0) if s.pp > 1 else 0
    if not times:
        return {}
    b, flying = BYTES[job.precision.high], in_flight(s, rank, job.num_micro_batches)[0]
    alike = Counter(job.model.is_moe_layer(layer) for chunk in held for layer in chunk.layers)
    kinds = {job.model.is_moe_layer(layer): layer for chunk in held for layer in chunk.layers}
    each = sum(alike[kind] * waiting_bytes(job.model, layer, tokens, s, b) for kind, layer in kinds.items())
    return {"weight gradients put off": np.clip(job.num_micro_batches - flying, 0, times) * each}


@functools.lru_cache(maxsize=4096)
def _weights_of_layers(model: Model, held: tuple[Chunk, ...]) -> tuple[Weights, ...]:
    """The different weights of the layers of one rank."""
    weights = layer_weights(model)
    return tuple({weights[n]: None for chunk in held for n in chunk.layers})


def _largest(job: Job, held: tuple[Chunk, ...]) -> Number:
    """Elements of the rank's largest layer, whole over dp."""
    sizes = [sum(on_rank(w, job.strategy)) for w in _weights_of_layers(job.model, held)]
    return np.maximum.reduce(np.broadcast_arrays(*sizes)) if sizes else 0.0


def _gathered(job: Job, held: tuple[Chunk, ...]) -> dict[str, Number]:
    """Buffers of sharded data parallelism. At ZeRO-3 weights of two layers as they are gathered, the buffer that one
    came in, embedding and head; from ZeRO-2 a layer's gradients before they are scattered, in the compute dtype and as
    they are reduced (torch, distributed/fsdp/_fully_shard/_fsdp_collectives.py), or in a pipeline the whole stage's,
    which are scattered behind the last micro-batch (torch, distributed/pipelining/stage.py,
    backward_maybe_with_nosync). FP32 weights below ZeRO-3 have a whole copy as they are gathered."""
    s, zero, soft = job.strategy, np.asarray(job.strategy.zero), job.software
    high, grad = BYTES[job.precision.high], BYTES[soft.gradients]
    in_codes = 1.0 if job.precision.is_fp8 and job.precision.parameter_gather == "fp8" else high
    weights = chunk_weights(job.model, held)
    whole, linear = sum(on_rank(weights, s)), weights.linear / s.tp + on_rank(weights, s)[1]
    is_full = soft.parameters == "fp32"
    sizes: dict[str, Number] = {}
    if is_full and high < 4 and np.any(zero < 3):
        sizes["gathered weights"] = np.where(zero < 3, (whole - linear) * high + linear * in_codes, 0.0)
    if np.all(zero < 2):
        return sizes
    layer = _largest(job, held)
    outer = job.model.vocab_size * job.model.hidden_size / s.tp * sum(c.has_embedding + c.has_head for c in held)
    at_once = np.where(zero >= 3, 3 * layer * in_codes + outer * high, 0.0)
    sizes["gathered weights"] = sizes.get("gathered weights", 0.0) + at_once
    before = whole * grad if is_full and s.pp > 1 else layer * (high + grad)
    sizes["gradients before scatter"] = np.where(zero >= 2, before, 0.0)
    return sizes


def _optimizer(job: Job, held: tuple[Chunk, ...]) -> dict[str, Number]:
    """The update itself works in place, a chunk of each tensor at a time (TransformerEngine's and torch's fused Adam);
    offloaded state passes through two buckets of a layer."""
    if "optimizer" not in job.strategy.offload:
        return {"optimizer's buckets": 0.0}
    return {"optimizer's buckets": 2 * 4.0 * _largest(job, held) / state_shards(job.strategy)[0]}
