"""Telemetry: the hook that measures, on every so many steps, what quantization does to each linear layer's operands.

On a due step it looks at the first matrix of each operand, at rank 0 and in its first micro-batch, as forward (input,
weight) or the input gradient (grad) takes it: with its own representation, and with every other one that there is
(`spec.telemetry.CANDIDATES`). Of a weight that is gathered as codes it measures the rows of rank 0, of experts in high
precision the first with tokens. The other steps pay nothing.
"""

import time
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from greylag.numerics import Quantized, Quantizer, health
from greylag.numerics.cache import Kept
from greylag.numerics.formats import FORMATS
from greylag.numerics.quantize import quantize, tile_of
from greylag.parallel.wire import is_gathered_as_codes, local
from greylag.spec import Step
from greylag.spec.precision import GemmName, OperandRole
from greylag.spec.telemetry import (
    CANDIDATES,
    OUTLIER,
    QUANTILES,
    Candidate,
    OperandHealth,
    Rounding,
    Telemetry,
)
from greylag.train.build import Flight
from greylag.train.folder import RunFolder
from greylag.train.loop import MEASURED_STEP
from greylag.train.observers import attach, detach, quantizers

SAMPLE = 1 << 15
"""Elements of a matrix that are tried in every representation."""
SHOWN_OUTLIERS = 4
_PRIMARY: dict[OperandRole, GemmName] = {"input": "forward", "weight": "forward", "grad": "input-gradient"}


class LayerTelemetry:
    """Observes one layer, from step to step: the `Observer` of its quantizer."""

    def __init__(self, layer: str, quantizer: Quantizer, shard: Tensor | None = None) -> None:
        self.layer, self.quantizer, self.shard = layer, quantizer, shard
        self.met: dict[OperandRole, list[float]] = {}
        """The amax of each due step, for delayed scales of runs that have none."""
        self.operands: dict[OperandRole, OperandHealth] = {}
        """Of the step at hand."""
        self.seconds = 0.0

    def quantized(self, gemm: GemmName, role: OperandRole, source: Tensor, operand: Quantized) -> None:
        """Measure it, if it is the first of its role."""
        if _PRIMARY[role] != gemm or role in self.operands:
            return
        if role == "weight" and self.shard is not None:
            # What was quantized has the agreed amax in the place of other ranks' rows: measure the rows that are here.
            source = local(self.shard).detach().flatten(0, -2)
            operand = self._quantized_alone(source)
        self._measure(role, source, operand)

    def _quantized_alone(self, x_MK: Tensor) -> Quantized:
        recipe = self.quantizer.gemms.forward
        weight = recipe.weight
        return quantize(x_MK, FORMATS[weight.format], tile_of(weight.granularity), recipe.scale)

    def multiplied(self, gemm: GemmName, a: Quantized, b: Quantized, kernel: str, dtype: torch.dtype) -> None:
        """Measure what was not quantized."""
        both: tuple[tuple[OperandRole, Quantized], ...] = {
            "forward": (("input", a), ("weight", b.t())),
            "input-gradient": (("grad", a),),
            "weight-gradient": (),
        }[gemm]  # type: ignore[assignment]
        for role, operand in both:
            if operand.scale_inv is None and role not in self.operands:
                self._measure(role, operand.dequantize() if operand.codes is None else operand.codes, operand)

    def kept(self, what: Literal["input", "attention output", "SwiGLU input"], kept: Kept) -> None:
        """Nothing to measure."""

    def _measure(self, role: OperandRole, x_MK: Tensor, q: Quantized) -> None:
        start = time.perf_counter()
        if x_MK.numel() == 0 or not x_MK.isfinite().all():
            return  # no token came, or the step will not be applied: there is nothing to advise from
        with torch.no_grad():
            self.operands[role] = self._health(role, x_MK, q)
        self.seconds += time.perf_counter() - start

    def _health(self, role: OperandRole, x_MK: Tensor, q: Quantized) -> OperandHealth:
        runs = health.sample((x_MK.shape[0], x_MK.shape[1]), SAMPLE)
        x_SK, amax_K = health.take(x_MK, runs), health.channel_amax(x_MK)
        amax = amax_K.max()
        past, history = self._past(role, amax)
        tried = list(_tries(role, x_SK, amax_K, past))
        results: list[Tensor] = [result for _, _, result in tried]
        if q.scale_inv is not None:
            results.append(health.own_rounding(x_MK, q, runs))
        count, channels, ratios = health.outliers(amax_K, OUTLIER, SHOWN_OUTLIERS)
        spread = torch.cat([health.block_amax(x_SK, QUANTILES), health.dynamic_range(x_SK, amax).reshape(1), ratios])
        numbers = torch.cat([*results, spread, channels.double(), count.reshape(1), amax.reshape(1)])
        values = [float(f"{value:.4g}") for value in numbers.tolist()]
        roundings = [Rounding(*values[4 * i : 4 * i + 4]) for i in range(len(results))]
        rest = values[4 * len(results) :]
        blocks, (octaves, *rest) = rest[: len(QUANTILES)], rest[len(QUANTILES) :]
        shown = [(int(c), r) for r, c in zip(rest[: len(ratios)], rest[len(ratios) :], strict=False) if r > OUTLIER]
        self.met.setdefault(role, []).append(values[-1])
        return OperandHealth(
            layer=self.layer,
            role=role,
            shape=(x_MK.shape[0], x_MK.shape[1]),
            sampled_rows=x_SK.shape[0],
            own=f"{q.fmt.name} {q.tiles}" if q.fmt else str(x_MK.dtype).removeprefix("torch."),
            amax=values[-1],
            dynamic_range=octaves,
            block_amax=tuple(blocks) if blocks[0] == blocks[0] else (),
            scale_exponents=health.scale_exponents(q.scale_inv) if q.scale_inv is not None else {},
            rounding=roundings[len(tried)] if q.scale_inv is not None else None,
            outliers=tuple(shown),
            num_outliers=int(values[-2]),
            history=history,
            along_rows={str(c): r for (c, along, _), r in zip(tried, roundings, strict=False) if along},
            along_columns={str(c): r for (c, along, _), r in zip(tried, roundings, strict=False) if not along},
        )

    def _past(self, role: OperandRole, amax: Tensor) -> tuple[Tensor | None, int]:
        """The amax that a delayed scale would be taken from, and of how many: the run's own history, or what we met."""
        scale = self.quantizer.delayed(_PRIMARY[role], role)
        if scale is not None and len(scale.history) > 1 and bool(scale.history[1:].any()):
            return scale.history[1:].max(), int((scale.history[1:] > 0).sum())
        met = self.met.get(role, [])
        return (amax.new_tensor(max(met)), len(met)) if met and max(met) > 0 else (None, 0)


def _tries(
    role: OperandRole, x_SK: Tensor, amax_K: Tensor, past: Tensor | None
) -> Iterator[tuple[Candidate, bool, Tensor]]:
    """(candidate, along rows, what it does), each candidate in the directions in which this role is quantized.

    Input and grad are quantized along rows, and down columns in the weight gradient; weights along rows, and down
    columns in the input gradient. A scale per tensor or square serves both.
    """
    for candidate in CANDIDATES:
        fmt = FORMATS[candidate.format]
        if candidate.granularity == "128x128" and role != "weight":
            continue
        if candidate.granularity == "1x128" and role == "weight":
            continue  # beside 1x128 inputs, weights are in squares
        if candidate.granularity == "tensor":
            amax = past if candidate.timing == "delayed" else amax_K.max()
            if amax is not None:
                yield candidate, True, health.rounding(x_SK, fmt, (0, 0), candidate.scale, amax.reshape(1, 1))
            continue
        yield candidate, True, health.rounding(x_SK, fmt, tile_of(candidate.granularity), candidate.scale)
        if candidate.granularity == "128x128":
            continue
        down = tile_of(candidate.granularity, along_rows=False)
        whole = amax_K.reshape(1, -1) if candidate.granularity == "row" else None
        yield candidate, False, health.rounding(x_SK, fmt, down, candidate.scale, whole)


class TelemetryHook:
    """Measures every `every` steps. The step whose memory is measured is passed over."""

    def __init__(self, flight: Flight, folder: RunFolder, every: int) -> None:
        self.folder, self.every = folder, every
        weights = {name.removesuffix(".weight"): weight for name, weight in flight.model.named_parameters()}
        self.layers = []
        for name, quantizer in quantizers(flight.model).items():
            shard = weights[name] if is_gathered_as_codes(weights[name]) else None
            self.layers.append((quantizer, LayerTelemetry(name, quantizer, shard)))
        self.due = False

    def before(self, number: int) -> None:
        """Look on, if this step is due."""
        self.due = number % self.every == 0 and number != MEASURED_STEP
        if self.due:
            for quantizer, observer in self.layers:
                observer.operands, observer.seconds = {}, 0.0
                attach(quantizer, observer)

    def after(self, step: Step) -> None:
        """Write down what was measured."""
        if not self.due:
            return
        self._leave()
        measured = [operand for _, observer in self.layers for operand in observer.operands.values()]
        seconds = sum(observer.seconds for _, observer in self.layers)
        self.folder.append(Telemetry(step=step.number, seconds=seconds, operands=tuple(measured)))

    def failed(self, error: BaseException) -> None:
        """Look away."""
        if self.due:
            self._leave()

    def close(self) -> None:
        """Nothing is held."""

    def _leave(self) -> Any:
        for quantizer, observer in self.layers:
            detach(quantizer, observer)
        self.due = False
