"""Goodput: which share of its time a job trains, in closed form. Failures are Poisson, times are constant.

The job trains for an interval and saves; a failure takes it back to the last checkpoint and a stall follows, in which
failures strike too and begin it anew. That is the complete cost function of Daly (Future Generation Computer Systems 22
(2006) 303), here with several classes of failure, of which some take the job back and some only stop it. `campaign`
simulates the same rules and needs none of the formulas.

Exact for stops, rollbacks, spares and waiting, in the long run. To first order in their own rates: corruption, slow
nodes, and that a missing replica can be missing during a stall.
"""

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from greylag.plan.failures import Failures, Rates
from greylag.plan.recovery import Fleet, Policy, Recovery, Response, job_rates, respond
from greylag.spec.error import SpecError

MOST_SPARES = 1_000_000
"""Nodes in repair beyond which nothing is counted any more."""
LOSSES = (
    "saving checkpoints",
    "detecting",
    "restarting",
    "ejecting",
    "recomputing",
    "waiting for repair",
    "missing capacity",
    "slow nodes",
    "corruption",
)
"""Where time goes, in the order of a job's day. Shares of the elapsed time; with the goodput they sum to one."""


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy gives."""

    policy: Policy
    num_devices: int
    """That train when nothing has failed."""
    held: int
    """Devices that are paid for, spares with them."""
    goodput: float
    """Effective training time ratio (ETTR): training that is kept, over elapsed time, of all `num_devices`. A replica
    that is missing counts as time lost in its share."""
    interval: tuple[float, float]
    """From the count behind the rates, nine in ten (`Failures.rates`)."""
    mttf: float
    """Mean seconds between failures."""
    mttf_interval: tuple[float, float]
    checkpoint_interval: float
    losses: dict[str, float] = {}
    """By `LOSSES`."""
    remarks: tuple[str, ...] = ()


class Calendar(msgspec.Struct, frozen=True, kw_only=True):
    """What a run takes and what its failures cost."""

    days: float
    interval: tuple[float, float]
    lost_device_hours: float
    """Of the job's own devices, in which nothing was gained."""
    spare_device_hours: float
    """Of spares, which stood by."""
    money: float | None = None
    """Of both, in the unit of the price."""


class Segment(NamedTuple):
    """Mean seconds per interval of training that is kept."""

    total: float
    stalls: float
    """After which the whole job starts again."""
    ejections: float
    """In which the others wait until a replica is out."""


def goodput(failures: Failures, fleet: Fleet, recovery: Recovery, policy: Policy) -> Goodput:
    """The goodput of a policy, with the interval that the count of failures leaves.

    Raises SpecError where the fleet or the recovery cannot be.
    """
    response = respond(policy, fleet, recovery)
    kept = {
        end: split(job_rates(failures, fleet, end), fleet, recovery, response)["training"]
        for end in ("low", "middle", "high")
    }
    losses = split(job_rates(failures, fleet), fleet, recovery, response)
    losses.pop("training")
    return Goodput(
        policy=policy,
        num_devices=fleet.num_devices,
        held=fleet.num_devices if policy == "restart" else fleet.held,
        goodput=kept["middle"],
        interval=(kept["high"], kept["low"]),
        mttf=failures.mttf(fleet.num_devices),
        mttf_interval=failures.mttf_interval(fleet.num_devices),
        checkpoint_interval=recovery.interval,
        losses=losses,
        remarks=_remarks(failures, policy),
    )


def over_sizes(
    failures: Failures, fleet: Fleet, recovery: Recovery, policies: Sequence[Policy], sizes: Iterable[int]
) -> list[Goodput]:
    """The same at several numbers of devices, by size and policy, with the spares that are enough at each size.

    A policy that a job of some size cannot follow (ejecting the only replica) is left out there.
    """
    found = []
    for size in sizes:
        other = msgspec.structs.replace(fleet, num_devices=size)
        other = msgspec.structs.replace(other, spares=enough_spares(failures, other, recovery))
        for policy in policies:
            with contextlib.suppress(SpecError):
                found.append(goodput(failures, other, recovery, policy))
    return found


def split(rates: Rates, fleet: Fleet, recovery: Recovery, response: Response) -> dict[str, float]:
    """Shares of the elapsed time: `training`, and each of `LOSSES`. They sum to one. `rates` are the job's."""
    slow = rates.slow / (1 + rates.slow * recovery.slow_found)
    corrupt = rates.corruption / (1 + rates.corruption * recovery.notice)
    waiting, missing = _missing(rates.node + slow + corrupt, fleet, recovery, response)
    capacity = 1 - response.idle * missing
    ejected = rates.node * (1 if response.node_rolls_back else capacity)
    segment = _segment(ejected, rates.software, recovery, response)
    running = (1 - waiting) / (1 + slow * response.slow_stall)
    clean = _clean(rates, segment, recovery, response)
    pace = 1 - slow * recovery.slow_found * (1 - 1 / recovery.slowdown)

    per_second = running / segment.total if math.isfinite(segment.total) else 0.0
    useful = recovery.interval * per_second
    detecting = segment.stalls * per_second * _share_of_detecting(rates, recovery, response)
    named = "restarting" if response.node_rolls_back else "ejecting"
    shares = dict.fromkeys(LOSSES, 0.0)
    shares |= {
        "saving checkpoints": recovery.save * per_second,
        "detecting": detecting,
        "restarting": segment.stalls * per_second - detecting,
        "ejecting": segment.ejections * per_second,
        "waiting for repair": waiting,
        "corruption": useful * (1 - clean),
        "missing capacity": useful * clean * (1 - capacity),
        "slow nodes": useful * clean * capacity * (1 - pace),
        "training": useful * clean * capacity * pace,
    }
    shares[named] += 1 - waiting - running
    shares["recomputing"] = max(0.0, 1 - sum(shares.values()))
    return shares


def _segment(node: float, software: float, recovery: Recovery, response: Response) -> Segment:
    """Time per interval that is kept, with stops that go back to a checkpoint and stops that do not.

    Let a be the rate of the first, b that of the second, and g(s) the Laplace transform of a stop without rollback of
    length e that further ones begin anew: g = x / (1 - b / (s + b) (1 - x)) with x = exp(-(s + b) e). To train and save
    for L without rollback then has the probability exp(-a k L), k = 1 + b (1 - g(a)) / a, and takes
    k (exp(a k L) - 1) / (a k) seconds of attempts. Each rollback is followed by a stall that every failure begins anew.
    With b = 0 and one class of mean time M this is Daly's: M exp(R / M) (exp((interval + save) / M) - 1).
    """
    back = software + (node if response.node_rolls_back else 0.0)
    only = 0.0 if response.node_rolls_back else node
    length = recovery.interval + recovery.save
    stop = _ejection(back, only, response.node_stall)
    stretch = 1 + only * stop
    exponent = back * stretch * length if math.isfinite(stop) else math.inf
    if exponent > 600:  # beyond it nothing is ever kept
        return Segment(math.inf, 0.0, 0.0)
    tries = math.expm1(exponent)
    attempts = length * stretch * (tries / exponent if exponent else 1.0)
    first = [(software, response.software_stall)] + [(node, response.node_stall)] * response.node_rolls_back
    stall = sum(rate * _stand(length, node, software, response) for rate, length in first) / back if back else 0.0
    return Segment(attempts + tries * stall, tries * stall, attempts * (1 - 1 / stretch))


def _ejection(killed: float, rate: float, length: float) -> float:
    """Mean seconds of a stop without rollback, (1 - g(s)) / s: others begin it anew, `killed` per second end it."""
    total = rate + killed
    if not total:
        return length
    ending = killed + rate * math.exp(-total * length)
    return -math.expm1(-total * length) / ending if ending else math.inf


def _stand(stall: float, node: float, software: float, response: Response) -> float:
    """Mean seconds of a stall of the whole job that would take `stall`, and that further failures begin anew.

    With q = exp(-(all rates) x a restart's stall), each of those takes (1 - q) / (all rates x q).
    """
    total = node + software
    if not total:
        return stall
    survives = max(math.exp(-total * response.software_stall), 1e-300)
    return -math.expm1(-total * stall) * (1 / total + (1 - survives) / (total * survives))


def _clean(rates: Rates, segment: Segment, recovery: Recovery, response: Response) -> float:
    """Share of the kept training that silent corruption leaves.

    Clean for 1 / rate, of which whole intervals are kept; then wrong until it is noticed; then a restart.
    """
    if not rates.corruption or not math.isfinite(segment.total):
        return 1.0
    stall = _stand(response.corruption_stall, rates.node, rates.software, response)
    kept = segment.total / math.expm1(min(rates.corruption * segment.total, 600))
    return kept / (1 / rates.corruption + recovery.notice + stall)


def _missing(rate: float, fleet: Fleet, recovery: Recovery, response: Response) -> tuple[float, float]:
    """Share of time that the job waits for a repair, and the mean number of nodes that it goes on without.

    Nodes in repair are the customers of a queue with a server for each, whose arrivals fall off when nodes are missing:
    their number has the probabilities of Erlang's and Engset's loss systems, whatever the distribution of repairs
    (Kelly, Reversibility and Stochastic Networks, 1979, chapter 3). Idle nodes do not fail.
    """
    if not rate or not (response.waits or response.idle):
        return 0.0, 0.0
    load = rate * fleet.repair
    most = 1 if response.waits else int(1 / response.idle)
    likely = int(load + 12 * math.sqrt(load) + 60)
    number = np.arange(min(fleet.spares + most, max(likely, fleet.spares + 1)) + 1)
    beyond = np.maximum(number - fleet.spares, 0)
    arrivals = load * (1 - response.idle * beyond[:-1])
    with np.errstate(divide="ignore"):
        logs = np.concatenate([[0.0], np.cumsum(np.log(np.maximum(arrivals, 0.0) / number[1:]))])
    chance = np.exp(logs - logs.max())
    chance /= chance.sum()
    if response.waits:
        return float(chance[-1]), 0.0
    absent = float(beyond @ chance)
    joining = rate * (1 - response.idle * absent) * recovery.restart
    return 0.0, min(absent + joining / (1 + rate * response.idle * recovery.restart), 1 / response.idle)


def _share_of_detecting(rates: Rates, recovery: Recovery, response: Response) -> float:
    """Of the stalls of the whole job."""
    node = rates.node if response.node_rolls_back else 0.0
    stalls = node * response.node_stall + rates.software * response.software_stall
    return (node + rates.software) * recovery.detect / stalls if stalls else 0.0


def _remarks(failures: Failures, policy: Policy) -> tuple[str, ...]:
    counts, said = failures.counts, []
    if not failures.count:
        said.append(f"no failure is counted in the {failures.node_days:,.0f} node-days of {failures.name}")
    if not counts["slow"]:
        said.append(f"no slow nodes are counted in {failures.name}; they cost time too")
    if not counts["corruption"]:
        said.append(f"no silent corruption is counted in {failures.name}; it costs time too")
    if not counts["software"] and policy in ("eject", "skip"):
        said.append(
            f"software failures, which would take the whole job back to a checkpoint, are not told apart in "
            f"{failures.name}: eject and skip are flattered"
        )
    if policy == "restart":
        said.append("restart takes each node from a pool that never runs out")
    if policy == "skip":
        said.append(
            "skip trains on with a model that lacks a part in one replica; what its gradients lose is no time, and is "
            "not counted"
        )
    return tuple(said)


def enough_spares(failures: Failures, fleet: Fleet, recovery: Recovery, waiting: float = 0.001) -> int:
    """The fewest spare nodes with which `spares` waits for repair in no more than this share of its time."""
    rates, response = job_rates(failures, fleet), respond("spares", fleet, recovery)
    taken = rates.node + rates.slow + rates.corruption

    def waits(spares: int) -> bool:
        return _missing(taken, msgspec.structs.replace(fleet, spares=spares), recovery, response)[0] > waiting

    if taken * fleet.repair > MOST_SPARES:
        raise SpecError(
            f"{taken * fleet.repair:,.0f} nodes would be in repair at a time; shorten the repair, or look at the rates"
        )
    low, high = -1, 1
    while waits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if waits(middle) else (low, middle)
    return high


def calendar(
    result: Goodput,
    useful_days: float,
    price: float | None = None,
) -> Calendar:
    """Days of a run that would take `useful_days` if nothing failed, and what failures cost at `price` a device-hour.

    Raises SpecError if the run never ends, or the days or the price are not positive.
    """
    if not 0 < useful_days < float("inf"):
        raise SpecError(f"days: {useful_days}; give the days that the run would take if nothing failed")
    if price is not None and not 0 < price < float("inf"):
        raise SpecError(f"price: {price:g}; give what a device-hour costs, or leave it out")
    if not result.goodput:
        raise SpecError(
            f"{result.policy}: nothing is kept with a checkpoint every {result.checkpoint_interval:,.0f} s and a "
            f"failure every {result.mttf:,.0f} s; save more often"
        )
    days = useful_days / result.goodput
    low, high = result.interval
    lost = (days - useful_days) * 24 * result.num_devices
    spare = days * 24 * (result.held - result.num_devices)
    return Calendar(
        days=days,
        interval=(useful_days / high, useful_days / low if low else math.inf),
        lost_device_hours=lost,
        spare_device_hours=spare,
        money=None if price is None else price * (lost + spare),
    )
