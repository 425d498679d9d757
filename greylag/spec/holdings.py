"""Holdings: weights that one rank of each pipeline stage holds, counted in groups instead of part by part.

`shards` counts every weight of a job; a search over a hundred thousand strategies needs the same counts in a few
operations. A group is what the axes cut alike: `cut` by tensor parallelism, `whole` on every rank, `experts` by the
expert axes. Degrees may be numpy arrays. What multi-token prediction adds (arXiv 2412.19437, section 2.2) is counted
here as the layers' framework lays it out: on the last stage, with a copy of the embedding where that is another's.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from greylag.spec.model import Model
from greylag.spec.parts import Part, layer_parts, parts
from greylag.spec.strategy import Strategy

Number = Any
"""A Python number, or a numpy array of one per candidate."""


class Weights(NamedTuple):
    """Elements of weights by how they are cut, whole model-parallel group together."""

    cut: float = 0.0
    whole: float = 0.0
    experts: float = 0.0
    linear: float = 0.0
    """Of `cut`, those of linear layers, which a recipe may quantize (MLA's whole down-projections keep precision)."""

    def plus(self, other: "Weights", times: int = 1) -> "Weights":
        """The sum, `other` so many times."""
        return Weights(*(a + times * b for a, b in zip(self, other, strict=True)))


class Chunk(NamedTuple):
    """Consecutive layers that a rank runs as one stage of the pipeline."""

    layers: tuple[int, ...]
    has_embedding: bool
    has_head: bool


def group(every: Iterable[Part]) -> Weights:
    """The trained weights among `every`, grouped."""
    total = Weights()
    for part in every:
        if part.is_buffer:
            continue
        size = float(part.size)
        if part.is_experts:
            total = total.plus(Weights(experts=size))
        else:
            linear = size if part.is_gemm and len(part.shape) > 1 and part.tp is not None else 0.0
            total = total.plus(Weights(linear=linear, **{"cut" if part.tp is not None else "whole": size}))
    return total


@functools.lru_cache(maxsize=64)
def layer_weights(model: Model) -> tuple[Weights, ...]:
    """Of each layer."""
    kinds = {model.is_moe_layer(layer): layer for layer in range(model.num_layers)}
    alike = {kind: group(layer_parts(model, layer)) for kind, layer in kinds.items()}
    return tuple(alike[model.is_moe_layer(layer)] for layer in range(model.num_layers))


@functools.lru_cache(maxsize=64)
def outer_weights(model: Model) -> tuple[Weights, Weights]:
    """(embedding and positions, final norm and head); a tied head is the embedding's own weight, given in both."""
    every = [p for p in parts(model) if p.layer is None]
    first = group(p for p in every if p.role in ("embedding", "position"))
    last = group(p for p in every if p.role not in ("embedding", "position"))
    return first, last.plus(Weights(cut=float(model.vocab_size * model.hidden_size))) if model.tied_embeddings else last


@functools.lru_cache(maxsize=64)
def prediction_weights(model: Model) -> Weights:
    """Of one multi-token prediction module: two norms, the projection that joins them, a layer and its final norm."""
    D, norms = model.hidden_size, 3 * (2 if model.norm == "layernorm" else 1)
    joining = Weights(cut=2.0 * D * D, linear=2.0 * D * D, whole=float(norms * D))
    return joining.plus(layer_weights(model)[-1])


def stage_sizes(model: Model, strategy: Strategy) -> list[int]:
    """Layers of each stage, virtual ones counted: as the strategy says, or as evenly as it goes, earlier ones first."""
    stages = strategy.num_stages
    even = [model.num_layers // stages + (n < model.num_layers % stages) for n in range(stages)]
    return list(strategy.stage_layers) or even


def stages_of(strategy: Strategy, rank: int) -> list[int]:
    """The stages that the rank at place `rank` of the pipeline runs, in the model's order for the first direction.

    An interleaved rank takes every pp-th stage (arXiv 2104.04473, section 2.2), the folded schedules (`zb-v`,
    `dualpipe-v`) one from each end, and `dualpipe` the stages at its own place and at the mirrored one, which is why
    it holds its parameters twice (arXiv 2412.19437, table 2).
    """
    s = strategy
    if s.pp > 1 and s.schedule in ("zb-v", "dualpipe-v"):
        return [rank, s.num_stages - 1 - rank]
    if s.pp > 1 and s.schedule == "dualpipe":
        return [rank, s.pp - 1 - rank]
    return [rank + s.pp * n for n in range(s.vp)]


def chunks(model: Model, strategy: Strategy, rank: int) -> tuple[Chunk, ...]:
    """What the rank at place `rank` of the pipeline runs, in the order of `stages_of`."""
    sizes = stage_sizes(model, strategy)
    starts, last = [0, *itertools.accumulate(sizes)], len(sizes) - 1
    return tuple(
        Chunk(tuple(range(starts[n], starts[n] + sizes[n])), n == 0, n == last) for n in stages_of(strategy, rank)
    )


@functools.lru_cache(maxsize=4096)
def chunk_weights(model: Model, held: tuple[Chunk, ...]) -> Weights:
    """Of the chunks of one rank, embedding, head and prediction modules on their stages."""
    first, last = outer_weights(model)
    layers, total, has_embedding = layer_weights(model), Weights(), False
    for chunk in held:
        for weights, times in Counter(layers[n] for n in chunk.layers).items():
            total = total.plus(weights, times)
        total = total.plus(first, int(chunk.has_embedding))
        has_embedding = has_embedding or chunk.has_embedding
        if not chunk.has_head:
            continue
        total = total.plus(last)
        if model.tied_embeddings and has_embedding:  # one weight serves both
            total = total.plus(Weights(cut=float(model.vocab_size * model.hidden_size)), -1)
        total = total.plus(prediction_weights(model), model.num_mtp_layers)
        if model.num_mtp_layers and not has_embedding:
            total = total.plus(first)
    return total


def on_rank(weights: Weights, strategy: Strategy) -> tuple[Number, Number]:
    """(elements but experts', elements of experts) that one rank of a stage works with."""
    s = strategy
    return weights.cut / s.tp + weights.whole, weights.experts / (s.ep * s.expert_tp)


def state_shards(strategy: Strategy) -> tuple[Number, Number]:
    """(ranks of a replica that hold the same weights but experts', the same experts)."""
    s = strategy
    dense = s.shards * s.cp
    return dense, dense * s.tp / (s.ep * s.expert_tp)
