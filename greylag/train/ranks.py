"""Ranks: what steps took on every rank, gathered now and then, for rank 0 to write down.

One file with one writer. Thousands of ranks that each append to a file of their own would burden a shared file system,
and whoever reads would have to open them all; gathered, the figures need nothing but the groups that ranks have
anyway. They travel in one small all-reduce every few steps, at a place that every rank passes: behind the all-reduce
in which they agree on whether to stop. Figures are those of the steps before, so nothing waits for them.

They are shared before each checkpoint too, so a run that resumes has all of them up to there; steps that it repeats
are written again, and the last line of a step counts, as in `steps.jsonl`. A run that is killed loses those of its
last few steps at most.
"""

import torch

from greylag.parallel import World
from greylag.spec import Step
from greylag.spec.ranks import Ranks
from greylag.spec.step import PHASES
from greylag.train.folder import RunFolder

EVERY = 10
"""Steps between two gatherings at most."""
RANKS_A_STEP = 64
"""Of so many ranks each step is kept, of n times as many each n-th: the file grows by as much a step, a few KB."""


class RankLog:
    """Keeps this rank's seconds, and shares them. Every rank calls it after the same steps."""

    def __init__(self, world: World, folder: RunFolder) -> None:
        self.world, self.folder = world, folder
        self.stride = -(-world.grid.world // RANKS_A_STEP)
        self._steps: list[Step] = []

    def keep(self, step: Step, is_last: bool) -> None:
        """Keep a step, and share what was kept if it is time, or if this is the last before a checkpoint."""
        if self.world.grid.world > 1 and step.number % self.stride == 0:
            self._steps.append(step)
        if self._steps and (is_last or step.number % EVERY == 0):
            self._share()
            self._steps.clear()

    def _share(self) -> None:
        """One all-reduce over a table with zeros for other ranks; rank 0 writes it down, to the microsecond."""
        mine = [[s.seconds.get(p, 0.0) for p in PHASES] + [s.waits.get(p, 0.0) for p in PHASES] for s in self._steps]
        table = torch.zeros(self.world.grid.world, len(mine), 2 * len(PHASES), dtype=torch.float64)
        table[self.world.rank] = torch.tensor(mine, dtype=torch.float64)
        table = self.world.all_reduce(table.to(self.world.device))
        if self.world.is_first:
            rows = table.permute(1, 2, 0).round(decimals=6).tolist()
            for step, row in zip(self._steps, rows, strict=True):
                seconds, waits = _by_phase(row[: len(PHASES)]), _by_phase(row[len(PHASES) :])
                self.folder.append(Ranks(step=step.number, seconds=seconds, waits=waits))


def _by_phase(rows: list[list[float]]) -> dict[str, list[float]]:
    """A list for each phase that took time on some rank."""
    return {phase: row for phase, row in zip(PHASES, rows, strict=True) if any(row)}
