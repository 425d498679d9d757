"""Cost: from counts of work to seconds, on the machine at hand by its calibration, elsewhere by data-sheet rooflines.

A calibrated GEMM takes the rate measured at the nearest shapes; an operator and a collective take the measured
seconds at their size. Without calibration a GEMM runs at a fixed share of the device's peak, an operator at a share
of memory bandwidth, a collective by the ring formula over its link, with a tree's number of latencies. These shares,
`PASSES` and the backward of attention (five products for two, FlashAttention-2, arXiv 2307.08691) are a first cut.
"""

from dataclasses import dataclass

import numpy as np

from greylag.spec.cluster import Calibration, Cluster, Curve, Link
from greylag.spec.error import SpecError
from greylag.spec.grid import tier
from greylag.spec.messages import Message
from greylag.spec.precision import BYTES
from greylag.spec.work import Gemm, Op

GEMM_EFFICIENCY = 0.7
"""Share of dense peak that large GEMMs reach: the median of 219 shapes measured on A100 is 0.718 of 312 TFLOP/s
(MooreThreads/SimuMax, a100_pcie system file)."""
MEMORY_EFFICIENCY = 0.6
"""Share of memory bandwidth that elementwise kernels reach: 0.28 to 0.67 measured on B200 (SimuMax, b200 file)."""
LINK_EFFICIENCY = 0.7
"""Share of link bandwidth that collectives reach: all-reduce 0.742, all-gather 0.674 on B200 NVLink (same file)."""
LAUNCH = 5e-6
"""Seconds that a kernel takes at least, launch included: the order of magnitude of CUDA's launch latency."""

PASSES = {
    "norm": (2, 3), "residual": (1.5, 0), "rope": (2, 2), "reshape": (2, 2), "swiglu": (3, 5), "gelu": (2, 3),
    "router": (4, 4), "permute": (4, 4), "embedding": (2, 2), "loss": (3, 2), "copy": (2, 2),
    "quantize.tensor": (1, 1), "quantize.1x128": (1, 1), "quantize.128x1": (1, 1), "quantize.128x128": (1, 1),
    "encode": (0.5, 0.5), "decode": (0.5, 0.5), "retile": (1, 1),
}  # fmt: skip
"""Reads and writes per element of an operator, forward and backward, in elements of the high-precision dtype."""
ONE_WAY = ("quantize", "encode", "decode", "retile", "adamw", "copy")
"""Operators that cost the same in either direction, so that a calibration has one curve for both."""
ADAMW_BYTES = 28
"""Per parameter: gradient and weight in FP32, two moments read and written, weight written."""


@dataclass(frozen=True)
class Cost:
    """Seconds of each kind of work on one rank of a cluster."""

    cluster: Cluster
    high: str
    calibration: Calibration | None = None

    def gemm(self, gemm: Gemm, dtype: str) -> float:
        """Seconds of one forward GEMM (as often as it occurs) with operands of `dtype`: fp8, bf16 or fp32."""
        if self.calibration:
            return gemm.flops / _gemm_rate(self.calibration, gemm.m, gemm.n, gemm.k)
        return gemm.flops / (_known(self.cluster.device.peak(dtype), self.cluster, dtype) * GEMM_EFFICIENCY) + LAUNCH

    def attention(self, flops: float, tokens: int, backward: bool) -> float:
        """Seconds of the attention core of one layer, from its causal forward FLOPs."""
        if self.calibration:
            curve = _curve(self.calibration, f"attention.{'backward' if backward else 'forward'}")
            return at(curve, flops)
        peak = _known(self.cluster.device.peak("bf16"), self.cluster, "bf16")
        return (2.5 if backward else 1.0) * flops / (peak * GEMM_EFFICIENCY) + LAUNCH

    def op(self, op: Op) -> float:
        """Seconds of a memory-bound operator."""
        if self.calibration:
            name = op.name if op.name.startswith(ONE_WAY) else f"{op.name}.{op.phase}"
            return op.calls * at(_curve(self.calibration, name), op.elements / op.calls)
        bandwidth = (
            _known(self.cluster.device.memory_gb_per_s, self.cluster, "memory_gb_per_s") * 1e9 * MEMORY_EFFICIENCY
        )
        if op.name == "adamw":
            return op.elements * ADAMW_BYTES / bandwidth + LAUNCH
        passes = PASSES[op.name][op.phase == "backward"]
        return op.elements * passes * BYTES[self.high] / bandwidth + LAUNCH * op.calls

    def message(self, message: Message) -> float:
        """Seconds of one of a message's `times`."""
        if self.calibration:
            return at(_collective(self.calibration, message.collective), message.bytes)
        n = message.ranks
        link = self._link(list(range(0, n * message.stride, message.stride)))
        steps = {"all_reduce": 2 * (n - 1), "p2p": 1}.get(message.collective, n - 1)
        volume = message.bytes if message.collective == "p2p" else message.bytes * steps / n
        return volume / (link.bandwidth * LINK_EFFICIENCY) + link.latency * min(steps, 2 * int(np.log2(n) + 1))

    def _link(self, peers: list[int]) -> Link:
        reach = tier(peers, self.cluster.devices_per_node)
        link = self.cluster.node if reach == "node" else self.cluster.network
        if link is None:
            raise SpecError(
                f"cluster '{self.cluster.name}': the {reach} link is not public; write cluster.{reach} in the job file"
            )
        return link


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


def _known(value: float | None, cluster: Cluster, key: str) -> float:
    if value is None:
        raise SpecError(
            f"cluster '{cluster.name}': no public {key} of {cluster.device.name}; write it in [cluster.device]"
        )
    return value
