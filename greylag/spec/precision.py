"""Precision: the number format, granularity and timing of the scale for each operand of every matrix multiply.

A linear layer is three GEMMs over three operands: forward (input x weight), input gradient (grad x weight) and
weight gradient (grad x input). Everything outside those GEMMs runs in `high`, or in FP32 where `role_table` says so:
embedding, output head, gating, norms and the attention core keep their precision, as in DeepSeek-V3 (arXiv 2412.19437,
section 3.3.1).
"""

from typing import Literal

import msgspec

FormatName = Literal["fp32", "bf16", "e4m3", "e5m2"]
Granularity = Literal["tensor", "1x128", "128x128"]
Timing = Literal["current", "delayed"]
ScaleKind = Literal["pow2", "fp32"]

BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "e4m3": 1, "e5m2": 1}
BLOCK = 128
"""Edge of a scaling block (DeepSeek-V3, arXiv 2412.19437, section 3.3)."""


class Operand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one operand of a GEMM is represented. `1x128` blocks lie along the contracted dimension."""

    format: FormatName
    granularity: Granularity = "tensor"
    timing: Timing = "current"
    """`current` takes the scale from the tensor at hand, `delayed` from the amax of earlier steps."""

    @property
    def is_fp8(self) -> bool:
        """Whether the operand is stored in 8 bits and needs a scale."""
        return self.format in ("e4m3", "e5m2")

    def __str__(self) -> str:
        return f"{self.format.upper()} {self.granularity} {self.timing}" if self.is_fp8 else self.format.upper()


class Precision(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A recipe: how the operands of linear layers are represented, and what everything else runs in."""

    name: str
    input: Operand
    weight: Operand
    grad: Operand
    """The gradient of the layer's output."""
    scale: ScaleKind = "pow2"
    amax_history: int = 1024
    """Steps that a delayed scale looks back on."""
    amax_choice: Literal["max", "most_recent"] = "max"
    margin: int = 0
    """A delayed scale leaves 2**margin of headroom."""
    high: Literal["fp32", "bf16"] = "bf16"
    """Activations between GEMMs, GEMM outputs, norms, attention, embedding and head."""

    @property
    def is_fp8(self) -> bool:
        """Whether any operand is FP8."""
        return self.input.is_fp8 or self.weight.is_fp8 or self.grad.is_fp8

    @property
    def is_delayed(self) -> bool:
        """Whether any FP8 operand takes its scale from earlier steps."""
        return any(o.is_fp8 and o.timing == "delayed" for o in (self.input, self.weight, self.grad))

    @property
    def gemm_dtype(self) -> str:
        """The dtype whose device peak bounds the linear layers: fp8, bf16 or fp32."""
        if self.input.is_fp8 and self.weight.is_fp8:
            return "fp8"
        return "bf16" if "bf16" in (self.input.format, self.weight.format) else "fp32"


def role_table(precision: Precision) -> list[tuple[str, str]]:
    """(what, representation) for each thing that a reader of the run wants to know the precision of."""
    high = precision.high.upper()
    three = f"{precision.input} x {precision.weight} -> {high}"
    return [
        ("forward GEMM (input x weight)", three),
        ("input-gradient GEMM (grad x weight)", f"{precision.grad} x {precision.weight} -> {high}"),
        ("weight-gradient GEMM (grad x input)", f"{precision.grad} x {precision.input} -> FP32"),
        ("cached input of a linear layer", str(precision.input) if precision.input.is_fp8 else high),
        ("embedding, output head", high),
        ("attention core, activations", high),
        ("norm statistics, router, softmax, RoPE, loss", "FP32"),
        ("master weights, gradients, AdamW moments", "FP32"),
        ("scales", f"{precision.scale.upper()}" if precision.is_fp8 else "none"),
    ]
