"""Reach: the ranges that a law was fitted in, and how far outside of them a question lies.

A law of training is a curve through runs: within their ranges it interpolates, beyond them nothing but its form holds
it. Every answer of `kumar`, `sun` and of a fit to one's own runs says by how many times it goes beyond.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Number: TypeAlias = float | Floats
"""One point or many: the laws take and give either."""


class Range(NamedTuple):
    """What the runs of a law spanned in one quantity; `low` is 0 where its lower end is not known."""

    what: str
    """Key of the quantity: parameters, tokens, weights, activations, kv, exponent, mantissa, block."""
    low: float
    high: float

    @classmethod
    def of(cls, what: str, values: Number) -> "Range":
        """From the least of values to the largest."""
        return cls(what, float(np.min(values)), float(np.max(values)))


class Outside(NamedTuple):
    """A quantity of a question that lies outside of the fitted range."""

    what: str
    value: float
    low: float
    high: float

    @property
    def factor(self) -> float:
        """By how many times: above 1; infinite below a range from a value of 0."""
        if self.value > self.high:
            return self.value / self.high if self.high else float("inf")
        return self.low / self.value if self.value else float("inf")


def outside(ranges: Iterable[Range], asked: Mapping[str, float]) -> tuple[Outside, ...]:
    """Those quantities of a question that lie outside of their ranges; a range of nothing asked does not count."""
    return tuple(
        Outside(r.what, float(asked[r.what]), r.low, r.high)
        for r in ranges
        if r.what in asked and not r.low <= asked[r.what] <= r.high
    )
