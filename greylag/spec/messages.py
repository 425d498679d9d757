"""Messages: the collectives that a rank takes part in during a step, and their bytes.

Held equal to what process groups are handed and what the kernel counts on the sockets (tests/agree). `parallel.data`
and `parallel.expert` do what is counted here.
"""

import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple

from greylag.spec.job import Job
from greylag.spec.measurement import Collective
from greylag.spec.precision import BYTES
from greylag.spec.routing import mark_bytes, ranks_reached, row_bytes
from greylag.spec.shards import gathered_scales, gathered_width, unit_bytes, units
from greylag.spec.work import DIRECTIONS, Direction, Op


class Message(NamedTuple):
    """A collective that a rank takes part in, `times` per step."""

    name: str
    collective: Collective
    axis: Literal["dp", "replica", "tp", "ep", "cp", "pp"]
    bytes: float
    """Of the whole tensor: gathered, or before scattering."""
    ranks: int
    times: int = 1
    phase: Literal["forward", "backward", "reduce", "optimizer", "other"] = "other"
    stride: int = 1
    """Distance between its ranks' numbers."""

    def sent(self, gloo: bool) -> float:
        """Bytes that a rank sends in all of them, by the ring algorithm.

        Gloo scatters by reducing everywhere (measured on its sockets: torch 2.13), so its reduce-scatter sends twice.
        """
        n = self.ranks
        twice = self.collective == "all_reduce" or (self.collective == "reduce_scatter" and gloo)
        share = 1.0 if self.collective == "p2p" else (n - 1) / n
        return self.times * self.bytes * share * (2 if twice else 1)


def data_parallel_messages(job: Job) -> Iterator[Message]:
    """Collectives over parameters and gradients in one step (`parallel.data` states the rule of each ZeRO level)."""
    s, groups = job.strategy, units(job.model)
    scales, dense, width = gathered_scales(job), s.shards * s.cp, gathered_width(job)
    if s.zero > 0 and dense > 1 and scales:
        times = job.num_micro_batches if s.zero == 3 else 1
        yield Message("amax of weights", "all_reduce", "dp", 4.0 * scales, dense, times, "forward", s.tp)
    for number, unit in enumerate(groups):
        gathered = unit_bytes(unit, s, width)
        for n, size in unit_bytes(unit, s).items():
            if n > 1:
                yield from _shard_messages(job, n, gathered[n], size, number == len(groups) - 1)
    if s.replicas > 1:
        sharded = s.zero > 0
        shard = sum(size / (n if sharded else 1) for unit in groups for n, size in unit_bytes(unit, s).items())
        yield Message("gradients", "all_reduce", "replica", shard, s.replicas, 1, "reduce")


def _shard_messages(job: Job, n: int, gathered: float, size: float, is_root: bool) -> Iterator[Message]:
    """Of one unit among the `n` ranks that shard it: `gathered` bytes of parameters, `size` of gradients in FP32."""
    zero, m, dense = job.strategy.zero, job.num_micro_batches, job.strategy.shards * job.strategy.cp
    message = functools.partial(Message, axis="dp", ranks=n, stride=job.strategy.tp if n == dense else job.strategy.ep)
    if zero == 0:
        yield message("gradients", "all_reduce", bytes=size, times=1, phase="reduce")
        return
    yield message("parameters", "all_gather", bytes=gathered, times=m if zero == 3 else 1, phase="forward")
    if zero == 3 and not is_root:
        yield message("parameters", "all_gather", bytes=gathered, times=m, phase="backward")
    yield message("gradients", "reduce_scatter", bytes=size, times=m if zero >= 2 else 1, phase="backward")


def data_parallel_ops(job: Job) -> Iterator[Op]:
    """Copies around those collectives: gathered parameters out of the buffer, gradients into one."""
    for message in data_parallel_messages(job):
        if message.phase == "reduce":
            continue
        phase: Direction = "forward" if message.phase == "forward" else "backward"
        yield Op("copy", phase, message.times * message.bytes / 4, message.times)


def model_parallel_messages(job: Job, tokens: int) -> Iterator[Message]:
    """Messages of one micro-batch of `tokens` tokens of a rank over tp, cp, ep and pp, of all stages together.

    Tensor parallelism with sequence parallelism (arXiv 2205.05198) gathers and scatters activations once around
    attention and once around the feed-forward layer, in each direction; once around both in a parallel block. Recompute
    sends in backward again what forward sent.
    """
    for message in _messages_once(job, tokens):
        yield message
        if message.phase == "forward" and job.strategy.recompute == "full":
            yield message._replace(phase="backward")


def _messages_once(job: Job, tokens: int) -> Iterator[Message]:
    s, model, width = job.strategy, job.model, BYTES[job.precision.high]
    activation = float(tokens * model.hidden_size * width)
    if s.tp > 1:
        around = 1 if model.parallel_block else 2
        for phase in DIRECTIONS:
            for collective in ("all_gather", "reduce_scatter"):
                yield Message("activations", collective, "tp", activation, s.tp, around * model.num_layers, phase)
    if s.cp > 1:
        width_of_heads = (model.kv_heads if not model.mla else model.num_heads) * (model.qk_head_dim + model.v_head_dim)
        size = float(tokens * s.cp * width_of_heads // s.tp * width)
        yield Message("keys and values", "all_gather", "cp", size, s.cp, model.num_layers, "forward", s.tp)
        yield Message("keys and values", "reduce_scatter", "cp", size, s.cp, model.num_layers, "backward", s.tp)
    if s.ep > 1 and model.moe:
        rows, choices = tokens * ranks_reached(model.moe, s.ep) / s.tp, tokens * model.moe.top_k / s.tp
        yield from expert_messages(job, rows, choices, model.num_moe_layers)
    if s.pp > 1:
        stride = s.shards * s.cp * s.tp
        yield Message("activations", "p2p", "pp", activation / s.tp, 2, 2, "other", stride)


def expert_messages(job: Job, rows: float, choices: float, times: int = 1) -> Iterator[Message]:
    """Messages between the ranks of an expert group in one layer (`parallel.expert`), which runs `times` over.

    A rank's tokens make `choices`, and take `rows` rows: one for each rank, itself included, that has experts chosen.
    """
    p, ep, moe, width = job.precision, job.strategy.ep, job.model.moe, job.model.hidden_size
    assert moe
    low, high = row_bytes(p, width), width * BYTES[p.high]
    message = functools.partial(Message, collective="all_to_all", axis="ep", ranks=ep, times=times)
    yield message("counts of tokens", bytes=16.0 * ep, phase="forward")
    yield message("tokens", bytes=rows * (low + mark_bytes(moe, ep)), phase="forward")
    yield message("outputs of experts", bytes=choices * high, phase="forward")
    yield message("gradients to experts", bytes=choices * low, phase="backward")
    yield message("gradients of tokens", bytes=rows * high, phase="backward")
