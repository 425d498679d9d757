"""Choose: which implementation of an operator a device gets, by name, so that an audit can print it.

A pure function of what the caller knows of the device: it probes nothing and imports neither torch nor triton. Shapes
and formats that an implementation cannot take are its own to refuse (`gemm.refusal`); the caller then falls back and
says so.
"""

from importlib import import_module
from types import ModuleType
from typing import Literal, get_args

What = Literal["quantize", "swiglu + quantize", "block gemm", "grouped gemm", "tensor gemm"]
"""Operators that have more than one implementation in use."""

FP8_CAPABILITY = (8, 9)
"""The first CUDA compute capability with FP8 casts and tensor cores: PTX ISA, `cvt` and `mma` with .e4m3 (sm_89)."""


def choose(device: str, capability: tuple[int, int] | None, what: What) -> str:
    """Name of the implementation of `what` on a kind of device ("cuda", "cpu", "musa"...).

    `capability` is the CUDA compute capability (major, minor), None elsewhere. Raises ValueError for an unknown `what`,
    and for a CUDA device of unknown capability.
    """
    if what not in get_args(What):
        raise ValueError(f"{what!r} is none of {', '.join(get_args(What))}")
    if device == "cuda" and capability is None:
        raise ValueError("a CUDA device has a compute capability")
    if device == "cuda" and capability is not None and capability >= FP8_CAPABILITY:
        return "torch scaled_mm" if what == "tensor gemm" else f"triton {what}"
    if what.endswith("gemm"):
        return "FP32 mm of values"
    return f"torch {what}"


def kernels(module: Literal["gemm", "grouped", "norm", "quantize", "swiglu"]) -> ModuleType:
    """A module of kernels, imported when a device first needs it: it brings triton, which not every machine has."""
    return import_module(f"greylag.numerics.kernels.{module}")
