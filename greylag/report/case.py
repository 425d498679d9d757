"""Case: a run and its prediction, as the rules of `explain` and `uneven` look at them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from greylag.report.ranks import Figures, RankTimes
from greylag.report.summary import steady
from greylag.spec.job import Job
from greylag.spec.quantity import seconds
from greylag.spec.step import PHASES, Step

NOTABLE = 0.05
"""Share of the predicted step from which an excess is looked into. Steps of one run differ by a few percent."""
ALIKE = 0.15
"""Two ratios are alike if they differ by less."""


@dataclass(frozen=True)
class Case:
    """What the rules look at. Seconds are a rank's own: what it waits for others is taken off, where that is known."""

    job: Job
    predicted: Step
    every: Sequence[Step]
    """All measured steps of rank 0, ascending."""
    ranks: RankTimes

    @cached_property
    def steps(self) -> Sequence[Step]:
        """Of rank 0, those behind the warm-up."""
        return steady(self.every)

    @cached_property
    def excesses(self) -> Figures:
        """(rank, phase): seconds beyond the predicted ones."""
        excesses: Figures = self.ranks.own - np.array([self.predicted.seconds.get(phase, 0.0) for phase in PHASES])
        return excesses

    def measured(self, phase: str, rank: int | None = None) -> float:
        """Median seconds of a phase on a rank, or else on a rank in the middle."""
        at = PHASES.index(phase)
        return float(self.ranks.usual[at] if rank is None else self.ranks.own[rank, at])

    def excess(self, phase: str) -> float:
        """Seconds that a phase takes longer than predicted on a rank in the middle."""
        return self.measured(phase) - self.predicted.seconds.get(phase, 0.0)

    def ratio(self, phase: str) -> float:
        """Measured over predicted, on a rank in the middle; 1 for a phase that is not predicted."""
        predicted = self.predicted.seconds.get(phase, 0.0)
        return self.measured(phase) / predicted if predicted else 1.0

    def worst(self, phase: str) -> tuple[int, float]:
        """The rank with the largest excess of a phase, and that."""
        excess = self.excesses[:, PHASES.index(phase)]
        return int(excess.argmax()), float(excess.max())

    def apart(self, phase: str, rank: int) -> float:
        """Seconds of a phase that a rank has beyond a rank in the middle."""
        return self.measured(phase, rank) - self.measured(phase)

    def stands_out(self, phase: str, rank: int) -> bool:
        """Whether a phase is longer on a rank than on others, by a share of the measured step that is worth a word."""
        return self.apart(phase, rank) > NOTABLE * max(self.ranks.step, self.predicted.total_seconds)

    def is_notable(self, excess: float) -> bool:
        """Whether an excess is worth a word."""
        return excess > NOTABLE * self.predicted.total_seconds

    def spoken(self, *phases: str, rank: int | None = None) -> str:
        """The phases' seconds as evidence."""
        return ", ".join(
            f"{p} {seconds(self.measured(p, rank))}, {seconds(self.predicted.seconds.get(p, 0.0))} predicted"
            for p in phases
        )
