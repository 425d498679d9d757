"""Step: what one optimizer step took and gave, predicted or measured, in the same words.

The simulator returns one, the trainer writes one per line of `steps.jsonl`, the report lays both side by side.
A number that shall appear in a report is a field here first.
"""

from html import escape
from typing import Literal

import msgspec

from greylag.spec.quantity import count, flops_per_second, memory, percent, seconds

PHASES = ("data", "forward", "backward", "reduce", "optimizer", "other")
"""Phases of a step, in order. Communication inside forward and backward (parameter all-gather, gradient
reduce-scatter) belongs to them as far as it is exposed; `reduce` is the average over replicas; `optimizer`
holds clipping and the update; `other` is what the loop itself spends: agreeing, logging, hooks."""

POOLS = ("parameters", "gradients", "optimizer", "activations")
"""Pools of memory: the rank's own (sharded) parameters and buffers; its gradients at rest; master copies and
moments; and everything that comes and goes within a step (saved activations, gathered parameters, workspace)."""


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of one run. Seconds and bytes: rank 0's if measured, those of an average stage's rank if predicted."""

    source: Literal["predicted", "measured"]
    number: int = 0
    """From 1; 0 for a prediction, which stands for every step."""
    seconds: dict[str, float]
    """By phase, keys of `PHASES`."""
    waits: dict[str, float] = {}
    """Measured seconds of each phase that went by in collectives, sending and waiting for other ranks. Only of ranks on
    a CPU: on a device collectives run beside the host that would note them."""
    causes: dict[str, float] = {}
    """Predicted seconds by what they are spent on, of a rank of the busiest stage; they overlap the phases."""
    interval: tuple[float, float] | None = None
    """Seconds between which nine in ten measured steps would lie; None where nothing is known of it."""
    remarks: tuple[str, ...] = ()
    """What a prediction rests on, and where it goes beyond it."""
    bytes: dict[str, float] = {}
    """Peak memory by pool, keys of `POOLS`; empty where it was not measured in this step."""
    wire_bytes: float = 0.0
    """Bytes that a rank sends to others over its process groups; of measured ones, what the kernel counted on TCP."""
    tokens: int
    """Tokens of the global batch."""
    flops: float
    """Model FLOPs of the global batch, forward and backward, causal attention counted half."""
    peak_flops: float = 0.0
    """FLOP/s that all ranks together could reach; 0 where unknown."""
    loss: float | None = None
    validation_loss: float | None = None
    """Mean loss over the validation sequences after this step's update; None where it was not evaluated. Evaluating
    comes between steps: its time and bytes are in no field of a Step."""
    grad_norm: float | None = None
    learning_rate: float | None = None
    skipped: bool = False
    """The update was not applied (a non-finite gradient, or a replica voted no)."""
    time: float = 0.0
    """Unix time at the end of the step."""

    @property
    def total_seconds(self) -> float:
        """Wall time of the step."""
        return sum(self.seconds.values())

    @property
    def total_bytes(self) -> float:
        """Peak memory of a rank."""
        return sum(self.bytes.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole job per second."""
        return self.tokens / self.total_seconds

    @property
    def flops_per_second(self) -> float:
        """Model FLOP/s of the whole job."""
        return self.flops / self.total_seconds

    @property
    def utilization(self) -> float | None:
        """Model FLOPs utilization (MFU, arXiv 2204.02311 appendix B); None where the peak is unknown."""
        return self.flops_per_second / self.peak_flops if self.peak_flops else None

    def __str__(self) -> str:
        return "\n".join("  ".join(row).rstrip() for row in _aligned(_rows(self)))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The same table for a notebook."""
        title, *rows = _rows(self)
        cells = "".join(
            "<tr>"
            + "".join(f'<td style="text-align: {"right" if n else "left"}">{escape(c)}</td>' for n, c in enumerate(row))
            + "</tr>"
            for row in rows
        )
        return f"<table><caption>{' '.join(title).strip()}</caption>{cells}</table>"


def _rows(step: Step) -> list[tuple[str, str, str]]:
    """What a step says of itself: a title, then (what, figure, share)."""
    total, place = step.total_seconds, f" {step.number}" if step.number else ""
    rows = [(f"{step.source} step{place}", seconds(total), "")]
    if step.interval:
        low, high = map(seconds, step.interval)
        rows.append(("  nine in ten lie between", low, high))
    for heading, parts in (("", step.seconds), ("spent on", step.causes)):
        rows += [(heading, "", "")] * bool(heading and parts)
        for name, value in parts.items():
            if value:
                rows.append((f"  {name}", seconds(value), percent(value / total if total else None)))
    if total:
        rows.append(("tokens per second", count(step.tokens_per_second), ""))
        used = f"{percent(step.utilization)} MFU" if step.utilization is not None else ""
        rows.append(("model FLOP/s", flops_per_second(step.flops_per_second), used))
    if step.loss is not None:
        rows.append(("loss", f"{step.loss:.4f}", ""))
    if step.bytes:
        rows.append(("memory of a rank", memory(step.total_bytes), ""))
        rows += [(f"  {pool}", memory(size), "") for pool, size in step.bytes.items() if size]
    return rows


def _aligned(rows: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    left, middle = (max(len(row[n]) for row in rows) for n in (0, 1))
    return [(what.ljust(left), figure.rjust(middle), share.rjust(9)) for what, figure, share in rows]
