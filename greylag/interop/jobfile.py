"""Job file: what an import gives, a job's table with remarks on what it does not say exactly, and the table as TOML."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from greylag.interop.arguments import Remarks
from greylag.spec.error import SpecError
from greylag.spec.job import Job, Run
from greylag.spec.load import job_from, load_preset, presets
from greylag.spec.model import MLA, Model, MoE
from greylag.spec.strategy import Strategy

_SECTIONS: dict[str, type] = {"model": Model, "strategy": Strategy, "run": Run}
_INNER: dict[str, type] = {"mla": MLA, "moe": MoE}
_SIZED = re.compile(r".+-(\d+)x(\d+)")


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """A file of another framework, as a job."""

    text: str
    """The job file, or for a config.json its model table."""
    remarks: tuple[str, ...]
    """What is not expressed exactly, a line each, in three groups: irrelevant, approximated, not expressible."""
    job: Job | None
    """The job that the text loads as; None for a model alone."""


def finish(table: dict[str, Any], source: Path, dialect: str, remarks: Remarks) -> Imported:
    """Write the job file of a table and prove that it loads and can run. Raises SpecError with its faults if not."""
    table = {**table, **{key: _said(table[key], kind) for key, kind in _SECTIONS.items()}}
    job = job_from(table, name=source.stem, where=str(source))
    problems = job.problems()
    if problems:
        raise SpecError(f"{source}: says a job that cannot run: {'; '.join(map(str, problems))}")
    return Imported(text=head(dialect, source.name, remarks) + to_toml(table), remarks=tuple(remarks.lines()), job=job)


def head(dialect: str, source: str, remarks: Remarks) -> str:
    """The comment at the head of what is written: where it comes from, and what it does not say exactly."""
    noted = (line for line in remarks.lines() if not line.startswith("irrelevant"))
    lines = (f"# {line}" for line in (f"Imported by greylag from {dialect}: {source}", *noted))
    return "".join("".join(c if c.isprintable() else repr(c)[1:-1] for c in line) + "\n" for line in lines)


def newest_software(family: str, facts: Mapping[str, Any]) -> dict[str, Any] | str:
    """The newest software preset of a family with the facts that differ from its own; its name alone if none does."""
    newest = max(name for name in presets("software") if name.startswith(f"{family}-"))
    own = msgspec.to_builtins(load_preset("software", newest))
    rest = {key: value for key, value in facts.items() if own.get(key) != value}
    return {"preset": newest, **rest} if rest else newest


def _said(table: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """A table without the values that a job has anyway."""
    kept: dict[str, Any] = {}
    fields = msgspec.structs.fields(kind)
    for field in fields:
        value = table.get(field.name)
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        if isinstance(value, Mapping) and field.name in _INNER:
            kept[field.name] = _said(value, _INNER[field.name])
        elif value is not None and (value != default or isinstance(value, bool) is not isinstance(default, bool)):
            kept[field.name] = value
    return kept | {key: value for key, value in table.items() if key not in {field.name for field in fields}}


def place(cluster: str | None, per_node: int, nodes: int, where: str) -> str:
    """The name of the cluster that a job runs on, from what was asked for and what the file says (0: nothing).

    Raises SpecError if both together do not tell kind and number of devices.
    """
    kinds = ", ".join(name for name in presets("clusters") if name != "local")
    counted = f"{nodes} nodes of {per_node} devices" if per_node and nodes else "no number of devices"
    if cluster is None:
        raise SpecError(f"{where}: says {counted}, and not of which kind; give --cluster h100-8x16 (kinds: {kinds})")
    if _SIZED.fullmatch(cluster):
        return cluster
    if not per_node or not nodes:
        raise SpecError(f"{where}: says no number of devices; give it with --cluster {cluster}-8x16")
    return f"{cluster}-{per_node}x{nodes}"


def count_devices(cluster: str, where: str) -> int:
    """How many devices a cluster of this name has."""
    match = _SIZED.fullmatch(cluster)
    if not match or len(match[1]) + len(match[2]) > 15:
        raise SpecError(f"{where}: cluster {cluster!r}: write it as h100-8x16")
    return int(match[1]) * int(match[2])


def data_parallel(degrees: Mapping[str, int], devices: int, where: str) -> int:
    """dp: what the other degrees leave of so many devices. Raises SpecError if they do not divide them."""
    said = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    ranks = math.prod(degrees.values())
    if not ranks:
        raise SpecError(f"{where}: {said}: degrees begin at 1")
    if devices % ranks or not devices:
        raise SpecError(f"{where}: {said} does not divide {devices} devices; give another --cluster")
    return devices // ranks


def to_toml(table: Mapping[str, Any]) -> str:
    """A job's table as TOML: values first, then a section for each table in it."""
    return _section(table, "").lstrip("\n")


def _section(table: Mapping[str, Any], name: str) -> str:
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping) and v is not None}
    text = f"\n[{name}]\n" if name and plain else ""
    text += "".join(f"{key} = {_value(value)}\n" for key, value in plain.items())
    for key, value in table.items():
        if isinstance(value, Mapping):
            text += _section(value, f"{name}.{key}" if name else key)
    return text


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + " }"
    return str(value)
