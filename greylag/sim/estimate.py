"""Estimate: seconds of a step on accelerators, for one job or for a hundred thousand strategies of it.

A step is the span of the pipeline, what shows of the data-parallel collectives around it, and the optimizer. Every
degree of the strategy but pp and vp, the sequence and the global batch may be numpy arrays; the lines are the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from greylag.sim.fill import is_placed, placed
from greylag.sim.layer import PASSES, LayerTime, Pass, embedding_time, head_time, layer_time, tokens_of
from greylag.sim.links import Links
from greylag.sim.operators import Operators, Size
from greylag.sim.span import span
from greylag.sim.timeline import graph_of, simulate
from greylag.spec.holdings import chunk_weights, chunks, on_rank, stage_sizes, stages_of, state_shards
from greylag.spec.job import Job
from greylag.spec.precision import BYTES
from greylag.spec.work import kinds_of_layers, layer_gemms

ADAMW_BYTES = 34.0
"""Moved per parameter of a rank's shard: the gradient read for its norm and for the update (8), the master copy and two
moments read and written (24), the weight written (2)."""

BETWEEN_STEPS = 12e-3
"""Seconds for which a device waits for its host between steps: the host reads the norm of the gradients before it
launches the update, and has schedules, data and logs to see to before the next forward. A choice of ours."""

BUCKETS = 8
"""Calls in which gradients are reduced beside backward where layers are not sharded (a few dozen million parameters
each: Megatron-Core, distributed_data_parallel.py)."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, by phase (`spec.step.PHASES`) and by cause."""

    phases: dict[str, Size]
    causes: dict[str, Size]
    """Of a rank of the busiest stage: gemm, attention, elementwise, quantize, host, tp, cp, ep, recompute, pp (sends
    that nothing hides); bubble (all for which that rank waits for others), dp, optimizer."""
    stages: dict[Pass, Size]
    """Seconds per micro-batch of each stage, (candidates, stages)."""
    transfer: Size
    """Seconds from the end of a stage to the start of the next; without overlap it is in the stages themselves."""

    @property
    def seconds(self) -> Size:
        """Of the whole step."""
        return sum(self.phases.values())


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of each kind of layer by the number of its first, of the embedding and of the head.

    They are alike for all schedules, virtual stages and layouts of a pipeline of the same degree.
    """

    layers: dict[int, LayerTime]
    embedding: LayerTime
    head: LayerTime

    @cached_property
    def totals(self) -> dict[int, dict[Pass, Size]]:
        """Seconds by pass, by the id of what takes them."""
        return {id(t): {p: t.seconds(p) for p in PASSES} for t in (*self.layers.values(), self.embedding, self.head)}


def layer_times(job: Job) -> LayerTimes:
    """What the layers of a job take. Raises SpecError where a figure of the cluster is missing."""
    operators, links = Operators(job.cluster, job.software), Links(job.cluster)
    kinds = dict.fromkeys(kinds_of_layers(job.model, job.precision))
    layers = {kind: layer_time(job, kind, operators, links) for kind in kinds}
    return LayerTimes(layers, embedding_time(job, operators, links), head_time(job, operators, links))


def estimate(job: Job, layers: LayerTimes | None = None) -> Estimate:
    """The estimate of a job on a cluster of accelerators. `layers` spares counting what `layer_times` gives.

    Without them it is one job's, whose weight gradients stand where its framework places them; candidates have theirs
    by rule, which is never faster. Raises SpecError where a figure of the cluster is missing.
    """
    operators, links = Operators(job.cluster, job.software), Links(job.cluster)
    s, m = job.strategy, job.num_micro_batches
    stages, times = _stages(job, layers or layer_times(job))
    transfer = _transfer(job, links)
    if s.pp > 1 and "pp" not in s.overlap:
        # Without overlap a stage stands still while it sends: once forward, once backward.
        stages = stages | {p: stages[p] + transfer[:, None] for p in ("forward", "input_gradient")}
    hop = transfer * (job.software.exposed if "pp" in s.overlap else 0.0)
    forward, dgrad, wgrad = (stages[p] for p in PASSES)
    length = span(s.schedule, s.pp, s.vp, m, forward, dgrad, wgrad, hop)
    if layers is None and is_placed(job):
        one = (forward[0], dgrad[0], wgrad[0], float(hop.item()))
        length = np.array([simulate(graph_of(placed(job, *one)), *one).period])
    busiest, forward, busy = _busiest(job, stages)
    forward = m * forward
    backward = m * busy - forward
    gathering, scattering = _data_parallel(job, links, forward, backward)
    dp, is_whole, bubble = gathering + scattering, np.equal(s.zero, 0), np.maximum(0.0, length - m * busy)
    phases = {
        "forward": forward + np.where(is_whole, 0.0, gathering),
        "backward": backward + np.where(is_whole, 0.0, scattering),
        "reduce": np.where(is_whole, dp, 0.0),
        "optimizer": _optimizer(job, operators, links),
        "other": bubble + BETWEEN_STEPS,
    }
    causes = {name: _share(job) * m * seconds for name, seconds in _causes(job, times, busiest).items()}
    if s.pp > 1 and "pp" not in s.overlap:
        causes["pp"] = _share(job) * m * 2 * len(busiest) * transfer
    causes["host"] = causes.get("host", 0.0) + BETWEEN_STEPS
    causes |= {"bubble": bubble, "dp": dp, "optimizer": phases["optimizer"]}
    return Estimate(phases, causes, stages, hop)


StageTimes = list[list[tuple[int, LayerTime]]]
"""By stage: how many of each kind of layer, and their times."""


def _stages(job: Job, known: LayerTimes) -> tuple[dict[Pass, Size], StageTimes]:
    """Seconds of each stage by pass, (candidates, stages), recompute as input gradient; and what they are made of."""
    kinds, alike, ends = kinds_of_layers(job.model, job.precision), known.layers, (known.embedding, known.head)
    sizes, first, times = stage_sizes(job.model, job.strategy), 0, []
    for number, size in enumerate(sizes):
        mine = kinds[first : first + size]
        first += size
        stage = [(mine.count(kind), alike[kind]) for kind in dict.fromkeys(mine)]
        stage += [(1, ends[0])] * (number == 0) + [(1, ends[1])] * (number == len(sizes) - 1)
        if number == len(sizes) - 1 and job.model.num_mtp_layers:
            stage += [(job.model.num_mtp_layers, alike[kinds[-1]]), (job.model.num_mtp_layers, ends[1])]
        times.append(stage)
    return _seconds(job, _even(times), known.totals), times


def _seconds(job: Job, times: StageTimes, each: dict[int, dict[Pass, Size]]) -> dict[Pass, Size]:
    """Seconds of each stage by pass, (candidates, stages); stages of the same layers are counted once."""
    keys = [tuple((n, id(t)) for n, t in stage) for stage in times]
    distinct = dict(zip(keys, times, strict=True))
    place = {key: number for number, key in enumerate(distinct)}
    seconds: dict[Pass, list[Size]] = {
        p: [sum(n * each[id(t)][p] for n, t in stage) for stage in distinct.values()] for p in PASSES
    }
    seconds["input_gradient"] = [
        x + _again(job, stage) for x, stage in zip(seconds["input_gradient"], distinct.values(), strict=True)
    ]
    columns = np.array([place[key] for key in keys])
    return {p: np.stack(np.broadcast_arrays(*map(np.atleast_1d, v)), axis=-1)[:, columns] for p, v in seconds.items()}


def _even(times: StageTimes) -> StageTimes:
    """A stage without layers takes no time, and a sum of nothing has no shape."""
    return [stage or [(0, times[0][0][1])] for stage in times]


def _again(job: Job, stage: list[tuple[int, LayerTime]]) -> Size:
    """Seconds of forward that backward repeats on a stage."""
    s, total = job.strategy, 0.0
    if s.recompute == "none":
        return total
    layers = [(n, t) for n, t in stage if "attention" in t.spent["forward"]]
    num_layers = sum(n for n, _ in layers)
    share = 1.0 if s.recompute_layers is None or not num_layers else min(1.0, s.recompute_layers / num_layers)
    return share * sum(n * (t.seconds("forward") if s.recompute == "full" else t.again) for n, t in layers)


def _busiest(job: Job, stages: dict[Pass, Size]) -> tuple[list[int], Size, Size]:
    """The stages of the rank that computes longest for the first candidate; of each candidate's own busiest rank the
    seconds of forward, and of the whole, per micro-batch."""
    s = job.strategy
    mine = np.array([stages_of(s, rank) for rank in range(s.pp)])
    whole = sum(stages[p] for p in PASSES)[:, mine].sum(axis=2)
    most = whole.argmax(axis=1)
    forward = stages["forward"][np.arange(len(most))[:, None], mine[most]].sum(axis=1)
    return mine[most[0]].tolist(), _share(job) * forward, _share(job) * whole.max(axis=1)


def _share(job: Job) -> float:
    """Of the micro-batches, those that a stage sees: of DualPipe's two directions each brings half."""
    return 0.5 if job.strategy.pp > 1 and job.strategy.schedule == "dualpipe" else 1.0


def _causes(job: Job, times: StageTimes, busiest: list[int]) -> dict[str, Size]:
    """Seconds per micro-batch of some stages by cause."""
    causes: dict[str, Size] = {}
    for number in busiest:
        for count, time in times[number]:
            for when in PASSES:
                for what, seconds in time.spent[when].items():
                    causes[what] = causes.get(what, 0.0) + count * seconds
        again = _again(job, times[number])
        if np.any(again):
            causes["recompute"] = causes.get("recompute", 0.0) + again
    return causes


def _transfer(job: Job, links: Links) -> Size:
    """Seconds to hand a micro-batch's activations to the next stage."""
    s = job.strategy
    if s.pp == 1:
        return np.zeros(1)
    size = tokens_of(job) * job.model.hidden_size * BYTES[job.precision.high] / s.sequence_cut
    return np.atleast_1d(links.send(size, s.data_parallel * s.cp * s.tp))


def _data_parallel(job: Job, links: Links, forward: Size, backward: Size) -> tuple[Size, Size]:
    """Seconds that data parallelism shows in forward and in backward: parameters gathered, gradients reduced.

    At ZeRO-3 each micro-batch gathers twice and scatters once, a layer ahead of compute; otherwise gradients are
    reduced beside the last micro-batch's backward, and parameters gathered beside the first one's forward. Interleaved
    stages take turns of pp micro-batches: the first to end has the last turns of the others beside it. At ZeRO-0 the
    two are the halves of an all-reduce. What leads into the first layer and out of the last nothing can hide.
    """
    s, m, exposed = job.strategy, job.num_micro_batches, job.software.exposed
    layers = max(1, job.model.num_layers // s.pp)
    gather, scatter, repeats = _gathered_and_scattered(job, links, layers)
    times, again = np.where(s.zero == 3, m, 1), scatter + np.where(s.zero == 3, repeats * gather, 0.0)
    if "dp" not in s.overlap:
        return times * gather, times * again
    turn = (1 + (s.vp - 1) * np.minimum(s.pp, m)) / s.vp if s.schedule == "interleaved" else 1
    turn = np.where(s.zero == 3, 1, turn)
    shown_forward = np.maximum(gather - forward * turn / m, exposed * gather)
    shown_backward = np.maximum(again - backward * turn / m, exposed * again)
    return (
        np.minimum(times * gather, times * shown_forward + gather / layers),
        np.minimum(times * again, times * shown_backward + scatter / layers),
    )


def _gathered_and_scattered(job: Job, links: Links, layers: int) -> tuple[Size, Size, Size]:
    """Seconds of gathering a rank's parameters once and of scattering its gradients; how often backward gathers.

    Where weights are gathered in pieces, the host launches a copy of each rank's piece, and backward gathers anew what
    full recompute has gathered.
    """
    s, in_pieces = job.strategy, job.software.gathers == "pieces"
    roles = [gemm.role == "expert" for gemm in layer_gemms(job.model, job.model.num_layers - 1, 1, 1, 1, 1)]
    launch = in_pieces * job.cluster.device.efficiency.launch_us * 1e-6
    gather, scatter = 0.0, 0.0
    for is_experts, (gathered, scattered, ranks, stride) in enumerate(shard_traffic(job)):
        calls = np.where(s.zero == 3, layers * (roles.count(bool(is_experts)) if in_pieces else 1), BUCKETS)
        copies = np.where(np.equal(s.zero, 3) & (ranks > 1), calls * ranks * launch, 0.0)
        gather = gather + links.gather(gathered, ranks, stride, calls) + copies
        scatter = scatter + links.gather(scattered, ranks, stride, calls) + copies
    again = s.recompute_layers / layers if s.recompute_layers is not None else 1.0
    return gather, scatter, 1 + min(again, 1.0) * (in_pieces and s.recompute == "full")


def shard_traffic(job: Job) -> Iterator[tuple[Size, Size, Size, Size]]:
    """(bytes of parameters, bytes of gradients, ranks, stride) of what the first stage's ranks hold alike.

    Of all but experts, and of experts. ZeRO-0 reduces gradients everywhere, which sends as much as both. At ZeRO-3
    parameters travel in the high precision, whatever the recipe: FP8 gathers (`Precision.parameter_gather`) of
    frameworks that have them are not counted; below it they travel as they are held.
    """
    s = job.strategy
    counts = on_rank(chunk_weights(job.model, chunks(job.model, s, 0)), s)
    parameter, gradient = (BYTES[kind] for kind in (job.software.parameters, job.software.gradients))
    wide = np.where(s.zero == 3, BYTES[job.precision.high], np.where(s.zero == 0, gradient, parameter))
    strides = (s.tp, s.ep * s.expert_tp)
    for count, ranks, stride in zip(counts, state_shards(s), strides, strict=True):
        if np.any(count):
            yield wide * count, gradient * count, ranks * s.replicas, stride


def _optimizer(job: Job, operators: Operators, links: Links) -> Size:
    """Seconds of clipping and the update of a rank's shard."""
    s = job.strategy
    counts = on_rank(chunk_weights(job.model, chunks(job.model, s, 0)), s)
    shards = (np.where(np.greater(s.zero, 0), n, 1) for n in state_shards(s))
    mine = sum(count / n for count, n in zip(counts, shards, strict=True))
    return operators.move(mine * ADAMW_BYTES, 10) + 2 * links.reduce(4.0, s.world)
