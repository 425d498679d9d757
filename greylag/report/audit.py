"""Audit: what a run really did, held against what its job says, row by row.

The expectation is `spec`'s alone (`Precision.gemms`, `spec.messages`, `spec.kept`); what was seen is
`audit.jsonl`'s. `compare` is pure; a row that was never seen, and one that nobody asked for, are differences too.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from greylag.report.record import AUDIT, read_lines, sound_job
from greylag.spec.audit import DELAYED, Audit, CacheSeen, OperandSeen, Product, current_rule
from greylag.spec.error import SpecError
from greylag.spec.job import Job
from greylag.spec.messages import Message, data_parallel_messages, model_parallel_messages
from greylag.spec.parts import Part, parts
from greylag.spec.precision import BLOCK, BYTES, GEMMS, OPERANDS, GemmName, Gemms, Operand, Recipe
from greylag.spec.quantity import memory

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_MOMENTS = {
    "fp32": ("float32",), "bf16": ("bfloat16",), "e4m3": ("float8_e4m3fn",), "e5m2": ("float8_e5m2",),
    "e4m3-root": ("float8_e4m3fn",),
}  # fmt: skip
SLACK = 1 << 16
"""Bytes per step in which ranks agree on scalars (norms, amax, loads, votes), which `spec.messages` does not count."""

ROUTED = {"all_to_all": 0.25}
"""How far bytes may be off where routing decides them; 0.01 for the rest."""


class Row(NamedTuple):
    """One thing that was to be seen, and what was."""

    section: str
    """`gemms`, `caches`, `messages` or `state`."""
    where: str
    what: str
    expected: str
    used: str
    kernel: str = ""
    fault: str = ""
    """What differs, in words; empty if nothing does."""


def read_audits(folder: Path) -> tuple[Job, list[Audit]]:
    """The job of a run folder and its audits, in order. Raises SpecError if there is no run, or no audit in it."""
    job = sound_job(folder)
    if not (folder / AUDIT).exists():
        raise SpecError(f"{folder / AUDIT}: no such file: this run has not been audited; train it to its second step")
    audits, unread = read_lines(folder / AUDIT, Audit)
    if unread or not audits:
        raise SpecError(f"{folder / AUDIT}: {unread[0] if unread else 'holds no whole audit'}")
    return job, audits


def compare(job: Job, audit: Audit) -> list[Row]:
    """Every GEMM, cache, message and state of the job, with what was seen of it."""
    return [*_gemm_rows(job, audit), *_cache_rows(job, audit), *_message_rows(job, audit), *_state_rows(job, audit)]


def _layers(job: Job) -> dict[str, Part]:
    return {part.name.removesuffix(".weight"): part for part in parts(job.model) if part.is_gemm}


# --- GEMMs --------------------------------------------------------------------------------------------------------


def _gemm_rows(job: Job, audit: Audit) -> Iterator[Row]:
    seen: dict[tuple[str, str], list[Product]] = {}
    for product in audit.products:
        seen.setdefault((product.layer, product.gemm), []).append(product)
    for layer in _layers(job):
        gemms = job.precision.gemms(layer, job.model.num_layers)
        for gemm in GEMMS:
            dtype = "float32" if gemm == "weight-gradient" else _DTYPES[job.precision.high]
            products = seen.pop((layer, gemm), [])
            yield from _gemm_row(layer, gemm, gemms.of(gemm), dtype, products, audit.step == 1)
    for (layer, name), products in seen.items():
        yield Row("gemms", layer, name, "no such GEMM", "computed", products[0].kernel, "nobody asked for it")


def _gemm_row(
    layer: str, gemm: GemmName, recipe: Recipe, dtype: str, products: list[Product], is_first: bool
) -> Iterator[Row]:
    operands = [recipe.operand(role) for role in OPERANDS[gemm]]
    expected = f"{' x '.join(_operand(o, recipe) for o in operands)} -> {dtype}"
    if not products:
        yield Row("gemms", layer, gemm, expected, "never computed", "", "missing")
    for product in products:
        both = list(zip(operands, (product.a, product.b), strict=True))
        faults = [
            f"{role} {fault}"
            for role, (operand, seen) in zip(OPERANDS[gemm], both, strict=True)
            for fault in _operand_faults(operand, recipe, seen, is_first)
        ]
        if product.dtype != dtype:
            faults.append(f"result in {product.dtype}")
        faults += _kernel_faults(product)
        used = " x ".join(_operand_seen(seen, operand, recipe) for operand, seen in both)
        yield Row("gemms", layer, gemm, expected, f"{used} -> {product.dtype}", product.kernel, "; ".join(faults))


def _operand(operand: Operand, recipe: Recipe) -> str:
    if not operand.is_scaled:
        return operand.format.upper()
    return f"{operand.format.upper()} {operand.granularity} {_rule(operand, recipe).removeprefix('current ')}"


def _rule(operand: Operand, recipe: Recipe) -> str:
    return DELAYED if operand.timing == "delayed" else current_rule(recipe.scale)


def _operand_seen(seen: OperandSeen, operand: Operand, recipe: Recipe) -> str:
    """Where several settings fit what was seen, the expected one is told if it is among them."""
    if not seen.tiles:
        return seen.format.upper()
    tiles = operand.granularity if operand.granularity in seen.tiles else "/".join(seen.tiles)
    rule = _rule(operand, recipe)
    shown = rule if rule in seen.rules else _or(seen.rules)
    raw = "" if seen.on_grid else ", not on its grid"
    return f"{seen.format.upper()} {tiles} {shown.removeprefix('current ')}{raw}"


def _operand_faults(operand: Operand, recipe: Recipe, seen: OperandSeen, is_first: bool) -> Iterator[str]:
    if seen.format != operand.format:
        yield f"is {seen.format}, not {operand.format}"
        return
    if not operand.is_scaled:
        return
    if operand.granularity not in seen.tiles:
        yield f"is scaled per {_or(seen.tiles)}, not per {operand.granularity}"
    rules = [_rule(operand, recipe)]
    if operand.timing == "delayed" and is_first:
        rules.append(current_rule(recipe.scale))  # there is no history yet
    if not set(rules) & set(seen.rules):
        yield f"has scales by {_or(seen.rules)}, not {_or(rules)}"
    elif seen.is_pow2 != (recipe.scale != "fp32"):
        yield f"has scales that are {'all' if seen.is_pow2 else 'not'} powers of two"
    if not seen.on_grid:
        yield f"holds values that {operand.format} does not have: it was not quantized"
    elif seen.is_nearest != (operand.rounding == "nearest"):
        yield f"is {'rounded' if seen.is_nearest else 'not rounded'} to nearest"


def _or(names: tuple[str, ...] | list[str]) -> str:
    return " or ".join(names) or "no rule known"


def _kernel_faults(product: Product) -> Iterator[str]:
    """Where the dispatcher saw something else than the kernel that is named."""
    op = product.op.partition(" ")[0]
    agrees = {
        "FP32 mm of values": product.op == "mm float32 x float32",
        "torch scaled_mm": op.startswith("_scaled"),
        "torch mm": op == "mm",
    }
    if not agrees.get(product.kernel, True):
        yield f"torch was asked for {product.op or 'no such multiply'}"


# --- caches -------------------------------------------------------------------------------------------------------


class _Cache(NamedTuple):
    """What a layer is to keep."""

    what: str
    forms: tuple[str, ...]
    size: float
    """Bytes of an element, with its share of a scale."""


def _cache_rows(job: Job, audit: Audit) -> Iterator[Row]:
    seen: dict[str, list[CacheSeen]] = {}
    for cache in audit.caches:
        seen.setdefault(cache.layer, []).append(cache)
    for layer, part in _layers(job).items():
        wanted = _expected_cache(job, layer, part)
        expected = f"{wanted.forms[0]}, {wanted.size:.3g} B"
        found = seen.pop(layer, [])
        if not found:
            yield Row("caches", layer, wanted.what, expected, "nothing kept", "", "missing")
        for one in found:
            used = f"{one.form}, {one.bytes_per_element:.3g} B"
            yield Row("caches", layer, wanted.what, expected, used, "", "; ".join(_cache_faults(wanted, one)))
    for layer, found in seen.items():
        yield Row("caches", layer, found[0].what, "no such layer", found[0].form, "", "nobody asked for it")


def _expected_cache(job: Job, layer: str, part: Part) -> _Cache:
    p, width = job.precision, part.shape[-1]
    if p.attention_output != "recipe" and layer.endswith(".attention.wo"):
        form, share = p.attention_output, _share(1, BLOCK, width)
        return _Cache("attention output", (f"{form} 1x128",), BYTES[form] + share)
    if p.swiglu_input != "high" and layer.endswith(".w_down") and job.model.activation == "swiglu":
        share = _share(1, BLOCK, 2 * width)
        return _Cache("SwiGLU input", (f"{p.swiglu_input} 1x128",), BYTES[p.swiglu_input] + share)
    gemms = p.gemms(layer, job.model.num_layers)
    recipe = gemms.weight_gradient
    if not recipe.is_fp8:
        dtype = _DTYPES[recipe.input.format]
        return _Cache("input", (dtype,), BYTES[recipe.input.format])
    rows = 0 if part.role == "expert" else job.strategy.micro_batch * job.sequence
    tiles, share = _kept_tiles(gemms, width, rows)
    name = recipe.input.format
    return _Cache("input", tuple(f"{name} {tile}" for tile in tiles), BYTES[name] + share)


def _kept_tiles(gemms: Gemms, width: int, rows: int) -> tuple[tuple[str, ...], float]:
    """Tiles in which a quantized input is kept, and a scale's bytes per element. `rows` is 0 for whole blocks."""
    recipe = gemms.weight_gradient
    scale, block = (4 if recipe.scale == "fp32" else 1), recipe.input.block
    if recipe.input.granularity == "tensor":
        return ("tensor",), 0.0
    if recipe.retiles and gemms.forward == recipe:
        return ("1x128",), _share(scale, block, width)
    if recipe.input.granularity == "row":
        return ("column", f"{BLOCK}x1"), _share(scale, rows or BLOCK, rows or BLOCK)
    return (f"{block}x1",), _share(scale, block, rows or block)


def _share(scale: int, block: int, length: int) -> float:
    """Bytes of scales per element of a line of `length`, whose last block may be short."""
    return scale * -(-length // block) / length


def _cache_faults(expected: _Cache, seen: CacheSeen) -> Iterator[str]:
    if seen.what != expected.what:
        yield f"keeps {seen.what}, not {expected.what}"
    if seen.form not in expected.forms:
        yield f"is {seen.form}, not {_or(expected.forms)}"
    if abs(seen.bytes_per_element - expected.size) > 0.01 + 0.01 * expected.size:
        yield f"takes {seen.bytes_per_element:.3g} bytes an element, not {expected.size:.3g}"


# --- messages and state ---------------------------------------------------------------------------------------------


def _message_rows(job: Job, audit: Audit) -> Iterator[Row]:
    """By collective: bytes of all, and the dtypes among them."""
    expected: dict[str, float] = {}
    dtypes: dict[str, set[str]] = {}
    for message in _messages(job):
        expected[message.collective] = expected.get(message.collective, 0.0) + message.times * message.bytes
        dtypes.setdefault(message.collective, set()).update(_message_dtypes(job, message))
    seen: dict[str, dict[str, int]] = {}
    for one in audit.messages:
        seen.setdefault(one.collective, {})[one.dtype] = one.bytes
    for collective in sorted(expected.keys() | seen.keys()):
        wanted, found = expected.get(collective, 0.0), seen.get(collective, {})
        allowed = sorted(dtypes.get(collective, ()))
        total, slack = float(sum(found.values())), SLACK + ROUTED.get(collective, 0.01) * wanted
        faults = [f"{memory(total)} sent, not {memory(wanted)}"] if abs(total - wanted) > slack else []
        faults += [
            f"{memory(float(size))} went as {dtype}"
            for dtype, size in found.items()
            if size > SLACK and dtype not in allowed
        ]
        what = "all" if wanted > SLACK else "scalars on which ranks agree"
        told = f"{memory(wanted)} in {_or(allowed)}" if wanted > SLACK else f"up to {memory(float(SLACK))}"
        used = ", ".join(f"{memory(float(size))} in {dtype}" for dtype, size in found.items()) or "nothing"
        yield Row("messages", collective, what, told, used, "", "; ".join(faults))


def _messages(job: Job) -> Iterator[Message]:
    """All messages of a step."""
    yield from data_parallel_messages(job)
    for message in model_parallel_messages(job, job.strategy.micro_batch * job.sequence):
        yield message._replace(times=message.times * job.num_micro_batches)


def _message_dtypes(job: Job, message: Message) -> tuple[str, ...]:
    """What may travel in it. Parameters in several forms, and tokens, travel as bytes; their number tells the form."""
    high = _DTYPES[job.precision.high]
    if message.collective == "all_to_all":
        return ("uint8", "int64", high)
    if message.name != "parameters":
        return ("float32",) if message.axis in ("dp", "replica") else (high,)
    return {"fp32": ("float32",), "bf16": ("bfloat16", "float32", "uint8"), "fp8": ("float32", "uint8")}[
        job.precision.parameter_gather
    ]


def _state_rows(job: Job, audit: Audit) -> Iterator[Row]:
    """Dtypes of the matrices; norms and biases may be wider."""
    p = job.precision
    wanted = {
        "weights": ("float32",),
        "gradients": ("float32",),
        "exp_avg": _MOMENTS[p.first_moment],
        "exp_avg_sq": _MOMENTS[p.second_moment],
    }
    if p.first_moment not in ("fp32", "bf16"):
        wanted |= {"exp_avg_scale": ("float32",), "exp_avg_sq_scale": ("float32",)}
    for what, allowed in wanted.items():
        found = {s.dtype: s.elements for s in audit.states if s.what == what and s.of == "matrices"}
        wrong = [dtype for dtype in found if dtype not in allowed]
        fault = "missing" if not found else f"{_or(wrong)}, not {_or(allowed)}" if wrong else ""
        used = ", ".join(f"{n:,} elements in {dtype}" for dtype, n in found.items()) or "not there"
        yield Row("state", what, "matrices", _or(allowed), used, "", fault)
