"""Row: one published run, as a Job to predict and the figures to compare with.

The dialects beside this file each read the rows of one source; what a source does not print is filled from its own
rules, which the dialect's docstring states with their place. A row that no Job can say keeps its figures and says
why.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from greylag.interop.megatron_strategy import RECOMPUTE_MODULES
from greylag.interop.megatron_strategy import layout_stages as layout_stages
from greylag.spec.cluster import Cluster
from greylag.spec.job import Job
from greylag.spec.load import load_preset, presets
from greylag.spec.model import Model
from greylag.spec.precision import Precision
from greylag.spec.software import Software
from greylag.spec.strategy import Overlapped, Strategy

Raw = dict[str, Any]
"""A row as its file has it."""


class UntoldError(Exception):
    """A row that a Job cannot say; the text says why."""


class Memory(NamedTuple):
    """Peak memory of a run."""

    bytes: float
    kind: str
    """`allocated` by tensors, or `reserved` by the allocator."""
    rank: str = "max"
    """The rank that was measured: `max` over all, or the `last`."""


@dataclass(frozen=True)
class Row:
    """One run. `job` is None where `why_not` says why no Job says it."""

    id: str
    group: str
    file: str
    job: Job | None
    why_not: str
    seconds: float | None
    """Measured seconds of a step."""
    memory: Memory | None
    generation: str
    """Name of the software preset."""
    family: str
    """Name of the model, for leaving one model out."""
    raw: Raw

    @property
    def bytes(self) -> float | None:
        """Measured peak bytes of a rank."""
        return self.memory.bytes if self.memory else None


class Dialect(NamedTuple):
    """How to read the rows of one source. The second argument is `models.json` by name."""

    group: str
    job: Callable[[Raw, Raw], Job]
    """Raises UntoldError."""
    seconds: Callable[[Raw, Raw], float | None]
    generation: Callable[[Raw], str]
    memory: Callable[[Raw], Memory | None] = lambda raw: None
    family: Callable[[Raw], str] = lambda raw: raw["model"]["name"]


def printed(*names: str, per_second: float = 1.0) -> Callable[[Raw, Raw], float | None]:
    """Reads the step time that a row prints under one of these names, the first that it has."""

    def seconds(raw: Raw, models: Raw) -> float | None:
        found = _measured(raw, names)
        return None if found is None else found / per_second

    return seconds


def peak(*names: str, unit: float = 1.0, kind: str = "allocated", rank: str = "max") -> Callable[[Raw], Memory | None]:
    """Reads the peak memory that a row prints under one of these names, in units of so many bytes."""

    def memory(raw: Raw) -> Memory | None:
        found = _measured(raw, names)
        return None if found is None else Memory(found * unit, kind, rank)

    return memory


def _measured(raw: Raw, names: tuple[str, ...]) -> float | None:
    return next((raw["measured"][name] for name in names if raw["measured"].get(name) is not None), None)


@functools.cache
def preset(section: str, name: str) -> Any:
    """A preset, read once."""
    return load_preset(section, name)


def generation(stem: str, version: str) -> str:
    """The software preset of a release, or of the newest one before it, or else of the oldest.

    Releases that no preset was made for are told as their neighbour: `generation("nemo", "25.03")` is `nemo-25.02`.
    """
    known = sorted(name for name in presets("software") if name.startswith(f"{stem}-"))
    before = [name for name in known if name <= f"{stem}-{version}"]
    return before[-1] if before else known[0]


def family(name: str) -> str:
    """One name for a model that sources spell in many ways: `llama31_405b` and `Llama 3.1 405B` are `llama-3-405b`."""
    name = re.sub(r"[ _]", "-", name.lower())
    name = re.sub(r"^llama-?(\d)(\.?1)?(?=-)", r"llama-\1", name)
    name = re.sub(r"^gpt-?3-", "gpt-", name)
    name = re.sub(r"^nemotron-?4-", "nemotron-4-", name)
    return re.sub(r"^deepseek-?v", "deepseek-v", name)


_DEVICES = (
    ("GB300", "gb300"),
    ("GB200", "gb200"),
    ("B300", "b300"),
    ("B200", "b200"),
    ("H100-SXM 96GB", "h100-96"),
    ("H200", "h200"),
    ("H800", "h800"),
    ("H100", "h100"),
    ("A100_40GB", "a100-40"),
    ("A100 80GB PCIE", "a100-pcie"),
    ("A100", "a100"),
    ("V100", "v100"),
)
PER_NODE = {"gb200": 4, "gb300": 4, "v100": 16}
"""Devices of a node where the source does not say; 8 of all others."""


@functools.cache
def cluster(gpu: str, num_gpus: int, per_node: int | None = None) -> Cluster:
    """The cluster preset for a source's name of a GPU, in whole nodes (or one part of a node).

    Raises UntoldError for a GPU without a preset.
    """
    name = next((p for key, p in _DEVICES if gpu.upper().startswith(key)), None)
    if name is None:
        raise UntoldError(f"no cluster preset for {gpu!r}")
    per_node = per_node or PER_NODE.get(name, 8)
    if num_gpus < per_node or num_gpus % per_node:
        per_node = num_gpus if num_gpus < per_node else 1
    made: Cluster = preset("cluster", f"{name}-{per_node}x{num_gpus // per_node}")
    return made


def modules(names: list[str]) -> dict[str, Any]:
    """Strategy fields for a list of Megatron's recompute modules."""
    known = tuple(RECOMPUTE_MODULES[name] for name in names)
    return {"recompute": "selective", "recompute_modules": known} if known else {}


def overlapped(*pairs: tuple[Overlapped, Any]) -> tuple[Overlapped, ...]:
    """The axes whose flag is set."""
    return tuple(axis for axis, flag in pairs if flag)


def balanced_stages(num_layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage where embedding and loss count as a layer each, as Megatron's account-for-embedding/-loss do.

    Empty where the layers alone divide evenly, or not even so.
    """
    if stages == 1 or num_layers % stages == 0 or (num_layers + 2) % stages:
        return ()
    each = (num_layers + 2) // stages
    return (each - 1, *[each] * (stages - 2), each - 1)


def padded(vocab: int, multiple: int) -> int:
    """A vocabulary padded as Megatron-LM pads it."""
    return -(-vocab // multiple) * multiple


def make_job(
    raw: Raw,
    *,
    model: Model,
    precision: str | Precision,
    software: str | Software,
    strategy: dict[str, Any],
    on: Cluster | None = None,
    sequence: int | None = None,
) -> Job:
    """A Job, checked; cluster and sequence are those that the row prints if not given. Raises UntoldError."""
    h, b = raw["hardware"], raw["batch"]
    sequence = sequence or b["seq_len"]
    s = {k: v for k, v in strategy.items() if v is not None}
    if s.get("pp", 1) == 1:
        s = {k: v for k, v in s.items() if k not in ("vp", "schedule", "stage_layers")}
        s["overlap"] = tuple(axis for axis in s.get("overlap", ("dp",)) if axis != "pp")
    elif s.get("vp", 1) > 1:
        s.setdefault("schedule", "interleaved")
    if s.get("stage_layers") == ():
        del s["stage_layers"]
    job = Job(
        name=raw["id"].replace("/", "_"),
        model=replace(model, max_sequence=max(model.max_sequence, sequence)),
        precision=preset("precision", precision) if isinstance(precision, str) else precision,
        cluster=on or cluster(h["gpu"], h["num_gpus"], h.get("gpus_per_node")),
        software=preset("software", software) if isinstance(software, str) else software,
        sequence=sequence,
        global_batch=b["gbs"],
        strategy=Strategy(**s),
    )
    problems = job.problems()
    if problems:
        raise UntoldError("Job.problems(): " + "; ".join(str(p) for p in problems))
    return job
