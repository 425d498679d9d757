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

from greylag.spec.cluster import Cluster
from greylag.spec.job import Job
from greylag.spec.load import load_preset, presets
from greylag.spec.model import Model
from greylag.spec.precision import Precision
from greylag.spec.software import Software
from greylag.spec.strategy import Overlapped, RecomputeModule, Strategy

Raw = dict[str, Any]
"""A row as its file has it."""


class Untold(Exception):  # noqa: N818 -- not a fault of anybody
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
    """Raises Untold."""
    seconds: Callable[[Raw, Raw], float | None]
    memory: Callable[[Raw], Memory | None]
    generation: Callable[[Raw], str]
    family: Callable[[Raw], str]


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

    Raises Untold for a GPU without a preset.
    """
    name = next((p for key, p in _DEVICES if gpu.upper().startswith(key)), None)
    if name is None:
        raise Untold(f"no cluster preset for {gpu!r}")
    per_node = per_node or PER_NODE.get(name, 8)
    if num_gpus < per_node or num_gpus % per_node:
        per_node = num_gpus if num_gpus < per_node else 1
    made: Cluster = preset("cluster", f"{name}-{per_node}x{num_gpus // per_node}")
    return made


MEGATRON_MODULES: dict[str, RecomputeModule] = {
    "core_attn": "attention",
    "layernorm": "norm",
    "moe_act": "activation",
    "mla_up_proj": "mla_up",
    "mlp": "mlp",
    "moe": "moe",
}
"""Names of Megatron-Core's `recompute_modules` (megatron/core/transformer/transformer_config.py)."""


def modules(names: list[str]) -> dict[str, Any]:
    """Strategy fields for a list of Megatron's recompute modules."""
    known = tuple(MEGATRON_MODULES[name] for name in names)
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


def layout_stages(layout: str) -> tuple[int, ...]:
    """Layers per stage of Megatron's `--pipeline-model-parallel-layout`: `Et*3|(tt|)*6mL` is (3, 2, 2, 2, 2, 2, 2, 0).

    `t` is a decoder layer, `|` ends a stage, `E`, `m` and `L` are the embedding, an MTP layer and the loss; `x*3` and
    `(x)*3` repeat (NVIDIA/Megatron-LM, megatron/core/transformer/pipeline_parallel_layer_layout.py).
    """
    repeated = re.compile(r"(?:\(([^()]*)\)|([A-Za-z]))\*(\d+)")
    while found := repeated.search(layout):
        unit = found[1] if found[1] is not None else found[2]
        layout = layout[: found.start()] + unit * int(found[3]) + layout[found.end() :]
    return tuple(stage.count("t") for stage in layout.split("|"))


def padded(vocab: int, multiple: int) -> int:
    """A vocabulary padded as Megatron-LM pads it."""
    return -(-vocab // multiple) * multiple


def make_job(
    raw: Raw,
    *,
    model: Model,
    precision: str | Precision,
    on: Cluster,
    software: str | Software,
    sequence: int,
    global_batch: int,
    strategy: dict[str, Any],
) -> Job:
    """A Job, checked. Raises Untold with the first problem."""
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
        cluster=on,
        software=preset("software", software) if isinstance(software, str) else software,
        sequence=sequence,
        global_batch=global_batch,
        strategy=Strategy(**s),
    )
    problems = job.problems()
    if problems:
        raise Untold("Job.problems(): " + "; ".join(str(p) for p in problems))
    return job
