"""Runs: what a law is fitted to, read from a CSV file or from Greylag's own run folders.

A run is parameters, tokens, a precision and the loss that it ended with. A CSV file says the precision in `bits` (of
everything), in `weights`, `activations` and `kv`, in `exponent` and `mantissa`, or as a `format`; the last two want a
`block` for Sun's law, and give Kumar's their width. A run folder says it in its job.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from greylag.plan.kumar import Bits
from greylag.plan.reach import Floats
from greylag.plan.sun import BLOCK, CHANNEL, Layout, Sun, layout
from greylag.spec.error import SpecError
from greylag.spec.job import Job
from greylag.spec.model import Model
from greylag.spec.parts import parts
from greylag.spec.precision import Operand
from greylag.spec.step import Step

LawName = Literal["kumar", "sun"]
LAST = 50
"""Steps whose mean loss stands for a run that evaluated no validation loss."""


class Runs(NamedTuple):
    """Runs as arrays of one length."""

    source: str
    """The file, or what a study calls them."""
    parameters: Floats
    tokens: Floats
    precision: Bits | Layout
    loss: Floats
    """Nats per token."""
    notes: tuple[str, ...] = ()
    """What was left out, and what stands for what."""


class _Row(NamedTuple):
    """One run."""

    parameters: float
    tokens: float
    precision: tuple[float, float, float]
    loss: float


def read_csv(path: Path, law: LawName) -> Runs:
    """Runs of a CSV file with a header. Raises SpecError, naming the line, if one does not fit."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read ({error}); give a CSV file of your runs") from None
    reader = csv.DictReader(lines, skipinitialspace=True)
    columns = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = columns
    _check_columns(columns, law, f"{path}: line 1")
    rows = []
    for row in reader:
        where = f"{path}: line {reader.line_num}"
        if None in row:
            raise SpecError(f"{where}: has more values than the header has columns; remove them")
        size, tokens, loss = (_number(row, column, where) for column in ("parameters", "tokens", "loss"))
        precision = _bits(row, where) if law == "kumar" else _layout(row, where)
        rows.append(_Row(size, tokens, precision, loss))
    return _runs(path.name, rows, law)


_SPLIT, _EACH = ("exponent", "mantissa"), ("weights", "activations", "kv")


def _check_columns(columns: Sequence[str], law: LawName, where: str) -> None:
    lacking = [name for name in ("parameters", "tokens", "loss") if name not in columns]
    says = [set(names) <= set(columns) for names in (("bits",), _EACH, ("format",), _SPLIT)]
    if law == "kumar" and not any(says):
        lacking.append("bits (or weights, activations and kv)")
    if law == "sun" and not any(says[2:]):
        lacking += [name for name in _SPLIT if name not in columns]
    if law == "sun" and "block" not in columns:
        lacking.append("block")
    if lacking:
        has = ", ".join(columns) or "nothing"
        raise SpecError(f"{where}: no column {', '.join(lacking)}; add to the header, which has {has}")


def _number(row: dict[str, str | None], column: str, where: str, least: float = 1e-300) -> float:
    text = (row[column] or "").strip()
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        wanted = "a positive number" if least < 1e-9 and least else f"a number, {least:g} or more"
        raise SpecError(f"{where}: '{column}' is {repr(text) if text else 'empty'}; write {wanted}")
    return value


def _bits(row: dict[str, str | None], where: str) -> tuple[float, float, float]:
    if set(_EACH) <= set(row):
        weights, activations, kv = (_number(row, name, where) for name in _EACH)
        return weights, activations, kv
    if "bits" in row:
        bits = _number(row, "bits", where)
    else:
        exponent, mantissa = _split(row, where)
        bits = 1 + exponent + mantissa
    return bits, bits, bits


def _layout(row: dict[str, str | None], where: str) -> tuple[float, float, float]:
    channel = (row["block"] or "").strip() == "channel"
    block = CHANNEL if channel else _number(row, "block", where, least=1.0)
    return (*_split(row, where), block)


def _split(row: dict[str, str | None], where: str) -> tuple[float, float]:
    """Exponent and mantissa bits."""
    if set(_SPLIT) <= set(row):
        exponent, mantissa = (_number(row, name, where, least=0.0) for name in _SPLIT)
        return exponent, mantissa
    try:
        found = layout((row["format"] or "").strip())
    except SpecError as error:
        raise SpecError(f"{where}: {str(error).replace('--format', 'format')}") from None
    return float(found.exponent), float(found.mantissa)


def of_runs(runs: Iterable[tuple[str, Job, Sequence[Step]]], law: LawName) -> Runs:
    """Greylag's own runs: name, job and measured steps of each; those that have not ended are left out and named."""
    rows, notes, halved = [], [], 0
    for name, job, steps in runs:
        if len(steps) < job.run.steps:
            notes.append(f"{name}: left out, it stopped after {len(steps):,} of {job.run.steps:,} steps")
            continue
        loss, is_validated = _end(steps)
        if loss is None:
            notes.append(f"{name}: left out, it has no finite loss")
            continue
        halved += not is_validated
        rows.append(_Row(counted(job.model), sum(s.tokens for s in steps), tuple(job_precision(job, law)), loss))
    if halved:
        notes.append(f"{halved:,} runs evaluated no validation loss: the mean of their last {LAST} steps stands for it")
    notes.append("parameters are those that a token meets, embedding and head not counted")
    return _runs("run folders", rows, law, tuple(notes))


def _end(steps: Sequence[Step]) -> tuple[float | None, bool]:
    """The loss that a run ended with, and whether it is of held-out text."""
    if steps and steps[-1].validation_loss is not None and math.isfinite(steps[-1].validation_loss):
        return steps[-1].validation_loss, True
    last = [s.loss for s in steps[-LAST:] if s.loss is not None and math.isfinite(s.loss)]
    return (sum(last) / len(last) if last else None), False


def counted(model: Model) -> float:
    """Parameters that a token meets: of routed experts `top_k`; no embedding, no head."""
    total = 0.0
    for part in parts(model):
        if not part.is_buffer and part.role not in ("embedding", "head", "position"):
            share = model.moe.top_k / model.moe.num_experts if part.is_experts and model.moe else 1.0
            total += part.size * share
    return total


def job_precision(job: Job, law: LawName) -> Any:
    """The precision of a job's linear layers in a law's terms: its `Bits` or its `Layout`.

    Sun's format is that of the weights. KV cache, attention and everything else runs in `high`. A format without a
    scale counts as one with a block of 128, as Sun et al. count BF16.
    """
    p = job.precision
    if law == "kumar":
        return Bits(_width(p.weight.format), _width(p.input.format), _width(p.high))
    format = layout(p.weight.format)
    return Layout(float(format.exponent), float(format.mantissa), float(_block(job.model, p.weight)))


def _width(format: str) -> float:
    return float(Sun().bits(layout(format)))


def _block(model: Model, weight: Operand) -> float:
    """Numbers that share a scale: a block's length, a row's, or the geometric mean of the weights' sizes."""
    if not weight.is_scaled:
        return BLOCK
    if weight.block:
        return float(weight.block)
    shapes = [part.shape[-2:] for part in parts(model) if part.is_gemm]
    sizes = [shape[1] if weight.granularity == "row" else shape[0] * shape[1] for shape in shapes]
    return float(np.exp(np.mean(np.log(sizes))))


def _runs(source: str, rows: Sequence[_Row], law: LawName, notes: tuple[str, ...] = ()) -> Runs:
    if not rows:
        raise SpecError(f"{source}: no run to fit to; give finished runs{''.join(f'; {note}' for note in notes[:1])}")
    size, tokens, loss = (np.array([getattr(row, name) for row in rows]) for name in ("parameters", "tokens", "loss"))
    columns = np.array([row.precision for row in rows]).T
    precision = Bits(*columns) if law == "kumar" else Layout(*columns)
    return Runs(source, size, tokens, precision, loss, notes)
