"""Proposal: advice as a `[precision]` table with few `[[precision.overrides]]`, and as a table on the terminal.

The recipe that fits most layers becomes the run's, exceptions are gathered under the widest patterns that name no
other layer. What else the job's precision says (moments, messages, caches) is kept.
"""

import fnmatch
import json
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from greylag.report.advise import FAMILIES, Advice, Choice
from greylag.report.rows import layer_ranges
from greylag.spec.error import SpecError
from greylag.spec.job import Job
from greylag.spec.load import job_from, load_preset, presets
from greylag.spec.parts import parts
from greylag.spec.precision import GEMMS, GemmName, Precision, Recipe

_DECIDED = (*Recipe.__struct_fields__, "high", "most_sensitive", "first_layers_high", "last_layers_high", "overrides")
"""Keys of a precision that advice decides, or that are written apart."""

Outcome = tuple[tuple[GemmName, ...], Recipe | None]
"""Some GEMMs and their recipe; None is high precision."""


def propose(job: Job, advice: Sequence[Advice]) -> str:
    """The advice as TOML, which `load_job` takes in the place of the job's own `[precision]`.

    Layers without advice keep the recipe that they have. Raises SpecError if the job would not be sound with it.
    """
    wanted = {name: _of_job(job, name) for name in _names(job)}
    for one in advice:
        wanted[one.layer] = {gemm: choice.recipe for gemm, choice in one.gemms.items()}
    wanted = {name: {gemm: _named(recipe) for gemm, recipe in gemms.items()} for name, gemms in wanted.items()}
    counts = Counter(recipe for gemms in wanted.values() for recipe in gemms.values() if recipe)
    main = counts.most_common(1)[0][0] if counts else None
    text = "\n".join([*_main(job, main), *_overrides(wanted, main)]) + "\n"
    problems = with_precision(job, text).problems()
    if problems:
        raise SpecError(f"{job.name}: what was proposed does not work: {'; '.join(map(str, problems))}")
    return text


def with_precision(job: Job, toml: str) -> Job:
    """The job with the `[precision]` of a TOML text."""
    table = {**msgspec.to_builtins(job), **tomllib.loads(toml)}
    return job_from(table, job.name)


def _names(job: Job) -> list[str]:
    return [part.name.removesuffix(".weight") for part in parts(job.model) if part.is_gemm]


def _of_job(job: Job, name: str) -> dict[GemmName, Recipe | None]:
    gemms = job.precision.gemms(name, job.model.num_layers)
    return {gemm: gemms.of(gemm) if gemms.of(gemm).is_fp8 else None for gemm in GEMMS}


def _named(recipe: Recipe | None) -> Recipe | None:
    """The recipe under its preset's name, if it is one."""
    if recipe is None:
        return None
    for name in presets("precisions"):
        preset: Precision = load_preset("precision", name)
        if replace(preset.recipe, name=recipe.name) == recipe and not preset.overrides and preset.is_fp8:
            return replace(recipe, name=name)
    return recipe


def _main(job: Job, main: Recipe | None) -> Iterator[str]:
    yield "[precision]"
    if main is None:
        yield f'preset = "{job.precision.high}"'
    elif main.name in presets("precisions"):
        yield f'preset = "{main.name}"'
    else:
        yield f"name = {_toml(main.name)}"
        yield from (f"{key} = {value}" for key, value in _recipe(main))
    yield f'high = "{job.precision.high}"'
    if main is not None:
        yield 'most_sensitive = "B"  # of the layers below none follows its class'
    defaults = Precision(name="", input=job.precision.input, weight=job.precision.weight, grad=job.precision.grad)
    for field in Precision.__struct_fields__:
        value = getattr(job.precision, field)
        if field not in _DECIDED and value != getattr(defaults, field):
            yield f"{field} = {_toml(value)}"


def _recipe(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for role in ("input", "weight", "grad"):
        operand = recipe.operand(role)
        said = {"format": operand.format, "granularity": operand.granularity}
        rest = {"timing": (operand.timing, "current"), "rounding": (operand.rounding, "nearest")}
        yield role, _toml(said | {key: value for key, (value, default) in rest.items() if value != default})
    yield "scale", _toml(recipe.scale)
    if recipe.is_delayed:
        yield "amax_history", str(recipe.amax_history)
        yield "amax_choice", _toml(recipe.amax_choice)
        yield "margin", str(recipe.margin)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + " }"
    return json.dumps(value) if isinstance(value, str) else str(value)


def _overrides(wanted: dict[str, dict[GemmName, Recipe | None]], main: Recipe | None) -> Iterator[str]:
    outcomes: dict[Outcome, list[str]] = {}
    for name, gemms in wanted.items():
        for recipe in dict.fromkeys(gemms.values()):
            if recipe != main:
                some = tuple(gemm for gemm in GEMMS if gemms[gemm] == recipe)
                outcomes.setdefault((some, recipe), []).append(name)
    for (some, recipe), names in outcomes.items():
        for pattern in patterns(names, list(wanted)):
            yield "\n[[precision.overrides]]"
            yield f'match = "{pattern}"'
            if some != GEMMS:
                yield f"gemms = [{', '.join(map(_toml, some))}]"
            if recipe is not None and recipe.name in presets("precisions"):
                yield f'recipe = "{recipe.name}"'
            elif recipe is not None:
                yield f"recipe = {{ {', '.join(f'{key} = {value}' for key, value in _recipe(recipe))} }}"


def patterns(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """Few file patterns that fit all of `names` and no other of `every`: the one that fits most of the rest, first."""
    left, found = set(names), []
    offered: dict[str, set[str]] = {}
    for name in names:
        for pattern in _offers(name):
            fits = set(fnmatch.filter(every, pattern))
            if fits <= set(names):
                offered[pattern] = fits
    while left:
        best = max(offered, key=lambda pattern: (len(offered[pattern] & left), len(offered[pattern]), -len(pattern)))
        found.append(best)
        left -= offered[best]
    return found


def _offers(name: str) -> Iterator[str]:
    """Patterns that a layer's name suggests, from `*` to itself."""
    words = name.split(".")
    yield "*"
    for start in range(len(words) - 1, 1, -1):
        yield f"*.{'.'.join(words[start:])}"
    for stop in range(2, len(words)):
        yield f"{'.'.join(words[:stop])}.*"
    yield name


def print_advice(job: Job, advice: Sequence[Advice], steps: Sequence[int], budget: float) -> None:
    """Print what is proposed for each layer and why; layers that agree in all but digits stand together."""
    console = Console()
    span = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
    console.print(f"[bold]{escape(job.name)}[/]  error budget {budget:.1%}, measured in {span}", highlight=False)
    table = Table()
    for column in ("layers", "GEMMs", "recipe", "error", "why not cheaper"):
        table.add_column(column, overflow="fold")
    groups: dict[tuple[str, str, str], list[tuple[int, float, Choice]]] = {}
    for one in advice:
        _, layer, tail = one.layer.split(".", 2)
        for family in dict.fromkeys(choice.family for choice in one.gemms.values()):
            some = {gemm: one.gemms[gemm] for gemm in GEMMS if one.gemms[gemm].family == family}
            error = max(choice.error for choice in some.values())
            key = (tail, ", ".join(some) if len(some) < len(GEMMS) else "all", family)
            most_telling = max(some.values(), key=lambda choice: choice.telling)
            groups.setdefault(key, []).append((int(layer), error, most_telling))
    for (tail, names, family), rows in groups.items():
        layer_number, _, choice = max(rows, key=lambda row: (row[2].telling == 2, row[1]))
        where = f"layers.{layer_ranges([row[0] for row in rows])}.{tail}"
        why = choice.why or "the cheapest"
        told = why if len(rows) == 1 or not choice.why else f"layer {layer_number}: {why}"
        name = family.upper() if family == job.precision.high else family
        most = max(row[1] for row in rows)
        table.add_row(*map(escape, (where, names, name, f"{most:.2%}" if most else "–", told)))
    console.print(table)
    for one in advice:
        if one.note:
            console.print(f"{one.layer}: {one.note}", markup=False, highlight=False)
    console.print("From cheap to dear:", highlight=False)
    for each in FAMILIES:
        console.print(f"  {each.name}: {each.price}", markup=False, highlight=False)
    console.print("  high precision: half the speed of the GEMM", highlight=False)
