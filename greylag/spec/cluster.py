"""Cluster: what one device and its links can do at best, and Calibration: what was measured of them.

Units stand in the names of the fields, since these are the border where people write numbers; the properties
without a unit are seconds, bytes, FLOP/s and bytes/s.
"""

from typing import Literal

import msgspec


class Efficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a kind of device reaches of its data sheet: the constants of the simulator, fitted to measured runs.

    Shares are of the peak or the bandwidth. The defaults are those of no device in particular.
    """

    gemm: float = 0.75
    """Of the peak, by a GEMM that is large in every dim."""
    gemm_fp8: float = 0.65
    """The same of the FP8 peak."""
    gemm_ramp: float = 256.0
    """Length of the contracted dim that a GEMM loses to filling and draining its pipeline."""
    attention: float = 0.55
    """Of the BF16 peak, by the attention core forward with heads of 128, causal FLOPs."""
    attention_backward: float = 0.45
    memory: float = 0.7
    """Of the memory bandwidth, by elementwise kernels."""
    launch_us: float = 10.0
    """Time that the host beside the device takes per kernel, without CUDA graphs: a layer is never faster than its
    launches."""
    kernel_us: float = 4.0
    """Time that each kernel adds: its start, its tail, the gap behind it."""
    node: float = 0.75
    """Of the node link, by rings."""
    network: float = 0.75
    """Of the network link, by rings."""
    all_to_all: float = 0.6
    """Of the node link, by all-to-all."""
    all_to_all_network: float = 0.5
    """Of the network link, by all-to-all."""

    @property
    def kernel(self) -> float:
        """Seconds that each kernel adds."""
        return self.kernel_us * 1e-6


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One accelerator (or one CPU rank)."""

    name: str
    kind: Literal["cpu", "cuda", "musa"]
    peak_tflops: dict[str, float] = {}
    """Dense peak by dtype (fp8, bf16, fp32), without sparsity. Empty where only a calibration knows."""
    memory_gib: float
    memory_gb_per_s: float | None = None
    num_sms: int | None = None
    """Streaming multiprocessors, over which the tiles of a GEMM are spread; None where tiles are not counted."""
    flops_per_exponential: float | None = None
    """BF16 FLOPs that the matrix units do while the special function units make one exponential: attention with narrow
    heads has few FLOPs for each. None where it is not public."""
    efficiency: Efficiency = Efficiency()
    spread: float | None = None
    """Nine in ten of the kernels that its constants were calibrated with took within this share of what they say; None
    where the constants come from whole runs."""

    @property
    def memory(self) -> float:
        """Memory in bytes."""
        return self.memory_gib * 2**30

    def peak(self, dtype: str) -> float | None:
        """Peak FLOP/s of a dtype; a device without FP8 units runs FP8 operands at its BF16 rate."""
        for name in {"fp8": ("fp8", "bf16", "fp32"), "bf16": ("bf16", "fp32")}.get(dtype, (dtype,)):
            if name in self.peak_tflops:
                return self.peak_tflops[name] * 1e12
        return None


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tier of the network, per device and direction."""

    gb_per_s: float
    latency_us: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.gb_per_s * 1e9

    @property
    def latency(self) -> float:
        """Seconds."""
        return self.latency_us * 1e-6


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Nodes of equal devices. `node` is the link inside a node, `network` the one between nodes."""

    name: str
    device: Device
    devices_per_node: int = 8
    num_nodes: int = 1
    domain: int | None = None
    """Devices that the `node` link joins, where it reaches beyond a node (72 in an NVL72 rack); None: a node's."""
    node: Link | None = None
    network: Link | None = None

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.devices_per_node * self.num_nodes

    @property
    def linked(self) -> int:
        """Devices that the `node` link joins."""
        return self.domain or self.devices_per_node

    @property
    def is_local(self) -> bool:
        """Whether this is the machine at hand, known by calibration alone."""
        return self.name == "local" or self.name.startswith("local-")


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds by size, as measured; the reader interpolates between points and extrapolates by rate."""

    size: list[float]
    """Ascending. FLOPs, elements or bytes, as the curve's table says."""
    seconds: list[float]


class GemmPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured seconds of one matrix multiply, (m, k) x (k, n)."""

    m: int
    n: int
    k: int
    seconds: float


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was measured of one device and its links: written by `greylag calibrate`, read by the simulator."""

    device: str
    """What the machine says it is."""
    created: str
    """ISO 8601, UTC."""
    num_ranks: int
    """Ranks that ran at once while measuring: they share caches and memory bandwidth."""
    torch: str
    gemm: list[GemmPoint]
    """FP32 inputs and output, `x @ w.T`."""
    ops: dict[str, Curve]
    """Seconds by number of elements, for each operator named in `spec.work`."""
    collectives: dict[str, Curve]
    """Seconds by bytes of the full (unsharded) tensor, over `num_ranks` ranks."""
    reference: dict[str, float] = {}
    """Seconds by phase of one whole step of `spec.calibration.reference_job`: what operators cost in a row."""

    @property
    def peak(self) -> float:
        """The best FLOP/s that any measured matrix multiply reached."""
        return max(2 * p.m * p.n * p.k / p.seconds for p in self.gemm)
