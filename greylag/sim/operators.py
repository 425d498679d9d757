"""Operators: seconds of kernels on one accelerator, by a roofline with a few constants per device.

A GEMM is cut into tiles that the multiprocessors work off in waves. Those of the last wave are cut along the contracted
dim too, so that a wave that is half full takes half its time. Filling and draining costs a wave the same at any length
of that dim. What moves more bytes than it computes is bound by memory. Constants are those of
`spec.cluster.Efficiency`; all sizes may be numpy arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from greylag.spec.cluster import Cluster, Device
from greylag.spec.error import SpecError
from greylag.spec.software import Software

Size = Any
"""An int, a float, or an array of candidates."""

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.75))
"""Rows and columns of a GEMM's tile, and its speed beside the largest: what NVIDIA's CUTLASS profiler documents for
Hopper (128x256x64 fastest, 128x128 within a tenth). The library picks the fastest for a shape."""
PARTS = 8
"""Into how many parts a tile of the last wave may be cut along the contracted dim (split-K; stream-K, arXiv
2301.03598). A choice of ours."""
BACKWARD_OF_ATTENTION = 2.5
"""Five products for two (FlashAttention-2, arXiv 2307.08691, section 3.1)."""
HEADS_OF_128 = 256
"""Width of a query and a value head of 128 dims each."""

BEFORE_HOPPER = 0.5
"""Of the speed of attention on Hopper, by kernels written before it: 35% of the peak for 75% (arXiv 2407.08608,
abstract)."""


@dataclass(frozen=True)
class Operators:
    """Kernels on a device of a cluster, launched by a framework."""

    cluster: Cluster
    software: Software

    @property
    def device(self) -> Device:
        """The device."""
        return self.cluster.device

    def gemms(self, m: Size, n: Size, k: Size, dtypes: Sequence[str], groups: Size, out_bytes: Sequence[float]) -> Size:
        """Seconds of each of some GEMMs, the first axis of every size: `groups` products (m, k) x (k, n) in one launch.

        `out_bytes` are moved per element of the result.
        """
        d, e = self.device, self.device.efficiency
        lead = (-1, *[1] * (np.ndim(m) - 1))
        rate = np.reshape([self.peak(t) * self._share(t) for t in dtypes], lead)
        rate = rate * np.where(groups > 1, self.software.grouped, 1.0)
        width = np.reshape([{"fp8": 1.0, "fp32": 4.0}.get(t, 2.0) for t in dtypes], lead)
        compute: Size = np.inf
        sms = d.num_sms or 1
        for rows, columns, speed in TILES:
            tiles = groups * np.ceil(m / rows) * np.ceil(n / columns)
            waves = np.ceil(PARTS * tiles / sms) / PARTS
            work = waves * k + np.ceil(waves) * e.gemm_ramp
            compute = np.minimum(compute, work * (2.0 * sms * rows * columns / speed))
        compute = compute / rate
        moved = groups * ((m + n) * k * width + m * n * np.reshape(out_bytes, lead))
        return np.maximum(compute, moved / self.bandwidth) + e.kernel

    def _share(self, dtype: str) -> float:
        """Of the peak, that a large GEMM reaches."""
        e = self.device.efficiency
        fp8 = dtype == "fp8" and "fp8" in self.device.peak_tflops
        return (e.gemm_fp8 if fp8 else e.gemm) * self.software.speed

    def attention(self, flops: Size, width: Size, backward: bool = False) -> Size:
        """Seconds of the attention core, from its forward FLOPs, the masked half not counted.

        `width` is of a query and a value head together. Each pair of tokens costs 2 x width FLOPs and an exponential,
        in either direction; the device's share is that of heads of 128. To kernels that leave half of the matrix units
        idle an exponential is half as dear.
        """
        e = self.device.efficiency
        times, share = (BACKWARD_OF_ATTENTION, e.attention_backward) if backward else (1.0, e.attention)
        before = self.software.attention == "flash-2" and "fp8" in self.device.peak_tflops
        speed = BEFORE_HOPPER if before else 1.0
        usual, exponential = 2.0 * times * HEADS_OF_128, speed * (self.device.flops_per_exponential or 0.0)
        slower = (1 + exponential / (2.0 * times * width)) / (1 + exponential / usual)
        return times * flops * slower / (self.peak("bf16") * share * speed * self.software.speed) + e.kernel

    def move(self, size: Size, kernels: Size = 1) -> Size:
        """Seconds of kernels that read and write `size` bytes in all."""
        return size / self.bandwidth + kernels * self.device.efficiency.kernel

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of a dtype. Raises SpecError if it is not public."""
        value = self.device.peak(dtype)
        if value is None:
            raise SpecError(
                f"cluster '{self.cluster.name}': no public {dtype} of {self.device.name}; "
                "write it in [cluster.device] peak_tflops"
            )
        return value

    @property
    def launch(self) -> float:
        """Seconds of host time per kernel."""
        return 0.0 if self.software.graphs else self.device.efficiency.launch_us * 1e-6

    @property
    def bandwidth(self) -> float:
        """Bytes per second that elementwise kernels reach."""
        value = self.device.memory_gb_per_s
        if value is None:
            raise SpecError(
                f"cluster '{self.cluster.name}': no public memory_gb_per_s of {self.device.name}; "
                "write it in [cluster.device]"
            )
        return value * 1e9 * self.device.efficiency.memory
