"""What steps took on every rank is written down: each step once, whatever stops and resumes the run."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec import json

from commands import steps_of
from greylag.parallel import ReplicaCommit, World, start
from greylag.spec import Job, Step
from greylag.spec.grid import Grid
from greylag.spec.ranks import Ranks
from greylag.spec.step import PHASES
from greylag.train import loop
from greylag.train.build import build
from greylag.train.folder import RunFolder
from greylag.train.ranks import RankLog
from jobs import SMALL_MOE, tiny_job


class Stopper:
    """A hook that asks to stop after a step, on the rank that has it."""

    def __init__(self, control: loop.Control, at: int) -> None:
        self.control, self.at = control, at

    def before(self, number: int) -> None:
        self.control.stop |= number == self.at

    def after(self, step: Step) -> None: ...

    def failed(self, error: BaseException) -> None: ...


class Silent(RankLog):
    """One that shares nothing."""

    def keep(self, step: Step, is_last: bool) -> None: ...


def fly(rank: int, world: int, job: Job, folder: str, stop_at: int, log: type[RankLog] = RankLog) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0)
    here, control = start(Grid.of(job.strategy), rank, store, torch.device("cpu")), loop.Control()
    hooks = [Stopper(control, stop_at)] if rank == world - 1 else []
    loop.RankLog = log  # the process ends with this run
    loop.fly(build(job, here), RunFolder(Path(folder)), ReplicaCommit(here), hooks, control)


def lines(folder: Path) -> list[Ranks]:
    return [json.decode(line, type=Ranks) for line in (folder / "ranks.jsonl").read_bytes().splitlines()]


def test_each_step_is_written_once_by_a_run_that_stops_and_resumes(ranks: Callable, tmp_path: Path) -> None:
    strategy = {"zero": 3, "replicas": 2}
    job = tiny_job(SMALL_MOE, dp=4, strategy=strategy, run={"steps": 16, "checkpoint_every": 4})
    ranks(4, fly, job, str(tmp_path), 5)
    assert [line.step for line in lines(tmp_path)] == [1, 2, 3, 4, 5]
    ranks(4, fly, job, str(tmp_path), 0)
    written = lines(tmp_path)
    assert [line.step for line in written] == list(range(1, 17))
    for line, step in zip(written, steps_of(tmp_path), strict=True):
        for rows, own in ((line.seconds, step.seconds), (line.waits, step.waits)):
            assert all(len(row) == 4 for row in rows.values())
            assert {p: rows.get(p, [0.0])[0] for p in PHASES} == pytest.approx(
                {p: own.get(p, 0.0) for p in PHASES}, abs=1e-6
            )
        for phase, row in line.waits.items():
            assert all(0 <= wait <= whole + 2e-6 for wait, whole in zip(row, line.seconds[phase], strict=True))
        assert {"forward", "backward", "other"} <= line.waits.keys()


def test_the_run_does_not_notice(ranks: Callable, tmp_path: Path) -> None:
    job = tiny_job(SMALL_MOE, "fp8-block128", dp=2, strategy={"zero": 3}, run={"steps": 3, "checkpoint_every": 1})
    ranks(2, fly, job, str(tmp_path / "with"), 0)
    ranks(2, fly, job, str(tmp_path / "without"), 0, Silent)
    assert not (tmp_path / "without" / "ranks.jsonl").exists()
    bits = [[(s.loss, s.grad_norm) for s in steps_of(tmp_path / name)] for name in ("with", "without")]
    assert bits[0] == bits[1]


class Alone(World):
    """Rank 0 of many, whose all-reduce gives back what it has."""

    def __init__(self, ranks: int) -> None:
        super().__init__(Grid(ranks, 1, 1, 1, 1), 0, torch.device("cpu"), None, None)
        self.shared = 0

    def all_reduce(self, x: torch.Tensor, op: object = None) -> torch.Tensor:
        self.shared += 1
        return x


@pytest.mark.parametrize(("num", "every", "shared"), [(1, 0, 0), (64, 1, 13), (65, 2, 13), (4096, 64, 2)])
def test_of_many_ranks_few_steps_are_kept(num: int, every: int, shared: int, tmp_path: Path) -> None:
    world = Alone(num)
    log = RankLog(world, RunFolder(tmp_path))
    for n in range(1, 130):
        log.keep(Step(source="measured", number=n, seconds={"forward": 1e-3 * n}, tokens=1, flops=1), n == 129)
    assert world.shared == shared
    if every:
        assert [line.step for line in lines(tmp_path)] == list(range(every, 130, every))
        assert lines(tmp_path)[-1].seconds == {
            "forward": [pytest.approx(lines(tmp_path)[-1].step * 1e-3)] + [0.0] * (num - 1)
        }
