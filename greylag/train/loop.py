"""Loop: step after step of one job, measured by phase.

It owns two seams that others fill. A `Hook` looks on: progress, TensorBoard, the guard. A `Commit` decides: it
averages gradients over replicas and says whether a step counts. The loop fetches neither; it is given them.
"""

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from greylag.numerics import Quantizer
from greylag.numerics.scaling import DelayedScale
from greylag.parallel import average_unsharded, let_go, set_micro_batch
from greylag.spec import Finding, SpecError, Step
from greylag.spec.work import step_flops
from greylag.train.build import Flight
from greylag.train.checkpoint import Checkpointer
from greylag.train.folder import RunFolder
from greylag.train.measure import Clock, MemoryMeter, sent_bytes
from greylag.train.optim import clip, learning_rate
from greylag.train.ranks import RankLog

MEASURED_STEP = 3
"""The step whose memory is measured: the optimizer state exists, and what is made once has been made."""

MOST_SKIPPED = 20
"""A run ends after this many steps in a row that were not applied: it will not recover by itself."""


class Hook(Protocol):
    """Looks on at a run. Called on every rank."""

    def before(self, number: int) -> None:
        """Step `number` begins."""

    def after(self, step: Step) -> None:
        """A step is over; the same Step on every rank but for its own seconds."""

    def failed(self, error: BaseException) -> None:
        """The run ends with an error."""


class Commit(Protocol):
    """Decides over a step, together with the other replicas."""

    def begin(self, number: int) -> None:
        """Step `number` begins."""

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Average this rank's gradients over replicas, in place."""

    def vote(self, healthy: bool) -> bool:
        """Whether to apply the update, agreed by all ranks."""


@dataclass
class Control:
    """What the outside asks of a running loop."""

    stop: bool = False
    """Save and end after this step."""


def fly(
    flight: Flight, folder: RunFolder, commit: Commit, hooks: Iterable[Hook], control: Control, peak_flops: float = 0.0
) -> int:
    """Train from the newest checkpoint to the last step, or to where `control` asks to stop.

    Returns the number of the last step. Raises SpecError if a checkpoint or record cannot be read or written.
    """
    hooks = list(hooks)
    run, world = flight.job.run, flight.world
    saver, ranks = Checkpointer(folder.checkpoints, world, run.keep_checkpoints), RankLog(world, folder)
    try:
        number = _resume(flight, saver)
        saved, skipped = number, 0
        while number < run.steps:
            number += 1
            for hook in hooks:
                hook.before(number)
            step, stop = take_step(flight, number, commit, control, peak_flops, folder)
            if run.validate_every and (number % run.validate_every == 0 or number == run.steps):
                step = replace(step, validation_loss=validate(flight))
            if world.is_first:
                folder.append(step)
            for hook in hooks:
                hook.after(step)
            saves = stop or number == run.steps or bool(run.checkpoint_every and number % run.checkpoint_every == 0)
            ranks.keep(step, saves)
            skipped = skipped + 1 if step.skipped else 0
            if skipped == MOST_SKIPPED:
                raise SpecError(
                    f"step {number}: {skipped} steps in a row were not applied; see {folder.path}/findings.jsonl"
                )
            if saves:
                saver.save(flight.model, flight.optimizer, flight.fingerprints, number)
                saved = number
            if stop:
                break
        assert saved == number
        saver.wait()
        world.all_reduce(torch.zeros(1, device=world.device))  # nobody leaves before the checkpoint is committed
        return number
    except BaseException as error:
        for hook in hooks:
            with contextlib.suppress(Exception):  # the run's own error is the one to be told
                hook.failed(error)
        raise


def _resume(flight: Flight, saver: Checkpointer) -> int:
    facts = saver.load(flight.model, flight.optimizer)
    if facts is None:
        return 0
    for name, fingerprint in flight.fingerprints.items():
        if facts[name] != fingerprint:
            raise SpecError(
                f"run.{name}: the text differs from what this run began with; restore it or choose another --folder"
            )
    step = int(facts["step"])
    if step > flight.job.run.steps:
        raise SpecError(f"run.steps: {flight.job.run.steps}, but this run is at step {step} already; raise it")
    return step


def take_step(
    flight: Flight, number: int, commit: Commit, control: Control, peak_flops: float, folder: RunFolder
) -> tuple[Step, bool]:
    """One optimizer step. Returns its record and whether some rank was asked to stop."""
    job, world, model = flight.job, flight.world, flight.model
    clock = Clock(world.device, world.waits)
    commit.begin(number)
    wire = sent_bytes()
    meter = MemoryMeter(model, flight.optimizer, world.device) if number == MEASURED_STEP else None
    rate = learning_rate(job.run, number)
    for group in flight.optimizer.param_groups:
        group["lr"] = rate
    loss = _accumulate(flight, number, clock)
    with clock.phase("reduce"):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        average_unsharded(gradients, job.strategy.zero, world)
        commit.average(gradients)
    with clock.phase("optimizer"):
        norm = clip(model.parameters(), job.run.clip_norm)
        seen = _nonfinite(model)
        applied = commit.vote(bool(norm.isfinite()) and not seen)
        if applied:
            flight.optimizer.step()
    memory = meter.stop() if meter else {}
    flight.optimizer.zero_grad(set_to_none=True)
    _close_step(flight, applied)
    facts = torch.tensor([loss, float(control.stop)], dtype=torch.float64, device=world.device)
    total, stops = (world.all_reduce(facts) / world.grid.world).tolist()
    if not applied and (seen or world.is_first):
        folder.append(_why_skipped(seen, float(norm), number, world.rank))
    return (
        Step(
            source="measured",
            number=number,
            seconds=clock.stop(),
            waits=clock.waited,
            bytes=memory,
            wire_bytes=float(sent_bytes() - wire),
            tokens=job.tokens,
            flops=step_flops(job),
            peak_flops=peak_flops,
            loss=total,
            grad_norm=float(norm),
            learning_rate=rate,
            skipped=not applied,
            time=time.time(),
        ),
        stops > 0,
    )


def _accumulate(flight: Flight, number: int, clock: Clock) -> float:
    """Forward and backward of every micro-batch; the mean loss of this rank."""
    job, portions = flight.job, flight.job.num_micro_batches
    losses = torch.zeros((), device=flight.world.device)
    for portion in range(portions):
        with clock.phase("data"):
            tokens_BS = flight.tokens(flight.corpus, number - 1, portion)
        set_micro_batch(flight.model, job.strategy.zero, portion == portions - 1)
        with clock.phase("forward"):
            loss = _mean_loss(flight.model, tokens_BS) / portions
        with clock.phase("backward"):
            loss.backward()
        losses += loss.detach()
    return float(losses)


def _mean_loss(model: torch.nn.Module, tokens_BS: Tensor) -> Tensor:
    """Cross-entropy of each next token, a scalar."""
    logits_BSV = model(tokens_BS[:, :-1])
    return F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS[:, 1:].flatten())


@torch.no_grad()
def validate(flight: Flight) -> float:
    """Mean loss over the validation sequences, shared out among the ranks as a global batch is.

    Training does not notice: in eval mode the model leaves no trace, and its parameters rest as shards again.
    """
    run, world, model, text = flight.job.run, flight.world, flight.model, flight.validation
    assert text
    losses = torch.zeros((), dtype=torch.float64, device=world.device)
    model.eval()
    for batch in range(run.validation_batches):
        for portion in range(flight.job.num_micro_batches):
            losses += _mean_loss(model, flight.tokens(text, batch, portion))
    model.train()
    let_go(model)
    return float(world.all_reduce(losses) / (run.validation_batches * flight.job.num_micro_batches * world.grid.world))


def _close_step(flight: Flight, applied: bool) -> None:
    """Move on what follows the step and not the gradient: delayed scales and the experts' balancing bias."""
    world = flight.world
    routers = flight.model.routers()
    if routers:
        loads = world.all_reduce(torch.stack([r.load for r in routers]))
        for router, load in zip(routers, loads, strict=True):
            router.load.copy_(load if applied else torch.zeros_like(load))
            router.rebalance()
    scales = [m for m in flight.model.modules() if isinstance(m, DelayedScale)]
    if scales:
        amax = world.all_reduce(torch.stack([s.history[0] for s in scales]), torch.distributed.ReduceOp.MAX)
        for scale, value in zip(scales, amax, strict=True):
            scale.history[0] = value
            scale.roll()


def _nonfinite(model: torch.nn.Module) -> list[str]:
    """Layers whose operands held Inf or NaN in this step."""
    seen = []
    for name, module in model.named_modules():
        if isinstance(module, Quantizer) and module.nonfinite.item():
            seen.append(name.removesuffix(".quantizer"))
            module.nonfinite.zero_()
    return seen


def _why_skipped(seen: list[str], norm: float, number: int, rank: int) -> Finding:
    """The finding of a step that was not applied: what this rank saw of the cause."""
    where = ", ".join(seen[:3]) + (f" and {len(seen) - 3} more" if len(seen) > 3 else "")
    if seen:
        what, advice = (
            "Inf or NaN in an operand of a GEMM",
            "look at the layer's activations, or lower the learning rate",
        )
    elif math.isfinite(norm):
        what, advice = "another rank or replica voted against the step", "look at the findings of the others"
    else:
        what, advice = "the gradient norm is not finite", "lower the learning rate or look at the data of this step"
    return Finding(
        level="warning",
        what=f"{what}: the step was not applied",
        where=where,
        evidence=f"gradient norm {norm}",
        advice=advice,
        rank=rank,
        step=number,
    )
