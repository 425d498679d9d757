"""Advise: the cheapest recipe for every linear layer that its own tensors allow, from a run's telemetry.

A recipe fits a GEMM if, in every step that was observed, both of its operands stay within the error budget, hardly
saturate, and lose nothing small that matters. `FAMILIES` is the order of cost. `advise` is pure and decides;
`report.proposal` writes it down as TOML.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from greylag.report.record import TELEMETRY, read_lines, sound_job
from greylag.spec.error import SpecError
from greylag.spec.finding import Finding
from greylag.spec.job import Job
from greylag.spec.parts import parts
from greylag.spec.precision import (
    GEMMS,
    OPERANDS,
    GemmName,
    Granularity,
    Operand,
    OperandRole,
    Recipe,
    ScaleKind,
    Timing,
)
from greylag.spec.telemetry import Candidate, OperandHealth, Rounding, Telemetry

MOST_FLUSHED = 0.01
"""Share of an operand's numbers that may become 0, unless no channel suffers from it."""
MOST_SATURATED = 0.001
"""Share of an operand's numbers that may lie beyond the largest value."""
CHANNELS = 2.0
"""How many budgets the error of single channels may take."""


class Family(NamedTuple):
    """A way to scale all operands of a GEMM. Where it can be had in two formats, the finer one is tried first."""

    name: str
    granularity: Granularity
    """Of inputs and gradients; beside 1x128 blocks weights are scaled in squares."""
    scale: ScaleKind
    timing: Timing
    price: str
    """What it costs beside the GEMM."""


FAMILIES: tuple[Family, ...] = (
    Family("per-tensor delayed", "tensor", "fp32", "delayed", "one pass: the scale is known before the tensor is"),
    Family("per-tensor", "tensor", "fp32", "current", "a pass for amax before the cast"),
    Family("per row", "row", "pow2", "current", "amax and cast in both directions; a vector of scales"),
    Family("1x128 blocks", "1x128", "pow2", "current", "as rows, and partial sums scaled every 128 in the GEMM"),
    Family("1x128 blocks, FP32 scales", "1x128", "fp32", "current", "as blocks, 4 bytes a scale, no exact re-tiling"),
    Family("MX blocks of 32", "1x32", "mx-ceil", "current", "four times the scales; emulated before Blackwell"),
)
"""Cheapest first, by what peers pay: TransformerEngine's delayed recipe saves current scaling's extra read; torchao's
rowwise scales leave the epilogue of the GEMM to apply them; DeepGEMM promotes partial sums to FP32 every 128 on Hopper
(DeepSeek-V3, section 3.3.2); MX doubles the traffic of scales twice. High precision, at half the speed, comes last."""


class Choice(NamedTuple):
    """What is proposed for one GEMM."""

    recipe: Recipe | None
    """None: high precision."""
    family: str
    error: float
    """The largest of its operands, in any step; 0 in high precision."""
    why: str
    """What kept cheaper ones from fitting; empty if there is none."""
    borrowed: bool = False
    """Whether `why` tells of another layer, with which it shares the recipe."""

    @property
    def telling(self) -> int:
        """How much `why` says of this GEMM: 2 of itself, 1 of another, 0 nothing."""
        return bool(self.why) + bool(self.why and not self.borrowed)


class Advice(NamedTuple):
    """What is proposed for one layer."""

    layer: str
    gemms: dict[GemmName, Choice]
    note: str = ""
    """What else would help."""


class _Trial(NamedTuple):
    """One family on one GEMM."""

    operands: dict[OperandRole, Operand]
    error: float
    fault: str
    """Why it does not fit, in words; empty if it does."""


Place = tuple[str, GemmName]
"""A GEMM of a layer."""
Trials = dict[Place, list[_Trial]]
"""Of each family."""


def read_telemetry(folder: Path) -> tuple[Job, list[Telemetry], list[Finding]]:
    """The job of a run folder, its telemetry by step, and a finding if lines of it cannot be read.

    Raises SpecError if there is no run, or no telemetry of it.
    """
    job = sound_job(folder)
    path = folder / TELEMETRY
    if not path.exists():
        raise SpecError(f"{path}: no such file: no step of this run was measured; set run.telemetry_every")
    lines, unread = read_lines(path, Telemetry)
    if not lines:
        raise SpecError(f"{path}: holds no whole line; let the run reach its next measured step")
    if not {o.layer for line in lines for o in line.operands} & {
        part.name.removesuffix(".weight") for part in parts(job.model)
    }:
        raise SpecError(f"{path}: no layer of '{job.model.name}' was measured in it; give the file of this run")
    last = {line.step: line for line in lines}
    return job, [last[step] for step in sorted(last)], unread


def advise(job: Job, telemetry: Sequence[Telemetry], budget: float, each_layer: bool = False) -> list[Advice]:
    """A recipe for every layer that was measured, in the model's order. `budget` is a relative error, 0.03 for 3%.

    The same weight of all layers gets one recipe, the cheapest that fits all of its GEMMs, where there is one: few
    patterns name it, and what does in one layer seldom fails in the next by much. `each_layer` decides layer by layer.
    """
    seen: dict[str, dict[OperandRole, list[OperandHealth]]] = {}
    for step in telemetry:
        for operand in step.operands:
            seen.setdefault(operand.layer, {}).setdefault(operand.role, []).append(operand)
    names = [part.name.removesuffix(".weight") for part in parts(job.model) if part.is_gemm]
    names = [name for name in names if len(seen.get(name, {})) == len(get_args(OperandRole))]
    trials = {
        (name, gemm): [_try(family, gemm, seen[name], budget) for family in FAMILIES]
        for name in names
        for gemm in GEMMS
    }
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name if each_layer else name.split(".", 2)[2], []).append(name)
    choices = {place: choice for some in kinds.values() for place, choice in _choose(job, some, trials).items()}
    return [
        Advice(
            name,
            {gemm: choices[name, gemm] for gemm in GEMMS},
            _smoothing(job, name, trials[name, "forward"], seen[name]["input"], budget),
        )
        for name in names
    ]


def _choose(job: Job, layers: list[str], trials: Trials) -> dict[Place, Choice]:
    """One family for all GEMMs of some layers that take any; if none fits them all, for each layer; or each GEMM."""
    places = [(layer, gemm) for layer in layers for gemm in GEMMS]
    fitting = {place: [i for i, trial in enumerate(trials[place]) if not trial.fault] for place in places}
    willing = [place for place in places if fitting[place]]
    shared = [i for i in range(len(FAMILIES)) if all(i in fitting[place] for place in willing)]
    if willing and not shared and len(layers) > 1:
        return {place: choice for layer in layers for place, choice in _choose(job, [layer], trials).items()}
    choices: dict[Place, Choice] = {}
    for place in places:
        if not fitting[place]:
            choices[place] = Choice(None, job.precision.high, 0.0, _faults(trials[place]))
            continue
        number, first = min(shared or fitting[place]), min(fitting[place])
        alike = [trials[other][number].operands for other in (willing if shared else [place])]
        why = _faults(trials[place][:number])
        if number > first:
            other = next(other for other in willing if first not in fitting[other])
            why = f"{FAMILIES[first].name} would do here, but in {' '.join(other)} {trials[other][first].fault}"
        recipe = _recipe(FAMILIES[number], alike)
        choices[place] = Choice(recipe, FAMILIES[number].name, trials[place][number].error, why, number > first)
    return choices


def _faults(trials: Sequence[_Trial]) -> str:
    """What kept the last two of them from fitting."""
    told = [f"{FAMILIES[i].name}: {trial.fault}" for i, trial in enumerate(trials) if trial.fault]
    return "; ".join(told[-2:])


def _try(family: Family, gemm: GemmName, seen: dict[OperandRole, list[OperandHealth]], budget: float) -> _Trial:
    operands: dict[OperandRole, Operand] = {}
    errors, faults = [], []
    for role in OPERANDS[gemm]:
        tried = [(c, _worst(seen[role], c, _is_down(gemm, role))) for c in _candidates(family, role)]
        told = [_fault(role, candidate, worst, seen[role], budget) for candidate, worst in tried]
        if all(told):
            faults.append(told[0])
            continue
        candidate, worst = tried[told.index("")]
        operands[role] = _operand(candidate)
        errors.append(worst.error if worst else 0.0)
    return _Trial(operands, max(errors, default=0.0), " and ".join(faults))


def _operand(candidate: Candidate) -> Operand:
    return Operand(format=candidate.format, granularity=candidate.granularity, timing=candidate.timing)


def _candidates(family: Family, role: OperandRole) -> Iterator[Candidate]:
    granularity = "128x128" if family.granularity == "1x128" and role == "weight" else family.granularity
    yield Candidate("e4m3", granularity, family.scale, family.timing)
    if granularity == "tensor" and role == "grad":
        yield Candidate("e5m2", granularity, family.scale, family.timing)


def _is_down(gemm: GemmName, role: OperandRole) -> bool:
    """Whether the operand is quantized down its columns."""
    return gemm == "weight-gradient" or (gemm == "input-gradient" and role == "weight")


def _worst(seen: Sequence[OperandHealth], candidate: Candidate, down: bool) -> Rounding | None:
    """The largest of each number over the steps in which it was tried; None if it never was."""
    found = [
        result
        for health in seen
        if (result := (down and health.along_columns.get(str(candidate))) or health.along_rows.get(str(candidate)))
    ]
    if not found:
        return None
    return Rounding(*(max(getattr(r, field) for r in found) for field in Rounding.__struct_fields__))


def _fault(
    role: OperandRole, candidate: Candidate, worst: Rounding | None, seen: Sequence[OperandHealth], budget: float
) -> str:
    name = candidate.format.upper()
    if worst is None:
        return f"{role} was never tried so (it takes an earlier step's amax)"
    if worst.error > budget:
        return f"{role} errs by {worst.error:.2%} in {name}"
    if worst.saturated > MOST_SATURATED:
        return f"{role} saturates {worst.saturated:.2%} in {name}"
    if worst.flushed > MOST_FLUSHED and worst.channels > budget:
        return f"{role} flushes {worst.flushed:.1%} in {name}{_outlier(seen)}"
    if worst.channels > CHANNELS * budget:
        return f"{role}'s channels err by {worst.channels:.1%} in {name}{_outlier(seen)}"
    return ""


def _outlier(seen: Sequence[OperandHealth]) -> str:
    """The largest outlier channel of any step, in words."""
    most = max((h.outliers[0] for h in seen if h.outliers), key=lambda outlier: outlier[1], default=None)
    return f" (channel {most[0]} is {most[1]:,.0f}x the median)" if most else ""


def _recipe(family: Family, operands: Sequence[dict[OperandRole, Operand]]) -> Recipe:
    """One recipe for GEMMs that share a family. An operand that none of them has takes the format of the others.

    Where one GEMM needs E5M2 of the gradient and another does not, both take it.
    """
    chosen: dict[OperandRole, Operand] = {}
    for some in operands:
        for role, operand in some.items():
            if role not in chosen or operand.format == "e5m2":
                chosen[role] = operand
    for role in get_args(OperandRole):
        chosen.setdefault(role, _operand(next(_candidates(family, role))))
    return Recipe(
        name=family.name, scale=family.scale, input=chosen["input"], weight=chosen["weight"], grad=chosen["grad"]
    )


def _smoothing(job: Job, layer: str, forward: Sequence[_Trial], seen: Sequence[OperandHealth], budget: float) -> str:
    """Whether Smooth-SwiGLU would make a per-tensor scale do for the projection behind SwiGLU (arXiv 2409.12517).

    It gives each channel a scale of its own, which is what a scale per column of the input was tried for.
    """
    swiglu = layer.endswith(".w_down") and job.model.activation == "swiglu"
    current = next(i for i, family in enumerate(FAMILIES) if family.name == "per-tensor")
    if not swiglu or job.precision.smooth_swiglu or not forward[current].fault or not any(h.outliers for h in seen):
        return ""
    column = _worst(seen, Candidate("e4m3", "row", "pow2"), down=True)
    if column is None or column.error > budget or (column.flushed > MOST_FLUSHED and column.channels > budget):
        return ""
    return (
        f"Smooth-SwiGLU would let a per-tensor scale do: with a scale per channel the input errs by {column.error:.1%} "
        f"and flushes {column.flushed:.1%} (set smooth_swiglu = true)"
    )
