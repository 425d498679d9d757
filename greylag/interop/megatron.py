"""Megatron: a launch script, an argument list or a flat YAML of Megatron-LM, Megatron-Bridge or NeMo, as a job.

Read what a script would run (`interop.script`), take its arguments by name, and build each table of the job from them.
What a job cannot hold becomes a remark (`interop.megatron_names`); an architecture that is no transformer of ours is
refused.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from greylag.interop.arguments import Arguments, Remarks, options_from
from greylag.interop.flat_yaml import read_yaml
from greylag.interop.jobfile import Imported, count_devices, finish, place
from greylag.interop.megatron_model import model_table
from greylag.interop.megatron_names import ALIASES, sort_name
from greylag.interop.megatron_precision import precision_table, software_table
from greylag.interop.megatron_strategy import degrees, strategy_table
from greylag.interop.script import Script, read_script, split_words
from greylag.interop.words import is_unset, number_in
from greylag.spec.error import SpecError

_DIRECTIVE = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)
_PER_NODE = ("nproc-per-node", "gpus-per-node", "ntasks-per-node")
_NODES = ("nnodes", "nodes", "N")
_PER_NODE_VARIABLES = ("GPUS_PER_NODE", "NPROC_PER_NODE", "GPU_PER_NODE")
_NODES_VARIABLES = ("NNODES", "NUM_NODES")


def import_script(text: str, path: Path, cluster: str | None, given: Mapping[str, str]) -> Imported:
    """The job of a launch script or argument list. `given` sets its variables, and arguments by name."""
    where = str(path)
    script = read_script(text, given, where)
    words = _command(script, where)
    options = _plain(options_from(words)) | _chosen(given)
    asked = _plain(options_from(w for line in _DIRECTIVE.findall(text) for w in line.split("#")[0].split()))
    remarks = Remarks()
    for condition in script.skipped:
        remarks.approximate(f"if {condition}", "only a shell can tell; taken as false")
    held = {name: [value] for name, value in script.variables.items() if isinstance(value, str)}
    gres = (asked.get("gres") or [""])[0]
    devices = [gres.rsplit(":", 1)[-1]] if gres.startswith("gpu") else []
    size = (
        _count(_firsts([options, asked], _PER_NODE) + _firsts([held], _PER_NODE_VARIABLES) + devices),
        _count(_firsts([options, asked], _NODES) + _firsts([held], _NODES_VARIABLES)),
    )
    return _import(Arguments(options, where), remarks, path, cluster, size)


def _chosen(given: Mapping[str, str]) -> dict[str, list[str]]:
    """Arguments among what a caller sets: names in small letters; the others are variables."""
    return _plain({name: [value] for name, value in given.items() if name == name.lower()})


def import_yaml(text: str, path: Path, cluster: str | None, given: Mapping[str, str]) -> Imported:
    """The job of a flat YAML: Megatron-LM's test cases (`MODEL_ARGS`), or the configuration of Bridge and NeMo."""
    where = str(path)
    found = read_yaml(text, where)
    of_case = {k.removeprefix("MODEL_ARGS."): v for k, v in found.items() if k.startswith("MODEL_ARGS.")}
    options = _plain({key.removeprefix("--").replace("_", "-"): v for key, v in (of_case or found).items()})
    options |= _chosen(given)
    size = (_count(_firsts([options], _PER_NODE)), _count(_firsts([options], _NODES)))
    return _import(Arguments(options, where), Remarks(), path, cluster, size)


def _command(script: Script, where: str) -> list[str]:
    """The words of the command that trains: the one with most options, or all options that variables hold."""
    candidates = [_split(command, where) for command in script.commands]
    best = max(candidates, key=_weight, default=[])
    if _weight(best) < 1 or not _names_a_model(best):
        held = [[v] if isinstance(v, str) else v for v in script.variables.values()]
        words = [w for value in held for w in _split(value, where) if any("--" in v for v in value)]
        best = words if _names_a_model(words) else best
    if not _names_a_model(best):
        raise SpecError(f"{where}: no command with Megatron's arguments (--num-layers, --hidden-size, ...) found in it")
    return best


def _split(words: Sequence[str], where: str) -> list[str]:
    """Words, those that hold a command line themselves taken apart."""
    out: list[str] = []
    for word in words:
        holds = re.search(r"(^|\s)--[A-Za-z]", word) and re.search(r"\s", word.strip())
        out += split_words(word, where) if holds else [word]
    return out


def _weight(words: Sequence[str]) -> int:
    return sum(bool(re.match(r"--[A-Za-z]|\+{0,2}\w+\.[\w.]+=", word)) for word in words)


def _names_a_model(words: Sequence[str]) -> bool:
    return any(re.match(r"(--|.*\.)(num[-_]layers|hidden[-_]size|encoder[-_]num[-_]layers)\b", word) for word in words)


def _plain(options: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Options by Megatron's names: the last part of dotted ones, aliases resolved."""
    plain: dict[str, list[str]] = {}
    for name, words in options.items():
        last = name.rsplit(".", 1)[-1].replace("_", "-")
        plain[ALIASES.get(last, last)] = words
    return plain


def _firsts(sources: Iterable[Mapping[str, list[str]]], names: Sequence[str]) -> list[str]:
    """The first word of each of these names in each source: launchers, SLURM or variables."""
    return [source[name][0] for source in sources for name in names if source.get(name)]


def _count(values: Iterable[str]) -> int:
    """The first of the values that is a count; 0 if none is."""
    counts = [number_in(v) for v in values if not is_unset(v)]
    return next((n for n in counts if n and 0 < n < 10**6), 0)


def _import(a: Arguments, remarks: Remarks, path: Path, cluster: str | None, size: tuple[int, int]) -> Imported:
    _refuse(a)
    on = place(cluster, size[0], size[1], a.where)
    devices = count_devices(on, a.where)
    if all(size) and size[0] * size[1] != devices:
        remarks.approximate("--nnodes", f"{size[0] * size[1]} devices in the file, {devices} asked for")
    a.read |= {*_PER_NODE, *_NODES}
    model = {**model_table(a, remarks, degrees(a)["tp"]), "name": path.stem}
    strategy = strategy_table(a, remarks, model, devices)
    precision = precision_table(a, remarks, model)
    table: dict[str, Any] = {
        "sequence": a.integer("seq-length"),
        "global_batch": _global_batch(a, remarks, strategy),
        "cluster": on,
        "model": model,
        "precision": precision,
        "software": software_table(a, remarks),
        "strategy": strategy,
    }
    table["run"] = _run(a, remarks, table["global_batch"])
    if a.text("optimizer", "adam") not in ("adam", "adamw", "distributed_fused_adam", "mcore_distributed_optim"):
        remarks.leave_out("--optimizer", f"{a.text('optimizer', '')}; AdamW stands in its place: state and time")
    a.sort_unread(remarks, sort_name)
    return finish(table, path, "Megatron's arguments", remarks)


def _refuse(a: Arguments) -> None:
    """Raise SpecError on architectures of which a job would be a false picture."""
    for name in a.options:
        group, what = sort_name(name)
        if group == "refused" and not a.is_off(name):
            raise SpecError(f"{a.where}: --{name}: {what}: no job expresses that")


def _global_batch(a: Arguments, remarks: Remarks, strategy: dict[str, Any]) -> int:
    least = strategy["dp"] * strategy["micro_batch"]
    schedule = a.text("step-batch-size-schedule", "")
    if schedule and "global-batch-size" not in a:
        last = number_in(schedule.split()[-1].rsplit(":", 1)[-1]) if schedule.split() else None
        remarks.approximate("--step-batch-size-schedule", f"the last batch, {last}, is that of every step")
        return last or least
    if "rampup-batch-size" in a:
        a.read.add("rampup-batch-size")
        remarks.approximate("--rampup-batch-size", "the full batch is that of every step")
    return a.integer("global-batch-size", least)


def _run(a: Arguments, remarks: Remarks, batch: int) -> dict[str, Any]:
    """The `run` table; settings that a trainer would refuse are left out."""
    samples = a.integer("train-samples", 0)
    steps = a.integer("train-iters", 0) or (samples // batch if batch else 0)
    run: dict[str, Any] = {"steps": steps} if steps else {}
    rates = {"learning_rate": "lr", "min_learning_rate": "min-lr", "weight_decay": "weight-decay", "eps": "adam-eps"}
    rates |= {"beta1": "adam-beta1", "beta2": "adam-beta2", "clip_norm": "clip-grad"}
    run |= {key: a.number(name) for key, name in rates.items() if name in a}
    warmup = a.integer("lr-warmup-iters", 0)
    if a.options.get("lr-warmup-fraction"):
        whole = a.integer("lr-decay-iters", 0) or a.integer("lr-decay-samples", 0) // max(batch, 1) or steps
        warmup = int(a.number("lr-warmup-fraction") * whole)
    a.read |= {"lr-decay-iters", "lr-decay-samples", "lr-warmup-fraction", "lr-warmup-samples"}
    warmup = warmup or a.integer("lr-warmup-samples", 0) // max(batch, 1)
    run["warmup_steps"] = min(warmup, steps or 1000)
    if warmup > run["warmup_steps"]:
        remarks.approximate("--lr-warmup-fraction", "warms up beyond the last step; to the last step instead")
    run["seed"] = a.integer("seed", 1234)
    run["checkpoint_every"] = a.integer("save-interval", 0)
    if not run.get("clip_norm", 1):
        remarks.approximate("--clip-grad", "no clipping; the trainer clips to its default")
        del run["clip_norm"]
    if not run.get("learning_rate", 1):
        del run["learning_rate"]
    run["min_learning_rate"] = min(run.get("min_learning_rate", 0.0), run.get("learning_rate", 3e-4))
    return run
