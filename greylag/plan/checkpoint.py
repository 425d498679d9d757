"""Checkpoint: how often to save, for the policy at hand, found numerically (Daly's optimum: tests/plan)."""

import math

import msgspec

from greylag.plan.failures import Failures
from greylag.plan.goodput import split
from greylag.plan.recovery import Fleet, Policy, Recovery, job_rates, respond
from greylag.spec.error import SpecError
from greylag.spec.quantity import DAY

LONGEST = DAY
"""Seconds between checkpoints that `best_interval` never goes beyond."""


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
