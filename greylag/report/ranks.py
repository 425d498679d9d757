"""Ranks: seconds by step, rank and phase, and what of them a rank waited for others.

Ranks that work together end their steps together, however slow one of them is: the others wait for it in the next
collective. So a rank's own seconds are its measured ones without that waiting. The last to come to a collective waits
for nobody: what it spends there is what sending takes, and what others spend there beyond that is waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from greylag.report.record import RunRecord, read_lines
from greylag.report.summary import steady
from greylag.spec.error import SpecError
from greylag.spec.grid import Grid
from greylag.spec.ranks import Ranks
from greylag.spec.step import PHASES, Step

RANKS = "ranks.jsonl"
LONGEST = 1e7
"""Seconds that no phase of a step takes."""
MOST_FIGURES = 10_000_000
"""Of a longer file the end is read: 200 steps of 4,096 ranks."""
INSIDE = [PHASES.index(phase) for phase in ("data", "forward", "backward")]
"""Phases whose collectives stay within a replica."""
COMPUTE = [PHASES.index(phase) for phase in ("forward", "backward")]
REDUCE = PHASES.index("reduce")

Figures = npt.NDArray[Any]


@dataclass(frozen=True)
class RankTimes:
    """Steps behind the warm-up, as every rank (or rank 0 alone) met them."""

    numbers: Sequence[int]
    """Of the steps."""
    seconds: Figures
    """(step, rank, phase)."""
    waits: Figures
    """Of `seconds` those in collectives; 0 where that is not known, but all of `reduce`, which is nothing else."""
    replica_world: int
    """Ranks of a replica, which are consecutive."""

    @property
    def num_ranks(self) -> int:
        """How many are measured."""
        return int(self.seconds.shape[1])

    @cached_property
    def step(self) -> float:
        """Median seconds of a step."""
        return float(np.median(self.seconds.sum(axis=2)))

    @cached_property
    def idle(self) -> Figures:
        """(step, rank, phase): waiting for others, what a rank waits beyond the one that waits least."""
        steps, _, phases = self.waits.shape
        idle: Figures = self.waits - self.waits.min(axis=1, keepdims=True)
        replicas = self.waits.reshape(steps, -1, self.replica_world, phases)
        within = (replicas - replicas.min(axis=2, keepdims=True)).reshape(self.waits.shape)
        idle[..., INSIDE] = within[..., INSIDE]
        return idle

    @cached_property
    def own(self) -> Figures:
        """(rank, phase): median seconds, without waiting for others."""
        own: Figures = np.median(self.seconds - self.idle, axis=0)
        return own

    @cached_property
    def usual(self) -> Figures:
        """(phase): own seconds of a rank in the middle; of two, of the faster one."""
        return lower_median(self.own)

    @cached_property
    def compute(self) -> Figures:
        """(step, rank, forward or backward): seconds without collectives."""
        compute: Figures = (self.seconds - self.waits)[..., COMPUTE]
        return compute

    @cached_property
    def slowness(self) -> Figures:
        """(step, rank): compute of a rank over that of the rank in the middle."""
        compute = self.compute.sum(axis=2)
        slowness: Figures = compute.T / np.maximum(lower_median(compute.T), 1e-12)
        return slowness.T


def lower_median(x: Figures) -> Figures:
    """The lower median along the first axis, that of ranks: one that is slow among two shall not be half of it."""
    middle: Figures = np.sort(x, axis=0)[(x.shape[0] - 1) // 2]
    return middle


def read_ranks(folder: Path, record: RunRecord) -> RankTimes:
    """What a run folder says of its ranks behind the warm-up; of rank 0 alone where it says nothing.

    Raises SpecError if the file is something else, or of another number of ranks than the job has.
    """
    path, grid, warm = folder / RANKS, Grid.of(record.job.strategy), steady(record.steps)
    most = MOST_FIGURES // (2 * len(PHASES) * grid.world) + 1
    lines = read_lines(path, Ranks, most)[0] if path.exists() else []
    for line in lines:
        for phase, row in (*line.seconds.items(), *line.waits.items()):
            if len(row) != grid.world:
                raise SpecError(f"{path}: step {line.step}, {phase}: of {len(row)} ranks, and the job has {grid.world}")
            if not (np.isfinite(row).all() and 0 <= min(row) and max(row) < LONGEST):
                raise SpecError(f"{path}: step {line.step}, {phase}: holds what is no time; remove the line")
    by_step = {line.step: line for line in lines}  # of a step that a resumed run repeats, the last
    counted = [by_step[s.number] for s in warm if s.number in by_step]
    return tabulate(counted, grid) if counted else alone(warm)


def tabulate(lines: Sequence[Ranks], grid: Grid) -> RankTimes:
    """Lines that have a figure for each rank of a grid, as arrays."""
    seconds, waits = (np.zeros((len(lines), grid.world, len(PHASES))) for _ in range(2))
    for place, line in enumerate(lines):
        for phase, name in enumerate(PHASES):
            seconds[place, :, phase] = line.seconds.get(name, 0.0)
            waits[place, :, phase] = line.waits.get(name, 0.0)
    waits[..., REDUCE] = seconds[..., REDUCE]
    return RankTimes([line.step for line in lines], seconds, waits, grid.replica_world)


def alone(steps: Sequence[Step]) -> RankTimes:
    """Rank 0, from its steps. What it waits for others is unknown, and nothing is taken off."""
    lines = [Ranks(step=s.number, seconds={phase: [x] for phase, x in s.seconds.items()}) for s in steps]
    return tabulate(lines, Grid(1, 1, 1, 1, 1))
