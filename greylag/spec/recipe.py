"""Recipe: the faults of a precision, by itself and for the layers of a model."""

import difflib
import fnmatch
from collections.abc import Iterator
from typing import get_args

from msgspec.structs import replace

from greylag.spec.fault import error, positive, unused
from greylag.spec.finding import Finding
from greylag.spec.model import Model
from greylag.spec.parts import parts
from greylag.spec.precision import GEMMS, Operand, OperandRole, Precision, Recipe

MOST_MARGIN = 16
"""E5M2 reaches to 2**16: more headroom would leave only subnormal numbers."""
LONGEST_HISTORY = 1 << 20
"""Steps: the history is one FP32 number for each, in every layer."""


def recipe_faults(p: Precision, model: Model) -> Iterator[Finding]:
    """Faults that need no layer's name."""
    yield from positive("precision.", p, ("margin", "first_layers_high", "last_layers_high"))
    yield from _recipe("precision", p.recipe)
    if not p.is_fp8:
        yield from unused("precision.", p, _OF_FP8, "without FP8")
    if p.first_layers_high + p.last_layers_high > model.num_layers:
        yield error(
            "precision.first_layers_high",
            f"{p.first_layers_high} first and {p.last_layers_high} last of {model.num_layers} layers",
            "lower one",
        )
    if model.activation != "swiglu":
        yield from unused("precision.", p, ("swiglu_input", "smooth_swiglu"), "without SwiGLU")
    if (p.first_moment in ("fp32", "bf16")) != (p.second_moment in ("fp32", "bf16")):
        yield error("precision.second_moment", "one moment is stored in 8 bits and one is not", "make them agree")


def layer_faults(p: Precision, model: Model) -> Iterator[Finding]:
    """Faults for the layers of a sound model: exceptions that fit none, messages that none sends."""
    names = [part.name.removesuffix(".weight") for part in parts(model) if part.is_gemm]
    if p.overrides:
        yield from _overrides(p, model, names)
    if p.is_fp8 and not any(p.gemms(name, model.num_layers).is_fp8 for name in names):
        yield error("precision", "no layer is left that follows the recipe", "keep fewer layers in high precision")
    downs = [name for name in names if name.endswith(".w_down")]
    if p.smooth_swiglu and not any(p.gemms(name, model.num_layers).is_fp8 for name in downs):
        yield error("precision.smooth_swiglu", "has no effect: no down-projection is FP8", "remove it")
    if p.parameter_gather != "fp32":
        yield from _gather(p, model, names)


def _gather(p: Precision, model: Model, names: list[str]) -> Iterator[Finding]:
    if any(p.gathered(name, model.num_layers) == p.parameter_gather for name in names):
        return
    whose = {
        "fp8": "in FP8 with one scale per tensor or 128x128 block, the same in forward and input gradient",
        "bf16": "in BF16 in forward and input gradient",
    }[p.parameter_gather]
    yield error("precision.parameter_gather", f"{p.parameter_gather} has no effect: no layer takes its weight {whose}",
                 "remove it")  # fmt: skip


def _overrides(p: Precision, model: Model, names: list[str]) -> Iterator[Finding]:
    for number, override in enumerate(p.overrides):
        where = f"precision.overrides[{number}]"
        if not fnmatch.filter(names, override.match):
            near = difflib.get_close_matches(override.match, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"layers are named like {names[0]!r}"
            yield error(f"{where}.match", f"{override.match!r} fits no linear layer of '{model.name}'", hint)
        elif override.gemms and not _changes(p, number, model, names):
            yield error(where, "changes nothing: the layers have that recipe, or a later one overrides it", "remove it")
        if not override.gemms or len(set(override.gemms)) < len(override.gemms):
            yield error(f"{where}.gemms", "names no GEMM, or one twice", f"choose from {', '.join(GEMMS)}")
        if override.recipe:
            yield from positive(f"{where}.recipe.", override.recipe, ("margin",))
            yield from _recipe(f"{where}.recipe", override.recipe)


def _changes(p: Precision, number: int, model: Model, names: list[str]) -> bool:
    """Whether any GEMM would have another recipe without this override."""
    without = replace(p, overrides=p.overrides[:number] + p.overrides[number + 1 :])
    return any(p.gemms(name, model.num_layers) != without.gemms(name, model.num_layers) for name in names)


_OF_FP8 = ("most_sensitive", "first_layers_high", "last_layers_high")


def _recipe(at: str, recipe: Recipe) -> Iterator[Finding]:
    """Faults of one recipe. `at` is its key."""
    for role in get_args(OperandRole):
        yield from _operand(f"{at}.{role}", role, recipe.operand(role))
    x, _, g = recipe.operands
    if not recipe.is_fp8:
        yield from unused(f"{at}.", recipe, ("scale",), "without FP8")
    if recipe.margin > MOST_MARGIN:
        yield error(f"{at}.margin", f"2**{recipe.margin} of headroom leaves nothing of the format", "lower it")
    if recipe.amax_history > LONGEST_HISTORY:
        yield error(f"{at}.amax_history", f"{recipe.amax_history} steps: more than {LONGEST_HISTORY}", "lower it")
    if not recipe.is_delayed:
        yield from unused(f"{at}.", recipe, ("amax_history", "amax_choice", "margin"), "without a delayed scale")
    if recipe.is_fp8 and not all(o.is_scaled for o in recipe.operands):
        yield error(at, "input, weight and grad must all be FP8 or none",
                     "make them agree; [[precision.overrides]] keeps single GEMMs in high precision")  # fmt: skip
        return
    if not recipe.is_fp8 and len({o.format for o in recipe.operands}) > 1:
        yield error(at, "input, weight and grad must have one format, if it is not FP8", "make them agree")
    kinds = {"1x128" if o.granularity == "128x128" else o.granularity for o in recipe.operands}
    if len(kinds) > 1:
        yield error(at, f"one GEMM cannot mix operands scaled per {' and per '.join(sorted(kinds))}",
                     "use one granularity for all (128x128 goes with 1x128)")  # fmt: skip
    if "128x128" in (x.granularity, g.granularity):
        yield error(at, "128x128 blocks are for weights; on activations and gradients they diverge "
                     "(DeepSeek-V3, appendix B.2)", 'use "1x128"')  # fmt: skip
    if ("1x32" in kinds) != recipe.scale.startswith("mx") and recipe.is_fp8:
        yield error(
            f"{at}.scale",
            f"'{recipe.scale}' on {x.granularity}: 1x32 blocks have E8M0 scales by MX's rules, and only they do",
            'set granularity = "1x32" and scale = "mx-ceil", or neither',
        )


def _operand(where: str, role: OperandRole, operand: Operand) -> Iterator[Finding]:
    if operand.timing == "delayed" and operand.granularity != "tensor":
        yield error(
            where, "a delayed scale is kept per tensor only: block scales move too fast", 'set timing = "current"'
        )
    if not operand.is_scaled and (operand.granularity, operand.timing, operand.rounding) != (
        "tensor",
        "current",
        "nearest",
    ):
        yield error(
            where, f"{operand.format} has no scale: granularity, timing and rounding have no effect", "remove them"
        )
    elif operand.rounding == "stochastic" and role != "grad":
        yield error(where, "stochastic rounding is for gradients: inputs and weights are rounded more than once",
                     'set rounding = "nearest"')  # fmt: skip
