"""Telemetry: the numbers of the tensors that linear layers quantize, as one step of a run met them.

The trainer writes one `Telemetry` per line of `telemetry.jsonl`; the page shows it and `report.advise` proposes
recipes from it. `CANDIDATES` are the ways to represent an operand that are tried on each tensor beside the run's own.
"""

from typing import NamedTuple

import msgspec

from greylag.spec.precision import FormatName, Granularity, OperandRole, ScaleKind, Timing

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Of the blocks' amax."""
OUTLIER = 10.0
"""A channel whose amax is this many times the median channel's is an outlier."""


class Candidate(NamedTuple):
    """A way to represent one operand."""

    format: FormatName
    granularity: Granularity
    scale: ScaleKind
    timing: Timing = "current"

    def __str__(self) -> str:
        return f"{self.format} {self.granularity} {self.scale} {self.timing}"


CANDIDATES: tuple[Candidate, ...] = (
    Candidate("e4m3", "tensor", "fp32", "delayed"),
    Candidate("e5m2", "tensor", "fp32", "delayed"),
    Candidate("e4m3", "tensor", "fp32"),
    Candidate("e5m2", "tensor", "fp32"),
    Candidate("e4m3", "row", "pow2"),
    Candidate("e4m3", "1x128", "pow2"),
    Candidate("e4m3", "1x128", "fp32"),
    Candidate("e4m3", "128x128", "pow2"),
    Candidate("e4m3", "128x128", "fp32"),
    Candidate("e4m3", "1x32", "mx-ceil"),
)


class Rounding(msgspec.Struct, frozen=True, array_like=True):
    """What a representation does to the numbers of one tensor."""

    error: float
    """Root of the sum of squared errors over that of the squared numbers."""
    channels: float
    """Root mean square over the channels of each one's own error: one large channel does not hide the small ones."""
    flushed: float
    """Share of the numbers other than 0 that became 0."""
    saturated: float
    """Share of the numbers beyond the largest value that the format and scale hold."""


class OperandHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operand of one layer, in one step. Of experts, whatever was quantized together."""

    layer: str
    role: OperandRole
    shape: tuple[int, int]
    """Rows and columns; channels are columns."""
    sampled_rows: int
    """Rows in which all but amax, scales and channels were measured."""
    own: str
    """How the run represents it: format and granularity, or the high precision it stays in."""
    amax: float
    dynamic_range: float = 0.0
    """Octaves (log2) from the 0.1% smallest of the numbers other than 0 to amax."""
    block_amax: tuple[float, ...] = ()
    """Quantiles (`QUANTILES`) of the amax of 1x128 blocks; blocks of zeros left out."""
    scale_exponents: dict[int, int] = {}
    """How many of its scales (`scale_inv`) have which exponent, floor(log2)."""
    rounding: Rounding | None = None
    """By the run's own representation; None in high precision."""
    outliers: tuple[tuple[int, float], ...] = ()
    """(channel, its amax over the median channel's), largest first, a few."""
    num_outliers: int = 0
    history: int = 0
    """Earlier amaxes that the delayed candidates took their scale from; 0: they were not tried."""
    along_rows: dict[str, Rounding] = {}
    """Of each candidate, by its text: rows and blocks along the rows, as forward and input gradient take them."""
    along_columns: dict[str, Rounding] = {}
    """The same down the columns, as the weight gradient (and the weight's input gradient) takes them."""


class Telemetry(msgspec.Struct, frozen=True, kw_only=True):
    """One step, as rank 0 met it in its first micro-batch."""

    step: int
    seconds: float = 0.0
    """What measuring took."""
    operands: tuple[OperandHealth, ...]
