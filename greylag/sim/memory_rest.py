"""Memory at rest: bytes of weights, gradients and optimizer state that a rank of a stage holds from step to step, with
the FP8 copies of weights, the dummies that stand for weight gradients and the workspaces of GEMMs.

Layout of Megatron-Core and FSDP trainers, cut as the ZeRO level says. Degrees may be numpy arrays.
"""

from functools import lru_cache

import numpy as np

from greylag.spec.holdings import Chunk, Number, Weights, chunk_weights, layer_weights, on_rank, state_shards
from greylag.spec.job import Job
from greylag.spec.kept_fused import Layer, code_bytes, layer_kinds, weight_orientations
from greylag.spec.model import Model
from greylag.spec.parts import layer_parts
from greylag.spec.precision import BYTES

_MIB = 2**20
SMALL = 40.0 * _MIB
"""Bytes of batches, masks, rotary tables, counters and what else is small. Fitted: the middle of what Megatron-LM's
functional tests allocate beyond the other terms, 20 to 70 MiB (NVIDIA/Megatron-LM, tests/functional_tests,
golden values)."""


def resting(job: Job, held: tuple[Chunk, ...]) -> dict[str, Number]:
    """By component. BF16 weights have an FP32 master copy, sharded from ZeRO-1, and are whole below ZeRO-3 (Megatron's
    distributed optimizer); FP32 weights are sharded from ZeRO-1 and gathered for use (FSDP)."""
    s, soft, p = job.strategy, job.software, job.precision
    dense, experts = on_rank(chunk_weights(job.model, held), s)
    of_dense, of_experts = state_shards(s)
    whole, cut = dense + experts, dense / of_dense + experts / of_experts

    def at(level: int) -> Number:
        return np.where(np.asarray(s.zero) >= level, cut, whole)

    is_half = soft.parameters == "bf16"
    moments = (BYTES[p.first_moment.removesuffix("-root")], BYTES[p.second_moment.removesuffix("-root")])
    state = 0.0 if "optimizer" in s.offload else 1.0
    return {
        "weights": at(3 if is_half else 1) * BYTES[soft.parameters],
        "gradients": at(2) * BYTES[soft.gradients],
        "master weights": at(1) * (4.0 if is_half else 0.0) * state,
        "moments": at(1) * sum(moments) * state,
        "FP8 weights": _fp8_weights(job, held),
        "dummy weight gradients": _dummies(job, held) if soft.weight_gradients == "accumulated" else 0.0,
        "workspaces": _workspaces(job, held),
        "small things": SMALL,
    }


def _transposes(job: Job) -> bool:
    """Whether FP8 GEMMs take one layout of operands alone, as Hopper's and Ada's do and Blackwell's (4.5 PFLOP/s and
    more) do not (NVIDIA, cuBLAS documentation, cublasLtMatmul: FP8 kernels need the TN format on Ada and Hopper)."""
    return job.cluster.device.peak_tflops.get("fp8", 0.0) < 4000


def _fp8_weights(job: Job, held: tuple[Chunk, ...]) -> Number:
    """Codes of the weights, made once a step and kept over its micro-batches (TransformerEngine, is_first_microbatch);
    FP32 and sharded parameters are quantized as they are gathered or used (torchao, float8/fsdp_utils.py)."""
    s, total = job.strategy, 0.0
    if not job.precision.is_fp8 or job.software.parameters == "fp32":
        return 0.0
    kinds, transposes = layer_kinds(job.model, job.precision), _transposes(job)
    for chunk in held:
        for layer in chunk.layers:
            weights = layer_weights(job.model)[layer]
            total += _widest(kinds[layer], transposes) * (weights.linear / s.tp + on_rank(weights, s)[1])
    return np.where(np.asarray(s.zero) >= 3, 0.0, total)


def _widest(kind: Layer, transposes: bool) -> float:
    """Bytes per weight that the codes of most linear layers of a layer take, beside the weight itself."""
    recipes = [gemms.forward for _, gemms in kind.recipes]
    return max(code_bytes(r, "weight", weight_orientations(r, transposes)) if r.is_fp8 else 0.0 for r in recipes)


def _dummies(job: Job, held: tuple[Chunk, ...]) -> Number:
    """One tensor in the weights' dtype for each shape of weight, the head's among them (`weight_gradients`)."""
    s, one = job.strategy, _one_of_each_shape(job.model, held)
    return (one.cut / s.tp + one.whole + one.experts / s.expert_tp) * BYTES[job.software.parameters]


@lru_cache(maxsize=4096)
def _one_of_each_shape(model: Model, held: tuple[Chunk, ...]) -> Weights:
    """Elements of one weight of each shape; of experts, of one expert."""
    shapes: dict[tuple[int, ...], Weights] = {}
    for chunk in held:
        for layer in {model.is_moe_layer(n): n for n in chunk.layers}.values():
            for part in layer_parts(model, layer):
                if len(part.shape) > 1 and part.role != "router":
                    n, k = part.shape[-2:]
                    is_expert, size = part.role == "expert", float(n * k)
                    cut = "experts" if is_expert else "whole" if part.tp is None else "cut"
                    shapes[(n, k, is_expert)] = Weights(**{cut: size})
        if chunk.has_head:
            shapes[(model.vocab_size,)] = Weights(cut=float(model.vocab_size * model.hidden_size))
    return Weights(*(sum(column) for column in zip(*shapes.values(), strict=True))) if shapes else Weights()


def _workspaces(job: Job, held: tuple[Chunk, ...]) -> float:
    """cuBLAS's for torch and for TransformerEngine, which has four more for grouped GEMMs, one a stream.

    torch: 32 MiB on Hopper and in deterministic runs (":4096:8"), else 8.125 (aten/src/ATen/cuda/CublasHandlePool.cpp);
    TransformerEngine: 32 MiB from Hopper on, else 4 (pytorch/cpp_extensions/gemm.py).
    """
    fp8 = job.cluster.device.peak_tflops.get("fp8", 0.0)
    if job.cluster.device.kind == "cpu":
        return 0.0
    of_torch = 32.0 if job.software.deterministic or (fp8 and _transposes(job)) else 8.125
    of_engine = 32.0 if fp8 else 4.0
    has_experts = any(job.model.is_moe_layer(n) for chunk in held for n in chunk.layers)
    return (of_torch + of_engine * (1 + 4 * has_experts)) * _MIB
