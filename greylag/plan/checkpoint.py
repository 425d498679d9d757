"""Checkpoint: how often to save. The published optima, and the one of the policy at hand, found numerically."""

import math

import msgspec

from greylag.plan.failures import DAY, Failures
from greylag.plan.goodput import split
from greylag.plan.recovery import Fleet, Policy, Recovery, job_rates, respond
from greylag.spec.error import SpecError

LONGEST = DAY
"""Seconds between checkpoints that `best_interval` never goes beyond."""


def first_order(mttf: float, stall: float, interval: float = 0.0, save: float = 0.0) -> float:
    """Goodput on the back of an envelope: mttf / (mttf + stall + interval / 2), times the share that saving leaves.

    Failures strike while training, none while standing still or recomputing. That flatters where a stall is no small
    part of the time between failures: with one every 17.7 minutes, a stall and an interval of 10 minutes each give 54%
    here and 42% in the exact form (`goodput`). Without an interval nothing is recomputed.
    """
    return mttf / (mttf + stall + interval / 2) * (interval / (interval + save) if interval else 1.0)


def young(save: float, mttf: float) -> float:
    """Seconds between checkpoints: the first-order optimum sqrt(2 save mttf). Young, CACM 17 (1974) 530."""
    return math.sqrt(2 * save * mttf)


def daly(save: float, mttf: float) -> float:
    """Seconds between checkpoints: the higher-order optimum of Daly, FGCS 22 (2006) 303."""
    if save >= 2 * mttf:
        return mttf
    x = save / (2 * mttf)
    return math.sqrt(2 * save * mttf) * (1 + math.sqrt(x) / 3 + x / 9) - save


def best_interval(failures: Failures, fleet: Fleet, recovery: Recovery, policy: Policy) -> float:
    """Seconds between checkpoints that give the most goodput, by golden section; at most `LONGEST`.

    Where no failure takes the job back (`eject` without software failures) that is `LONGEST`. Raises SpecError if a
    checkpoint costs nothing: then there is no best.
    """
    if recovery.save <= 0:
        raise SpecError("recovery.save: a checkpoint that costs nothing is best written always; give its seconds")
    response, rates = respond(policy, fleet, recovery), job_rates(failures, fleet)

    def kept(log_interval: float) -> float:
        other = msgspec.structs.replace(recovery, interval=math.exp(log_interval))
        return split(rates, fleet, other, response)["training"]

    low, high, golden = math.log(min(recovery.save, LONGEST) / 100), math.log(LONGEST), (math.sqrt(5) - 1) / 2
    while high - low > 1e-6:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if kept(left) > kept(right) else (left, high)
    return math.exp((low + high) / 2)
