"""Quantity: numbers as people read them, three digits and a unit that fits.

Structs hold seconds, bytes, FLOPs and counts; this is the border where a unit is chosen, for a Step that prints
itself and for every report. Each function takes None (not measured, not predicted, not finite) and gives a dash for it.
"""

import math
from collections.abc import Iterable

NONE = "–"
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
"""Seconds."""

Ladder = list[tuple[float, str]]
SECONDS: Ladder = [(1e-6, "µs"), (1e-3, "ms"), (1.0, "s"), (MINUTE, "min"), (HOUR, "h")]
BYTES: Ladder = [(1.0, "B"), (2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB"), (2**40, "TiB")]
FLOPS_PER_SECOND: Ladder = [(10.0**i, f"{p}FLOP/s") for i, p in zip(range(0, 21, 3), ["", *"kMGTPE"], strict=True)]
COUNT: Ladder = [(1.0, ""), (1e6, "M"), (1e9, "B"), (1e12, "T")]


def finite(value: float | None) -> float | None:
    """The value, or None where it is missing, NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def unit(values: Iterable[float | None], ladder: Ladder) -> tuple[float, str]:
    """The rung that fits the largest of `values`: what to divide by, and its name."""
    largest = max((abs(v) for v in map(finite, values) if v is not None), default=0.0)
    largest = float(f"{largest:.3g}")
    if not largest:
        return (1.0, next(name for size, name in ladder if size == 1.0))
    fitting = [rung for rung in ladder if largest >= _from(rung, ladder)]
    return fitting[-1] if fitting else ladder[0]


def _from(rung: tuple[float, str], ladder: Ladder) -> float:
    """Where a rung takes over: at itself, bytes at 1000 of the rung below, minutes and hours at two."""
    if ladder is BYTES:
        return rung[0] / 1.024 if rung[0] > 1 else 1.0
    return rung[0] * (2 if rung[1] in ("min", "h") else 1)


def digits(value: float | None) -> str:
    """Three significant digits, never in scientific notation above 0.001."""
    if finite(value) is None:
        return NONE
    assert value is not None
    if value and abs(value) < 1e-3:
        return f"{value:.2e}".replace("-", "−")
    places = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.1 or not value else 4
    return f"{value:,.{places}f}".replace("-", "−")


def _with_unit(value: float | None, ladder: Ladder) -> str:
    if finite(value) is None:
        return NONE
    assert value is not None
    size, name = unit([value], ladder)
    return f"{digits(value / size) if value else '0'} {name}".rstrip()


def seconds(value: float | None) -> str:
    """1.23 s."""
    return _with_unit(value, SECONDS)


def memory(value: float | None) -> str:
    """812 MiB."""
    return _with_unit(value, BYTES)


def flops_per_second(value: float | None) -> str:
    """4.50 GFLOP/s."""
    return _with_unit(value, FLOPS_PER_SECOND)


def count(value: float | None) -> str:
    """4,096 in full below a million, then 9.12 M, 671 B."""
    return f"{value:,.0f}" if value is not None and abs(value) < 1e6 else _with_unit(value, COUNT)


def percent(value: float | None) -> str:
    """A share: 43.2%, never more than two decimals."""
    if finite(value) is None or value is None:
        return NONE
    return "<0.01%" if 0 < value < 1e-4 else f"{value:.2%}" if abs(value) < 0.1 else f"{digits(100 * value)}%"


def difference(value: float | None) -> str:
    """A relative difference with its sign: +4.2%, −11.0%; from ten times on as a factor."""
    if finite(value) is None or value is None:
        return NONE
    if value >= 9:
        return f"×{digits(value + 1)}"
    text = f"{100 * value:+.1f}%"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text.replace("-", "−")
