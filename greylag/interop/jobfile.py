"""Job file: what an import gives, a job's table with remarks on what it does not say exactly, and the table as TOML."""

import json
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
_SIZED = re.compile(r".+-\d+x\d+")


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
    head = f"# Imported by greylag from {dialect}: {source.name}\n"
    notes = "".join(f"# {line}\n" for line in remarks.lines() if not line.startswith("irrelevant"))
    return Imported(text=head + _printable(notes) + to_toml(table), remarks=tuple(remarks.lines()), job=job)


def changed(preset: str, section: str, facts: Mapping[str, Any]) -> dict[str, Any] | str:
    """A preset with the facts that differ from its own; its name alone where none does."""
    own = msgspec.to_builtins(load_preset(section, preset))
    rest = {key: value for key, value in facts.items() if own.get(key) != value}
    return {"preset": preset, **rest} if rest else preset


def _said(table: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """A table without the values that a job has anyway."""
    kept: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        value = table.get(field.name)
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        if isinstance(value, Mapping) and field.name in _INNER:
            kept[field.name] = _said(value, _INNER[field.name])
        elif value is not None and (value != default or isinstance(value, bool) is not isinstance(default, bool)):
            kept[field.name] = value
    return kept | {key: value for key, value in table.items() if key not in kind.__struct_fields__}  # type: ignore[attr-defined]


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


def count_devices(table: dict[str, Any], where: str) -> int:
    """How many devices the cluster of a job's table has."""
    match = re.fullmatch(r".+-(\d+)x(\d+)", table["cluster"])
    if not match or len(match[1]) + len(match[2]) > 15:
        raise SpecError(f"{where}: cluster {table['cluster']!r}: write it as h100-8x16")
    return int(match[1]) * int(match[2])


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


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
