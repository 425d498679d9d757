"""Measurement: what kernels and collectives took on accelerators, each run alone or found in a profiler's trace.

`greylag calibrate` gathers them, `sim.fit` fits a device's `Efficiency` to them. The machine at hand without an
accelerator is `cluster.Calibration`, whose measured seconds are read as they are.
"""

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import msgspec

Dtype = Literal["fp8", "bf16"]
"""Of a GEMM that is fitted. FP32 is not: its units are others, or TF32 in disguise."""
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]


class GemmSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`groups` products (m, k) x (k, n) in one launch."""

    m: int
    n: int
    k: int
    dtype: Dtype
    """Of the operands; `bf16` stands for FP16 too, which runs at its rate."""
    groups: int = 1
    out_bytes: float = 2.0
    """Bytes moved per element of the result."""
    seconds: float


class AttentionSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One attention core, fused, in BF16."""

    flops: float
    """Of its forward, the masked half not counted."""
    width: int
    """Of a query and a value head together."""
    backward: bool = False
    seconds: float


class MoveSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An elementwise kernel, which only moves bytes."""

    bytes: float
    """Read and written."""
    seconds: float


class CollectiveSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A collective over `ranks` whose numbers lie `stride` apart, or a transfer to the rank `stride` away."""

    collective: Collective
    bytes: float
    """Of the whole tensor: gathered, before scattering, or what one rank sends to all."""
    ranks: int
    stride: int = 1
    seconds: float


Kernel: TypeAlias = GemmSample | AttentionSample | MoveSample
Sample: TypeAlias = Kernel | CollectiveSample


class Measurements(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was measured of one kind of device and its links."""

    device: str
    """What the driver calls it."""
    source: str
    """Where it comes from, in words: the command and the day, or the trace."""
    gemms: list[GemmSample] = []
    attention: list[AttentionSample] = []
    moves: list[MoveSample] = []
    collectives: list[CollectiveSample] = []
    launch_us: float | None = None
    """Host time per kernel, where nothing else kept the host."""
    step: float | None = None
    """Seconds of a step of the run that was traced."""
    busy: float = 0.0
    """Seconds that a trace's kernels took in all."""
    unread: dict[str, float] = {}
    """Of them, seconds by kernel of those that are no sample: of unknown shape, or no operator that is predicted."""

    @classmethod
    def of(cls, samples: Iterable[Sample], **others: Any) -> "Measurements":
        """Of samples of all kinds, in their order; `others` are the fields beside them."""
        samples = list(samples)
        return cls(
            gemms=[s for s in samples if isinstance(s, GemmSample)],
            attention=[s for s in samples if isinstance(s, AttentionSample)],
            moves=[s for s in samples if isinstance(s, MoveSample)],
            collectives=[s for s in samples if isinstance(s, CollectiveSample)],
            **others,
        )
