"""Measured: from counts of work to seconds on the machine at hand, by what its calibration measured.

A GEMM takes the rate measured at the nearest shapes; an operator and a collective take the measured seconds at their
size. Accelerators, which nobody has at hand when a run is planned, are `operators` and `links`.
"""

from dataclasses import dataclass

import numpy as np

from greylag.spec.cluster import Calibration, Curve
from greylag.spec.error import SpecError
from greylag.spec.messages import Message
from greylag.spec.work import Gemm, Op

ONE_WAY = ("quantize", "encode", "decode", "retile", "adamw", "copy")
"""Operators that cost the same in either direction, so that a calibration has one curve for both."""


@dataclass(frozen=True)
class Cost:
    """Seconds of each kind of work on one rank of the machine that was calibrated."""

    calibration: Calibration

    def gemm(self, gemm: Gemm) -> float:
        """Seconds of one forward GEMM (as often as it occurs)."""
        return gemm.flops / _gemm_rate(self.calibration, gemm.m, gemm.n, gemm.k)

    def attention(self, flops: float, backward: bool) -> float:
        """Seconds of the attention core of one layer, from its causal forward FLOPs."""
        return at(_curve(self.calibration, f"attention.{'backward' if backward else 'forward'}"), flops)

    def op(self, op: Op) -> float:
        """Seconds of a memory-bound operator."""
        name = op.name if op.name.startswith(ONE_WAY) else f"{op.name}.{op.phase}"
        return op.calls * at(_curve(self.calibration, name), op.elements / op.calls)

    def message(self, message: Message) -> float:
        """Seconds of one of a message's `times`."""
        return at(_collective(self.calibration, message.collective), message.bytes)


def at(curve: Curve, size: float) -> float:
    """Seconds at a size: linear between measured points, constant below the first, at the last one's rate beyond."""
    sizes, seconds = np.asarray(curve.size), np.asarray(curve.seconds)
    if size <= sizes[0]:
        return float(seconds[0])
    if size >= sizes[-1]:
        return float(seconds[-1] * size / sizes[-1])
    return float(np.interp(size, sizes, seconds))


def _gemm_rate(calibration: Calibration, m: int, n: int, k: int) -> float:
    """FLOP/s at a shape: trilinear between the measured grid's points over the logarithm of each dim."""
    axes = [sorted({getattr(p, d) for p in calibration.gemm}) for d in ("m", "n", "k")]
    rates = {(p.m, p.n, p.k): 2 * p.m * p.n * p.k / p.seconds for p in calibration.gemm}
    total = 0.0
    corners = [_bracket(axis, size) for axis, size in zip(axes, (m, n, k), strict=True)]
    for am, wm in corners[0]:
        for an, wn in corners[1]:
            for ak, wk in corners[2]:
                total += wm * wn * wk / rates[am, an, ak]
    return 1 / total


def _bracket(axis: list[int], size: int) -> list[tuple[int, float]]:
    """The two grid values around a size and their weights in log space."""
    size = min(max(size, axis[0]), axis[-1])
    high = int(np.searchsorted(axis, size))
    if axis[high] == size:
        return [(axis[high], 1.0)]
    share = float(np.log(size / axis[high - 1]) / np.log(axis[high] / axis[high - 1]))
    return [(axis[high - 1], 1 - share), (axis[high], share)]


def _curve(calibration: Calibration, name: str) -> Curve:
    if name not in calibration.ops:
        raise SpecError(f"the calibration of this machine has no '{name}': run `greylag calibrate` again")
    return calibration.ops[name]


def _collective(calibration: Calibration, name: str) -> Curve:
    if name not in calibration.collectives:
        raise SpecError(
            f"this machine's calibration has no '{name}' (one rank has no peers): run `greylag calibrate --ranks 2`"
        )
    return calibration.collectives[name]
