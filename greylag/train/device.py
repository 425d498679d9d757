"""Device: its name, and what a job asks of it that it, or its libraries, cannot do. Pure, but for the probes."""

import os
import platform
from collections.abc import Iterator

import torch

from greylag.numerics.formats import FORMATS
from greylag.numerics.gemm import device_refusal
from greylag.spec import Job
from greylag.spec.parts import parts
from greylag.spec.precision import GEMMS, OPERANDS, GemmName, Recipe

CUBLAS_MULTIPLE = 16
"""cuBLAS multiplies FP8 under one scale each only where both dims of both operands are multiples of 16 (cublasLt,
"narrow precision data types")."""


def name_of(device: torch.device) -> str:
    """What the driver calls it; a CPU, what the machine says it is."""
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return str(torch.get_device_module(device).get_device_name(device))


def device_faults(job: Job) -> list[str]:
    """Why this job cannot train on the devices of its cluster; empty if it can."""
    kind, name = job.cluster.device.kind, job.cluster.name
    if kind == "musa":
        return [f"cluster: '{name}': training on MUSA devices has not been built yet; simulate takes it"]
    if kind == "cuda" and not torch.cuda.is_available():
        return [f"cluster: '{name}' is made of CUDA devices, and torch finds none here; use local-NxM"]
    return list(cuda_faults(job, torch.cuda.get_device_capability())) if kind == "cuda" else []


def cuda_faults(job: Job, capability: tuple[int, int]) -> Iterator[str]:
    """What CUDA devices of a compute capability cannot do of a job. Nothing is emulated there without a word."""
    p, model = job.precision, job.model
    if p.attention_output != "recipe" and p.high != "bf16":
        yield 'precision.attention_output: the fused attention of CUDA takes BF16; set high = "bf16"'
    told = set()
    for part in parts(model):
        name = part.name.removesuffix(".weight")
        for gemm in GEMMS if part.is_gemm else ():
            recipe = p.gemms(name, model.num_layers).of(gemm)
            if not recipe.is_fp8:
                continue
            reason = device_refusal(capability) or _without_kernel(recipe, gemm)
            if reason is None and recipe.input.granularity == "tensor":
                reason = _cublas_refusal(job, part.shape, part.role == "expert")
            if reason and reason not in told:
                told.add(reason)
                yield f"precision: {name}, {gemm}: {reason}"


def _without_kernel(recipe: Recipe, gemm: GemmName) -> str | None:
    for role in OPERANDS[gemm]:
        operand = recipe.operand(role)
        if FORMATS[operand.format].dtype is None:
            return f"{operand.format.upper()} is emulated, on CPUs only; use e4m3 or e5m2"
        if operand.granularity in ("row", "1x32"):
            return f"{operand.granularity} scales have no kernel on CUDA yet; use 1x128 and 128x128, or tensor"
    return None


def _cublas_refusal(job: Job, shape: tuple[int, ...], is_expert: bool) -> str | None:
    tokens, rule = job.strategy.micro_batch * job.sequence, f"a multiple of {CUBLAS_MULTIPLE}, as cuBLAS wants of FP8"
    if is_expert:
        return f"an expert's tokens are seldom {rule} under one scale; use 1x128 and 128x128 blocks"
    for what, dim in (("out features", shape[-2]), ("in features", shape[-1]), ("tokens of a micro-batch", tokens)):
        if dim % CUBLAS_MULTIPLE:
            return f"{what} {dim} must be {rule} under one scale; change them, or use 1x128 and 128x128 blocks"
    return None
