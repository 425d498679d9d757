"""Precision: the number format, granularity and timing of the scale for each operand of every matrix multiply.

A linear layer is three GEMMs over three operands: forward (input x weight), input gradient (grad x weight) and
weight gradient (grad x input). A `Recipe` says how the operands are represented. A `Precision` is the recipe of the
run and all that surrounds it: which layers and GEMMs depart from it, in what form activations are kept for backward,
parameters and tokens are sent, and moments are stored. Everything else runs in `high`, or in FP32 where `role_table`
says so: embedding, output head, gating, norms and the attention core keep their precision, as in DeepSeek-V3 (arXiv
2412.19437, section 3.3.1).
"""

import fnmatch
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

FormatName = Literal["fp32", "bf16", "e4m3", "e5m2", "e5m6", "e3m2", "e2m3", "e2m2", "e2m1"]
Granularity = Literal["tensor", "row", "1x128", "128x128", "1x32"]
Timing = Literal["current", "delayed"]
ScaleKind = Literal["pow2", "fp32", "mx-floor", "mx-ceil"]
GemmName = Literal["forward", "input-gradient", "weight-gradient"]
OperandRole = Literal["input", "weight", "grad"]
GEMMS: tuple[GemmName, ...] = ("forward", "input-gradient", "weight-gradient")
OPERANDS: dict[GemmName, tuple[OperandRole, OperandRole]] = {
    "forward": ("input", "weight"),
    "input-gradient": ("grad", "weight"),
    "weight-gradient": ("grad", "input"),
}

BYTES: dict[str, float] = {
    "fp32": 4, "bf16": 2, "e4m3": 1, "e5m2": 1, "e5m6": 1.5, "e3m2": 1, "e2m3": 1, "e2m2": 1, "e2m1": 1
}  # fmt: skip
"""Bytes of a stored number. The formats below 8 bits are emulated, a code in a byte."""
BLOCK = 128
"""Edge of a scaling block (DeepSeek-V3, arXiv 2412.19437, section 3.3)."""
MX_BLOCK = 32
"""Length of an MX block (OCP Microscaling Formats 1.0, section 5.1)."""


class Operand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one operand of a GEMM is represented. Rows and one-dimensional blocks lie along the contracted dimension."""

    format: FormatName
    granularity: Granularity = "tensor"
    timing: Timing = "current"
    """`current` takes the scale from the tensor at hand, `delayed` from the amax of earlier steps."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """`nearest`: ties to even. `stochastic`: up with the probability of the distance, so that the mean is kept."""

    @property
    def is_scaled(self) -> bool:
        """Whether the format is so narrow (8 bits, E5M6, or less) that it needs a scale."""
        return self.format not in ("fp32", "bf16")

    @property
    def block(self) -> int:
        """Elements along the contracted dimension that share a scale; 0 for all."""
        return {"1x128": BLOCK, "128x128": BLOCK, "1x32": MX_BLOCK}.get(self.granularity, 0)

    def __str__(self) -> str:
        if not self.is_scaled:
            return self.format.upper()
        rounding = "" if self.rounding == "nearest" else f" {self.rounding}"
        return f"{self.format.upper()} {self.granularity} {self.timing}{rounding}"


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the operands of linear layers are represented."""

    name: str
    input: Operand
    weight: Operand
    grad: Operand
    """The gradient of the layer's output."""
    scale: ScaleKind = "pow2"
    """`pow2` and `fp32` are TransformerEngine's rules; MX's E8M0 scales round down (`mx-floor`) or up (`mx-ceil`)."""
    amax_history: int = 1024
    """Steps that a delayed scale looks back on."""
    amax_choice: Literal["max", "most_recent"] = "max"
    margin: int = 0
    """A delayed scale leaves 2**margin of headroom."""

    def operand(self, role: OperandRole) -> Operand:
        """The operand of a role."""
        operand: Operand = getattr(self, role)
        return operand

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        """Input, weight and grad."""
        return (self.input, self.weight, self.grad)

    @property
    def is_fp8(self) -> bool:
        """Whether any operand is FP8 (or narrower)."""
        return any(o.is_scaled for o in self.operands)

    @property
    def is_delayed(self) -> bool:
        """Whether any operand takes its scale from earlier steps."""
        return any(o.is_scaled and o.timing == "delayed" for o in self.operands)

    @property
    def retiles(self) -> bool:
        """Whether the cached input is turned from 1x128 to 128x1 tiles in backward: exact with powers of two.

        With other scales a second rounding would cost 2% more error, and the cache is made in the tiles that the
        weight gradient takes, from the input itself.
        """
        return self.input.granularity == "1x128" and self.scale == "pow2"

    @property
    def gemm_dtype(self) -> str:
        """The dtype whose device peak bounds the GEMMs: fp8, bf16 or fp32."""
        if self.input.is_scaled and self.weight.is_scaled:
            return "fp8"
        return "bf16" if "bf16" in (self.input.format, self.weight.format) else "fp32"


class Gemms(NamedTuple):
    """The recipe of each GEMM of one layer."""

    forward: Recipe
    input_gradient: Recipe
    weight_gradient: Recipe

    def of(self, gemm: GemmName) -> Recipe:
        """The recipe of a GEMM."""
        return self[GEMMS.index(gemm)]

    @property
    def is_fp8(self) -> bool:
        """Whether any of the three is FP8."""
        return any(recipe.is_fp8 for recipe in self)


class Override(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Another recipe for the layers whose name fits a pattern."""

    match: str
    """Of the layer's name, as a file pattern: `layers.0.*`, `*.attention.wo`, `*.experts.w_down`."""
    gemms: tuple[GemmName, ...] = GEMMS
    recipe: Recipe | None = None
    """In a job file a preset's name or a table; left out, the layers run in `high`."""


SensitivityClass = Literal["A", "B", "C", "D"]
SENSITIVITY: tuple[tuple[str, SensitivityClass, str], ...] = (
    ("master weights, gradient accumulation, optimizer", "A", "FP32"),
    ("norm statistics, softmax, router, RoPE, loss", "A", "FP32"),
    ("embedding, output head", "A", "high"),
    ("attention core", "B", "high"),
    ("*.attention.wq_a", "B", "MLA's down-projections: few outputs, read by every head"),
    ("*.attention.wkv_a", "B", "MLA's down-projections: few outputs, read by every head"),
    ("*.eh_proj", "B", "joins two streams at the root of a prediction module"),
    ("*.wo", "C", "its input is the attention's output, outliers and all"),
    ("*.w_down", "C", "its input is a product of two activations (SwiGLU)"),
    ("weight-gradient", "C", "the output gradient in the weight gradient is the most sensitive operand of all"),
    ("*", "D", "weights and activations of all other linear layers"),
)
"""(operator or pattern of a linear layer's name, class, why or what it runs in), first match first.

A is never FP8, B keeps high precision unless asked, C and D run in FP8. The classes are the union of DeepSeek-V3
(arXiv 2412.19437, 3.3.1), Kumar et al. (arXiv 2411.04330), Sun et al. (arXiv 2501.02423: the output gradient in the
weight gradient is the worst single tensor) and the defaults of Megatron-LM and torchao.
"""


def sensitivity(name: str, gemm: GemmName) -> SensitivityClass:
    """The class of one GEMM of a linear layer."""
    found = next(c for pattern, c, _ in SENSITIVITY if fnmatch.fnmatchcase(name, pattern))
    return "C" if gemm == "weight-gradient" and found == "D" else found


class Precision(Recipe, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The precision of a whole run."""

    high: Literal["fp32", "bf16"] = "bf16"
    """Activations between GEMMs, GEMM outputs, norms, attention, embedding and head."""
    most_sensitive: Literal["B", "C", "D"] = "C"
    """The most sensitive class of GEMM that follows the recipe (`SENSITIVITY`); those above it run in `high`."""
    first_layers_high: int = 0
    """Layers at the start whose linear layers all run in `high`."""
    last_layers_high: int = 0
    """Layers at the end whose linear layers all run in `high`."""
    overrides: tuple[Override, ...] = ()
    """Exceptions by name; a later one wins, and all win over class and place."""
    attention_output: Literal["recipe", "e5m6"] = "recipe"
    """How the input of the projection after attention is kept: `recipe` as that of any layer, beside the attention's
    own; `e5m6` once, for both, in 12 bits with power-of-two scales per 1x128 (DeepSeek-V3, section 3.3.3)."""
    swiglu_input: Literal["high", "e4m3"] = "high"
    """How SwiGLU keeps its input. From `e4m3` (1x128) its output is recomputed and not kept at all."""
    smooth_swiglu: bool = False
    """Scale each channel of SwiGLU's output by a power of two before it is quantized (arXiv 2409.12517)."""
    dispatch: Literal["high", "e4m3"] = "high"
    """How tokens travel to experts, and their gradients back; what comes back from experts travels in `high`."""
    parameter_gather: Literal["fp32", "bf16", "fp8"] = "fp32"
    """How sharded parameters travel before use. `fp8`: those of FP8 layers, quantized as the layer would."""
    first_moment: Literal["fp32", "bf16", "e4m3"] = "fp32"
    """AdamW's mean; 8-bit moments have a scale per 128 elements."""
    second_moment: Literal["fp32", "bf16", "e5m2", "e4m3-root"] = "fp32"
    """AdamW's mean of squares; `e4m3-root` stores its square root."""

    def gemms(self, name: str, num_layers: int) -> Gemms:
        """The recipe of each GEMM of the linear layer `name` (`layers.3.attention.wo`) in a model of `num_layers`."""
        return Gemms(*(self._recipe_of(name, gemm, num_layers) for gemm in GEMMS))

    def gathered(self, name: str, num_layers: int) -> Literal["fp32", "bf16", "fp8"]:
        """In what form the weight of the linear layer `name` travels when sharded parameters are gathered.

        It is FP8 or BF16 where both GEMMs that take the weight take it in that very form, so that gathering changes no
        bit: one scale per tensor or 128x128 block (others lie along one dim, and each GEMM contracts another), and no
        smoothing of the weight before it is quantized. All else travels in FP32.
        """
        forward, dgrad, _ = self.gemms(name, num_layers)
        smoothed = self.smooth_swiglu and name.endswith(".w_down")
        if self.parameter_gather == "fp32" or smoothed or forward.weight != dgrad.weight:
            return "fp32"
        if not forward.weight.is_scaled:
            return "bf16" if forward.weight.format == "bf16" else "fp32"
        serves_both = forward == dgrad and forward.weight.granularity in ("tensor", "128x128")
        is_byte = BYTES[forward.weight.format] == 1
        return "fp8" if self.parameter_gather == "fp8" and serves_both and is_byte else "fp32"

    def _recipe_of(self, name: str, gemm: GemmName, num_layers: int) -> Recipe:
        recipe = self._chosen(name, gemm, num_layers)
        if self.smooth_swiglu and name.endswith(".w_down") and recipe.weight.timing == "delayed":
            # Smoothing moves the weights' amax along with the activations': no earlier step knows it.
            return replace(recipe, weight=replace(recipe.weight, timing="current"))
        return recipe

    def _chosen(self, name: str, gemm: GemmName, num_layers: int) -> Recipe:
        for override in reversed(self.overrides):
            if gemm in override.gemms and fnmatch.fnmatchcase(name, override.match):
                return override.recipe or self.high_recipe
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        if layer is not None and not self.first_layers_high <= layer < num_layers - self.last_layers_high:
            return self.high_recipe
        return self.recipe if sensitivity(name, gemm) >= self.most_sensitive else self.high_recipe

    @property
    def recipe(self) -> Recipe:
        """The recipe alone."""
        return Recipe(**{field: getattr(self, field) for field in Recipe.__struct_fields__})

    @property
    def high_recipe(self) -> Recipe:
        """The recipe of GEMMs in high precision."""
        operand = Operand(format=self.high)
        return Recipe(name=self.high, input=operand, weight=operand, grad=operand)


def role_table(precision: Precision) -> list[tuple[str, str]]:
    """(what, representation) for each thing that a reader of the run wants to know the precision of."""
    p, high = precision, precision.high.upper()
    moments = f"{p.first_moment.upper()}, {p.second_moment.upper()}"
    return [
        ("forward GEMM (input x weight)", f"{p.input} x {p.weight} -> {high}"),
        ("input-gradient GEMM (grad x weight)", f"{p.grad} x {p.weight} -> {high}"),
        ("weight-gradient GEMM (grad x input)", f"{p.grad} x {p.input} -> FP32"),
        ("layers and GEMMs in high precision", _exceptions(p)),
        ("cached input of a linear layer", str(p.input) if p.input.is_scaled else high),
        ("cached attention output", _kept(p.attention_output, high)),
        ("cached SwiGLU input", _kept(p.swiglu_input, high)),
        ("SwiGLU output", "smoothed by channel" if p.smooth_swiglu else "as it is"),
        ("tokens to experts, tokens back", f"{p.dispatch.upper()}, {high}" if p.dispatch != "high" else high),
        ("parameters gathered", p.parameter_gather.upper()),
        ("embedding, output head", high),
        ("attention core, activations", high),
        ("norm statistics, router, softmax, RoPE, loss", "FP32"),
        ("master weights, gradients", "FP32"),
        ("AdamW moments", moments if p.first_moment != p.second_moment else p.first_moment.upper()),
        ("scales", f"{p.scale.upper()}" if p.is_fp8 else "none"),
    ]


def _kept(form: str, high: str) -> str:
    return high if form in ("high", "recipe") else f"{form.upper()} 1x128"


def _exceptions(p: Precision) -> str:
    """What of the linear layers departs from the recipe, in words."""
    if not p.is_fp8:
        said = []
    else:
        said = [{"B": "", "C": "class B (MLA down-projections)", "D": "classes B and C, weight gradients"}[
            p.most_sensitive
        ]]  # fmt: skip
        said += [f"first {p.first_layers_high} layers"] * bool(p.first_layers_high)
        said += [f"last {p.last_layers_high} layers"] * bool(p.last_layers_high)
    for o in p.overrides:
        gemms = "" if o.gemms == GEMMS else f" {' and '.join(o.gemms)}"
        said.append(f"{o.match}{gemms}: {o.recipe.name if o.recipe else p.high.upper()}")
    return "; ".join(s for s in said if s) or "none"
