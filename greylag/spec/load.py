"""Reading job files: TOML, presets by name, `key=value` overrides, and errors that say what to do.

The order is preset < file < command line. `model`, `precision`, `cluster` and `software` are each a preset's name, or a
table that may start from one with `preset = "name"`. For a model, the path of a Hugging Face config.json may stand in
the place of the name.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from greylag.spec.cluster import Cluster
from greylag.spec.error import SpecError
from greylag.spec.huggingface import model_table
from greylag.spec.job import Job
from greylag.spec.model import Model
from greylag.spec.precision import Precision, Recipe
from greylag.spec.software import Software

PRESETS = Path(__file__).parent.parent / "presets"
SECTIONS: dict[str, tuple[type, str]] = {
    "model": (Model, "models"),
    "precision": (Precision, "precisions"),
    "cluster": (Cluster, "clusters"),
    "software": (Software, "software"),
}
CHANGED = " (changed)"
"""Behind the name of a preset that a job changes."""
_SIZED = re.compile(r"(?P<preset>.+)-(?P<per_node>\d+)x(?P<nodes>\d+)")


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read a job file, fill in its presets and apply `key=value` overrides (`strategy.tp=8`).

    Raises SpecError, naming the file and key, if it cannot be read or does not fit. What only does not work
    together (`tp` that does not divide the heads) is left to `Job.problems()`.
    """
    path = Path(path)
    table = _read_toml(path)
    keys: list[str] = []
    for override in overrides:
        key, value = _parse_override(override)
        lost = next((k for k in keys if f"{k}.".startswith(f"{key}.")), None)
        if lost:
            raise SpecError(f"override {override!r} undoes the one of '{lost}' before it; leave one of them out")
        keys.append(key)
        _override(table, key, value)
    return job_from(table, name=path.stem, where=str(path), folder=path.parent)


def job_from(table: dict[str, Any], name: str, where: str = "job", folder: Path = Path()) -> Job:
    """A Job from a table as a job file holds it. Paths in it are relative to `folder`."""
    table = {"name": name, "software": "greylag", **table}
    for section, (kind, kept_in) in SECTIONS.items():
        if section not in table:
            raise SpecError(
                f"{where}: '{section}' is missing; name a preset ({', '.join(presets(kept_in))}) or write a table"
            )
        value = _filed(table[section], section, folder)
        table[section] = _section(value, section, kind, kept_in, where)
    _fill_recipes(table["precision"], where)
    _check_keys(table, Job, where, "")
    _check_range(table, where, "")
    _fill_degrees(table)
    job: Job = _convert(table, Job, where)
    return job


def load_preset(section: str, name: str) -> Any:
    """One preset as its struct: `load_preset("model", "llama-3-8b")`."""
    kind, folder = SECTIONS[section]
    return _convert(_section(name, section, kind, folder, name), kind, name)


def presets(folder: str) -> list[str]:
    """Names of the presets in a folder: models, precisions, clusters."""
    return sorted(p.stem for p in (PRESETS / folder).glob("*.toml"))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = (
            difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], 1)
            if path.parent.is_dir()
            else []
        )
        hint = f"; did you mean {path.parent / near[0]}?" if near else "; give the path of a TOML file"
        raise SpecError(f"{path}: no such file{hint}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path}: not text in UTF-8; give the path of a TOML file") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}; give the path of a TOML file") from None
    except (ValueError, RecursionError) as error:  # beside TOMLDecodeError: numbers or nesting beyond Python's limits
        raise SpecError(f"{path}: not valid TOML: {error}") from None


def _parse_override(override: str) -> tuple[str, Any]:
    """Key and value of `key=value`; what is not a TOML value is a string."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise SpecError(f"override {override!r}: write it as key=value, for instance run.steps=100")
    try:
        parsed = tomllib.loads(f"v = {text}")
    except (ValueError, RecursionError):
        return key, text
    return key, parsed["v"] if len(parsed) == 1 else text


def _override(table: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = table.get(section)
        if isinstance(inner, str) and section in SECTIONS:
            inner = {"preset": inner}
        elif inner is None:
            inner = {}
        elif not isinstance(inner, dict):
            raise SpecError(f"override of '{key}': '{section}' is a value and not a table; override '{section}' itself")
        table[section] = dict(inner)
        table = table[section]
    table[last] = value


def _filed(value: Any, section: str, folder: Path) -> Any:
    """The section of a file that is named in a preset's place, with the changes that a table makes to it.

    It is the config.json of a model, or a TOML file of any section's keys. Anything else is left as it is.
    """
    source = value.get("preset") if isinstance(value, dict) else value
    if isinstance(source, str) and source.endswith(".json") and section == "model":
        base = model_table(folder / source)
    elif isinstance(source, str) and source.endswith(".toml"):
        base = {"name": Path(source).stem, **_read_toml(folder / source)}
        named = {str(base.get(key, "")).partition("-")[0] for key in ("name", "preset")}
        if section == "cluster" and "local" in named:
            raise SpecError(f"{folder / source}: 'local' is the name of this machine's CPUs; give another")
    else:
        return value
    own = {key: inner for key, inner in value.items() if key != "preset"} if isinstance(value, dict) else {}
    changed = {} if section == "cluster" else {"name": base["name"] + CHANGED}
    return _merge(base, changed | own) if own else base


def _section(value: Any, section: str, kind: type, folder: str, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        return _preset(value, folder, section, where)
    if not isinstance(value, dict):
        raise SpecError(f"{where}: '{section}' must be a preset's name or a table, is {type(value).__name__}")
    own = dict(value)
    preset = own.pop("preset", None)
    if preset is not None and not isinstance(preset, str):
        raise SpecError(f"{where}: '{section}.preset' must be a name, is {type(preset).__name__}")
    _check_keys(own, kind, where, f"{section}.")
    if preset is None:
        return {"name": f"own-{section}", **own}
    base = _preset(preset, folder, section, where)
    if own:
        base = {**_merge(base, own), "name": own.get("name", base["name"] + CHANGED)}
        if section == "cluster":
            base["name"] = own.get("name", preset)
    return base


def _merge(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in own.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _preset(name: str, folder: str, section: str, where: str) -> dict[str, Any]:
    size = _SIZED.fullmatch(name) if folder == "clusters" else None
    stem = size["preset"] if size else name
    known = presets(folder)
    if stem not in known:
        near = difflib.get_close_matches(stem, known, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
        raise SpecError(f"{where}: no preset {stem!r} for '{section}'; {hint}")
    table: dict[str, Any] = {
        "name": name,
        **tomllib.loads((PRESETS / folder / f"{stem}.toml").read_text(encoding="utf-8")),
    }
    if size:
        table |= {"devices_per_node": int(size["per_node"]), "num_nodes": int(size["nodes"])}
    if stem == "local":
        table["device"] = {**table["device"], "memory_gib": _host_memory_gib() / max(1, table["devices_per_node"])}
    return table


def _fill_recipes(precision: dict[str, Any], where: str) -> None:
    """Put the preset in the place of its name, where `precision.overrides` name one."""
    overrides = precision.get("overrides", [])
    if not isinstance(overrides, list) or not all(isinstance(o, dict) for o in overrides):
        return  # msgspec says what is wrong
    filled = []
    for number, override in enumerate(overrides):
        key, recipe = f"precision.overrides[{number}].recipe", override.get("recipe")
        if isinstance(recipe, str):
            preset = _preset(recipe, "precisions", key, where)
            more = sorted(preset.keys() - {*Recipe.__struct_fields__, "high"})
            if more:
                raise SpecError(
                    f"{where}: '{key}': '{recipe}' says more than a recipe ({', '.join(more)}), which an override of "
                    "layers cannot; name another, or set that for the whole run"
                )
            override = {**override, "recipe": {k: v for k, v in preset.items() if k in Recipe.__struct_fields__}}
        elif isinstance(recipe, dict):
            override = {**override, "recipe": {"name": "own-recipe", **recipe}}
        filled.append(override)
    if filled:
        precision["overrides"] = filled


def _host_memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _fill_degrees(table: dict[str, Any]) -> None:
    """Let dp take the devices that pp, cp and tp leave over, where the file does not say it."""
    strategy = table.setdefault("strategy", {})
    cluster = table["cluster"]
    if not isinstance(strategy, dict) or strategy.get("dp") is not None:
        return
    degrees = [strategy.get(axis, 1) for axis in ("pp", "cp", "tp")]
    devices = [cluster.get("devices_per_node", 8), cluster.get("num_nodes", 1)]
    if all(isinstance(n, int) and n > 0 for n in degrees + devices):
        rest = devices[0] * devices[1] // (degrees[0] * degrees[1] * degrees[2])
        table["strategy"] = {**strategy, "dp": max(rest, 1)}


def _check_keys(table: dict[str, Any], kind: type, where: str, prefix: str) -> None:
    """Refuse unknown keys by name, with the nearest known one."""
    fields = {k: v for k, v in get_type_hints(kind).items() if k in kind.__struct_fields__}  # type: ignore[attr-defined]
    for key, value in table.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f"did you mean '{prefix}{near[0]}'?" if near else f"known keys: {', '.join(fields)}"
            raise SpecError(f"{where}: unknown key {prefix + key!r}; {hint}")
        inner = _struct_in(fields[key])
        if inner and isinstance(value, dict):
            _check_keys(value, inner, where, f"{prefix}{key}.")
        elif inner and isinstance(value, list):
            for number, item in enumerate(value):
                if isinstance(item, dict):
                    _check_keys(item, inner, where, f"{prefix}{key}[{number}].")


def _struct_in(hint: Any) -> type | None:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType, tuple) else (hint,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, msgspec.Struct)), None)


def _check_range(value: Any, where: str, key: str) -> None:
    """Refuse integers that 64 bits do not hold: TOML has none, and no field means one."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_range(inner, where, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_range(inner, where, f"{key}[{number}]")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise SpecError(f"{where}: '{key}': a number beyond 64 bits; lower it")


_FAULT = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<key>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_TYPE = re.compile(r"Expected `(\w+).*`, got `(\w+)`")
_TOML_NAMES = {
    "object": "table",
    "array": "list",
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
}


def _convert(table: dict[str, Any], kind: type, where: str) -> Any:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise SpecError(f"{where}: {_in_words(str(error), kind)}") from None


def _in_words(fault: str, kind: type) -> str:
    """What msgspec says of a value that does not fit, in TOML's words and with the key first."""
    match = _FAULT.fullmatch(fault)
    assert match
    what, key = match["what"], match["key"] or ""
    missing, mistaken = _MISSING.fullmatch(what), _TYPE.fullmatch(what)
    if missing:
        return f"'{f'{key}.' if key else ''}{missing[1]}' is missing; add it"
    if mistaken:
        wanted, found = (_TOML_NAMES.get(name, name) for name in mistaken.groups())
        return f"'{key}' must be of type {wanted}, is {found}"
    if what.startswith("Invalid enum value"):
        value = what.removeprefix("Invalid enum value ").replace("\n", "\\n")
        return f"'{key}': {value} is none of {', '.join(map(repr, _choices(kind, key)))}; choose one"
    return f"'{key}': {what}"


def _choices(kind: Any, key: str) -> tuple[Any, ...]:
    """The values that a Literal field lets through."""
    for name in re.sub(r"\[[^]]*\]", "", key).split("."):
        kind = get_type_hints(_struct_in(kind))[name]
    return get_args(get_args(kind)[0] if get_origin(kind) is tuple else kind)
