"""Candidates: the strategies that a search ranges over, and which of them can run.

The rules are those of `Job.problems()`, for arrays: `runs` says of every point at once what `problems` says of one job,
and tests hold the two together. What only seems unwise is left out of the `Space` instead, and `--fix` or `--allow`
bring it back. A `Plan` is what all candidates of one evaluation share; a point is a row of `Points`.
"""

import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from greylag.spec.error import SpecError
from greylag.spec.holdings import chunks, stage_sizes
from greylag.spec.job import Job
from greylag.spec.model import Model
from greylag.spec.schedule import CHUNKS
from greylag.spec.strategy import RecomputeModule, Schedule, Strategy
from greylag.spec.work import head_gemm, layer_gemms

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
POINT = ("tp", "cp", "ep", "etp", "micro_batch", "zero", "dp")
"""Axes that differ between the candidates of one evaluation, in the order of their columns."""
PLANNED = ("pp", "vp", "schedule", "recompute", "recompute_modules", "stage_layers")
ALLOW = ("tp-across-nodes", "gpipe", "uneven", "few-micro-batches")
"""What a search leaves out unless asked: tensor parallelism beyond the node link, a schedule that 1F1B beats in memory
at the same time, pipelines whose fullest rank has far more layers than the average (`UNEVEN`), and pipelines with fewer
micro-batches than ranks, which stand half idle."""
UNEVEN = 1.3
SHORTEST = 1024
"""Tokens of a sequence that context parallelism leaves a rank; a search cuts no further."""
MICRO_BATCHES = (1, 2, 4, 8)
CHUNKS_OF_INTERLEAVED = (2, 3, 4, 5, 6, 8)
"""Of these a search takes those whose stages can be even, the ends one layer lighter or not; if none can be, all."""


class Plan(NamedTuple):
    """What the candidates of one evaluation share beside pp, recompute and precision."""

    schedule: Schedule
    vp: int
    stage_layers: tuple[int, ...]


class Recompute(NamedTuple):
    """A way to compute again."""

    kind: str
    modules: tuple[RecomputeModule, ...]


@dataclass(frozen=True)
class Space:
    """The values that each axis takes; None where they follow from others."""

    tp: tuple[int, ...]
    cp: tuple[int, ...]
    ep: tuple[int, ...]
    etp: tuple[int, ...] | None
    """None: 1 and tp."""
    micro_batch: tuple[int, ...]
    zero: tuple[int, ...]
    pp: tuple[int, ...]
    vp: tuple[int, ...] | None
    dp: tuple[int, ...] | None
    schedule: tuple[Schedule, ...]
    stage_layers: tuple[tuple[int, ...], ...] | None
    recompute: tuple[Recompute, ...]
    uneven: float
    few: bool
    """Whether pipelines may have fewer micro-batches than ranks."""


def space_of(job: Job, pins: Mapping[str, tuple[Any, ...]], allow: Sequence[str] = ()) -> Space:
    """The space of a job: every axis that `pins` do not hold. Greylag's own layers keep the job's tp, cp and pp.

    Raises SpecError for an unknown word in `allow`, and for experts' axes of a model without experts.
    """
    for word in allow:
        if word not in ALLOW:
            raise SpecError(f"--allow {word}: unknown; use {', '.join(ALLOW)}")
    if not job.model.moe and {"ep", "etp"} & set(pins):
        raise SpecError(f"--fix: model '{job.model.name}' has no experts; leave ep and etp out")
    model, devices = job.model, job.cluster.num_devices
    every = _divisors(devices)
    within = every if "tp-across-nodes" in allow else [n for n in every if n <= job.cluster.linked]
    experts = model.moe.num_experts if model.moe else 1
    own = job.software.activations == "autograd"  # what its trainer cannot cut, its simulator does not cut either
    axes: dict[str, Any] = {
        "tp": [job.strategy.tp] if own else [n for n in within if model.num_heads % n == 0],
        "cp": [job.strategy.cp] if own else [n for n in every if n == 1 or job.sequence // n >= SHORTEST],
        "ep": [n for n in every if experts % n == 0],
        "etp": None,
        "micro_batch": [n for n in MICRO_BATCHES if job.global_batch % n == 0],
        "zero": [0, 1, 2, 3],
        "pp": [job.strategy.pp] if own else [n for n in every if n <= model.num_layers],
        "vp": None,
        "dp": None,
        "schedule": [n for n in get_args(Schedule) if n != "gpipe" or n in allow],
        "stage_layers": None,
        "recompute": recomputes(job),
    }
    axes.update(pins)
    if "recompute" in pins:
        axes["recompute"] = [way for way in recomputes(job) if way.kind in pins["recompute"]]
    if "recompute_modules" in axes:
        axes["recompute"] = [Recompute("selective" if m else "none", m) for m in axes.pop("recompute_modules")]
    values: dict[str, Any] = {axis: v if v is None else tuple(v) for axis, v in axes.items()}
    return Space(**values, uneven=np.inf if "uneven" in allow else UNEVEN, few="few-micro-batches" in allow)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def recomputes(job: Job) -> list[Recompute]:
    """None, the modules that are dear in memory and cheap in time, those with the feed-forward layer's GEMMs, and full;
    and the job's own choice."""
    s, model = job.strategy, job.model
    if job.software.activations == "autograd":
        return [Recompute("none", ()), Recompute("full", ())]
    light: list[tuple[RecomputeModule, ...]] = [("norm",), ("norm", "activation")]
    if job.software.attention == "unfused":  # arXiv 2205.05198, section 5
        light += [("attention",), ("attention", "norm", "activation")]
    if model.mla:  # DeepSeek-V3's choice first (arXiv 2412.19437, section 3.2.3)
        light += [("norm", "mla_up"), ("norm", "activation", "mla_up")]
    feed_forward: tuple[RecomputeModule, ...] = ("mlp", "moe") if model.moe else ("mlp",)
    chosen = [*light, light[-1] + feed_forward]
    if s.recompute == "selective" and s.recompute_modules not in chosen:
        chosen.append(s.recompute_modules)
    return [Recompute("none", ()), *(Recompute("selective", m) for m in chosen), Recompute("full", ())]


@dataclass(frozen=True)
class Points:
    """Points of a pipeline degree that can run, one column for each of POINT, and how many of the grid cannot."""

    pp: int
    columns: Ints
    """(len(POINT), points)."""
    num_invalid: int

    def __len__(self) -> int:
        return int(self.columns.shape[1])

    def take(self, rows: Any) -> "Points":
        """Some of them."""
        return Points(self.pp, self.columns[:, rows], self.num_invalid)

    def job(self, job: Job) -> Job:
        """The job with a candidate in each place of its strategy's arrays."""
        values: dict[str, Any] = dict(zip(POINT, self.columns, strict=True))
        if not job.model.moe:
            values |= {"ep": 1, "etp": None}
        return replace(job, strategy=replace(job.strategy, pp=self.pp, recompute_layers=None, **values))


def points(job: Job, space: Space, pp: int) -> Points:
    """The points of a pipeline degree, in the order of the axes' values."""
    axes = [space.tp, space.cp, space.ep, space.etp or (0, -1), space.micro_batch, space.zero]
    grid = np.array([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], dtype=np.int64)
    tp, cp, _, etp, *_ = grid
    if space.etp is None:
        same = (etp == -1) & ((tp == 1) if job.model.moe else True)  # one way, not two
        etp[:] = np.where(etp == -1, tp, 1)
        grid = grid[:, ~same]
        tp, cp = grid[0], grid[1]
    dp = job.cluster.num_devices // (pp * tp * cp)
    columns = np.concatenate([grid, dp[None]])
    if space.dp is not None:
        columns = columns[:, np.isin(dp, space.dp)]
    if not space.few:
        columns = columns[:, columns[-1] * columns[4] * pp <= job.global_batch]
    usual = replace(job, strategy=replace(job.strategy, sequence_parallel=True))  # it has no effect where tp is 1
    sound = runs(Points(pp, columns, 0).job(usual))
    return Points(pp, columns[:, sound], int(np.size(sound) - np.count_nonzero(sound)))


def runs(job: Job) -> Bools:
    """Of a job whose strategy holds arrays: which candidates have no fault of the grid or the batch."""
    s, model = job.strategy, job.model
    dp, cp, tp = np.maximum(s.data_parallel, 1), s.cp, s.tp
    shards = np.maximum(dp // s.replicas, 1)
    ok: Bools = np.equal(s.world, job.cluster.num_devices) & (dp % s.replicas == 0)
    ok &= np.less_equal(s.zero, 1) | (shards * cp > 1)
    ok &= s.sequence_parallel | np.greater(tp, 1)
    ok &= model.num_heads % tp == 0
    if not model.mla:
        ok &= np.maximum(model.kv_heads, tp) % np.minimum(model.kv_heads, tp) == 0
    ok &= model.ffn_hidden_size % tp == 0
    ok &= job.sequence % np.where(np.greater(cp, 1), 2 * cp, 1) == 0
    ok &= job.global_batch % (dp * s.micro_batch) == 0
    if model.moe is None:
        return ok
    etp = tp if s.etp is None else s.etp
    ok &= (model.moe.ffn_hidden_size % tp == 0) & (model.moe.ffn_hidden_size % etp == 0)
    ok &= (model.moe.shared_width or 0) % tp == 0
    ok &= (model.moe.num_experts % s.ep == 0) & (shards * cp * tp % (s.ep * etp) == 0)
    return ok


def plans(job: Job, space: Space, pp: int) -> tuple[list[Plan], int]:
    """The plans of a pipeline degree that can run, and how many cannot."""
    if pp == 1:
        plain = "1f1b" in space.schedule and 1 in (space.vp or (1,)) and () in (space.stage_layers or ((),))
        return ([Plan("1f1b", 1, ())], 0) if plain else ([], 1)  # without stages the defaults alone have an effect
    sound, wrong = [], 0
    for schedule, vp in _orders(job.model, space, pp):
        layouts = _layouts(job, space, pp * vp) if space.stage_layers is None else space.stage_layers
        for layers in layouts:
            strategy = Strategy(pp=pp, vp=vp, schedule=schedule, stage_layers=layers)
            if not _staged(job.model, strategy):
                wrong += 1
            elif space.stage_layers is not None or _fullest(job.model, strategy) <= space.uneven:
                sound.append(Plan(schedule, vp, layers))
    return sound, wrong


def _orders(model: Model, space: Space, pp: int) -> Iterator[tuple[Schedule, int]]:
    """Schedules with their chunks a rank. A pinned vp that a schedule cannot have is a plan that cannot run."""
    even = [vp for vp in CHUNKS_OF_INTERLEAVED if any((model.num_layers + n) % (pp * vp) == 0 for n in range(3))]
    for schedule in space.schedule:
        usual = (even or CHUNKS_OF_INTERLEAVED) if schedule == "interleaved" else (CHUNKS[schedule],)
        yield from ((schedule, vp) for vp in (usual if space.vp is None else space.vp))


def _staged(model: Model, s: Strategy) -> bool:
    """Whether a plan has no fault of the pipeline."""
    if s.num_stages > model.num_layers + (2 if s.stage_layers else 0) or (s.schedule == "dualpipe" and s.pp % 2):
        return False
    fits = s.vp > 1 if s.schedule == "interleaved" else s.vp == CHUNKS[s.schedule]
    if not s.stage_layers:
        return fits
    adds_up = sum(s.stage_layers) == model.num_layers and min(s.stage_layers) >= 0
    return fits and adds_up and len(s.stage_layers) == s.num_stages


def _fullest(model: Model, s: Strategy) -> float:
    """Layers of the fullest rank, beside the average."""
    held = [sum(len(chunk.layers) for chunk in chunks(model, s, rank)) for rank in range(s.pp)]
    return max(held) * s.pp / sum(held)


def _layouts(job: Job, space: Space, stages: int) -> list[tuple[int, ...]]:
    """Even, and with fewer layers on the last and the first stage where layers do not divide or the ends weigh.

    The head weighs as many layers as its GEMM and its prediction modules take FLOPs; a stage takes at most that many
    fewer. Llama 3 takes one off both ends (arXiv 2407.21783, section 3.3.2).
    """
    model, layers = job.model, job.model.num_layers
    if stages > layers + 2:
        return [()]
    last = sum(g.flops for g in layer_gemms(model, layers - 1, 1024 * (model.moe.num_experts if model.moe else 1)))
    head = head_gemm(model, 1024 * (model.moe.num_experts if model.moe else 1)).flops / last
    head = head * (1 + model.num_mtp_layers) + model.num_mtp_layers
    if layers % stages == 0 and head < 0.5:
        return [()]
    found: list[tuple[int, ...]] = [()]
    for before, behind in itertools.product((0, 1), sorted({0, 1, max(1, round(head))})):
        each, more = divmod(layers + before + behind, stages)
        sizes = [each + (0 < n <= more) for n in range(stages)] if more < stages - 1 else [each + 1] * more
        sizes += [each] * (stages - len(sizes))
        sizes[0], sizes[-1] = sizes[0] - before, sizes[-1] - behind
        as_given = stage_sizes(model, Strategy(pp=stages)) if not before + behind else []
        if min(sizes) >= 0 and sum(sizes) == layers and sizes != as_given and tuple(sizes) not in found:
            found.append(tuple(sizes))
    return found


def pinned(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Pins by axis, from "strategy.tp=8", or "tp=[4, 8]" for values to choose from. Raises SpecError."""
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        name, given = text.partition("=")[0].strip().removeprefix("strategy."), text.partition("=")[2]
        if name not in (*POINT, *PLANNED):
            raise SpecError(f"--fix {text}: no axis of the search; use {', '.join((*POINT, *PLANNED))}")
        try:
            value = tomllib.loads(f"v = {given}")["v"]
        except ValueError:
            value = given.strip()
        found[name] = _values(name, value, text)
    return found


def _values(name: str, value: Any, text: str) -> tuple[Any, ...]:
    """The values of a pin."""
    is_list = name in ("stage_layers", "recompute_modules")
    many = isinstance(value, list) and (not is_list or bool(value and isinstance(value[0], list)))
    values = value if many else [value]
    words = {"schedule": get_args(Schedule), "recompute": ("none", "selective", "full")}.get(name, ())
    if is_list:
        known = get_args(RecomputeModule)
        sound = (lambda x: type(x) is int) if name == "stage_layers" else (lambda x: x in known)
        right = all(isinstance(v, list) and all(map(sound, v)) for v in values)
    elif words:
        right = all(v in words for v in values)
    else:
        right = all(type(v) is int and v >= (name != "zero") and (name != "zero" or v <= 3) for v in values)
    if not right or not values:
        kind = f"one of {', '.join(words)}" if words else "a list" if is_list else "a whole number"
        raise SpecError(f"--fix {text}: must be {kind}, or a list of such; change it")
    return tuple(tuple(v) if is_list else v for v in values)
