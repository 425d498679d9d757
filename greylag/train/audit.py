"""Audit: the hook that writes down what one step really did (`spec.audit`), and leaves every other step alone.

It trusts no setting. Operands are examined as the kernel was handed them, on their own values and scales
(`numerics.evidence`); GEMMs and collectives are seen a second time in torch's dispatcher, where FSDP2's own pass too;
gradients and moments are looked at when the optimizer takes them. Bare process groups (the replica axis) do not go
through the dispatcher, and are watched at their methods.
"""

import time
from collections import Counter
from typing import Any, Literal, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from greylag.numerics import Quantized, Quantizer, evidence
from greylag.numerics.cache import Kept
from greylag.numerics.scaling import DelayedScale
from greylag.parallel import local
from greylag.spec import Step
from greylag.spec.audit import (
    DELAYED,
    Audit,
    CacheSeen,
    MessageSeen,
    OperandSeen,
    Product,
    StateSeen,
    current_rule,
)
from greylag.spec.precision import OPERANDS, GemmName, OperandRole
from greylag.train.build import Flight
from greylag.train.folder import RunFolder
from greylag.train.loop import MEASURED_STEP
from greylag.train.observers import attach, detach, quantizers
from greylag.train.watch import Watch, WatchedGroup, dtype_name

FIRST_AUDIT = 2
"""The step of a new run that is audited: by then delayed scales have a history and moments exist."""


class _Made(NamedTuple):
    """A matrix that was quantized, and what is known of it."""

    rules: tuple[str, ...]
    """That its scales follow tile by tile."""
    group_rules: tuple[str, ...]
    """That they follow if an expert's tiles share a scale per column."""
    on_grid: bool
    is_nearest: bool
    marks: Tensor
    """Of its rows."""
    scales: Quantized
    """Of it only these, so that an audited step keeps no matrix alive."""

    def has(self, start: int, q: Quantized) -> bool:
        """Whether the rows of `q` from `start` on have its scales and tiles."""
        edge = self.scales.tile[0]
        if (edge and start % edge) or q.tile != self.scales.tile or q.scale_inv is None:
            return False
        ours = self.scales.rows(start, q.shape[0]).scale_inv
        return ours is not None and torch.equal(ours.float(), q.scale_inv.float())


class LayerAudit:
    """Observes one layer: the `Observer` of its quantizer."""

    def __init__(self, layer: str, quantizer: Quantizer, watch: Watch, is_grouped: bool, sees_shard: bool) -> None:
        self.layer, self.watch, self.is_grouped, self.sees_shard = layer, watch, is_grouped, sees_shard
        self.delayed = [m for m in quantizer.children() if isinstance(m, DelayedScale)]
        self.made: dict[OperandRole, list[_Made]] = {}
        self.products: dict[tuple[Any, ...], Product] = {}
        self.caches: Counter[tuple[str, str, float]] = Counter()

    def quantized(self, gemm: GemmName, role: OperandRole, source: Tensor, operand: Quantized) -> None:
        """Remember what came of it, by which the operand is known again when it is multiplied."""
        if operand.scale_inv is None or operand.fmt is None:
            return
        with _disable_current_modes():
            late = (DELAYED,) if evidence.is_delayed(operand, self.delayed) else ()
            grouped = evidence.group_scale_kinds(source, operand) if self.is_grouped else []
            made = _Made(
                rules=(*map(current_rule, evidence.scale_kinds(source, operand)), *late),
                group_rules=tuple(map(current_rule, grouped)),
                on_grid=evidence.is_on_grid(operand),
                is_nearest=evidence.is_nearest(source, operand),
                marks=evidence.row_marks(operand),
                scales=Quantized(operand.shape, operand.tile, operand.scale_inv),
            )
            self.made.setdefault(role, []).append(made)

    def multiplied(self, gemm: GemmName, a: Quantized, b: Quantized, kernel: str, dtype: torch.dtype) -> None:
        """Examine both operands."""
        op = self.watch.multiplied(a, b)
        role_a, role_b = OPERANDS[gemm]
        with _disable_current_modes():
            seen_a = self._seen(role_a, a, 1, a.t() if gemm == "weight-gradient" else a)
            seen_b = self._seen(role_b, b, 0, b.t() if gemm == "forward" else b)
        key = (gemm, kernel, op, dtype, seen_a.format, seen_b.format)
        old = self.products.get(key)
        if old:
            self.products[key] = replace(old, a=_both(old.a, seen_a), b=_both(old.b, seen_b), count=old.count + 1)
        else:
            self.products[key] = Product(
                layer=self.layer, gemm=gemm, a=seen_a, b=seen_b, kernel=kernel, op=op, dtype=dtype_name(dtype)
            )

    def _seen(self, role: OperandRole, q: Quantized, contracted: int, as_made: Quantized) -> OperandSeen:
        """`as_made` is `q` the way round in which it was quantized."""
        if q.scale_inv is None:
            return OperandSeen(format=evidence.format_name(q))
        made, name = self._origin(role, as_made), evidence.granularity(q, contracted)
        fits = {name: _common([one.rules for one in made])}
        if self.is_grouped and name == "1x128":
            fits["row"] = _common([one.group_rules for one in made])
        return OperandSeen(
            format=evidence.format_name(q),
            tiles=tuple(tiles for tiles, rules in fits.items() if rules) or (name,),
            rules=tuple(sorted({rule for rules in fits.values() for rule in rules})),
            is_pow2=evidence.is_pow2(q),
            on_grid=evidence.is_on_grid(q) and all(one.on_grid for one in made),
            is_nearest=all(one.is_nearest for one in made),
        )

    def _origin(self, role: OperandRole, q: Quantized) -> list["_Made"]:
        """The matrices of which `q` may be rows: the same values at the same scales.

        Of a weight that is gathered in FP8 this rank saw only its own rows quantized.
        """
        marks, every = evidence.row_marks(q), self.made.get(role, [])
        found = [one for one in every if any(one.has(start, q) for start in evidence.find_rows(marks, one.marks))]
        return every if not found and role == "weight" and self.sees_shard else found

    def kept(self, what: Literal["input", "attention output", "SwiGLU input"], kept: Kept) -> None:
        """Weigh what is kept."""
        with _disable_current_modes():
            size = sum(t.nbytes for t in kept.tensors) / max(kept.matrix().numel(), 1)
        self.caches[what, kept.form, round(size, 4)] += 1


def _common(names: list[tuple[str, ...]]) -> set[str]:
    """The names that all hold."""
    return set.intersection(*map(set, names)) if names else set()


def _both(a: OperandSeen, b: OperandSeen) -> OperandSeen:
    """What holds of both."""
    return replace(
        a,
        tiles=tuple(t for t in a.tiles if t in b.tiles),
        rules=tuple(r for r in a.rules if r in b.rules),
        is_pow2=a.is_pow2 and b.is_pow2,
        on_grid=a.on_grid and b.on_grid,
        is_nearest=a.is_nearest and b.is_nearest,
    )


class AuditHook:
    """Audits the second step of a run, and the first after a resume. Of rank 0: all ranks do alike.

    A step that was not applied says nothing of the optimizer: the next one is audited instead. The step whose memory
    is measured is passed over too.
    """

    def __init__(self, flight: Flight, folder: RunFolder) -> None:
        self.flight, self.folder = flight, folder
        self.due: int | None = None
        self.step: _AuditedStep | None = None

    def before(self, number: int) -> None:
        """Look on, if this is the step."""
        last = self.flight.job.run.steps
        if self.due is None:
            self.due = min(FIRST_AUDIT, last) if number == 1 else number
        if number == self.due == MEASURED_STEP < last:
            self.due += 1
        if number == self.due:
            self.step = _AuditedStep(self.flight)

    def after(self, step: Step) -> None:
        """Write down what was seen."""
        if self.step is None:
            return
        audit = self.step.stop(step)
        self.step = None
        if step.skipped:
            self.due = step.number + 1
        else:
            self.folder.append(audit)

    def failed(self, error: BaseException) -> None:
        """Look away."""
        if self.step is not None:
            self.step.leave()
            self.step = None

    def close(self) -> None:
        """Nothing is held."""


class _AuditedStep:
    """One step that is looked on at, from its making to `stop`."""

    def __init__(self, flight: Flight) -> None:
        self.flight, self.watch = flight, Watch()
        self.across = flight.world.across
        if self.across is not None:
            flight.world.across = WatchedGroup(self.across, self.watch)  # type: ignore[assignment]
        shards = flight.job.precision.parameter_gather == "fp8" and flight.job.strategy.shards > 1
        self.observed = {
            name: (quantizer, LayerAudit(name, quantizer, self.watch, ".experts." in name, shards))
            for name, quantizer in quantizers(flight.model).items()
        }
        for quantizer, observer in self.observed.values():
            attach(quantizer, observer)
        self.states: Counter[tuple[str, str, str]] = Counter()
        self.handles = [
            flight.optimizer.register_step_pre_hook(self._count_gradients),
            flight.optimizer.register_step_post_hook(lambda *_: self.leave()),  # what follows is validation
        ]
        self.is_watching = True
        self.watch.__enter__()

    def _count(self, what: str, weight: Tensor, held: Tensor) -> None:
        of = "matrices" if weight.dim() > 1 else "vectors"
        self.states[what, of, dtype_name(held.dtype)] += local(held).numel()

    def _count_gradients(self, *_: Any) -> None:
        for weight in self.flight.model.parameters():
            if weight.grad is not None:
                self._count("gradients", weight, weight.grad)

    def leave(self) -> None:
        """Look away."""
        if not self.is_watching:
            return
        self.is_watching = False
        self.watch.__exit__(None, None, None)
        for handle in self.handles:
            handle.remove()
        for quantizer, observer in self.observed.values():
            detach(quantizer, observer)
        if self.across is not None:
            self.flight.world.across = self.across

    def stop(self, step: Step) -> Audit:
        """Look away, and say what was seen."""
        self.leave()
        for weight in self.flight.model.parameters():
            self._count("weights", weight, weight)
            for key, held in self.flight.optimizer.state.get(weight, {}).items():
                if isinstance(held, Tensor) and held.numel() > 1:
                    self._count(key, weight, held)
        observers = [observer for _, observer in self.observed.values()]
        return Audit(
            step=step.number,
            device=self.flight.world.device.type,
            torch=str(torch.__version__),
            time=time.time(),
            products=tuple(product for o in observers for product in o.products.values()),
            caches=tuple(
                CacheSeen(layer=o.layer, what=what, form=form, bytes_per_element=size, count=count)
                for o in observers
                for (what, form, size), count in o.caches.items()
            ),
            states=tuple(
                StateSeen(what=what, of=of, dtype=dtype, elements=elements)
                for (what, of, dtype), elements in self.states.items()
            ),
            messages=tuple(
                MessageSeen(collective=kind, dtype=dtype, bytes=self.watch.bytes[kind, dtype], count=count)
                for (kind, dtype), count in self.watch.messages.items()
            ),
        )
