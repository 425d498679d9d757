"""Campaign: a run simulated many times at once, event by event, to see how far one run lies from the mean.

It knows the rules of `recovery` and none of the formulas of `goodput`: failures strike at exponential times, nodes go
for repair and come back in the order in which they went, checkpoints close, corruption is noticed, slow nodes are
found. Every array has one entry per trial; the loop is over the events of a run, of all trials abreast.

An idle node does not fail: neither those of a replica that is missing nor those of a job that waits for a repair.
"""

import math
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from greylag.plan.failures import Failures
from greylag.plan.recovery import Fleet, Policy, Recovery, Response, job_rates, respond
from greylag.spec.error import SpecError
from greylag.spec.quantity import DAY

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Campaign(msgspec.Struct, frozen=True, kw_only=True):
    """What the trials of one policy gave."""

    policy: Policy
    num_devices: int
    days: float
    """Elapsed, of each trial."""
    trials: int
    goodput: float
    """Mean over the trials, of all `num_devices` (`goodput.Goodput.goodput`)."""
    error: float
    """Standard error of that mean."""
    interval: tuple[float, float]
    """Nine in ten trials lie between. With `uncertain` rates it covers what is not known of them too."""
    failures: float
    """Mean number per trial, of every class, of those that struck."""
    waiting: float
    """Mean share of time that the job waited for a repair."""


def simulate(
    failures: Failures,
    fleet: Fleet,
    recovery: Recovery,
    policy: Policy,
    days: float,
    rng: np.random.Generator,
    trials: int = 1000,
    uncertain: bool = False,
) -> Campaign:
    """Simulate `trials` runs of `days` elapsed.

    `uncertain` draws the rates anew for each trial: a gamma with shape count + 1/2 over the exposure, which is what a
    Poisson count says of its mean under Jeffreys' prior; the classes keep their shares. Raises SpecError where the
    fleet or the recovery cannot be, or nothing is left to simulate.
    """
    response = respond(policy, fleet, recovery)
    if not 0 < days < float("inf"):
        raise SpecError(f"days: {days}; give the days that the run lasts")
    if trials < 2:
        raise SpecError(f"trials: {trials} have no spread; give 2 or more")
    scale = np.ones(trials)
    if uncertain and failures.count:
        scale = rng.gamma(failures.count + 0.5, size=trials) / failures.count
    hazards = Hazards(*(rate * scale for rate in job_rates(failures, fleet)))
    runs = Trials(hazards, fleet, recovery, response, days * DAY, rng)
    while runs.step():
        pass
    kept = (runs.saved + runs.unsaved) / runs.end
    low, high = np.quantile(kept, (0.05, 0.95))
    return Campaign(
        policy=policy,
        num_devices=fleet.num_devices,
        days=days,
        trials=trials,
        goodput=float(kept.mean()),
        error=float(kept.std(ddof=1)) / math.sqrt(trials),
        interval=(float(low), float(high)),
        failures=float(runs.struck.mean()),
        waiting=float((runs.waited / runs.end).mean()),
    )


class Hazards(NamedTuple):
    """Failures per second of the whole job, one per trial (`failures.Rates`)."""

    node: Floats
    software: Floats
    corruption: Floats
    slow: Floats


class Trials:
    """The state of all trials. Seconds from the start of the run; training in seconds of the whole job."""

    def __init__(
        self, rates: Hazards, fleet: Fleet, recovery: Recovery, response: Response, end: float, rng: np.random.Generator
    ) -> None:
        self.rates, self.fleet, self.recovery, self.response = rates, fleet, recovery, response
        self.end, self.rng = end, rng
        self.row = np.arange(len(rates.node))
        zeros, never = np.zeros(len(self.row)), np.full(len(self.row), np.inf)
        self.now, self.up_at = zeros.copy(), zeros.copy()
        """Now, and from when on the job trains."""
        self.restarts = zeros.astype(bool)
        """Whether the stall until then is one of the whole job."""
        self.since, self.unsaved, self.saved = zeros.copy(), zeros.copy(), zeros.copy()
        """Time since the last checkpoint, training in it, and training behind it."""
        self.notice_at, self.clean = never.copy(), zeros.copy()
        """When corruption will be noticed, and what was saved before it."""
        self.found_at = never.copy()
        """When a slow node will be found."""
        self.struck, self.waited = zeros.copy(), zeros.copy()
        self._stock()

    def _stock(self) -> None:
        """The spares, and the queue of nodes that the job goes on without."""
        count, trials = np.zeros(len(self.row), dtype=np.int64), len(self.row)
        self.taken_at = np.zeros((trials, max(self.fleet.spares, 1)))
        """When the last nodes were taken, in a ring: with as many spares as entries, the one overwritten is next."""
        self.taken = count.copy()
        load = float(np.sum(self.rates, axis=0).max()) * (self.fleet.repair + self.recovery.restart)
        most = int(1 / self.response.idle) if self.response.idle else 0
        self.back_at = np.full((trials, min(most, int(load + 12 * math.sqrt(load) + 60)) + 1), np.inf)
        """When missing nodes are back, in a ring, the earliest first."""
        self.missing, self.first = count.copy(), count.copy()

    def step(self) -> bool:
        """Take every trial to its next event. False when all are at the end."""
        rates, idle = self.rates, self.response.idle
        capacity = np.maximum(1 - idle * self.missing, 0.0)
        node = rates.node * capacity
        corrupts = np.where(np.isinf(self.notice_at), rates.corruption, 0.0)
        slows = np.where(np.isinf(self.found_at), rates.slow, 0.0)
        total = node + rates.software + corrupts + slows
        with np.errstate(divide="ignore"):
            fails_at = self.now + self.rng.standard_exponential(len(self.row)) / total
        back_at = self.back_at[self.row, self.first]
        due = np.minimum(np.minimum(back_at, self.notice_at), np.minimum(self.found_at, self.end))
        then = np.maximum(np.minimum(fails_at, due), self.now)
        self._train(then, capacity)
        live = then < self.end
        if not live.any():
            return False
        self.now = np.minimum(then, self.end)
        fails = live & (fails_at < due)
        drawn = self.rng.random(len(self.row)) * total
        self._strike(fails, drawn, node, corrupts)
        rest = live & ~fails
        if idle:
            self._return(rest & (back_at == due))
        self._notice(rest & (self.notice_at == due))
        self._find(rest & (self.found_at == due))
        return True

    def _train(self, then: Floats, capacity: Floats) -> None:
        """Train from now until then, as far as no stall is in the way, and close the checkpoints that fall due."""
        interval, length = self.recovery.interval, self.recovery.interval + self.recovery.save
        pace = capacity * np.where(np.isinf(self.found_at), 1.0, 1 / self.recovery.slowdown)
        then = np.minimum(then, self.end)
        since = self.since + np.maximum(then - np.maximum(self.now, self.up_at), 0.0)
        closed = np.floor(since / length)
        behind = np.minimum(self.since, interval)
        self.since = since - closed * length
        ahead = np.minimum(self.since, interval)
        closes = closed > 0
        first = self.unsaved + pace * (interval - behind)
        self.saved += np.where(closes, first + pace * (closed - 1) * interval, 0.0)
        self.unsaved = np.where(closes, pace * ahead, self.unsaved + pace * (ahead - behind))

    def _strike(self, fails: Bools, drawn: Floats, node: Floats, corrupts: Floats) -> None:
        """Failures, told apart by where `drawn` falls among the rates."""
        response, software = self.response, self.rates.software
        self.struck += fails
        lost = fails & (drawn < node)
        broken = fails & ~lost & (drawn < node + software)
        wrong = fails & ~lost & ~broken & (drawn < node + software + corrupts)
        slow = fails & ~lost & ~broken & ~wrong
        self._lose(lost, response.node_stall, response.node_rolls_back)
        if broken.any():
            self._stop(broken, response.software_stall, whole=True)
            self._roll_back(broken)
        self.clean = np.where(wrong, self.saved, self.clean)
        self.notice_at = np.where(wrong, self.now + self.recovery.notice, self.notice_at)
        self.found_at = np.where(slow, self.now + self.recovery.slow_found, self.found_at)

    def _lose(self, which: Bools, stall: float, whole: bool) -> None:
        """A node goes: wait for another or go on without, stand still, and go back if the whole job stops."""
        if not which.any():
            return
        node_at = self._take(which)
        if self.response.waits:
            self._wait(which, np.where(which, node_at - self.now, 0.0))
        if self.response.idle:
            self._miss(which, node_at + self.recovery.restart)
        self._stop(which, stall, whole)
        if whole:
            self._roll_back(which)

    def _wait(self, which: Bools, wait: Floats) -> None:
        """Wait for a node. Nobody trains, so nobody notices or finds anything meanwhile."""
        self.waited += np.where(which, np.minimum(self.now + wait, self.end) - np.minimum(self.now, self.end), 0.0)
        self.now = self.now + wait
        self.notice_at = self.notice_at + wait
        self.found_at = self.found_at + wait

    def _take(self, which: Bools) -> Floats:
        """When the node that takes the place of the one that goes now is there: at once, or after the next repair.

        With s spares the k-th node that is taken is replaced by a spare if k <= s, else by the (k - s)-th that was.
        """
        if not (self.response.waits or self.response.idle):
            return self.now
        repair, spares = self.fleet.repair, self.fleet.spares
        if not spares:
            return self.now + repair
        place = self.taken % spares
        earlier = self.taken_at[self.row, place]
        node_at = np.where(self.taken < spares, self.now, np.maximum(self.now, earlier + repair))
        self.taken_at[self.row, place] = np.where(which, self.now, earlier)
        self.taken += which
        return node_at

    def _miss(self, which: Bools, back_at: Floats) -> None:
        size = self.back_at.shape[1]
        place = (self.first + self.missing) % size
        self.back_at[self.row, place] = np.where(which, back_at, self.back_at[self.row, place])
        self.missing += which
        assert (self.missing < size).all(), "more nodes are missing than were thought possible"

    def _return(self, which: Bools) -> None:
        self.back_at[self.row, self.first] = np.where(which, np.inf, self.back_at[self.row, self.first])
        self.first = np.where(which, (self.first + 1) % self.back_at.shape[1], self.first)
        self.missing -= which

    def _stop(self, which: Bools, stall: float, whole: bool) -> None:
        """Stand still from now on. Whatever strikes during a restart of the whole job begins that anew."""
        restarting = self.restarts & (self.now < self.up_at)
        stall_of = np.where(restarting & (not whole), self.response.software_stall, stall)
        self.up_at = np.where(which, self.now + stall_of, self.up_at)
        self.restarts = np.where(which, restarting | whole, self.restarts)

    def _roll_back(self, which: Bools) -> None:
        self.since = np.where(which, 0.0, self.since)
        self.unsaved = np.where(which, 0.0, self.unsaved)

    def _notice(self, which: Bools) -> None:
        """Corruption is noticed: all since is undone, and the node goes."""
        if which.any():
            self.saved = np.where(which, self.clean, self.saved)
            self.notice_at = np.where(which, np.inf, self.notice_at)
            self._roll_back(which)
            self._lose(which, self.response.corruption_stall, whole=True)

    def _find(self, which: Bools) -> None:
        """A slow node is found and goes, after a checkpoint where the whole job stops for it."""
        if not which.any():
            return
        self.found_at = np.where(which, np.inf, self.found_at)
        if self.response.node_rolls_back:
            self.saved += np.where(which, self.unsaved, 0.0)
        self._lose(which, self.response.slow_stall, whole=self.response.node_rolls_back)
