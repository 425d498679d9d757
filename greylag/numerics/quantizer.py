"""Quantizer: how one linear layer represents the operands of its three GEMMs.

It holds what outlives a call: delayed scales, the count of Inf and NaN, the counter of stochastic rounding, and an
`Observer` that telemetry or an audit may set for a step.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from greylag.numerics import device
from greylag.numerics.cache import Kept, keep
from greylag.numerics.formats import FORMATS, Format
from greylag.numerics.gemm import Segments, kernel
from greylag.numerics.quantize import Quantized, both_ways, cast, has_kernel, quantize, tile_of
from greylag.numerics.scaling import DelayedScale
from greylag.numerics.weight import QuantizedWeight
from greylag.spec.precision import BLOCK, GEMMS, OPERANDS, GemmName, Gemms, OperandRole, Recipe, ScaleKind

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Observer(Protocol):
    """Looks on at the GEMMs of a layer."""

    def quantized(self, gemm: GemmName, role: OperandRole, source: Tensor, operand: Quantized) -> None:
        """`source` (M, K) became an operand of a GEMM."""

    def multiplied(self, gemm: GemmName, a: Quantized, b: Quantized, kernel: str, dtype: torch.dtype) -> None:
        """The GEMM of `a` (M, K) and `b` (K, N) was computed by `kernel`, its result in a dtype."""

    def kept(self, what: Literal["input", "attention output", "SwiGLU input"], kept: Kept) -> None:
        """A matrix was kept for backward."""


class Quantizer(nn.Module):
    """Quantizes the operands of one layer by the recipe of each GEMM."""

    nonfinite: Tensor
    """Tiles seen with Inf or NaN, before a saturating cast could hide them. Reset by whoever reads it."""
    draws: Tensor
    """How often stochastic rounding has drawn; with the layer's seed it says what is drawn next."""

    def __init__(self, recipe: Recipe | Gemms) -> None:
        super().__init__()
        self.gemms = recipe if isinstance(recipe, Gemms) else Gemms(recipe, recipe, recipe)
        self.seed = 0
        """Of stochastic rounding: below 2**32, and of a layer and a rank their own."""
        self.observer: Observer | None = None
        self.register_buffer("nonfinite", torch.zeros((), dtype=torch.int64), persistent=False)
        for gemm in GEMMS:
            recipe = self.gemms.of(gemm)
            for role in OPERANDS[gemm]:
                operand = recipe.operand(role)
                if operand.is_scaled and operand.timing == "delayed":
                    self.add_module(self._scale_of(gemm, role), DelayedScale(FORMATS[operand.format], recipe))
                if operand.rounding == "stochastic":
                    self.register_buffer("draws", torch.zeros((), dtype=torch.int64))

    @property
    def watcher(self) -> Observer | None:
        """Who is told of this pass: nobody in evaluation and recompute, which leave no trace."""
        return self.observer if self.training else None

    @property
    def counter(self) -> Tensor | None:
        """What counts the tiles with Inf or NaN in this pass."""
        return self.nonfinite if self.training else None

    @property
    def keeps_forward(self) -> bool:
        """Whether it is the forward's operand that is kept of the input."""
        ours, theirs = self.gemms.weight_gradient, self.gemms.forward
        return ours == theirs and (ours.retiles or ours.input.granularity == "tensor")

    def _scale_of(self, gemm: GemmName, role: OperandRole) -> str:
        """Name of a delayed scale: GEMMs of one recipe share the role's, another recipe has its own."""
        users = [g for g in GEMMS if role in OPERANDS[g]]
        first = next(g for g in users if self.gemms.of(g) == self.gemms.of(gemm))
        return f"{role}_scale" if first == users[0] else f"{first.replace('-', '_')}_{role}_scale"

    def delayed(self, gemm: GemmName, role: OperandRole) -> DelayedScale | None:
        """What an operand takes its scale from, if from earlier steps."""
        scale: DelayedScale | None = getattr(self, self._scale_of(gemm, role), None)
        return scale

    def tiles(self, gemm: GemmName, role: OperandRole) -> tuple[Format, ScaleKind] | None:
        """Format and scale of an operand in 1x128 tiles such as kernels make; None for any other."""
        recipe = self.gemms.of(gemm)
        operand = recipe.operand(role)
        plain = operand.timing == "current" and operand.rounding == "nearest"
        if not (operand.is_scaled and operand.granularity == "1x128" and plain):
            return None
        how = FORMATS[operand.format], recipe.scale
        return how if has_kernel(*how) else None

    def quantize(
        self,
        gemm: GemmName,
        role: OperandRole,
        x_MK: Tensor,
        along_rows: bool = True,
        turn: bool = False,
        groups: Sequence[tuple[int, int]] = (),
    ) -> Quantized:
        """`x` (M, K) as an operand of a GEMM, contracted along its rows or its columns.

        `groups`: (first row, number of rows) of what is multiplied apart, first rows at multiples of 128; a scale for
        a column is one for each. `turn` as in `quantize.quantize`.
        """
        recipe = self.gemms.of(gemm)
        operand = recipe.operand(role)
        if not operand.is_scaled:
            return cast(x_MK, DTYPES[operand.format])
        tile = tile_of(operand.granularity, along_rows, len(groups) > 1)
        one_for_each = operand.granularity == "row" and tile[0] == BLOCK
        quantized = quantize(
            x_MK,
            FORMATS[operand.format],
            tile,
            recipe.scale,
            self.delayed(gemm, role),
            self.counter,
            turn,
            [(start // BLOCK, -(-count // BLOCK)) for start, count in groups] if one_for_each else (),
            self._noise(x_MK.device) if operand.rounding == "stochastic" else None,
        )
        return self.made(gemm, role, x_MK, quantized)

    def made(self, gemm: GemmName, role: OperandRole, source_MK: Tensor | None, operand: Quantized) -> Quantized:
        """The operand, once the observer, if any, has heard of it; without one the source may be gone."""
        if self.watcher:
            assert source_MK is not None
            self.watcher.quantized(gemm, role, source_MK, operand)
        return operand

    def _noise(self, device: torch.device) -> torch.Generator:
        self.draws += 1
        return torch.Generator(device).manual_seed((self.seed << 32) + int(self.draws))

    def keep(self, x_PK: Tensor, forward: Quantized, segments: Segments) -> Kept:
        """The layer's input, kept for the weight gradient; `forward` is what the forward GEMM takes of it."""
        if not self.keeps_forward:
            forward = self.quantize("weight-gradient", "input", x_PK, along_rows=False, groups=segments)
        return self.keep_operand(forward)

    def keep_operand(self, q: Quantized) -> Kept:
        """The input, kept as an operand."""
        kept = keep(q, self.gemms.weight_gradient.scale)
        if self.watcher:
            self.watcher.kept("input", kept)
        return kept

    def restored(self, x: Quantized, segments: Segments) -> Quantized:
        """What was kept of the input, as the weight gradient takes it."""
        recipe = self.gemms.weight_gradient
        if not recipe.input.is_scaled:
            return cast(x.dequantize(), DTYPES[recipe.input.format])
        if x.scale_inv is None:
            return self.quantize("weight-gradient", "input", x.dequantize(), along_rows=False, groups=segments)
        if recipe.retiles and x.tile == (1, BLOCK):
            return self.quantize("weight-gradient", "input", x.dequantize(), along_rows=False, turn=True)
        return x

    def gradients(self, g_PN: Tensor, segments: Segments, both: bool) -> tuple[Quantized, Quantized | None]:
        """The output gradient as the input gradient takes it and, if `both` are wanted, the weight gradient."""
        how = self.tiles("input-gradient", "grad") if both else None
        if how and how == self.tiles("weight-gradient", "grad") and device.by_kernel(g_PN, "quantize"):
            rows, columns = both_ways(g_PN, *how, self.counter)
            self.made("input-gradient", "grad", g_PN, rows)
            return rows, self.made("weight-gradient", "grad", g_PN, columns)
        along = self.quantize("input-gradient", "grad", g_PN)
        dgrad, wgrad = self.gemms.input_gradient, self.gemms.weight_gradient
        if not both:
            return along, None
        if dgrad == wgrad and (along.scale_inv is None or wgrad.grad.granularity == "tensor"):
            return along, along
        return along, self.quantize("weight-gradient", "grad", g_PN, along_rows=False, groups=segments)

    def weights(self, gemm: GemmName, w: Tensor) -> list[Quantized]:
        """One operand (N, K) per weight of `w` (N, K) or (E, N, K); blocks never reach into the next expert.

        Forward contracts K, the input gradient N. A weight that was gathered as codes is not quantized again.
        """
        if isinstance(w, QuantizedWeight):
            return w.operands()
        N, K = w.shape[-2:]
        if w.dim() == 3 and N % BLOCK:
            w = nn.functional.pad(w, (0, 0, 0, -N % BLOCK))
        edges = [(start, w.shape[-2]) for start in range(0, w.numel() // max(K, 1), w.shape[-2])]
        rows = self.quantize(gemm, "weight", w.reshape(-1, K), along_rows=gemm == "forward", groups=edges)
        return [rows.rows(start, N) for start, _ in edges]

    def tell(self, gemm: GemmName, a: Quantized, b: Quantized, result: Tensor) -> None:
        """Let the observer, if any, know of a GEMM; of several experts' `a` is whole and `b` the first."""
        if self.watcher:
            self.watcher.multiplied(gemm, a, b, kernel(a, b), result.dtype)

    def extra_repr(self) -> str:
        """The precision of each operand, and of each GEMM that departs from the forward's recipe."""
        forward = self.gemms.forward
        text = ", ".join(f"{role} {forward.operand(role)}" for role in get_args(OperandRole))
        for gemm in GEMMS[1:]:
            recipe = self.gemms.of(gemm)
            if recipe != forward:
                text += f"; {gemm} {' x '.join(str(recipe.operand(role)) for role in OPERANDS[gemm])}"
        return text
