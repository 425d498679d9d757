"""The loop's seams, and what it does with numbers that are not finite."""

from pathlib import Path

import pytest
import torch
from msgspec import json

from greylag.parallel import ReplicaCommit, start
from greylag.spec import Finding, Job, Step
from greylag.spec.grid import Grid
from greylag.spec.job import Run
from greylag.train.build import build
from greylag.train.folder import RunFolder
from greylag.train.loop import Control, fly
from greylag.train.optim import learning_rate
from jobs import SMALL_MOE, tiny_job


class Watcher:
    """A hook that writes down what it was told, and spoils a weight before a step if asked to."""

    def __init__(self, flight, spoil_at: int = 0) -> None:
        self.flight, self.spoil_at, self.calls = flight, spoil_at, []

    def before(self, number: int) -> None:
        self.calls.append(("before", number))
        if number == self.spoil_at:
            self.weight = self.flight.model.layers[0].ffn.w_down.weight
            self.whole = self.weight.detach().clone()
            with torch.no_grad():
                self.weight[0, 0] = float("inf")

    def after(self, step: Step) -> None:
        self.calls.append(("after", step.number, step.skipped))
        if step.number == self.spoil_at:
            changed = (self.weight.detach() != self.whole).sum().item()
            self.calls.append(("changed", changed))
            with torch.no_grad():
                self.weight.copy_(self.whole)

    def failed(self, error: BaseException) -> None:
        self.calls.append(("failed", str(error)))


class Refusal(ReplicaCommit):
    """A commit that votes no on step 2."""

    def begin(self, number: int) -> None:
        self.number = number

    def vote(self, healthy: bool) -> bool:
        return super().vote(healthy and self.number != 2)


def watch(rank: int, world: int, job: Job, folder: str, spoil_at: int, refuse: bool) -> list:
    store = torch.distributed.TCPStore("127.0.0.1", int(__import__("os").environ["MASTER_PORT"]), is_master=rank == 0)
    here = start(Grid.of(job.strategy), rank, store, torch.device("cpu"))
    flight = build(job, here)
    hook = Watcher(flight, spoil_at)
    run = RunFolder(Path(folder))
    fly(flight, run, (Refusal if refuse else ReplicaCommit)(here), [hook], Control())
    return hook.calls


def test_hooks_are_told_of_every_step(ranks, tmp_path: Path) -> None:
    (calls,) = ranks(1, watch, tiny_job(SMALL_MOE, run={"steps": 2}), str(tmp_path), 0, False)
    assert calls == [("before", 1), ("after", 1, False), ("before", 2), ("after", 2, False)]


@pytest.mark.parametrize("precision", ["fp8-block128", "fp8-tensor-delayed"])
def test_inf_before_the_cast_skips_the_step_and_is_reported(precision: str, ranks, tmp_path: Path) -> None:
    job = tiny_job(SMALL_MOE, precision, run={"steps": 3})
    (calls,) = ranks(1, watch, job, str(tmp_path), 2, False)
    assert ("after", 2, True) in calls
    assert ("changed", 1) in calls  # only what the test spoilt: no update was applied
    assert ("after", 3, False) in calls
    findings = [json.decode(line, type=Finding) for line in (tmp_path / "findings.jsonl").read_bytes().splitlines()]
    assert findings[0].step == 2
    assert "layers.0.ffn.w_down" in findings[0].where


def test_a_commit_that_votes_no_keeps_the_weights(ranks, tmp_path: Path) -> None:
    for calls in ranks(2, watch, tiny_job(SMALL_MOE, dp=2, run={"steps": 3}), str(tmp_path), 0, True):
        assert [c[2] for c in calls if c[0] == "after"] == [False, True, False]


def test_learning_rate_warms_up_and_follows_a_cosine() -> None:
    run = Run(steps=110, warmup_steps=10, learning_rate=1.0, min_learning_rate=0.1)
    assert learning_rate(run, 1) == pytest.approx(0.1)
    assert learning_rate(run, 10) == 1.0
    assert learning_rate(run, 60) == pytest.approx(0.55)
    assert learning_rate(run, 110) == pytest.approx(0.1)
