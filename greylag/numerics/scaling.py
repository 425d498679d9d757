"""Scaling: from the largest magnitude of a tile to the factor that fits it into a format.

`scale_inv` is the factor that takes codes back to values (value = code * scale_inv), the term of
TransformerEngine and of DeepSeek's checkpoints. It is chosen just in time from the tile itself, or, for a
whole tensor, from the amax of earlier steps (`DelayedScale`). MX scales are powers of two that E8M0 holds.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from greylag.numerics.formats import E8M0_BIAS, E8M0_NAN, E8M0_SMALLEST, Format, decode_e8m0
from greylag.spec.precision import Recipe, ScaleKind

_LARGEST_SCALE = 3.3895313892515355e38
"""Where max / amax overflows FP32, TransformerEngine takes the largest BF16 instead."""
_EXPONENT = 0x7F800000
_MANTISSA = 0x007FFFFF
_FP32_MANTISSA = 23


def scale_inv_from_amax(amax: Tensor, fmt: Format, kind: ScaleKind, margin: int = 0) -> Tensor:
    """Factors `scale_inv` for FP32 `amax`, elementwise, with 2**margin of headroom; ValueError for another kind.

    - `fp32`: amax / fmt.max, and `pow2`: the power of two at or above it. The rule is TransformerEngine's
      (common/recipe/recipe_common.cuh): scale = fmt.max / amax, rounded *down* to a power of two, and 1 where amax is
      0, infinite or NaN. DeepGEMM's ceil_pow2(amax / 448) gives the same bits.
    - `mx-floor`: 2**(floor(log2 amax) - floor(log2 fmt.max)), the rule of OCP Microscaling formats (MX) 1.0, section
      6.3. It brings amax up to 2**(floor(log2 fmt.max) + 1), past fmt.max: the cast must saturate.
    - `mx-ceil`: 2**ceil(log2(amax * fp32(1 / fmt.max))), the product in FP32: TransformerEngine's MXFP8
      (common/util/ptx.cuh, float_to_e8m0) and cuBLAS's. amax ends at fmt.max, or past it by less than rounding undoes.

    Both MX scales lie in 2**-127 (also for amax 0) to 2**127, and are NaN where amax is infinite or NaN: the tile is
    lost, and shows it. TransformerEngine and torchao do so for NaN alone, and keep a finite scale for Inf.
    """
    if kind in ("mx-floor", "mx-ceil"):
        return _mx_scale_inv(amax, fmt, kind, margin)
    if kind not in ("pow2", "fp32"):
        raise ValueError(f"no kind of scale is named {kind!r}: pow2, fp32, mx-floor or mx-ceil")
    largest = torch.full((), fmt.max / 2.0**margin, dtype=torch.float32, device=amax.device)
    amax = amax.nan_to_num(nan=0.0, posinf=0.0)
    scale = torch.div(largest, amax)  # a Python number on the left would multiply by a rounded reciprocal
    scale.nan_to_num_(posinf=_LARGEST_SCALE).masked_fill_(amax == 0, 1.0)
    if kind == "pow2":
        scale = torch.bitwise_and(scale.view(torch.int32), _EXPONENT).view(torch.float32)
    return scale.reciprocal_()


def _mx_scale_inv(amax: Tensor, fmt: Format, kind: ScaleKind, margin: int) -> Tensor:
    """The two MX rules, on the exponent field of FP32. For `mx-floor` a subnormal amax counts as 2**-127."""
    if kind == "mx-floor":
        largest_exponent = math.frexp(fmt.max)[1] - 1
        field = (amax.view(torch.int32) >> _FP32_MANTISSA) + (margin - largest_exponent)
    else:
        inverse = torch.full((), 2.0**margin / fmt.max, dtype=torch.float32, device=amax.device)
        bits = (amax * inverse).view(torch.int32)
        # A carry out of the mantissa is a step to the next power of two; but in field 0, only above 2**-127
        field = ((bits + _MANTISSA) >> _FP32_MANTISSA).masked_fill_(bits <= E8M0_SMALLEST, 0)
    return decode_e8m0(field.clamp_(0, 2 * E8M0_BIAS).masked_fill_(~amax.isfinite(), E8M0_NAN))


class DelayedScale(nn.Module):
    """The scale of one operand, taken from the amax of the last steps (TransformerEngine's DelayedScaling).

    Within a step `observe` gathers the amax; `roll`, once per step and after amax was reduced over the ranks, moves
    the history on and sets the scale. State is plain tensors, so that a checkpoint restores it without ceremony.
    Until the first `roll` there is no history, and the tensor at hand decides.
    """

    history: Tensor
    scale_inv: Tensor

    def __init__(self, fmt: Format, recipe: Recipe) -> None:
        super().__init__()
        self.fmt = fmt
        self.kind: ScaleKind = recipe.scale
        self.choice: Literal["max", "most_recent"] = recipe.amax_choice
        self.margin = recipe.margin
        self.register_buffer("history", torch.zeros(recipe.amax_history))
        self.register_buffer("scale_inv", torch.zeros(()))

    def observe(self, amax: Tensor) -> Tensor:
        """Take in the amax of a tensor; return the `scale_inv` to use for it (a scalar tensor)."""
        if self.training:  # evaluation and recompute leave no trace
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
