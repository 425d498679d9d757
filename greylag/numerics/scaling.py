"""Scaling: from the largest magnitude of a tile to the factor that fits it into FP8.

`scale_inv` is the factor that takes codes back to values (value = code * scale_inv), the term of
TransformerEngine and of DeepSeek's checkpoints. It is chosen just in time from the tile itself, or, for a
whole tensor, from the amax of earlier steps (`DelayedScale`).
"""

from typing import Literal

import torch
from torch import Tensor, nn

from greylag.numerics.formats import Format
from greylag.spec.precision import Precision, ScaleKind

_LARGEST_SCALE = 3.3895313892515355e38
"""Where max / amax overflows FP32, TransformerEngine takes the largest BF16 instead."""
_EXPONENT = 0x7F800000


def scale_inv_from_amax(amax: Tensor, fmt: Format, kind: ScaleKind, margin: int = 0) -> Tensor:
    """Factors `scale_inv` for FP32 `amax`, elementwise: amax / fmt.max, or the power of two at or above it.

    The rule is TransformerEngine's (common/recipe/recipe_common.cuh): scale = fmt.max / amax, rounded *down* to a
    power of two, and 1 where amax is 0, infinite or NaN. DeepGEMM's ceil_pow2(amax / 448) gives the same bits.
    """
    largest = torch.full((), fmt.max / 2.0**margin, dtype=torch.float32, device=amax.device)
    amax = amax.nan_to_num(nan=0.0, posinf=0.0)
    scale = torch.div(largest, amax)  # a Python number on the left would multiply by a rounded reciprocal
    scale.nan_to_num_(posinf=_LARGEST_SCALE).masked_fill_(amax == 0, 1.0)
    if kind == "pow2":
        scale = torch.bitwise_and(scale.view(torch.int32), _EXPONENT).view(torch.float32)
    return scale.reciprocal_()


class DelayedScale(nn.Module):
    """The scale of one operand, taken from the amax of the last steps (TransformerEngine's DelayedScaling).

    Within a step `observe` gathers the amax; `roll`, once per step and after amax was reduced over the ranks, moves
    the history on and sets the scale. State is plain tensors, so that a checkpoint restores it without ceremony.
    Until the first `roll` there is no history, and the tensor at hand decides.
    """

    history: Tensor
    scale_inv: Tensor

    def __init__(self, fmt: Format, precision: Precision) -> None:
        super().__init__()
        self.fmt = fmt
        self.kind: ScaleKind = precision.scale
        self.choice: Literal["max", "most_recent"] = precision.amax_choice
        self.margin = precision.margin
        self.register_buffer("history", torch.zeros(precision.amax_history))
        self.register_buffer("scale_inv", torch.zeros(()))

    def observe(self, amax: Tensor) -> Tensor:
        """Take in the amax of a tensor; return the `scale_inv` to use for it (a scalar tensor)."""
        self.history[0].copy_(torch.maximum(self.history[0], amax.reshape(())))
        now = scale_inv_from_amax(amax.reshape(()), self.fmt, self.kind, self.margin)
        return torch.where(self.scale_inv > 0, self.scale_inv, now)

    @torch.no_grad()
    def roll(self) -> None:
        """Close a step: set the scale for the next one. An amax of 0, Inf or NaN keeps the old scale."""
        amax = self.history[0] if self.choice == "most_recent" else self.history.max()
        new = scale_inv_from_amax(amax, self.fmt, self.kind, self.margin)
        usable = (amax > 0) & amax.isfinite()
        self.scale_inv.copy_(torch.where(usable, new, self.scale_inv))
        self.history.copy_(self.history.roll(1))
        self.history[0] = 0.0
        self.history.nan_to_num_(0.0, 0.0, 0.0)
