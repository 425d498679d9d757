"""Fit: the constants of a law of precision from one's own runs, and how much of them the runs determine.

Least squares of log loss, from many starts, over the places of a `law_form`.

Intervals are profile likelihoods: a constant is moved and all others fitted anew, until the squares are larger than
95% of samples would have them (the F statistic of one constant). A covariance would say a width for what the runs do
not determine at all; a profile stays flat and is reported open. Predictions have the same interval: of the law's curve,
not of one run, whose noise comes on top. `resampled` (a bootstrap of residuals) is for what is no smooth function of
the constants, such as the best precision.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from greylag.plan.kumar import Kumar
from greylag.plan.law import Law
from greylag.plan.law_form import Form, form_of
from greylag.plan.law_runs import Runs
from greylag.plan.reach import Floats, Outside, Range, outside
from greylag.plan.sun import Sun
from greylag.spec.error import SpecError

LEVEL = 0.95
STARTS = 16
"""Of the search for the least squares; half of them or more end in the same place."""
MOST_TRIES, HELD_TRIES = 1000, 100
"""Evaluations of a search, and of a step of a profile: sound ones need fewer, along a flat valley none would end."""
WIDE = 10.0
"""A constant whose interval spans so many times is not determined; so is one whose interval is open."""
FARTHEST = float(np.log(1e9))
"""A profile that has not risen so far out, in logarithms, is open."""
ALONG = 5
"""Places that are tried along each coordinate; those as good as the best are where profiles may start."""
LEAST_NOISE = 1e-9
"""Runs without any noise (a law's own losses) have intervals of this order."""
STIFF = 1e3
"""How hard a profile holds its constant: the distance to it, in standard errors, counts so many times."""


class Constant(NamedTuple):
    """One constant of a fitted law."""

    name: str
    value: float
    low: float
    high: float
    """Ends of the 95% interval; 0 or infinite where the runs set none."""
    published: float | None
    """The paper's, of other models on other text."""
    is_offset: bool = False
    """An offset n_x is itself a logarithm."""

    @property
    def is_determined(self) -> bool:
        """Whether the runs say more of it than its order of magnitude."""
        if not np.isfinite([self.low, self.high]).all():
            return False
        return self.high - self.low < np.log(WIDE) if self.is_offset else 0 < self.high < WIDE * self.low


class Prediction(NamedTuple):
    """A fitted law's loss, and how far it goes beyond the runs."""

    loss: float
    low: float
    high: float
    """Ends of the 95% interval of the law's curve, if the law's form holds out there."""
    outside: tuple[Outside, ...]


@dataclass(frozen=True)
class Fit:
    """A law fitted to runs."""

    law: Kumar | Sun
    constants: tuple[Constant, ...]
    noise: float
    """Standard deviation of the logarithm of a run's loss around the law: 0.005 is half a percent."""
    num_runs: int
    source: str
    notes: tuple[str, ...]
    problem: "Problem"
    """To ask for more."""

    @property
    def ranges(self) -> tuple[Range, ...]:
        """What the runs spanned."""
        return self.law.ranges

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Constants that the runs do not determine."""
        return tuple(c.name for c in self.constants if not c.is_determined)

    def predict(self, parameters: float, tokens: float, precision: Any) -> Prediction:
        """The loss of a plan by this fit, its interval, and how far the plan lies outside of the runs."""

        def log_loss(theta: Floats) -> float:
            law: Law = self.problem.form.law(theta)
            return float(np.log(law.loss(parameters, tokens, precision)))

        low, value, high = self.problem.profile(log_loss)
        asked = {"parameters": parameters, "tokens": tokens, **self.law.coordinates(precision)}
        return Prediction(float(np.exp(value)), float(np.exp(low)), float(np.exp(high)), outside(self.ranges, asked))

    def resampled(self, number: int = 200, seed: int = 0) -> list[Kumar | Sun]:
        """Laws fitted to this law's own losses with its residuals drawn anew."""
        return self.problem.resampled(number, seed)


class Problem:
    """Runs, a form, and the place where their squares are least."""

    def __init__(self, form: Form, runs: Runs, seed: int = 0) -> None:
        self.form, self.runs, self.log_loss = form, runs, np.log(runs.loss)
        generator = np.random.default_rng(seed)
        starts = [form.start(generator) for _ in range(STARTS)]
        found = [self._search(self.residuals, start) for start in starts]
        self.theta = min(found, key=lambda theta: _squares(self.residuals(theta)))
        self.freedom = len(runs.loss) - len(self.theta)
        self.squares = _squares(self.residuals(self.theta))
        self.noise = float(np.sqrt(self.squares / self.freedom))
        pool = [*found, *self._along_valleys(np.array(starts))]
        self.places = [self.theta, *(theta for theta in pool if self.rise(theta) < self.most)]

    @property
    def most(self) -> float:
        """Standard errors by which the squares may rise within an interval."""
        from scipy.stats import t

        return float(t.ppf((1 + LEVEL) / 2, self.freedom))

    def rise(self, theta: Floats) -> float:
        """By how many standard errors the squares of a place lie above the least."""
        above = _squares(self.residuals(theta)) - self.squares
        return float(np.sqrt(max(above, 0.0))) / max(self.noise, LEAST_NOISE)

    def _along_valleys(self, starts: Floats) -> list[Floats]:
        """Where the search comes to if one coordinate after the other is held where the starts have it.

        A search may end far along a flat valley, where the squares no longer feel a constant: no profile could leave
        that place, which these surround.
        """
        places = []
        for coordinate, values in enumerate(np.quantile(starts, np.linspace(0, 1, ALONG), axis=0).T):
            for value in values:
                rest = np.delete(self.theta, coordinate)

                def whole(rest: Floats, coordinate: int = coordinate, value: float = value) -> Floats:
                    return np.insert(rest, coordinate, value)

                def residuals(rest: Floats, whole: Callable[[Floats], Floats] = whole) -> Floats:
                    return self.residuals(whole(rest))

                places.append(whole(self._search(residuals, rest, HELD_TRIES)))
        return places

    def residuals(self, theta: Floats) -> Floats:
        """Logarithms of the law's losses over the runs'."""
        runs = self.runs
        law: Law = self.form.law(theta)
        with np.errstate(all="ignore"):
            loss = np.asarray(law.loss(runs.parameters, runs.tokens, runs.precision), float)
            return np.asarray(np.clip(np.nan_to_num(np.log(loss) - self.log_loss, nan=1e3), -1e3, 1e3), float)

    def profile(self, of: Callable[[Floats], float]) -> tuple[float, float, float]:
        """Low end, value and high end of a function of the constants, on the scale that it is given in."""
        values = np.array([of(place) for place in self.places])
        values[np.isnan(values)] = values[0]
        error, ends = self._error(of, self.theta), []
        for side, farthest in ((-1.0, int(values.argmin())), (1.0, int(values.argmax()))):
            with np.errstate(invalid="ignore"):  # a constant of 0 has no logarithm to begin from
                reached = [values[0] + self._end(of, self.theta, side * error)]
                is_beyond = not side * (values[farthest] - values[0]) <= self.most * error
            if is_beyond:  # what the best place could see
                place = self.places[farthest]
                reached.append(values[farthest])
                if np.isfinite(values[farthest]):
                    reached.append(values[farthest] + self._end(of, place, side * self._error(of, place)))
            ends.append(side * max((side * end for end in reached if not np.isnan(end)), default=np.inf))
        return float(ends[0]), float(values[0]), float(ends[1])

    def resampled(self, number: int, seed: int) -> list[Kumar | Sun]:
        """See `Fit.resampled`. Residuals are widened by what the fit has taken off them."""
        generator, off = np.random.default_rng(seed), self.residuals(self.theta)
        off = (off - off.mean()) * np.sqrt(len(off) / self.freedom)

        def refitted(shift: Floats) -> Kumar | Sun:
            return self.form.law(self._search(lambda theta: self.residuals(theta) - shift, self.theta))

        return [refitted(self.residuals(self.theta) - generator.choice(off, len(off))) for _ in range(number)]

    def _end(self, of: Callable[[Floats], float], place: Floats, step: float) -> float:
        """How far from its value at a place the profile rises to `most` standard errors; infinite if it never does."""
        theta, value, most, at = place, of(place), self.most, step
        inside = (0.0, self.rise(place))
        for _ in range(30):
            theta, reached, rise = self._held(of, value + at, abs(step), theta)
            if rise >= most:
                break
            inside = (reached - value, rise)
            if abs(at) >= FARTHEST:
                return float(np.copysign(np.inf, step))
            at = float(np.copysign(min(abs(at) * (1.1 * most / rise if rise > 0.5 else 4.0), FARTHEST), step))
        beyond = (reached - value, rise)
        for _ in range(8):  # the square root of the rise is nearly a line
            share = (most - inside[1]) / (beyond[1] - inside[1])
            if beyond[1] - inside[1] < 1e-3 or not 0 <= share <= 1:
                break
            at = inside[0] + min(max(share, 0.05), 0.95) * (beyond[0] - inside[0])
            theta, reached, rise = self._held(of, value + at, abs(step), theta)
            if abs(rise - most) < 0.01:
                return reached - value
            inside, beyond = ((reached - value, rise), beyond) if rise < most else (inside, (reached - value, rise))
        share = min(max((most - inside[1]) / max(beyond[1] - inside[1], 1e-9), 0.0), 1.0)
        return inside[0] + share * (beyond[0] - inside[0])

    def _held(
        self, of: Callable[[Floats], float], target: float, error: float, start: Floats
    ) -> tuple[Floats, float, float]:
        """The best place where `of` is `target`, what it is there, and by how many standard errors squares rise."""
        noise = max(self.noise, LEAST_NOISE)
        stiff = STIFF * noise / error

        def residuals(theta: Floats) -> Floats:
            with np.errstate(all="ignore"):
                miss = np.clip(np.nan_to_num(stiff * (of(theta) - target), nan=1e3), -1e6, 1e6)
            return np.append(self.residuals(theta), miss)

        theta = self._search(residuals, start, HELD_TRIES)
        return theta, of(theta), self.rise(theta)

    def _error(self, of: Callable[[Floats], float], at: Floats) -> float:
        """Standard error by the covariance, the first step of a profile; 1 where the squares are flat."""
        width = 1e-5
        moves = width * np.eye(len(at))
        slopes = np.array([(of(at + m) - of(at - m)) / (2 * width) for m in moves])
        jacobian = np.array([(self.residuals(at + m) - self.residuals(at - m)) / (2 * width) for m in moves]).T
        floor = max(self.noise, LEAST_NOISE) ** 2
        covariance = floor * np.linalg.inv(jacobian.T @ jacobian + floor * np.eye(len(at)))
        error = float(np.sqrt(max(slopes @ covariance @ slopes, 0.0)))
        return min(max(error, 1e-6), 1.0) if np.isfinite(error) else 1.0

    @staticmethod
    def _search(residuals: Callable[[Floats], Floats], start: Floats, most: int = MOST_TRIES) -> Floats:
        from scipy.optimize import least_squares

        return np.asarray(least_squares(residuals, start, method="lm", max_nfev=most).x, float)


def _squares(residuals: Floats) -> float:
    return float(residuals @ residuals)


def fit(runs: Runs, seed: int = 0) -> Fit:
    """Fit the law that the runs' precision is of (`Bits`: Kumar's, `Layout`: Sun's).

    Raises SpecError if there are too few runs, or they have one precision.
    """
    form, notes = form_of(runs)
    needed = len(form.start(np.random.default_rng(0))) + 2
    if len(runs.loss) < needed:
        raise SpecError(f"{runs.source}: {len(runs.loss)} runs for {needed - 2} constants; add runs, {needed} at least")
    problem = Problem(form, runs, seed)
    law = form.law(problem.theta)
    published = form.constants(Kumar() if isinstance(law, Kumar) else Sun())
    constants = tuple(_constant(problem, name, published.get(name)) for name in form.constants(law))
    return Fit(law, constants, problem.noise, len(runs.loss), runs.source, (*runs.notes, *notes), problem)


def _constant(problem: Problem, name: str, published: float | None) -> Constant:
    is_offset = name.startswith("n_")

    def of(theta: Floats) -> float:
        value = problem.form.constants(problem.form.law(theta))[name]
        with np.errstate(divide="ignore"):
            return value if is_offset else float(np.log(value))

    low, value, high = problem.profile(of)
    if not is_offset:
        low, value, high = np.exp([low, value, high])
    return Constant(name, float(value), float(low), float(high), published, is_offset)
