"""Poisson: what a count of rare events says about their rate. The interval is exact, and needs no scipy."""

import math

import numpy as np

LEVEL = 0.9
"""Nine in ten, as of every interval that Greylag states."""
_SIGMAS = 40.0
"""Terms of the sum that lie further from the count, in square roots of it, are below 1e-300 of the largest."""


def count_interval(count: int, level: float = LEVEL) -> tuple[float, float]:
    """The means that a Poisson count of `count` does not contradict: Garwood's exact central interval.

    Garwood, Biometrika 28 (1936) 437: the lower end is the mean of which `count` or more has the probability
    (1 - level) / 2, the upper end the one of which `count` or fewer has it. Equal to half the quantiles of chi-square
    with 2 count and 2 count + 2 degrees of freedom; found by halving to 1e-12 of itself.
    """
    assert count >= 0
    assert 0 < level < 1
    tail = (1 - level) / 2
    low = _mean_of(count - 1, 1 - tail) if count else 0.0
    return low, _mean_of(count, tail)


def _mean_of(count: int, probability: float) -> float:
    """The mean of which `count` or fewer has the probability."""
    least = max(0, int(count - _SIGMAS * math.sqrt(count)))
    numbers = np.arange(least, count + 1, dtype=float)
    factorials = np.array([math.lgamma(number + 1) for number in numbers])

    def at_most(mean: float) -> float:
        return float(np.exp(numbers * math.log(mean) - mean - factorials).sum())

    low, high = max(1e-12, count - 10 * math.sqrt(count + 1) - 10), count + 10 * math.sqrt(count + 1) + 40
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if at_most(middle) > probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2
